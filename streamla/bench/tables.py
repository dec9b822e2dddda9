"""The Markdown tables of README, from the records of `streamla bench collect` and from nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from streamla.bench.report import three_digits
from streamla.bench.workloads import K, tokens_text

CONTEXTS, REQUESTS = (32 * K, 64 * K, 128 * K, 256 * K), (1, 2, 4, 8, 16)
PROBES = ((32 * K, 1), (128 * K, 1), (128 * K, 16))
HEADS, FORMAT, PAGE_SIZE = 16, "fp8_e4m3fn", 64
AXES = {
    "heads": ("num_heads", "{} heads"),
    "mtp": ("seqlen_q", "16 heads, {} query tokens"),
    "formats": ("kv_format", "16 heads, {} cache"),
    "pages": ("page_size", "16 heads, pages of {}"),
}
README_AXES = {
    "heads": (8, 24, 32, 64, 128), "mtp": (4,), "formats": ("bf16", "fp8_ds_mla"), "pages": (1,),
}  # fmt: skip
SIZE_GOALS = {"32K": 1.5, "64K": 1.4, "128K": 1.25, "256K": 1.15, "512K and more": 1.10}
SPREAD_GOALS = {"128K": 1.05, "512K and more": 1.02}
MARKERS = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def blog(records: Sequence[dict]) -> str:
    """Our time over the floor's, on the 20 shapes."""
    ours = _on(_ours(_grid(records, "blog", kv_format=FORMAT)))
    return _table(
        ["tokens each", *_counts()],
        [[tokens_text(n), *(_beside_floor(ours.get((n, r))) for r in REQUESTS)] for n in CONTEXTS],
    )


def bf16(records: Sequence[dict]) -> str:
    """Our time on a bf16 cache, and FA3's."""
    found = _grid(records, "blog", kv_format="bf16")
    ours, fa3 = _on(_ours(found)), _on(_named(found, "fa3-qv"))

    def cell(shape: tuple[int, int]) -> str:
        a, b = _us(ours.get(shape)), _us(fa3.get(shape))
        return f"{three_digits(a)} / {three_digits(b)} ({a / b:.2f}x)" if a and b else "-"

    return _table(
        ["tokens each", *_counts()],
        [[tokens_text(n), *(cell((n, r)) for r in REQUESTS)] for n in CONTEXTS],
    )


def peers(records: Sequence[dict]) -> str:
    """Ours, and of each library the fastest that is exact and the fastest that is not, on the 20 shapes."""
    best: dict[tuple, str] = {}
    for impl, timed in _by_impl(records):
        ours = impl if not timed[0]["peer"] else ""
        best.setdefault((ours, impl.split("-")[0], timed[0]["exact"]), impl)
    return _peers_table(records, list(best.values()))


def all_peers(records: Sequence[dict]) -> str:
    """Every implementation on the 20 shapes, fastest first."""
    return _peers_table(records, [impl for impl, _ in _by_impl(records)])


def others(records: Sequence[dict]) -> str:
    """Other heads, query tokens and formats, on three shapes."""
    return _axes(records, README_AXES)


def axes(records: Sequence[dict]) -> str:
    """All heads, query tokens, formats and pages that were measured, on three shapes."""
    return _axes(records, {grid: () for grid in AXES})


def ragged(records: Sequence[dict]) -> str:
    """Batches of real traffic: one row a number of requests, smallest batch first."""
    ours = _ours(_grid(records, "ragged"))
    rows = []
    for requests in dict.fromkeys(r["requests"] for r in ours):
        batches = sorted((r for r in ours if r["requests"] == requests), key=lambda r: r["tokens"])
        cells = [f"{r['tokens'] / 1e3:.0f}K: {_beside_floor(r)}" for r in batches]
        rows.append([str(requests), *cells])
    width = max((len(row) for row in rows), default=1) - 1
    return _table(["requests", *["tokens: us / floor"] * width], rows)


def energy(records: Sequence[dict]) -> str:
    """Joules of the whole GPU for reading a million cached tokens, 16 heads."""
    found = [r for r in records if r["joules_per_mtoken"]]
    rows = []
    for name, form in dict.fromkeys((r["impl"], r["kv_format"]) for r in found):
        shapes = _on([r for r in _named(found, name) if r["kv_format"] == form])
        cells = (shapes.get(probe) for probe in PROBES)
        rows.append([f"{name}, {form}", *(three_digits(r["joules_per_mtoken"]) if r else "-" for r in cells)])  # fmt: skip
    return _table(["J for 1M tokens", *_probe_texts()], rows)


