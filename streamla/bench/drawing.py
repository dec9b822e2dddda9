"""How figures look: for print, readable in greyscale. Where their parts are put."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from streamla.bench.records import Record

WIDTH = 7.2  # inches: a page of two columns
FONT_SIZE = 8.5
STYLE: dict[str, Any] = {
    "font.size": FONT_SIZE,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "streamla",  # the same results give the same file
    "savefig.dpi": 200,
}
# Colours of falling lightness for colour-blind readers too; markers and dashes tell them apart without.
LOOKS: tuple[tuple[str, str, Any], ...] = (
    ("#000000", "o", "-"),
    ("#0072b2", "s", "--"),
    ("#d55e00", "^", "-."),
    ("#009e73", "D", ":"),
    ("#cc79a7", "v", (0, (5, 1, 1, 1, 1, 1))),
    ("#e69f00", "P", (0, (1, 1))),
    ("#56b4e9", "X", (0, (7, 2))),
    ("#777777", "*", (0, (3, 3))),
    ("#999933", "p", "--"),
    ("#882255", "h", ":"),
    ("#444444", "<", "-."),
    ("#bbbbbb", ">", "-"),
    ("#332288", "d", (0, (9, 2, 2, 2))),
    ("#117733", "H", "--"),
    ("#aa4499", "8", "-."),
    ("#661100", "p", "-"),
)
LEGEND_ROW = 0.18  # inches
MANY = 8  # entries of a legend, over which its columns are wider and the figure is higher


@dataclass(frozen=True)
class Look:
    """How an implementation is drawn."""

    color: str
    marker: str
    dash: Any
    ours: bool

    def label(self, impl: str) -> str:
        """What a legend calls it."""
        return f"streamla {impl}" if self.ours else impl

    @property
    def line(self) -> dict[str, Any]:
        return {
            "color": self.color, "marker": self.marker, "linestyle": self.dash,
            "markersize": 5.5 if self.ours else 4.5, "linewidth": 2.0 if self.ours else 1.2,
            "zorder": 3 if self.ours else 2.5,
        }  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A figure, the name of its file and what it shows, in a sentence."""

    name: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """The same text for the same results."""
        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue().decode()


def short(n: float) -> str:
    """ "512K", "1M", "777"."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.0f}"


def looks(records: Sequence[Record]) -> dict[str, Look]:
    """Ours first, then the peers, each in the order in which they were run."""
    names = sorted(
        dict.fromkeys((r.peer, r.impl) for r in records), key=lambda item: item[0]
    )  # stable: the order of a run is kept
    return {
        impl: Look(*LOOKS[i % len(LOOKS)], ours=not peer) for i, (peer, impl) in enumerate(names)
    }


def save(
    drawn: Sequence[Drawn], directory: Path, formats: Sequence[str] = ("svg", "png")
) -> list[Path]:
    """Each figure as a file of each format."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for d in drawn:
            for kind in formats:
                paths.append(directory / f"{d.name}.{kind}")
                if kind == "svg":
                    paths[-1].write_text(d.svg, encoding="utf-8")
                else:
                    d.figure.savefig(paths[-1])
    return paths


def axes_grid(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=columns > 1)
    return figure, list(grid.flat)


def plain_log(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


def finish(
    figure: Figure,
    grid: Sequence[Axes],
    used: int,
    columns: int,
    x: str,
    y: str,
    legend: bool = True,
) -> None:
    """Labels on the outside, empty panels gone, one legend above."""
    for axes in grid[used:]:
        axes.set_visible(False)
    figure.supxlabel(x, fontsize=FONT_SIZE)
    figure.supylabel(y, fontsize=FONT_SIZE)
    if not legend:
        return
    entries: dict[str, Artist] = {}
    for axes in grid[:used]:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    columns = 3 if len(entries) > MANY else min(4, len(entries))
    if len(entries) > MANY:
        rows = -(-len(entries) // columns)
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (rows - 2))
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns)


def label_points(figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points; one that would lie on another goes above or below it, inside of the axes."""
    size = FONT_SIZE
    width, height = (72 * inches for inches in figure.get_size_inches())
    to_x = 0.85 * width / math.log(axes.get_xlim()[1] / axes.get_xlim()[0])
    to_y = 0.75 * height / math.log(axes.get_ylim()[1] / axes.get_ylim()[0])
    places = [(math.log(x) * to_x, math.log(y) * to_y) for x, y, _ in points]
    boxes = [
        (x - 5, x + 5, y) for x, y in places
    ]  # left, right, middle, in points: the markers first
    low, high = (math.log(limit) * to_y for limit in axes.get_ylim())
    for x, y, text in sorted(points):
        left, middle = math.log(x) * to_x + 8, math.log(y) * to_y
        right = left + 0.58 * size * len(text)
        for lift in sorted(range(-91, 92, 13), key=lambda lift: (abs(lift), -lift)):
            free = low + size < middle + lift < high - size and all(
                left > end or right < begin or abs(middle + lift - m) > size
                for begin, end, m in boxes
            )
            if free:
                break
        boxes.append((left, right, middle + lift))
        axes.annotate(
            text, (x, y), xytext=(8, lift), textcoords="offset points", va="center",
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5} if lift else None,
        )  # fmt: skip
