"""The registered operators: what they declare is what they do, and compiled graphs hold them."""

import pytest
import torch

import streamla
from streamla import checks, ops
from streamla.plan import CostModel, empty_plan
from streamla.testing.build import build
from streamla.testing.cases import Case

CASE = Case("", "", (130, 0, 65), num_heads=3, kv_lora_rank=32, qk_rope_head_dim=16)


@pytest.fixture(params=["bf16", "fp8_e4m3fn"])
def inputs(request, seed, device):
    from dataclasses import replace

    return build(replace(CASE, kv_format=request.param), device, seed)


def implementation(device):
    return "reference" if device.type == "cpu" else "portable"


def new_plan(inputs):
    device = inputs.q.device
    return streamla.plan(inputs.cache_seqlens, inputs.spec, impl=implementation(device))


def stage_arguments(inputs, plan):
    out, lse = checks.outputs(None, None, plan)
    out.zero_()
    lse.zero_()
    kv_cache = inputs.kv_cache
    if inputs.spec.kv_format.has_scale:
        kv_cache = kv_cache.view(torch.uint8)  # opcheck cannot compare fp8 tensors
    return (
        *inputs.q_halves, kv_cache, inputs.k_scale, inputs.page_table,
        *ops.plan_arguments(plan), out, lse, inputs.softmax_scale, True, 1.0,
    )  # fmt: skip


def test_opcheck_plan(inputs):
    plan = new_plan(inputs)
    torch.library.opcheck(
        torch.ops.streamla.plan.default, (inputs.cache_seqlens, *ops.plan_arguments(plan))
    )


@pytest.mark.parametrize("stage", ["attention", "decode"])
def test_opcheck_stages(inputs, stage):
    plan = new_plan(inputs)
    plan.out_partial.zero_()  # opcheck compares all that is written, and NaN differs from NaN
    plan.lse_partial.zero_()
    torch.library.opcheck(getattr(torch.ops.streamla, stage).default, stage_arguments(inputs, plan))


def test_opcheck_merge(inputs):
    plan = new_plan(inputs)
    plan.out_partial.zero_()
    plan.lse_partial.zero_()
    arguments = stage_arguments(inputs, plan)
    torch.ops.streamla.attention(*arguments)
    torch.library.opcheck(
        torch.ops.streamla.merge.default,
        (*ops.plan_arguments(plan), arguments[-5], arguments[-4], 1.0),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_step_compiles_without_a_break(inputs, backend):
    impl = implementation(inputs.q.device)

    def step(q, kv_cache, page_table, cache_seqlens, k_scale):
        plan = streamla.plan(cache_seqlens, inputs.spec, impl=impl)
        return streamla.decode(
            q, kv_cache, page_table, plan, softmax_scale=inputs.softmax_scale, k_scale=k_scale,
            return_lse=True,
        )  # fmt: skip

    tensors = (
        inputs.q, inputs.kv_cache, inputs.page_table, inputs.cache_seqlens, inputs.k_scale,
    )  # fmt: skip
    want, want_lse = step(*tensors)
    torch._dynamo.reset()
    out, lse = torch.compile(step, fullgraph=True, backend=backend)(*tensors)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert out.dtype is torch.bfloat16
    assert lse.dtype is torch.float32


def roll(row, values):
    """torch's CUDA build rolls no fp8: the bytes are."""
    return row.view(torch.uint8).roll(values * row.element_size()).view(row.dtype)


def test_a_compiled_layer_keeps_what_was_written_before_it(inputs):
    """The next token is written to the cache, then attention reads it: the order is kept."""
    plan = new_plan(inputs)
    page = int(inputs.page_table[2, 1])

    def layer(q, kv_cache, page_table, row):
        kv_cache[page, 0] = row
        one = streamla.decode(
            q, kv_cache, page_table, plan, softmax_scale=inputs.softmax_scale,
            k_scale=inputs.k_scale,
        )  # fmt: skip
        kv_cache[page, 0] = roll(row, 1)
        two = streamla.decode(
            q, kv_cache, page_table, plan, softmax_scale=inputs.softmax_scale,
            k_scale=inputs.k_scale,
        )  # fmt: skip
        return one, two

    row = roll(inputs.kv_cache[page, 0], 3)
    eager_cache, compiled_cache = inputs.kv_cache.clone(), inputs.kv_cache.clone()
    want = layer(inputs.q, eager_cache, inputs.page_table, row)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(inputs.q, compiled_cache, inputs.page_table, row)
    assert torch.equal(compiled_cache.view(torch.uint8), eager_cache.view(torch.uint8))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(want[0][2], want[1][2])


def test_a_plan_survives_the_boundary_as_its_facts():
    spec = Case("", "", (), kv_format="fp8_ds_mla", seqlen_q=2, page_size=7).spec
    cost = CostModel(tile_n=32, num_programs=5, overhead_tiles=2, min_split_tiles=3, max_splits=9)
    for limit, invariant in ((None, False), (0, True), (123, False)):
        plan = empty_plan(4, spec, "reference", cost, torch.device("cpu"), limit, invariant)
        _, rebuilt = ops._rebuild(*ops.plan_arguments(plan))
        for name in ("spec", "impl", "cost", "batch", "max_seqlen", "batch_invariant"):
            assert getattr(rebuilt, name) == getattr(plan, name)
        assert rebuilt.work is plan.work
