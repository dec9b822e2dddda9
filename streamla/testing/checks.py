"""What the cases and the invariants are made of: runs by the public calls, and the comparisons."""

from __future__ import annotations

import dataclasses

import torch

from streamla import api
from streamla.arch import arch_of
from streamla.formats import decode_rows
from streamla.plan import DecodePlan, empty_plan, plan_reference
from streamla.reference import gather_rows, visible
from streamla.select import select
from streamla.testing.budget import Deviation, assert_within_budget, expect
from streamla.testing.build import Inputs, build
from streamla.testing.canary import HUGE_BYTE, NAN_BYTE, guarded_plan
from streamla.testing.cases import Case


def check_case(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Raise AssertionError if `impl` fails `case`; the nearest approach to a budget if not."""
    inputs = build(case, device, seed, poison=case.poisons[0])
    expected = expect(inputs)
    small = inputs.kv_cache.numel() < 1 << 28
    before = {name: t.clone() for name, t in _read_only(inputs).items()} if small else {}

    plan = guarded(inputs, impl, NAN_BYTE)
    check_plan(plan, inputs.cache_seqlens)
    out, lse = inputs.outputs()
    decode(inputs, plan, out=out, lse=lse, return_lse=True)
    deviation = assert_within_budget(out, lse, expected, case.lse_base)
    check_one_key(inputs, out)
    if case.data == "identical":
        check_identical(out, lse)

    # Other poison, other pages, other garbage; outputs allocated. Not a bit may change.
    other = build(case, device, seed, poison=case.poisons[-1], placement="high", garbage=-1)
    other_plan = guarded(other, impl, HUGE_BYTE)
    again, again_lse = decode(other, other_plan, return_lse=True)
    assert_same_bits("out", again, out, "other poison, pages and workspace")
    assert_same_bits("lse", again_lse, lse, "other poison, pages and workspace")
    del other, other_plan

    # The two stages apart, on the same plan, over outputs that hold large finite values.
    staged, staged_lse = inputs.outputs(HUGE_BYTE)
    api.attention(
        inputs.q.contiguous(), inputs.kv_cache, inputs.page_table, plan,
        **inputs.options | {"q_pe": contiguous(inputs.q_pe)}, out=staged, lse=staged_lse,
    )  # fmt: skip
    api.merge(plan, staged, staged_lse, lse_base=case.lse_base)
    assert_within_budget(staged, staged_lse, expected, case.lse_base)

    # A plan serves every layer, and a lse that is not asked for changes nothing.
    assert_same_bits("out", decode(inputs, plan), out, "the plan's second use, without lse")
    inputs.check_canaries()
    for name, then in before.items():
        assert torch.equal(_read_only(inputs)[name], then), f"{name}: an input was written"
    return deviation


def decode(inputs: Inputs, plan: DecodePlan, **kwargs):
    """api.decode of `inputs`."""
    return api.decode(
        inputs.q, inputs.kv_cache, inputs.page_table, plan, **inputs.options, **kwargs
    )


def guarded(inputs: Inputs, impl: str, byte: int) -> DecodePlan:
    """A plan for `inputs` whose buffers lie between canaries and were full of `byte`."""
    case, spec, device = inputs.case, inputs.spec, inputs.q.device
    arch = arch_of(device)
    chosen = select(spec, arch, impl)
    cost = chosen.load().cost_model(spec, arch)
    plan = empty_plan(
        len(case.lengths), spec, chosen.name, cost, device, case.max_seqlen, case.batch_invariant
    )
    return api.plan(
        inputs.cache_seqlens, spec, impl=impl, max_seqlen=case.max_seqlen,
        batch_invariant=case.batch_invariant, out=guarded_plan(plan, inputs.canaries, byte),
    )  # fmt: skip


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def check_plan(plan: DecodePlan, cache_seqlens: torch.Tensor, *, used: bool = False) -> None:
    """The device planner equals the reference, item for item.

    `used`: attention has run on the plan, and its counters are as that left them.
    """
    expected = empty_plan(
        plan.batch, plan.spec, plan.impl, plan.cost, torch.device("cpu"), plan.max_seqlen,
        plan.batch_invariant,
    )  # fmt: skip
    plan_reference(cache_seqlens.cpu(), expected)
    names = ("work", "work_indptr", "split_indptr", "status", "counters")
    for name in names[:-1] if used else names:
        actual, want = getattr(plan, name).cpu(), getattr(expected, name)
        assert torch.equal(actual, want), f"plan.{name}: {_first_difference(actual, want)}"


def _first_difference(actual: torch.Tensor, want: torch.Tensor) -> str:
    if actual.shape != want.shape:
        return f"shape {tuple(actual.shape)}, not {tuple(want.shape)}"
    at = int((actual != want).nonzero()[0, 0])
    return f"row {at} is {actual[at].tolist()}, not {want[at].tolist()}"


def check_one_key(inputs: Inputs, out: torch.Tensor) -> None:
    """A query that sees one key returns it: the stored value times its scale, rounded once."""
    case, spec = inputs.case, inputs.spec
    for b, seqlen in enumerate(case.lengths):
        for s in range(spec.seqlen_q):
            if visible(seqlen, s, spec.seqlen_q, case.causal) != 1:
                continue
            row = gather_rows(inputs.kv_cache, inputs.page_table[b], 0, 1)
            exact = decode_rows(row, spec, inputs.k_scale)[0, : spec.kv_lora_rank]
            if not exact.isfinite().all():
                continue
            want = exact.float().bfloat16().expand(spec.num_heads, -1)
            sees = torch.cat(inputs.q_halves, -1)[b, s].isfinite().all(-1)
            wrong = (out[b, s] != want)[sees]
            assert not wrong.any(), (
                f"request {b}, query {s} sees one key: {int(wrong.sum())} elements are not that key"
            )


def check_identical(out: torch.Tensor, lse: torch.Tensor) -> None:
    for name, tensor in (("out", out), ("lse", lse)):
        for b in range(1, len(tensor)):
            assert_same_bits(name, tensor[b], tensor[0], f"requests {b} and 0 are the same")


def assert_same_bits(name: str, actual: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal to the last bit; any NaN equals any other."""
    integer = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    differs = actual.contiguous().view(integer) != want.contiguous().view(integer)
    differs &= ~(actual.isnan() & want.isnan())
    if differs.any():
        rows = sorted({index[0] for index in differs.nonzero().tolist()[:1000]})[:4]
        largest = (actual.double() - want.double()).abs().nan_to_num(nan=torch.inf).max()
        raise AssertionError(
            f"{name}: {int(differs.sum())} elements differ between runs ({what}), first in requests "
            f"{rows}, by at most {float(largest):.3e}"
        )


def _read_only(inputs: Inputs) -> dict[str, torch.Tensor]:
    """What no call may write, as bytes."""
    tensors = {
        "q": inputs.q,
        "q_pe": inputs.q_pe,
        "kv_cache": inputs.kv_cache,
        "page_table": inputs.page_table,
        "cache_seqlens": inputs.cache_seqlens,
    }
    return {name: t.view(torch.uint8) for name, t in tensors.items() if t is not None}


def with_lengths(inputs: Inputs, lengths: tuple[int, ...]) -> Inputs:
    """The same tensors with other lengths, none longer than the pages that `inputs` holds."""
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=inputs.cache_seqlens.device)
    case = dataclasses.replace(inputs.case, lengths=lengths)
    return dataclasses.replace(inputs, case=case, cache_seqlens=seqlens)
