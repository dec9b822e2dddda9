"""What is wasted, each with the line it was read from and the arithmetic behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamla.doctor.groups import PREPARING, Group, step_spans, workload_of
from streamla.doctor.names import computed_rows, padding
from streamla.doctor.stats import median
from streamla.doctor.steps import Timeline
from streamla.doctor.workload import ROW_BYTES, Gpu, Workload

# Below these a number is no finding: launch jitter, or what any kernel pays.
MIN_WASTE = 0.05
MERGE_SHARE = 0.15
MIN_GAP_NS = 1000
SAME_TIME = 1.4  # time that grows less than this while tokens grow 3x and more does not follow them


def count(n: int, what: str) -> str:
    """A number and its noun."""
    return f"{n} {what}" + ("" if n == 1 else "s")


@dataclass(frozen=True)
class Finding:
    """Attributes:
    id: padding, parallelism, longest, imbalance, bandwidth, preparing, query-quantised, merge, gap,
        amdahl, traffic, comparison.
    sentence: what an engineer would say.
    evidence: the kernel, its grid and its time, as the trace has them.
    arithmetic: how the number comes about.
    waste: the share that is wasted, 0 to 1; None for a finding that is no waste.
    """

    id: str
    sentence: str
    evidence: str
    arithmetic: str
    waste: float | None = None


def pad(group: Group) -> Finding | None:
    """Rows of the tile that no query fills."""
    w, kernel = group.workload, group.kernel
    if w.heads is None:
        return None
    waste, rows = padding(kernel, w.heads, w.q_len), computed_rows(kernel, w.heads, w.q_len)
    if waste is None or rows is None or waste < MIN_WASTE:
        return None
    real = w.heads * w.q_len
    if kernel.row_steps:
        tile = f"tiles of {', '.join(map(str, kernel.row_steps))} rows, the least that holds them"
    elif kernel.flattened:
        tile = f"tiles of {kernel.tile_rows} rows (heads and query rows share them)"
    else:
        tile = (
            f"{kernel.tile_heads} heads x {kernel.tile_q_rows} query rows = {kernel.tile_rows} rows"
        )
    return Finding(
        "padding",
        f"{waste:.0%} of every matrix multiply is padding: {kernel.short} was built for another shape.",
        group.evidence,
        f"{tile}; {w.heads} heads x {count(w.q_len, 'query row')} = {real} rows are real: "
        f"1 - {real}/{rows} = {waste:.0%}",
        waste,
    )


# aiter's kernels without a work list split a request into at most this many pieces (its get_meta_param).
AITER_SPLIT_CAP = 16


def _most_programs(group: Group) -> tuple[int, str] | None:
    """Programs of a launch whose grid the trace does not show, from the published rule of its family."""
    w, kernel = group.workload, group.kernel
    if kernel.family != "aiter-asm-mla" or kernel.persistent is not False:
        return None
    if w.requests is None or not kernel.tile_heads:
        return None
    groups = -(-(w.heads or kernel.tile_heads) // kernel.tile_heads)
    return (
        AITER_SPLIT_CAP * w.requests * groups,
        f"not persistent: at most {AITER_SPLIT_CAP} splits x {count(w.requests, 'request')} x "
        f"{count(groups, 'head group')}",
    )


def parallel(group: Group, gpu: Gpu | None) -> Finding | None:
    """Programs against the units of the GPU."""
    if gpu is None or not gpu.units:
        return None
    programs, how = group.programs, ""
    if group.grid is not None:
        axes = group.kernel.grid_axes
        named = [count(n, a) for n, a in zip(group.grid, axes, strict=False)]
        how = f"grid {' x '.join(named) if named else ' x '.join(map(str, group.grid))}"
    elif bound := _most_programs(group):
        programs, how = bound
    if programs is None or programs >= gpu.units:
        return None
    waste = 1 - programs / gpu.units
    if waste < MIN_WASTE:
        return None
    return Finding(
        "parallelism",
        f"{'At most ' if group.grid is None else ''}{programs} of {gpu.units} {gpu.unit_word} have work; "
        f"{waste:.0%} of the GPU idles while attention runs.",
        group.evidence,
        f"{how} = {programs} programs; {gpu.name} has {gpu.units} {gpu.unit_word}: "
        f"1 - {programs}/{gpu.units} = {waste:.0%}",
        waste,
    )


def bandwidth(group: Group, gpu: Gpu | None) -> Finding | None:
    """Bytes that must move against the time they took."""
    w = group.workload
    kv = w.kv or group.kernel.kv_dtype
    if gpu is None or gpu.arch is None or not w.total or kv not in ROW_BYTES or not group.decode_ns:
        return None
    size = w.total * ROW_BYTES[kv]
    rate = gpu.arch.read_bytes_per_s
    floor_ns = size / rate * 1e9
    share = floor_ns / group.decode_ns
    arithmetic = (
        f"{w.total} tokens x {ROW_BYTES[kv]} B ({kv}) = {size / 1e6:.1f} MB; at {rate / 1e12:.2f} TB/s "
        f"({gpu.arch.source}) {floor_ns / 1e3:.1f} us; it took {group.decode_ns / 1e3:.1f} us"
    )
    if share > 1.02:
        return Finding(
            "bandwidth",
            f"Faster than memory allows: the {size / 1e6:.0f} MB came from the cache of the GPU, or the "
            "workload given is larger than the real one.",
            group.evidence, arithmetic,
        )  # fmt: skip
    if 1 - share < MIN_WASTE:
        return None
    small = " (the working set fits the last-level cache)" if size < gpu.arch.l2_bytes else ""
    return Finding(
        "bandwidth",
        f"Attention runs at {share:.0%} of the memory roof: {group.decode_ns / 1e3:.1f} us for bytes that "
        f"can be read in {floor_ns / 1e3:.1f} us{small}.",
        group.evidence,
        arithmetic,
        1 - share,
    )


def preparing(group: Group) -> Finding | None:
    """Kernels that only convert, join or copy what attention reads."""
    if not group.preparing or not group.launches:
        return None
    extra = sum(total for _, total in group.preparing.values()) / group.launches
    waste = extra / (extra + group.decode_ns)
    verbs = sorted({PREPARING[role] for role, _ in group.preparing.values()})
    if waste < MIN_WASTE:
        return None
    # A query is 18 KB a request at most; only a cache takes a good part of attention's own time.
    whole = extra > 0.25 * group.attention_ns and group.attention_ns > 20_000
    what = (
        "a whole cache is converted for each layer"
        if whole
        else "the query is prepared by kernels of their own"
    )
    names = ", ".join(
        f"{role} {total / group.launches / 1e3:.1f} us" for role, total in group.preparing.values()
    )
    return Finding(
        "preparing",
        f"Before every attention a kernel {' and another '.join(verbs)}: {what} "
        f"({extra / group.decode_ns:.0%} of attention's own time).",
        group.evidence,
        f"{names} per layer; {extra / 1e3:.1f} / ({extra / 1e3:.1f} + {group.decode_ns / 1e3:.1f}) us = {waste:.0%}",
        waste,
    )


def query_dtype(group: Group) -> Finding | None:
    """A query that is rounded for the kernel's sake."""
    w, kernel = group.workload, group.kernel
    if kernel.q_dtype != "fp8" or w.q not in (None, "bf16", "fp16"):
        return None
    if w.q is None and not any(role == "quantize" for role, _ in group.preparing.values()):
        return None
    return Finding(
        "query-quantised",
        f"The query is rounded to fp8 because {kernel.short} takes no other: speed bought with accuracy.",
        group.evidence,
        f"query {w.q or 'quantised by a kernel before attention'}, kernel reads {kernel.q_dtype} x {kernel.kv_dtype}",
    )  # fmt: skip


