"""The grammars: one table of the attention kernels that decode meets, and of their helpers.

Order matters: the first family whose pattern is in the name owns it.
"""

from __future__ import annotations

from streamla.doctor.names.grammar import ATTENTION, Family, Part

# aiter's assembly kernels: X bits of query, Y bits of cache, M rows per wave x waves.
_AITER = (
    Part(r"a(?:16)w(?:16)", {"q_dtype": "bf16", "kv_dtype": "bf16"}, "bf16 query, bf16 cache"),
    Part(r"a(?:16)w(?:8)", {"q_dtype": "bf16", "kv_dtype": "fp8"}, "bf16 query, fp8 cache"),
    Part(r"a(?:8)w(?:8)", {"q_dtype": "fp8", "kv_dtype": "fp8"}, "fp8 query, fp8 cache"),
    Part(r"m(?P<wave_rows>\d+)x(?P<waves>\d+)", {}, "{waves} waves x {wave_rows} rows of (query x head)"),
    Part(r"(?P<wave_rows>\d+)mx(?P<waves>\d+)", {}, "{waves} waves x {wave_rows} rows of (query x head)"),
    Part(r"n(?P<wave_n>\d+)x(?P<waves_n>\d+)", {}, "{wave_n} cache tokens a step x {waves_n} waves"),
    Part(r"(?P<wave_n>\d+)nx(?P<waves_n>\d+)", {}, "{wave_n} cache tokens a step x {waves_n} waves"),
    Part(r"gqaratio(?P<gqa_heads>\d+)", {}, "{gqa_heads} query heads per cache head"),
    Part(r"mqa(?P<gqa_heads>\d+)", {}, "{gqa_heads} query heads per cache head"),
    Part(r"qh(?P<qh>\d+)", {}, "built for {qh} query heads"),
    Part(r"subq(?P<tile_rows>\d+)", {}, "{tile_rows} rows per workgroup"),
    Part(r"qseqlen(?P<tile_q_rows>\d+)", {}, "{tile_q_rows} query rows a request"),
    Part(r"q(?P<tile_q_rows>\d+)", {}, "{tile_q_rows} query rows a request"),
    Part(r"ps", {"persistent": True}, "persistent: one workgroup per CU, work from a list"),
    Part(r"np", {"persistent": False}, "not persistent"),
    Part(r"coex(?P<coex>\d)", {}, "co-execution variant {coex}"),
    Part(r"(?:mask|msk)1|causal", {}, "causal mask"),
    Part(r"(?:mask|msk)0", {}, "no mask"),
    Part(r"lse", {}, "also writes the final LSE"),
    Part(r"cprr", {}, "context-parallel round robin"),
    Part(r"ds32", {"kv_dtype": "fp8_ds_mla"}, "656-byte DeepSeek-V3.2 rows"),
    Part(r"page(?P<page>\d+)", {}, "pages of {page} tokens"),
    Part(r"v(?P<revision>\d)", {}, "revision {revision}"),
    Part(r"(?P<workgroups>\d)tg", {}, "{workgroups} workgroup(s) a tile"),
    Part(r"(?P<wave_count>\d)w", {}, "{wave_count} waves"),
    Part(r"bf16|fp16|fp8", {}, "type of the query and the output"),
    Part(r"stage1", {}, "the split stage; another kernel merges"),
    Part(r"pfl", {"role": "prefill"}, "prefill"),
    Part(r"mla|dec", {}),
)  # fmt: skip

# trtllm-gen: the name is a list of CamelCase words; Q is the height of the tile.
_TRTLLM = (
    Part(r"Qkv(?P<q_dtype>Bfloat16|Fp16|E4m3|E2m1)", {}, "query and cache {q_dtype}"),
    Part(r"Q(?P<q_dtype>Bfloat16|Fp16|E4m3|E2m1)Kv(?P<kv_dtype>Bfloat16|Fp16|E4m3|E2m1)", {},
         "query {q_dtype}, cache {kv_dtype}"),
    Part(r"O(?P<o_dtype>Bfloat16|Fp16|E4m3|E2m1)", {}, "output {o_dtype}"),
    Part(r"HQk576HV512", {"mla": True}, "absorbed MLA: 576 wide keys, 512 wide values"),
    Part(r"HQk(?P<dk>\d+)HV(?P<dv>\d+)", {"mla": False}, "keys {dk} wide, values {dv}: not absorbed MLA"),
    Part(r"HVPerCta(?P<dv_cta>\d+)", {}, "{dv_cta} value columns a CTA"),
    Part(r"H(?P<head_dim>\d+)", {"mla": False}, "head dimension {head_dim}: not absorbed MLA"),
    Part(r"PagedKv", {}, "paged cache"),
    Part(r"(?:SeparateQkv|PackedQkv|ContiguousKv)", {}, "cache not paged"),
    Part(r"StaticTokenSparse", {}, "sparse: a list of tokens"),
    Part(r"(?:SlidingOrChunkedCausal|Causal|Dense|Custom)", {}, "mask"),
    Part(r"MultiCtasKv(?:Cga)?", {"split": True}, "a request is split over CTAs"),
    Part(r"VarSeq", {}, "ragged lengths"),
    Part(r"SkipsSoftmax", {}, "skips softmax of negligible tiles"),
    Part(r"Q(?P<tile_rows>\d+)", {}, "tile of {tile_rows} rows of (query x head)"),
    Part(r"Kv(?P<tile_kv>\d+)", {}, "{tile_kv} tokens a step"),
    Part(r"P(?P<page>\d+)", {}, "pages of {page} tokens"),
    Part(r"Persistent", {"persistent": True}, "persistent"),
    Part(r"Static", {"persistent": False}, "one tile a CTA"),
    Part(r"2Cta", {}, "pairs of CTAs"),
    Part(r"Grouped", {}, "heads grouped"),
    Part(r"SwapsAbForGen", {}, "heads on the small side of the MMA"),
    Part(r"KeepsAbForGen", {}, "heads on the large side of the MMA"),
    Part(r"Context", {"role": "prefill"}, "prefill"),
)  # fmt: skip