def goals(records: Sequence[dict]) -> str:
    """What was aimed at, 16 heads and fp8 unless said, and what was measured: the worst shape of each."""
    found = [r for r in _ours(_grid(records, "blog", kv_format=FORMAT)) if r["x_floor"]]
    sizes: dict[str, list[float]] = {}
    spreads: dict[str, list[float]] = {}
    for r in found:
        sizes.setdefault(_size(r), []).append(r["x_floor"])
    for group in _groups(found):
        spreads.setdefault(_size(group[0]), []).append(_spread(group))
    mean = f"{_geomean(r['x_floor'] for r in found):.2f}x" if found else "-"
    rows = [["20 shapes, geometric mean", "1.17x", mean]]
    for size, goal in SIZE_GOALS.items():
        rows.append([f"{size} tokens in all", f"{goal:.2f}x", _worst(sizes.get(size), "x")])
    for size, goal in SPREAD_GOALS.items():
        rows.append([f"{size} tokens, slowest over fastest mix", f"{goal:.2f}", _worst(spreads.get(size))])  # fmt: skip
    at_16 = _probe(records, "heads", num_heads=16)
    rows.append(["8 heads, 128K x 16", f"{_time(at_16)} us", f"{_time(_probe(records, 'heads', num_heads=8))} us"])  # fmt: skip
    for heads, goal in ((24, 1.2), (32, 1.2), (64, 1.35)):
        rows.append(_goal(records, "heads", f"{heads} heads", goal, num_heads=heads))
    rows.append(["128 heads, 128K x 16", "800 us", f"{_time(_probe(records, 'heads', num_heads=128))} us"])  # fmt: skip
    rows.append(_goal(records, "mtp", "4 query tokens", 1.4, seqlen_q=4))
    against = [ours / fa3 for ours, fa3 in _both(records)]
    rows.append(["bf16 cache, 20 shapes, over FA3's time", "1.00", _worst(against)])
    error = max((r["error"] for r in found), default=math.nan)
    rows.append(["error, 20 shapes", "2.0e-03", f"{error:.1e}"])
    return _table(["", "goal", "measured"], rows)


TABLES: dict[str, Callable[[Sequence[dict]], str]] = {
    f.__name__: f for f in (blog, peers, others, goals, all_peers, axes, bf16, ragged, energy)
}


def fill(text: str, records: Sequence[dict]) -> str:
    """`text` with the tables of `records` between its markers, `<!-- table NAME -->` and `<!-- end -->`."""

    def replace(found: re.Match[str]) -> str:
        name = found[2]
        if name not in TABLES:
            raise ValueError(f"table: need one of {', '.join(TABLES)}; got {name!r}")
        return found[1] + TABLES[name](records) + found[3]

    return MARKERS.sub(replace, text)


def _axes(records: Sequence[dict], wanted: Mapping[str, Sequence]) -> str:
    """One row for each value of an axis that is wanted; no values are all of them."""
    rows = []
    for grid, values in wanted.items():
        axis, text = AXES[grid]
        ours = _ours(_grid(records, grid))
        for value in dict.fromkeys(r[axis] for r in ours):
            here = [r for r in ours if r[axis] == value]
            if value not in values if values else grid != "heads" and _is_standard(here[0]):
                continue
            label = text.format(value) + (" (portable)" if here[0]["impl"] == "portable" else "")
            shapes = _on(here)
            rows.append([label, *(_beside_floor(shapes.get(probe)) for probe in PROBES)])
    return _table(["", *_probe_texts()], rows)


def _by_impl(records: Sequence[dict]) -> list[tuple[str, list[dict]]]:
    """Every implementation and its times on the 20 shapes, fastest first."""
    found = [r for r in _grid(records, "blog", kv_format=FORMAT) if r["x_floor"]]
    groups = {impl: _named(found, impl) for impl in dict.fromkeys(r["impl"] for r in found)}
    return sorted(groups.items(), key=lambda item: _geomean(r["x_floor"] for r in item[1]))


