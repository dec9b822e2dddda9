"""`streamla soak`: random batches against the oracle until the time is up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from streamla.cli import console

if TYPE_CHECKING:
    from streamla.testing.verify import Result


def soak(
    seconds: Annotated[float, typer.Option(min=0, help="How long.")] = 600,
    impl: Annotated[str, typer.Option(help="Implementation; auto is what would run.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the GPU if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first batch.")] = 0,
    count: Annotated[int | None, typer.Option(min=1, help="Batches at most.")] = None,
    json: console.JsonOption = None,
) -> None:
    """Check random shapes, lengths and graph replays. Exit code 1 at the first failure.

    Batch N of a seed is always the same: `--seed S --first N --count 1` repeats it.
    """
    from dataclasses import asdict

    from streamla.testing.soak import soak as run

    with console.progress("Soaking", count) as bar:

        def step(done: int, total: int, result: Result) -> None:
            bar.update(bar.tasks[0].id, completed=done, description=result.name)

        results = run(seconds, impl, device, seed, first, count, progress=step)

    passed = [r for r in results if r.status == "passed"]
    failed = [r for r in results if r.status == "failed"]
    record = {
        "seed": seed,
        "first": first,
        "impl": impl,
        "seconds": sum(r.seconds for r in results),
        "passed": len(passed),
        "largest_share_of_budget": max((r.error / r.budget for r in passed if r.budget), default=0),
        "failed": [asdict(r) for r in failed],
    }
    console.write_json(record, json)
    if not console.quiet(json):
        console.out.print(
            f"{len(passed)} batches passed in {record['seconds']:.0f} s, at most "
            f"{record['largest_share_of_budget']:.0%} of a budget used",
            style="bold", highlight=False,
        )  # fmt: skip
        for r in failed:
            number = r.name.rsplit("-", 1)[1]
            console.out.print(f"{r.name}: {r.detail}", style="red", markup=False)
            console.out.print(f"{r.reason}", style="dim", markup=False, highlight=False)
            console.out.print(f"repeat: --seed {seed} --first {number} --count 1", markup=False)
    if failed or not passed:
        raise typer.Exit(1)
