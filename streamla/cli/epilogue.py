"""`streamla bench epilogue` and `streamla bench timeline`: the epilogue's time, and what goes on around it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from streamla.cli import console


def epilogue(
    tokens: Annotated[str, typer.Option(help="New tokens of a step.")] = "1,8,16,64,65,128,256",
    heads: Annotated[str, typer.Option(help="Query heads.")] = "8,12,16,64",
    rope: Annotated[
        str, typer.Option(help="none, interleaved, neox; several: none,neox.")
    ] = "none",
    requests: Annotated[
        str,
        typer.Option(
            help="Also time decode_step for so many requests; several: 1,8. none: do not."
        ),
    ] = "none",
    context: Annotated[str, typer.Option(help="Cached tokens of each of them.")] = "4K",
    impl: Annotated[str, typer.Option(help="auto or the name of one.")] = "auto",
    vllm: Annotated[
        Path | None,
        typer.Option(help="_C_stable_libtorch.abi3.so of a vLLM wheel; else the installed vLLM's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the values.")] = 0,
    json: console.JsonOption = None,
) -> None:
    """Time the epilogue beside vLLM's fused operator and plain torch, launch after launch in a graph."""
    import torch

    from streamla.bench.epilogue import SCHEMA, EpilogueRecord, measure, shapes
    from streamla.bench.peers import vllm_epilogue
    from streamla.bench.step import measure_steps
    from streamla.bench.workloads import Workload
    from streamla.spec import MLASpec

    device = _gpu()
    absent = vllm_epilogue.load(vllm)
    ropes = [None if name == "none" else name for name in rope.split(",")]
    wanted = shapes(
        console.integers("tokens", tokens), console.integers("heads", heads), ropes, device, impl
    )
    torch.ones(1 << 28, device=device).sum()  # the clocks rise
    records: list[EpilogueRecord] = []
    with console.progress("Epilogue", len(wanted), console.quiet(json)) as bar:
        for shape in wanted:
            records.append(measure(shape, device, absent is None, seed))
            console.advance(bar, f"{shape.tokens} tokens, {shape.num_heads} heads")
    steps = []
    if requests != "none":
        (length,) = console.integers("context", context)
        spec = MLASpec(16, "fp8_e4m3fn")
        counts = console.integers("requests", requests)
        steps = measure_steps(
            [Workload("step", spec, (length,) * n) for n in counts], device, impl=impl
        )
    measured = {"records": [asdict(r) for r in records], "steps": [asdict(s) for s in steps]}
    facts = {"vllm": absent or "measured", **measured}
    console.write_json(_document(SCHEMA, device, facts), json)
    if not console.quiet(json):
        _print(records, absent)
        for s in steps:
            console.out.print(
                f"{s.requests} requests of {s.context} tokens, {s.num_heads} heads: decode {s.decode_us:.2f} us, "
                f"decode_step {s.decode_step_us:.2f}, epilogue and decode {s.two_calls_us:.2f}",
                highlight=False,
            )


def timeline(
    requests: Annotated[int, typer.Option(help="Requests of the step.")] = 8,
    context: Annotated[str, typer.Option(help="Cached tokens of each.")] = "4K",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    lanes: Annotated[
        Path | None, typer.Option("--from", help="Draw what --json wrote; measure nothing.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw into this file.")] = None,
    json: console.JsonOption = None,
) -> None:
    """Measure, and draw, the window from the producer's end to attention's first read."""
    if lanes is not None:
        import json as reader

        document: dict[str, Any] = reader.loads(lanes.read_text())
    else:
        from streamla.bench import timeline as measured

        device = _gpu()
        (length,) = console.integers("context", context)
        found = measured.lanes(requests, length, heads, device)
        shape = {"requests": requests, "context": length, "num_heads": heads}
        facts = {**shape, "lanes": [asdict(lane) for lane in found]}
        document = _document(measured.SCHEMA, device, facts)
        console.write_json(document, json)
    if svg is not None:
        from streamla.bench.timeline_drawing import draw

        svg.parent.mkdir(parents=True, exist_ok=True)
        svg.write_text(draw(document))
    if not console.quiet(json):
        for lane in document["lanes"]:
            text = f"{lane['window_us']:6.2f} us  {lane['name']} ({lane['launches']} launches)"
            console.out.print(text, highlight=False)


def _gpu():
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench: the epilogue is timed on a GPU, and there is none")
    return torch.device("cuda", torch.cuda.current_device())


def _document(schema: str, device, facts: dict) -> dict:
    import torch

    from streamla.cli.bench import _command
    from streamla.version import __version__

    return {
        "schema": schema,
        "command": _command(sys.argv[1:]),
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "streamla": __version__,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **facts,
    }


def _print(records, absent: str | None) -> None:
    from rich.table import Table

    table = Table(title="us a launch")
    for name in ("tokens", "heads", "cache", "query", "rope", "ours", "vLLM", "torch", "same"):
        table.add_column(name, justify="right")
    for r in records:
        times = (f"{t:.2f}" if t is not None else "" for t in (r.us, r.vllm_us, r.torch_us))
        same = "" if r.vllm_same is None else f"{r.vllm_same:.5f}"
        shape = (str(r.tokens), str(r.num_heads), r.format, r.q_format, r.rope or "none")
        table.add_row(*shape, *times, same)
    console.out.print(table, highlight=False)
    if absent:
        console.out.print(f"vLLM: {absent}", style="yellow", highlight=False, markup=False)
