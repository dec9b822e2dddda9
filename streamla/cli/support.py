"""`streamla support`: which implementations this machine can run, and why not the others."""

from __future__ import annotations

from typing import Annotated

import typer

from streamla.cli import console


def support(
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu; the GPU if there is one.")
    ] = None,
) -> None:
    """Print which implementations this machine can run, and why not the others."""
    from streamla import api

    console.out.print(api.support(device), highlight=False, markup=False)