_C = r"cute::C<{}>"
_FA3_TILE = (
    rf"cute::tuple<{_C.format('(?P<tile_rows>[0-9]+)')}, {_C.format('(?P<tile_kv>[0-9]+)')}, "
    rf"{_C.format('[0-9]+')} ?>, (?P<dv>\d+), (?P<q_dtype>[\w:]+), float, [\w:]+Sm\d+, "
)
_BOOLS = r"(?:\w+, ){{{}}}"

FAMILIES: tuple[Family, ...] = (
    # aiter
    Family("aiter-asm-mla", ATTENTION, r"(?i)(?:^|::)mla_(?:a\d+w\d+|dec_stage1|pfl)_",
           {"split": True, "merge": "kn_mla_reduce_v1, or a Triton stage 2", "mla": True},
           _AITER, {"persistent": False}, "_"),
    Family("aiter-mla-reduce", "merge", r"mla_reduce_v1|_fwd_kernel_stage2_asm"),
    Family("aiter-mla-plan", "plan", r"get_mla_metadata_v1|kn_get_mla_metadata"),
    Family("aiter-gluon-mla", ATTENTION, r"(?:^|::)_?mla_gluon",
           {"mla": True, "grid_axes": ("request", "split", "head group")},
           note="the name carries no shape: see the grid"),
    # FlashMLA and its forks
    Family("flashmla", "plan", r"get_mla_metadata_kernel"),
    Family("flashmla", "merge", r"flash_fwd_(?:splitkv_)?mla_combine_kernel"),
    Family("flashmla-sparse", ATTENTION, r"flash_fwd_splitkv_mla_fp8_sparse_kernel",
           {"q_dtype": "bf16", "kv_dtype": "fp8", "split": True, "persistent": True, "mla": True,
            "merge": "flash_fwd_mla_combine_kernel"},
           (Part(r"KernelTemplate<\(\w+\)\d+, (?P<tile_heads>64|128)>", {"tile_q_rows": 1},
                 "built for {tile_heads} heads"),
            Part(r"::head(?P<tile_heads>64|128)::", {"tile_q_rows": 1}, "built for {tile_heads} heads")),
           note="reads a list of tokens, not a range"),
    Family("flashmla", ATTENTION, r"flash_fwd_splitkv_mla_kernel",
           {"tile_rows": 64, "split": True, "persistent": True, "mla": True,
            "merge": "flash_fwd_mla_combine_kernel"},
           (Part(r"kernel_traits_mla<\d+, (?P<tile_rows>\d+), (?P<tile_kv>\d+), \d+, (?P<q_dtype>[\w:]+)", {},
                 "tile of {tile_rows} rows x {tile_kv} tokens; query and cache {q_dtype}"),
            Part(r"Traits<(?P<q_dtype>[\w:]+), \d+>", {}, "query and cache {q_dtype}"))),
    # FlashAttention
    Family("fa3", "plan", r"prepare_varlen_num_blocks_kernel"),
    Family("fa3", "merge", r"FlashAttnFwdCombine"),
    Family("fa3", ATTENTION, r"FlashAttnFwdSm90",
           {},
           (Part(_FA3_TILE + _BOOLS.format(6) + r"true", {"mla": True},
                 "tile of {tile_rows} rows x {tile_kv} tokens; query and cache {q_dtype}; absorbed MLA (qv)"),
            Part(_FA3_TILE + _BOOLS.format(6) + r"false", {"mla": False},
                 "tile of {tile_rows} rows x {tile_kv} tokens; query and cache {q_dtype}; not absorbed MLA"),
            Part(_FA3_TILE + _BOOLS.format(9) + r"true", {"packed": True}, ""),
            Part(_FA3_TILE + _BOOLS.format(9) + r"false", {"packed": False}, ""),
            Part(_FA3_TILE + _BOOLS.format(10) + r"true", {"split": True, "merge": "FlashAttnFwdCombine"}, ""),
            Part(_FA3_TILE + _BOOLS.format(10) + r"false", {"split": False}, ""),
            Part(r"\w*PersistentTileScheduler", {"persistent": True}, "persistent"),
            Part(r"::SingleTileScheduler", {"persistent": False}, "one tile a CTA"))),
    Family("fa2", "merge", r"flash_fwd_splitkv_combine_kernel"),
    Family("fa2", ATTENTION, r"flash_fwd_splitkv_kernel", {"mla": False, "split": True, "persistent": False},
           (Part(r"Flash_fwd_kernel_traits<\d+, (?P<tile_rows>\d+), (?P<tile_kv>\d+), \d+, \w+, \w+, (?P<q_dtype>[\w:]+)",
                 {}, "tile of {tile_rows} rows x {tile_kv} tokens, {q_dtype}"),)),
    Family("fa2", "prefill", r"flash_fwd_kernel"),
    # FlashInfer
    Family("flashinfer-mla-fa3", ATTENTION, r"BatchMLAPageAttentionHopperKernel",
           {"persistent": True, "split": True, "merge": "in the same kernel", "mla": True},
           (Part(r"HopperKernelTraits<\w+, \d+, \d+, \d+, (?P<tile_rows>\d+), (?P<tile_kv>\d+), "
                 r"(?P<q_dtype>\w+), (?P<kv_dtype>\w+)", {},
                 "tile of {tile_rows} rows x {tile_kv} tokens; query {q_dtype}, cache {kv_dtype}"),)),
    Family("flashinfer-mla-fa2", ATTENTION, r"BatchMLAPagedAttentionKernel",
           {"persistent": True, "split": True, "merge": "in the same kernel", "mla": True},
           (Part(r"KernelTraits<\w+, \d+, \w+, \d+, \d+, (?P<tile_rows>\d+), (?P<tile_kv>\d+), "
                 r"(?P<q_dtype>\w+), (?P<kv_dtype>\w+)", {},
                 "tile of {tile_rows} rows x {tile_kv} tokens; query {q_dtype}, cache {kv_dtype}"),)),
    Family("flashinfer", ATTENTION, r"Batch(?:Decode|Prefill)With(?:Paged|Ragged)KVCache", {"mla": False}),
    # Triton: vLLM's and SGLang's kernels share their ancestry, names and grid
    Family("triton-mla", ATTENTION, r"(?:^|::)_fwd_grouped_kernel_stage1(?:_rope)?\b",
           {"tile_heads": 16, "tile_q_rows": 1, "split": True, "persistent": False, "merge": "_fwd_kernel_stage2",
            "mla": True, "grid_axes": ("request", "head group", "split")},
           note="vLLM's and SGLang's share the name; it carries no dtypes"),
    Family("triton-mla", ATTENTION, r"(?:^|::)_fwd_kernel_stage1\b",
           {"tile_heads": 1, "tile_q_rows": 1, "split": True, "persistent": False, "merge": "_fwd_kernel_stage2",
            "grid_axes": ("request", "head", "split")},
           note="one head a program: the cache is read once for each head"),
    Family("triton-mla", "merge", r"(?:^|::)_fwd_kernel_stage2\b"),
    # CUTLASS, Blackwell
    Family("cutlass-mla", ATTENTION, r"Sm100FmhaMlaKernelTmaWarpspecialized",
           {"split": True, "merge": "Sm100FmhaMlaReductionKernel", "mla": True},
           (Part(r"Warpspecialized<cute::tuple<cute::C<(?P<tile_heads>\d+)>, cute::C<(?P<tile_kv>\d+)>",
                 {"tile_q_rows": 1}, "tile of {tile_heads} heads x {tile_kv} tokens"),
            Part(r"> ?> ?>, (?P<q_dtype>cutlass::\w+), float", {}, "query and cache {q_dtype}"),
            Part(r"Sm100MlaPersistentTileScheduler", {"persistent": True}, "persistent"),
            Part(r"Sm100MlaIndividualTileScheduler", {"persistent": False}, "one tile a CTA"))),
    Family("cutlass-mla", "merge", r"Sm100FmhaMlaReductionKernel"),
    Family("trtllm-gen", ATTENTION, r"[Ff]mhaSm\d+[af]?Kernel_", {}, _TRTLLM, {"split": False}, "camel"),
    # TileLang names a kernel after its Python function
    Family("tilelang", "merge", r"(?:^|::)main_split_kernel_1\b"),
    Family("tilelang", ATTENTION, r"(?:^|::)main_split_kernel\b", {"split": True},
           note="TileLang's decode examples share this name; it carries no shape"),
    Family("tilelang", ATTENTION, r"(?:^|::)main_no_split_kernel\b", {"split": False},
           note="TileLang's decode examples share this name; it carries no shape"),
    Family("tilelang", "unknown", r"(?:^|::)main_kernel\b", note="TileLang's default name for any kernel"),
)  # fmt: skip
