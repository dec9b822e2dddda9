"""Two traces of one workload side by side, layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from streamla.doctor import counters
from streamla.doctor.analyze import Report
from streamla.doctor.events import DoctorError
from streamla.doctor.findings import Finding
from streamla.doctor.stats import RULE, Spread, median


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


def diff(a: Report, b: Report) -> Diff:
    """Line up two reports. DoctorError if neither times nor counters line up."""
    notes = [f"{side}: {note}" for side, r in (("A", a), ("B", b)) for note in r.notes]
    pairs = [(x, y) for x in a.counted for y in b.counted]
    findings = [f for x, y in pairs if (f := counters.compare(x, y))]
    if a.times is None or b.times is None:
        if not pairs:
            raise DoctorError("diff needs two traces with times, or two files with counters")
        return Diff(a, b, [], findings, notes)
    layers_a, layers_b = a.times.layers, b.times.layers
    if not layers_a or not layers_b:
        raise DoctorError("diff: a trace shows no whole step with MLA decode attention")
    if len(layers_a) != len(layers_b):
        notes.append(
            f"A has {len(layers_a)} layers a step and B {len(layers_b)}: the first ones are compared"
        )
    workloads = [{str(g.workload) for g in r.groups} for r in (a, b)]
    if workloads[0] != workloads[1]:
        notes.append("the workloads differ: " + " | ".join(", ".join(sorted(w)) for w in workloads))
    lines = [Line("token", a.times.token, b.times.token)]
    for x, y in zip(layers_a, layers_b, strict=False):
        lines.append(Line(f"layer {x.layer} attention", x.attention, y.attention))
        if x.window or y.window:
            lines.append(Line(f"layer {x.layer} window", x.window, y.window))
        if x.epilogue or y.epilogue:
            lines.append(Line(f"layer {x.layer} epilogue", x.epilogue, y.epilogue))
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
