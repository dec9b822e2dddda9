"""Nsight Systems: the SQLite export of `nsys export --type sqlite`. Times are nanoseconds."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from streamla.doctor.events import DoctorError, KernelEvent, Mark, Trace

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in db.execute(f"PRAGMA table_info({table})")}


def _column(columns: set[str], *names: str, default: str = "NULL") -> str:
    return next((f"k.{n}" for n in names if n in columns), default)


def read_sqlite(path: Path) -> Trace:
    """Read the kernels, NVTX ranges and GPU of an export. The file is opened read-only."""
    trace = Trace(str(path), "nsys sqlite")
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            _read(db, trace)
        finally:
            db.close()
    except sqlite3.Error as e:
        raise DoctorError(f"the SQLite file is damaged or cut off ({e})") from None
    return trace


def _read(db: sqlite3.Connection, trace: Trace) -> None:
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if _KERNELS not in tables:
        if _GRAPHS in tables:
            raise DoctorError(
                "holds graph launches only; profile again with --cuda-graph-trace=node"
            )
        raise DoctorError(f"SQLite, but without {_KERNELS}: not an nsys export with CUDA kernels")
    if _GRAPHS in tables:
        trace.notes.append("some graphs were traced whole: use --cuda-graph-trace=node")
    columns = _columns(db, _KERNELS)
    name = _column(columns, "demangledName", "shortName", "name")
    query = (
        f"SELECT COALESCE(s.value, {name}), k.start, k.end, {_column(columns, 'deviceId', default='0')}, "
        f"{_column(columns, 'streamId', default='0')}, k.gridX, k.gridY, k.gridZ, "
        f"k.blockX, k.blockY, k.blockZ, {_column(columns, 'correlationId')} "
        f"FROM {_KERNELS} k LEFT JOIN StringIds s ON s.id = {name} ORDER BY k.start"
    )
    for n, start, end, device, stream, gx, gy, gz, bx, by, bz, correlation in db.execute(query):
        trace.add(
            KernelEvent(
                str(n),
                start,
                end - start,
                str(device),
                stream,
                (gx, gy, gz),
                (bx, by, bz),
                correlation,
            )
        )
    if _RUNTIME in tables:
        for correlation, start in db.execute(f"SELECT correlationId, start FROM {_RUNTIME}"):
            trace.add_launch(correlation, start)
    if "NVTX_EVENTS" in tables:
        text = "COALESCE(n.text, s.value)" if "textId" in _columns(db, "NVTX_EVENTS") else "n.text"
        ranges = (
            f"SELECT {text}, n.start, n.end FROM NVTX_EVENTS n LEFT JOIN StringIds s "
            f"ON s.id = {'n.textId' if 's.value' in text else 'NULL'} WHERE n.end IS NOT NULL"
        )
        trace.marks += [Mark(str(t), a, b) for t, a, b in db.execute(ranges) if t]
    if "TARGET_INFO_GPU" in tables:
        info = _columns(db, "TARGET_INFO_GPU")
        units = "smCount" if "smCount" in info else "NULL"
        row = db.execute(f"SELECT name, {units} FROM TARGET_INFO_GPU").fetchone()
        if row:
            trace.gpu_name, trace.units = row[0], row[1]
