"""Results as tables for a terminal of 100 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table

from streamla.bench.compare import Comparison
from streamla.bench.records import Record
from streamla.bench.workloads import tokens_text


def shape_text(record: Record) -> str:
    """ "128K x 16", or what a ragged batch holds."""
    if record.cache_seqlens:
        return f"{record.requests} of {min(record.cache_seqlens)}-{record.context}"
    return f"{tokens_text(record.context)} x {record.requests}"


def varying(records: Sequence[Record]) -> list[str]:
    """Fields of the spec that differ within `records`: the others go into the title."""
    names = ("num_heads", "kv_format", "page_size", "seqlen_q")
    return [n for n in names if len({getattr(r, n) for r in records}) > 1]


SPEC_TITLES = {
    "num_heads": "{} heads",
    "kv_format": "{} cache",
    "page_size": "pages of {}",
    "seqlen_q": "{} query token(s)",
}
SPEC_COLUMNS = {"num_heads": "heads", "kv_format": "cache", "page_size": "page", "seqlen_q": "q"}


def bench_table(records: Sequence[Record], measured_on: str) -> Table:
    """One row a record."""
    axes = varying(records)
    fixed = [t.format(getattr(records[0], n)) for n, t in SPEC_TITLES.items() if n not in axes]
    table = Table(title=f"{', '.join(fixed)} on {measured_on}", title_justify="left")
    table.add_column("context x requests" if not records[0].cache_seqlens else "tokens a request")
    for name in axes:
        table.add_column(SPEC_COLUMNS[name], justify="right", no_wrap=True)
    several = len({r.impl for r in records}) > 1
    table.add_column("impl", no_wrap=True)
    for name in ("MB", "us", "quartiles", "GB/s", "of floor", "x floor", "error", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for r in records:
        shape = (shape_text(r), *(getattr(r, n) for n in axes))
        if several and previous not in (None, shape):
            table.add_section()
        previous = shape
        table.add_row(shape[0], *(str(s) for s in shape[1:]), r.impl, *_measured(r))
    return table


def _measured(r: Record) -> list[str]:
    error = "" if r.error is None else f"{r.error:.1e}"
    busy = "" if r.programs_busy is None else f"{r.programs_busy}/{r.programs}"
    if r.us is None or r.us_p25 is None or r.us_p75 is None:
        return [f"{r.bytes / 1e6:.1f}", "-", "", "", "", "", error, busy]
    return [
        f"{r.bytes / 1e6:.1f}",
        _digits(r.us),
        f"{_digits(r.us_p25)}-{_digits(r.us_p75)}",
        f"{r.gbps:.0f}" if r.gbps >= 10 else f"{r.gbps:.1f}",  # type: ignore[operator]
        f"{1 / r.x_floor:.0%}" if r.x_floor else "",
        f"{r.x_floor:.2f}" if r.x_floor else "",
        error,
        busy,
    ]


def _digits(us: float) -> str:
    """Three or four digits: more would be noise."""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def notes(records: Iterable[Record]) -> list[str]:
    """Why records have no time, each reason once."""
    reasons: dict[str, int] = {}
    for r in records:
        if r.note:
            text = f"{r.impl}: {r.note}"
            reasons[text] = reasons.get(text, 0) + 1
    return [f"{text}" + (f" ({n} shapes)" if n > 1 else "") for text, n in reasons.items()]


def summary_lines(records: Sequence[Record]) -> list[str]:
    """Geometric mean of x floor, and the spread among shapes of equal bytes, for each candidate."""
    lines = []
    for impl in dict.fromkeys(r.impl for r in records):
        timed = [r for r in records if r.impl == impl and r.x_floor and r.us]
        if not timed:
            continue
        geomean = math.exp(sum(math.log(r.x_floor) for r in timed) / len(timed))  # type: ignore[arg-type]
        line = f"{impl}: geometric mean {geomean:.2f}x the read floor over {len(timed)} shapes"
        spread = same_work_spread(timed)
        if spread:
            line += f"; shapes of the same bytes differ by up to {spread:.2f}x"
        lines.append(line)
    return lines


def same_work_spread(records: Sequence[Record]) -> float | None:
    """Largest over smallest time among records that read the same bytes; the worst of such groups."""
    groups: dict[tuple, list[float]] = {}
    for r in records:
        spec = (r.num_heads, r.kv_format, r.page_size, r.seqlen_q, r.bytes)
        groups.setdefault(spec, []).append(r.us or math.nan)
    spreads = [max(g) / min(g) for g in groups.values() if len(g) > 1]
    return max(spreads, default=None)


def compare_table(comparison: Comparison, tolerance: float) -> Table:
    """One row a change, slow-downs beyond the tolerance marked."""
    table = Table(title="second run / first run", title_justify="left")
    table.add_column("context x requests")
    table.add_column("spec")
    table.add_column("impl", no_wrap=True)
    for name in ("us before", "us after", "ratio", "by quartiles", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for c in comparison.changes:
        a, b = c.before, c.after
        spec = f"{a.num_heads} heads, {a.kv_format}, page {a.page_size}, q {a.seqlen_q}"
        slower = c.slower(tolerance)
        verdict = "[bold red]slower[/]" if slower else "faster" if c.ratio < 1 - tolerance else ""
        table.add_row(
            shape_text(a), spec, a.impl, _digits(a.us or 0), _digits(b.us or 0),
            f"{c.ratio:.3f}", f"{c.low:.3f}-{c.high:.3f}", verdict,
        )  # fmt: skip
    return table
