"""The variants of the portable kernels that are compiled without a GPU, to read and to check."""

from __future__ import annotations

from streamla.arch import ARCHS, Arch
from streamla.kernels.portable.attention import compile_options as attention_options
from streamla.kernels.portable.attention import cost_model, mla_attention_kernel
from streamla.kernels.portable.epilogue import compile_options as epilogue_options
from streamla.kernels.portable.epilogue import mla_epilogue_kernel
from streamla.kernels.portable.merge import BLOCK_D, BLOCK_S, mla_merge_kernel
from streamla.kernels.portable.plan import compile_options as plan_options
from streamla.kernels.portable.plan import mla_plan_by_length_kernel, mla_plan_kernel
from streamla.runtime.offline import TritonVariant
from streamla.spec import KVFormat, MLASpec

_STORED = {
    KVFormat.BF16: "*bf16",
    KVFormat.FP8_E4M3FN: "*fp8e4nv",
    KVFormat.FP8_E4M3FNUZ: "*fp8e4b8",
    KVFormat.FP8_DS_MLA: "*fp8e4nv",
}

# (spec, causal): each meets a branch that the others do not.
_ATTENTION = (
    MLASpec(16, KVFormat.FP8_E4M3FN),
    MLASpec(16, KVFormat.FP8_E4M3FNUZ),
    MLASpec(16, KVFormat.BF16),
    MLASpec(16, KVFormat.FP8_DS_MLA),
    MLASpec(16, KVFormat.FP8_E4M3FN, page_size=1),
    MLASpec(8, KVFormat.FP8_E4M3FN, seqlen_q=4),
    MLASpec(128, KVFormat.FP8_E4M3FN),
)

# (spec, query format, whether it rotates), likewise.
_EPILOGUE = (
    (MLASpec(16, KVFormat.BF16), KVFormat.BF16, True),
    (MLASpec(16, KVFormat.BF16), KVFormat.BF16, False),
    (MLASpec(16, KVFormat.FP8_E4M3FN), KVFormat.BF16, True),
    (MLASpec(16, KVFormat.FP8_E4M3FN), KVFormat.FP8_E4M3FN, True),
    (MLASpec(16, KVFormat.FP8_E4M3FNUZ), KVFormat.FP8_E4M3FNUZ, True),
    (MLASpec(16, KVFormat.FP8_DS_MLA), KVFormat.BF16, True),
)


def offline_variants(target: str) -> list[TritonVariant]:
    arch = next(a for a in ARCHS if a.target == target)
    variants = [_attention(spec, target, arch) for spec in _ATTENTION]
    variants += [_epilogue(*rest[:2], target, rest[2]) for rest in _EPILOGUE]
    return [*variants, _merge(), *_plans(arch)]


def _attention(spec: MLASpec, target: str, arch: Arch) -> TritonVariant:
    constants = attention_options(spec, target, interpreted=False)
    num_warps, num_stages = constants.pop("num_warps"), constants.pop("num_stages")
    if constants["DECODE_FNUZ"]:
        stored = "*u8"
    else:
        stored = _STORED[spec.kv_format]
    rope = "*bf16" if spec.kv_format is KVFormat.FP8_DS_MLA else stored
    constants |= {
        "TILE_N": cost_model(spec, arch).tile_n,
        "CAUSAL": True,
        "ALIGNED": True,
    }
    i64 = "i64"
    signature = {
        "q_nope": "*bf16:16", "q_b": i64, "q_s": i64, "q_h": i64,
        "q_pe": "*bf16:16", "pe_b": i64, "pe_s": i64, "pe_h": i64,
        "latents": stored + ":16", "ropes": rope + ":16", "group_scales": "*fp32",
        "page_bytes": i64, "token_bytes": i64,
        "k_scale": "*fp32",
        "page_table": "*i32", "page_table_b": i64,
        "work": "*i32", "work_indptr": "*i32",
        "out": "*bf16:16", "out_b": i64, "out_s": i64, "out_h": i64,
        "lse": "*fp32", "lse_b": i64, "lse_s": i64, "lse_h": i64,
        "out_partial": "*fp32:16", "lse_partial": "*fp32",
        "softmax_scale_log2": "fp32", "lse_scale": "fp32",
    }  # fmt: skip
    name = f"{spec.kv_format.value}-h{spec.num_heads}-q{spec.seqlen_q}-p{spec.page_size}"
    return TritonVariant(
        f"portable/attention/{name}",
        mla_attention_kernel,
        signature,
        constants,
        num_warps,
        num_stages,
    )


