"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from streamla.doctor.analyze import Report
from streamla.doctor.diff import Diff
from streamla.doctor.findings import Finding
from streamla.doctor.show import percent, spread, us
from streamla.doctor.stats import RULE

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}code,td.k{font-family:ui-monospace,monospace;font-size:.85em}
table{border-collapse:collapse;width:100%}td,th{padding:.3rem .6rem;border-bottom:1px solid #d8dee4;text-align:right}
td:first-child,th:first-child{text-align:left}.f{border-left:4px solid #8c959f;padding:.2rem .8rem;margin:.8rem 0}
.f.bad{border-color:#cf222e}.f b{display:block}.f small{display:block;color:#57606a;overflow-wrap:anywhere}
.bar{height:6px;background:#eaeef2;max-width:20rem}.bar i{display:block;height:6px;background:#cf222e}
.note{color:#9a6700}td.k{overflow-wrap:anywhere;text-align:left}
"""


def _document(title: str, body: Iterable[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    lines = (
        "<tr>"
        + "".join(f"<td{' class=k' if i == 0 else ''}>{escape(c)}</td>" for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{''.join(lines)}</table>"


def _finding(f: Finding) -> str:
    bar = "" if f.waste is None else f'<div class=bar><i style="width:{f.waste:.0%}"></i></div>'
    bad = " bad" if (f.waste or 0) >= 0.5 else ""
    return (
        f"<div class='f{bad}'><b>{escape(percent(f.waste))} {escape(f.sentence)}</b>{bar}"
        f"<small>{escape(f.arithmetic)}</small><small><code>{escape(f.evidence)}</code></small></div>"
    )


def _notes(notes: Iterable[str]) -> Iterable[str]:
    return (f"<p class=note>{escape(n)}</p>" for n in notes)


def report(r: Report) -> str:
    """A report as HTML."""
    gpu = "GPU unknown" if r.gpu is None else f"{r.gpu.name}, {r.gpu.units} {r.gpu.unit_word}"
    body = [
        f"<h1>streamla doctor</h1><p><code>{escape(r.trace.source)}</code> ({r.trace.format}), {escape(gpu)}</p>"
    ]
    body += _notes(r.notes)
    body += ["<h2>Findings</h2>", *map(_finding, r.findings)]
    body += [
        "<h2>Attention</h2>",
        _table(
            ("kernel", "family", "q x cache", "tile rows", "grid", "launches", "us", "merge us", "workload"),
            (
                (g.kernel.text[:200], g.kernel.family or "?", f"{g.kernel.q_dtype or '?'} x {g.kernel.kv_dtype or '?'}",
                 str(g.kernel.tile_rows or "?"), "?" if g.grid is None else "x".join(map(str, g.grid)),
                 str(g.launches), us(g.attention_ns), us(g.merge_ns) if g.merge else "", str(g.workload))
                for g in r.groups
            ),
        ),
    ]  # fmt: skip
    for times in r.times:
        rows = (
            (str(x.layer), spread(x.window), spread(x.epilogue), spread(x.attention))
            for x in times.layers
        )
        body += [
            f"<h2>Layers, us: {escape(str(times.workload))}</h2>",
            _table(("layer", "window", "epilogue", "attention"), rows),
        ]
    if r.times:
        body.append(f"<p><small>Median (10th-90th percentile). {escape(RULE)}.</small></p>")
    return _document("streamla doctor", body)


def diff(d: Diff) -> str:
    """A comparison as HTML."""
    body = [
        "<h1>streamla doctor diff</h1>",
        f"<p>A <code>{escape(d.a.trace.source)}</code><br>B <code>{escape(d.b.trace.source)}</code></p>",
        *_notes(d.notes),
        _table(
            ("us: median (10th-90th percentile)", "A", "B", "A / B"),
            (
                (x.what, spread(x.a), spread(x.b), f"{x.ratio:.2f}" if x.ratio else "")
                for x in d.lines
            ),
        ),
        f"<p><small>{escape(RULE)}.</small></p>",
        *map(_finding, d.findings),
    ]
    return _document("streamla doctor diff", body)
