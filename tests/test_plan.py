"""The planner: every token once, equal shares, fixed capacity, and device equal to reference."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamla
from streamla.arch import ARCHS, CPU, arch_by_name, arch_of
from streamla.plan import (
    LENGTH_CLAMPED,
    LENGTH_NEGATIVE,
    NO_SLOT,
    CostModel,
    active_programs,
    empty_plan,
    num_items_capacity,
    num_slots_capacity,
    plan_reference,
    total_units,
)
from streamla.select import IMPLS
from streamla.spec import MLASpec
from streamla.testing.checks import check_plan

SPEC = MLASpec(num_heads=1, kv_lora_rank=16, qk_rope_head_dim=16)
MILLION = 1 << 20

COSTS = st.builds(
    CostModel,
    tile_n=st.sampled_from([16, 32, 64, 128]),
    num_programs=st.sampled_from([1, 2, 7, 8, 132, 264, 304]),
    overhead_tiles=st.sampled_from([0, 1, 3, 7]),
    min_split_tiles=st.sampled_from([1, 2, 5]),
    max_splits=st.sampled_from([1, 4, 64]),
)
LENGTH = st.one_of(
    st.integers(0, 3), st.integers(0, 300), st.sampled_from([63, 64, 65, 128, 4096]),
    st.integers(0, MILLION),
)  # fmt: skip
# A pattern and how often it repeats: batches of 0 to 1024 requests.
LENGTHS = st.builds(
    lambda pattern, times: (pattern * times)[:1024],
    st.lists(LENGTH, max_size=40),
    st.sampled_from([1, 1, 1, 2, 30]),
)
SLOW_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(lengths, cost, max_seqlen=None, batch_invariant=False, device="cpu", impl="reference"):
    plan = empty_plan(
        len(lengths), SPEC, impl, cost, torch.device(device), max_seqlen, batch_invariant
    )
    for buffer in (plan.work, plan.work_indptr, plan.split_indptr, plan.status, plan.counters):
        buffer.fill_(-7)
    return plan, torch.tensor(lengths, dtype=torch.int32, device=device)


def reference(lengths, cost, **options):
    plan, seqlens = make(lengths, cost, **options)
    return plan_reference(seqlens, plan)


def items_of(plan):
    """(program, row) of every item."""
    indptr, work = plan.work_indptr.tolist(), plan.work.tolist()
    assert indptr[0] == 0
    assert all(a <= b for a, b in itertools.pairwise(indptr))
    assert indptr[-1] <= len(work)
    return [(p, work[i]) for p in range(len(indptr) - 1) for i in range(indptr[p], indptr[p + 1])]


def check_invariants(plan, lengths):
    """What DecodePlan documents."""
    items = items_of(plan)
    split_indptr = plan.split_indptr.tolist()
    pieces: dict[int, list] = {b: [] for b in range(len(lengths))}
    for _, (request, begin, end, seqlen, slot, split_begin, split_end, unused) in items:
        assert seqlen == lengths[request]
        assert begin % plan.cost.tile_n == 0
        assert [split_begin, split_end] == split_indptr[request : request + 2]
        assert unused == 0
        pieces[request].append((begin, end, slot))
    used = []
    for request, length in enumerate(lengths):
        # In order, without a gap or an overlap, from 0 to the length: every token exactly once.
        own = pieces[request]
        assert own, f"request {request} belongs to nobody"
        assert own[0][0] == 0
        assert own[-1][1] == length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(own))
        assert all(begin < end for begin, end, _ in own) or (len(own) == 1 and length == 0)
        slots = [slot for _, _, slot in own]
        expected = range(split_indptr[request], split_indptr[request + 1])
        assert slots == ([NO_SLOT] if len(own) == 1 else list(expected))
        used += [slot for slot in slots if slot != NO_SLOT]
    assert used == list(range(split_indptr[-1]))
    assert len(used) <= plan.lse_partial.shape[0]
    assert plan.work[len(items) :].tolist() == [[0, 0, 0, 0, NO_SLOT, 0, 0, 0]] * (
        len(plan.work) - len(items)
    )
    assert not plan.counters.any()


@SLOW_MACHINE
@given(LENGTHS, COSTS, st.booleans())
def test_every_token_belongs_to_one_item(lengths, cost, batch_invariant):
    check_invariants(reference(lengths, cost, batch_invariant=batch_invariant), lengths)


@SLOW_MACHINE
@given(LENGTHS, COSTS)
def test_no_program_costs_more_than_its_share(lengths, cost):
    """Cost = tiles + overhead for each item after the first. A share has ceil(units / programs) units at most."""
    plan = reference(lengths, cost)
    tiles = [max(1, -(-n // cost.tile_n)) for n in lengths]
    units = total_units(tiles, cost)
    active = active_programs(units, cost)
    spent = [-cost.overhead_tiles] * cost.num_programs
    for program, (_, begin, end, *_) in items_of(plan):
        spent[program] += max(1, -(-(end - begin) // cost.tile_n)) + cost.overhead_tiles
    assert max(spent) <= -(-units // active)
    assert not any(s != -cost.overhead_tiles for s in spent[active:])
    # And none has less than its share less what is only overhead, at either end of it.
    if lengths:
        assert min(spent[:active]) >= units // active - 2 * cost.overhead_tiles


@SLOW_MACHINE
@given(LENGTHS, COSTS)
def test_without_overhead_shares_differ_by_one_tile(lengths, cost):
    plan = reference(lengths, dataclasses.replace(cost, overhead_tiles=0, min_split_tiles=1))
    tiles = [0] * cost.num_programs
    for program, (_, begin, end, *_) in items_of(plan):
        tiles[program] += max(1, -(-(end - begin) // cost.tile_n))
    used = [n for n in tiles if n]
    assert not used or max(used) - min(used) <= 1


@SLOW_MACHINE
@given(
    st.lists(st.one_of(st.integers(-(2**31), 2**31 - 1), LENGTH), max_size=30), COSTS,
    st.one_of(st.none(), st.integers(0, 5000)), st.booleans(),
)  # fmt: skip
def test_lengths_are_cut_and_the_status_says_so(lengths, cost, max_seqlen, batch_invariant):
    plan = reference(lengths, cost, max_seqlen=max_seqlen, batch_invariant=batch_invariant)
    limit = 2**31 - 1 if max_seqlen is None else max_seqlen
    check_invariants(plan, [min(max(n, 0), limit) for n in lengths])
    negative, clamped = any(n < 0 for n in lengths), any(n > limit for n in lengths)
    assert plan.status.item() == LENGTH_NEGATIVE * negative + LENGTH_CLAMPED * clamped


@SLOW_MACHINE
@given(LENGTHS, COSTS, st.booleans())
def test_the_same_lengths_give_the_same_plan(lengths, cost, batch_invariant):
    one = reference(lengths, cost, batch_invariant=batch_invariant)
    other = reference(lengths, cost, batch_invariant=batch_invariant)
    for name in ("work", "work_indptr", "split_indptr", "status", "counters"):
        assert torch.equal(getattr(one, name), getattr(other, name))


@SLOW_MACHINE
@given(LENGTH, st.lists(LENGTH, max_size=20), st.integers(0, 20), COSTS)
def test_batch_invariant_cuts_do_not_depend_on_batch_mates(length, mates, place, cost):
    lengths = [*mates[:place], length, *mates[place:]]
    request = len(mates[:place])
    alone = reference([length], cost, batch_invariant=True)
    beside = reference(lengths, cost, batch_invariant=True)
    cuts = [item[1:3] for _, item in items_of(beside) if item[0] == request]
    assert cuts == [item[1:3] for _, item in items_of(alone)]
    assert len(cuts) <= cost.max_splits


@settings(SLOW_MACHINE, max_examples=25)
@given(st.integers(0, 1024), COSTS, st.booleans())
def test_buffers_hold_the_worst_lengths(batch, cost, batch_invariant):
    """Lengths that make the most pieces: long ones, so that every cut is in a request of its own."""
    items = num_items_capacity(batch, cost, batch_invariant)
    slots = num_slots_capacity(batch, cost, batch_invariant)
    for length in (0, 1, cost.tile_n + 1, MILLION):
        plan = reference([length] * batch, cost, batch_invariant=batch_invariant)
        assert len(items_of(plan)) <= items
        assert int(plan.split_indptr[-1]) <= slots


@pytest.mark.parametrize("name", [arch.name for arch in ARCHS])
@pytest.mark.parametrize("heads", [8, 12, 16, 64, 96, 128])
def test_one_request_fills_the_machine(name, heads):
    """At batch 1 at least 90 % of the programs work, when there are the tiles."""
    arch = arch_by_name(name)
    spec = MLASpec(num_heads=heads, kv_format="fp8_e4m3fn")
    for impl in IMPLS:
        if impl.why_not(spec, arch) is not None:
            continue
        cost = impl.load().cost_model(spec, arch)
        plan = reference([131072], cost)
        busy = {program for program, _ in items_of(plan)}
        assert len(busy) >= 0.9 * cost.num_programs, f"{impl.name}: {len(busy)}"


@pytest.mark.parametrize(
    ("tokens", "requests", "programs"),
    [
        (1024, 1, 8),
        (2048, 1, 16),
        (4096, 1, 32),
        (8192, 1, 64),
        (32768, 1, 132),
        (1024, 4, 34),
        (2048, 4, 66),
        (4096, 4, 130),
        (8192, 4, 132),
    ],
)
def test_overhead_does_not_thin_out_the_programs_of_short_requests(tokens, requests, programs):
    """What going on to the next request costs says nothing of how far one may be spread: to two tiles a program."""
    spec, arch = MLASpec(num_heads=16, kv_format="fp8_e4m3fn"), arch_by_name("h200")
    own = next(i for i in IMPLS if i.name == "sm90").load().cost_model(spec, arch)
    tiles = [tokens // own.tile_n] * requests
    little = dataclasses.replace(own, overhead_tiles=1)
    assert active_programs(total_units(tiles, little), little) == programs
    assert active_programs(total_units(tiles, own), own) >= programs
    busy = {program for program, _ in items_of(reference([tokens] * requests, own))}
    # Shares of two tiles or more may lie between two requests, where nothing is to do.
    assert len(busy) >= programs - (requests - 1) * (own.overhead_tiles // 2)


def test_sixteen_requests_on_264_programs_are_balanced():
    """272 pieces would be a second wave; equal shares are not."""
    cost = CostModel(tile_n=64, num_programs=264)
    plan = reference([131072] * 16, cost)
    tiles = [0] * 264
    for program, (_, begin, end, *_) in items_of(plan):
        tiles[program] += (end - begin) // 64
    assert max(tiles) - min(tiles) <= 1
    assert max(tiles) == -(-16 * 2048 // 264)


def test_workspace_of_a_large_batch_is_bounded():
    """Partial slots grow with the programs, not with the batch, the lengths or the heads' product."""
    for arch in ARCHS:
        for heads in (16, 128):
            spec = MLASpec(num_heads=heads, seqlen_q=4, kv_format="fp8_e4m3fn")
            for impl in IMPLS:
                if impl.why_not(spec, arch) is not None:
                    continue
                cost = impl.load().cost_model(spec, arch)
                rows = num_slots_capacity(1024, cost, False) * spec.rows
                assert rows * spec.kv_lora_rank * 4 < 600e6, f"{impl.name} on {arch.name}"


