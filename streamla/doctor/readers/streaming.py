"""Reading JSON that does not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from streamla.doctor.events import DoctorError

BUFFER = 1 << 18


def _ijson() -> Any:
    try:
        import ijson
    except ImportError:
        raise DoctorError("JSON traces need ijson: pip install 'streamla[doctor]'") from None
    return ijson


def _clear(error: Exception) -> DoctorError:
    text = " ".join(str(error).split())
    if "ncomplete" in text or "premature" in text:
        return DoctorError("the JSON is cut off: the profiler did not finish writing it")
    return DoctorError(f"the JSON is damaged ({text[:120]})")


def items(f: IO[bytes], prefix: str) -> Iterator[Any]:
    """Values at one place of a JSON document, e.g. "traceEvents.item", built one at a time."""
    ijson = _ijson()
    try:
        yield from ijson.items(f, prefix, use_float=True, buf_size=BUFFER)
    except (ijson.JSONError, UnicodeDecodeError) as e:
        raise _clear(e) from None


def items_at(f: IO[bytes], prefixes: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Values at several places of a JSON document in one pass, with the place each came from."""
    ijson = _ijson()
    builder, inside, depth = None, "", 0
    try:
        for prefix, event, value in ijson.parse(f, use_float=True, buf_size=BUFFER):
            if builder is None:
                if prefix not in prefixes or event in ("end_map", "end_array"):
                    continue
                if event not in ("start_map", "start_array"):
                    yield prefix, value
                    continue
                builder, inside, depth = ijson.ObjectBuilder(), prefix, 0
            builder.event(event, value)
            depth += event in ("start_map", "start_array")
            depth -= event in ("end_map", "end_array")
            if depth == 0:
                yield inside, builder.value
                builder = None
    except (ijson.JSONError, UnicodeDecodeError) as e:
        raise _clear(e) from None
