"""Nsight Compute: `ncu --csv`, its details page (one row a metric) and its raw page (one row a kernel)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from streamla.doctor.events import CounterSample, DoctorError, Shape, Trace

_SCALE = {
    "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "n": 1e-9, "u": 1e-6, "m": 1e-3,
}  # fmt: skip
_UNIT = re.compile(r"^([kKMGTnum]?)(byte|second|s|hz|inst|sector|cycle)s?(/\w+)?$")


def is_header(columns: list[str]) -> bool:
    """Whether a csv line is the header of ncu."""
    return "Kernel Name" in columns and columns[:1] == ["ID"]


def _scaled(value: str, unit: str) -> float | None:
    """A metric in bytes, seconds or plain counts; None if it is no number."""
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        return None
    if unit in ("ns", "us", "ms"):
        return number * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}[unit]
    match = _UNIT.match(unit)
    return number * _SCALE[match.group(1)] if match else number


def _grid(text: str) -> Shape | None:
    sizes = [int(v) for v in re.findall(r"\d+", text)]
    return (sizes[0], sizes[1], sizes[2]) if len(sizes) == 3 and min(sizes) > 0 else None


def _sample(kernel: str, grid: str, metrics: dict[str, float]) -> CounterSample:
    seconds = metrics.get("gpu__time_duration.sum", metrics.get("Duration"))
    return CounterSample(
        kernel, metrics, None if seconds is None else seconds * 1e9, _grid(grid) if grid else None
    )


def read(rows: Iterator[list[str]], columns: list[str], source: str) -> Trace:
    """Read the rows after the header."""
    trace = Trace(source, "ncu csv")
    if "Metric Name" in columns:
        samples = _details(rows, columns)
    else:
        samples = _raw(rows, columns)
    trace.counters = list(samples)
    if not trace.counters:
        raise DoctorError("ncu csv without a single kernel")
    return trace


def _details(rows: Iterator[list[str]], columns: list[str]) -> Iterator[CounterSample]:
    launches: dict[str, tuple[str, str, dict[str, float]]] = {}
    for values in rows:
        row = dict(zip(columns, values, strict=False))
        if not row.get("Metric Name") or not row.get("Metric Value"):
            continue
        launch = launches.setdefault(row["ID"], (row["Kernel Name"], row.get("Grid Size", ""), {}))
        value = _scaled(row["Metric Value"], row.get("Metric Unit", ""))
        if value is not None:
            launch[2][row["Metric Name"]] = value
    for kernel, grid, metrics in launches.values():
        yield _sample(kernel, grid, metrics)


def _raw(rows: Iterator[list[str]], columns: list[str]) -> Iterator[CounterSample]:
    units: dict[str, str] = {}
    for values in rows:
        row = dict(zip(columns, values, strict=False))
        if not row.get("ID"):
            units = {k: v for k, v in row.items() if v}  # the line under the header holds units
            continue
        metrics = {}
        for column, text in row.items():
            if "__" in column and (value := _scaled(text, units.get(column, ""))) is not None:
                metrics[column] = value
        yield _sample(row["Kernel Name"], row.get("Grid Size", ""), metrics)
