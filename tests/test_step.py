"""decode_step: the bits of epilogue and decode, at the public boundary and as an operator."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamla
from streamla import ops
from streamla.reference import epilogue_reference
from streamla.testing.budget import assert_within_budget
from streamla.testing.budget import expect as expect_attention
from streamla.testing.step import STEP, check_equal, expect
from streamla.testing.step_build import StepCase, build_step
from streamla.testing.verify import why_skipped

CPU = torch.device("cpu")
SMALL = StepCase(
    "", "", (9, 0, 4), num_heads=3, page_size=4, kv_lora_rank=32, qk_rope_head_dim=16, seqlen_q=2,
)  # fmt: skip


ON_CPU = [i for i in STEP if not i.case.gpu]
# Interpreted, a step is slow, and the portable one is the two stages that are tested by themselves.
INTERPRETED = (
    "step-queries-4-interleaved",
    "step-fp8_ds_mla",
    "step-some-slots",
    "step-short-slots",
)


@pytest.mark.parametrize("invariant", ON_CPU, ids=lambda i: i.name)
def test_step_on_cpu(invariant, seed):
    invariant.check(invariant.case, "reference", CPU, seed)


@pytest.mark.parametrize(
    "invariant", [i for i in ON_CPU if i.name in INTERPRETED], ids=lambda i: i.name
)
def test_step_of_the_portable_kernels(invariant, seed):
    case = invariant.case.narrow()
    if (reason := why_skipped(case, "portable", CPU)) is not None:
        pytest.skip(reason)
    invariant.check(case, "portable", CPU, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", STEP, ids=lambda i: i.name)
def test_step_on_gpu(invariant, seed):
    invariant.check(invariant.case, "auto", torch.device("cuda"), seed)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    seqlen_q=st.integers(1, 5),
    page_size=st.integers(1, 9),
    rope=st.sampled_from([None, "interleaved", "neox"]),
    slots=st.sampled_from(["all", "some", "none", "short"]),
    causal=st.booleans(),
    kv_format=st.sampled_from(["bf16", "fp8_e4m3fn", "fp8_e4m3fnuz"]),
    k_scale=st.floats(0.01, 10.0),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_oracles_epilogue_and_then_the_oracles_attention(seed, slots, **fields):
    fields["lengths"] = tuple(fields["lengths"])
    case = dataclasses.replace(SMALL, **fields, slots=slots)
    inputs = build_step(case, CPU, seed)
    held = inputs.held
    plan = streamla.plan(held.cache_seqlens, held.spec)
    want = expect(inputs, plan)
    out, lse = inputs.step(plan)
    check_equal(inputs, out, lse, want, "decode_step")

    oracle = build_step(case, CPU, seed)
    q = epilogue_reference(
        oracle.q_nope, oracle.q_pe, oracle.kv_c, oracle.k_pe, oracle.held.kv_cache,
        oracle.slot_mapping, held.spec,
        **{k: v for k, v in oracle.rotation.items() if k != "reserved_slot"},
    ).unflatten(0, (-1, case.seqlen_q))  # fmt: skip
    whole = dataclasses.replace(oracle.held, q=q, q_pe=None)
    assert_within_budget(out, lse, expect_attention(whole))
    assert torch.equal(held.kv_cache.view(torch.uint8), oracle.held.kv_cache.view(torch.uint8))


# --- the public boundary


def arguments(**options):
    inputs = build_step(dataclasses.replace(SMALL, **options), CPU, 0)
    plan = streamla.plan(inputs.held.cache_seqlens, inputs.held.spec, impl="reference")
    names = ("q_nope", "q_pe", "kv_c", "k_pe", "slot_mapping")
    return (
        {name: getattr(inputs, name) for name in names}
        | {"kv_cache": inputs.held.kv_cache, "page_table": inputs.held.page_table, "plan": plan}
        | inputs.rotation
        | {"softmax_scale": inputs.held.softmax_scale}
    )


def moved(slots):
    """The last token's row goes where another token's should."""
    changed = slots.clone()
    changed[0], changed[-1] = slots[-1], slots[0]
    return changed


WRONG = [
    ("q_nope", lambda a: a["q_nope"][:4], ValueError, r"q_nope: need shape \(6, 3, 32\); got \(4, 3, 32\)"),
    ("q_nope", lambda a: a["q_nope"].unflatten(0, (3, 2)), ValueError, r"q_nope: need shape \(6, 3, 32\)"),
    ("q_pe", lambda a: a["q_pe"][:, :2], ValueError, r"q_pe: need shape \(6, 3, 16\)"),
    ("kv_c", lambda a: a["kv_c"][:3], ValueError, r"kv_c: need shape \(6, 32\)"),
    ("k_pe", lambda a: a["k_pe"].float(), TypeError, "k_pe: need torch.bfloat16"),
    ("kv_cache", lambda a: a["kv_cache"][:1].expand(5, -1, -1), ValueError, "memory of its own"),
    ("slot_mapping", lambda a: torch.arange(7), ValueError, "6 tokens, or fewer"),
    ("slot_mapping", lambda a: a["slot_mapping"] + 10**6, ValueError, "slot_mapping: need slots below"),
    ("slot_mapping", lambda a: moved(a["slot_mapping"]), ValueError, "slot_mapping: need the token's place in the page table"),
    ("page_table", lambda a: a["page_table"].long(), TypeError, "page_table: need torch.int32"),
    ("page_table", lambda a: a["page_table"][:, :1], ValueError, "page_table: need 3 columns for request 0"),
    ("plan", lambda a: None, TypeError, "plan: need a DecodePlan"),
    ("softmax_scale", lambda a: None, TypeError, "softmax_scale: need a float"),
    ("positions", lambda a: a["positions"][:3], ValueError, r"positions: need shape \(6,\)"),
    ("cos_sin", lambda a: None, ValueError, "cos_sin: need positions, cos_sin and rope"),
    ("rope", lambda a: "gptj", ValueError, "rope: need 'interleaved', 'neox' or None"),
    ("k_scale", lambda a: torch.ones(2), ValueError, "k_scale: need one element"),
    ("reserved_slot", lambda a: -1, ValueError, "reserved_slot: need an int >= 0"),
    ("causal", lambda a: 1, TypeError, "causal: need a bool"),
    ("lse_base", lambda a: "10", ValueError, "lse_base: need 'e' or '2'"),
    ("out", lambda a: torch.empty(6, 3, 32).bfloat16(), ValueError, r"out: need shape \(3, 2, 3, 32\)"),
    ("lse", lambda a: torch.empty(3, 2, 3).double(), TypeError, "lse: need torch.float32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)]
)
def test_wrong_input_is_named_and_nothing_is_written(name, wrong, error, message):
    given = arguments()
    before = given["kv_cache"].view(torch.uint8).clone()
    with pytest.raises(error, match=message):
        streamla.decode_step(**given | {name: wrong(given)})
    assert torch.equal(given["kv_cache"].view(torch.uint8), before)


def test_slots_of_skipped_tokens_are_not_compared():
    """Only a row that is written has a place to be at."""
    given = arguments(slots="some")
    given["slot_mapping"][0] = -3
    streamla.decode_step(**given)
    given = arguments()
    given["slot_mapping"] = moved(given["slot_mapping"])[:1]
    given["reserved_slot"] = int(given["slot_mapping"][0])
    streamla.decode_step(**given)


def test_lse_is_returned_on_request():
    given = arguments()
    out = streamla.decode_step(**given)
    both = streamla.decode_step(**given, return_lse=True)
    assert torch.equal(out, both[0])
    assert both[1].shape == (3, 2, 3)


# --- the operator


def implementation(device):
    return "reference" if device.type == "cpu" else "portable"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3fn"])
def test_opcheck(device, kv_format):
    inputs = build_step(dataclasses.replace(SMALL, kv_format=kv_format), device, 0)
    held = inputs.held
    kv_cache = held.kv_cache if kv_format == "bf16" else held.kv_cache.view(torch.uint8)
    kv_cache.zero_()  # opcheck compares all that is written, and NaN differs from NaN
    plan = streamla.plan(held.cache_seqlens, held.spec, impl=implementation(device))
    plan.out_partial.zero_()
    plan.lse_partial.zero_()
    out = torch.zeros(3, 2, 3, 32, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(3, 2, 3, device=device)
    torch.library.opcheck(
        torch.ops.streamla.decode_step.default,
        (
            inputs.q_nope, inputs.q_pe, inputs.kv_c, inputs.k_pe, kv_cache, inputs.slot_mapping,
            inputs.positions, inputs.cos_sin, "interleaved", held.k_scale, None, held.page_table,
            *ops.plan_arguments(plan), out, lse, 0.1, True, 1.0,
        ),
    )  # fmt: skip


def test_a_compiled_graph_keeps_both_steps(device):
    """Two layers' steps on one cache, the second over the rows of the first: both stay, in order."""
    inputs = build_step(dataclasses.replace(SMALL, kv_format="bf16"), device, 0, poison=None)
    held = inputs.held
    plan = streamla.plan(held.cache_seqlens, held.spec, impl=implementation(device))

    def layers(kv_cache, q_nope, kv_c):
        def step(kv_c):
            return streamla.decode_step(
                q_nope, inputs.q_pe, kv_c, inputs.k_pe, kv_cache, inputs.slot_mapping, held.page_table,
                plan, softmax_scale=0.1, **inputs.rotation,
            )  # fmt: skip

        return step(kv_c), step(kv_c.roll(1, 1))

    caches = [held.kv_cache.clone() for _ in range(2)]
    want = layers(caches[0], inputs.q_nope, inputs.kv_c)
    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    got = compiled(caches[1], inputs.q_nope, inputs.kv_c)
    assert torch.equal(
        *(cache.view(torch.int16) for cache in caches)
    )  # bits: memory nobody wrote may hold NaN
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(want[0], want[1])


# --- on a GPU


@pytest.mark.gpu
def test_places_on_a_gpu_are_checked_in_debug_mode(monkeypatch):
    inputs = build_step(SMALL, torch.device("cuda"), 0)
    inputs.slot_mapping = moved(inputs.slot_mapping)
    plan = streamla.plan(inputs.held.cache_seqlens, inputs.held.spec)
    inputs.step(plan)
    monkeypatch.setenv("STREAMLA_DEBUG", "1")
    with pytest.raises(ValueError, match="slot_mapping: need the token's place in the page table"):
        inputs.step(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["fp8_e4m3fn", "bf16"])
def test_a_capture_is_served_once_warm(kv_format, seed):
    device = torch.device("cuda")
    case = StepCase("", "", (70, 3, 0), num_heads=5, kv_format=kv_format)
    streamla.warmup(case.spec, [3], device=device)
    inputs = build_step(case, device, seed)
    plan = streamla.plan(inputs.held.cache_seqlens, inputs.held.spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = inputs.step(plan)
    want = expect(inputs, plan)
    graph.replay()
    torch.cuda.synchronize()
    check_equal(inputs, out, lse, want, "replayed")