def _merge() -> TritonVariant:
    signature = {
        "out": "*bf16:16", "out_b": "i64", "out_s": "i64", "out_h": "i64",
        "lse": "*fp32", "lse_b": "i64", "lse_s": "i64", "lse_h": "i64",
        "out_partial": "*fp32:16", "lse_partial": "*fp32", "split_indptr": "*i32",
        "lse_scale": "fp32",
    }  # fmt: skip
    constants = {"NUM_HEADS": 16, "ROWS": 16, "D": 512}
    constants |= {"BLOCK_D": BLOCK_D, "BLOCK_S": BLOCK_S}
    return TritonVariant("portable/merge/h16", mla_merge_kernel, signature, constants)


def _plans(arch: Arch) -> list[TritonVariant]:
    buffers = ("cache_seqlens", "work", "work_indptr", "split_indptr", "status", "counters")
    signature = dict.fromkeys(buffers, "*i32")
    signature |= dict.fromkeys(("batch", "num_items", "max_seqlen"), "i32")
    cost = cost_model(_ATTENTION[0], arch)
    return [
        TritonVariant(f"portable/plan/{name}", fn, signature, plan_options(cost, invariant))
        for name, fn, invariant in (
            ("even", mla_plan_kernel, False),
            ("by-length", mla_plan_by_length_kernel, True),
        )
    ]


def _epilogue(spec: MLASpec, q_format: KVFormat, target: str, has_rope: bool) -> TritonVariant:
    constants = epilogue_options(
        spec, q_format, target, has_rope=has_rope,
        has_q_scale=q_format.has_scale, has_k_scale=spec.kv_format.has_scale,
    )  # fmt: skip
    num_warps, fusion = constants.pop("num_warps"), constants.pop("enable_fp_fusion")
    constants["ALIGNED"] = True
    is_bf16 = spec.kv_format is KVFormat.BF16
    latents = "*bf16:16" if is_bf16 else "*u8:16"
    ropes = "*u8" if spec.kv_format.has_scale else "*bf16"
    group_scales = "*fp32" if spec.kv_format is KVFormat.FP8_DS_MLA else ropes
    signature = {
        "q_nope": "*bf16:16", "q_nope_t": "i64", "q_nope_h": "i64",
        "q_pe": "*bf16", "q_pe_t": "i64", "q_pe_h": "i64",
        "kv_c": "*bf16:16", "kv_c_t": "i64", "k_pe": "*bf16", "k_pe_t": "i64",
        "latents": latents, "ropes": ropes, "group_scales": group_scales,
        "page_bytes": "i64", "token_bytes": "i64", "page_size": "i64", "pool_slots": "i64",
        "slot_mapping": "*i64", "num_slots": "i64", "reserved_slot": "i64",
        "positions": "*i64", "cos_sin": "*fp32", "cos_sin_t": "i64", "num_positions": "i64",
        "pair_step": "i32", "pair_distance": "i32",
        "q_scale": "*fp32", "k_scale": "*fp32",
        "q_out": "*bf16:16" if q_format is KVFormat.BF16 else "*u8:16",
        "q_out_t": "i64", "q_out_h": "i64", "num_heads": "i32",
    }  # fmt: skip
    rope = "rope" if has_rope else "nope"
    name = f"{spec.kv_format.value}-q-{q_format.value}-{rope}"
    return TritonVariant(
        f"portable/epilogue/{name}", mla_epilogue_kernel, signature, constants, num_warps,
        options={"enable_fp_fusion": fusion},
    )  # fmt: skip
