"""Hopper attention over an fp8_ds_mla cache, with or without its merge (docs/attention-sm90-ds-mla.md).

A program takes up to 24 query rows; a request with more is cut into row tiles, whose programs run side by side and
find each other's tokens in L2.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from streamla.arch import Arch
from streamla.kernels.sm90.launch import (
    TILE_N,
    attention_params,
    cache_view,
    launch_attention,
    rows_of_program,
)
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.driver import I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.spec import MLASpec

SOURCE = Path(__file__).with_name("attention_ds_mla.cu")

ROW_STEPS = (8, 16, 24)  # query rows that a program may hold: N of its wgmma
MAX_ROWS = 512  # of a request: 22 programs side by side, far below the SMs of any Hopper GPU
TOKEN_BYTES = 656
HALF_TILE = 32
STAGES = 4

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
        run = math.gcd(spec.page_size, HALF_TILE) if contiguous_tokens else 1
        return Variant(spec.num_heads, spec.seqlen_q, spec.page_size, run)

    @property
    def defines(self) -> dict[str, int]:
        return {
            "STREAMLA_NUM_HEADS": self.num_heads,
            "STREAMLA_SEQLEN_Q": self.seqlen_q,
            "STREAMLA_PAGE_SIZE": self.page_size,
            "STREAMLA_ROWS": self.rows,
            "STREAMLA_RUN": self.run,
            "STREAMLA_SHARED_BYTES": self.shared_bytes,
        }

    @property
    def rows(self) -> int:
        """Query rows a program holds."""
        return rows_of_program(self.num_heads * self.seqlen_q, ROW_STEPS)

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
        ring, query = STAGES * TILE_N * TOKEN_BYTES, 9 * self.rows * 128
        probability = 2 * 4 * TILE_N * self.rows * 2
        score = 2 * 2 * TILE_N // 2 * self.rows * 4 if self.team_halves == 2 else 0
        warps = 8 * self.team_halves
        small = (2 * warps + 2 + 2 + 2) * self.rows * 4 + (warps + 2) * 4 + 3 * STAGES * 8 + 8
        return ring + query + probability + score + small + 1024

    def cubin(self) -> bytes:
        return compile_cuda(SOURCE, defines=self.defines)


def num_row_tiles(spec: MLASpec) -> int:
    return Variant.of(spec).row_tiles


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(
        tile_n=TILE_N,
        num_programs=max(1, arch.units // Variant.of(spec).row_tiles),
        overhead_tiles=5,
    )


@functools.cache
def attention_kernel(variant: Variant) -> Kernel:
    return Kernel(
        variant.cubin,
        "mla_attention_ds_mla",
        _PARAMS,
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
) -> None:
    """Attention, and the merge in the same launch if it `merges`; else partials of split requests are left."""
    cache = cache_view(kv_cache)
    variant = Variant.of(plan.spec, cache[2] == plan.spec.row_bytes)
    launch_attention(
        attention_kernel(variant), plan.cost.num_programs * variant.row_tiles, q_nope, q_pe, cache,
        page_table, plan, out, lse, softmax_scale, causal, lse_scale, merges,
    )  # fmt: skip


def warmup(spec: MLASpec) -> None:
    """Compile and load the kernels of `spec` on the current device."""
    for contiguous_tokens in (True, False):
        attention_kernel(Variant.of(spec, contiguous_tokens)).load()
