"""The error budget bites: common faults are over it, correct kernels are well within."""

import dataclasses

import pytest
import torch

from streamla import reference
from streamla.arch import CPU
from streamla.plan import empty_plan
from streamla.testing.budget import (
    assert_within_budget,
    expect,
    lse_deviation,
    out_deviation,
    relative_error,
)
from streamla.testing.build import build
from streamla.testing.canary import Canaries
from streamla.testing.cases import Case
from streamla.testing.checks import assert_same_bits, check_plan

CASE = Case("", "", (400, 1500), kv_format="fp8_e4m3fn", data="normal")


def run(inputs, *, lengths=None, scale=1.0, k_scale=None, drop_split=False, causal=True):
    """The CPU implementation on these inputs, with a fault if asked for."""
    spec = inputs.spec
    cost = reference.cost_model(spec, CPU)
    plan = empty_plan(len(inputs.case.lengths), spec, "reference", cost, torch.device("cpu"))
    seqlens = inputs.cache_seqlens if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    reference.plan(seqlens, plan)
    out, lse = inputs.outputs()
    arguments = (
        *inputs.q_halves, inputs.kv_cache, inputs.k_scale if k_scale is None else k_scale,
        inputs.page_table, plan, out, lse, inputs.softmax_scale * scale, causal, 1.0,
    )  # fmt: skip
    reference.attention(*arguments)
    if drop_split:
        plan.lse_partial[int(plan.split_indptr[-1]) - 1] = -torch.inf
    reference.merge(plan, out, lse, 1.0)
    return out, lse


@pytest.fixture(scope="module")
def inputs():
    return build(CASE, "cpu", seed=11)


@pytest.fixture(scope="module")
def expected(inputs):
    return expect(inputs)


def test_the_right_result_is_within_half_the_budget(inputs, expected):
    deviation = assert_within_budget(*run(inputs), expected)
    assert deviation.used < 0.5
    assert relative_error(run(inputs)[0], expected.out) < 2e-3


@pytest.mark.parametrize(
    "fault",
    [
        {"lengths": (399, 1500)},
        {"lengths": (400, 1499)},
        {"scale": 1.01},
        {"scale": (192 / 576) ** 0.5},
        {"k_scale": torch.tensor([0.375])},
        {"k_scale": torch.tensor([1.0])},
        {"drop_split": True},
    ],
    ids=["one-token-short", "one-token-short-of-a-split-request", "scale-1%", "scale-of-head-dim",
         "k_scale-1%", "k_scale-missing", "dropped-split"],
)  # fmt: skip
def test_a_fault_is_over_the_budget(inputs, expected, fault):
    out, lse = run(inputs, **fault)
    assert not out_deviation(out, expected).within
    assert not lse_deviation(lse, expected, "e").within


def test_two_swapped_heads_are_over_the_budget(inputs, expected):
    out, lse = run(inputs)
    order = list(range(CASE.num_heads))
    order[3], order[4] = order[4], order[3]
    assert not out_deviation(out[:, :, order], expected).within
    assert not lse_deviation(lse[:, :, order], expected, "e").within


def test_one_wrong_row_among_thousands_is_over_the_budget():
    inputs = build(Case("", "", (20,) * 64, num_heads=32, kv_lora_rank=64), "cpu", seed=3)
    expected = expect(inputs)
    out, _ = run(inputs)
    assert out_deviation(out, expected).within
    out[37, 0, 5] *= 1.02
    assert not out_deviation(out, expected).within


def test_a_causal_mask_that_is_ignored_is_over_the_budget():
    inputs = build(dataclasses.replace(CASE, seqlen_q=3), "cpu", seed=4)
    out, lse = run(inputs, causal=False)
    expected = expect(inputs)
    assert not out_deviation(out, expected).within
    assert not lse_deviation(lse, expected, "e").within


def test_the_wrong_lse_base_is_over_the_budget(inputs, expected):
    _, lse = run(inputs)
    assert not lse_deviation(lse, expected, "2").within
    assert lse_deviation(lse * torch.tensor(2.0).log().reciprocal(), expected, "2").within


def test_an_lse_may_lose_what_float32_sums_of_large_products_lose():
    """Products of 1e4 that cancel to a score of 30: no float32 sum is right to 1e-3, and none is wrong by 1e-1."""
    case = dataclasses.replace(CASE, lengths=(1,) * 64, data="all-bytes", k_scale=16.2)
    inputs = build(case, "cpu", seed=2)
    expected = expect(inputs)
    out, lse = run(inputs)
    assert_within_budget(out, lse, expected)
    small = expected.lse.isfinite() & (expected.lse.abs() < 100)
    assert small.any()
    lse[small] += 0.1
    assert not lse_deviation(lse, expected, "e").within


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_over_the_budget(inputs, expected, value):
    out, lse = run(inputs)
    out[1, 0, 2, 7] = value
    lse[1, 0, 2] = value
    assert not out_deviation(out, expected).within
    assert not lse_deviation(lse, expected, "e").within


def test_a_finite_value_where_the_oracle_has_none_is_over_the_budget():
    inputs = build(dataclasses.replace(CASE, lengths=(65, 130), data="nan-row"), "cpu", seed=5)
    expected = expect(inputs)
    out, lse = run(inputs)
    assert out_deviation(out, expected).within
    assert not out_deviation(out.nan_to_num(), expected).within
    assert not lse_deviation(lse.nan_to_num(), expected, "e").within


def test_an_empty_row_must_be_zero_and_minus_infinity():
    inputs = build(dataclasses.replace(CASE, lengths=(0, 5)), "cpu", seed=6)
    expected = expect(inputs)
    out, lse = run(inputs)
    assert_within_budget(out, lse, expected)
    assert not out_deviation(out + 1e-30, expected).within
    for wrong in (torch.inf, 0.0, -3e38):
        lse[0] = wrong
        assert not lse_deviation(lse, expected, "e").within


def test_canaries_see_a_byte_on_either_side():
    for offset in (-1, 4 * 6):
        canaries = Canaries()
        tensor = canaries.empty("lse", (2, 3), torch.float32, torch.device("cpu"), 0xFF)
        assert tensor.isnan().all()
        tensor.fill_(1.0)
        canaries.check()
        whole = tensor.view(-1).view(torch.uint8)
        whole.as_strided((1,), (1,), whole.storage_offset() + offset).fill_(0)
        with pytest.raises(AssertionError, match="lse: 1 bytes written"):
            canaries.check()


def test_same_bits_sees_one_bit_and_forgives_another_nan():
    a = torch.tensor([1.0, torch.nan, 0.0])
    b = torch.tensor([0x3F800000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    assert_same_bits("out", a, b, "test")
    b.view(torch.int32)[0] += 1
    with pytest.raises(AssertionError, match="out: 1 elements differ"):
        assert_same_bits("out", a, b, "test")
    with pytest.raises(AssertionError):
        assert_same_bits("out", a, a * torch.tensor([1, 1, -1]), "minus zero")


def test_check_plan_sees_a_wrong_item():
    spec = CASE.spec
    plan = empty_plan(2, spec, "reference", reference.cost_model(spec, CPU), torch.device("cpu"))
    seqlens = torch.tensor([400, 1500], dtype=torch.int32)
    reference.plan(seqlens, plan)
    check_plan(plan, seqlens)
    plan.work[3, 2] -= 1
    with pytest.raises(AssertionError, match=r"plan.work: row 3"):
        check_plan(plan, seqlens)
