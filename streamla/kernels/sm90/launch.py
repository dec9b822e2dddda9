"""What the launchers share: one order of arguments, whatever the cache holds."""

from __future__ import annotations

import torch

from streamla.plan import DecodePlan
from streamla.runtime.driver import F32, I32, I64, PTR, Kernel
from streamla.step import NewTokens

TILE_N = 64
COPY_ALIGNMENT = 16  # bytes: what a bulk copy needs of addresses and sizes

_VIEW = (PTR, I64, I64, I64)
STEP_PARAMS = (
    PTR, I64, PTR, I64, I32,   # kv_c, k_pe and their strides, whether rows of kv_c are aligned
    PTR, I64, I64, I64,        # slot_mapping, its length, reserved_slot, slots in the pool
    PTR, PTR, I64, I64, I32,   # positions, cos_sin, its stride and rows, whether pairs are neox
)  # fmt: skip


def attention_params(*cache: str) -> tuple[str, ...]:
    """Parameter types of an attention kernel; `cache` are those of the cache, which formats differ in."""
    return (
        *_VIEW, *_VIEW, I32,               # q_nope, q_pe, aligned
        *cache,                            # kv_cache, page stride, token stride in bytes, ...
        PTR, I64, PTR, PTR, PTR,           # page_table, its stride, work, work_indptr, counters
        *_VIEW, I32, *_VIEW, PTR, PTR,     # out, aligned, lse, out_partial, lse_partial
        F32, I32, F32,                     # softmax_scale, causal, lse_scale
    )  # fmt: skip


def launch_attention(
    kernel: Kernel,
    programs: int,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: tuple[int | bytes, ...],
    page_table: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_scale: float,
    merges: bool,
    step: tuple[int, ...] = (),
) -> None:
    """Launch attention; `merges`: and the merge, in the same launch. `cache` fits the kernel's own, and
    `step` is there if the kernel writes new rows."""
    kernel.launch(
        programs,
        *view(q_nope), *view(q_pe), rows_aligned(q_nope) and rows_aligned(q_pe),
        *cache,
        page_table.data_ptr(), page_table.stride(0),
        plan.work.data_ptr(), plan.work_indptr.data_ptr(), plan.counters.data_ptr() if merges else 0,
        *view(out), rows_aligned(out), *view(lse),
        plan.out_partial.data_ptr(), plan.lse_partial.data_ptr(),
        softmax_scale, causal, lse_scale,
        *step,
        device=out.device.index,
    )  # fmt: skip


def step_arguments(new: NewTokens, kv_cache: torch.Tensor, plan: DecodePlan) -> tuple[int, ...]:
    """New tokens, as kernels take them after all else."""
    table = new.cos_sin
    return (
        new.kv_c.data_ptr(), new.kv_c.stride(0), new.k_pe.data_ptr(), new.k_pe.stride(0),
        not (new.kv_c.data_ptr() % 16 or new.kv_c.stride(0) % 8),
        new.slot_mapping.data_ptr(), new.slot_mapping.shape[0],
        -1 if new.reserved_slot is None else new.reserved_slot,
        kv_cache.shape[0] * plan.spec.page_size,
        0 if new.positions is None else new.positions.data_ptr(),
        *((0, 0, 0) if table is None else (table.data_ptr(), table.stride(0), table.shape[0])),
        new.rope == "neox",
    )  # fmt: skip


def rows_of_program(rows: int, steps: tuple[int, ...]) -> int:
    """Rows of a program's tile, one of `steps`: as few tiles as hold all rows, and those as narrow as they may be."""
    tiles = -(-rows // steps[-1])
    return next(step for step in steps if step * tiles >= rows)


def view(t: torch.Tensor) -> tuple[int, ...]:
    """Address and strides of a (batch, seqlen_q, num_heads, ...) tensor."""
    return t.data_ptr(), *t.stride()[:3]


def rows_aligned(t: torch.Tensor) -> bool:
    """Whether every row of a bf16 tensor starts at a multiple of 16 bytes."""
    return not (t.data_ptr() % 16 or any(s % 8 for s in t.stride()[:3]))


def view_bytes(kv_cache: torch.Tensor) -> tuple[int, int, int]:
    """Address of a cache and its strides of page and token, in bytes."""
    item = kv_cache.element_size()
    return kv_cache.data_ptr(), item * kv_cache.stride(0), item * kv_cache.stride(1)


def copyable(cache: tuple[int, int, int]) -> bool:
    """Whether every row of a cache starts where a bulk copy can."""
    return not any(place % COPY_ALIGNMENT for place in cache)


def cache_view(kv_cache: torch.Tensor) -> tuple[int, int, int]:
    """`view_bytes` of a cache whose rows bulk copies can take.

    Raises:
        ValueError: they cannot.
    """
    cache = view_bytes(kv_cache)
    if not copyable(cache):
        raise ValueError(
            f"kv_cache: need rows that start at a multiple of {COPY_ALIGNMENT} bytes for impl='sm90' (a plan "
            f"with impl='portable' takes any); got address {cache[0]:#x}, strides {tuple(kv_cache.stride())}"
        )
    return cache
