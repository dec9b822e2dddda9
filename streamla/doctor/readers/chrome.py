"""PyTorch's profiler (Kineto) and other writers of the Chrome trace format.

A kernel is a complete event ("ph": "X") of category "kernel"; times are microseconds. Kernels of a graph
launch carry no "External id" of an operator, so nothing here needs one.
"""

from __future__ import annotations

import json
import re
from typing import IO, Any

from streamla.doctor.events import DoctorError, KernelEvent, Mark, Shape, Trace
from streamla.doctor.readers.streaming import items

_KERNEL = {"kernel", "Kernel", "gpu_memcpy", "gpu_memset"}
_MARK = {"user_annotation": False, "gpu_user_annotation": True}
_RUNTIME = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime", "driver"}
_LAUNCH = re.compile(r"Launch|Memcpy|Memset")


def _shape(value: Any) -> Shape | None:
    if isinstance(value, str):
        value = re.findall(r"\d+", value)
    if not isinstance(value, list) or len(value) != 3:
        return None
    x, y, z = (int(v) for v in value)
    # Some writers fill in zeros where they do not know.
    return (x, y, z) if x * y * z > 0 else None


def _device(head: bytes, trace: Trace) -> None:
    """The GPU, from the properties that Kineto writes in front of the events."""
    text = head.decode("utf-8", errors="ignore")
    start = text.find('"deviceProperties"')
    if start < 0:
        return
    at = text.find("[", start)
    try:
        devices, _ = json.JSONDecoder().raw_decode(text, at)
        first = devices[0]
    except (ValueError, IndexError, KeyError):
        return
    trace.gpu_name = str(first.get("name")) if first.get("name") else None
    units = first.get("numSms")
    trace.units = int(units) if isinstance(units, int) and units > 0 else None


def _ns(microseconds: Any) -> int:
    return round(float(microseconds) * 1000)


def _add(trace: Trace, event: dict[str, Any]) -> None:
    category, args = event.get("cat", ""), event.get("args") or {}
    first = str(category).split(",")[0]
    if first in _KERNEL:
        correlation = args.get("correlation")
        trace.add(
            KernelEvent(
                str(event["name"]), _ns(event["ts"]), _ns(event.get("dur", 0)),
                str(args.get("device", event.get("pid", 0))), _int(args.get("stream")),
                _shape(args.get("grid")), _shape(args.get("block")),
                None if correlation is None else _int(correlation),
            )
        )  # fmt: skip
    elif first in _MARK:
        start = _ns(event["ts"])
        end = start + _ns(event.get("dur", 0))
        trace.marks.append(Mark(str(event["name"]), start, end, _MARK[first]))
    elif first in _RUNTIME and _LAUNCH.search(str(event.get("name", ""))):
        trace.add_launch(_int(args.get("correlation")), _ns(event["ts"]))


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def read(f: IO[bytes], head: bytes, source: str) -> Trace:
    """Read a Chrome trace. `head` is its beginning, already seen."""
    trace = Trace(source, "chrome trace")
    _device(head, trace)
    bare = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    seen = 0
    for event in items(f, "item" if bare else "traceEvents.item"):
        seen += 1
        if not isinstance(event, dict) or event.get("ph", "X") != "X":
            continue
        try:
            _add(trace, event)
        except (KeyError, TypeError, ValueError):
            raise DoctorError(
                f"event {seen} of traceEvents has no usable name, ts or dur: {str(event)[:100]}"
            ) from None
    if not seen:
        raise DoctorError("JSON, but with no traceEvents: not a Chrome trace")
    return trace
