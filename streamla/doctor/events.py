"""What a profile holds, whichever tool wrote it: kernel events, marks, counters, the GPU."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

Shape = tuple[int, int, int]


class DoctorError(ValueError):
    """The input cannot be read. The message is one line, shown to the user as it is."""


@dataclass(frozen=True)
class KernelEvent:
    """One kernel on the GPU, or, in a summary, all launches of one kernel.

    Attributes:
        name: as the profiler wrote it.
        start_ns: start on the profiler's clock; 0 in a summary.
        dur_ns: duration of one launch (the mean of `count` launches in a summary).
        device: the profiler's name of the GPU.
        stream: stream or queue.
        grid: programs (blocks, workgroups) per axis; None where the profile does not say.
        block: threads of a program per axis; None where the profile does not say.
        correlation: what ties the kernel to the call that launched it. All kernels of one graph
            launch share it.
        count: launches this event stands for.
    """

    name: str
    start_ns: int
    dur_ns: int
    device: str = "0"
    stream: int = 0
    grid: Shape | None = None
    block: Shape | None = None
    correlation: int | None = None
    count: int = 1

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.dur_ns

    @property
    def programs(self) -> int | None:
        """Size of the grid, None if unknown."""
        return None if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True)
class Mark:
    """A named range: a step of the profiler or an annotation of the program."""

    name: str
    start_ns: int
    end_ns: int
    on_gpu: bool = False


@dataclass(frozen=True)
class CounterSample:
    """Hardware counters of one launch."""

    kernel: str
    counters: dict[str, float]
    dur_ns: float | None = None
    grid: Shape | None = None
    dispatch: str = ""


@dataclass
class Trace:
    """A profile. Events live in columns: millions of them fit in memory.

    Attributes:
        source: where it came from, for messages.
        format: the reader that understood it.
        timed: whether events have start times; a summary has none, and no order either.
        gpu_name, units: the GPU as the profile names it; None where it does not.
        marks: step and annotation ranges.
        counters: counter samples.
        notes: what the reader wants the user to know.
    """

    source: str
    format: str
    timed: bool = True
    gpu_name: str | None = None
    units: int | None = None
    marks: list[Mark] = field(default_factory=list)
    counters: list[CounterSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names: list[str] = []
        self._name_ids: dict[str, int] = {}
        self._shapes: list[tuple[str, int, Shape | None, Shape | None]] = []
        self._shape_ids: dict[tuple[str, int, Shape | None, Shape | None], int] = {}
        self._start, self._dur = array("q"), array("q")
        self._correlation = array("q")  # -1: none
        self._name, self._shape, self._count = array("I"), array("I"), array("I")
        self._launch_id, self._launch_ns = array("q"), array("q")

    def add(self, event: KernelEvent) -> None:
        """Append one kernel event."""
        name = self._name_ids.setdefault(event.name, len(self.names))
        if name == len(self.names):
            self.names.append(event.name)
        key = (event.device, event.stream, event.grid, event.block)
        shape = self._shape_ids.setdefault(key, len(self._shapes))
        if shape == len(self._shapes):
            self._shapes.append(key)
        self._start.append(event.start_ns)
        self._dur.append(event.dur_ns)
        self._correlation.append(-1 if event.correlation is None else event.correlation)
        self._name.append(name)
        self._shape.append(shape)
        self._count.append(event.count)

    def add_launch(self, correlation: int, start_ns: int) -> None:
        """Remember when the host launched the kernels of a correlation id."""
        self._launch_id.append(correlation)
        self._launch_ns.append(start_ns)

    def launches(self) -> dict[int, int]:
        """Host launch time of each correlation id."""
        return dict(zip(self._launch_id, self._launch_ns, strict=True))

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, i: int) -> KernelEvent:
        device, stream, grid, block = self._shapes[self._shape[i]]
        correlation = self._correlation[i]
        return KernelEvent(
            self.names[self._name[i]], self._start[i], self._dur[i], device, stream, grid, block,
            None if correlation < 0 else correlation, self._count[i],
        )  # fmt: skip

    def __iter__(self) -> Iterator[KernelEvent]:
        return (self[i] for i in range(len(self)))

    def name_id(self, i: int) -> int:
        """Index into `names` of event i, without building the event."""
        return self._name[i]

    def interval(self, i: int) -> tuple[int, int]:
        """Start and end of event i in ns, without building the event."""
        return self._start[i], self._start[i] + self._dur[i]

    def device_of(self, i: int) -> str:
        """Device of event i, without building the event."""
        return self._shapes[self._shape[i]][0]

    def ordered(self) -> list[int] | range:
        """Indices of the events by start time."""
        start = self._start
        if all(start[i] <= start[i + 1] for i in range(len(start) - 1)):
            return range(len(start))
        return sorted(range(len(start)), key=start.__getitem__)
