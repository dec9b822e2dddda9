"""`streamla bench`: check, then time."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamla.cli import bench_files, console, epilogue

if TYPE_CHECKING:
    import torch

    from streamla.bench.records import Record, Results
    from streamla.bench.workloads import Workload
    from streamla.spec import MLASpec

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
app.command("report")(bench_files.report)
app.command("compare")(bench_files.compare)
app.command("collect")(bench_files.collect)
app.command("tables")(bench_files.tables)
app.command("epilogue")(epilogue.epilogue)
app.command("timeline")(epilogue.timeline)

CPU_SCALE = 256  # contexts are divided by this without a GPU
CPU_MAX_TOKENS = 1 << 14
# Options that say where results go are no part of a recorded command, and where files lie is not either.
OUTPUTS = ("--json", "--report", "--svg")
INPUTS = ("--trace", "--vllm")


@dataclass(frozen=True)
class Options:
    """What is measured on every shape, and where.

    Attributes:
        impls, peers: names of ours and of other libraries'.
        scale: contexts are divided by this.
    """

    impls: list[str]
    peers: list[str]
    device: torch.device
    scale: int
    seed: int
    repeat: int
    energy: bool


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    grid: Annotated[
        str, typer.Option(help="blog, heads, formats, pages, mtp, small; several: blog,small.")
    ] = "blog",
    max_tokens: Annotated[
        str | None, typer.Option(help="Only shapes of at most so many tokens in all: 128K.")
    ] = None,
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
        str, typer.Option(help="Implementations to time, or none; several: auto,portable.")
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
    from streamla.spec import MLASpec

    if repeat < 1:
        raise ValueError(f"repeat: need at least 1; got {repeat}")
    published = table(against) if against else []
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    scale = 1 if where.type == "cuda" else CPU_SCALE
    options = Options(impl.split(","), peers.split(","), where, scale, seed, repeat, energy)
    spec = MLASpec(heads, fmt, page_size=page_size)
    traffic: list[dict] = []
    if trace is None:
        workloads = _grids(grid, spec)
    else:
        from streamla.bench.trace import ragged

        held = console.integers("concurrency", concurrency)
        workloads, traffic = ragged(trace, spec, held, samples, step_ms)
    if max_tokens is not None:
        most = console.integers("max-tokens", max_tokens)[0]
        workloads = [w for w in workloads if w.tokens <= most]
    results = _measure(_fit(workloads, scale), options, traffic, published, json)
    _conclude(results, published, report, json)


def _measure(
    workloads: list[Workload],
    options: Options,
    traffic: list[dict],
    published: list[Record],
    json: Path | None,
) -> Results:
    """Run one grid after another. Each is printed and stored as it ends, in case the next one is cut short."""
    from streamla.bench.records import joined, save
    from streamla.bench.run import lost

    quiet = console.quiet(json)
    if options.scale > 1 and not quiet:
        console.out.print(
            f"No GPU: timing the CPU implementation on contexts {options.scale} times shorter. These times "
            f"say that the benchmark works; they say nothing about a GPU.",
            style="yellow", highlight=False,
        )  # fmt: skip
    results: Results | None = None
    for group in _by_grid(workloads):
        part = _run(group, options, traffic)
        results = part if results is None else joined(results, part)
        if not quiet:
            if json is not None:
                save(results, json)
            _print_grid(part, published)
        if lost(part.records):
            break  # nothing runs in this process any more
    assert results is not None  # _fit leaves at least one shape
    return results


def _conclude(
    results: Results, published: list[Record], report: Path | None, json: Path | None
) -> None:
    """The page, the JSON on stdout, and what a reader of the tables must know. Exit code 1 if ours was wrong."""
    from streamla.bench.records import dumps
    from streamla.bench.report import notes

    if report is not None:
        from streamla.bench.page import write

        write(results, report, published)
    if console.quiet(json):
        sys.stdout.write(dumps(results))
        return
    for note in notes(results.records):
        console.out.print(note, style="yellow", highlight=False, markup=False)
    _print_conditions(results)
    if any(r.checked and r.us is None and not r.peer for r in results.records):
        raise typer.Exit(1)


def _grids(names: str, spec: MLASpec) -> list[Workload]:
    from streamla.bench.workloads import make_grid

    return [workload for name in names.split(",") for workload in make_grid(name, spec)]


def _fit(workloads: list[Workload], scale: int) -> list[Workload]:
    """On a CPU, shorter contexts, and only the shapes that are then small enough."""
    from streamla.bench.workloads import scaled_down

    if not workloads:
        raise ValueError("max-tokens: need as many tokens as the smallest shape has, at least")
    if scale == 1:
        return workloads
    small = [w for w in scaled_down(workloads, scale) if w.tokens <= CPU_MAX_TOKENS]
    if not small:
        raise ValueError(
            f"bench: without a GPU no shape of these is small enough ({CPU_MAX_TOKENS} tokens)"
        )
    return small


def _run(workloads: list[Workload], options: Options, traffic: list[dict]) -> Results:
    """Measure the shapes of one grid, `repeat` times."""
    from dataclasses import asdict

    import torch
    import triton

    from streamla.arch import arch_of
    from streamla.bench import peers as other
    from streamla.bench.candidates import NONE, choose
    from streamla.bench.records import Results
    from streamla.bench.repeat import merged
    from streamla.bench.run import lost, run
    from streamla.version import __version__

    device, repeat = options.device, options.repeat
    cuda = device.type == "cuda"
    if not cuda:
        torch.set_num_threads(1)  # the small shapes lose more by sharing than they gain
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    ours = choose(options.impls, device)
    found, absent = other.find(options.peers)
    if options.impls == [NONE] and not found:
        raise ValueError(f"impl, peers: need something to time; absent: {absent}")
    runs: list[list[Record]] = []
    states: list[dict | None] = []
    with console.progress("Benchmark", repeat * len(workloads)) as bar:
        while len(runs) < repeat and not (runs and lost(runs[-1])):
            records, state = run(
                workloads, lambda spec: [*ours(spec), *found], device,
                seed=options.seed, energy=options.energy, on_shape=lambda w: console.advance(bar, w.label),
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
        scaled_down=options.scale,
        l2_bytes=arch_of(device).l2_bytes,
        records=merged(whole) if repeat > 1 else runs[0],
        gpu_state={"before": first["before"], "after": last["after"]} if first and last else None,
        traffic=traffic,
        absent=[asdict(a) for a in absent],
    )


def _command(arguments: list[str]) -> str:
    """The command as another machine would give it: no output, and of other files only the name."""
    kept: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if kept and kept[-1] in INPUTS:
            argument = Path(argument).name
        elif name in INPUTS and equals:
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
