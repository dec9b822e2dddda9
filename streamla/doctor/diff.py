"""Two traces of one workload side by side, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from streamla.doctor import counters
from streamla.doctor.analyze import Report
from streamla.doctor.events import DoctorError
from streamla.doctor.findings import Finding
from streamla.doctor.stats import RULE, Spread, median
from streamla.doctor.windows import StepTimes


@dataclass(frozen=True)
class Line:
    """One quantity in both traces, in ns; None where a trace does not show it."""

    what: str
    a: Spread | None
    b: Spread | None

    @property
    def ratio(self) -> float | None:
        """Time of A over time of B: above 1, B is faster."""
        return (
            None if not self.a or not self.b or not self.b.median else self.a.median / self.b.median
        )


@dataclass(frozen=True)
class Diff:
    """Attributes:
    a, b: the reports.
    lines: token latency, then attention, window and epilogue of each layer.
    findings: what counters say, where both traces have them.
    notes: why the two may not compare.
    """

    a: Report
    b: Report
    lines: list[Line]
    findings: list[Finding]
    notes: list[str]

    @property
    def attention_ratio(self) -> float | None:
        """Median over the layers of A's attention over B's."""
        ratios = [x.ratio for x in self.lines if x.what.endswith("attention") and x.ratio]
        return median(ratios) if ratios else None


def _pairs(a: StepTimes, b: StepTimes) -> Iterator[tuple[str, Spread | None, Spread | None]]:
    yield "token", a.token, b.token
    for x, y in zip(a.layers, b.layers, strict=False):
        yield f"layer {x.layer} attention", x.attention, y.attention
        if x.window or y.window:
            yield f"layer {x.layer} window", x.window, y.window
        if x.epilogue or y.epilogue:
            yield f"layer {x.layer} epilogue", x.epilogue, y.epilogue


def diff(a: Report, b: Report) -> Diff:
    """Line up two reports. DoctorError if neither times nor counters line up."""
    notes = [
        f"{side}: {note}"
        for side, r in (("A", a), ("B", b))
        for note in (*r.trace.notes, r.timeline.incomplete if r.timeline else "")
        if note
    ]
    pairs = [(x, y) for x in a.counted for y in b.counted]
    findings = [f for x, y in pairs if (f := counters.compare(x, y))]
    if not (a.times and b.times):
        if not pairs:
            raise DoctorError(
                "diff needs two traces with whole steps of MLA decode attention, or two files with counters"
            )
        return Diff(a, b, [], findings, notes)
    by_workload = {str(t.workload): t for t in b.times}
    both = [(t, by_workload[str(t.workload)]) for t in a.times if str(t.workload) in by_workload]
    if not both:
        both = [(a.times[0], b.times[0])]
        notes.append(f"the workloads differ: {a.times[0].workload} | {b.times[0].workload}")
    lines = []
    for x, y in both:
        if len(x.layers) != len(y.layers):
            notes.append(
                f"A has {len(x.layers)} layers a step and B {len(y.layers)}: the first ones are compared"
            )
        prefix = f"{x.workload}: " if len(both) > 1 else ""
        lines += [Line(prefix + what, p, q) for what, p, q in _pairs(x, y)]
    return Diff(a, b, lines, findings, notes)


def as_json(d: Diff) -> dict[str, Any]:
    """The comparison for machines."""
    return {
        "a": d.a.trace.source,
        "b": d.b.trace.source,
        "rule": RULE,
        "attention_ratio": d.attention_ratio,
        "lines": [
            {
                "what": x.what,
                "a": asdict(x.a) if x.a else None,
                "b": asdict(x.b) if x.b else None,
                "ratio": x.ratio,
            }
            for x in d.lines
        ],
        "findings": [asdict(f) for f in d.findings],
        "notes": d.notes,
    }
