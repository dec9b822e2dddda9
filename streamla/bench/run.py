"""One run: for each shape, check every candidate against the oracle, then time those that are right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from streamla.arch import Arch, arch_of
from streamla.bench import floor, timing
from streamla.bench.candidates import Candidate, Prepared, first_line
from streamla.bench.check import Checked, Oracle
from streamla.bench.inputs import CachePool, Inputs
from streamla.bench.records import Record
from streamla.bench.workloads import Workload
from streamla.spec import MLASpec

FLOOR = "floor"
LOST = "no time: the GPU was lost in "
PLAN_LAUNCHES = 16
WARM_SECONDS = 0.2  # of reading, before the clocks are read
T = TypeVar("T")


class DeviceLost(RuntimeError):
    """A peer left the GPU in an error that ends every later call of this process."""


@dataclass
class Entry:
    """A candidate on one shape: its record so far, and itself ready, or None once it is out."""

    candidate: Candidate
    record: Record
    prepared: Prepared | None = None

    def attempt(self, action: Callable[[], T], needed: bool = True) -> T | None:
        """`action()`. A peer that fails in what is needed is out, with a note; our own failure is raised."""
        try:
            result = action()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return result
        except Exception as error:
            if not self.candidate.peer:
                raise
            if needed:
                self.prepared = None
                self.record = replace(self.record, note=f"no time: {first_line(error)}")
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise DeviceLost(f"{self.record.impl}: {first_line(error)}") from error
        return None


def run(
    workloads: Sequence[Workload],
    candidates: Callable[[MLASpec], Sequence[Candidate]],
    device: torch.device,
    *,
    on_shape: Callable[[Workload], None] = lambda workload: None,
    seed: int = 0,
    energy: bool = False,
) -> tuple[list[Record], dict | None]:
    """Measure every candidate on every shape.

    Args:
        workloads: shapes; those of one cache format share one pool, so the order of formats changes.
        candidates: gives the candidates for a spec.
        on_shape: called after each shape.
        energy: also read the energy of each candidate, which takes about half a second more each.

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
            records[index] = _measure(pool.inputs(workload), chosen, arch, device, energy)
            on_shape(workload)
            if lost(records[index]):
                return _in_order(records), None
        if cuda:
            states[1:] = [_busy_state(pool, arch, device)]
        del pool
    state = timing.state_record(states[0], states[-1]) if any(states) else None
    return _in_order(records), state


def lost(records: Sequence[Record]) -> bool:
    """Whether the GPU was lost, so that nothing more can be measured in this process."""
    return any(r.note and r.note.startswith(LOST) for r in records)


def _in_order(records: dict[int, list[Record]]) -> list[Record]:
    return [record for index in sorted(records) for record in records[index]]


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
    inputs: Inputs,
    candidates: Sequence[Candidate],
    arch: Arch,
    device: torch.device,
    energy: bool,
) -> list[Record]:
    """The records of one shape."""
    oracle = Oracle(inputs)
    entries = [Entry(c, _empty_record(c, inputs.workload, arch)) for c in candidates]
    try:
        for entry in entries:
            entry.attempt(partial(_check, entry, inputs, oracle, device))
        if device.type == "cuda":
            _time_on_gpu(entries, inputs, oracle, arch, device, energy)
        else:
            _time_on_cpu(entries, inputs, oracle)
    except DeviceLost as error:
        return [replace(e.record, us=None, note=f"{LOST}{error}") for e in entries]
    return [entry.record for entry in entries]


def _time_on_gpu(
    entries: Sequence[Entry],
    inputs: Inputs,
    oracle: Oracle,
    arch: Arch,
    device: torch.device,
    energy: bool,
) -> None:
    graphs = {FLOOR: timing.capture(_floor_calls(inputs, arch, device))}
    for entry in _ready(entries):
        graph = entry.attempt(partial(timing.capture, _calls(entry, inputs)))
        if graph is not None:
            graphs[entry.record.impl] = graph
    if not _ready(entries):
        return
    times = timing.time_replays(graphs)
    for entry in _ready(entries):
        entry.record = _timed(entry.record, times[entry.record.impl], times[FLOOR])
        # The graphs have left the result of the last region behind: it must still be right.
        _judge(entry, oracle, " after replay")
    for entry in _ready(entries) if energy and inputs.workload.tokens else ():
        graph, us = graphs[entry.record.impl], times[entry.record.impl].us
        joules = entry.attempt(partial(timing.joules, graph, us, device), needed=False)
        if joules is not None:
            per_mtoken = joules * 1e6 / inputs.workload.tokens
            entry.record = replace(entry.record, joules_per_mtoken=per_mtoken)
    for entry in _ready(entries):
        eager = entry.attempt(partial(timing.time_eager, _calls(entry, inputs)), needed=False)
        plan = entry.attempt(partial(_plan_us, entry.prepared), needed=False)
        entry.record = replace(entry.record, us_eager=eager.us if eager else None, plan_us=plan)


