"""The lanes of `streamla bench timeline` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from streamla.bench.drawing import STYLE, WIDTH, Drawn

COLORS = {"producer": "#999999", "epilogue": "#0072b2", "attention": "#d55e00"}
WAITING, BAR = 0.35, 0.62  # opacity of a program that waits, height of a row
BEFORE_US = 1.6  # of the producer, before its end


def draw(document: dict[str, Any]) -> str:
    """SVG of every lane of the document, one above the other on one axis of time."""
    lanes: Sequence[dict[str, Any]] = document["lanes"]
    rows = [len(lane["spans"]) + (len(lane["spans"]) < lane["launches"]) for lane in lanes]
    # The launches of torch may go on past the picture's right edge.
    last = max(lane["window_us"] for lane in lanes if lane["launches"] == len(lane["spans"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(WIDTH, 0.62 + sum(0.27 * n + 0.34 for n in rows)), layout="constrained"
        )
        grid = figure.subplots(len(lanes), 1, sharex=True, squeeze=False, height_ratios=rows)
        for axes, lane in zip(grid.flat, lanes, strict=True):
            _draw_lane(axes, lane, last)
        grid.flat[-1].set_xlabel("µs after the producer's end")
    shape = f"{document['requests']} requests of {document['context']} tokens, {document['num_heads']} heads"
    return Drawn("epilogue-timeline", shape, figure).svg


def _draw_lane(axes: Axes, lane: dict[str, Any], last: float) -> None:
    spans, window, right = lane["spans"], lane["window_us"], last * 1.25
    hidden = lane["launches"] - len(spans)
    names = [spans[0]["name"]]
    if hidden:
        names.append(f"{hidden} launches")
    names += [span["name"] for span in spans[1:]]
    axes.axvspan(0, window, color="#f0e442", alpha=0.35, linewidth=0)
    for span in spans:
        row = names.index(span["name"])
        color = COLORS.get(span["name"], "#009e73")
        begin, released = max(span["begin"], -BEFORE_US), max(span["released"], -BEFORE_US)
        end = max(right, released) if span["end"] is None else span["end"]
        axes.barh(
            row,
            released - begin,
            BAR,
            begin,
            color=color,
            alpha=WAITING,
            hatch="////",
            edgecolor="white",
        )
        axes.barh(row, end - released, BAR, released, color=color)
    if hidden:
        axes.barh(1, window, BAR, 0, color="#777777", alpha=WAITING)
    if window > right:
        axes.text(right, len(names) - 1, f"at {window:.1f} µs →", ha="right", va="center")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.axvline(window, color="black", linewidth=0.8)
    axes.set_title(f"{lane['name']}: {window:.2f} µs", loc="left")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(-BEFORE_US, right)
    axes.grid(visible=False, axis="y")
