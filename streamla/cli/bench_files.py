"""`streamla bench report`, `compare`, `collect` and `tables`: what is made of results that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamla.cli import console


def report(
    files: Annotated[list[Path], typer.Argument(help="JSON of runs on one machine.")],
    out: Annotated[Path, typer.Option(help="Folder to write into.")],
    against: Annotated[
        str | None, typer.Option(help="A published table beside ours: mi300x-blog.")
    ] = None,
    formats: Annotated[str, typer.Option(help="Of the figures.")] = "svg,png",
    page: Annotated[bool, typer.Option(help="Write the page, too.")] = True,
) -> None:
    """Figures and a page from results that are there."""
    from streamla.bench import page as pages
    from streamla.bench.published import table
    from streamla.bench.records import joined, load

    results, *others = map(load, files)
    for part in others:
        if part.gpu != results.gpu:
            raise ValueError(f"report: need runs of one machine; got {results.gpu} and {part.gpu}")
        results = joined(results, part)
    published = table(against) if against else []
    for path in pages.write(results, out, published, formats.split(","), page):
        console.out.print(str(path), highlight=False)


def compare(
    before: Annotated[Path, typer.Argument(help="JSON of the first run.")],
    after: Annotated[Path, typer.Argument(help="JSON of the second run.")],
    tolerance: Annotated[
        float, typer.Option(help="Slow-down that is accepted: 0.05 is 5 %.")
    ] = 0.05,
    json: console.JsonOption = None,
) -> None:
    """Compare two runs. Exit code 1 if a shape got slower, or has lost its time."""
    from dataclasses import asdict

    from streamla.bench.compare import compare as compare_results
    from streamla.bench.records import load
    from streamla.bench.report import compare_table, shape_text

    first, second = load(before), load(after)
    comparison = compare_results(first, second)
    slower = [c for c in comparison.changes if c.slower(tolerance)]
    document = {"geomean": comparison.geomean, "slower": len(slower), **asdict(comparison)}
    console.write_json(document, json)
    if not console.quiet(json):
        if not comparison.changes:
            raise ValueError("compare: the two runs have no shape and implementation in common")
        console.out.print(compare_table(comparison, tolerance), highlight=False)
        for r in comparison.lost:
            console.out.print(f"no time any more: {r.impl}, {shape_text(r)}", style="red")
        if first.gpu != second.gpu:
            console.out.print(f"different devices: {first.gpu} and {second.gpu}", style="yellow")
        console.out.print(
            f"{len(comparison.changes)} shapes, geometric mean {comparison.geomean:.3f}, "
            f"{len(slower)} slower by more than {tolerance:.0%}",
            highlight=False,
        )
    if slower or comparison.lost:
        raise typer.Exit(1)


def collect(
    files: Annotated[list[Path], typer.Argument(help="JSON of runs on one machine.")],
    json: Annotated[Path, typer.Option("--json", help="File to write the list into.")],
) -> None:
    """One plain list of records out of several runs, each with its command."""
    from streamla.bench import collect as collecting
    from streamla.bench.records import load

    records = collecting.collect([load(file) for file in files])
    collecting.save(records, json)
    console.out.print(f"{json}: {len(records)} records", highlight=False)


def tables(
    file: Annotated[Path, typer.Argument(help="The list of `streamla bench collect`.")],
    into: Annotated[
        list[Path] | None,
        typer.Option(help="Markdown with markers to fill; several: give it again."),
    ] = None,
) -> None:
    """The Markdown tables of a list of records: print them, or put them between a file's markers."""
    from streamla.bench import collect as collecting
    from streamla.bench.tables import TABLES, fill

    records = collecting.load(file)
    for path in into or []:
        path.write_text(fill(path.read_text(), records))
    if not into:
        for name, table in TABLES.items():
            console.out.print(
                f"{name}\n\n{table(records)}", markup=False, highlight=False, soft_wrap=True
            )
