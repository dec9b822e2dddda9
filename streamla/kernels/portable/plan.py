"""The device planner (portable Triton): `plan_reference`, one program a request, no host sync.

Every program reads all lengths (a few KB), so none waits for another: it sums the units before its
request, finds the programs that the request's tiles fall to in closed form, and writes its own items.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from streamla.plan import LENGTH_CLAMPED, LENGTH_NEGATIVE, WORK_FIELDS, CostModel, DecodePlan
from streamla.runtime.capture import require_compiled

NEGATIVE: tl.constexpr = tl.constexpr(LENGTH_NEGATIVE)
CLAMPED: tl.constexpr = tl.constexpr(LENGTH_CLAMPED)
FIELDS: tl.constexpr = tl.constexpr(len(WORK_FIELDS))


@triton.jit
def load_lengths(cache_seqlens, request, batch, max_seqlen):
    """Lengths of a block of requests, negatives as 0, cut to max_seqlen; 0 outside the batch."""
    seqlen = tl.load(cache_seqlens + request, mask=request < batch, other=0)
    return tl.minimum(tl.maximum(seqlen, 0), max_seqlen)


@triton.jit
def num_tiles(seqlen, TILE_N: tl.constexpr):
    """An empty request counts one tile: somebody must write its zeros."""
    return tl.maximum(tl.cdiv(seqlen, TILE_N), 1).to(tl.int64)


@triton.jit
def program_of(unit, total, programs):
    """The p with p * total // programs <= unit < (p + 1) * total // programs."""
    return ((unit + 1) * programs - 1) // total


@triton.jit
def store_items(work, index, request, begin, end, seqlen, slot, split_begin, split_end, mask):
    row = work + index * FIELDS
    tl.store(row + 0, request, mask=mask)
    tl.store(row + 1, begin, mask=mask)
    tl.store(row + 2, end, mask=mask)
    tl.store(row + 3, seqlen, mask=mask)
    tl.store(row + 4, slot, mask=mask)
    tl.store(row + 5, split_begin, mask=mask)
    tl.store(row + 6, split_end, mask=mask)
    tl.store(row + 7, tl.zeros_like(index).to(tl.int32), mask=mask)


