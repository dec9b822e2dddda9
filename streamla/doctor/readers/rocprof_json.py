"""rocprofv3 --output-format json: kernel dispatches name a symbol by id; times are nanoseconds."""

from __future__ import annotations

from typing import IO, Any

from streamla.doctor.events import CounterSample, DoctorError, KernelEvent, Shape, Trace
from streamla.doctor.readers.streaming import items_at

_ROOT = "rocprofiler-sdk-tool.item."
_AGENT = _ROOT + "agents.item"
_SYMBOL = _ROOT + "kernel_symbols.item"
_COUNTER = _ROOT + "counters.item"
_DISPATCH = _ROOT + "buffer_records.kernel_dispatch.item"
_COUNTED = _ROOT + "callback_records.counter_collection.item"
_GPU = 2  # rocprofiler_agent_type_t


def _handle(value: Any) -> Any:
    return value.get("handle") if isinstance(value, dict) else value


def _size(value: Any) -> Shape | None:
    if not isinstance(value, dict):
        return None
    x, y, z = (int(value.get(k, 1)) for k in "xyz")
    return (x, y, z) if x * y * z > 0 else None


def workgroups(items: Shape | None, workgroup: Shape | None) -> Shape | None:
    """Workgroups per axis: ROCm counts a grid in work items."""
    if items is None or workgroup is None:
        return None
    x, y, z = (-(-i // w) for i, w in zip(items, workgroup, strict=True))
    return (x, y, z)


def _event(info: dict[str, Any], start: int, end: int, names: dict[Any, str]) -> KernelEvent:
    block = _size(info.get("workgroup_size"))
    kernel = _handle(info["kernel_id"])
    return KernelEvent(
        names.get(kernel, f"kernel {kernel}"), start, end - start,
        str(_handle(info.get("agent_id", 0))), int(_handle(info.get("queue_id", 0)) or 0),
        workgroups(_size(info.get("grid_size")), block), block,
    )  # fmt: skip


def _counted(
    record: dict[str, Any], names: dict[Any, str], counters: dict[Any, str]
) -> CounterSample:
    data = record["dispatch_data"]
    info = data["dispatch_info"]
    values: dict[str, float] = {}
    for r in record.get("records", []):
        name = counters.get(_handle(r["counter_id"]), str(_handle(r["counter_id"])))
        values[name] = values.get(name, 0.0) + float(r["value"])
    event = _event(info, 0, 0, names)
    dur = float(data.get("end_timestamp", 0)) - float(data.get("start_timestamp", 0))
    return CounterSample(event.name, values, dur or None, event.grid)


def read(f: IO[bytes], head: bytes, source: str) -> Trace:
    """Read a rocprofv3 json. Symbols come before records in the file; later ones are caught too."""
    trace = Trace(source, "rocprofv3 json")
    names: dict[Any, str] = {}
    counters: dict[Any, str] = {}
    late: list[tuple[str, dict[str, Any]]] = []
    places = (_AGENT, _SYMBOL, _COUNTER, _DISPATCH, _COUNTED)
    try:
        for place, value in items_at(f, places):
            if place == _AGENT:
                if value.get("type") == _GPU and trace.units is None:
                    trace.gpu_name = value.get("product_name") or value.get("name")
                    trace.units = int(value["cu_count"]) if value.get("cu_count") else None
            elif place == _SYMBOL:
                kernel = value.get("kernel_id", value.get("id"))
                names[kernel] = value.get("formatted_kernel_name") or value.get("kernel_name", "")
            elif place == _COUNTER:
                counters[_handle(value.get("id"))] = value.get("name", "")
            elif not names:
                late.append((place, value))
            else:
                _record(trace, place, value, names, counters)
        for place, value in late:
            _record(trace, place, value, names, counters)
    except (KeyError, TypeError, AttributeError) as e:
        raise DoctorError(f"not the layout of rocprofv3: a record lacks {e}") from None
    return trace


def _record(
    trace: Trace, place: str, value: dict[str, Any], names: dict[Any, str], counters: dict[Any, str]
) -> None:
    if place == _COUNTED:
        trace.counters.append(_counted(value, names, counters))
    else:
        start, end = int(value["start_timestamp"]), int(value["end_timestamp"])
        trace.add(_event(value["dispatch_info"], start, end, names))
