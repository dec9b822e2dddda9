"""Results as figures: for print, readable in greyscale, with units on every axis.

An implementation keeps its colour, marker and dash in all figures of a run. Ours come first, in black.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from streamla.bench import same_work
from streamla.bench.drawing import (
    FONT_SIZE,
    MANY,
    STYLE,
    Drawn,
    Look,
    axes_grid,
    finish,
    label_points,
    looks,
    plain_log,
    short,
)
from streamla.bench.records import Record
from streamla.bench.report import SPEC_COLUMNS, shape_text, three_digits, varying
from streamla.bench.workloads import tokens_text


def draw(records: Sequence[Record], published: Sequence[Record] = ()) -> list[Drawn]:
    """Every figure that these records of one grid allow.

    Args:
        records: of one grid, of one run.
        published: of a table measured elsewhere; drawn only where times are compared within an implementation.
    """
    timed = [r for r in records if r.us]
    if not timed:
        return []
    with matplotlib.rc_context(STYLE):
        look = looks([*records, *published])
        drawn = [latency(timed, look), floor_map(timed), spread(timed, published, look)]
        return [d for d in [*drawn, accuracy(timed, look)] if d is not None]


def latency(records: Sequence[Record], look: dict[str, Look]) -> Drawn:
    """Time by context and requests, or along the axis of the grid."""
    panels, x_of, x_label, x_text = _layout(records)
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = axes_grid(rows, columns, 2.35 * rows + 0.55)
    times = [r.us or 1.0 for r in records] + [r.floor_us for r in records if r.floor_us]
    bottom, top = min(times) / 1.6, max(times) * 1.5
    for axes, (title, members) in zip(grid, panels.items(), strict=False):
        ticks = sorted({x_of(r) for r in members})
        floor = sorted({x_of(r): r.floor_us for r in members if r.floor_us}.items())
        if floor:
            xs, us = zip(*_widened(floor), strict=True)
            axes.fill_between(xs, bottom, us, facecolor="#e9e9e9", hatch="////", edgecolor="#c0c0c0",
                              linewidth=0, label="below the read floor")  # fmt: skip
        for impl in look:
            times_of = {x_of(r): r.us or math.nan for r in members if r.impl == impl}
            if times_of:  # a shape without a time is a gap in the line
                axes.plot(
                    ticks,
                    [times_of.get(x, math.nan) for x in ticks],
                    label=look[impl].label(impl),
                    **look[impl].line,
                )
        axes.set(yscale="log", ylim=(bottom, top), title=title)
        axes.xaxis.set_major_locator(FixedLocator(_apart(ticks)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: x_text(x)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.08)
        plain_log(axes)
    finish(figure, grid, len(panels), columns, x_label, "time of a decode call (µs)")
    return Drawn(
        f"{records[0].grid}-latency",
        f"Time of one decode call in microseconds, by {x_label}. Logarithmic; lower is better."
        + (" No kernel that reads the cache gets into the shaded band." if _floors(records) else ""),
        figure,
    )  # fmt: skip


def floor_map(records: Sequence[Record]) -> Drawn | None:
    """x floor of every shape and implementation, as numbers on a grey scale."""
    if not _floors(records) or any(r.cache_seqlens for r in records):
        return None
    axis = next(iter(varying(records)), None)
    rows_of, columns_of = (lambda r: r.context), (lambda r: r.requests)
    row_text: Callable[..., str] = tokens_text
    row_label, column_label = "context (tokens)", "requests"
    if axis:
        rows_of, row_text = (
            (lambda r: (r.context, r.requests)),
            lambda s: f"{tokens_text(s[0])} x {s[1]}",
        )
        columns_of, row_label, column_label = (
            (lambda r: getattr(r, axis)),
            "context x requests",
            SPEC_COLUMNS[axis],
        )
    look = looks(records)
    impls = list(look)
    ys, xs = sorted({rows_of(r) for r in records}), list(dict.fromkeys(map(columns_of, records)))
    columns = 2 if len(impls) == 4 else min(3, len(impls))
    height = -(-len(impls) // columns)
    figure, grid = axes_grid(height, columns, height * (0.9 + 0.3 * len(ys)))
    top = max(r.x_floor or 1.0 for r in records)
    for axes, impl in zip(grid, impls, strict=False):
        cells = {(rows_of(r), columns_of(r)): r.x_floor for r in records if r.impl == impl}
        values = [[math.log(cells.get((y, x)) or math.nan) for x in xs] for y in ys]
        axes.imshow(
            values, cmap="Greys", vmin=0, vmax=math.log(max(top, 2.0)) * 1.25, aspect="auto"
        )
        for i, y in enumerate(ys):
            for j, x in enumerate(xs):
                value = cells.get((y, x))
                dark = value is not None and math.log(value) > 0.7 * math.log(max(top, 2.0))
                axes.text(j, i, three_digits(value) if value else "-", ha="center", va="center", fontsize=FONT_SIZE * min(1, 5.5 / len(xs)),
                          color="white" if dark else "black")  # fmt: skip
        axes.set_xticks(range(len(xs)), [_value_text(x) for x in xs])
        axes.set_yticks(range(len(ys)), [row_text(y) for y in ys])
        axes.set_title(look[impl].label(impl))
        axes.grid(False)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    finish(figure, grid, len(impls), columns, column_label, row_label, legend=False)
    return Drawn(
        f"{records[0].grid}-floor",
        "Time over the time of merely reading the bytes of the stored cache. 1.00 is the read floor; darker is slower. "
        "An implementation that reads a bf16 copy of an fp8 cache cannot get below about 2.",
        figure,
    )  # fmt: skip


def spread(
    records: Sequence[Record], published: Sequence[Record], look: dict[str, Look]
) -> Drawn | None:
    """Slowest over fastest among shapes of equal total tokens."""
    spreads = same_work.spreads([*records, *published])
    if not spreads:
        return None
    totals = sorted({s.tokens for s in spreads})
    shared = {r.requests for s in spreads for r in s.records}
    figure, (axes, *_) = axes_grid(1, 1, 3.0)
    for impl in look:
        points = sorted((totals.index(s.tokens), s.ratio) for s in spreads if s.impl == impl)
        if points:
            axes.plot(*zip(*points, strict=True), label=look[impl].label(impl), **look[impl].line)
    axes.set(yscale="log", ylim=(0.95, max(s.ratio for s in spreads) * 1.25))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(totals)), [short(t) for t in totals])
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08)
    finish(
        figure,
        [axes],
        1,
        1,
        f"total tokens, shared by {min(shared)} to {max(shared)} requests",
        "slowest / fastest time",
    )
    return Drawn(
        f"{records[0].grid}-spread",
        "The same tokens spread over few or many requests: slowest over fastest time. 1 means that only the bytes "
        "count."
        + (" Times of the MI300X are as published, on another GPU." if published else ""),
        figure,
    )  # fmt: skip


def accuracy(records: Sequence[Record], look: dict[str, Look]) -> Drawn | None:
    """Worst error against geometric mean time, over the shapes that all have in common."""
    impls = [i for i in look if any(r.impl == i and r.error for r in records)]
    common = (
        set.intersection(*({r.key[1:] for r in records if r.impl == i} for i in impls))
        if impls
        else set()
    )
    if not common:
        return None
    shared = [r for r in records if r.key[1:] in common]
    fastest = {k: min(r.us or math.inf for r in shared if r.key[1:] == k) for k in common}
    floors = _floors(shared)
    figure, (axes, *_) = axes_grid(1, 1, 3.0)
    points = []
    for impl in impls:
        own = [r for r in shared if r.impl == impl]
        ratios = [
            (r.us or 1.0) / ((r.floor_us if floors else None) or fastest[r.key[1:]]) for r in own
        ]
        x = math.exp(sum(map(math.log, ratios)) / len(ratios))
        y = max(r.error or 0.0 for r in own)
        style, exact = look[impl], own[0].exact
        axes.plot(x, y, linestyle="none", marker=style.marker, markersize=8, color=style.color,
                  markerfacecolor=style.color if exact else "white")  # fmt: skip
        points.append(
            (x, y, style.label(impl) + (f" ({own[0].differs})" if own[0].differs else ""))
        )
    axes.set(xscale="log", yscale="log")
    plain_log(axes)
    axes.xaxis.set_major_locator(LogLocator(10, (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0e}"))
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axes.set_xlim(min(0.95, min(xs)), max(xs) * 2.2)
    axes.set_ylim(min(ys) / (2.2 if len(points) <= MANY else 6), max(ys) * 1.8)
    label_points(figure, axes, points)
    over = "the read floor" if floors else "the fastest"
    finish(
        figure,
        [axes],
        1,
        1,
        f"time over {over} (geometric mean)",
        "largest relative error",
        legend=False,
    )
    return Drawn(
        f"{records[0].grid}-accuracy",
        f"Largest error against the float64 oracle (2-norm, relative) and time, over {len(common)} shapes. Hollow: the "
        "query or the scores are rounded. Left and low is better.",
        figure,
    )  # fmt: skip


Layout = tuple[dict[str, list[Record]], Callable[[Record], float], str, Callable[[float], str]]


def _layout(records: Sequence[Record]) -> Layout:
    """Panels, and what lies along x in them: place, label, and text of a tick."""
    panels: dict[str, list[Record]] = {}
    axis = next(iter(varying(records)), None)
    if any(r.cache_seqlens for r in records):
        for r in records:
            panels.setdefault(f"{r.requests} request{'s' if r.requests > 1 else ''}", []).append(r)
        return panels, lambda r: r.tokens, "total tokens of the batch", short
    if axis:
        values = list(dict.fromkeys(getattr(r, axis) for r in records))
        for r in records:
            panels.setdefault(shape_text(r), []).append(r)
        name = {"num_heads": "query heads", "kv_format": "cache format", "page_size": "tokens a page",
                "seqlen_q": "query tokens"}[axis]  # fmt: skip
        text = lambda x: _value_text(values[round(x)])  # noqa: E731
        return panels, lambda r: values.index(getattr(r, axis)), name, text
    for r in sorted(records, key=lambda r: r.context):
        panels.setdefault(f"{tokens_text(r.context)} tokens each", []).append(r)
    return panels, lambda r: math.log2(r.requests), "requests", lambda x: f"{2**x:.0f}"


def _value_text(value: object) -> str:
    """A tick of a grid's axis: formats over two lines, since they stand side by side."""
    return str(value).removeprefix("fp8_").replace("e4m3", "e4m3\n")


def _apart(ticks: list[float]) -> list[float]:
    """Ticks that have room: all if they are evenly spaced, else the ends, or one if these are close."""
    steps = {b - a for a, b in itertools.pairwise(ticks)}
    if len(steps) <= 1 and max(ticks) < 100:
        return ticks
    return [ticks[0], ticks[-1]] if ticks[-1] > 1.3 * ticks[0] else [ticks[len(ticks) // 2]]


def _widened(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """One point becomes a short line, so that a band can be seen."""
    if len(points) > 1:
        return points
    (x, y), = points  # fmt: skip
    return [(x - 0.3, y), (x + 0.3, y)]


def _floors(records: Sequence[Record]) -> bool:
    return all(r.floor_us for r in records)
