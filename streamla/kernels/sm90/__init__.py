"""Hopper: CUDA C++ for fp8_e4m3fn, fp8_ds_mla and bf16 caches, compiled by NVRTC at first use.

Over fp8_e4m3fn, up to 32 query rows a request go to `narrow`, more to `wide`; fp8_ds_mla goes to `ds_mla`, and
up to 32 rows over bf16 to `bf16`. All take the plan of the portable planner. The epilogue serves every format.
"""

from __future__ import annotations

from types import ModuleType

import torch

from streamla.arch import Arch
from streamla.kernels.portable.plan import plan
from streamla.kernels.sm90 import bf16, ds_mla, narrow, wide
from streamla.kernels.sm90.epilogue import epilogue, warm_epilogue
from streamla.kernels.sm90.epilogue import why_not as why_no_epilogue
from streamla.kernels.sm90.merge import merge
from streamla.kernels.sm90.merge import warmup as warm_merge
from streamla.plan import CostModel, DecodePlan
from streamla.spec import KVFormat, MLASpec
from streamla.step import NewTokens

__all__ = [
    "attention",
    "cost_model",
    "decode",
    "decode_step",
    "epilogue",
    "merge",
    "plan",
    "warm_epilogue",
    "warmup",
    "why_no_epilogue",
    "why_not",
    "why_two_launches",
]

MAX_NARROW_ROWS = 32


def why_not(spec: MLASpec, arch: Arch) -> str | None:
    """None if these kernels serve `spec` on `arch`, else the reason as a sentence."""
    if spec.kv_format not in (KVFormat.FP8_E4M3FN, KVFormat.FP8_DS_MLA, KVFormat.BF16):
        return f"needs an fp8_e4m3fn, fp8_ds_mla or bf16 cache, this is {spec.kv_format.value}"
    if spec.kv_format is KVFormat.BF16 and spec.rows > MAX_NARROW_ROWS:
        return (
            f"needs at most {MAX_NARROW_ROWS} query rows over a bf16 cache, these are {spec.rows}"
        )
    if spec.kv_format is KVFormat.FP8_DS_MLA and spec.rows > ds_mla.MAX_ROWS:
        return f"needs at most {ds_mla.MAX_ROWS} query rows over fp8_ds_mla, these are {spec.rows}"
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) != (512, 64):
        return f"needs rows of 512 + 64, these are {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
    row_tiles = _kernels(spec).num_row_tiles(spec)
    if row_tiles > arch.units:  # programs wait for each other, so all must be resident
        return f"needs at most {arch.units} tiles of query rows, one an SM, these are {row_tiles}"
    return None


def why_two_launches(spec: MLASpec) -> str | None:
    """None if `decode_step` needs no epilogue, else the reason as a sentence."""
    if _kernels(spec) is narrow:
        return None
    return "its attention takes the whole query and a cache that is complete"


def _kernels(spec: MLASpec) -> ModuleType:
    if spec.kv_format is KVFormat.BF16:
        return bf16
    if spec.kv_format is KVFormat.FP8_DS_MLA:
        return ds_mla
    return narrow if spec.rows <= MAX_NARROW_ROWS else wide


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return _kernels(spec).cost_model(spec, arch)


def attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    page_table: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_scale: float,
) -> None:
    _kernels(plan.spec).attend(
        q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale,
        merges=False,
    )  # fmt: skip


def decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    page_table: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_scale: float,
) -> None:
    _kernels(plan.spec).attend(
        q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale,
        merges=True,
    )  # fmt: skip


def decode_step(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    new: NewTokens,
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    page_table: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_scale: float,
) -> None:
    """Epilogue, attention and merge in one launch, where `why_two_launches` says None."""
    narrow.decode_step(
        q_nope, q_pe, new, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale
    )  # fmt: skip


def warmup(spec: MLASpec, batch_sizes: list[int], device: torch.device) -> None:
    """Compile and load what `spec` needs; the batch size is no compile-time fact."""
    with torch.cuda.device(device):
        _kernels(spec).warmup(spec)
        warm_merge(spec)
