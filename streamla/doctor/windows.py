"""Windows: from the end of a named kernel to the start of attention, layer by layer; and step times."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from streamla.doctor.events import DoctorError
from streamla.doctor.groups import step_spans, workload_of
from streamla.doctor.stats import Spread, stable
from streamla.doctor.steps import Step, Timeline
from streamla.doctor.workload import Workload

RESIDUAL = r"(?i)rms_?norm|layer_?norm|residual"


@dataclass(frozen=True)
class LayerTimes:
    """One layer over all whole steps, in ns. None where the trace does not show it.

    Attributes:
        layer: index in the step.
        window: end of the kernel before to start of attention.
        epilogue: the epilogue's own time.
        attention: attention and merge.
    """

    layer: int
    window: Spread | None
    epilogue: Spread | None
    attention: Spread | None


@dataclass(frozen=True)
class StepTimes:
    """Attributes:
    workload: what the steps were asked to do.
    token: inter-token latency (start of attention to start of attention, next step), in ns.
    layers: times of each layer.
    from_pattern: the kernel that opens a window.
    """

    workload: Workload
    token: Spread | None
    layers: list[LayerTimes]
    from_pattern: str


def _layers(timeline: Timeline, steps: list[Step], opening: list[bool]) -> list[LayerTimes]:
    samples: dict[int, tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
    for step in steps:
        for i, layer in enumerate(step.layers):
            windows, epilogues, attention = samples[i]
            start = timeline.interval(layer.at)[0]
            for position in range(layer.at - 1, layer.begin - 1, -1):
                if opening[timeline.trace.name_id(timeline.order[position])]:
                    windows.append(start - timeline.interval(position)[1])
                    break
            own = [p for p in range(layer.begin, layer.at) if timeline.kernel(p).role == "epilogue"]
            if own:
                epilogues.append(sum(timeline.dur(p) for p in own))
            attention.append(sum(timeline.dur(p) for p in (layer.at, *layer.merges)))
    return [LayerTimes(i, *(stable(s) for s in samples[i])) for i in sorted(samples)]


def measure(timeline: Timeline, given: Workload, from_pattern: str = RESIDUAL) -> list[StepTimes]:
    """Times of every layer over the whole steps of a trace, for each workload in it."""
    try:
        opens = re.compile(from_pattern)
    except re.error as e:
        raise DoctorError(f"--from: not a regular expression ({e})") from None
    opening = [bool(opens.search(k.text)) for k in timeline.kernels]
    steps: dict[Workload, list[Step]] = defaultdict(list)
    spans: dict[Workload, list[int]] = defaultdict(list)
    for step in timeline.whole_steps:
        steps[workload_of(step, given)].append(step)
    for step, span in step_spans(timeline):
        spans[workload_of(step, given)].append(span)
    return [
        StepTimes(w, stable(spans[w]), _layers(timeline, own, opening), from_pattern)
        for w, own in steps.items()
    ]
