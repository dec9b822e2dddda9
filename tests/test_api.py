"""The public boundary: wrong input is one clear error and nothing is written; right input in any form
that the contract allows gives the same result."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import streamla
from streamla import KVFormat, MLASpec
from streamla.arch import CPU, arch_by_name
from streamla.select import refusals, select
from streamla.testing.build import build
from streamla.testing.cases import HEAD_COUNTS, Case

CASE = Case(
    "", "", (130, 0, 65), num_heads=3, page_size=16, kv_lora_rank=32, qk_rope_head_dim=16,
    kv_format="fp8_e4m3fn",
)  # fmt: skip
# NaN with a payload: whatever is written over it shows.
UNWRITTEN = {torch.bfloat16: (torch.int16, 0x7FC5), torch.float32: (torch.int32, 0x7FC00123)}


@pytest.fixture
def inputs(seed):
    return build(CASE, "cpu", seed)


@pytest.fixture
def plan(inputs):
    return streamla.plan(inputs.cache_seqlens, inputs.spec, impl="reference")


def unwritten(*shape, dtype):
    integer, pattern = UNWRITTEN[dtype]
    return torch.full(shape, pattern, dtype=integer).view(dtype)


def is_unwritten(tensor):
    integer, pattern = UNWRITTEN[tensor.dtype]
    return bool((tensor.contiguous().view(integer) == pattern).all())


def right_arguments(inputs, plan):
    return {
        "q": inputs.q,
        "kv_cache": inputs.kv_cache,
        "page_table": inputs.page_table,
        "plan": plan,
        "softmax_scale": inputs.softmax_scale,
        "k_scale": inputs.k_scale,
        "out": unwritten(3, 1, 3, 32, dtype=torch.bfloat16),
        "lse": unwritten(3, 1, 3, dtype=torch.float32),
    }


def transposed(t):
    """The same shape with a last dimension that is not contiguous."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


