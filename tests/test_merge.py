"""The merge alone: empty partials, bases, long chains, in place, repeatable."""

import math

import pytest
import torch

import streamla
from streamla.arch import arch_of
from streamla.plan import CostModel, empty_plan
from streamla.reference import merge_reference
from streamla.select import IMPLS
from streamla.spec import MLASpec
from streamla.testing.canary import Canaries

INF = math.inf
SPEC = MLASpec(num_heads=3, kv_lora_rank=32, qk_rope_head_dim=16)
CHAINS = (1, 2, 33, 257)


# Every kernel that merges, at small widths where it takes them.
KERNELS = {
    "sm90": ("sm90", MLASpec(num_heads=16, kv_format="fp8_e4m3fn")),
    "sm90-64-rows": ("sm90", MLASpec(num_heads=64, kv_format="fp8_e4m3fn")),
    "reference": ("reference", SPEC),
    "portable": ("portable", SPEC),
}


@pytest.fixture(params=KERNELS)
def kernel(request, device):
    impl, spec = KERNELS[request.param]
    chosen = next(i for i in IMPLS if i.name == impl)
    if (reason := chosen.why_not(spec, arch_of(device))) is not None:
        pytest.skip(reason)
    return request.param


def plan_of_chains(kernel, chains, device):
    """A plan whose request b has chains[b] partial slots (0: the request was not split)."""
    impl, spec = KERNELS[kernel]
    cost = CostModel(tile_n=64, num_programs=sum(chains) + len(chains) + 1)
    plan = empty_plan(len(chains), spec, impl, cost, device)
    plan.split_indptr.copy_(torch.tensor([0, *chains]).cumsum(0))
    plan.out_partial.fill_(torch.nan)
    plan.lse_partial.fill_(torch.nan)
    plan.counters.zero_()
    return plan


def outputs(plan, canaries):
    rows = (plan.batch, plan.spec.seqlen_q, plan.spec.num_heads)
    out = canaries.empty("out", (*rows, plan.spec.kv_lora_rank), torch.bfloat16, plan.device, 0xFF)
    return out, canaries.empty("lse", rows, torch.float32, plan.device, 0xFF)


def merged(plan, lse_base="e"):
    canaries = Canaries()
    out, lse = outputs(plan, canaries)
    streamla.merge(plan, out, lse, lse_base=lse_base)
    canaries.check()
    return out.double(), lse.double()


def fill(plan, log_masses, values):
    for slot, (log_mass, value) in enumerate(zip(log_masses, values, strict=True)):
        plan.lse_partial[slot] = log_mass
        plan.out_partial[slot] = value


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_empty_partials_is_empty(kernel, device, chain):
    plan = plan_of_chains(kernel, [chain], device)
    fill(plan, [-INF] * chain, [0.0] * chain)
    out, lse = merged(plan)
    assert (out == 0).all()
    assert (lse == -INF).all()