def _time_on_cpu(entries: Sequence[Entry], inputs: Inputs, oracle: Oracle) -> None:
    ready = _ready(entries)
    times = timing.time_cpu({e.record.impl: _calls(e, inputs) for e in ready})
    plans = {e.record.impl: [e.prepared.plan] for e in ready if e.prepared and e.prepared.plan}
    plan_times = timing.time_cpu(plans)
    for entry in ready:
        name = entry.record.impl
        entry.record = _timed(entry.record, times[name], None)
        if name in plan_times:
            entry.record = replace(entry.record, plan_us=plan_times[name].us)
        _judge(entry, oracle, " after replay")


def _ready(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.prepared is not None]


def _calls(entry: Entry, inputs: Inputs) -> list[Callable[[], None]]:
    """One call a region."""
    assert entry.prepared is not None
    return [partial(entry.prepared, region) for region in range(inputs.regions)]


def _empty_record(candidate: Candidate, workload: Workload, arch: Arch) -> Record:
    spec = workload.spec
    even = len(set(workload.lengths)) <= 1
    row_bytes = 2 * spec.head_dim if candidate.cache == "bf16" else spec.row_bytes
    return Record(
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
        peer=candidate.peer,
        differs=candidate.differs,
        cache=candidate.cache,
        read_bytes=workload.tokens * row_bytes,
        roof=roof(workload, arch),
    )


def _check(entry: Entry, inputs: Inputs, oracle: Oracle, device: torch.device) -> None:
    """Prepare a candidate and compare it with the oracle; it stays ready only if it is right."""
    candidate = entry.candidate
    refusal = candidate.refuse(inputs.workload.spec, device)
    if refusal:
        entry.record = replace(entry.record, note=refusal)
        return
    prepared = candidate.prepare(inputs)
    checked = oracle.check_calls(prepared, inputs.regions - 1, _rounded(candidate))
    entry.record = replace(
        entry.record,
        programs=prepared.programs,
        programs_busy=prepared.programs_busy,
        splits=prepared.splits,
    )
    entry.record, right = _judged(entry.record, checked, "")
    entry.prepared = prepared if right else None


def _judge(entry: Entry, oracle: Oracle, when: str) -> None:
    assert entry.prepared is not None
    checked = oracle.check(entry.prepared.out, _rounded(entry.candidate))
    entry.record, right = _judged(entry.record, checked, when)
    if not right:
        entry.prepared = None


def _rounded(candidate: Candidate) -> float | None:
    return None if candidate.exact else candidate.error_budget


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


def _plan_us(prepared: Prepared | None) -> float | None:
    """Microseconds of a plan, the same one over and over: its inputs are small and warm."""
    if prepared is None or prepared.plan is None:
        return None
    if prepared.plan_on_host:
        return timing.time_eager([prepared.plan]).us
    calls = {"plan": [prepared.plan] * PLAN_LAUNCHES}
    return timing.time_graphs(calls, repeats=11)["plan"].us


def roof(workload: Workload, arch: Arch) -> str | None:
    """What bounds the shape by the vendor's rates: "memory" or "compute"; None for an unknown GPU."""
    if not arch.read_bytes_per_s or not arch.flops_per_s:
        return None
    reading = workload.bytes / arch.read_bytes_per_s
    return "memory" if reading >= workload.flops / arch.flops_per_s else "compute"


def _timed(record: Record, times: timing.Times, floor_times: timing.Times | None) -> Record:
    return replace(
        record,
        us=times.us,
        us_p25=times.us_p25,
        us_p75=times.us_p75,
        repeats=times.repeats,
        floor_us=floor_times.us if floor_times else None,
        x_floor=times.us / floor_times.us if floor_times else None,
        gbps=(record.read_bytes or record.bytes) / times.us / 1e3,
    )
