"""Hopper attention for up to 32 query rows over a bf16 cache, with or without its merge
(docs/attention-sm90-bf16.md)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from streamla.arch import Arch
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.driver import F32, I32, I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.runtime.offline import CudaVariant
from streamla.spec import KVFormat, MLASpec

SOURCE = Path(__file__).with_name("attention_bf16.cu")

TILE_N = 64
RUN = 8
STAGE_BYTES = 36992
THREADS = 384
MERGE_THREADS = 128
COPY_ALIGNMENT = 16  # bytes: what a bulk copy needs of addresses and sizes

_VIEW = (PTR, I64, I64, I64)
_PARAMS = (
    *_VIEW, *_VIEW, I32,               # q_nope, q_pe, aligned
    PTR, I64, I64,                     # kv_cache, page stride, token stride
    PTR, I64, PTR, PTR, PTR,           # page_table, its stride, work, work_indptr, counters
    *_VIEW, I32, *_VIEW, PTR, PTR,     # out, aligned, lse, out_partial, lse_partial
    F32, I32, F32,                     # softmax_scale, causal, lse_scale
)  # fmt: skip
_MERGE_PARAMS = (PTR, *_VIEW, I32, *_VIEW, PTR, PTR, F32)


@dataclass(frozen=True)
class Variant:
    """What one cubin is compiled for.

    Attributes:
        run: tokens of one bulk copy.
    """

    num_heads: int
    seqlen_q: int
    page_size: int
    run: int

    @staticmethod
    def of(spec: MLASpec, contiguous_tokens: bool = True) -> Variant:
        """The variant for a cache whose tokens follow each other in a page without a gap, or with."""
        run = math.gcd(spec.page_size, RUN) if contiguous_tokens else 1
        return Variant(spec.num_heads, spec.seqlen_q, spec.page_size, run)

    @property
    def defines(self) -> dict[str, int]:
        return {
            "STREAMLA_NUM_HEADS": self.num_heads,
            "STREAMLA_SEQLEN_Q": self.seqlen_q,
            "STREAMLA_PAGE_SIZE": self.page_size,
            "STREAMLA_RUN": self.run,
            "STREAMLA_SHARED_BYTES": self.shared_bytes,
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a program: bf16_tile.cuh lays it out and checks this sum."""
        rows = -(-self.num_heads * self.seqlen_q // 8) * 8
        stages = 5 if rows <= 24 else 4
        query = 9 * rows * 128
        probabilities, scores = 2 * TILE_N * rows * 2, TILE_N * rows * 4
        maxima_and_sums, barriers = 2 * rows * 8 * 4, 2 * stages * 8
        return (
            query
            + stages * STAGE_BYTES
            + probabilities
            + scores
            + maxima_and_sums
            + barriers
            + 1024
        )

    def cubin(self) -> bytes:
        return compile_cuda(SOURCE, defines=self.defines)


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(tile_n=TILE_N, num_programs=arch.units, overhead_tiles=1)


@functools.cache
def attention_kernel(variant: Variant) -> Kernel:
    return Kernel(
        variant.cubin,
        "mla_attention_bf16",
        _PARAMS,
        threads=THREADS,
        shared_bytes=variant.shared_bytes,
        cooperative=True,
    )


@functools.cache
def merge_kernel(variant: Variant) -> Kernel:
    return Kernel(variant.cubin, "mla_merge_bf16", _MERGE_PARAMS, threads=MERGE_THREADS)


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
    """Finish requests that were not split; leave partials of the others."""
    _launch(
        q_nope, q_pe, kv_cache, page_table, plan, out, lse, softmax_scale, causal, lse_scale, False
    )


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
    """Attention and merge in one launch."""
    _launch(
        q_nope, q_pe, kv_cache, page_table, plan, out, lse, softmax_scale, causal, lse_scale, True
    )


def _launch(
    q_nope, q_pe, kv_cache, page_table, plan, out, lse, softmax_scale, causal, lse_scale, merges
) -> None:  # fmt: skip
    page_stride, token_stride = (2 * s for s in kv_cache.stride()[:2])
    _check_cache(kv_cache, page_stride, token_stride)
    variant = Variant.of(plan.spec, token_stride == plan.spec.row_bytes)
    attention_kernel(variant).launch(
        plan.cost.num_programs,
        q_nope.data_ptr(), *q_nope.stride()[:3], q_pe.data_ptr(), *q_pe.stride()[:3],
        _rows_aligned(q_nope) and _rows_aligned(q_pe),
        kv_cache.data_ptr(), page_stride, token_stride, page_table.data_ptr(), page_table.stride(0),
        plan.work.data_ptr(), plan.work_indptr.data_ptr(),
        plan.counters.data_ptr() if merges else 0,
        out.data_ptr(), *out.stride()[:3], _rows_aligned(out), lse.data_ptr(), *lse.stride(),
        plan.out_partial.data_ptr(), plan.lse_partial.data_ptr(),
        softmax_scale, causal, lse_scale,
        device=out.device.index,
    )  # fmt: skip


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, lse_scale: float) -> None:
    """Finish the split requests from their partials, in a launch of its own."""
    merge_kernel(Variant.of(plan.spec)).launch(
        (plan.spec.rows, plan.batch, 1),
        plan.split_indptr.data_ptr(),
        out.data_ptr(), *out.stride()[:3], _rows_aligned(out), lse.data_ptr(), *lse.stride(),
        plan.out_partial.data_ptr(), plan.lse_partial.data_ptr(), lse_scale,
        device=out.device.index,
    )  # fmt: skip


def _rows_aligned(t: torch.Tensor) -> bool:
    """Whether every row of a bf16 tensor starts at a multiple of 16 bytes."""
    return not (t.data_ptr() % 16 or any(s % 8 for s in t.stride()[:3]))


def _check_cache(kv_cache: torch.Tensor, page_stride: int, token_stride: int) -> None:
    if (
        kv_cache.data_ptr() % COPY_ALIGNMENT
        or page_stride % COPY_ALIGNMENT
        or token_stride % COPY_ALIGNMENT
    ):
        raise ValueError(
            f"kv_cache: need rows that start at a multiple of {COPY_ALIGNMENT} bytes for impl='sm90'; got "
            f"address {kv_cache.data_ptr():#x}, strides {tuple(kv_cache.stride())}"
        )


def warmup(spec: MLASpec) -> None:
    """Compile and load the kernels of `spec` on the current device."""
    variant = Variant.of(spec)
    attention_kernel(variant).load()
    merge_kernel(variant).load()


def offline_variants(target: str) -> list[CudaVariant]:
    """One variant for each number of accumulators and each way of loading."""
    if target != "sm_90a":
        return []
    specs = [
        MLASpec(num_heads, KVFormat.BF16, page_size, seqlen_q)
        for num_heads, seqlen_q, page_size in (
            (16, 1, 64), (8, 1, 64), (24, 1, 64), (32, 1, 64), (4, 4, 64), (16, 1, 1), (16, 1, 12),
        )
    ]  # fmt: skip
    variants = [
        CudaVariant(
            f"sm90/attention-bf16/h{s.num_heads}-q{s.seqlen_q}-p{s.page_size}", SOURCE,
            "mla_attention_bf16", THREADS, Variant.of(s).shared_bytes, Variant.of(s).defines,
        )
        for s in specs
    ]  # fmt: skip
    merge = CudaVariant(
        "sm90/merge-bf16/h16-q1-p64", SOURCE, "mla_merge_bf16", MERGE_THREADS,
        defines=Variant.of(specs[0]).defines,
    )  # fmt: skip
    return [*variants, merge]
