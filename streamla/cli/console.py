"""What the commands share: the console, progress bars, JSON output and parsing of lists."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

out = Console()
err = Console(stderr=True)

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the result as JSON here; - for stdout.")
]


@contextmanager
def progress(title: str, total: int | None, quiet: bool = False) -> Iterator[Progress]:
    """A bar on stderr, gone when done; `advance(progress)` moves it."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=quiet) as bar:
        bar.add_task("", total=total)
        yield bar


def advance(bar: Progress, description: str | None = None) -> None:
    """One step of the only task of `bar`."""
    bar.update(bar.tasks[0].id, advance=1, description=description)


def describe(bar: Progress, description: str) -> None:
    """Say what is being done now."""
    bar.update(bar.tasks[0].id, description=description)


def write_json(value: Any, path: Path | None) -> None:
    """Write `value` where --json says; nothing if it says nothing."""
    if path is None:
        return
    text = json.dumps(value, indent=1)
    if str(path) == "-":
        sys.stdout.write(text + "\n")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def quiet(path: Path | None) -> bool:
    """Whether stdout carries JSON, so that tables must stay away."""
    return path is not None and str(path) == "-"


def integers(name: str, text: str) -> list[int]:
    """ "1,4,32K" -> [1, 4, 32768]."""
    values = []
    for part in text.split(","):
        number = part.strip()
        unit = 1
        if number[-1:].upper() in ("K", "M"):
            unit = 1024 if number[-1].upper() == "K" else 1024 * 1024
            number = number[:-1]
        if not number.isdigit():
            raise ValueError(
                f"{name}: need whole numbers separated by commas (32K is 32768); got {text!r}"
            )
        values.append(int(number) * unit)
    return values