@triton.jit
def write_pieces(
    work, split_indptr, request, seqlen, tile_begin, tile_end, piece, pieces, items_before, slots_before,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Items of one request: lane i holds piece `piece[i]` of `pieces`, tiles [tile_begin, tile_end)."""
    is_split = pieces > 1
    split_end = slots_before + tl.where(is_split, pieces, 0)
    begin = tile_begin * TILE_N
    end = tl.minimum(tile_end * TILE_N, seqlen)
    slot = tl.where(is_split, slots_before + piece, -1)
    store_items(
        work, items_before + piece, request, begin, end, seqlen, slot, slots_before, split_end,
        mask=(piece >= 0) & (piece < pieces),
    )  # fmt: skip
    tl.store(split_indptr + request, slots_before)
    tl.store(split_indptr + request + 1, split_end)


@triton.jit
def write_empty_items(work, begin, end, BLOCK: tl.constexpr):
    for i in range(begin, end, BLOCK):
        index = i + tl.arange(0, BLOCK)
        zero = tl.zeros([BLOCK], tl.int32)
        store_items(work, index, zero, zero, zero, zero, zero - 1, zero, zero, mask=index < end)


@triton.jit
def write_status(cache_seqlens, status, counters, batch, max_seqlen, BLOCK_B: tl.constexpr):
    flags = 0
    for i in range(0, batch + 1, BLOCK_B):
        request = i + tl.arange(0, BLOCK_B)
        tl.store(counters + request, tl.zeros([BLOCK_B], tl.int32), mask=request <= batch)
        seqlen = tl.load(cache_seqlens + request, mask=request < batch, other=0)
        flags |= tl.where(tl.min(seqlen, 0) < 0, NEGATIVE, 0)
        flags |= tl.where(tl.max(seqlen, 0) > max_seqlen, CLAMPED, 0)
    tl.store(status, flags)


@triton.jit(
    do_not_specialize=["batch", "num_items", "max_seqlen"],
    do_not_specialize_on_alignment=["cache_seqlens"],
)
def mla_plan_kernel(
    cache_seqlens,  # (batch,) int32
    work,           # (num_items, 8) int32
    work_indptr,    # (NUM_PROGRAMS + 1,) int32
    split_indptr,   # (batch + 1,) int32
    status,         # (1,) int32
    counters,       # (batch + 1,) int32
    batch, num_items, max_seqlen,
    TILE_N: tl.constexpr, NUM_PROGRAMS: tl.constexpr, OVERHEAD: tl.constexpr,
    MIN_SPLIT: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Equal shares of the line of units, cut wherever the cuts fall. Program b writes request b."""
    b = tl.program_id(0)
    lane = tl.arange(0, BLOCK_P)
    if b == 0:
        write_status(cache_seqlens, status, counters, batch, max_seqlen, BLOCK_B)
    total = tl.zeros([], tl.int64)
    first_unit = tl.zeros([], tl.int64)  # of request b's tiles
    for i in range(0, batch, BLOCK_B):
        request = i + tl.arange(0, BLOCK_B)
        seqlen = load_lengths(cache_seqlens, request, batch, max_seqlen)
        units = tl.where(request < batch, num_tiles(seqlen, TILE_N) + OVERHEAD, 0)
        total += tl.sum(units, 0)
        first_unit += tl.sum(tl.where(request < b, units, 0), 0)
    total -= OVERHEAD  # none follows the last request
    worth = (total + 1) // (MIN_SPLIT + 1)
    programs = tl.maximum(tl.minimum(worth, NUM_PROGRAMS), 1)

    # Pieces of the requests before b: a request has one more than the cuts that fall in its tiles.
    items_before = 0
    slots_before = 0
    units_before = tl.zeros([], tl.int64)
    for i in range(0, b, BLOCK_B):
        request = i + tl.arange(0, BLOCK_B)
        seqlen = load_lengths(cache_seqlens, request, batch, max_seqlen)
        tiles = num_tiles(seqlen, TILE_N)
        units = tl.where(request < b, tiles + OVERHEAD, 0)
        request_end = units_before + tl.cumsum(units, 0) - OVERHEAD
        first = program_of(request_end - tiles, total, programs)
        pieces = (program_of(request_end - 1, total, programs) - first + 1).to(tl.int32)
        pieces = tl.where(request < b, pieces, 0)
        items_before += tl.sum(pieces, 0)
        slots_before += tl.sum(tl.where(pieces > 1, pieces, 0), 0)
        units_before += tl.sum(units, 0)

    seqlen = load_lengths(cache_seqlens, b, batch, max_seqlen)
    tiles = num_tiles(seqlen, TILE_N)
    first = program_of(first_unit, total, programs).to(tl.int32)
    last = program_of(first_unit + tiles - 1, total, programs).to(tl.int32)
    pieces = last - first + 1

    # Lane p is program p; its share of this request's tiles.
    share_begin = lane * total // programs - first_unit
    share_end = (lane + 1) * total // programs - first_unit
    tile_begin = tl.maximum(share_begin, 0).to(tl.int32)
    tile_end = tl.minimum(share_end, tiles).to(tl.int32)
    write_pieces(
        work, split_indptr, b, seqlen, tile_begin, tile_end, lane - first, pieces,
        items_before, slots_before, TILE_N,
    )  # fmt: skip

    # Request b names the first item of every program after the one that ends request b - 1.
    previous = -1
    if b > 0:
        previous = program_of(first_unit - OVERHEAD - 1, total, programs).to(tl.int32)
    first_item = items_before + tl.maximum(lane - first, 0)
    tl.store(work_indptr + lane, first_item, mask=(lane > previous) & (lane <= last))
    if b == batch - 1:
        items = items_before + pieces
        tl.store(work_indptr + lane, items, mask=(lane > last) & (lane <= NUM_PROGRAMS))
        write_empty_items(work, items, num_items, BLOCK_P)


@triton.jit(
    do_not_specialize=["batch", "num_items", "max_seqlen"],
    do_not_specialize_on_alignment=["cache_seqlens"],
)
def mla_plan_by_length_kernel(
    cache_seqlens,  # (batch,) int32
    work,           # (num_items, 8) int32
    work_indptr,    # (NUM_PROGRAMS + 1,) int32
    split_indptr,   # (batch + 1,) int32
    status,         # (1,) int32
    counters,       # (batch + 1,) int32
    batch, num_items, max_seqlen,
    TILE_N: tl.constexpr, NUM_PROGRAMS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Pieces fixed by each request's own length; programs take equal numbers of them."""
    b = tl.program_id(0)
    if b == 0:
        write_status(cache_seqlens, status, counters, batch, max_seqlen, BLOCK_B)

    items = 0
    items_before = 0
    slots_before = 0
    for i in range(0, batch, BLOCK_B):
        request = i + tl.arange(0, BLOCK_B)
        seqlen = load_lengths(cache_seqlens, request, batch, max_seqlen)
        pieces = tl.minimum(tl.cdiv(num_tiles(seqlen, TILE_N), MIN_SPLIT), MAX_SPLITS).to(tl.int32)
        pieces = tl.where(request < batch, pieces, 0)
        items += tl.sum(pieces, 0)
        pieces = tl.where(request < b, pieces, 0)
        items_before += tl.sum(pieces, 0)
        slots_before += tl.sum(tl.where(pieces > 1, pieces, 0), 0)

    if b == 0:
        p = tl.arange(0, BLOCK_P)
        bound = p.to(tl.int64) * items // NUM_PROGRAMS
        tl.store(work_indptr + p, bound.to(tl.int32), mask=p <= NUM_PROGRAMS)
        write_empty_items(work, items, num_items, BLOCK_P)

    seqlen = load_lengths(cache_seqlens, b, batch, max_seqlen)
    tiles = num_tiles(seqlen, TILE_N)
    pieces = tl.minimum(tl.cdiv(tiles, MIN_SPLIT), MAX_SPLITS).to(tl.int32)
    piece = tl.arange(0, BLOCK_S)
    tile_begin = (piece * tiles // pieces).to(tl.int32)
    tile_end = ((piece + 1) * tiles // pieces).to(tl.int32)
    write_pieces(
        work, split_indptr, b, seqlen, tile_begin, tile_end, piece, pieces,
        items_before, slots_before, TILE_N,
    )  # fmt: skip


NO_LIMIT = 2**31 - 1


def compile_options(cost: CostModel, batch_invariant: bool) -> dict[str, int]:
    """The constants of the planner's kernel."""
    options = {
        "TILE_N": cost.tile_n,
        "NUM_PROGRAMS": cost.num_programs,
        "MIN_SPLIT": cost.min_split_tiles,
        "BLOCK_B": 256,
        "BLOCK_P": triton.next_power_of_2(cost.num_programs + 1),
    }
    if batch_invariant:
        splits = {"MAX_SPLITS": cost.max_splits, "BLOCK_S": triton.next_power_of_2(cost.max_splits)}
        return options | splits
    return options | {"OVERHEAD": cost.overhead_tiles}


def plan(cache_seqlens: torch.Tensor, plan: DecodePlan) -> None:
    """Fill the buffers of `plan` for these lengths, on the current stream.

    Args:
        cache_seqlens: (batch,) int32, contiguous, on the plan's device.
        plan: buffers from `empty_plan`, whatever they hold.
    """
    if plan.batch == 0:
        for buffer in (plan.work_indptr, plan.split_indptr, plan.status, plan.counters):
            buffer.zero_()
        return
    options = compile_options(plan.cost, plan.batch_invariant)
    require_compiled(cache_seqlens.device, "mla_plan_kernel", *options.values())
    kernel = mla_plan_by_length_kernel if plan.batch_invariant else mla_plan_kernel
    kernel[(plan.batch,)](
        cache_seqlens, plan.work, plan.work_indptr, plan.split_indptr, plan.status, plan.counters,
        plan.batch, plan.work.shape[0], NO_LIMIT if plan.max_seqlen is None else plan.max_seqlen,
        num_warps=4, **options,
    )  # fmt: skip
