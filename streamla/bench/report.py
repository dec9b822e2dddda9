"""Results as tables for a terminal of 100 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from rich import box
from rich.table import Table

from streamla.bench import same_work
from streamla.bench.compare import Comparison
from streamla.bench.records import Record
from streamla.bench.workloads import tokens_text


def shape_text(record: Record) -> str:
    """ "128K x 16", or what a ragged batch holds."""
    if record.cache_seqlens:
        return f"{min(record.cache_seqlens)}-{record.context} x {record.requests}"
    return f"{tokens_text(record.context)} x {record.requests}"


def varying(records: Sequence[Record]) -> list[str]:
    """Fields of the spec that differ within `records`: the others go into the title."""
    names = ("num_heads", "kv_format", "page_size", "seqlen_q")
    return [n for n in names if len({getattr(r, n) for r in records}) > 1]


SPEC_COLUMNS = {"num_heads": "heads", "kv_format": "cache", "page_size": "page", "seqlen_q": "q"}


def spec_text(record: Record, leave_out: Sequence[str] = ()) -> str:
    """The spec in words, without the fields in `leave_out`."""
    q = record.seqlen_q
    words = {
        "num_heads": f"{record.num_heads} heads",
        "kv_format": f"{record.kv_format} cache",
        "page_size": f"pages of {record.page_size}",
        "seqlen_q": f"{q} query token{'s' if q > 1 else ''}",
    }
    return ", ".join(text for name, text in words.items() if name not in leave_out)


def plain_table(title: str) -> Table:
    """Every table of the command line looks like this."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )


def bench_table(records: Sequence[Record], measured_on: str) -> Table:
    """One row a record; what all records share is in the title."""
    axes = varying(records)
    impls = list(dict.fromkeys(r.impl for r in records))
    several = len(impls) > 1
    who = "" if several else f"{impls[0]}, "
    table = plain_table(f"{who}{spec_text(records[0], axes)}, on {measured_on}")
    ragged = any(r.cache_seqlens for r in records)
    table.add_column("tokens each x requests" if ragged else "context x requests", no_wrap=True)
    for name in axes:
        table.add_column(SPEC_COLUMNS[name], justify="right", no_wrap=True)
    if several:
        table.add_column("impl", no_wrap=True)
    columns = _columns(records)
    for name in columns:
        table.add_column(name, justify="left" if name == "differs" else "right", no_wrap=True)
    previous = None
    for r in records:
        shape = [shape_text(r), *(str(getattr(r, n)) for n in axes)]
        if several and previous not in (None, shape):
            table.add_section()
        repeated = several and previous == shape
        previous = shape
        first = [""] * len(shape) if repeated else shape
        cells = _cells(r)
        table.add_row(*first, *([r.impl] if several else []), *(cells[n] for n in columns))
    return table


def _columns(records: Sequence[Record]) -> list[str]:
    """With peers, what differs in their work takes the room of what only our plans have."""
    peers = any(r.peer for r in records)
    floor = any(r.floor_us for r in records)
    return [
        *([] if peers else ["MB"]),
        *("us", "spread", "GB/s"),
        *([] if peers or not floor else ["of floor"]),
        *(["x floor"] if floor else []),
        *(["J/Mtok"] if any(r.joules_per_mtoken for r in records) else []),
        "error",
        "differs" if peers else "busy",
    ]


def _cells(r: Record) -> dict[str, str]:
    cells = {
        "MB": three_digits((r.read_bytes or r.bytes) / 1e6),
        "us": "-", "spread": "", "GB/s": "", "of floor": "", "x floor": "",
        "J/Mtok": three_digits(r.joules_per_mtoken) if r.joules_per_mtoken else "",
        "error": "" if r.error is None else f"{r.error:.1e}",
        "busy": "" if r.programs_busy is None else f"{r.programs_busy}/{r.programs}",
        "differs": r.differs or "",
    }  # fmt: skip
    if r.us is None or r.us_p25 is None or r.us_p75 is None or r.gbps is None:
        return cells
    cells |= {
        "us": three_digits(r.us),
        "spread": f"{(r.us_p75 - r.us_p25) / r.us:.1%}",
        "GB/s": three_digits(r.gbps),
    }
    if r.x_floor:
        cells |= {"of floor": f"{1 / r.x_floor:.1%}", "x floor": f"{r.x_floor:.2f}"}
    return cells


