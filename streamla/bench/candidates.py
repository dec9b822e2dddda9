"""What is timed: ours and the peers, behind one small interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from streamla import api
from streamla.arch import arch_of
from streamla.bench.inputs import Inputs
from streamla.select import AUTO, IMPLS, select
from streamla.spec import MLASpec
from streamla.version import __version__

NONE = "none"


@dataclass
class Prepared:
    """A candidate ready on one shape.

    Attributes:
        call: runs the op on one region, and returns the result or leaves it in `out`. Nothing else: no
            allocation that a graph could not hold, no host work that a server would do once a step.
        out: (batch, seqlen_q, num_heads, kv_lora_rank): the result of the last call.
        plan: the work of once a step, repeatable; None if there is none.
        plan_on_host: the plan computes or waits on the host, so that no graph can hold it.
        programs, programs_busy, splits: of the plan, where it is known.
    """

    call: Callable[[int], torch.Tensor | None]
    out: torch.Tensor
    plan: Callable[[], None] | None = None
    plan_on_host: bool = False
    programs: int | None = None
    programs_busy: int | None = None
    splits: int | None = None

    def __call__(self, region: int) -> None:
        result = self.call(region)
        if result is not None:
            self.out = result.view(self.out.shape)


class Candidate(Protocol):
    """Something that decodes.

    Attributes:
        name: unique in a run. version: of the library that does the work.
        peer: of another library; its failure is a note in a record, where ours is an error.
        exact: it rounds neither the query nor the cached values further than they come.
        differs: in what its work is not the same, in a few words; None if in nothing.
        cache: "stored" reads the bytes of the workload, "bf16" a copy of its values in bfloat16.
        error_budget: of a candidate that is not exact, what |out - oracle| / |oracle| may be.
    """

    name: str
    version: str
    peer: bool
    exact: bool
    differs: str | None
    cache: str
    error_budget: float | None

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        """Why it cannot take this spec here, in a sentence; None if it can."""

    def prepare(self, inputs: Inputs) -> Prepared:
        """Allocate, plan and compile; nothing here is timed."""


class Streamla:
    """An implementation of this library, through the public API."""

    version = __version__
    peer = False
    exact = True
    differs: str | None = None
    cache = "stored"
    error_budget: float | None = None

    def __init__(self, impl: str) -> None:
        self.name = impl

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        try:
            select(spec, arch_of(device), self.name)
        except ValueError as error:
            return str(error)
        return None

    def prepare(self, inputs: Inputs) -> Prepared:
        spec = inputs.workload.spec
        plan = api.plan(inputs.cache_seqlens, spec, impl=self.name)
        out = torch.empty((*inputs.q.shape[:3], spec.kv_lora_rank), dtype=torch.bfloat16,
                          device=inputs.q.device)  # fmt: skip
        lse = torch.empty(inputs.q.shape[:3], device=inputs.q.device)

        def call(region: int) -> None:
            api.decode(
                inputs.q, inputs.kv_cache, inputs.page_tables[region], plan,
                softmax_scale=inputs.softmax_scale, k_scale=inputs.k_scale,
                out=out, lse=lse, return_lse=True,
            )  # fmt: skip

        def replan() -> None:
            api.plan(inputs.cache_seqlens, spec, impl=self.name, out=plan)

        items = plan.work_indptr.diff()
        splits = plan.split_indptr.diff()
        return Prepared(
            call=call,
            out=out,
            plan=replan,
            programs=plan.cost.num_programs,
            programs_busy=int((items > 0).sum()),
            splits=max(1, int(splits.max())) if splits.numel() else 0,
        )


def first_line(error: BaseException) -> str:
    """The first line of an exception, short enough for a note."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def choose(impls: list[str], device: torch.device) -> Callable[[MLASpec], list[Candidate]]:
    """Our implementations by name, for each spec; "auto" is what would run for it on `device`, "none" is nothing."""
    known = [AUTO, NONE, *(i.name for i in IMPLS)]
    for impl in impls:
        if impl not in known:
            raise ValueError(f"impl: need one of {', '.join(known)}; got {impl!r}")
    impls = [impl for impl in impls if impl != NONE]
    arch = arch_of(device)

    def candidates(spec: MLASpec) -> list[Candidate]:
        names = [select(spec, arch, impl).name if impl == AUTO else impl for impl in impls]
        return [Streamla(name) for name in dict.fromkeys(names)]

    return candidates
