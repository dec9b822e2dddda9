"""`streamla doctor`: TRACE, explain, predict, diff."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

from streamla.doctor import analyze, page, predict, show
from streamla.doctor import diff as compare
from streamla.doctor.events import DoctorError, Trace
from streamla.doctor.findings import Finding
from streamla.doctor.names import decode, padding
from streamla.doctor.readers import open_trace
from streamla.doctor.windows import RESIDUAL
from streamla.doctor.workload import Workload, find_gpu

WASTE, MALFORMED = 1, 2
_BAR_BYTES = 32 << 20  # smaller files are read before a bar would be seen


class TraceByDefault(TyperGroup):
    """A group whose first argument, if it is no command, is a trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["trace", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=TraceByDefault,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Which attention kernel did a decode step land on, and what does it waste? `streamla doctor TRACE` reads "
    "a profile (PyTorch .json[.gz], nsys .sqlite and csv, rocprofv3 csv and json, rocprof csv, ncu --csv); "
    "nothing here needs a GPU.",
)  # fmt: skip

Gpu = Annotated[
    str | None, typer.Option(help="h200, h100, mi300x, ...; read from the trace if left out")
]
Heads = Annotated[int | None, typer.Option(help="query heads on this GPU")]
Requests = Annotated[int | None, typer.Option(help="requests in the batch")]
Context = Annotated[int | None, typer.Option(help="cached tokens of a request, on average")]
Longest = Annotated[int | None, typer.Option(help="cached tokens of the longest request")]
QLen = Annotated[int, typer.Option(help="query rows a request")]
Kv = Annotated[str | None, typer.Option(help="dtype of the cache: bf16, fp8, fp8_ds_mla")]
Query = Annotated[str | None, typer.Option("--q", help="dtype of the query before attention")]
Layers = Annotated[
    int | None, typer.Option(help="attention layers of the model; found out if left out")
]
From = Annotated[
    str, typer.Option("--from", help="the kernel that opens a window, a regular expression")
]
Json = Annotated[bool, typer.Option("--json", help="for machines")]
Html = Annotated[Path | None, typer.Option(help="also write one self-contained page")]
FailOn = Annotated[
    list[str] | None,
    typer.Option(help="exit 1 if a finding wastes more: waste=0.5 (any), padding=0.5 (one kind)"),
]


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"streamla doctor: {error}", err=True)
    raise typer.Exit(MALFORMED)


def _read(path: Path) -> Trace:
    """Read a trace, behind a progress bar if it is large and somebody is watching."""
    large = path.is_file() and path.stat().st_size >= _BAR_BYTES
    if not (large and sys.stderr.isatty()):
        return open_trace(path)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(path.name, total=path.stat().st_size)
        return open_trace(path, lambda at, size: bar.update(task, completed=at))


def _limits(fail_on: list[str] | None) -> dict[str, float]:
    limits = {}
    for text in fail_on or []:
        kind, _, value = text.partition("=")
        try:
            limits[kind] = float(value)
        except ValueError:
            raise DoctorError(f"--fail-on: need KIND=SHARE, e.g. waste=0.5; got {text!r}") from None
    return limits


def _exceeded(found: list[Finding], limits: dict[str, float]) -> bool:
    return any(
        f.waste is not None and f.waste > limit
        for f in found
        for kind, limit in limits.items()
        if kind in ("waste", f.id)
    )


def _print(text: Any) -> None:
    typer.echo(json.dumps(text, indent=1))


def _guard(run: Callable[[], None]) -> None:
    try:
        run()
    except DoctorError as e:
        _fail(e)


