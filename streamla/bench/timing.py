"""Times that can be defended: median and quartiles of repeats, interleaved, and the state of the GPU.

On a GPU the calls of each candidate are captured into one CUDA graph. The graphs are replayed in rounds, each in an
order of its own, never two of a kind in a row, and all repeats are queued before the first is waited for: so the GPU never
idles between two events, a slow drift of its clocks touches every candidate alike, and none always follows one that draws
little power, which alone is worth some percent.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Calls = Mapping[str, Sequence[Callable[[], None]]]  # candidate -> one call a region

MIN_REPEATS, MAX_REPEATS = 11, 101
SECONDS_A_SHAPE = 0.05  # of GPU time, for all candidates of a shape together
SECONDS_A_CANDIDATE = (
    0.25  # a slower one takes part in fewer rounds, but in MIN_SLOW_REPEATS at least
)
MIN_SLOW_REPEATS = 3
CPU_SECONDS_A_SHAPE = 0.5
EAGER_CALLS = 16
EAGER_SECONDS = 0.25
ENERGY_SECONDS = 0.4  # of replays of one kind: the counter moves every few tens of ms
DRIFT = 0.05  # relative change of the SM clock that is worth a warning


@dataclass(frozen=True)
class Times:
    """Microseconds a call."""

    us: float
    us_p25: float
    us_p75: float
    repeats: int


@dataclass(frozen=True)
class Graph:
    """A CUDA graph and the calls that a replay of it makes.

    It keeps the calls, and so the tensors they hold: the graph itself has only their addresses.
    """

    cuda_graph: torch.cuda.CUDAGraph
    calls: tuple[Callable[[], None], ...]

    def replay(self) -> None:
        self.cuda_graph.replay()


def summary(samples: Sequence[float]) -> Times:
    """Median and quartiles."""
    values = torch.tensor(samples, dtype=torch.float64)
    us, p25, p75 = (float(values.quantile(q)) for q in (0.5, 0.25, 0.75))
    return Times(us, p25, p75, len(samples))


def time_graphs(calls: Calls, repeats: int | None = None) -> dict[str, Times]:
    """Times of graph replay. A candidate's calls must be free of allocation and host work.

    Args:
        calls: what to time; every call has run once already (nothing is compiled here).
        repeats: replays of each graph; None for as many as fit SECONDS_A_SHAPE.
    """
    return time_replays({name: capture(sequence) for name, sequence in calls.items()}, repeats)


def time_replays(graphs: Mapping[str, Graph], repeats: int | None = None) -> dict[str, Times]:
    """Times of a call, from replays in turn of graphs that hold several calls each."""
    once = {
        name: _queue_replays({name: graph}, {name: 2})[name][-1] for name, graph in graphs.items()
    }
    if repeats is None:
        fitting = int(SECONDS_A_SHAPE * 1e3 / sum(once.values()))
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, fitting))
    counts = {}
    for name, ms in once.items():
        fitting = max(MIN_SLOW_REPEATS, int(SECONDS_A_CANDIDATE * 1e3 / ms))
        counts[name] = min(repeats, fitting)
    samples = _queue_replays(graphs, counts)
    return {
        name: summary([ms * 1e3 / len(graphs[name].calls) for ms in milliseconds])
        for name, milliseconds in samples.items()
    }


def capture(calls: Sequence[Callable[[], None]]) -> Graph:
    """Calls as one graph; each has run once already."""
    graph = Graph(torch.cuda.CUDAGraph(), tuple(calls))
    with torch.cuda.graph(graph.cuda_graph):
        for call in graph.calls:
            call()
    return graph


def _queue_replays(
    graphs: Mapping[str, Graph], counts: Mapping[str, int]
) -> dict[str, list[float]]:
    """Milliseconds of each replay, in rounds of one replay a graph; one with a lower count misses some, evenly."""
    events: dict[str, list] = {name: [] for name in graphs}
    for name in _mixed_rounds(counts):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs[name].replay()
        end.record()
        events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def _mixed_rounds(counts: Mapping[str, int]) -> list[str]:
    """Every name as often as counted, spread evenly over rounds; each round in random order, the same every time, and
    no name twice in a row if there are two."""
    rng = random.Random(0)
    rounds = max(counts.values())
    order: list[str] = []
    for i in range(rounds):
        names = [n for n in counts if i * counts[n] // rounds < (i + 1) * counts[n] // rounds]
        rng.shuffle(names)
        if order and names[0] == order[-1]:
            names.append(names.pop(0))
        order += names
    return order


def time_eager(calls: Sequence[Callable[[], None]], repeats: int = 5) -> Times:
    """Times of plain calls one after another, as the host issues them: launch cost included."""
    rounds = -(-EAGER_CALLS // len(calls))
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < repeats and not (samples and time.perf_counter() - start > EAGER_SECONDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e6 / (rounds * len(calls)))
    return summary(samples)


def time_cpu(calls: Calls, repeats: int = 5) -> dict[str, Times]:
    """Wall-clock times without a GPU, interleaved as on one; slow calls are repeated less."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(repeats):
        if done and time.perf_counter() - start > CPU_SECONDS_A_SHAPE:
            break
        for name, sequence in calls.items():
            begin = time.perf_counter()
            for call in sequence:
                call()
            samples[name].append((time.perf_counter() - begin) * 1e6 / len(sequence))
    return {name: summary(times) for name, times in samples.items()}


@dataclass(frozen=True)
class GPUState:
    """What NVML says of the GPU at one moment. It is read and never set."""

    sm_mhz: int
    memory_mhz: int
    celsius: int
    watts: float


def gpu_state(device: torch.device) -> GPUState | None:
    """The state now, or None where there is no NVML."""
    return _ask_nvml(
        device,
        lambda nvml, handle: GPUState(
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        ),
    )


def joules(graph: Graph, us: float, device: torch.device) -> float | None:
    """Energy of one call, by NVML's counter over replays that last ENERGY_SECONDS; None without it.

    Args:
        us: time of a call, from which the number of replays follows.
    """
    replays = int(ENERGY_SECONDS * 1e6 / (us * len(graph.calls))) + 1
    readings = []
    for count in (
        replays // 4,
        replays,
    ):  # the first ones warm up; the counter is read at their end
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        readings.append(_ask_nvml(device, _millijoules))
    before, after = readings
    if before is None or after is None or after <= before:
        return None
    return (after - before) / 1e3 / (replays * len(graph.calls))


def _millijoules(nvml: Any, handle: Any) -> int:
    return nvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def _ask_nvml(device: torch.device, question: Callable[[Any, Any], T]) -> T | None:
    """`question(pynvml, handle of the device)`; None where NVML is absent, another vendor's, or forbidden."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return question(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:  # none of these is fatal, and each driver has errors of its own
        return None


def drift(before: GPUState | None, after: GPUState | None) -> str | None:
    """A warning if the clocks moved while measuring, else None."""
    if before is None or after is None:
        return None
    for name in ("sm_mhz", "memory_mhz"):
        a, b = getattr(before, name), getattr(after, name)
        if a and abs(b - a) > DRIFT * a:
            return f"{name} moved from {a} to {b} while measuring: compare times with care"
    return None


def state_record(before: GPUState | None, after: GPUState | None) -> dict:
    """Both states, as they are stored."""
    return {k: asdict(s) if s else None for k, s in (("before", before), ("after", after))}