def merge(group: Group) -> Finding | None:
    """A merge that costs more than the split may have saved."""
    if not group.merge:
        return None
    waste = group.merge_ns / group.decode_ns
    if waste < MERGE_SHARE:
        return None
    grid = "unknown grid" if group.merge_grid is None else f"grid {group.merge_grid}"
    return Finding(
        "merge",
        f"Merging the splits takes {waste:.0%} of decode: too many splits, or a merge by too few programs.",
        group.evidence,
        f"merge ({grid}) {group.merge_ns / 1e3:.1f} / (attention {group.attention_ns / 1e3:.1f} + merge "
        f"{group.merge_ns / 1e3:.1f}) us = {waste:.0%}; more than {MERGE_SHARE:.0%}",
        waste,
    )


def imbalance(group: Group) -> Finding | None:
    """Every request is cut into as many pieces, whatever its length: the pieces of the longest take longest."""
    w, kernel = group.workload, group.kernel
    if kernel.persistent is not False or not {"request", "split"} <= set(kernel.grid_axes):
        return None
    if group.grid is None or not w.context or not w.longest:
        return None
    splits = group.grid[kernel.grid_axes.index("split")]
    waste = 1 - w.context / w.longest
    if waste < MIN_WASTE:
        return None
    return Finding(
        "imbalance",
        f"Every request gets {count(splits, 'split')}, long or short: {waste:.0%} of the programs' time is "
        "waiting for those of the longest request.",
        group.evidence,
        f"the longest request has {w.longest} / {splits} = {w.longest // splits} tokens a program, the mean "
        f"{w.context // splits}: 1 - {w.context}/{w.longest} = {waste:.0%}",
        waste,
    )


def gap(group: Group) -> Finding | None:
    """Idle time between the kernel before attention and attention."""
    if not group.gap:
        return None
    idle = median(group.gap)
    waste = idle / (idle + group.decode_ns) if group.decode_ns else 0.0
    if idle < MIN_GAP_NS or waste < MIN_WASTE:
        return None
    return Finding(
        "gap",
        f"The GPU idles {idle / 1e3:.1f} us before every attention: the host launches late (a graph, or a "
        "dependent launch, closes this).",
        group.evidence,
        f"after {', '.join(sorted(group.before)[:3])}: median of {len(group.gap)} gaps; {idle / 1e3:.1f} / "
        f"({idle / 1e3:.1f} + {group.decode_ns / 1e3:.1f}) us = {waste:.0%}",
        waste,
    )


