"""Without a GPU and without a trace: which kernel will a configuration land on, and what will it waste?

The rules are data (rules/engines.json): what engines published about their own selection, each with its
source and date. A configuration that no rule covers is refused, not guessed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any

from streamla.doctor.events import DoctorError
from streamla.doctor.findings import count
from streamla.doctor.names import KernelName, decode, padding
from streamla.doctor.workload import ROW_BYTES, Gpu, Workload


@dataclass(frozen=True)
class Prediction:
    """Attributes:
    engine, backend, gpu, kernel, family: what was asked, and where it lands.
    reads: as-is, query-quantised or pool-converted.
    padding: share of the tile's rows that no query fills.
    busy_units, units: CUs or SMs with work, and all of them; None if the grid is not known beforehand.
    bytes, floor_us: of cache that must be read in a layer, and the time that takes at the read rate.
    sentences: the diagnosis.
    waste: the largest of the wastes.
    rule: why, source, date.
    notes: what else is known.
    """

    engine: str
    backend: str
    gpu: str
    kernel: str
    family: str | None
    q_dtype: str | None
    kv_dtype: str | None
    reads: str
    padding: float | None
    busy_units: int | None
    units: int
    bytes: int
    floor_us: float
    sentences: tuple[str, ...]
    waste: float
    rule: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _rules() -> list[dict[str, Any]]:
    text = resources.files("streamla.doctor").joinpath("rules/engines.json").read_text("utf-8")
    return json.loads(text)["rules"]


def _matches(
    rule: dict[str, Any], engine: str, backend: str | None, target: str, w: Workload, page: int
) -> bool:
    heads = rule.get("heads")
    if backend is None:
        if not rule["default"]:
            return False
        heads = rule.get("default_heads", heads)
    elif backend.lower() != rule["backend"].lower():
        return False
    kv = "fp8" if (w.kv or "").startswith("fp8_e4m3") else w.kv
    return (
        rule["engine"] == engine
        and rule["target"] == target
        and rule.get("q", w.q) == w.q
        and (rule["kv"] == kv or (isinstance(rule["kv"], list) and kv in rule["kv"]))
        and (heads is None or w.heads in heads)
        and w.heads not in rule.get("heads_not", [])
        and w.q_len in rule.get("q_len", [w.q_len])
        and page not in rule.get("page_size_not", [])
    )  # fmt: skip


def _groups(kernel: KernelName, w: Workload) -> int:
    """Tiles that the rows of one request take."""
    assert w.heads is not None
    if not kernel.tile_heads or not kernel.tile_q_rows:
        return 1
    if kernel.flattened and kernel.tile_rows:
        return -(-w.heads * w.q_len // kernel.tile_rows)
    return -(-w.heads // kernel.tile_heads) * -(-w.q_len // kernel.tile_q_rows)


def _busy(
    rule: dict[str, Any], kernel: KernelName, w: Workload, units: int, max_splits: int | None
) -> tuple[int | None, str]:
    """Units with work, and how that follows."""
    assert w.requests is not None
    assert w.context is not None
    programs, groups = rule["programs"], _groups(kernel, w)
    kind = programs["kind"]
    if kind == "unknown":
        return None, "splits are chosen on the device"
    if kind == "fill":
        # A plan over the whole batch: as many pieces as there are units, of one tile of tokens at least.
        tiles = w.requests * groups * -(-w.context // (kernel.tile_kv or 64))
        return min(units, tiles), f"a plan cuts the batch into pieces for all {units}"
    if kind == "split_cap":
        cap = max_splits or programs["max_splits"]
        by_length = -(-w.context // programs.get("tokens_per_split", 1))
        splits = min(cap, by_length, -(-units // w.requests))
    else:  # pow2_splits
        cap = programs["max_per_unit"] * units
        splits = 1 << max(0, (w.context // programs["tokens_per_split"]).bit_length() - 1)
        splits = max(1, min(splits, cap))
    return (
        min(units, w.requests * groups * splits),
        f"{count(w.requests, 'request')} x {count(groups, 'tile')} of rows x {count(splits, 'split')}, "
        f"at most {cap} a request",
    )


def _sentences(
    p: Prediction, w: Workload, unit_word: str, how: str, kernel: KernelName
) -> list[str]:
    lines = []
    if p.padding:
        lines.append(
            f"{p.padding:.0%} of every matrix multiply is padding: {kernel.short} computes "
            f"{kernel.tile_rows} rows a tile, {w.heads} heads x {count(w.q_len, 'query row')} are real."
        )
    if p.busy_units is not None and p.busy_units < p.units:
        lines.append(
            f"{p.busy_units} of {p.units} {unit_word} have work ({how}): "
            f"{1 - p.busy_units / p.units:.0%} of the GPU idles while attention runs."
        )
    if p.reads == "query-quantised":
        lines.append(
            "The query is rounded to fp8 before attention: an extra kernel, and accuracy lost."
        )
    if p.reads == "pool-converted":
        lines.append(
            "The whole cache pool is converted to bf16 in every layer of every step: read once more, "
            "written once, then read at twice the width."
        )
    return lines or ["Nothing is wasted that the rules can see."]


def predict(
    engine: str,
    gpu: Gpu,
    workload: Workload,
    backend: str | None = None,
    page_size: int = 64,
    max_splits: int | None = None,
) -> Prediction:
    """The kernel that `engine` selects and its waste.

    Args:
        engine: "vllm" or "sglang".
        gpu: a GPU of the table.
        workload: all of heads, requests, context, q, kv.
        backend: the engine's backend; None for its default.
        page_size: tokens a page of the cache.
        max_splits: another cap on the splits of a request than the rule's.

    Raises:
        DoctorError: an input is missing, or no rule covers the configuration.
    """
    w, rules = workload, _rules()
    missing = [n for n in ("heads", "requests", "context", "q", "kv") if getattr(w, n) is None]
    if missing:
        raise DoctorError(f"predict needs --{', --'.join(missing)}")
    if gpu.arch is None or gpu.units is None:
        raise DoctorError(f"predict knows no GPU called {gpu.name!r}")
    engines = sorted({r["engine"] for r in rules})
    if engine not in engines:
        raise DoctorError(f"--engine: need one of {', '.join(engines)}; got {engine!r}")
    rule = next(
        (r for r in rules if _matches(r, engine, backend, gpu.arch.target, w, page_size)), None
    )
    if rule is None:
        raise DoctorError(
            f"no published rule covers {engine}{f' {backend}' if backend else ''} on {gpu.name} with a {w.q} "
            f"query, a {w.kv} cache, {w.heads} heads and {w.q_len} query rows"
        )
    kernel = decode(rule["kernel"].format(q_len=w.q_len))
    if "tile_rows" in rule:
        kernel = replace(kernel, tile_rows=rule["tile_rows"], tile_heads=rule["tile_rows"],
                         tile_q_rows=1, flattened=True, q_dtype=w.q, kv_dtype=w.q)  # fmt: skip
    assert w.heads is not None
    assert w.total is not None
    assert w.kv is not None
    busy, how = _busy(rule, kernel, w, gpu.units, max_splits)
    wasted_rows = padding(kernel, w.heads, w.q_len)
    size = w.total * ROW_BYTES[w.kv]
    idle = 1 - busy / gpu.units if busy is not None else 0.0
    p = Prediction(
        engine, rule["backend"], gpu.name, kernel.text, kernel.family, kernel.q_dtype, kernel.kv_dtype,
        rule["reads"], wasted_rows, busy, gpu.units, size, size / gpu.arch.read_bytes_per_s * 1e6, (),
        max(wasted_rows or 0.0, idle), {k: rule[k] for k in ("why", "source", "date")},
        (rule["also"],) if "also" in rule and max_splits is None else (),
    )  # fmt: skip
    return replace(p, sentences=tuple(_sentences(p, w, gpu.unit_word, how, kernel)))