@app.command()
def trace(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="the profile")],
    gpu: Gpu = None, heads: Heads = None, requests: Requests = None, context: Context = None,
    longest: Longest = None, q_len: QLen = 1, kv: Kv = None, q: Query = None, layers: Layers = None,
    from_: From = RESIDUAL, as_json: Json = False, html: Html = None, fail_on: FailOn = None,
) -> None:  # fmt: skip
    """Read a profile: findings, kernels, windows. `trace` may be left out: `streamla doctor TRACE`."""

    def run() -> None:
        limits = _limits(fail_on)
        workload = Workload(heads, q_len, requests, context, longest, q, kv)
        read = _read(path)
        report = analyze.analyze(read, find_gpu(gpu, read), workload, layers, from_)
        if as_json:
            _print(analyze.as_json(report))
        else:
            show.report(Console(), report)
        if html:
            _write(html, page.report(report))
        if _exceeded(report.findings, limits):
            raise typer.Exit(WASTE)

    _guard(run)


@app.command()
def explain(
    name: Annotated[str, typer.Argument(metavar="KERNEL_NAME", help="as any profiler prints it")],
    heads: Heads = None, q_len: QLen = 1, as_json: Json = False,
) -> None:  # fmt: skip
    """Say what a kernel's name tells, and what it does not."""

    def run() -> None:
        Workload(heads, q_len)  # refuses what is no workload
        kernel = decode(name)
        if as_json:
            out = asdict(kernel)
            if heads is not None:
                out["padding"] = padding(kernel, heads, q_len)
            _print(out)
        else:
            show.explain(Console(), kernel, heads, q_len)

    _guard(run)


@app.command("predict")
def predict_(
    gpu: Annotated[str, typer.Option(help="h200, h100, mi300x, ...")],
    engine: Annotated[str, typer.Option(help="vllm or sglang")],
    q: Annotated[str, typer.Option("--q", help="dtype of the query")],
    kv: Annotated[str, typer.Option(help="dtype of the cache")],
    heads: Annotated[int, typer.Option(help="query heads on this GPU")],
    requests: Annotated[int, typer.Option(help="requests in the batch")],
    context: Annotated[int, typer.Option(help="cached tokens of a request")],
    q_len: QLen = 1,
    backend: Annotated[str | None, typer.Option(help="the engine's backend; its default if left out")] = None,
    page_size: Annotated[int, typer.Option(help="tokens a page of the cache")] = 64,
    max_splits: Annotated[int | None, typer.Option(help="another cap on the splits of a request")] = None,
    as_json: Json = False, fail_on: FailOn = None,
) -> None:  # fmt: skip
    """Without a GPU: the kernel that a configuration lands on, and what it wastes."""

    def run() -> None:
        limits = _limits(fail_on)
        found = find_gpu(gpu)
        assert found is not None
        workload = Workload(heads, q_len, requests, context, q=q, kv=kv)
        p = predict.predict(engine, found, workload, backend, page_size, max_splits)
        if as_json:
            _print(p.as_json())
        else:
            show.prediction(Console(), p)
        wastes = {
            "padding": p.padding or 0.0,
            "parallelism": 0.0 if p.busy_units is None else 1 - p.busy_units / p.units,
        }
        if any(
            w > limit
            for k, w in wastes.items()
            for kind, limit in limits.items()
            if kind in ("waste", k)
        ):
            raise typer.Exit(WASTE)

    _guard(run)


@app.command("diff")
def diff_(
    a: Annotated[Path, typer.Argument(metavar="A", help="a profile")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another, of the same workload")],
    gpu: Gpu = None, heads: Heads = None, requests: Requests = None, context: Context = None,
    q_len: QLen = 1, kv: Kv = None, layers: Layers = None, from_: From = RESIDUAL,
    as_json: Json = False, html: Html = None,
) -> None:  # fmt: skip
    """Put two profiles of one workload side by side, layer by layer."""

    def run() -> None:
        workload = Workload(heads, q_len, requests, context, kv=kv)
        reports = []
        for path in (a, b):
            read = _read(path)
            reports.append(analyze.analyze(read, find_gpu(gpu, read), workload, layers, from_))
        d = compare.diff(*reports)
        if as_json:
            _print(compare.as_json(d))
        else:
            show.diff(Console(), d)
        if html:
            _write(html, page.diff(d))

    _guard(run)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as e:
        raise DoctorError(f"--html: {path} cannot be written ({e.strerror})") from None
