"""Hopper attention for 33 query rows and more over an fp8_e4m3fn cache (docs/attention-sm90-wide.md).

A program's 64 tensor-core columns are query rows; a request with more rows is cut into row tiles, whose
programs run side by side and find each other's tokens in L2.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from streamla.arch import Arch
from streamla.kernels.sm90.launch import (
    TILE_N,
    attention_params,
    copyable,
    launch_attention,
    view_bytes,
)
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.driver import I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.spec import MLASpec

SOURCE = Path(__file__).with_name("attention_wide.cu")
MAX_TILE_ROWS = 64  # of a program
THREADS = 384

# kv_cache, page stride, token stride, k_scale
_PARAMS = attention_params(PTR, I64, I64, PTR)


def num_row_tiles(spec: MLASpec) -> int:
    return -(-spec.rows // MAX_TILE_ROWS)


def tile_rows(spec: MLASpec) -> int:
    return -(-spec.rows // num_row_tiles(spec))


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(
        tile_n=TILE_N,
        num_programs=max(1, arch.units // num_row_tiles(spec)),
        overhead_tiles=8,
    )


def shared_bytes(spec: MLASpec) -> int:
    """Dynamic shared memory of a program: wide_tile.cuh lays it out and checks this sum."""
    columns = -(-tile_rows(spec) // 16) * 16
    query = 2 * columns * spec.head_dim
    stages = 4 * (TILE_N * spec.row_bytes + 32)
    probabilities = 2 * columns * TILE_N
    states, barriers = 12 * columns + 8, 11 * 8
    return query + stages + probabilities + states + barriers


def defines(spec: MLASpec, bulk_copies: bool = True) -> dict[str, int]:
    """Everything the compiled code depends on. `bulk_copies`: every cache row is 16-byte aligned."""
    return {
        "STREAMLA_BULK_COPIES": bulk_copies,
        "STREAMLA_NUM_HEADS": spec.num_heads,
        "STREAMLA_SEQLEN_Q": spec.seqlen_q,
        "STREAMLA_PAGE_SIZE": spec.page_size,
        "STREAMLA_ROWS": tile_rows(spec),
        "STREAMLA_SHARED_BYTES": shared_bytes(spec),
    }


@functools.cache
def attention_kernel(spec: MLASpec, bulk_copies: bool = True) -> Kernel:
    return Kernel(
        lambda: compile_cuda(SOURCE, defines=defines(spec, bulk_copies)),
        "mla_attention_wide",
        _PARAMS,
        threads=THREADS,
        shared_bytes=shared_bytes(spec),
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
    cache = view_bytes(kv_cache)
    launch_attention(
        attention_kernel(plan.spec, copyable(cache)), plan.cost.num_programs * num_row_tiles(plan.spec), q_nope, q_pe,
        (*cache, 0 if k_scale is None else k_scale.data_ptr()),
        page_table, plan, out, lse, softmax_scale, causal, lse_scale, merges,
    )  # fmt: skip


def warmup(spec: MLASpec) -> None:
    """Compile and load the kernels of `spec` on the current device."""
    for bulk_copies in (True, False):
        attention_kernel(spec, bulk_copies).load()
