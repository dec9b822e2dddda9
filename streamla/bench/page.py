"""A run as one HTML file that needs nothing else: figures as data, no script, no request."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from streamla.bench import drawing, figures, report, same_work
from streamla.bench.drawing import Drawn
from streamla.bench.records import Record, Results
from streamla.bench.timing import GPUState, drift

PAGE = "index.html"

_STYLE = """
:root{color-scheme:light}
body{font:16px/1.55 system-ui,sans-serif;max-width:66rem;margin:0 auto;padding:1.5rem 1rem 4rem;color:#1b1f24}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.15rem;margin:2.6rem 0 .6rem;border-top:2px solid #1b1f24;padding-top:.5rem}
h3{font-size:1rem;margin:1.6rem 0 .4rem}p,li{max-width:48rem}code{font-family:ui-monospace,monospace;font-size:.88em;overflow-wrap:anywhere}
figure{margin:1rem 0 1.6rem}figure img{width:100%;height:auto;display:block}figcaption,small{color:#57606a;font-size:.9rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;min-width:60%}
th,td{padding:.22rem .7rem;text-align:right;border-bottom:1px solid #d8dee4;white-space:nowrap}
th{border-bottom:2px solid #8c959f;vertical-align:bottom}td.t,th.t{text-align:left}tr.s td{border-top:1px solid #8c959f}
.bar{display:inline-block;height:.6em;background:#24292f;margin-left:.5em;vertical-align:baseline}.warn{color:#9a3412;font-weight:600}
tr.ours td{font-weight:600}
"""
# Whoever opens the page can see that it asks for nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write(
    results: Results, directory: Path, published: Sequence[Record] = (),
    formats: Sequence[str] = ("svg", "png"), whole: bool = True,
) -> list[Path]:  # fmt: skip
    """Every figure as a file of its own and, if `whole`, the page; the files that were written."""
    paths, drawn = [], {}
    for grid, records in by_grid(results.records).items():
        drawn[grid] = figures.draw(records, published if grid == "blog" else ())
        paths += drawing.save(drawn[grid], directory, formats)
    if whole:
        directory.mkdir(parents=True, exist_ok=True)
        paths.append(directory / PAGE)
        paths[-1].write_text(page(results, drawn, published), encoding="utf-8")
    return paths


def by_grid(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by their grid, in order."""
    grids: dict[str, list[Record]] = {}
    for r in records:
        grids.setdefault(r.grid, []).append(r)
    return grids


def page(results: Results, drawn: dict[str, list[Drawn]], published: Sequence[Record] = ()) -> str:
    """The whole document."""
    where = results.gpu or "the CPU"
    body = [
        f"<h1>MLA decode on {escape(where)}</h1>",
        f"<p><small>streamla {escape(results.streamla)}, {escape(results.started)}</small></p>",
        *_warnings(results),
        "<h2>Implementations</h2>",
        _implementations(results),
        *_absent(results),
    ]
    for grid, records in by_grid(results.records).items():
        body.append(f"<h2>{escape(_grid_title(grid, records))}</h2>")
        body += [_figure(d) for d in drawn.get(grid, [])]
        beside = published if grid == "blog" else ()
        body += _same_work(records, beside)
        body += ["<h3>Every shape</h3>", _records(records)]
    body += ["<h2>How it was measured</h2>", *_conditions(results)]
    title = f"streamla bench: {where}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _grid_title(grid: str, records: Sequence[Record]) -> str:
    return f"{grid}: {report.spec_text(records[0], report.varying(records))}"


def _table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], text: int = 1) -> str:
    """A table whose first `text` columns are words; a row is its class and its cells, which are HTML."""
    kind = ['class="t"' if i < text else "" for i in range(len(head))]
    top = "".join(f'<th scope="col" {kind[i]}>{escape(h)}</th>' for i, h in enumerate(head))
    lines = "\n".join(
        f'<tr class="{name}">'
        + "".join(f"<td {kind[i]}>{cell}</td>" for i, cell in enumerate(cells))
        + "</tr>"
        for name, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def _figure(d: Drawn) -> str:
    data = base64.b64encode(d.svg.encode()).decode()
    text = escape(d.caption, quote=True)
    return (
        f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _warnings(results: Results) -> Iterable[str]:
    if results.scaled_down > 1:
        yield (
            f'<p class="warn">Without a GPU, contexts are {results.scaled_down} times shorter. These times say that '
            "the benchmark works; they say nothing about a GPU.</p>"
        )
    states = [GPUState(**s) if s else None for s in (results.gpu_state or {}).values()]
    moved = drift(*states) if len(states) == 2 else None
    for note in [*([moved] if moved else []), *report.notes(results.records)]:
        yield f'<p class="warn">{escape(note)}</p>'


def _implementations(results: Results) -> str:
    rows = []
    for impl, look in drawing.looks(results.records).items():
        own = [r for r in results.records if r.impl == impl]
        first = own[0]
        errors = [r.error for r in own if r.error is not None]
        plans = [r.plan_us for r in own if r.plan_us]
        rows.append(
            (
                "" if first.peer else "ours",
                [
                    escape(look.label(impl)),
                    escape(first.version),
                    "yes" if first.exact else "no",
                    escape(first.differs or ""),
                    f"{max(errors):.1e}" if errors else "",
                    f"{sum(1 for r in own if r.us)} of {len(own)}",
                    report.three_digits(sorted(plans)[len(plans) // 2]) if plans else "",
                ],
            )
        )
    head = (
        "implementation",
        "version",
        "exact",
        "differs",
        "largest error",
        "shapes timed",
        "plan, us",
    )
    return _table(head, rows, text=4) + (
        "<p><small>Exact: neither the query nor the cached values are rounded further than they come. A bf16 cache holds "
        "the same values in twice the bytes, made before the clock runs. Error: 2-norm, relative to a float64 oracle, "
        "measured before any time is taken; over its budget means no time. Plan: once a step, not part of the "
        "times.</small></p>"
    )


def _absent(results: Results) -> Iterable[str]:
    if results.absent:
        items = "".join(
            f"<li>{escape(a['name'])}: {escape(a['reason'])} (<code>{escape(a['install'])}</code>)</li>"
            for a in results.absent
        )
        yield f"<p>Not here:</p><ul>{items}</ul>"


def _same_work(records: Sequence[Record], published: Sequence[Record]) -> Iterable[str]:
    rows, previous = [], None
    for s in same_work.spreads([*records, *published]):
        first = s.tokens != previous
        previous = s.tokens
        rows.append(
            (
                ("s " if first else "") + ("" if s.records[0].peer else "ours"),
                [
                    drawing.short(s.tokens) if first else "",
                    escape(s.impl),
                    str(len(s.records)),
                    f"{report.three_digits(s.fastest)} ({escape(report.shape_text(s.records[0]))})",
                    f"{report.three_digits(s.slowest)} ({escape(report.shape_text(s.records[-1]))})",
                    f"{s.ratio:.2f}",
                ],
            )
        )
    if rows:
        yield "<h3>The same work</h3>"
        head = ("tokens", "implementation", "shapes", "fastest, us", "slowest, us", "spread")
        yield _table(head, rows, text=2)


def _records(records: Sequence[Record]) -> str:
    axes = report.varying(records)
    slowest = max((r.x_floor or 0.0 for r in records), default=0.0)
    several = any(r.us_runs for r in records)
    energy = any(r.joules_per_mtoken for r in records)
    rows, previous = [], None
    for r in records:
        shape = [report.shape_text(r), *(str(getattr(r, n)) for n in axes)]
        first = shape != previous
        previous = shape
        bar = (
            f'<span class="bar" style="width:{5 * (r.x_floor or 0) / slowest:.2f}rem"></span>'
            if r.x_floor
            else ""
        )
        rows.append(
            (
                ("s " if first else "") + ("" if r.peer else "ours"),
                [
                    *(map(escape, shape) if first else [""] * len(shape)),
                    escape(r.impl),
                    report.three_digits(r.us) if r.us else "-",
                    f"{(r.us_p75 - r.us_p25) / r.us:.1%}" if r.us and r.us_p25 and r.us_p75 else "",
                    *([_run_spread(r)] if several else []),
                    report.three_digits(r.us_eager) if r.us_eager else "",
                    f"{r.gbps:,.0f}" if r.gbps else "",
                    f"{r.x_floor:.2f}{bar}" if r.x_floor else "",
                    *([_joules(r)] if energy else []),
                    r.roof or "",
                    f"{r.error:.1e}" if r.error is not None else "",
                ],
            )
        )
    names = [report.SPEC_COLUMNS[n] for n in axes]
    head = (
        "shape",
        *names,
        "implementation",
        "us",
        "quartiles",
        *(["runs"] if several else []),
        "eager, us",
        "GB/s",
        "x floor",
        *(["J/1M tokens"] if energy else []),
        "roof",
        "error",
    )
    return _table(head, rows, text=2 + len(names))


def _joules(r: Record) -> str:
    return report.three_digits(r.joules_per_mtoken) if r.joules_per_mtoken else ""


def _run_spread(r: Record) -> str:
    return f"{max(r.us_runs) / min(r.us_runs) - 1:.1%}" if r.us_runs else ""


def _conditions(results: Results) -> Iterable[str]:
    if results.device == "cuda":
        yield (
            "<p>us: median time of one decode call in a CUDA graph, over disjoint regions of the cache that are together "
            "larger than the last-level cache, so that every read comes from memory. Pages in random order. Implementations "
            "and floor take turns. Quartiles: their distance as a share of the median. Runs: how much slower the slowest of several runs was. Eager: the same calls issued from Python. "
            "x floor: over a kernel that only reads the stored bytes, in the same rounds. Roof: which of the vendor's rates "
            "bounds the shape.</p>"
        )
    rows = [
        ("command", f"<code>{escape(results.command)}</code>"),
        ("torch, triton", f"{escape(results.torch)}, {escape(results.triton)}"),
    ]
    if results.l2_bytes:
        rows.append(("last-level cache", f"{results.l2_bytes / 2**20:.0f} MiB"))
    for when, s in (results.gpu_state or {}).items():
        if s:
            state = f"SM {s['sm_mhz']} MHz, memory {s['memory_mhz']} MHz, {s['celsius']} C, {s['watts']:.0f} W"
            rows.append((f"GPU {when}", state))
    yield _table(("", ""), (("", row) for row in rows), text=2)