@pytest.mark.parametrize("chain", CHAINS)
def test_an_empty_partial_has_no_weight_whatever_it_holds(kernel, device, chain):
    """0 * NaN is NaN: a slot that saw nothing must not be multiplied in."""
    plan = plan_of_chains(kernel, [chain + 1], device)
    for place in (0, chain // 2, chain):
        log_masses, values = [-INF] * (chain + 1), [torch.nan] * (chain + 1)
        log_masses[place], values[place] = 1.5, 0.25
        fill(plan, log_masses, values)
        out, lse = merged(plan)
        assert (out == 0.25).all()
        assert (lse - 1.5).abs().max() < 1e-6


@pytest.mark.parametrize("order", [(1.5, -INF), (-INF, 1.5), (1.5, INF), (INF, 1.5)])
def test_a_finite_partner_of_an_empty_row_is_the_result(kernel, device, order):
    """Some libraries write +inf for an empty row: it must count as empty, never take all the weight."""
    plan = plan_of_chains(kernel, [2], device)
    fill(plan, order, [0.5 if math.isfinite(x) else 7.0 for x in order])
    out, lse = merged(plan)
    assert (out == 0.5).all()
    assert (lse - 1.5).abs().max() < 1e-6


def test_plus_infinity_alone_is_empty(kernel, device):
    plan = plan_of_chains(kernel, [2], device)
    fill(plan, (INF, INF), (1.0, 2.0))
    out, lse = merged(plan)
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_masses_1_and_3_weigh_1_and_3(kernel, device):
    """Outputs 0 and 1 give 0.75; in the wrong base 0.6817 or 0.8299."""
    plan = plan_of_chains(kernel, [2], device)
    fill(plan, (0.0, math.log(3.0)), (0.0, 1.0))
    out, lse = merged(plan)
    assert (out == 0.75).all()
    assert (lse - math.log(4.0)).abs().max() < 1e-6
    out, lse = merged(plan, lse_base="2")
    assert (out == 0.75).all()
    assert (lse - 2.0).abs().max() < 1e-6


@pytest.mark.parametrize("offset", [300.0, -300.0, 1e4, -1e4, 80.0])
def test_a_large_common_offset_changes_no_weight(kernel, device, offset):
    chain = 16
    plan = plan_of_chains(kernel, [chain], device)
    fill(plan, [offset] * chain, [float(k) for k in range(chain)])
    out, lse = merged(plan)
    assert (out == (chain - 1) / 2).all()
    assert (lse - offset - math.log(chain)).abs().max() < 1e-3


def test_requests_that_were_not_split_are_left_alone(kernel, device):
    plan = plan_of_chains(kernel, [0, 2, 0], device)
    fill(plan, (0.0, 0.0), (1.0, 3.0))
    out, lse = outputs(plan, Canaries())
    out.fill_(5.0)
    lse.fill_(6.0)
    streamla.merge(plan, out, lse)
    assert (out[0] == 5).all()
    assert (out[2] == 5).all()
    assert (out[1] == 2).all()
    assert (lse[0] == 6).all()
    assert (lse[2] == 6).all()


def test_ranks_without_keys(kernel, device):
    """Five keys over eight ranks: three partials are empty and have no say."""
    plan = plan_of_chains(kernel, [8], device)
    fill(plan, [0.0] * 5 + [-INF] * 3, [1.0, 2.0, 3.0, 4.0, 5.0] + [torch.nan] * 3)
    out, lse = merged(plan)
    assert (out == 3.0).all()
    assert (lse - math.log(5.0)).abs().max() < 1e-6


@pytest.mark.parametrize("chains", [(2, 3, 0, 8), (33, 2)])
def test_random_partials_match_the_oracle_and_repeat(kernel, device, chains, seed):
    plan = plan_of_chains(kernel, chains, device)
    generator = torch.Generator(device).manual_seed(seed)
    count = sum(chains)
    plan.out_partial[:count].normal_(generator=generator)
    plan.lse_partial[:count].normal_(std=4, generator=generator)
    plan.lse_partial[:count:5] = -INF
    out, lse = merged(plan)
    want, want_lse = merge_reference(plan.out_partial, plan.lse_partial, plan.split_indptr)
    split = torch.tensor(chains, device=device) > 0
    assert (out - want)[split].abs().max() < 2**-8 * want.abs().max()
    assert (lse - want_lse)[split].nan_to_num(nan=0.0).abs().max() < 1e-5
    again, again_lse = merged(plan)
    assert torch.equal(again[split], out[split])
    assert torch.equal(again_lse[split], lse[split])


def test_outputs_with_strides(kernel, device):
    """Rows of a wider tensor: only they are written."""
    plan = plan_of_chains(kernel, [2], device)
    fill(plan, (0.0, 0.0), (1.0, 3.0))
    spec = plan.spec
    heads, width = spec.num_heads, spec.kv_lora_rank
    wide = torch.full((1, 1, heads + 2, width + 64), 9.0, dtype=torch.bfloat16, device=device)
    wide_lse = torch.full((1, 1, heads + 2), 9.0, device=device)
    streamla.merge(plan, wide[:, :, :heads, :width], wide_lse[:, :, :heads])
    assert (wide[:, :, :heads, :width] == 2).all()
    assert (wide[:, :, heads:] == 9).all()
    assert (wide[..., width:] == 9).all()
    assert (wide_lse[:, :, heads:] == 9).all()


def test_the_oracle_ignores_slots_of_weight_zero():
    partial = torch.full((3, 1, 1, 2), torch.nan)
    partial[1] = 2.0
    lse = torch.tensor([-INF, 0.5, INF]).reshape(3, 1, 1)
    out, merged_lse = merge_reference(partial, lse, torch.tensor([0, 3, 3], dtype=torch.int32))
    assert (out[0] == 2).all()
    assert (merged_lse[0] == 0.5).all()
    assert (out[1] == 0).all()
    assert (merged_lse[1] == -INF).all()
