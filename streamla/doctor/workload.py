"""What a decode step was asked to do, and on what: heads, requests, lengths, dtypes, the GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from streamla.arch import ARCHS, Arch, arch_by_name
from streamla.doctor.events import DoctorError, Trace

# Bytes of one cached token of 576 values, as the cache stores it.
ROW_BYTES = {
    "bf16": 1152, "fp16": 1152, "fp8": 576, "fp8_e4m3fn": 576, "fp8_e4m3fnuz": 576,
    "fp8_ds_mla": 656,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One decode step. None: not known.

    Attributes:
        heads: query heads on this GPU.
        q_len: query rows a request.
        requests: requests in the batch.
        context: cached tokens of a request, on average.
        longest: cached tokens of the longest request.
        q, kv: dtype of the query before attention, and of the cache.
    """

    heads: int | None = None
    q_len: int = 1
    requests: int | None = None
    context: int | None = None
    longest: int | None = None
    q: str | None = None
    kv: str | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "q_len", "requests", "context", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DoctorError(f"{name}: need an integer >= 1; got {value}")
        if self.kv is not None and self.kv not in ROW_BYTES:
            raise DoctorError(f"kv: need one of {', '.join(ROW_BYTES)}; got {self.kv!r}")

    @property
    def total(self) -> int | None:
        """Cached tokens of all requests together."""
        if self.requests is None or self.context is None:
            return None
        return self.requests * self.context

    def over(self, other: Workload) -> Workload:
        """This workload, with `other` filling in what it does not know."""
        unknown = {
            f.name: getattr(other, f.name)
            for f in fields(self)
            if getattr(self, f.name) in (None, f.default)
        }
        return replace(self, **unknown)

    def __str__(self) -> str:
        parts = []
        if self.requests is not None:
            parts.append(
                f"{self.requests} x {self.context}" if self.context else f"{self.requests} requests"
            )
        elif self.context:
            parts.append(f"context {self.context}")
        if self.longest and self.longest != self.context:
            parts.append(f"longest {self.longest}")
        if self.heads:
            parts.append(f"{self.heads} heads")
        if self.q_len > 1:
            parts.append(f"{self.q_len} query rows")
        return ", ".join(parts) or "workload not given"


# How programs name their step in a trace.
_PAIRS = re.compile(r"\b(heads|q_len|requests|context|longest|total|kv|q)=([\w.]+)")
_VLLM = re.compile(
    r"execute_(?:context|new)_\d+(?:\(\d+\))?_(?:generation|cached)_(?P<requests>\d+)"
)
_SGLANG = re.compile(r"(?i)decode[^\]]*\bbs=(?P<requests>\d+)")


def workload_of_mark(text: str) -> Workload | None:
    """The workload that an annotation states; None if it states none."""
    found: dict[str, Any] = {k: int(v) if v.isdigit() else v for k, v in _PAIRS.findall(text)}
    for pattern in (_VLLM, _SGLANG):
        if match := pattern.search(text):
            found["requests"] = int(match.group("requests"))
    found = {k: v for k, v in found.items() if isinstance(v, str) == (k in ("q", "kv"))}
    total = found.pop("total", None)
    if total and found.get("requests") and "context" not in found:
        found["context"] = round(total / found["requests"])
    if not {"requests", "context"} & found.keys():
        return None
    try:
        return Workload(**found)
    except DoctorError:
        return None


@dataclass(frozen=True)
class Gpu:
    """The GPU of a trace. `arch` is None for one that the table of GPUs lacks."""

    name: str
    units: int | None
    arch: Arch | None

    @property
    def unit_word(self) -> str:
        amd = self.arch.target.startswith("gfx") if self.arch else "amd" in self.name.lower()
        return "CUs" if amd else "SMs"


def find_gpu(name: str | None, trace: Trace | None = None) -> Gpu | None:
    """The GPU by the user's word for it, or else by what the trace says; None if neither does."""
    if name is not None:
        try:
            arch = arch_by_name(name)
        except ValueError as e:
            raise DoctorError(str(e).replace("device:", "--gpu:")) from None
        return Gpu(arch.name, arch.units, arch)
    if trace is None or not trace.gpu_name:
        return None
    by_name = [a for a in ARCHS if a.name in trace.gpu_name.lower().replace(" ", "")]
    if not by_name:
        # rocprofv3 may give only the target: one row of the table with that target is enough.
        by_target = [a for a in ARCHS if a.target == trace.gpu_name and a.units == trace.units]
        by_name = by_target[:1]
    row = by_name[0] if by_name else None
    return Gpu(trace.gpu_name, trace.units or (row.units if row else None), row)
