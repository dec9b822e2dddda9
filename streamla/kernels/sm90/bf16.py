"""Hopper attention for up to 32 query rows over a bf16 cache, with or without its merge
(docs/attention-sm90-bf16.md)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from streamla.arch import Arch
from streamla.kernels.sm90.launch import (
    MERGE_PARAMS,
    TILE_N,
    attention_params,
    cache_view,
    launch_attention,
    launch_merge,
)
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.driver import I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.runtime.offline import CudaVariant
from streamla.spec import KVFormat, MLASpec

SOURCE = Path(__file__).with_name("attention_bf16.cu")

RUN = 8
STAGE_BYTES = 36992
THREADS = 384
MERGE_THREADS = 128

# kv_cache, page stride, token stride
_PARAMS = attention_params(PTR, I64, I64)


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
        pdl=True,
    )


@functools.cache
def merge_kernel(variant: Variant) -> Kernel:
    return Kernel(variant.cubin, "mla_merge_bf16", MERGE_PARAMS, threads=MERGE_THREADS)


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
    cache = cache_view(kv_cache)
    variant = Variant.of(plan.spec, cache[2] == plan.spec.row_bytes)
    launch_attention(
        attention_kernel(variant), plan.cost.num_programs, q_nope, q_pe, cache,
        page_table, plan, out, lse, softmax_scale, causal, lse_scale, merges,
    )  # fmt: skip


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, lse_scale: float) -> None:
    """Finish the split requests from their partials, in a launch of its own."""
    launch_merge(merge_kernel(Variant.of(plan.spec)), plan, out, lse, lse_scale)


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
