"""Hopper attention for up to 32 query rows over an fp8_e4m3fn cache, with or without its merge
(docs/attention-sm90.md)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from streamla.arch import Arch
from streamla.kernels.sm90.launch import (
    STEP_PARAMS,
    TILE_N,
    attention_params,
    cache_view,
    launch_attention,
    rows_of_program,
    step_arguments,
)
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.driver import I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.spec import MLASpec
from streamla.step import NewTokens

SOURCE = Path(__file__).with_name("attention.cu")

ROW_STEPS = (8, 16, 24, 32)  # query rows that a program may hold: N of its wgmma
TOKEN_BYTES = 576
HALF_TILE = 32

# kv_cache, page stride, token stride, k_scale
_PARAMS = attention_params(PTR, I64, I64, PTR)


@dataclass(frozen=True)
class Variant:
    """What one cubin is compiled for.

    Attributes:
        rows: query rows a program holds.
        run: tokens of one bulk copy.
        step: takes a query that is not rotated yet, and new rows (step.cuh).
    """

    num_heads: int
    seqlen_q: int
    page_size: int
    rows: int
    run: int
    step: bool = False

    @staticmethod
    def of(spec: MLASpec, contiguous_tokens: bool = True, step: bool = False) -> Variant:
        """The variant for a cache whose tokens follow each other in a page without a gap, or with."""
        run = math.gcd(spec.page_size, HALF_TILE) if contiguous_tokens else 1
        return Variant(
            spec.num_heads,
            spec.seqlen_q,
            spec.page_size,
            rows_of_program(spec.rows, ROW_STEPS),
            run,
            step,
        )

    @property
    def defines(self) -> dict[str, int]:
        return {
            "STREAMLA_NUM_HEADS": self.num_heads,
            "STREAMLA_SEQLEN_Q": self.seqlen_q,
            "STREAMLA_PAGE_SIZE": self.page_size,
            "STREAMLA_ROWS": self.rows,
            "STREAMLA_RUN": self.run,
            "STREAMLA_STEP": self.step,
            "STREAMLA_SHARED_BYTES": self.shared_bytes,
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
        barriers = (3 + self.step) * stages * 8 + 8
        small = (2 * 2 * 4 * self.team_halves + 2 + 2 + 2) * self.rows * 4 + barriers
        return ring + query + probability + score + small + 1024

    def cubin(self) -> bytes:
        return compile_cuda(SOURCE, defines=self.defines)


def num_row_tiles(spec: MLASpec) -> int:
    return Variant.of(spec).row_tiles


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(
        tile_n=TILE_N, num_programs=arch.units // Variant.of(spec).row_tiles, overhead_tiles=8
    )


@functools.cache
def attention_kernel(variant: Variant) -> Kernel:
    return Kernel(
        variant.cubin,
        "mla_attention",
        (*_PARAMS, *STEP_PARAMS) if variant.step else _PARAMS,
        threads=variant.threads,
        shared_bytes=variant.shared_bytes,
        cooperative=True,
        pdl=True,
    )


def attend(
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
    *,
    merges: bool,
    step: tuple[int, ...] = (),
) -> None:
    """Attention, and the merge in the same launch if it `merges`; else partials of split requests are left."""
    cache = cache_view(kv_cache)
    variant = Variant.of(plan.spec, cache[2] == plan.spec.row_bytes, bool(step))
    launch_attention(
        attention_kernel(variant), plan.cost.num_programs * variant.row_tiles, q_nope, q_pe,
        (*cache, 0 if k_scale is None else k_scale.data_ptr()),
        page_table, plan, out, lse, softmax_scale, causal, lse_scale, merges, step,
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
    """Epilogue, attention and merge in one launch."""
    rows = (plan.batch, plan.spec.seqlen_q)
    attend(
        q_nope.unflatten(0, rows), q_pe.unflatten(0, rows), kv_cache, k_scale, page_table, plan, out, lse,
        softmax_scale, causal, lse_scale, merges=True, step=step_arguments(new, kv_cache, plan),
    )  # fmt: skip


def warmup(spec: MLASpec) -> None:
    """Compile and load the kernels of `spec` on the current device."""
    for contiguous_tokens in (True, False):
        for step in (False, True):
            attention_kernel(Variant.of(spec, contiguous_tokens, step)).load()
