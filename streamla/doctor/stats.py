"""Small statistics with the rule written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RULE = (
    "The first sample is dropped as warm-up when there are 4 or more, then samples more than "
    "3 x 1.4826 x MAD from the median"
)


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two in the middle of an even number."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between the ranks around q."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True)
class Spread:
    """A stable median: what is left after `RULE`.

    Attributes:
        median, low, high: of the samples kept; low and high are the 10th and 90th percentile.
        used, dropped: how many samples.
    """

    median: float
    low: float
    high: float
    used: int
    dropped: int


def stable(values: Sequence[float]) -> Spread | None:
    """Apply `RULE`. None without values."""
    if not values:
        return None
    kept = list(values[1:]) if len(values) >= 4 else list(values)
    middle = median(kept)
    mad = median([abs(v - middle) for v in kept])
    if mad > 0:
        kept = [v for v in kept if abs(v - middle) <= 3 * 1.4826 * mad]
    return Spread(
        median(kept), quantile(kept, 0.1), quantile(kept, 0.9), len(kept), len(values) - len(kept)
    )
