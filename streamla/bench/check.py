"""Correctness before speed: a candidate over its error budget gets no time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs
from streamla.testing import budget
from streamla.testing.build import Inputs as CaseInputs
from streamla.testing.canary import Canaries
from streamla.testing.cases import Case

CHECKED_REQUESTS = 3
CHECKED_CALLS = 8  # a race shows in one call and not in the next


@dataclass(frozen=True)
class Checked:
    """How wrong a candidate is.

    Attributes:
        error: |out - oracle| / |oracle| in the 2-norm, over `requests`; infinite if not finite.
        budget_used: share of its error budget that the worst row uses; over 1 is wrong.
        requests: the requests that were compared.
    """

    error: float
    budget_used: float
    requests: list[int]


def sampled_requests(lengths: tuple[int, ...]) -> list[int]:
    """The longest request, the shortest that is not empty, and the one in the middle; all if few."""
    order = sorted((n, b) for b, n in enumerate(lengths) if n)
    if len(order) <= CHECKED_REQUESTS:
        return sorted(b for _, b in order)
    last = len(order) - 1
    places = [i * last // (CHECKED_REQUESTS - 1) for i in range(CHECKED_REQUESTS)]
    return sorted(order[i][1] for i in places)


class Oracle:
    """The oracle's result for a sample of the requests of one shape, on the last region.

    The oracle runs in float64 on the device that is measured: on a CPU the largest shapes would take
    minutes. The last region is what a graph leaves behind, so that the same oracle serves after timing.
    """

    def __init__(self, inputs: Inputs) -> None:
        workload = inputs.workload
        spec = workload.spec
        self.requests = sampled_requests(workload.lengths)
        case = Case(
            name="bench",
            reason="a sample of a benchmark's requests",
            lengths=tuple(workload.lengths[b] for b in self.requests),
            num_heads=spec.num_heads,
            kv_format=inputs.workload.spec.kv_format.value,
            page_size=spec.page_size,
            seqlen_q=spec.seqlen_q,
        )
        self.expected = budget.expect(
            CaseInputs(
                case=case,
                spec=spec,
                q=inputs.q[self.requests],
                q_pe=None,
                kv_cache=inputs.kv_cache,
                page_table=inputs.page_tables[-1][self.requests],
                cache_seqlens=inputs.cache_seqlens[self.requests],
                k_scale=inputs.k_scale,
                canaries=Canaries(),
                softmax_scale=inputs.softmax_scale,
            )
        )

    def check_calls(self, prepared: Prepared, region: int, rounded: float | None) -> Checked:
        """The worst of several calls, each over an `out` full of NaN; one wrong call is enough."""
        worst = Checked(0.0, 0.0, self.requests)
        for _ in range(CHECKED_CALLS):
            prepared.out.fill_(torch.nan)
            prepared(region)
            checked = self.check(prepared.out, rounded)
            worst = max(worst, checked, key=lambda checked: checked.budget_used)
            if not worst.budget_used <= 1:
                break
        return worst

    def check(self, out: torch.Tensor, rounded: float | None) -> Checked:
        """Compare `out`, a result for the last region. Every request must be finite, sampled or not.

        Args:
            rounded: what the error in the 2-norm may be, for a candidate that is not exact; None holds
                it to the error budget of exact arithmetic, row by row.
        """
        if not out.isfinite().all():
            return Checked(float("inf"), float("inf"), self.requests)
        sample = out[self.requests]
        error = budget.relative_error(sample, self.expected.out)
        if rounded is None:
            used = budget.out_deviation(sample, self.expected).used
        else:
            used = error / rounded
        return Checked(error, used, self.requests)