# What is wrong: the argument that the message must name, and how it is made wrong.
WRONG = {
    "q-list": ("q", lambda a: {"q": a["q"].tolist()}, TypeError),
    "q-float32": ("q", lambda a: {"q": a["q"].float()}, TypeError),
    "q-float16": ("q", lambda a: {"q": a["q"].half()}, TypeError),
    "q-three-dimensions": ("q", lambda a: {"q": a["q"][:, 0]}, ValueError),
    "q-batch": ("q", lambda a: {"q": a["q"][:2]}, ValueError),
    "q-heads": ("q", lambda a: {"q": a["q"][:, :, :2]}, ValueError),
    "q-width": ("q", lambda a: {"q": a["q"][..., :47]}, ValueError),
    "q-seqlen_q": ("q", lambda a: {"q": a["q"].expand(3, 2, 3, 48)}, ValueError),
    "q-strides": ("q", lambda a: {"q": transposed(a["q"])}, ValueError),
    "q-device": ("q", lambda a: {"q": a["q"].to("meta")}, ValueError),
    "q-whole-beside-q_pe": ("q", lambda a: {"q_pe": a["q"][..., 32:]}, ValueError),
    "q_pe-width": (
        "q_pe", lambda a: {"q": a["q"][..., :32], "q_pe": a["q"][..., 33:]}, ValueError
    ),
    "q_pe-dtype": (
        "q_pe", lambda a: {"q": a["q"][..., :32], "q_pe": a["q"][..., 32:].float()}, TypeError
    ),
    "cache-none": ("kv_cache", lambda a: {"kv_cache": None}, TypeError),
    "cache-bf16": ("kv_cache", lambda a: {"kv_cache": a["kv_cache"].bfloat16()}, TypeError),
    "cache-fnuz": (
        "kv_cache", lambda a: {"kv_cache": a["kv_cache"].view(torch.float8_e4m3fnuz)}, TypeError
    ),
    "cache-int8": ("kv_cache", lambda a: {"kv_cache": a["kv_cache"].view(torch.int8)}, TypeError),
    "cache-flat": ("kv_cache", lambda a: {"kv_cache": a["kv_cache"].flatten(0, 1)}, ValueError),
    "cache-page-size": ("kv_cache", lambda a: {"kv_cache": a["kv_cache"][:, :8]}, ValueError),
    "cache-width": ("kv_cache", lambda a: {"kv_cache": a["kv_cache"][..., :40]}, ValueError),
    "cache-strides": (
        "kv_cache",
        lambda a: {"kv_cache": transposed(a["kv_cache"].view(torch.uint8))},
        ValueError,
    ),
    "cache-overlapping-rows": (
        "kv_cache",
        lambda a: {"kv_cache": a["kv_cache"].as_strided((4, 16, 48), (768, 1, 1))},
        ValueError,
    ),
    "cache-device": ("kv_cache", lambda a: {"kv_cache": a["kv_cache"].to("meta")}, ValueError),
    "table-int64": ("page_table", lambda a: {"page_table": a["page_table"].long()}, TypeError),
    "table-flat": ("page_table", lambda a: {"page_table": a["page_table"][0]}, ValueError),
    "table-batch": ("page_table", lambda a: {"page_table": a["page_table"][:2]}, ValueError),
    "table-narrow": ("page_table", lambda a: {"page_table": a["page_table"][:, :8]}, ValueError),
    "table-no-columns": ("page_table", lambda a: {"page_table": a["page_table"][:, :0]}, ValueError),
    "table-strides": ("page_table", lambda a: {"page_table": transposed(a["page_table"])}, ValueError),
    "table-device": ("page_table", lambda a: {"page_table": a["page_table"].to("meta")}, ValueError),
    "page-negative": (
        "page_table", lambda a: {"page_table": a["page_table"].index_fill(1, torch.tensor([2]), -1)},
        ValueError,
    ),
    "page-past-the-pool": (
        "page_table",
        lambda a: {"page_table": a["page_table"].index_fill(1, torch.tensor([2]), 10_000)},
        ValueError,
    ),
    "plan-none": ("plan", lambda a: {"plan": None}, TypeError),
    "plan-tensor": ("plan", lambda a: {"plan": a["plan"].work}, TypeError),
    "plan-of-another-batch": (
        "q",
        lambda a: {
            "plan": streamla.plan(
                torch.tensor([1, 2], dtype=torch.int32), CASE.spec, impl="reference"
            )
        },
        ValueError,
    ),
    "plan-of-another-seqlen_q": (
        "q",
        lambda a: {
            "plan": streamla.plan(
                torch.tensor(CASE.lengths, dtype=torch.int32),
                dataclasses.replace(CASE.spec, seqlen_q=4), impl="reference",
            )
        },
        ValueError,
    ),
    "plan-of-another-format": (
        "kv_cache",
        lambda a: {
            "plan": streamla.plan(
                torch.tensor(CASE.lengths, dtype=torch.int32),
                dataclasses.replace(CASE.spec, kv_format="bf16"), impl="reference",
            )
        },
        TypeError,
    ),
    "scale-nan": ("softmax_scale", lambda a: {"softmax_scale": float("nan")}, ValueError),
    "scale-inf": ("softmax_scale", lambda a: {"softmax_scale": float("inf")}, ValueError),
    "scale-none": ("softmax_scale", lambda a: {"softmax_scale": None}, TypeError),
    "scale-tensor": ("softmax_scale", lambda a: {"softmax_scale": torch.tensor(0.1)}, TypeError),
    "k_scale-float": ("k_scale", lambda a: {"k_scale": 0.37}, TypeError),
    "k_scale-two": ("k_scale", lambda a: {"k_scale": torch.ones(2)}, ValueError),
    "k_scale-float64": ("k_scale", lambda a: {"k_scale": a["k_scale"].double()}, TypeError),
    "k_scale-device": ("k_scale", lambda a: {"k_scale": a["k_scale"].to("meta")}, ValueError),
    "causal-int": ("causal", lambda a: {"causal": 1}, TypeError),
    "lse_base-10": ("lse_base", lambda a: {"lse_base": "10"}, ValueError),
    "out-dtype": ("out", lambda a: {"out": a["out"].float()}, TypeError),
    "out-shape": ("out", lambda a: {"out": a["out"][..., :31]}, ValueError),
    "out-strides": ("out", lambda a: {"out": transposed(a["out"])}, ValueError),
    "out-overlapping": ("out", lambda a: {"out": a["out"][:1].expand(3, 1, 3, 32)}, ValueError),
    "out-device": ("out", lambda a: {"out": a["out"].to("meta")}, ValueError),
    "lse-dtype": ("lse", lambda a: {"lse": a["lse"].bfloat16()}, TypeError),
    "lse-shape": ("lse", lambda a: {"lse": a["lse"][..., None]}, ValueError),
    "lse-overlapping": ("lse", lambda a: {"lse": a["lse"][:1].expand(3, 1, 3)}, ValueError),
    "lse-device": ("lse", lambda a: {"lse": a["lse"].to("meta")}, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("call", [streamla.decode, streamla.attention], ids=["decode", "attention"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_refused_before_anything_is_written(inputs, plan, call, wrong):
    name, change, error = WRONG[wrong]
    arguments = right_arguments(inputs, plan)
    outputs = arguments["out"], arguments["lse"]
    before = {field: getattr(plan, field).clone() for field in ("work", "split_indptr", "counters")}
    plan.out_partial.fill_(7)
    arguments |= change(arguments)
    with pytest.raises(error, match=rf"^{name}: ") as raised:
        call(**arguments)
    assert "need" in str(raised.value)
    assert all(map(is_unwritten, outputs))
    assert all(torch.equal(getattr(plan, field), then) for field, then in before.items())
    assert (plan.out_partial == 7).all()


def test_softmax_scale_has_no_default(inputs, plan):
    arguments = right_arguments(inputs, plan)
    del arguments["softmax_scale"]
    for call in (streamla.decode, streamla.attention):
        with pytest.raises(TypeError, match="softmax_scale"):
            call(**arguments)


def test_a_bf16_cache_takes_no_scale(seed):
    """Applying the layer's k_scale to a bf16 cache would flatten all scores."""
    inputs = build(dataclasses.replace(CASE, kv_format="bf16"), "cpu", seed)
    plan = streamla.plan(inputs.cache_seqlens, inputs.spec, impl="reference")
    arguments = right_arguments(inputs, plan) | {"k_scale": torch.tensor([0.06])}
    with pytest.raises(ValueError, match="k_scale: a bf16 cache has no scale"):
        streamla.decode(**arguments)
    assert is_unwritten(arguments["out"])


def test_a_missing_scale_of_an_fp8_cache_is_1(inputs, plan):
    arguments = right_arguments(inputs, plan)
    out = streamla.decode(**arguments | {"k_scale": None, "out": None})
    one = streamla.decode(**arguments | {"k_scale": torch.tensor([1.0]), "out": None})
    assert torch.equal(out, one)


PLAN_WRONG = {
    "lengths-list": ("cache_seqlens", {"cache_seqlens": [1, 2, 3]}, TypeError),
    "lengths-int64": ("cache_seqlens", {"cache_seqlens": torch.tensor([1, 2, 3])}, TypeError),
    "lengths-2d": (
        "cache_seqlens", {"cache_seqlens": torch.ones(3, 1, dtype=torch.int32)}, ValueError
    ),
    "lengths-strided": (
        "cache_seqlens", {"cache_seqlens": torch.ones(6, dtype=torch.int32)[::2]}, ValueError
    ),
    "lengths-negative": (
        "cache_seqlens", {"cache_seqlens": torch.tensor([1, -1, 3], dtype=torch.int32)}, ValueError
    ),
    "lengths-above-max_seqlen": ("cache_seqlens", {"max_seqlen": 129}, ValueError),
    "max_seqlen-negative": ("max_seqlen", {"max_seqlen": -1}, ValueError),
    "max_seqlen-float": ("max_seqlen", {"max_seqlen": 131072.0}, ValueError),
    "spec-dict": ("spec", {"spec": {"num_heads": 16}}, TypeError),
    "impl-unknown": ("impl", {"impl": "fastest"}, ValueError),
    "impl-of-another-gpu": ("impl", {"impl": "sm90"}, ValueError),
    "out-tensor": ("out", {"out": torch.ones(3)}, TypeError),
}  # fmt: skip


@pytest.mark.parametrize("wrong", PLAN_WRONG)
def test_plan_refuses_wrong_input(inputs, wrong):
    name, change, error = PLAN_WRONG[wrong]
    arguments = {"cache_seqlens": inputs.cache_seqlens, "spec": inputs.spec, "impl": "reference"}
    with pytest.raises(error, match=rf"^{name}: "):
        streamla.plan(**arguments | change)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_seqlens": torch.ones(4, dtype=torch.int32)},
        {"spec": dataclasses.replace(CASE.spec, num_heads=4)},
        {"spec": dataclasses.replace(CASE.spec, seqlen_q=2)},
        {"max_seqlen": 4096},
        {"batch_invariant": True},
        {"impl": "portable"},
    ],
    ids=["batch", "heads", "seqlen_q", "max_seqlen", "batch_invariant", "impl"],
)
def test_a_plan_is_not_reused_for_something_else(inputs, plan, change):
    work = plan.work.clone()
    arguments = {"cache_seqlens": inputs.cache_seqlens, "spec": inputs.spec, "impl": "reference"}
    with pytest.raises(ValueError, match=r"^out: need a plan with"):
        streamla.plan(**arguments | change, out=plan)
    assert torch.equal(plan.work, work)


def test_a_refusal_names_every_reason():
    with pytest.raises(ValueError, match=r"sm90 needs sm_90a \(Hopper\), this is cpu"):
        select(MLASpec(num_heads=16), CPU, "sm90")


@pytest.mark.parametrize("name", ["h200", "h100", "mi300x", "cpu"])
def test_every_spec_is_served_or_refused_with_a_sentence(name):
    arch = arch_by_name(name)
    for heads in HEAD_COUNTS:
        for kv_format in KVFormat:
            for seqlen_q, page_size in ((1, 64), (4, 64), (2, 1), (1, 480), (3, 7)):
                spec = MLASpec(heads, kv_format, page_size, seqlen_q)
                answers = refusals(spec, arch)
                assert all(reason is None or len(reason) > 10 for reason in answers.values())
                serving = [impl for impl, reason in answers.items() if reason is None]
                assert select(spec, arch).name == serving[0]
                for impl in answers.keys() - set(serving):
                    with pytest.raises(ValueError, match=f"{impl} "):
                        select(spec, arch, impl)


@pytest.mark.parametrize(
    "change",
    [
        {"out": torch.zeros(3, 1, 3, 32)}, {"lse": torch.zeros(3, 1, 4)}, {"lse_base": "ln"},
        {"plan": None},
    ],
    ids=["out", "lse", "lse_base", "plan"],
)  # fmt: skip
def test_merge_refuses_wrong_input(inputs, plan, change):
    (name,) = change
    arguments = {
        k: v for k, v in right_arguments(inputs, plan).items() if k in ("plan", "out", "lse")
    }
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: "):
        streamla.merge(**arguments | change)
    assert is_unwritten(arguments["out"])


def test_every_allowed_form_gives_the_same_bits(inputs, plan):
    arguments = right_arguments(inputs, plan) | {"out": None, "lse": None}
    want, want_lse = streamla.decode(**arguments, return_lse=True)
    assert want.shape == (3, 1, 3, 32)
    assert want.dtype is torch.bfloat16
    assert want_lse.shape == (3, 1, 3)
    assert want_lse.dtype is torch.float32

    wide = torch.zeros(3, 1, 5, 64, dtype=torch.bfloat16)
    strided_lse = torch.zeros(3, 1, 6)[:, :, ::2]
    forms = {
        "uint8 cache": {"kv_cache": inputs.kv_cache.view(torch.uint8)},
        "query halves": {"q": inputs.q[..., :32], "q_pe": inputs.q[..., 32:]},
        "scalar scale": {"k_scale": inputs.k_scale.reshape(())},
        "strided out": {"out": wide[:, :, :3, :32], "lse": strided_lse},
        "wider table": {"page_table": torch.cat([inputs.page_table] * 2, 1)},
        "table in a table": {"page_table": torch.cat([inputs.page_table] * 2, 1)[:, :12]},
    }
    for name, form in forms.items():
        out, lse = streamla.decode(**arguments | form, return_lse=True)
        assert torch.equal(out, want), name
        assert torch.equal(lse, want_lse), name
    assert (wide[:, :, 3:] == 0).all()
    assert (wide[..., 32:] == 0).all()
    assert torch.equal(streamla.decode(**arguments), want)


def test_given_outputs_are_what_is_returned(inputs, plan):
    arguments = right_arguments(inputs, plan)
    out, lse = streamla.decode(**arguments, return_lse=True)
    assert out is arguments["out"]
    assert lse is arguments["lse"]
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_nothing_is_left_unwritten(inputs, plan, nan_filled_empty):
    arguments = right_arguments(inputs, plan) | {"out": None, "lse": None}
    plan = streamla.plan(inputs.cache_seqlens, inputs.spec, impl="reference")
    out, lse = streamla.decode(**arguments | {"plan": plan}, return_lse=True)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


def test_warmup_and_support():
    streamla.warmup(CASE.spec, [1, 16], impl="reference", device="cpu")
    with pytest.raises(ValueError, match="batch_sizes"):
        streamla.warmup(CASE.spec, [-1], impl="reference", device="cpu")
    text = streamla.support("cpu")
    for name in (
        "bf16",
        "fp8_e4m3fn",
        "fp8_e4m3fnuz",
        "fp8_ds_mla",
        "reference",
        "not sm90",
        "epilogue, then",
    ):
        assert name in text


def test_the_portable_kernels_are_refused_on_a_cpu_that_does_not_interpret():
    program = (
        "import torch, streamla\n"
        "try:\n"
        "    streamla.plan(torch.ones(1, dtype=torch.int32), streamla.MLASpec(16), impl='portable')\n"
        "except ValueError as e:\n"
        "    print(e)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert "needs a GPU, or TRITON_INTERPRET=1" in done.stdout


@pytest.mark.gpu
def test_on_a_gpu_values_are_not_read_and_devices_must_agree(seed):
    inputs = build(CASE, "cuda", seed)
    plan = streamla.plan(inputs.cache_seqlens, inputs.spec, impl="portable")
    arguments = right_arguments(inputs, plan) | {"out": None, "lse": None}
    streamla.decode(**arguments)
    for name in ("q", "kv_cache", "page_table", "k_scale"):
        with pytest.raises(ValueError, match=rf"^{name}: need a tensor on cuda"):
            streamla.decode(**arguments | {name: arguments[name].cpu()})
    negative = torch.tensor([-5, 3, 1], dtype=torch.int32, device="cuda")
    assert streamla.plan(negative, CASE.spec, impl="portable").status.item() == 1