def longest(groups: list[Group]) -> Finding | None:
    """Time that follows the longest request instead of the total: several workloads of one kernel tell."""
    pairs = [
        (a, b) for a in groups for b in groups
        if a is not b and a.kernel.text == b.kernel.text and a.decode_ns
        and a.workload.total and b.workload.total
    ]  # fmt: skip
    follows = {a.kernel.text for a, b in pairs if _grows_with_length(a, b)}
    found = filter(
        None, (_more_tokens(a, b, a.kernel.text in follows) or _one_long(a, b) for a, b in pairs)
    )
    return max(found, key=lambda f: f.waste or 0.0, default=None)


def _ratios(a: Group, b: Group) -> tuple[float, float, float]:
    """Of b over a: tokens, longest request, time."""
    longest_a = a.workload.longest or a.workload.context or 1
    longest_b = b.workload.longest or b.workload.context or 1
    tokens = (b.workload.total or 1) / (a.workload.total or 1)
    return tokens, longest_b / longest_a, b.decode_ns / a.decode_ns


def _grows_with_length(a: Group, b: Group) -> bool:
    _, length, time = _ratios(a, b)
    return length >= 2 and time >= 0.6 * length


def _more_tokens(a: Group, b: Group, follows: bool) -> Finding | None:
    """More requests of the same length in nearly the same time: a wastes what b uses."""
    tokens, length, time = _ratios(a, b)
    if tokens < 3 or abs(length - 1) > 0.1 or time > SAME_TIME:
        return None
    waste = 1 - time / tokens
    what = "follows the longest request, not the total" if follows else "does not follow the total"
    return Finding(
        "longest",
        f"Time {what}: {tokens:.0f}x the tokens take {time:.2f}x the time.",
        f"{a.evidence} | {b.evidence}",
        f"{a.workload}: {a.decode_ns / 1e3:.1f} us; {b.workload}: {b.decode_ns / 1e3:.1f} us. At the pace of the "
        f"second the first would take {b.decode_ns / tokens / 1e3:.1f} us: {waste:.0%} less",
        waste,
    )


def _one_long(a: Group, b: Group) -> Finding | None:
    """As many tokens, but one request holds most of them: b waits for it."""
    tokens, length, time = _ratios(a, b)
    if abs(tokens - 1) > 0.1 or length < 2 or time < SAME_TIME:
        return None
    return Finding(
        "longest",
        f"Time follows the longest request, not the total: as many tokens take {time:.2f}x the time when one "
        f"request is {length:.0f}x as long as the others were.",
        f"{a.evidence} | {b.evidence}",
        f"{a.workload}: {a.decode_ns / 1e3:.1f} us; {b.workload}: {b.decode_ns / 1e3:.1f} us: "
        f"1 - 1/{time:.2f} = {1 - 1 / time:.0%}",
        1 - 1 / time,
    )


def amdahl(timeline: Timeline, given: Workload) -> Finding | None:
    """What attention is of a step, and what a kernel twice as fast would give end to end."""
    shares: dict[Workload, list[float]] = defaultdict(list)
    for step, span in step_spans(timeline):
        own = sum(timeline.dur(p) for x in step.layers for p in (x.at, *x.merges))
        shares[workload_of(step, given)].append(min(1.0, own / span) if span else 0.0)
    if not shares:
        return None
    by_workload = {w: median(s) for w, s in shares.items()}
    workload, share = max(by_workload.items(), key=lambda item: item[1])
    others = ", ".join(f"{w}: {s:.0%}" for w, s in by_workload.items() if w != workload)
    return Finding(
        "amdahl",
        f"Attention is {share:.0%} of a step; a kernel twice as fast makes the step "
        f"{1 / (1 - share / 2):.2f}x as fast.",
        f"{len(shares[workload])} steps of {timeline.layers_per_step} layers; {workload}",
        f"median share of the time between steps; 1 / (1 - {share:.3f} / 2) = {1 / (1 - share / 2):.3f}"
        + (f" ({others})" if others else ""),
    )


def find(
    groups: list[Group], gpu: Gpu | None, timeline: Timeline | None, given: Workload
) -> list[Finding]:
    """All findings, the largest waste first. Of each kind one a kernel: where most time is wasted."""
    checks: tuple[Callable[[Group], Finding | None], ...] = (
        pad, lambda g: parallel(g, gpu), lambda g: bandwidth(g, gpu), preparing, query_dtype, merge, imbalance,
        gap,
    )  # fmt: skip
    worst: dict[tuple[str, str], tuple[float, Finding]] = {}
    for group in groups:
        for finding in filter(None, (check(group) for check in checks)):
            key, lost_ns = (finding.id, group.kernel.text), (finding.waste or 0.0) * group.total_ns
            if key not in worst or lost_ns > worst[key][0]:
                worst[key] = (lost_ns, finding)
    found: Iterable[Finding | None] = [
        *(f for _, f in worst.values()), longest(groups), amdahl(timeline, given) if timeline else None,
    ]  # fmt: skip
    return sorted(filter(None, found), key=lambda f: -(f.waste if f.waste is not None else -1.0))
