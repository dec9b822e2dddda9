"""Order in a trace: layers, steps, and whether any are missing.

A layer is one attention kernel, the kernels that lead up to it and the merge that follows it. Layers are
found by kernel name alone: kernels of a graph launch have no operator on the host to go by.
"""

from __future__ import annotations

import bisect
import itertools
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

from streamla.doctor.events import Mark, Trace
from streamla.doctor.names import KernelName, decode
from streamla.doctor.stats import median
from streamla.doctor.workload import Workload, workload_of_mark

_STEP_MARK = re.compile(r"(?i)ProfilerStep#|\bstep\b|decode|execute_")
# A step ends where the next attention is this much later than the usual distance between layers.
_STEP_GAP = 1.8


@dataclass
class Layer:
    """Positions in `Timeline.order`: events [begin, at) lead up to the attention at `at`."""

    begin: int
    at: int
    merges: list[int] = field(default_factory=list)


@dataclass
class Step:
    """One pass over the layers.

    Attributes:
        layers: in order.
        workload: what the annotation around the step states.
        missing: layers that other steps have and this one lacks.
    """

    layers: list[Layer]
    workload: Workload | None = None
    missing: int = 0


@dataclass
class Timeline:
    """The decode attention of one GPU in time.

    Attributes:
        trace: what was read.
        device: the GPU this is about, the one with most attention.
        kernels: `decode` of each name of the trace.
        order: event indices of that GPU by start time.
        steps: in order.
        layers_per_step: what a whole step has.
        incomplete: a sentence if layers are missing, else "".
    """

    trace: Trace
    device: str
    kernels: list[KernelName]
    order: array[int]
    steps: list[Step]
    layers_per_step: int = 0
    incomplete: str = ""

    def kernel(self, position: int) -> KernelName:
        return self.kernels[self.trace.name_id(self.order[position])]

    def interval(self, position: int) -> tuple[int, int]:
        return self.trace.interval(self.order[position])

    def dur(self, position: int) -> int:
        start, end = self.interval(position)
        return end - start

    @property
    def whole_steps(self) -> list[Step]:
        return [s for s in self.steps if not s.missing]


def kernel_names(trace: Trace) -> list[KernelName]:
    """`decode` of each name of a trace. Where none is MLA for sure, attention that may be stays in."""
    kernels = [decode(n) for n in trace.names]
    if any(k.is_decode_attention and k.mla for k in kernels):
        kernels = [
            replace(k, mla=False) if k.is_decode_attention and not k.mla else k for k in kernels
        ]
    return kernels


def _devices(trace: Trace, kernels: list[KernelName]) -> list[str]:
    """The GPUs that ran decode attention, the busiest first."""
    time: Counter[str] = Counter()
    for i in range(len(trace)):
        if kernels[trace.name_id(i)].is_decode_attention:
            start, end = trace.interval(i)
            time[trace.device_of(i)] += end - start
    return [device for device, _ in time.most_common()]


def _layers(timeline: Timeline) -> list[Layer]:
    layers: list[Layer] = []
    begin = 0
    for position in range(len(timeline.order)):
        kernel = timeline.kernel(position)
        if kernel.is_decode_attention:
            layers.append(Layer(begin, position))
            begin = position + 1
        elif kernel.role == "merge" and layers and not layers[-1].merges:
            layers[-1].merges.append(position)
            begin = position + 1
    return layers


def _marks(trace: Trace) -> list[Mark]:
    """Ranges that delimit steps: annotations that state a workload, else those named like a step."""
    for wanted in (lambda m: workload_of_mark(m.name), lambda m: _STEP_MARK.search(m.name)):
        found = [m for m in trace.marks if wanted(m)]
        on_gpu = [m for m in found if m.on_gpu]
        if found:
            return sorted(on_gpu or found, key=lambda m: m.start_ns)
    return []


