"""Hopper attention for 33 query rows and more over an fp8_e4m3fn cache (docs/attention-sm90-wide.md).

A program's 64 tensor-core columns are query rows; a request with more rows is cut into row tiles, whose
programs run side by side and find each other's tokens in L2.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch

from streamla.arch import Arch
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.driver import F32, I32, I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.spec import MLASpec

SOURCE = Path(__file__).with_name("attention_wide.cu")
TILE_N = 64
MAX_TILE_ROWS = 64
THREADS = 384
MERGE_THREADS, MERGE_LATENTS = 256, 128
MERGE_AHEAD_BLOCKS = 3  # an SM, of the merge that reads partials before it has their weights

_STRIDES = [I64, I64, I64]


def num_row_tiles(spec: MLASpec) -> int:
    return -(-spec.rows // MAX_TILE_ROWS)


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(
        tile_n=TILE_N,
        num_programs=max(1, arch.units // num_row_tiles(spec)),
        overhead_tiles=1,
    )


def shared_bytes(spec: MLASpec) -> int:
    """Dynamic shared memory of a program: wide_tile.cuh lays it out and checks this sum."""
    columns = -(-spec.rows // num_row_tiles(spec) // 16) * 16
    query = 2 * columns * spec.head_dim
    stages = 4 * (TILE_N * spec.row_bytes + 32)
    probabilities = 2 * columns * TILE_N
    states, barriers = 12 * columns + 8, 10 * 8
    return query + stages + probabilities + states + barriers


def defines(spec: MLASpec, bulk_copies: bool = True) -> dict[str, int]:
    """Everything the compiled code depends on. `bulk_copies`: every cache row is 16-byte aligned."""
    return {
        "STREAMLA_BULK_COPIES": bulk_copies,
        "STREAMLA_NUM_HEADS": spec.num_heads,
        "STREAMLA_SEQLEN_Q": spec.seqlen_q,
        "STREAMLA_PAGE_SIZE": spec.page_size,
        "STREAMLA_ROW_TILES": num_row_tiles(spec),
        "STREAMLA_SHARED_BYTES": shared_bytes(spec),
    }


@functools.cache
def attention_kernel(spec: MLASpec, bulk_copies: bool = True) -> Kernel:
    params = [
        PTR, *_STRIDES, PTR, *_STRIDES,  # q_nope, q_pe
        PTR, I64, I64, PTR,              # kv_cache, k_scale
        PTR, I64, PTR, PTR,              # page_table, work, work_indptr
        PTR, *_STRIDES, PTR, *_STRIDES,  # out, lse
        PTR, PTR, F32, F32, I32,         # out_partial, lse_partial, softmax_scale_log2, lse_scale, causal
    ]  # fmt: skip
    return Kernel(
        lambda: compile_cuda(SOURCE, defines=defines(spec, bulk_copies)),
        "mla_attention_wide",
        params,
        threads=THREADS,
        shared_bytes=shared_bytes(spec),
        pdl=True,
    )


@functools.cache
def merge_kernel(spec: MLASpec, ahead: bool) -> Kernel:
    return Kernel(
        lambda: compile_cuda(SOURCE, defines=defines(spec)),
        "mla_merge_wide_ahead" if ahead else "mla_merge_wide",
        [PTR, PTR, *_STRIDES, PTR, *_STRIDES, PTR, PTR, F32],
        threads=MERGE_THREADS,
        pdl=True,
    )


def rows_aligned(kv_cache: torch.Tensor) -> bool:
    """Whether the copy engine can take every row: bases and strides are multiples of 16 bytes."""
    offsets = (s * kv_cache.element_size() for s in kv_cache.stride()[:2])
    return not any(n % 16 for n in (kv_cache.data_ptr(), *offsets))


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
    """Attention and, if it `merges`, the merge, which starts while the last programs of attention finish."""
    spec = plan.spec
    attention_kernel(spec, rows_aligned(kv_cache)).launch(
        plan.cost.num_programs * num_row_tiles(spec),
        q_nope.data_ptr(), *q_nope.stride()[:-1],
        q_pe.data_ptr(), *q_pe.stride()[:-1],
        kv_cache.data_ptr(), *kv_cache.stride()[:-1],
        k_scale.data_ptr() if k_scale is not None else 0,
        page_table.data_ptr(), page_table.stride(0),
        plan.work.data_ptr(), plan.work_indptr.data_ptr(),
        out.data_ptr(), *out.stride()[:-1],
        lse.data_ptr(), *lse.stride(),
        plan.out_partial.data_ptr(), plan.lse_partial.data_ptr(),
        softmax_scale / math.log(2.0), lse_scale, int(causal),
        device=out.device.index,
    )  # fmt: skip
    if merges:
        merge(plan, out, lse, lse_scale)


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, lse_scale: float) -> None:
    """Finish the requests that were split."""
    grid = (plan.spec.rows, plan.batch, plan.spec.kv_lora_rank // MERGE_LATENTS)
    units = plan.cost.num_programs * num_row_tiles(plan.spec)
    merge_kernel(plan.spec, math.prod(grid) <= MERGE_AHEAD_BLOCKS * units).launch(
        grid,
        plan.split_indptr.data_ptr(),
        out.data_ptr(), *out.stride()[:-1],
        lse.data_ptr(), *lse.stride(),
        plan.out_partial.data_ptr(), plan.lse_partial.data_ptr(), lse_scale,
        device=out.device.index,
    )  # fmt: skip


def warmup(spec: MLASpec) -> None:
    """Compile and load the kernels of `spec` on the current device."""
    for bulk_copies in (True, False):
        attention_kernel(spec, bulk_copies).load()
    for ahead in (True, False):
        merge_kernel(spec, ahead).load()
