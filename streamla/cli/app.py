"""The commands, each in a module of its own. Modules import torch and the rest only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from streamla.cli import bench, compile, plan, soak, support, verify
from streamla.version import __version__

app = typer.Typer(
    help="MLA decode at the speed of memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"streamla {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """MLA decode at the speed of memory."""


app.command()(verify.verify)
app.command()(soak.soak)
app.add_typer(bench.app, name="bench")
app.command()(plan.plan)
app.command()(compile.compile)
app.command()(support.support)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def doctor(context: typer.Context) -> None:
    """Find out which kernel a server really runs, and what it wastes."""
    from streamla.doctor.cli import app as doctor_app

    doctor_app(args=context.args, prog_name="streamla doctor")
