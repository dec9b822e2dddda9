"""Several runs of the same shapes as one: the run in the middle, and how far the others are from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamla.bench.records import Record


def merged(runs: Sequence[Sequence[Record]]) -> list[Record]:
    """One record for each shape and candidate of `runs`, which have the same ones in the same order.

    It is the record of the run whose time is the median (the lower of two), with every run's time in
    `us_runs` and the worst error of all. Wrong in one run is wrong: then it is that run's record.
    """
    return [_middle(records) for records in zip(*runs, strict=True)]


def _middle(records: Sequence[Record]) -> Record:
    untimed = [r for r in records if r.us is None]
    if untimed:
        return untimed[0]
    order = sorted(records, key=lambda r: r.us or 0.0)
    return replace(
        order[(len(order) - 1) // 2],
        us_runs=[r.us for r in records if r.us],
        error=max(r.error or 0.0 for r in records),
        budget_used=max(r.budget_used or 0.0 for r in records),
    )