def test_a_reused_plan_keeps_its_addresses():
    seqlens = torch.tensor([300, 0, 65], dtype=torch.int32)
    spec = MLASpec(num_heads=2)
    plan = streamla.plan(seqlens, spec, impl="reference")
    addresses = [plan.work.data_ptr(), plan.out_partial.data_ptr(), plan.counters.data_ptr()]
    again = streamla.plan(seqlens * 3, spec, impl="reference", out=plan)
    assert again is plan
    assert [
        plan.work.data_ptr(),
        plan.out_partial.data_ptr(),
        plan.counters.data_ptr(),
    ] == addresses
    check_invariants(plan, [900, 0, 195])


DEVICE_COSTS = st.builds(
    CostModel,
    tile_n=st.sampled_from([16, 64]),
    num_programs=st.sampled_from([1, 3, 8, 16]),
    overhead_tiles=st.sampled_from([0, 1, 3]),
    min_split_tiles=st.sampled_from([1, 2]),
    max_splits=st.sampled_from([1, 4, 8]),
)


def check_device_plan(lengths, cost, max_seqlen, batch_invariant, device="cpu", impl="portable"):
    plan, seqlens = make(lengths, cost, max_seqlen, batch_invariant, device, impl)
    next(i for i in IMPLS if i.name == impl).load().plan(seqlens, plan)
    check_plan(plan, seqlens)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(LENGTH, st.integers(-5, 2**31 - 1)), max_size=10), DEVICE_COSTS,
    st.one_of(st.none(), st.integers(0, 3000)), st.booleans(),
)  # fmt: skip
def test_the_portable_planner_equals_the_reference(lengths, cost, max_seqlen, batch_invariant):
    check_device_plan(lengths, cost, max_seqlen, batch_invariant)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")
