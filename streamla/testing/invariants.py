"""Checks of a whole step rather than of one batch: replays, batch mates, bounds, hand-made plans.

Each takes (case, impl, device, seed), raises AssertionError, and returns the nearest approach to a
budget. `verify` runs them after the cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from streamla import api
from streamla.plan import LENGTH_CLAMPED, NO_SLOT, DecodePlan
from streamla.testing.budget import Deviation, assert_within_budget, expect
from streamla.testing.build import Inputs, build
from streamla.testing.canary import HUGE_BYTE, NAN_BYTE
from streamla.testing.cases import Case
from streamla.testing.checks import assert_same_bits, check_plan, decode, guarded, with_lengths

Check = Callable[[Case, str, torch.device, int], Deviation]


@dataclass(frozen=True)
class Invariant:
    name: str
    reason: str
    case: Case
    check: Check


def first_requests(inputs: Inputs, count: int) -> Inputs:
    """The first `count` requests of a batch, on the same memory."""
    case = dataclasses.replace(inputs.case, lengths=inputs.case.lengths[:count])
    q_pe = None if inputs.q_pe is None else inputs.q_pe[:count]
    return dataclasses.replace(
        inputs, case=case, q=inputs.q[:count], q_pe=q_pe, page_table=inputs.page_table[:count],
        cache_seqlens=inputs.cache_seqlens[:count],
    )  # fmt: skip


def batch_mates(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Request 0 alone and beside others: the same bits if batch-invariant, the same budget if not."""
    inputs = build(case, device, seed)
    alone = first_requests(inputs, 1)
    expected = expect(alone)
    out, lse = decode(alone, guarded(alone, impl, NAN_BYTE), return_lse=True)
    worst = assert_within_budget(out, lse, expected)
    for count in (2, 8, len(case.lengths)):
        batch = first_requests(inputs, count)
        together, together_lse = decode(batch, guarded(batch, impl, HUGE_BYTE), return_lse=True)
        if case.batch_invariant:
            assert_same_bits("out", together[:1], out, f"{count - 1} batch mates")
            assert_same_bits("lse", together_lse[:1], lse, f"{count - 1} batch mates")
        else:
            assert_within_budget(together[:1], together_lse[:1], expected)
    return worst


