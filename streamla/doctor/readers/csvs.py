"""CSV profiles: nsys stats, rocprofv3, rocprof. The header line tells which."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from streamla.doctor.events import CounterSample, DoctorError, KernelEvent, Shape, Trace
from streamla.doctor.readers import ncu
from streamla.doctor.readers.rocprof_json import workgroups

_PREAMBLE = 200  # lines that a tool may print before its header
_UNIT_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}

Row = dict[str, str]


def _number(text: str | None) -> float:
    return float((text or "").replace(",", ""))


def _int(text: str | None) -> int:
    return int(_number(text))


def _time(row: Row, label: str) -> float:
    """A time in ns from a column such as "Start (ns)", whatever its unit."""
    for column, value in row.items():
        match = re.fullmatch(rf"{label}(?: \((\w+)\))?", column)
        if match:
            return _number(value) * _UNIT_NS[match.group(1) or "ns"]
    raise KeyError(label)


def _xyz(row: Row, names: Iterable[str]) -> Shape | None:
    values = [row.get(n, "") for n in names]
    if not all(values):
        return None
    x, y, z = (_int(v) for v in values)
    return (x, y, z) if x * y * z > 0 else None


def _nsys_trace(row: Row, trace: Trace) -> None:
    if trace.gpu_name is None and row.get("Device"):
        trace.gpu_name = re.sub(r" \(\d+\)$", "", row["Device"])
    trace.add(
        KernelEvent(
            row["Name"], round(_time(row, "Start")), round(_time(row, "Duration")),
            row.get("Device") or "0", _int(row.get("Strm") or "0"),
            _xyz(row, ("GrdX", "GrdY", "GrdZ")), _xyz(row, ("BlkX", "BlkY", "BlkZ")),
            _int(row["CorrId"]) if row.get("CorrId") else None,
        )
    )  # fmt: skip


def _nsys_sum(row: Row, trace: Trace) -> None:
    count = _int(row.get("Instances"))
    total = _time(row, "Total Time")
    trace.add(KernelEvent(row["Name"], 0, round(total / max(count, 1)), count=count))


def _rocprof_stats(row: Row, trace: Trace) -> None:
    count = _int(row["Calls"])
    total = _number(row["TotalDurationNs"])
    trace.add(KernelEvent(row["Name"], 0, round(total / max(count, 1)), count=count))


def _rocprofv3(row: Row, trace: Trace) -> None:
    if row.get("Kind", "KERNEL_DISPATCH") != "KERNEL_DISPATCH":
        return
    start, end = _int(row["Start_Timestamp"]), _int(row["End_Timestamp"])
    block = _xyz(row, (f"Workgroup_Size_{a}" for a in "XYZ"))
    grid = workgroups(_xyz(row, (f"Grid_Size_{a}" for a in "XYZ")), block)
    correlation = row.get("Correlation_Id")
    trace.add(
        KernelEvent(
            row["Kernel_Name"], start, end - start, row.get("Agent_Id") or "0",
            _int(row.get("Queue_Id") or "0"), grid, block, _int(correlation) if correlation else None,
        )
    )  # fmt: skip


def _rocprofv3_counters(row: Row, trace: Trace) -> None:
    """One row per counter and dispatch; a dispatch's rows need not follow each other."""
    # Only the total is known: workgroups = work items / workgroup size.
    programs = -(-_int(row["Grid_Size"]) // max(1, _int(row["Workgroup_Size"])))
    dur = None
    if row.get("Start_Timestamp") and row.get("End_Timestamp"):
        dur = _number(row["End_Timestamp"]) - _number(row["Start_Timestamp"])
    trace.counters.append(
        CounterSample(
            row["Kernel_Name"], {row["Counter_Name"]: _number(row["Counter_Value"])}, dur,
            (programs, 1, 1), f"{row.get('Agent_Id')}/{row.get('Dispatch_Id')}",
        )
    )  # fmt: skip


_ROCPROF_KNOWN = {
    "Index", "KernelName", "gpu-id", "queue-id", "queue-index", "pid", "tid", "grd", "wgr", "lds", "scr",
    "vgpr", "arch_vgpr", "accum_vgpr", "sgpr", "fbar", "wave_size", "sig", "obj",
    "DispatchNs", "BeginNs", "EndNs", "CompleteNs", "DurationNs",
}  # fmt: skip


def _rocprof(row: Row, trace: Trace) -> None:
    start, end = _int(row["BeginNs"]), _int(row["EndNs"])
    items, workgroup = _int(row["grd"]), _int(row["wgr"])
    grid: Shape | None = (-(-items // workgroup), 1, 1) if items and workgroup else None
    trace.add(
        KernelEvent(
            row["KernelName"], start, end - start, row.get("gpu-id") or "0",
            _int(row.get("queue-id") or "0"), grid, (workgroup, 1, 1) if workgroup else None,
        )
    )  # fmt: skip
    values = {k: _number(v) for k, v in row.items() if k and k not in _ROCPROF_KNOWN and v}
    if values:
        trace.counters.append(CounterSample(row["KernelName"], values, end - start, grid))


# Header columns that a format must have; first match wins.
_FORMATS: tuple[tuple[str, set[str], Callable[[Row, Trace], None], bool], ...] = (
    ("rocprofv3 counter csv", {"Kernel_Name", "Counter_Name", "Counter_Value"}, _rocprofv3_counters, True),
    ("rocprofv3 csv", {"Kernel_Name", "Start_Timestamp", "End_Timestamp"}, _rocprofv3, True),
    ("rocprof csv", {"KernelName", "BeginNs", "EndNs"}, _rocprof, True),
    ("rocprof stats csv", {"Name", "Calls", "TotalDurationNs"}, _rocprof_stats, False),
    ("nsys gpu trace csv", {"Start", "Duration", "Name", "GrdX"}, _nsys_trace, True),
    ("nsys kernel summary csv", {"Total Time", "Instances", "Name"}, _nsys_sum, False),
)  # fmt: skip


def _agents(source: str, trace: Trace) -> None:
    """The GPU, from the file that rocprofv3 writes beside its others (X_agent_info.csv)."""
    path = Path(
        re.sub(
            r"_(?:kernel_trace|kernel_stats|counter_collection)\.csv$", "_agent_info.csv", source
        )
    )
    if path == Path(source) or not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f):
            if row.get("Agent_Type") == "GPU" and row.get("Cu_Count"):
                trace.gpu_name = row.get("Product_Name") or row.get("Name")
                trace.units = _int(row["Cu_Count"])
                return


def _fields(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _bare(columns: Iterable[str]) -> set[str]:
    return {re.sub(r" \((?:ns|us|µs|ms|s)\)$", "", c) for c in columns}


def _merge_counters(samples: list[CounterSample]) -> list[CounterSample]:
    """One sample a dispatch, from one a counter."""
    merged: dict[tuple[str, str], CounterSample] = {}
    for s in samples:
        first = merged.setdefault((s.dispatch, s.kernel), s)
        # Instances of one counter (one per memory channel) add up.
        if first is not s:
            for name, value in s.counters.items():
                first.counters[name] = first.counters.get(name, 0.0) + value
    return list(merged.values())


def read(f: IO[str], source: str) -> Trace:
    """Read a csv, past whatever its tool printed before the header."""
    for line in itertools.islice(f, _PREAMBLE):
        columns = [c.strip() for c in _fields(line)]
        if ncu.is_header(columns):
            return ncu.read(csv.reader(f), columns, source)
        for name, needs, add, timed in _FORMATS:
            if needs <= _bare(columns):
                return _rows(f, columns, Trace(source, name, timed=timed), add)
    raise DoctorError("no known format: expected the csv of nsys stats, rocprofv3, rocprof or ncu")


def _rows(f: IO[str], columns: list[str], trace: Trace, add: Callable[[Row, Trace], None]) -> Trace:
    rows: Iterator[list[str]] = csv.reader(f)
    for n, values in enumerate(rows, start=2):
        if not values or len(values) < len(columns) // 2:
            continue  # blank, or a message of the tool
        row = dict(zip(columns, values, strict=False))
        try:
            add(row, trace)
        except (KeyError, ValueError):
            raise DoctorError(
                f"row {n} of the {trace.format} is damaged: {','.join(values)[:100]}"
            ) from None
    _agents(trace.source, trace)
    if trace.format == "rocprofv3 counter csv":
        trace.counters = _merge_counters(trace.counters)
    return trace
