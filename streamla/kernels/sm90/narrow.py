"""Hopper attention for up to 32 query rows over an fp8_e4m3fn cache, with or without its merge
(docs/attention-sm90.md)."""

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
from streamla.spec import MLASpec

SOURCE = Path(__file__).with_name("attention.cu")
TARGET = "sm_90a"

TILE_N = 64
ROW_STEPS = (8, 16, 24, 32)  # query rows that a program may hold: N of its wgmma
LATENT = 512
TOKEN_BYTES = 576
COPY_ALIGNMENT = 16  # bytes: what a bulk copy needs of addresses and sizes
HALF_TILE = 32

_VIEW = (PTR, I64, I64, I64)
_PARAMS = (
    *_VIEW, *_VIEW, I32,               # q_nope, q_pe, aligned
    PTR, I64, I64, PTR,                # kv_cache, page stride, token stride, k_scale
    PTR, I64, PTR, PTR, PTR,           # page_table, its stride, work, work_indptr, counters
    *_VIEW, I32, *_VIEW, PTR, PTR,     # out, aligned, lse, out_partial, lse_partial
    F32, I32, F32,                     # softmax_scale, causal, lse_scale
)  # fmt: skip
_MERGE_PARAMS = (PTR, *_VIEW, I32, *_VIEW, PTR, PTR, F32)


@dataclass(frozen=True)
class Variant:
    """What one cubin is compiled for.

    Attributes:
        rows: query rows a program holds.
        run: tokens of one bulk copy.
    """

    num_heads: int
    seqlen_q: int
    page_size: int
    rows: int
    run: int

    @staticmethod
    def of(spec: MLASpec, contiguous_tokens: bool = True) -> Variant:
        """The variant for a cache whose tokens follow each other in a page without a gap, or with."""
        run = math.gcd(spec.page_size, HALF_TILE) if contiguous_tokens else 1
        return Variant(
            spec.num_heads, spec.seqlen_q, spec.page_size, rows_of_program(spec.rows), run
        )

    @property
    def defines(self) -> dict[str, int]:
        return {
            "STREAMLA_NUM_HEADS": self.num_heads,
            "STREAMLA_SEQLEN_Q": self.seqlen_q,
            "STREAMLA_PAGE_SIZE": self.page_size,
            "STREAMLA_ROWS": self.rows,
            "STREAMLA_RUN": self.run,
        }

    @property
    def row_tiles(self) -> int:
        return -(-self.num_heads * self.seqlen_q // self.rows)

    @property
    def team_halves(self) -> int:
        """Warpgroups of each of the two teams, as tile.cuh has it."""
        return 2 if self.rows <= 16 else 1

    @property
    def threads(self) -> int:
        return (2 * self.team_halves + 1) * 128

    @property
    def shared_bytes(self) -> int:
        """As `Shared` in tile.cuh has it."""
        stages = 5 if self.team_halves == 2 else 4
        ring = -(-stages * (TILE_N * TOKEN_BYTES + 128) // 1024) * 1024
        query = 9 * self.rows * 128
        probability = 2 * 2 // self.team_halves * TILE_N * self.rows * 2
        score = 2 * 2 * TILE_N // 2 * self.rows * 4 if self.team_halves == 2 else 0
        small = (2 * 2 * 4 * self.team_halves + 2 + 1) * self.rows * 4 + 2 * stages * 8
        return ring + query + probability + score + small + 1024

    def cubin(self) -> bytes:
        return compile_cuda(SOURCE, defines=self.defines, target=TARGET)


def rows_of_program(rows: int) -> int:
    """Rows of a program's tile: as few tiles as hold all rows, and those as narrow as they may be."""
    tiles = -(-rows // ROW_STEPS[-1])
    return next(step for step in ROW_STEPS if step * tiles >= rows)


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(
        tile_n=TILE_N, num_programs=arch.units // Variant.of(spec).row_tiles, overhead_tiles=1
    )


@functools.cache
def attention_kernel(variant: Variant) -> Kernel:
    return Kernel(
        variant.cubin,
        "mla_attention",
        _PARAMS,
        threads=variant.threads,
        shared_bytes=variant.shared_bytes,
        cooperative=True,
    )


@functools.cache
def merge_kernel(variant: Variant) -> Kernel:
    return Kernel(variant.cubin, "mla_merge", _MERGE_PARAMS, threads=LATENT // 4)


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
        q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale, False
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
    """Attention and merge in one launch."""
    _launch(
        q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale, True
    )  # fmt: skip


def _launch(
    q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale, merges
) -> None:  # fmt: skip
    page_stride, token_stride, _ = kv_cache.stride()
    _check_cache(kv_cache, page_stride, token_stride)
    variant = Variant.of(plan.spec, token_stride == kv_cache.shape[2])
    attention_kernel(variant).launch(
        plan.cost.num_programs * variant.row_tiles,
        q_nope.data_ptr(), *q_nope.stride()[:3], q_pe.data_ptr(), *q_pe.stride()[:3],
        _rows_aligned(q_nope) and _rows_aligned(q_pe),
        kv_cache.data_ptr(), page_stride, token_stride, 0 if k_scale is None else k_scale.data_ptr(),
        page_table.data_ptr(), page_table.stride(0),
        plan.work.data_ptr(), plan.work_indptr.data_ptr(), plan.counters.data_ptr() if merges else 0,
        out.data_ptr(), *out.stride()[:3], _rows_aligned(out), lse.data_ptr(), *lse.stride(),
        plan.out_partial.data_ptr(), plan.lse_partial.data_ptr(),
        softmax_scale, causal, lse_scale,
        device=out.device.index,
    )  # fmt: skip


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, lse_scale: float) -> None:
    """Finish the split requests from their partials, in a launch of its own."""
    variant = Variant.of(plan.spec)
    merge_kernel(variant).launch(
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