def upper_bound(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """A bound above the lengths changes no bit; a bound below cuts them and says so."""
    inputs = build(case, device, seed)
    expected = expect(inputs)
    wide = dataclasses.replace(case, max_seqlen=None)
    plain = dataclasses.replace(inputs, case=wide)
    out, lse = decode(plain, guarded(plain, impl, NAN_BYTE), return_lse=True)
    worst = assert_within_budget(out, lse, expected)
    longest = max(case.lengths)
    for bound in (longest, 2 * longest, case.max_seqlen):
        bounded = dataclasses.replace(inputs, case=dataclasses.replace(case, max_seqlen=bound))
        again = decode(bounded, guarded(bounded, impl, HUGE_BYTE))
        assert_same_bits("out", again, out, f"max_seqlen {bound}")

    cut = with_lengths(inputs, tuple(min(n, 64) for n in case.lengths))
    low = dataclasses.replace(inputs, case=dataclasses.replace(case, max_seqlen=64))
    if device.type == "cpu":  # lengths are known: an error, before anything is launched
        try:
            guarded(low, impl, NAN_BYTE)
        except ValueError:
            return worst
        raise AssertionError("a length above max_seqlen was taken")
    plan = guarded(low, impl, NAN_BYTE)
    assert int(plan.status) == LENGTH_CLAMPED, f"status {int(plan.status)} of a length cut to 64"
    out, lse = decode(low, plan, return_lse=True)
    assert_within_budget(out, lse, expect(cut))
    return worst


def write_plan(plan: DecodePlan, lengths: tuple[int, ...], splits: int) -> bool:
    """Fill `plan` by hand: every request in up to `splits` pieces, pieces dealt out to the programs.

    False if the plan's buffers cannot hold that.
    """
    tile_n = plan.cost.tile_n
    work, split_indptr = [], [0]
    for request, seqlen in enumerate(lengths):
        tiles = max(1, -(-seqlen // tile_n))
        pieces = min(splits, tiles)
        begin_slot = split_indptr[-1]
        end_slot = begin_slot + (pieces if pieces > 1 else 0)
        split_indptr.append(end_slot)
        for k in range(pieces):
            begin, end = (k * tiles // pieces * tile_n, (k + 1) * tiles // pieces * tile_n)
            slot = begin_slot + k if pieces > 1 else NO_SLOT
            work.append((request, begin, min(end, seqlen), seqlen, slot, begin_slot, end_slot, 0))
    if len(work) > len(plan.work) or split_indptr[-1] > len(plan.lse_partial):
        return False
    programs = plan.cost.num_programs
    indptr = [p * len(work) // programs for p in range(programs + 1)]
    plan.work[: len(work)] = torch.tensor(work, dtype=torch.int32)
    plan.work_indptr.copy_(torch.tensor(indptr, dtype=torch.int32))
    plan.split_indptr.copy_(torch.tensor(split_indptr, dtype=torch.int32))
    plan.counters.zero_()
    return True


def forced_splits(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """The number of splits changes nothing but rounding."""
    inputs = build(case, device, seed)
    expected = expect(inputs)
    worst = Deviation(0.0, 1.0, "out")
    for k, splits in enumerate((1, 2, 3, 4, 5, 8, 16, 32, 64)):
        plan = guarded(inputs, impl, (NAN_BYTE, HUGE_BYTE)[k % 2])
        if not write_plan(plan, case.lengths, splits):
            break
        out, lse = inputs.outputs()
        decode(inputs, plan, out=out, lse=lse, return_lse=True)
        worst = max(worst, assert_within_budget(out, lse, expected), key=lambda d: d.used)
    inputs.check_canaries()
    return worst


def one_plan_many_layers(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """One plan serves every layer, and every repetition gives the same bits."""
    layers = [build(case, device, seed + layer) for layer in range(3)]
    plan = guarded(layers[0], impl, NAN_BYTE)
    first = [decode(layer, plan, return_lse=True) for layer in layers]
    worst = Deviation(0.0, 1.0, "out")
    for layer, (out, lse) in zip(layers, first, strict=True):
        worst = max(worst, assert_within_budget(out, lse, expect(layer)), key=lambda d: d.used)
    for repetition in range(200 if device.type == "cuda" else 1):
        for layer, (out, lse) in zip(layers, first, strict=True):
            again, again_lse = decode(layer, plan, return_lse=True)
            assert_same_bits("out", again, out, f"repetition {repetition}")
            assert_same_bits("lse", again_lse, lse, f"repetition {repetition}")
    return worst


def smaller_pages(inputs: Inputs, page_size: int) -> Inputs:
    """The same memory as more, smaller pages, and the table that says the same with them."""
    parts = inputs.spec.page_size // page_size
    kv_cache = inputs.kv_cache.flatten(0, 1).unflatten(0, (-1, page_size))
    ids = inputs.page_table.long()[..., None] * parts
    ids = ids + torch.arange(parts, device=ids.device)
    table = torch.where(inputs.page_table[..., None] < 0, -1, ids).flatten(1).to(torch.int32)
    case = dataclasses.replace(inputs.case, page_size=page_size)
    return dataclasses.replace(
        inputs, case=case, spec=case.spec, kv_cache=kv_cache, page_table=table
    )


def page_sizes(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """The same rows as pages of 480 tokens, as engines with several kinds of layers have, of 96, 16, 1."""
    inputs = build(case, device, seed, garbage=-1)
    out, lse = decode(inputs, guarded(inputs, impl, NAN_BYTE), return_lse=True)
    worst = assert_within_budget(out, lse, expect(inputs))
    for page_size in (96, 16, 1):
        same = smaller_pages(inputs, page_size)
        again, again_lse = decode(same, guarded(same, impl, HUGE_BYTE), return_lse=True)
        assert_same_bits("out", again, out, f"pages of {page_size}")
        assert_same_bits("lse", again_lse, lse, f"pages of {page_size}")
    return worst


def batch_sizes(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Batches of 1 to 200 requests of 1 to 4096 tokens end, with the right result."""
    worst = Deviation(0.0, 1.0, "out")
    for batch in (1, 2, 3, 4, 8, 16, 64, 200):
        for length in (1, 100, 4096):
            inputs = build(dataclasses.replace(case, lengths=(length,) * batch), device, seed)
            out, lse = decode(inputs, guarded(inputs, impl, NAN_BYTE), return_lse=True)
            deviation = assert_within_budget(out, lse, expect(inputs))
            worst = max(worst, deviation, key=lambda d: d.used)
    return worst


def graph_replay(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Captured with no tokens, replayed with other lengths: shorter, longer, none, ragged."""
    batch, longest = len(case.lengths), max(case.lengths)
    replays = (
        (0,) * batch,
        (1,) * batch,
        case.lengths,
        tuple(longest * (b % 2) for b in range(batch)),
        tuple(min(n, 65) for n in case.lengths),
        (0,) * (batch - 1) + (longest,),
        case.lengths,
    )
    return replay_lengths(case, impl, device, seed, replays)


def replay_lengths(
    case: Case, impl: str, device: torch.device, seed: int, replays: Sequence[tuple[int, ...]]
) -> Deviation:
    """One graph, captured with no tokens and replayed with each of `replays` (cut to the case's lengths)."""
    inputs = build(case, device, seed, poison=None)
    plan = guarded(inputs, impl, NAN_BYTE)
    out, lse = inputs.outputs()
    seqlens = inputs.cache_seqlens

    def step() -> None:
        api.plan(seqlens, inputs.spec, impl=impl, batch_invariant=case.batch_invariant, out=plan)
        decode(inputs, plan, out=out, lse=lse, return_lse=True)

    step()  # compiles
    seqlens.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    worst = Deviation(0.0, 1.0, "out")
    for lengths in replays:
        lengths = tuple(min(n, most) for n, most in zip(lengths, case.lengths, strict=True))
        seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        plan.out_partial.fill_(torch.nan)
        plan.lse_partial.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        now = with_lengths(inputs, lengths)
        check_plan(plan, seqlens, used=True)
        deviation = assert_within_budget(out, lse, expect(now), case.lse_base)
        worst = max(worst, deviation, key=lambda d: d.used)
        eager = decode(now, guarded(now, impl, HUGE_BYTE))
        assert_same_bits("out", out, eager, "replayed and eager")
    inputs.check_canaries()
    return worst


def two_graphs(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Two graphs from one memory pool, replayed in turn: neither leaves anything for the other."""
    steps = [build(case, device, seed + k) for k in range(2)]
    plans = [guarded(step, impl, NAN_BYTE) for step in steps]
    alone = [decode(step, plan) for step, plan in zip(steps, plans, strict=True)]
    worst = assert_within_budget(alone[0], None, expect(steps[0]))
    torch.cuda.synchronize()
    graphs, results, pool = [], [], None
    for step, plan in zip(steps, plans, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            api.plan(step.cache_seqlens, step.spec, impl=impl, out=plan)
            scratch = torch.full_like(alone[0], torch.nan)  # freed: its place may be used again
            del scratch
            results.append(decode(step, plan))
        pool = graph.pool()
        graphs.append(graph)
    for k in (1, 0, 0, 1, 1, 0):
        plans[k].counters.fill_(-1)
        results[k].fill_(torch.nan)
        graphs[k].replay()
        torch.cuda.synchronize()
        assert_same_bits("out", results[k], alone[k], f"replay of graph {k}")
    return worst


def no_sync(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """plan and decode return while the stream is still busy with what came before."""
    inputs = build(case, device, seed)
    plan = guarded(inputs, impl, NAN_BYTE)
    out, lse = inputs.outputs()
    decode(inputs, plan, out=out, lse=lse, return_lse=True)  # compiles
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)  # about 0.2 s of clocks
        busy.record()
        api.plan(
            inputs.cache_seqlens, inputs.spec, impl=impl, batch_invariant=case.batch_invariant,
            out=plan,
        )  # fmt: skip
        decode(inputs, plan, out=out, lse=lse, return_lse=True)
        returned_early = not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert returned_early, "plan or decode waited for the stream"
    return assert_within_budget(out, lse, expect(inputs))


def two_streams(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Two steps overlap on two streams, each with its plan: neither sees the other's scratch."""
    steps = [build(case, device, seed + k) for k in range(2)]
    plans = [guarded(step, impl, NAN_BYTE) for step in steps]
    alone = [decode(step, plan) for step, plan in zip(steps, plans, strict=True)]
    worst = assert_within_budget(alone[0], None, expect(steps[0]))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    outputs = [[step.outputs()[0] for _ in range(50)] for step in steps]
    torch.cuda.synchronize()
    for repetition in range(50):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                api.plan(
                    steps[k].cache_seqlens, steps[k].spec, impl=impl, out=plans[k],
                    batch_invariant=case.batch_invariant,
                )  # fmt: skip
                decode(steps[k], plans[k], out=outputs[k][repetition])
    torch.cuda.synchronize()
    for k in range(2):
        for repetition in range(50):
            assert_same_bits("out", outputs[k][repetition], alone[k], f"overlap {repetition}")
    return worst


_MATES = Case("", "", (300,) + (40, 130, 7, 64, 1, 0, 90) * 2)
_MATES_GPU = Case("", "", (3000, *(1 + (37 * b) % 700 for b in range(255))), gpu=True)
_STEP_GPU = Case("", "", (5000, 1, 700, 64, 0, 129, 20000, 33), gpu=True)
# Six million tiles in 600 runs: a race that strikes once in a million shows.
_LONG_GPU = Case("", "", tuple(64 * k - k % 3 for k in range(301, 333)), gpu=True)
_STEP_BF16_GPU = dataclasses.replace(_STEP_GPU, kv_format="bf16")
_STEP_CAUSAL_GPU = dataclasses.replace(_STEP_GPU, seqlen_q=4, num_heads=8)


def _on(check: Check, name: str, case: Case) -> Invariant:
    return Invariant(name, str(check.__doc__), case, check)


INVARIANTS: tuple[Invariant, ...] = (
    _on(batch_mates, "batch-mates", _MATES),
    _on(batch_mates, "batch-mates-invariant", dataclasses.replace(_MATES, batch_invariant=True)),
    _on(batch_mates, "gpu-batch-mates", _MATES_GPU),
    _on(batch_mates, "gpu-batch-mates-invariant", dataclasses.replace(_MATES_GPU, batch_invariant=True)),
    _on(upper_bound, "upper-bound", Case("", "", (200, 5, 130), max_seqlen=131072)),
    _on(forced_splits, "forced-splits", Case("", "", (520, 3, 200), kv_format="bf16")),
    _on(forced_splits, "forced-splits-few-tokens", Case("", "", (1, 2, 33, 64))),
    _on(forced_splits, "forced-splits-offset", Case("", "", (600,), data="offset+300")),
    _on(forced_splits, "forced-splits-causal", Case("", "", (513, 449), seqlen_q=4, num_heads=8)),
    _on(forced_splits, "gpu-forced-splits", Case("", "", (20000,), gpu=True)),
    _on(page_sizes, "page-sizes", Case("", "", (481, 127, 251), page_size=480)),
    _on(batch_sizes, "gpu-batch-sizes", Case("", "", (4096,), distinct_pages=64, gpu=True)),
    _on(one_plan_many_layers, "one-plan-many-layers", Case("", "", (600, 0, 65, 1))),
    _on(one_plan_many_layers, "gpu-one-plan-many-layers", _STEP_GPU),
    _on(one_plan_many_layers, "gpu-repeats", _LONG_GPU),
    _on(one_plan_many_layers, "gpu-repeats-8-heads", dataclasses.replace(_LONG_GPU, num_heads=8)),
    _on(one_plan_many_layers, "gpu-repeats-64-heads", dataclasses.replace(_LONG_GPU, num_heads=64)),
    _on(one_plan_many_layers, "gpu-repeats-ds-mla", dataclasses.replace(_LONG_GPU, kv_format="fp8_ds_mla")),
    _on(one_plan_many_layers, "gpu-repeats-bf16", dataclasses.replace(_LONG_GPU, kv_format="bf16")),
    _on(graph_replay, "gpu-graph-replay", _STEP_GPU),
    _on(graph_replay, "gpu-graph-replay-bf16", _STEP_BF16_GPU),
    _on(graph_replay, "gpu-graph-replay-causal", _STEP_CAUSAL_GPU),
    _on(graph_replay, "gpu-graph-replay-invariant", dataclasses.replace(_STEP_GPU, batch_invariant=True)),
    _on(two_graphs, "gpu-two-graphs", _STEP_GPU),
    _on(no_sync, "gpu-no-sync", _STEP_GPU),
    _on(two_streams, "gpu-two-streams", _STEP_GPU),
)  # fmt: skip
