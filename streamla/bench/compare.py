"""Two runs side by side: which shapes got slower?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamla.bench.records import Record, Results


@dataclass(frozen=True)
class Change:
    """A shape and candidate in both runs. `ratio` > 1: the second run is slower.

    `low` and `high` bound the ratio by the quartiles of both: an honest reading of noise.
    """

    before: Record
    after: Record
    ratio: float
    low: float
    high: float

    def slower(self, tolerance: float) -> bool:
        """Slower by more than `tolerance`, and by more than the quartiles explain."""
        return self.ratio > 1 + tolerance and self.low > 1


@dataclass(frozen=True)
class Comparison:
    """All changes; `lost` are records with a time in the first run and none in the second."""

    changes: list[Change]
    lost: list[Record]

    @property
    def geomean(self) -> float:
        logs = [math.log(c.ratio) for c in self.changes]
        return math.exp(sum(logs) / len(logs)) if logs else float("nan")


def compare(before: Results, after: Results) -> Comparison:
    """Match the records of two runs by shape and candidate."""
    found: dict[tuple, list[Record]] = {}
    for r in after.records:
        if r.us:
            found.setdefault(r.key, []).append(r)
    changes, lost = [], []
    for a in before.records:
        if not a.us:
            continue
        if not found.get(a.key):
            lost.append(a)
            continue
        b = found[a.key].pop(0)  # a shape that was measured twice is matched in order
        changes.append(
            Change(a, b, b.us / a.us, b.us_p25 / a.us_p75, b.us_p75 / a.us_p25)  # type: ignore[operator]
        )
    return Comparison(changes, lost)
