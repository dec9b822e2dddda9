"""One run: for each shape, check every candidate against the oracle, then time those that are right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from streamla.arch import Arch, arch_of
from streamla.bench import floor, timing
from streamla.bench.candidates import Candidate, Prepared
from streamla.bench.check import Checked, Oracle
from streamla.bench.inputs import CachePool, Inputs
from streamla.bench.records import Record
from streamla.bench.workloads import Workload
from streamla.spec import MLASpec

FLOOR = "floor"
PLAN_LAUNCHES = 16
WARM_SECONDS = 0.2  # of reading, before the clocks are read


def run(
    workloads: Sequence[Workload],
    candidates: Callable[[MLASpec], Sequence[Candidate]],
    device: torch.device,
    *,
    on_shape: Callable[[Workload], None] = lambda workload: None,
    seed: int = 0,
) -> tuple[list[Record], dict | None]:
    """Measure every candidate on every shape.

    Args:
        workloads: shapes; those of one cache format share one pool, so the order of formats changes.
        candidates: gives the candidates for a spec.
        on_shape: called after each shape.

    Returns:
        The records in the order of `workloads`, and the GPU's state before and after (None without NVML).
    """
    arch = arch_of(device)
    cuda = device.type == "cuda"
    if cuda:
        floor.check(device, arch.units)
    numbered = sorted(enumerate(workloads), key=lambda item: item[1].spec.kv_format.value)
    states: list[timing.GPUState | None] = []
    records: dict[int, list[Record]] = {}
    for _, group in itertools.groupby(numbered, key=lambda item: item[1].spec.kv_format):
        items = list(group)
        pool = CachePool([w for _, w in items], device, arch.l2_bytes, seed)
        if cuda and not states:
            states.append(_busy_state(pool, arch, device))
        for index, workload in items:
            chosen = candidates(workload.spec)
            records[index] = _measure(pool.inputs(workload), chosen, arch, device)
            on_shape(workload)
        if cuda:
            states[1:] = [_busy_state(pool, arch, device)]
        del pool
    state = timing.state_record(states[0], states[-1]) if any(states) else None
    return [record for index in sorted(records) for record in records[index]], state


def _busy_state(pool: CachePool, arch: Arch, device: torch.device) -> timing.GPUState | None:
    """NVML's state while the GPU reads: an idle one would show its idle clocks."""
    words = pool.rows.view(-1)[: pool.rows.numel() // 16 * 16].view(torch.int32)
    folded = floor.folded_buffer(arch.units, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    floor.read(words, folded)
    end.record()
    end.synchronize()
    for _ in range(int(WARM_SECONDS * 1e3 / max(0.01, begin.elapsed_time(end)))):
        floor.read(words, folded)
    state = timing.gpu_state(device)
    torch.cuda.synchronize()
    return state


def _measure(
    inputs: Inputs, candidates: Sequence[Candidate], arch: Arch, device: torch.device
) -> list[Record]:
    """The records of one shape."""
    oracle = Oracle(inputs)
    records, ready = [], {}
    for candidate in candidates:
        record, prepared = _check(candidate, inputs, oracle, arch, device)
        records.append(record)
        if prepared is not None:
            ready[candidate.name] = prepared
    if not ready:
        return records
    calls: dict[str, list[Callable[[], None]]] = {
        name: [partial(prepared.call, region) for region in range(inputs.regions)]
        for name, prepared in ready.items()
    }
    if device.type == "cuda":
        calls[FLOOR] = _floor_calls(inputs, arch, device)
        times = timing.time_graphs(calls)
        eager = {name: timing.time_eager(calls[name]).us for name in ready}
        plans = _plan_times({n: p.plan for n, p in ready.items() if p.plan is not None})
    else:
        times, eager = timing.time_cpu(calls), {}
        steps = {n: [p.plan] for n, p in ready.items() if p.plan is not None}
        plans = {n: t.us for n, t in timing.time_cpu(steps).items()}
    for i, record in enumerate(records):
        if record.impl in ready:
            timed = _timed(record, times[record.impl], times.get(FLOOR), eager, plans)
            # The graphs have left the result of the last region behind: it must still be right.
            checked = oracle.check(ready[record.impl].out, record.exact)
            records[i], _ = _judged(timed, checked, " after replay")
    return records


def _check(
    candidate: Candidate, inputs: Inputs, oracle: Oracle, arch: Arch, device: torch.device
) -> tuple[Record, Prepared | None]:
    """A record without times, and the candidate ready to be timed if it is right."""
    workload = inputs.workload
    spec = workload.spec
    even = len(set(workload.lengths)) <= 1
    record = Record(
        grid=workload.grid,
        num_heads=spec.num_heads,
        kv_format=spec.kv_format.value,
        page_size=spec.page_size,
        seqlen_q=spec.seqlen_q,
        context=workload.context,
        requests=workload.requests,
        tokens=workload.tokens,
        cache_seqlens=None if even else list(workload.lengths),
        bytes=workload.bytes,
        impl=candidate.name,
        version=candidate.version,
        exact=candidate.exact,
        roof=roof(workload, arch),
    )
    refusal = candidate.refuse(spec, device)
    if refusal:
        return replace(record, note=refusal), None
    prepared = candidate.prepare(inputs)
    last = partial(prepared.call, inputs.regions - 1)
    checked = oracle.check_calls(last, prepared.out, candidate.exact)
    record = replace(
        record,
        programs=prepared.programs,
        programs_busy=prepared.programs_busy,
        splits=prepared.splits,
    )
    record, right = _judged(record, checked, "")
    return record, prepared if right else None


def _judged(record: Record, checked: Checked, when: str) -> tuple[Record, bool]:
    """The record with its error, without times if it is over its budget."""
    error = checked.error if math.isfinite(checked.error) else None
    used = checked.budget_used if math.isfinite(checked.budget_used) else None
    record = replace(record, error=error, budget_used=used, checked=checked.requests)
    if checked.budget_used <= 1:
        return record, True
    what = f"error {checked.error:.1e} is {checked.budget_used:.1f} times its budget"
    note = f"no time: {what if error is not None else 'the output is not finite'}{when}"
    record = replace(record, us=None, us_p25=None, us_p75=None, us_eager=None)
    return replace(record, x_floor=None, gbps=None, note=note), False


def _floor_calls(inputs: Inputs, arch: Arch, device: torch.device) -> list[Callable[[], None]]:
    folded = floor.folded_buffer(arch.units, device)
    floor.read(inputs.region_words[0], folded)  # compiles
    return [partial(floor.read, words, folded) for words in inputs.region_words]


def _plan_times(plans: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds of a plan, the same one over and over: its inputs are small and warm."""
    calls = {name: [plan] * PLAN_LAUNCHES for name, plan in plans.items()}
    return (
        {name: t.us for name, t in timing.time_graphs(calls, repeats=11).items()} if calls else {}
    )


def roof(workload: Workload, arch: Arch) -> str | None:
    """What bounds the shape by the vendor's rates: "memory" or "compute"; None for an unknown GPU."""
    if not arch.read_bytes_per_s or not arch.flops_per_s:
        return None
    reading = workload.bytes / arch.read_bytes_per_s
    return "memory" if reading >= workload.flops / arch.flops_per_s else "compute"


def _timed(
    record: Record,
    times: timing.Times,
    floor_times: timing.Times | None,
    eager: dict[str, float],
    plans: dict[str, float],
) -> Record:
    return replace(
        record,
        us=times.us,
        us_p25=times.us_p25,
        us_p75=times.us_p75,
        repeats=times.repeats,
        us_eager=eager.get(record.impl),
        plan_us=plans.get(record.impl),
        floor_us=floor_times.us if floor_times else None,
        x_floor=times.us / floor_times.us if floor_times else None,
        gbps=record.bytes / times.us / 1e3,
    )
