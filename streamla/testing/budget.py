"""How wrong a result may be: an error budget, not a number someone liked.

The budget of a row (one query of one head) is what an eager PyTorch run with a kernel's usual precisions
loses against the oracle (float32 scores, bfloat16 weights, one rounding of the output), `SLACK`
times over, plus the rounding of the output itself. It is checked row by row, so that one wrong row
among thousands is not averaged away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from streamla.formats import decode_rows
from streamla.reference import attention_reference, gather_rows, visible
from streamla.testing.build import Inputs

SLACK = 2.0
LSE_ABSOLUTE = 1e-3
LSE_RELATIVE = 4e-6  # an lse of 1e4 is known to about 1e-2
# Of what the products of a score add up to without their signs: tensor cores truncate sums to the bits of the largest.
LSE_PRODUCTS = 2.0**-22


@dataclass(frozen=True)
class Deviation:
    """The worst error as it was found and its budget; `of` says of what."""

    error: float
    budget: float
    of: str

    @property
    def within(self) -> bool:
        return self.error <= self.budget

    @property
    def used(self) -> float:
        """Share of the budget that is used."""
        if self.budget:
            return self.error / self.budget
        return torch.inf if self.error > 0 else 0.0


@dataclass(frozen=True)
class Expected:
    """The oracle's result and the eager run's, of one batch of inputs. lse is natural log.

    Attributes:
        products: of every row, the products of its scores added up without their signs, a mean with the weights of
            the keys: what float32 sums of them are relative to.
    """

    out: torch.Tensor
    lse: torch.Tensor
    eager_out: torch.Tensor
    products: torch.Tensor


def expect(inputs: Inputs) -> Expected:
    """Run the oracle and the eager run."""
    q_nope, q_pe = inputs.q_halves
    out, lse = attention_reference(
        q_nope, q_pe, inputs.kv_cache, inputs.k_scale, inputs.page_table, inputs.cache_seqlens,
        inputs.spec, inputs.softmax_scale, inputs.case.causal,
    )  # fmt: skip
    return Expected(out, lse, *eager_attention(inputs))


def eager_attention(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as careful low-precision PyTorch does it: no oracle, but the measure of one. And `Expected.products`."""
    spec, case = inputs.spec, inputs.case
    q = torch.cat(inputs.q_halves, -1).float()
    out = q.new_zeros((*q.shape[:3], spec.kv_lora_rank))
    products = q.new_zeros(q.shape[:3])
    for b, seqlen in enumerate(case.lengths):
        rows = gather_rows(inputs.kv_cache, inputs.page_table[b], 0, seqlen)
        kv = decode_rows(rows, spec, inputs.k_scale).float()
        for s in range(spec.seqlen_q):
            seen = kv[: visible(seqlen, s, spec.seqlen_q, case.causal)]
            if len(seen):
                weights = ((q[b, s] @ seen.T) * inputs.softmax_scale).softmax(-1)
                out[b, s] = weights.bfloat16().float() @ seen[:, : spec.kv_lora_rank]
                sizes = (q[b, s].abs() @ seen.abs().T) * inputs.softmax_scale
                products[b, s] = (weights * sizes).sum(-1)
    return out.bfloat16(), products


def relative_error(out: torch.Tensor, oracle: torch.Tensor) -> float:
    """||out - oracle|| / ||oracle||, the number that the benchmark reports."""
    difference = torch.linalg.vector_norm(out.double() - oracle)
    norm = torch.linalg.vector_norm(oracle)
    return float(difference / norm) if norm else float(difference)


def out_deviation(out: torch.Tensor, expected: Expected) -> Deviation:
    """The row of `out` that uses most of its budget, in L2 or in the largest element.

    A row that the oracle says is not finite must not be finite either, and the other way round.
    """
    if out.numel() == 0:
        return Deviation(0.0, 0.0, "out")
    wrong = out.isfinite() != expected.out.isfinite()
    if wrong.any():
        return Deviation(
            torch.inf, 0.0, f"out: {int(wrong.sum())} elements (not) finite unlike the oracle"
        )

    oracle, eager = expected.out.nan_to_num(), expected.eager_out.double().nan_to_num()
    actual = out.double().nan_to_num()
    eps = torch.finfo(out.dtype).eps
    worst = Deviation(0.0, 0.0, "out")
    # Rounding the output loses at most eps / 4 of its norm, and eps / 2 of an element.
    for norm, rounding in ((2, eps / 4), (torch.inf, eps / 2)):
        error = torch.linalg.vector_norm(actual - oracle, norm, dim=-1)
        budget = SLACK * torch.linalg.vector_norm(eager - oracle, norm, dim=-1)
        budget += rounding * torch.linalg.vector_norm(oracle, norm, dim=-1)
        worst = max(worst, _worst(error, budget, f"out, L{norm} of a row"), key=lambda d: d.used)
    return worst


def lse_deviation(lse: torch.Tensor, expected: Expected, lse_base: str) -> Deviation:
    """The worst element of `lse`, which is in base `lse_base`; -inf must be -inf."""
    if lse.numel() == 0:
        return Deviation(0.0, 0.0, "lse")
    actual = lse.double() * (math.log(2) if lse_base == "2" else 1.0)
    oracle = expected.lse
    for name, value in (("-inf", -torch.inf), ("+inf", torch.inf)):
        wrong = (actual == value) != (oracle == value)
        if wrong.any():
            return Deviation(
                torch.inf, 0.0, f"lse: {int(wrong.sum())} elements {name} unlike the oracle"
            )
    wrong = actual.isnan() != oracle.isnan()
    if wrong.any():
        return Deviation(torch.inf, 0.0, f"lse: {int(wrong.sum())} elements NaN unlike the oracle")
    finite = oracle.isfinite()
    error = torch.where(finite, actual - oracle, 0.0).abs()
    products = expected.products.double().nan_to_num(0.0, 0.0, 0.0)
    budget = LSE_ABSOLUTE + LSE_RELATIVE * torch.where(finite, oracle, 0.0).abs()
    budget += LSE_PRODUCTS * products
    return _worst(error, budget, "lse")


def _worst(error: torch.Tensor, budget: torch.Tensor, of: str) -> Deviation:
    used = torch.where(error == 0, 0.0, error / budget)
    at = int(used.argmax())
    return Deviation(float(error.flatten()[at]), float(budget.flatten()[at]), of)


def assert_within_budget(
    out: torch.Tensor, lse: torch.Tensor | None, expected: Expected, lse_base: str = "e"
) -> Deviation:
    """Raise AssertionError if `out` or `lse` is over its budget; the larger use of a budget if not."""
    deviations = [out_deviation(out, expected)]
    if lse is not None:
        deviations.append(lse_deviation(lse, expected, lse_base))
    for d in deviations:
        assert d.within, f"{d.of}: error {d.error:.3e} > budget {d.budget:.3e}"
    return max(deviations, key=lambda d: d.used)
