"""Results as JSON: one document a run, one record a shape and candidate. docs/bench.md describes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

SCHEMA = "streamla-bench/1"


@dataclass(frozen=True)
class Record:
    """One candidate on one shape. Times are None where it was refused or its error was over budget.

    Attributes:
        grid, num_heads, kv_format, page_size, seqlen_q: the shape's spec, and where it comes from.
        context: tokens of the longest request. requests, tokens: how many requests, and tokens in all.
        cache_seqlens: every length where they differ, else None.
        bytes: what must be read of the cache.
        impl, version, exact: the candidate; exact if it neither rounds the query nor the cache further.
        peer: it is another library's. differs: in what its work is not the same, or None.
        cache, read_bytes: the form of the cache it reads ("stored", or "bf16" made ahead), and its bytes.
        us, us_p25, us_p75: graph replay (on a CPU: wall clock), a call, cold cache.
        us_runs: `us` of every run of several, else empty; then `us` is their median.
        us_eager: issued one by one from Python. plan_us: the plan, once a step, not part of `us`.
        floor_us: reading the same bytes, in the same rounds. x_floor = us / floor_us.
        joules_per_mtoken: energy of reading a million cached tokens, all of the GPU's; None if not asked for.
        gbps: read_bytes / us. roof: "memory" or "compute", whichever bounds the shape by the vendor's rates.
        error: |out - oracle| / |oracle| in the 2-norm, over the requests in `checked`.
        budget_used: share of its error budget used by the worst row; over 1 is wrong and has no time.
        programs, programs_busy, splits: of the plan.
        note: why there is no time, or None.
    """

    grid: str
    num_heads: int
    kv_format: str
    page_size: int
    seqlen_q: int
    context: int
    requests: int
    tokens: int
    cache_seqlens: list[int] | None
    bytes: int
    impl: str
    version: str
    exact: bool
    peer: bool = False
    differs: str | None = None
    cache: str = "stored"
    read_bytes: int | None = None
    us: float | None = None
    us_p25: float | None = None
    us_p75: float | None = None
    repeats: int | None = None
    us_runs: list[float] = field(default_factory=list)
    us_eager: float | None = None
    plan_us: float | None = None
    floor_us: float | None = None
    x_floor: float | None = None
    gbps: float | None = None
    joules_per_mtoken: float | None = None
    roof: str | None = None
    error: float | None = None
    budget_used: float | None = None
    checked: list[int] = field(default_factory=list)
    programs: int | None = None
    programs_busy: int | None = None
    splits: int | None = None
    note: str | None = None

    @property
    def key(self) -> tuple:
        """Records of two runs with the same key measure the same thing."""
        lengths = tuple(self.cache_seqlens or (self.context,) * self.requests)
        return (self.impl, self.num_heads, self.kv_format, self.page_size, self.seqlen_q, lengths)


@dataclass(frozen=True)
class Results:
    """One run: where, with what, by which command, and its records.

    Attributes:
        scaled_down: contexts were divided by this; 1 on a GPU.
        gpu_state: NVML's clocks, temperature and power before and after, or None.
        traffic: how a trace was replayed, one entry a concurrency.
        absent: peers that were asked for and are not here: name, reason, install.
    """

    command: str
    device: str
    gpu: str | None
    torch: str
    triton: str
    streamla: str
    started: str
    scaled_down: int
    l2_bytes: int
    records: list[Record]
    gpu_state: dict | None = None
    traffic: list[dict] = field(default_factory=list)
    absent: list[dict] = field(default_factory=list)
    schema: str = SCHEMA


def joined(results: Results, part: Results) -> Results:
    """Both runs as one: of the first, with the records of the second and its GPU state at the end."""
    state = part.gpu_state
    if results.gpu_state and state:
        state = {"before": results.gpu_state["before"], "after": state["after"]}
    return replace(results, records=results.records + part.records, gpu_state=state)


def dumps(results: Results) -> str:
    """JSON with one record a line, so that a diff of two files can be read."""
    document = asdict(results)
    records = document.pop("records")
    head = json.dumps({"schema": document.pop("schema"), **document}, indent=1, allow_nan=False)
    lines = ",\n".join(f"  {json.dumps(r, allow_nan=False)}" for r in records)
    return f'{head[:-2]},\n "records": [\n{lines}\n ]\n}}\n'


def save(results: Results, path: Path | str) -> None:
    """Write `dumps` to a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(results))


def load(path: Path | str) -> Results:
    """Read what `save` wrote; ValueError if it is something else or of another schema."""
    try:
        document = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: need a JSON document of `streamla bench`; {error}") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path}: need schema {SCHEMA}; got {schema!r}")
    known = {f.name for f in fields(Record)}
    records = [
        Record(**{k: v for k, v in r.items() if k in known}) for r in document.pop("records")
    ]
    return Results(records=records, **document)
