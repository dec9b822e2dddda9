"""Launches of one attention kernel on one grid and one workload: what a finding is about."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamla.doctor.events import Shape, Trace
from streamla.doctor.names import KernelName
from streamla.doctor.stats import stable
from streamla.doctor.steps import Layer, Step, Timeline, kernel_names
from streamla.doctor.workload import Workload

# What prepares a query or a cache for a kernel that cannot read them as they are.
PREPARING = {
    "quantize": "quantises",
    "dequantize": "dequantises",
    "cast": "casts",
    "concat": "concatenates",
    "copy": "copies",
}
# The last of these before attention is the end of the work that is not attention's own.
_BOUNDARY = {"gemm", "norm", "communication", "moe", "attention", "prefill", "sampling"}


@dataclass
class Group:
    """Attributes:
    kernel, grid, workload: what the launches share.
    attention, merge, gap: durations in ns, one a launch; gap is the idle time before the kernel.
    merge_grid: grid of the merge.
    preparing: kernels just before attention that prepare its input: name -> (role, total ns).
    before: names of the kernels that ended right before attention.
    """

    kernel: KernelName
    grid: Shape | None
    workload: Workload
    attention: list[int] = field(default_factory=list)
    merge: list[int] = field(default_factory=list)
    merge_grid: Shape | None = None
    gap: list[int] = field(default_factory=list)
    preparing: dict[str, tuple[str, int]] = field(default_factory=dict)
    before: set[str] = field(default_factory=set)

    @property
    def programs(self) -> int | None:
        return None if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def launches(self) -> int:
        return len(self.attention)

    @property
    def attention_ns(self) -> float:
        spread = stable(self.attention)
        return spread.median if spread else 0.0

    @property
    def merge_ns(self) -> float:
        spread = stable(self.merge)
        return spread.median if spread else 0.0

    @property
    def decode_ns(self) -> float:
        return self.attention_ns + self.merge_ns

    @property
    def total_ns(self) -> int:
        return sum(self.attention) + sum(self.merge)

    @property
    def evidence(self) -> str:
        grid = "grid unknown" if self.grid is None else f"grid {self.grid}"
        merge = f" + merge {self.merge_ns / 1e3:.1f} us" if self.merge else ""
        return (
            f"{self.kernel.short}, {grid}, {self.launches} launches, median "
            f"{self.attention_ns / 1e3:.1f} us{merge}; {self.workload}"
        )


def _lead_up(timeline: Timeline, layer: Layer) -> Iterable[int]:
    """Positions between the last boundary and attention, last one first."""
    for position in range(layer.at - 1, layer.begin - 1, -1):
        if timeline.kernel(position).role in _BOUNDARY:
            return
        yield position


def _add(group: Group, timeline: Timeline, layer: Layer) -> None:
    start, end = timeline.interval(layer.at)
    group.attention.append(end - start)
    for position in layer.merges:
        group.merge.append(timeline.dur(position))
        group.merge_grid = timeline.trace[timeline.order[position]].grid
    if layer.at > layer.begin or layer.begin > 0:
        previous = layer.at - 1
        group.gap.append(max(0, start - timeline.interval(previous)[1]))
        group.before.add(timeline.kernel(previous).short)
    for position in _lead_up(timeline, layer):
        kernel = timeline.kernel(position)
        if kernel.role in PREPARING:
            _, total = group.preparing.get(kernel.text, (kernel.role, 0))
            group.preparing[kernel.text] = (kernel.role, total + timeline.dur(position))


def of_timeline(timeline: Timeline, given: Workload) -> list[Group]:
    """Groups of a trace with times, longest total first."""
    groups: dict[tuple[str, Shape | None, Workload], Group] = {}
    for step in timeline.steps:
        workload = workload_of(step, given)
        for layer in step.layers:
            event = timeline.trace[timeline.order[layer.at]]
            kernel = timeline.kernel(layer.at)
            key = (kernel.text, event.grid, workload)
            _add(groups.setdefault(key, Group(kernel, event.grid, workload)), timeline, layer)
    return sorted(groups.values(), key=lambda g: -g.total_ns)


def of_summary(trace: Trace, given: Workload) -> list[Group]:
    """Groups of a summary: means instead of medians, and nothing about order."""
    kernels = kernel_names(trace)
    events = [(kernels[trace.name_id(i)], trace[i]) for i in range(len(trace))]
    merges: dict[str | None, list[int]] = defaultdict(list)
    for kernel, event in events:
        if kernel.role == "merge":
            merges[kernel.family] += [event.dur_ns] * min(event.count, 1000)
    groups = [
        Group(k, e.grid, given, [e.dur_ns] * min(e.count, 1000), merges.get(k.family, []))
        for k, e in events
        if k.is_decode_attention
    ]
    return sorted(groups, key=lambda g: -g.total_ns)


def workload_of(step: Step, given: Workload) -> Workload:
    """What a step's annotation states, and of what it does not, what the user gave."""
    return step.workload.over(given) if step.workload else given


def step_spans(timeline: Timeline) -> list[tuple[Step, int]]:
    """Whole steps that a step of the same workload follows, with the time between their first
    attentions in ns."""
    spans = []
    for a, b in itertools.pairwise(timeline.steps):
        if not a.missing and not b.missing and a.workload == b.workload:
            start = timeline.interval(a.layers[0].at)[0]
            spans.append((a, timeline.interval(b.layers[0].at)[0] - start))
    return spans