def _peers_table(records: Sequence[dict], impls: Sequence[str]) -> str:
    rows = []
    for impl, timed in _by_impl(records):
        if impl not in impls:
            continue
        shapes = _on(timed)
        some = "" if len(timed) == len(CONTEXTS) * len(REQUESTS) else f", {len(timed)} shapes"
        name = impl if timed[0]["peer"] else f"streamla {impl}"
        rows.append([
            f"{name} {timed[0]['version']}", timed[0]["differs"] or "",
            *(_time(shapes.get(probe)) for probe in PROBES),
            f"{_geomean(r['x_floor'] for r in timed):.2f}x{some}",
            f"{max(r['error'] for r in timed):.1e}",
        ])  # fmt: skip
    header = ["implementation", "differs in", *_probe_texts("us, "), "mean over floor", "error"]
    return _table(header, rows)


def _grid(records: Iterable[dict], grid: str, **spec) -> list[dict]:
    """Records of a grid, in which these fields have these values."""
    return [r for r in records if r["grid"] == grid and all(r[k] == v for k, v in spec.items())]


def _ours(records: Sequence[dict]) -> list[dict]:
    """Of each shape the first record that is ours: what `auto` chose."""
    names = ("num_heads", "kv_format", "page_size", "seqlen_q", "context", "requests", "tokens")
    first: dict[tuple, dict] = {}
    for r in records:
        if not r["peer"]:
            first.setdefault(tuple(r[n] for n in names), r)
    return list(first.values())


def _both(records: Sequence[dict]) -> list[tuple[float, float]]:
    """Our time on a bf16 cache and FA3's, on each of the 20 shapes that both have."""
    found = _grid(records, "blog", kv_format="bf16")
    fa3 = _on(_named(found, "fa3-qv"))
    times = ((r["us"], _us(fa3.get(shape))) for shape, r in _on(_ours(found)).items())
    return [(ours, theirs) for ours, theirs in times if ours and theirs]


def _named(records: Sequence[dict], impl: str) -> list[dict]:
    return [r for r in records if r["impl"] == impl]


def _on(records: Sequence[dict]) -> dict[tuple[int, int], dict]:
    """By shape."""
    return {(r["context"], r["requests"]): r for r in records}


def _is_standard(r: dict) -> bool:
    spec = (r["num_heads"], r["kv_format"], r["page_size"], r["seqlen_q"])
    return spec == (HEADS, FORMAT, PAGE_SIZE, 1)


def _groups(records: Sequence[dict]) -> list[list[dict]]:
    """Shapes of equal total tokens, of which there are several."""
    groups: dict[int, list[dict]] = {}
    for r in records:
        groups.setdefault(r["tokens"], []).append(r)
    return [group for group in groups.values() if len(group) > 1]


def _spread(group: Sequence[dict]) -> float:
    times = [r["us"] for r in group]
    return max(times) / min(times)


def _size(r: dict) -> str:
    return tokens_text(r["tokens"]) if r["tokens"] < 512 * K else "512K and more"


def _probe(records: Sequence[dict], grid: str, **spec) -> dict | None:
    """Our record of 16 requests of 128K tokens."""
    return _on(_ours(_grid(records, grid, **spec))).get((128 * K, 16))


def _goal(records: Sequence[dict], grid: str, text: str, goal: float, **spec) -> list[str]:
    r = _probe(records, grid, **spec)
    measured = f"{r['x_floor']:.2f}x" if r and r["x_floor"] else "-"
    return [f"{text}, 128K x 16", f"{goal:.2f}x", measured]


def _worst(values: Sequence[float] | None, unit: str = "") -> str:
    return f"{max(values):.2f}{unit}" if values else "-"


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _us(r: dict | None) -> float | None:
    return r["us"] if r else None


def _time(r: dict | None) -> str:
    us = _us(r)
    return three_digits(us) if us else "-"


def _beside_floor(r: dict | None) -> str:
    if r is None or not r["x_floor"]:
        return "-"
    return f"{_time(r)} / {three_digits(r['floor_us'])} ({r['x_floor']:.2f}x)"


def _counts() -> list[str]:
    return ["1 request", *map(str, REQUESTS[1:])]


def _probe_texts(prefix: str = "") -> list[str]:
    return [f"{prefix}{tokens_text(n)} x {r}" for n, r in PROBES]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
