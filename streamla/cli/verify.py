"""`streamla verify`: every named case against the oracle, on this machine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from streamla.cli import console

if TYPE_CHECKING:
    from streamla.testing.verify import Result

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}


def verify(
    impl: Annotated[str, typer.Option(help="Implementation; auto is what would run.")] = "auto",
    only: Annotated[str | None, typer.Option(help="Cases whose name contains this.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the GPU if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the values and the order of pages.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run cases side by side.")] = 1,
    failures: Annotated[bool, typer.Option(help="List only what did not pass.")] = False,
    json: console.JsonOption = None,
) -> None:
    """Run every case against the oracle. Exit code 1 if one fails, or if none could run."""
    from dataclasses import asdict

    from streamla.testing.verify import verify as run_cases

    with console.progress("Verifying", None) as bar:

        def step(done: int, total: int, result: Result) -> None:
            bar.update(bar.tasks[0].id, total=total, completed=done, description=result.name)
            if result.status == "failed":  # at once: the rest may take minutes
                bar.print(f"[red]{result.name} failed[/]: {escape(result.detail)}", highlight=False)

        results = run_cases(impl, device, progress=step, seed=seed, only=only, jobs=jobs)

    if not results:
        raise ValueError(f"only: no case has a name that contains {only!r}")
    console.write_json([asdict(r) for r in results], json)
    counts = Counter(r.status for r in results)
    if not console.quiet(json):
        _print([r for r in results if not failures or r.status != "passed"], counts)
    if counts["failed"] or not counts["passed"]:
        raise typer.Exit(1)


def _print(results: list[Result], counts: Counter[str]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold", expand=True)
    table.add_column("case", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("error", "of budget", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason", style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
    for r in results:
        ran = r.status == "passed"
        table.add_row(
            r.name,
            f"[{_STYLES[r.status]}]{r.status}[/]",
            f"{r.error:.1e}" if ran else "",
            f"{r.error / r.budget:.0%}" if ran and r.budget else "",
            f"{r.seconds:.1f}" if r.seconds else "",
            r.reason,
        )
    console.out.print(table, highlight=False)
    for r in results:
        if r.status == "failed":
            console.out.print(f"{r.name}: {r.detail}", style="red", markup=False)
    for detail, n in Counter(r.detail for r in results if r.status == "skipped").items():
        console.out.print(f"{n} skipped: {detail}", style="dim", markup=False, highlight=False)
    console.out.print(", ".join(f"{counts[s]} {s}" for s in _STYLES if counts[s]), style="bold")
