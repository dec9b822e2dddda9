"""Does the time depend on how the same tokens are spread over requests?

Shapes of equal total tokens are the same work: the same bytes, the same products. A group is such shapes,
and the spread of an implementation in it is its slowest time over its fastest. 1.00 is what a
decode that only streams would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamla.bench.records import Record


@dataclass(frozen=True)
class Spread:
    """One implementation in one group.

    Attributes:
        records: with a time, fastest first; at least two.
    """

    impl: str
    tokens: int
    records: list[Record]

    @property
    def fastest(self) -> float:
        return self.records[0].us or 0.0

    @property
    def slowest(self) -> float:
        return self.records[-1].us or 0.0

    @property
    def ratio(self) -> float:
        return self.slowest / self.fastest


def spreads(records: Iterable[Record]) -> list[Spread]:
    """Every group and implementation with two shapes or more, by total tokens."""
    groups: dict[tuple, list[Record]] = {}
    for r in records:
        if r.us and not r.cache_seqlens:
            spec = (r.num_heads, r.kv_format, r.page_size, r.seqlen_q)
            groups.setdefault((r.tokens, r.impl, *spec), []).append(r)
    found = [
        Spread(group[0].impl, group[0].tokens, sorted(group, key=lambda r: r.us or 0.0))
        for group in groups.values()
        if len({(r.context, r.requests) for r in group}) > 1
    ]
    return sorted(found, key=lambda s: s.tokens)


def worst(records: Iterable[Record]) -> dict[str, float]:
    """The largest spread of each implementation."""
    ratios: dict[str, float] = {}
    for s in spreads(records):
        ratios[s.impl] = max(s.ratio, ratios.get(s.impl, 1.0))
    return ratios
