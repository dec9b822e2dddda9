"""`streamla bench`: check, then time. `streamla bench compare`: two runs side by side."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamla.cli import console

if TYPE_CHECKING:
    import torch

    from streamla.bench.records import Record, Results
    from streamla.bench.workloads import Workload
    from streamla.spec import MLASpec

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

CPU_SCALE = 256  # contexts are divided by this without a GPU
CPU_MAX_TOKENS = 1 << 14
OUTPUTS = (
    "--json",
    "--report",
)  # options that say where results go: not part of a recorded command


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    grid: Annotated[
        str, typer.Option(help="blog, heads, formats, pages, mtp, small; several: blog,small.")
    ] = "blog",
    trace: Annotated[
        Path | None, typer.Option(help="Batches of a Mooncake JSONL trace, in place of a grid.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="With --trace, requests held at once; several: 1,16.")
    ] = "16",
    samples: Annotated[int, typer.Option(help="With --trace, batches for each concurrency.")] = 8,
    step_ms: Annotated[float, typer.Option(help="With --trace, duration of a decode step.")] = 25.0,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    fmt: Annotated[str, typer.Option("--format", help="Cache format.")] = "fp8_e4m3fn",
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    impl: Annotated[
        str, typer.Option(help="Implementations to time; several: auto,portable.")
    ] = "auto",
    peers: Annotated[
        str, typer.Option(help="Other libraries' kernels beside ours: all, none, or names.")
    ] = "none",
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; the GPU if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the values and the order of pages.")] = 0,
    repeat: Annotated[
        int, typer.Option(help="Measure everything so many times, for the spread between runs.")
    ] = 1,
    energy: Annotated[
        bool, typer.Option("--energy", help="Also read the energy of each, by NVML.")
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="A published table beside ours: mi300x-blog.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write figures and a page into this folder.")
    ] = None,
    json: console.JsonOption = None,
) -> None:
    """Check every shape against the oracle, then time it beside the read floor."""
    if context.invoked_subcommand is not None:
        return
    import torch

    from streamla.bench.published import table
    from streamla.bench.records import dumps, save
    from streamla.bench.report import notes
    from streamla.bench.run import lost
    from streamla.spec import MLASpec

    if repeat < 1:
        raise ValueError(f"repeat: need at least 1; got {repeat}")
    published = table(against) if against else []
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    spec = MLASpec(heads, fmt, page_size=page_size)
    scale = 1 if where.type == "cuda" else CPU_SCALE
    if trace is not None:
        from streamla.bench.trace import ragged

        workloads, traffic = ragged(
            trace, spec, console.integers("concurrency", concurrency), samples, step_ms
        )
    else:
        workloads, traffic = _grids(grid, spec), []
    if scale > 1 and not console.quiet(json):
        console.out.print(
            f"No GPU: timing the CPU implementation on contexts {scale} times shorter. These times say "
            f"that the benchmark works; they say nothing about a GPU.",
            style="yellow", highlight=False,
        )  # fmt: skip
    results: Results | None = None
    for group in _by_grid(_fit(workloads, scale)):
        part = _run(
            group, impl.split(","), peers.split(","), where, scale, traffic, seed, repeat, energy
        )
        results = _extended(results, part)
        if json is not None and not console.quiet(json):
            save(results, json)  # after each grid: a run that is cut short has not been for nothing
        if not console.quiet(json):
            _print_grid(part, published)
        if lost(part.records):
            break  # nothing runs in this process any more
    assert results is not None  # _fit leaves at least one shape
    if console.quiet(json):
        sys.stdout.write(dumps(results))
    if report is not None:
        from streamla.bench.page import write

        write(results, report, published)
    if console.quiet(json):
        return
    for note in notes(results.records):
        console.out.print(note, style="yellow", highlight=False, markup=False)
    _print_conditions(results)
    if any(r.checked and r.us is None and not r.peer for r in results.records):
        raise typer.Exit(1)


@app.command("report")
def report_files(
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
    from streamla.bench.records import load

    results: Results | None = None
    for part in map(load, files):
        if results is not None and part.gpu != results.gpu:
            raise ValueError(f"report: need runs of one machine; got {results.gpu} and {part.gpu}")
        results = _extended(results, part)
    assert results is not None  # typer wants one file at least
    for path in pages.write(
        results, out, table(against) if against else [], formats.split(","), page
    ):
        console.out.print(str(path), highlight=False)


@app.command()
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


def _grids(names: str, spec: MLASpec) -> list[Workload]:
    from streamla.bench.workloads import make_grid

    return [workload for name in names.split(",") for workload in make_grid(name, spec)]


def _fit(workloads: list[Workload], scale: int) -> list[Workload]:
    """On a CPU, shorter contexts, and only the shapes that are then small enough."""
    from streamla.bench.workloads import scaled_down

    if scale == 1:
        return workloads
    small = [w for w in scaled_down(workloads, scale) if w.tokens <= CPU_MAX_TOKENS]
    if not small:
        raise ValueError(
            f"bench: without a GPU no shape of these is small enough ({CPU_MAX_TOKENS} tokens)"
        )
    return small


def _run(
    workloads: list[Workload],
    impls: list[str],
    peers: list[str],
    device: torch.device,
    scale: int,
    traffic: list[dict],
    seed: int,
    repeat: int,
    energy: bool,
) -> Results:
    """Measure the shapes of one grid, `repeat` times."""
    from dataclasses import asdict

    import torch
    import triton

    from streamla.arch import arch_of
    from streamla.bench import peers as other
    from streamla.bench.candidates import choose
    from streamla.bench.records import Results
    from streamla.bench.repeat import merged
    from streamla.bench.run import lost, run
    from streamla.version import __version__

    cuda = device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)  # the small shapes lose more by sharing than they gain
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    ours = choose(impls, device)
    found, absent = other.find(peers)
    runs: list[list[Record]] = []
    states: list[dict | None] = []
    with console.progress("Benchmark", repeat * len(workloads)) as bar:
        while len(runs) < repeat and not (runs and lost(runs[-1])):
            records, state = run(
                workloads, lambda spec: [*ours(spec), *found], device,
                seed=seed, energy=energy, on_shape=lambda w: console.advance(bar, w.label),
            )  # fmt: skip
            runs.append(records)
            states.append(state)
    first, last = states[0], states[-1]
    whole = [r for r in runs if len(r) == len(runs[0])]
    return Results(
        command=_command(sys.argv[1:]),
        device=device.type,
        gpu=torch.cuda.get_device_name(device) if cuda else None,
        torch=torch.__version__,
        triton=triton.__version__,
        streamla=__version__,
        started=started,
        scaled_down=scale,
        l2_bytes=arch_of(device).l2_bytes,
        records=merged(whole) if repeat > 1 else runs[0],
        gpu_state={"before": first["before"], "after": last["after"]} if first and last else None,
        traffic=traffic,
        absent=[asdict(a) for a in absent],
    )


def _command(arguments: list[str]) -> str:
    """The command as another machine would give it: no output, and no folder of the trace."""
    kept: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if kept and kept[-1] == "--trace":
            argument = Path(argument).name
        elif name == "--trace" and equals:
            argument = f"{name}={Path(value).name}"
        if kept and kept[-1] in OUTPUTS:
            kept.pop()
        elif name not in OUTPUTS or not equals:
            kept.append(argument)
    return shlex.join(["streamla", *kept])


def _by_grid(workloads: list[Workload]) -> list[list[Workload]]:
    groups: dict[str, list[Workload]] = {}
    for workload in workloads:
        groups.setdefault(workload.grid, []).append(workload)
    return list(groups.values())


def _extended(results: Results | None, part: Results) -> Results:
    """The results so far and those of one more grid."""
    from dataclasses import replace

    if results is None:
        return part
    state = part.gpu_state
    if results.gpu_state and state:
        state = {"before": results.gpu_state["before"], "after": state["after"]}
    return replace(results, records=results.records + part.records, gpu_state=state)


def _print_grid(results: Results, published: list[Record]) -> None:
    from streamla.bench.report import bench_table, same_work_table, summary_lines

    table = bench_table(results.records, results.gpu or "the CPU")
    console.out.print(table, highlight=False)
    same = same_work_table([*results.records, *published])
    if same is not None and (published or any(r.peer for r in results.records)):
        console.out.print(same, highlight=False)
    for line in summary_lines(results.records):
        console.out.print(line, highlight=False)


def _print_conditions(results: Results) -> None:
    """What a reader must know to believe the table."""
    from streamla.bench.timing import GPUState, drift

    for a in results.absent:
        console.out.print(
            f"absent: {a['name']}, {a['reason']} ({a['install']})", style="dim", highlight=False
        )
    for t in results.traffic:
        faster = (
            f", arrivals {t['speedup']} times faster than in the trace" if t["speedup"] > 1 else ""
        )
        console.out.print(
            f"{t['trace']}: {t['concurrency']} slots, steps of {t['step_ms']:g} ms{faster}; all slots full in "
            f"{t['full_share']:.0%} of the steps",
            style="dim", highlight=False,
        )  # fmt: skip
    if results.device == "cuda":
        line = (
            "Cold cache, random pages, CUDA graph replay, implementations and floor interleaved; us is the "
            "median of one decode call (attention and merge; the plan is not in it)."
        )
        console.out.print(line, style="dim", highlight=False)
    else:
        console.out.print(
            "us is the median wall-clock time of one decode call, on one thread.",
            style="dim", highlight=False,
        )  # fmt: skip
    if results.gpu_state:
        states = [GPUState(**s) if s else None for s in results.gpu_state.values()]
        for when, s in zip(results.gpu_state, states, strict=True):
            if s:
                console.out.print(
                    f"{when}: SM {s.sm_mhz} MHz, memory {s.memory_mhz} MHz, {s.celsius} C, {s.watts:.0f} W",
                    style="dim", highlight=False,
                )  # fmt: skip
        warning = drift(*states)
        if warning:
            console.out.print(warning, style="bold yellow")
