"""`streamla compile`: compile every kernel for a target without a GPU and print what it is made of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from streamla.cli import console

if TYPE_CHECKING:
    from streamla.runtime.facts import KernelFacts


def compile(
    target: Annotated[str, typer.Option(help="sm_90a or gfx942.")] = "sm_90a",
    only: Annotated[str | None, typer.Option(help="Variants whose name contains this.")] = None,
    json: console.JsonOption = None,
) -> None:
    """Compile every kernel for a target, without a GPU. Exit code 1 if one fails or spills registers."""
    # Set, it would turn the kernels into Python for Triton's interpreter, which compiles nothing.
    os.environ.pop("TRITON_INTERPRET", None)
    from streamla.runtime.offline import compile_variant, find_variants

    variants = find_variants(target, only)
    if not variants:
        raise ValueError(f"only: no kernel for {target} has a name that contains {only!r}")
    facts, failed = [], []
    with console.progress(f"Compiling for {target}", len(variants)) as bar:
        for variant in variants:
            console.describe(bar, variant.name)
            try:
                facts.append(compile_variant(variant, target))
            except RuntimeError as error:  # of NVRTC or of Triton; the other kernels are still told
                failed.append(variant.name)
                console.err.print(f"{variant.name}: {error}", style="red", markup=False)
            console.advance(bar)
    console.write_json([f.as_dict() for f in facts], json)
    if not console.quiet(json):
        _print(facts, target)
    spilled = [f.variant for f in facts if f.spills]
    for what, names in (("does not compile", failed), ("spills", spilled)):
        if names:
            console.err.print(f"{what}: {', '.join(names)}", style="bold red", markup=False)
    if failed or spilled:
        raise typer.Exit(1)


def _print(facts: list[KernelFacts], target: str) -> None:
    from streamla.bench.report import plain_table

    amd = target == "gfx942"
    columns = ["threads", "VGPR", "AGPR", "SGPR"] if amd else ["threads", "regs"]
    unit, memory = ("CU", "LDS") if amd else ("SM", "shared")
    columns += ["spill", memory, f"per {unit}", "instr", "matrix", "conv", memory + " i"]
    table = plain_table(f"{len(facts)} kernels for {target}")
    table.add_column("kernel", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for f in facts:
        registers = [f.registers - f.agprs, f.agprs, f.sgprs] if amd else [f.registers]
        cells = [f.threads, *registers, f.spills, f"{f.shared_bytes / 1024:.1f}K",
                 f.programs_per_unit, f.instructions, f.matrix, f.convert, f.shared]  # fmt: skip
        table.add_row(f.variant, *(str(c) for c in cells), style="red" if f.spills else None)
    # Names are long: a narrow terminal had better break lines than words.
    Console(width=max(console.out.width, 128)).print(table)
    console.out.print(
        f"spill: {'registers spilled' if amd else 'instructions that touch local memory'}. {memory}: bytes a "
        f"program. per {unit}: programs that fit one at a time. Then instructions in the code: all, matrix, "
        f"conversions, {memory} accesses.",
        style="dim", highlight=False,
    )  # fmt: skip
