"""The variants of the portable kernels that are compiled without a GPU, to read and to check."""

from __future__ import annotations

from streamla.arch import ARCHS, Arch
from streamla.kernels.portable.attention import compile_options as attention_options
from streamla.kernels.portable.attention import cost_model, mla_attention_kernel
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


def offline_variants(target: str) -> list[TritonVariant]:
    arch = next(a for a in ARCHS if a.target == target)
    variants = [_attention(spec, target, arch) for spec in _ATTENTION]
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
