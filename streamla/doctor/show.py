"""The report for people: tables on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamla.doctor.analyze import Report
from streamla.doctor.diff import Diff
from streamla.doctor.findings import Finding
from streamla.doctor.names import KernelName, padding
from streamla.doctor.predict import Prediction
from streamla.doctor.stats import RULE, Spread
from streamla.doctor.windows import StepTimes


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def us(ns: float | None) -> str:
    return "" if ns is None else f"{ns / 1e3:.1f}"


def spread(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.median / 1e3:.1f} ({value.low / 1e3:.1f}-{value.high / 1e3:.1f})"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _findings(found: list[Finding]) -> list[RenderableType]:
    out: list[RenderableType] = []
    for f in found:
        style = "bold red" if (f.waste or 0) >= 0.5 else "bold"
        line = Table.grid(padding=(0, 1))
        line.add_column(width=4, justify="right", style=style)
        line.add_column()
        line.add_row(percent(f.waste) or "-", Text(f.sentence, style="bold"))
        line.add_row("", Text(f.evidence, style="dim"))
        line.add_row("", Text(f.arithmetic, style="dim"))
        out.append(line)
    return out or [Text("Nothing to report.")]


def _kernels(report: Report) -> Table:
    table = _table("Attention", "kernel", "q x cache", "rows", "grid", "us", "+ merge")
    for g in report.groups[:12]:
        k = g.kernel
        table.add_row(
            f"{k.short}\n  {k.family}, {g.launches}x; {g.workload}", f"{k.q_dtype or '?'} x {k.kv_dtype or '?'}", _rows(k),
            "?" if g.grid is None else "x".join(map(str, g.grid)), us(g.attention_ns),
            us(g.merge_ns) if g.merge else "",
        )  # fmt: skip
    return table


def _rows(kernel: KernelName) -> str:
    if kernel.row_steps:
        return "fitted"
    return str(kernel.tile_rows or "?")


def _busiest(report: Report) -> Table:
    table = _table("Most time", "kernel", "role", "share")
    total = sum(t for _, _, t in report.busiest) or 1
    for name, role, time in report.busiest[:8]:
        table.add_row(name, role, percent(time / total))
    return table


def _layers(times: StepTimes) -> Table:
    token = f"; token {us(times.token.median)} us" if times.token else ""
    table = _table(
        f"Layers: {times.workload}{token}", "layer", "window us", "epilogue us", "attention us"
    )
    for x in times.layers[:6]:
        table.add_row(str(x.layer), spread(x.window), spread(x.epilogue), spread(x.attention))
    if len(times.layers) > 6:
        table.add_row("...", "", "", f"{len(times.layers)} layers")
    return table


def report(console: Console, r: Report) -> None:
    """Print a report."""
    gpu = "GPU unknown" if r.gpu is None else f"{r.gpu.name}, {r.gpu.units} {r.gpu.unit_word}"
    console.print(f"[bold]{r.trace.source}[/]  {r.trace.format}, {gpu}")
    if r.timeline and r.timeline.steps:
        console.print(
            f"{len(r.timeline.steps)} steps ({len(r.timeline.whole_steps)} whole) of "
            f"{r.timeline.layers_per_step} layers"
        )
    for note in r.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    console.print(Group(*_findings(r.findings)))
    console.print()
    if r.groups:
        console.print(_kernels(r))
    for times in r.times[:3]:
        console.print(_layers(times))
    if r.times:
        console.print(
            Text(f"Median (10th-90th percentile); window: from the end of /{r.times[0].from_pattern}/ to the "
                 f"start of attention. {RULE}.\n", style="dim")
        )  # fmt: skip
    if len(r.trace):
        console.print(_busiest(r))


def explain(console: Console, k: KernelName, heads: int | None, q_len: int) -> None:
    """Print what a name says."""

    def word(value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return "the name does not say" if value is None else str(value)

    table = _table(k.text[:100], "", "")
    table.show_header = False
    for label, value in (
        ("family", k.family), ("role", k.role), ("query", k.q_dtype), ("cache", k.kv_dtype),
        ("heads of a tile", k.tile_heads), ("query rows of a tile", k.tile_q_rows),
        ("rows of a tile", k.tile_rows), ("splits a request", k.split), ("merged by", k.merge),
        ("persistent", k.persistent), ("absorbed MLA", k.mla),
    ):  # fmt: skip
        table.add_row(label, word(value))
    if heads is not None:
        table.add_row("padding", percent(padding(k, heads, q_len)) or "the tile is unknown")
    console.print(table)
    for line in k.says:
        console.print(f"  {line}")
    for piece in k.unknown:
        console.print(Text(f"  not understood: {piece}", style="yellow"))
    if k.flattened:
        console.print("  heads and query rows share the rows of the tile")
    if k.note:
        console.print(f"  {k.note}")


def prediction(console: Console, p: Prediction) -> None:
    """Print a prediction."""
    console.print(
        f"[bold]{p.engine}[/] ({p.backend}) on {p.gpu}: [bold]{p.kernel}[/]", soft_wrap=True
    )
    for sentence in p.sentences:
        console.print(f"  {sentence}")
    console.print(
        f"  {p.bytes / 1e6:.1f} MB of cache a layer: {p.floor_us:.1f} us at the read rate of the GPU."
    )
    console.print(Text(f"  {p.rule['why']}", style="dim"))
    console.print(Text(f"  source: {p.rule['source']} ({p.rule['date']})", style="dim"))
    for note in p.notes:
        console.print(Text(f"  note: {note}", style="yellow"))


def diff(console: Console, d: Diff) -> None:
    """Print two traces side by side."""
    console.print(f"A {d.a.trace.source}\nB {d.b.trace.source}")
    for note in d.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    if d.lines:
        table = _table("us, median (10th-90th percentile)", "", "A", "B", "A / B")
        for x in d.lines:
            table.add_row(x.what, spread(x.a), spread(x.b), f"{x.ratio:.2f}" if x.ratio else "")
        table.caption = f"{RULE}."
        console.print(table)
    if d.attention_ratio:
        console.print(f"Attention: A / B = {d.attention_ratio:.2f} (median over the layers)")
    if d.findings:
        console.print(Group(*_findings(d.findings)))