def three_digits(value: float) -> str:
    """At least three digits; more would be noise."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def notes(records: Iterable[Record]) -> list[str]:
    """Why records have no time, each reason once."""
    reasons: dict[str, int] = {}
    for r in records:
        if r.note:
            where = f", {shape_text(r)}" if r.checked else ""
            text = f"{r.impl}{where}: {r.note}"
            reasons[text] = reasons.get(text, 0) + 1
    return [f"{text}" + (f" ({n} shapes)" if n > 1 else "") for text, n in reasons.items()]


def summary_lines(records: Sequence[Record]) -> list[str]:
    """Geometric mean of x floor, and the spread among shapes of equal bytes, for each candidate."""
    lines = []
    for impl in dict.fromkeys(r.impl for r in records):
        timed = [r for r in records if r.impl == impl and r.x_floor]
        if not timed:
            continue
        geomean = math.exp(sum(math.log(r.x_floor or 1) for r in timed) / len(timed))
        shapes = f"{len(timed)} shape{'s' if len(timed) > 1 else ''}"
        line = f"{impl}: geometric mean {geomean:.2f}x the read floor over {shapes}"
        spread = same_work.worst(timed).get(impl)
        if spread:
            line += f"; shapes of the same bytes differ by up to {spread:.2f}x"
        plans = [r.plan_us for r in timed if r.plan_us]
        if plans:
            line += f"; plan {median(plans):.1f} us, once a step"
        lines.append(line)
    return lines


def same_work_table(records: Sequence[Record]) -> Table | None:
    """One row a group of equal total tokens and an implementation; None if there is no such group."""
    spreads = same_work.spreads(records)
    if not spreads:
        return None
    table = plain_table("The same work: equal total tokens, over few or many requests")
    for name, side in (("tokens", "right"), ("impl", "left"), ("fastest us", "right"),
                       ("of", "left"), ("slowest us", "right"), ("of", "left"), ("spread", "right")):  # fmt: skip
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    previous = None
    for s in spreads:
        if previous not in (None, s.tokens):
            table.add_section()
        table.add_row(
            "" if previous == s.tokens else tokens_text(s.tokens), s.impl,
            three_digits(s.fastest), shape_text(s.records[0]),
            three_digits(s.slowest), shape_text(s.records[-1]), f"{s.ratio:.2f}",
        )  # fmt: skip
        previous = s.tokens
    return table


def compare_table(comparison: Comparison, tolerance: float) -> Table:
    """One row a change, slow-downs beyond the tolerance marked."""
    before = [c.before for c in comparison.changes]
    axes = varying(before)
    table = plain_table(f"Second run against the first: {spec_text(before[0], axes)}")
    table.add_column("tokens x requests", no_wrap=True)
    for name in axes:
        table.add_column(SPEC_COLUMNS[name], justify="right", no_wrap=True)
    table.add_column("impl", no_wrap=True)
    for name in ("us before", "us after", "ratio", "by quartiles", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for c in comparison.changes:
        a, b = c.before, c.after
        slower = c.slower(tolerance)
        verdict = "[bold red]slower[/]" if slower else "faster" if c.ratio < 1 - tolerance else ""
        table.add_row(
            shape_text(a), *(str(getattr(a, n)) for n in axes), a.impl, three_digits(a.us or 0), three_digits(b.us or 0),
            f"{c.ratio:.3f}", f"{c.low:.3f}-{c.high:.3f}", verdict,
        )  # fmt: skip
    return table
