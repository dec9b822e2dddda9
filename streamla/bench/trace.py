"""Ragged batches as a server would hold them, from a public request trace.

The trace is Mooncake's JSONL: one request a line with `timestamp` (ms), `input_length` and
`output_length` (tokens); other fields are ignored.

The server is a model, and a plain one:

* It decodes only: prefill happens elsewhere, and a request arrives with its whole input cached.
* N slots. Requests wait in one queue and are admitted in the order they arrived, each as soon as a slot is free.
* Steps of equal, given duration. In each, every admitted request reads its cache and appends one token.
* A request leaves after `output_length` steps. No prefix is shared and none is evicted.
* If the trace arrives too slowly to keep N slots busy, it is replayed faster, by the smallest power of two
  that fills all N slots in at least half of the steps. The factor is reported.

A batch is the lengths of the N requests in one step in which all slots are full; batches are taken at evenly
spaced ones of these steps.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamla.bench.workloads import Workload
from streamla.spec import MLASpec

STEP_MS = 25.0  # 40 tokens/s a request
MAX_SPEEDUP = 2**20


@dataclass(frozen=True)
class Request:
    """One line of the trace. `arrival` in ms."""

    arrival: float
    input_length: int
    output_length: int


@dataclass(frozen=True)
class Admitted:
    """A request in its slot: it decodes in steps [begin, end)."""

    request: Request
    begin: int
    end: int

    def length(self, step: int) -> int:
        """Tokens it reads in `step`: its input and what it has generated, the new token included."""
        return self.request.input_length + 1 + step - self.begin


@dataclass(frozen=True)
class Replay:
    """Batches of one replay, and how the trace had to be replayed to fill the slots."""

    batches: tuple[tuple[int, ...], ...]
    speedup: int
    full_share: float  # of the steps in which anything decodes, those with every slot full


def read_trace(path: Path | str) -> list[Request]:
    """The requests of a Mooncake JSONL file, by arrival."""
    requests = []
    with open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                request = Request(
                    float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"trace: need JSON with timestamp, input_length, output_length on each line; "
                    f"line {number} of {path}: {error!r}"
                ) from None
            if request.input_length < 0 or request.output_length < 0:
                raise ValueError(
                    f"trace: need lengths >= 0; line {number} of {path}: {line.strip()}"
                )
            requests.append(request)
    return sorted(requests, key=lambda r: r.arrival)


def admit(requests: Iterable[Request], slots: int, step_ms: float) -> list[Admitted]:
    """Run the queue: who decodes when. `requests` in order of arrival."""
    free = [0] * slots  # the step at which each slot is free
    admitted = []
    for request in requests:
        if request.output_length == 0:
            continue
        arrives = -int(-request.arrival // step_ms)
        begin = max(arrives, free[0])
        heapq.heapreplace(free, begin + request.output_length)
        admitted.append(Admitted(request, begin, begin + request.output_length))
    return admitted


def occupancy(admitted: Sequence[Admitted]) -> list[tuple[int, int, int]]:
    """Stretches (begin, end, requests) of steps between which nobody comes or goes."""
    events: dict[int, int] = {}
    for a in admitted:
        events[a.begin] = events.get(a.begin, 0) + 1
        events[a.end] = events.get(a.end, 0) - 1
    stretches, held, last = [], 0, 0
    for step in sorted(events):
        if held:
            stretches.append((last, step, held))
        held += events[step]
        last = step
    return stretches


def replay(
    requests: Sequence[Request], concurrency: int, samples: int = 8, step_ms: float = STEP_MS
) -> Replay:
    """Batches of `concurrency` lengths that a server with as many slots holds while replaying `requests`.

    Args:
        requests: from `read_trace`.
        concurrency: slots of the server, and requests of every batch.
        samples: batches to take.
        step_ms: duration of a decode step.
    """
    if concurrency < 1 or samples < 1 or not step_ms > 0:
        raise ValueError(
            f"replay: need concurrency >= 1, samples >= 1, step_ms > 0; "
            f"got {concurrency}, {samples}, {step_ms}"
        )
    if sum(r.output_length > 0 for r in requests) < concurrency:
        raise ValueError(
            f"replay: need a trace of at least {concurrency} requests that generate tokens; "
            f"got {len(requests)} requests"
        )
    speedup = 1
    while True:
        # Arriving `speedup` times faster is the same as steps that last as many times longer.
        admitted = admit(requests, concurrency, step_ms * speedup)
        stretches = occupancy(admitted)
        full = [(begin, end) for begin, end, held in stretches if held == concurrency]
        full_steps = sum(end - begin for begin, end in full)
        share = full_steps / sum(end - begin for begin, end, _ in stretches)
        if share >= 0.5 or speedup >= MAX_SPEEDUP:
            break
        speedup *= 2
    if not full:
        raise ValueError(f"replay: the trace never fills {concurrency} slots, at any arrival rate")
    steps = [_nth_step(full, (2 * i + 1) * full_steps // (2 * samples)) for i in range(samples)]
    batches = tuple(
        tuple(a.length(step) for a in admitted if a.begin <= step < a.end) for step in steps
    )
    return Replay(batches, speedup, share)


def _nth_step(stretches: Sequence[tuple[int, int]], n: int) -> int:
    """Step number n, counting only the steps inside `stretches`."""
    for begin, end in stretches:
        if n < end - begin:
            return begin + n
        n -= end - begin
    raise IndexError(n)


def ragged(
    path: Path | str, spec: MLASpec, concurrencies: Sequence[int], samples: int = 8,
    step_ms: float = STEP_MS,
) -> tuple[list[Workload], list[dict]]:  # fmt: skip
    """Workloads of a trace at several concurrencies, and how it was replayed for each.

    Returns:
        `samples` workloads a concurrency, and one record a concurrency for the results.
    """
    requests = read_trace(path)
    workloads, traffic = [], []
    for n in concurrencies:
        result = replay(requests, n, samples, step_ms)
        workloads += [Workload("ragged", spec, batch) for batch in result.batches]
        traffic.append(
            {
                "trace": Path(path).name,
                "requests": len(requests),
                "concurrency": n,
                "step_ms": step_ms,
                "speedup": result.speedup,
                "full_share": round(result.full_share, 4),
            }
        )
    return workloads, traffic
