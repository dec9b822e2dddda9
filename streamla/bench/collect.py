"""Several runs as one plain list of records: what was measured, how long it took, and by which command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from streamla.bench.records import Record, Results

# Of a record, in this order; docs/bench.md describes them.
FIELDS = (
    "grid", "num_heads", "kv_format", "page_size", "seqlen_q", "context", "requests", "tokens", "impl", "version",
    "peer", "exact", "differs", "us", "floor_us", "x_floor", "error", "joules_per_mtoken", "plan_us", "note",
)  # fmt: skip


def collect(runs: Sequence[Results]) -> list[dict]:
    """The records of `runs`, each with the command and the GPU of its run. Ragged batches have no context."""
    gpus = {run.gpu for run in runs}
    if len(gpus) > 1:
        raise ValueError(f"collect: need runs of one machine; got {', '.join(map(str, gpus))}")
    return [_plain(record, run) for run in runs for record in run.records]


def _plain(record: Record, run: Results) -> dict:
    plain = {name: getattr(record, name) for name in FIELDS}
    if record.cache_seqlens:
        plain["context"] = None
    return {**plain, "gpu": run.gpu, "command": run.command}


def save(records: Sequence[dict], path: Path | str) -> None:
    """One record a line, so that a diff of two files can be read."""
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    Path(path).write_text(f"[\n{lines}\n]\n")


def load(path: Path | str) -> list[dict]:
    """Read what `save` wrote; ValueError if it is something else."""
    try:
        records = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: need a JSON list of `streamla bench collect`; {error}") from None
    if not isinstance(records, list) or not all(
        isinstance(r, dict) and set(FIELDS) <= set(r) for r in records
    ):
        raise ValueError(f"{path}: need a JSON list of `streamla bench collect`")
    return records