@pytest.mark.slow
def test_the_portable_planner_on_more_requests_than_one_block():
    lengths = [(37 * b) % 500 for b in range(258)]
    cost = CostModel(tile_n=64, num_programs=8, overhead_tiles=1, min_split_tiles=2)
    check_device_plan(lengths, cost, None, False)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["sm90", "portable"])
def test_the_device_planners_equal_the_reference(impl, seed):
    device = torch.device("cuda")
    arch = arch_of(device)
    spec = MLASpec(num_heads=16, kv_format="fp8_e4m3fn")
    chosen = next(i for i in IMPLS if i.name == impl)
    if (reason := chosen.why_not(spec, arch)) is not None:
        pytest.skip(reason)
    own = chosen.load().cost_model(spec, arch)
    generator = torch.Generator().manual_seed(seed)
    for round_, batch in enumerate((0, 1, 2, 3, 16, 31, 255, 256, 257, 512, 1024)):
        for most in (1, 300, 10_000, MILLION):
            lengths = torch.randint(
                -1 if round_ % 2 else 0, most + 1, (batch,), generator=generator
            )
            check_device_plan(lengths.tolist(), own, None, False, device, impl)
            check_device_plan(lengths.tolist(), own, most // 2, True, device, impl)


def test_the_cpu_splits():
    """The tests without a GPU meet split requests only if the CPU has programs to split over."""
    assert CPU.units > 1
    plan = reference([1000], CostModel(tile_n=64, num_programs=CPU.units))
    assert int(plan.split_indptr[-1]) == CPU.units