def _mark_of_each(timeline: Timeline, layers: list[Layer]) -> list[Mark | None]:
    marks = _marks(timeline.trace)
    if not marks:
        return [None] * len(layers)
    launches = {} if marks[0].on_gpu else timeline.trace.launches()
    starts = [m.start_ns for m in marks]
    found: list[Mark | None] = []
    for layer in layers:
        event = timeline.trace[timeline.order[layer.at]]
        # A range of the host holds the launch, not the kernel.
        at = launches.get(event.correlation or -1, event.start_ns)
        i = bisect.bisect_right(starts, at) - 1
        found.append(marks[i] if i >= 0 and at <= marks[i].end_ns else None)
    return found


def _split(timeline: Timeline, layers: list[Layer], layers_per_step: int | None) -> list[Step]:
    """Cut the layers into steps: by annotation and graph launch; else by count; else by the gaps."""
    marks = _mark_of_each(timeline, layers)
    correlations = [timeline.trace[timeline.order[x.at]].correlation for x in layers]
    shared = {c for c, n in Counter(correlations).items() if c is not None and n > 1}
    keys = [
        (m.start_ns if m else None, c if c in shared else None)
        for m, c in zip(marks, correlations, strict=True)
    ]
    steps: list[Step] = []
    if any(key != (None, None) for key in keys):
        last: object = object()
        for layer, mark, key in zip(layers, marks, keys, strict=True):
            if key != last:
                steps.append(Step([], workload_of_mark(mark.name) if mark else None))
            steps[-1].layers.append(layer)
            last = key
        return steps
    if layers_per_step:
        size = layers_per_step
        return [Step(layers[i : i + size]) for i in range(0, len(layers), size)]
    starts = [timeline.interval(x.at)[0] for x in layers]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    usual = median(gaps) if gaps else 0
    for i, layer in enumerate(layers):
        if i == 0 or gaps[i - 1] > _STEP_GAP * usual:
            steps.append(Step([]))
        steps[-1].layers.append(layer)
    return steps


def _epilogues(timeline: Timeline, step: Step) -> int:
    """Launches of the commonest cache-write kernel in a step: one a layer, whatever attention shows."""
    names: Counter[str] = Counter()
    for position in range(step.layers[0].begin, step.layers[-1].at):
        kernel = timeline.kernel(position)
        if kernel.role == "epilogue":
            names[kernel.text] += 1
    return max(names.values(), default=0)


def _judge(timeline: Timeline, layers_per_step: int | None) -> None:
    """Find the steps that lack layers, and say so."""
    steps = timeline.steps
    counts = [len(s.layers) for s in steps]
    by_epilogue = [_epilogues(timeline, s) for s in steps]
    expected = layers_per_step or Counter(counts).most_common(1)[0][0]
    if not layers_per_step:
        # The kernels before the first attention of the trace may belong to a layer that was not recorded.
        expected = max([expected, *(n for n in by_epilogue if n > expected + 1)])
    timeline.layers_per_step = expected
    for step, count in zip(steps, counts, strict=True):
        step.missing = max(0, expected - count)
    short = [(i, s) for i, s in enumerate(steps) if s.missing]
    if not short:
        return
    i, step = short[0]
    edge = len(short) <= 2 and len(steps) > 2 and all(j in (0, len(steps) - 1) for j, _ in short)
    why = "the profiler's window cuts it" if edge else "the profiler lost events"
    lost = sum(s.missing for _, s in short)
    timeline.incomplete = (
        f"incomplete: {len(short)} of {len(steps)} steps lack attention kernels (step {i + 1} shows "
        f"{len(step.layers)} of {expected}; {lost} missing in all; {why}). Steps that lack layers are left "
        "out of every per-step figure."
    )


def build(trace: Trace, layers_per_step: int | None = None) -> Timeline:
    """Find the layers and steps of a trace with times."""
    kernels = kernel_names(trace)
    devices = _devices(trace, kernels)
    device = devices[0] if devices else ""
    if len(devices) > 1:
        trace.notes.append(
            f"attention ran on {len(devices)} GPUs; this is about GPU {device}, the busiest"
        )
    order = array("I", (i for i in trace.ordered() if trace.device_of(i) == device))
    timeline = Timeline(trace, device, kernels, order, [])
    layers = _layers(timeline)
    if layers:
        timeline.steps = _split(timeline, layers, layers_per_step)
        _judge(timeline, layers_per_step)
    return timeline
