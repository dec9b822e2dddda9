"""`streamla plan`: what the planner would do with these lengths on that GPU. Needs no GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamla.cli import console

if TYPE_CHECKING:
    import torch

    from streamla.arch import Arch
    from streamla.bench.workloads import Workload
    from streamla.plan import CostModel, DecodePlan


@dataclass(frozen=True)
class PlanFacts:
    """One planned shape.

    Attributes:
        share_*: units (tiles, and what going on to the next request costs) that the planner gives a program;
            None for a batch-invariant plan, which gives equal numbers of pieces instead.
        tiles_*: tiles of a busy program. balance: their mean over their largest.
        splits: of each split request. merged_slots: partials that the merge reads.
        floor_us: the bytes at the GPU's read rate, None if that is not known.
    """

    shape: str
    requests: int
    tokens: int
    items: int
    programs: int
    programs_busy: int
    tile_n: int
    share_min: int | None
    share_max: int | None
    tiles_min: int
    tiles_max: int
    balance: float
    requests_split: int
    splits: list[int]
    merged_slots: int
    bytes: int
    floor_us: float | None
    roof: str | None


def plan(
    contexts: Annotated[str, typer.Option(help="Tokens a request; several: 32K,128K.")] = "128K",
    requests: Annotated[str, typer.Option(help="Requests in the batch; several: 1,16.")] = "16",
    lengths: Annotated[str | None, typer.Option(help="One ragged batch: 5,8192,0.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Ragged batches of a Mooncake JSONL trace.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests held at once, with --trace.")] = "16",
    device: Annotated[str, typer.Option(help="h200, h100, mi300x, mi325x or cpu.")] = "h200",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    fmt: Annotated[str, typer.Option("--format", help="Cache format.")] = "fp8_e4m3fn",
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    seqlen_q: Annotated[int, typer.Option(help="Query tokens a request.")] = 1,
    impl: Annotated[str, typer.Option(help="Whose cost model; auto is what would run.")] = "auto",
    programs: Annotated[
        int | None, typer.Option(help="Programs, in place of the cost model's.")
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option(help="Split by each request's own length only.")
    ] = False,
    json: console.JsonOption = None,
) -> None:
    """Print the plan of a batch: items, balance, splits, bytes and the time to read them."""
    import torch

    from streamla.arch import arch_by_name
    from streamla.bench.workloads import Workload
    from streamla.plan import empty_plan, plan_reference
    from streamla.spec import MLASpec

    arch = arch_by_name(device)
    spec = MLASpec(heads, fmt, page_size=page_size, seqlen_q=seqlen_q)
    if trace is not None:
        from streamla.bench.trace import ragged

        workloads = ragged(trace, spec, console.integers("concurrency", concurrency))[0]
    elif lengths is not None:
        workloads = [Workload("plan", spec, tuple(console.integers("lengths", lengths)))]
    else:
        workloads = [
            Workload("plan", spec, (n,) * r)
            for n in console.integers("contexts", contexts)
            for r in console.integers("requests", requests)
        ]

    name, cost = _cost_model(spec, arch, impl)
    if programs is not None:
        if programs < 1:
            raise ValueError(f"programs: need >= 1; got {programs}")
        cost = replace(cost, num_programs=programs)
    facts = []
    for workload in workloads:
        seqlens = torch.tensor(workload.lengths, dtype=torch.int32)
        buffers = empty_plan(workload.requests, spec, name, cost, torch.device("meta"),
                             batch_invariant=batch_invariant)  # fmt: skip
        facts.append(_facts(plan_reference(seqlens, _on_cpu(buffers)), workload, arch))

    document = {
        "device": arch.name,
        "impl": name,
        "cost": asdict(cost),
        "plans": [asdict(f) for f in facts],
    }
    console.write_json(document, json)
    if not console.quiet(json):
        _print(facts, f"{name} on {arch.name}, {heads} heads, {fmt}, page {page_size}", cost, arch)


def _cost_model(spec, arch: Arch, impl: str) -> tuple[str, CostModel]:
    from streamla.select import select

    chosen = select(spec, arch, impl)
    return chosen.name, chosen.load().cost_model(spec, arch)


def _on_cpu(plan: DecodePlan) -> DecodePlan:
    """The plan with index tables on the CPU; the partials stay without memory."""
    import torch

    def table(name: str) -> torch.Tensor:
        return torch.empty_like(getattr(plan, name), device="cpu")

    return replace(
        plan,
        work=table("work"),
        work_indptr=table("work_indptr"),
        split_indptr=table("split_indptr"),
        status=table("status"),
        counters=table("counters"),
    )


def _facts(plan: DecodePlan, workload: Workload, arch: Arch) -> PlanFacts:
    from streamla.bench.run import roof
    from streamla.bench.workloads import tokens_text

    tile_n = plan.cost.tile_n
    bounds = plan.work_indptr.tolist()
    tiles = [-(-(end - begin) // tile_n) for _, begin, end, *_ in plan.work[: bounds[-1]].tolist()]
    shares = [sum(tiles[a:b]) for a, b in pairwise(bounds) if b > a]
    share = _share(plan.cost, workload.lengths) if not plan.batch_invariant else (None, None)
    splits = [n for n in plan.split_indptr.diff().tolist() if n]
    even = len(set(workload.lengths)) <= 1
    longest = tokens_text(workload.context)
    return PlanFacts(
        shape=f"{longest} x {workload.requests}"
        if even
        else f"{min(workload.lengths)}-{longest} x {workload.requests}",
        requests=workload.requests,
        tokens=workload.tokens,
        items=bounds[-1],
        programs=plan.cost.num_programs,
        programs_busy=len(shares),
        tile_n=tile_n,
        share_min=share[0],
        share_max=share[1],
        tiles_min=min(shares, default=0),
        tiles_max=max(shares, default=0),
        balance=sum(shares) / (len(shares) * max(shares)) if any(shares) else 1.0,
        requests_split=len(splits),
        splits=splits,
        merged_slots=sum(splits),
        bytes=workload.bytes,
        floor_us=workload.bytes / arch.read_bytes_per_s * 1e6 if arch.read_bytes_per_s else None,
        roof=roof(workload, arch),
    )


def _share(cost: CostModel, lengths: tuple[int, ...]) -> tuple[int, int]:
    from streamla.plan import active_programs, total_units

    units = total_units([max(1, -(-n // cost.tile_n)) for n in lengths], cost)
    programs = active_programs(units, cost)
    return units // programs, -(-units // programs)


def _print(facts: list[PlanFacts], title: str, cost: CostModel, arch: Arch) -> None:
    from streamla.bench.report import plain_table, three_digits

    table = plain_table(title)
    table.add_column("lengths", no_wrap=True)
    columns = ("items", "busy", "share", "tiles", "balance", "split", "splits", "MB", "floor us")
    for name in (*columns, "roof"):
        table.add_column(name, justify="right", no_wrap=True)
    for f in facts:
        table.add_row(
            f.shape, str(f.items), f"{f.programs_busy}/{f.programs}",
            "-" if f.share_min is None else _range(f.share_min, f.share_max),
            _range(f.tiles_min, f.tiles_max), f"{f.balance:.1%}", str(f.requests_split),
            _range(min(f.splits, default=1), max(f.splits, default=1)), three_digits(f.bytes / 1e6),
            "-" if f.floor_us is None else three_digits(f.floor_us), f.roof or "-",
        )  # fmt: skip
    console.out.print(table, highlight=False)
    console.out.print(
        f"A tile is {cost.tile_n} tokens; going on to the next request costs {cost.overhead_tiles} more. share: what the "
        f"planner gives a program; tiles: what of it is tiles; balance: their mean over their largest. split: "
        f"requests that several programs read, in so many splits each. floor: the bytes at "
        f"{arch.read_bytes_per_s / 1e12:.2f} TB/s ({arch.source}).",
        style="dim", highlight=False,
    )  # fmt: skip


def _range(low: int | None, high: int | None) -> str:
    return str(low) if low == high else f"{low}-{high}"
