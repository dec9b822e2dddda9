"""Hardware counters: bytes that were read against bytes that had to be, and one kernel against another."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from streamla.doctor.events import CounterSample, Trace
from streamla.doctor.findings import Finding
from streamla.doctor.names import KernelName, decode
from streamla.doctor.stats import median
from streamla.doctor.workload import ROW_BYTES, Workload

_KIB = 1024.0
# Counter -> bytes of one count. ROCm's derived sizes are in KiB; ncu's are scaled to bytes by its reader.
_READ = {"FETCH_SIZE": _KIB, "FetchSize": _KIB, "dram__bytes_read.sum": 1.0}
_REQUESTS = ("TCC_EA0_RDREQ_sum", "TCC_EA0_RDREQ_32B_sum", "TCC_BUBBLE_sum")
SAME_BYTES = 0.1
SLOWER = 1.2


@dataclass(frozen=True)
class Counted:
    """One attention kernel: medians over its launches. None where the file has no such counter."""

    kernel: KernelName
    launches: int
    read_bytes: float | None
    dur_ns: float | None


def read_bytes(sample: CounterSample) -> float | None:
    """Bytes that a launch read from memory."""
    for name, scale in _READ.items():
        if name in sample.counters:
            return sample.counters[name] * scale
    if all(n in sample.counters for n in _REQUESTS):
        # gfx942 reads 32, 64 or 128 bytes a request; the counter of "bubbles" holds the last kind.
        total, small, large = (sample.counters[n] for n in _REQUESTS)
        return 32 * small + 128 * large + 64 * (total - small - large)
    rate = sample.counters.get("Memory Throughput")
    if rate is not None and rate > 1e6 and sample.dur_ns:
        return rate * sample.dur_ns / 1e9  # ncu's details page: bytes a second
    return None


def counted(trace: Trace) -> list[Counted]:
    """The decode attention kernels of a counter file."""
    samples: dict[KernelName, list[CounterSample]] = defaultdict(list)
    for sample in trace.counters:
        kernel = decode(sample.kernel)
        if kernel.is_decode_attention:
            samples[kernel].append(sample)
    found = []
    for kernel, launches in samples.items():
        sizes = [b for s in launches if (b := read_bytes(s)) is not None]
        times = [s.dur_ns for s in launches if s.dur_ns]
        found.append(
            Counted(
                kernel,
                len(launches),
                median(sizes) if sizes else None,
                median(times) if times else None,
            )
        )
    return found


def _line(c: Counted) -> str:
    size = "bytes unknown" if c.read_bytes is None else f"{c.read_bytes / 1e9:.3f} GB read"
    time = "time unknown" if c.dur_ns is None else f"{c.dur_ns / 1e3:.1f} us"
    return f"{c.kernel.short}: {size}, {time} ({c.launches} launches)"


def traffic(c: Counted, workload: Workload) -> Finding | None:
    """Bytes read beyond those that must move."""
    kv = workload.kv or c.kernel.kv_dtype
    if c.read_bytes is None or not workload.total or kv not in ROW_BYTES:
        return None
    must = workload.total * ROW_BYTES[kv]
    ratio = c.read_bytes / must
    return Finding(
        "traffic",
        f"{c.kernel.short} reads {ratio:.2f}x the bytes that must move.",
        _line(c),
        f"{workload.total} tokens x {ROW_BYTES[kv]} B = {must / 1e9:.3f} GB must move; "
        f"{c.read_bytes / 1e9:.3f} GB did",
        1 - 1 / ratio if ratio > 1.05 else None,
    )


def compare(a: Counted, b: Counted) -> Finding | None:
    """Two kernels over the same work: whether traffic explains the difference in time."""
    if not (a.read_bytes and b.read_bytes and a.dur_ns and b.dur_ns):
        return None
    time, size = a.dur_ns / b.dur_ns, a.read_bytes / b.read_bytes
    if time < 1:
        return compare(b, a)
    if time < SLOWER:
        return None
    if abs(size - 1) <= SAME_BYTES:
        why = f"The same {b.read_bytes / 1e9:.2f} GB in, {time:.1f}x the time: the gap is compute, not traffic."
    else:
        why = f"{size:.1f}x the bytes and {time:.1f}x the time: traffic is {'all' if size > 0.9 * time else 'part'} of the gap."
    return Finding(
        "comparison",
        why,
        f"{_line(a)} | {_line(b)}",
        f"bytes {size:.2f}x, time {time:.2f}x",
    )


def find(kernels: list[Counted], workload: Workload) -> list[Finding]:
    """Findings of a counter file."""
    found = [traffic(c, workload) for c in kernels]
    found += [compare(a, b) for a, b in itertools.combinations(kernels, 2)]
    return [f for f in found if f]
