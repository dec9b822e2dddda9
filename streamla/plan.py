"""Which program reads which range, and who merges.

A plan is data with documented invariants. Kernels state their cost (`CostModel`); the planner knows
no kernel. The device planners are `kernels/*/plan.py`; `plan_reference` here is their oracle.

The tiles of all requests are laid end to end. A request occupies one unit a tile; an empty request
occupies one unit, since its zeros must be written by somebody. Between two requests lie
`overhead_tiles` units: what going on from one to the next costs a program. The line of U units is cut
into equal shares, one a program, wherever the cuts fall: program p takes the tiles in units
[p * U // P, (p + 1) * U // P). A request inside one share is finished by its program; one that a cut
crosses is *split*: each piece fills one partial slot and the merge finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from streamla.spec import MLASpec

WORK_FIELDS = ("request", "begin", "end", "seqlen", "slot", "split_begin", "split_end", "unused")
NO_SLOT = -1

LENGTH_NEGATIVE = 1  # status bit: a negative length was taken as 0
LENGTH_CLAMPED = 2  # status bit: a length above max_seqlen was cut to it


@dataclass(frozen=True)
class CostModel:
    """What a kernel tells the planner about itself.

    Attributes:
        tile_n: tokens a program takes in one step.
        num_programs: programs that run at once (the grid the kernel is launched on).
        overhead_tiles: what going on from one request to the next costs a program, in tiles.
        min_split_tiles: fewer units than this are not worth a program, nor fewer tiles a split of a
            batch-invariant plan.
        max_splits: most splits of one request in a batch-invariant plan.
    """

    tile_n: int
    num_programs: int
    overhead_tiles: int = 0
    min_split_tiles: int = 1
    max_splits: int = 64


@dataclass(frozen=True)
class DecodePlan:
    """The work of one decode step, in buffers of fixed address and capacity.

    Program p owns items [work_indptr[p], work_indptr[p + 1]). Item i is row i of `work`: tokens
    [begin, end) of a request that has `seqlen` tokens. With slot == -1 the item is the whole request and
    its program writes the result; otherwise it writes partial slot `slot`, and the request's slots are
    [split_begin, split_end). Rows past the last item are all zero, with slot -1.

    Attributes:
        spec, impl, cost: what the plan was made for; attention refuses another.
        batch: requests. Fixed: a captured graph serves this many rows (empty ones included).
        max_seqlen: lengths are cut to this many tokens (a page table's width); None for no limit.
        batch_invariant: split points depend on a request's own length only.
        work: (num_items, 8) int32, columns WORK_FIELDS.
        work_indptr: (num_programs + 1,) int32.
        split_indptr: (batch + 1,) int32; slots [split_indptr[b], split_indptr[b + 1]) are request b's,
            none if the request was not split.
        status: (1,) int32, bits LENGTH_NEGATIVE and LENGTH_CLAMPED.
        counters: (batch + 1,) int32 for kernels that merge in the same launch; the planner zeroes them. They count slots of
            all launches on the plan, so it must be made anew before 2^31 of a request's: 16 million launches of one in 132 splits.
        out_partial: (num_slots, seqlen_q, num_heads, kv_lora_rank) float32 workspace.
        lse_partial: (num_slots, seqlen_q, num_heads) float32 workspace, natural log.
    """

    spec: MLASpec
    impl: str
    cost: CostModel
    batch: int
    max_seqlen: int | None
    batch_invariant: bool
    work: torch.Tensor = field(repr=False)
    work_indptr: torch.Tensor = field(repr=False)
    split_indptr: torch.Tensor = field(repr=False)
    status: torch.Tensor = field(repr=False)
    counters: torch.Tensor = field(repr=False)
    out_partial: torch.Tensor = field(repr=False)
    lse_partial: torch.Tensor = field(repr=False)

    @property
    def device(self) -> torch.device:
        return self.work.device


def num_items_capacity(
    batch: int, cost: CostModel, batch_invariant: bool, max_seqlen: int | None = None
) -> int:
    """Rows of `work` that any lengths (up to max_seqlen) fit in."""
    if batch_invariant:
        return batch * _most_splits(cost, max_seqlen)
    # Every request is one item, and every cut between two programs makes one more.
    return batch + cost.num_programs - 1 if batch else 0


def num_slots_capacity(
    batch: int, cost: CostModel, batch_invariant: bool, max_seqlen: int | None = None
) -> int:
    """Partial slots that any lengths (up to max_seqlen) fit in."""
    if batch_invariant:
        splits = _most_splits(cost, max_seqlen)
        return batch * splits if splits > 1 else 0
    cuts = cost.num_programs - 1
    # A request with k cuts has k + 1 pieces, and at most every cut is in a request of its own.
    return min(2 * cuts, batch + cuts) if batch else 0


def _most_splits(cost: CostModel, max_seqlen: int | None) -> int:
    """Pieces of the longest request of a batch-invariant plan."""
    if max_seqlen is None:
        return cost.max_splits
    tiles = max(1, -(-max_seqlen // cost.tile_n))
    return min(cost.max_splits, -(-tiles // cost.min_split_tiles))


def workspace_bytes(
    batch: int, spec: MLASpec, cost: CostModel, batch_invariant: bool, max_seqlen: int | None
) -> int:
    """Bytes of the partial slots, out_partial and lse_partial together."""
    slots = num_slots_capacity(batch, cost, batch_invariant, max_seqlen)
    return slots * spec.rows * (spec.kv_lora_rank + 1) * 4


def empty_plan(
    batch: int,
    spec: MLASpec,
    impl: str,
    cost: CostModel,
    device: torch.device,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
) -> DecodePlan:
    """A plan whose buffers are allocated and not yet filled."""
    items = num_items_capacity(batch, cost, batch_invariant, max_seqlen)
    slots = num_slots_capacity(batch, cost, batch_invariant, max_seqlen)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    rows = (slots, spec.seqlen_q, spec.num_heads)
    return DecodePlan(
        spec=spec,
        impl=impl,
        cost=cost,
        batch=batch,
        max_seqlen=max_seqlen,
        batch_invariant=batch_invariant,
        work=torch.empty((items, len(WORK_FIELDS)), **int32),
        work_indptr=torch.empty(cost.num_programs + 1, **int32),
        split_indptr=torch.empty(batch + 1, **int32),
        status=torch.empty(1, **int32),
        counters=torch.empty(batch + 1, **int32),
        out_partial=torch.empty((*rows, spec.kv_lora_rank), **float32),
        lse_partial=torch.empty(rows, **float32),
    )


def plan_reference(cache_seqlens: torch.Tensor, plan: DecodePlan) -> DecodePlan:
    """Oracle of the device planner: plain Python, exact. Fills the buffers of `plan` and returns it.

    Args:
        cache_seqlens: (batch,) int32, tokens cached for each request, the new ones included.
        plan: buffers from `empty_plan`, on any device.
    """
    limit = plan.max_seqlen
    lengths, status = [], 0
    for n in cache_seqlens.tolist():
        status |= LENGTH_NEGATIVE * (n < 0)
        n = max(n, 0)
        if limit is not None and n > limit:
            status |= LENGTH_CLAMPED
            n = limit
        lengths.append(n)

    # Each program's pieces as (request, tile_begin, tile_end); an empty request is one empty tile.
    tiles = [max(1, -(-n // plan.cost.tile_n)) for n in lengths]
    cut = _cut_by_length if plan.batch_invariant else _cut_evenly
    shares = cut(tiles, plan.cost)

    num_pieces = [0] * len(tiles)
    for share in shares:
        for request, _, _ in share:
            num_pieces[request] += 1
    split_indptr = [0]
    for pieces in num_pieces:
        split_indptr.append(split_indptr[-1] + (pieces if pieces > 1 else 0))

    work, work_indptr, next_slot = [], [0], split_indptr[:-1]
    for share in shares:
        for request, tile_begin, tile_end in share:
            is_split = num_pieces[request] > 1
            slot = next_slot[request] if is_split else NO_SLOT
            next_slot[request] += is_split
            begin = tile_begin * plan.cost.tile_n
            end = min(lengths[request], tile_end * plan.cost.tile_n)
            splits = (split_indptr[request], split_indptr[request + 1])
            work.append((request, begin, end, lengths[request], slot, *splits, 0))
        work_indptr.append(len(work))

    work_indptr += [len(work)] * (plan.cost.num_programs - len(shares))
    work += [(0, 0, 0, 0, NO_SLOT, 0, 0, 0)] * (plan.work.shape[0] - len(work))
    plan.work.copy_(torch.tensor(work, dtype=torch.int32).reshape(plan.work.shape))
    plan.work_indptr.copy_(torch.tensor(work_indptr, dtype=torch.int32))
    plan.split_indptr.copy_(torch.tensor(split_indptr, dtype=torch.int32))
    plan.status.fill_(status)
    plan.counters.zero_()
    return plan


Share = list[tuple[int, int, int]]


def _cut_evenly(tiles: list[int], cost: CostModel) -> list[Share]:
    """Equal shares of the line of units, wherever the cuts fall."""
    total = total_units(tiles, cost)
    programs = active_programs(total, cost)
    shares: list[Share] = []
    request, first = 0, 0  # the first request not finished, and the unit of its first tile
    for p in range(programs):
        lo, hi = p * total // programs, (p + 1) * total // programs
        share: Share = []
        while request < len(tiles):
            begin, end = max(0, lo - first), min(tiles[request], hi - first)
            if begin < end:
                share.append((request, begin, end))
            if end < tiles[request]:
                break
            first += tiles[request] + cost.overhead_tiles
            request += 1
        shares.append(share)
    return shares


def total_units(tiles: Sequence[int], cost: CostModel) -> int:
    """Length of the line of requests of `tiles`, each at least one."""
    return sum(tiles) + cost.overhead_tiles * max(0, len(tiles) - 1)


def active_programs(units: int, cost: CostModel) -> int:
    """Programs that get a share of a line: `min_split_tiles` each, and a unit for every cut."""
    worth = (units + 1) // (cost.min_split_tiles + 1)
    return max(1, min(cost.num_programs, worth))


def _cut_by_length(tiles: list[int], cost: CostModel) -> list[Share]:
    """Pieces fixed by each request's own length; programs take equal numbers of pieces."""
    pieces: Share = []
    for request, n in enumerate(tiles):
        splits = min(-(-n // cost.min_split_tiles), cost.max_splits)
        cuts = [k * n // splits for k in range(splits + 1)]
        pieces += [(request, cuts[k], cuts[k + 1]) for k in range(splits)]
    programs = cost.num_programs
    bounds = [p * len(pieces) // programs for p in range(programs + 1)]
    return [pieces[bounds[p] : bounds[p + 1]] for p in range(programs)]
