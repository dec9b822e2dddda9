"""Predictions: the study's diagnosis without a GPU, and no guess where no rule is published."""

import json
from importlib import resources

import pytest

from streamla.doctor.events import DoctorError
from streamla.doctor.names import decode
from streamla.doctor.predict import predict
from streamla.doctor.workload import Workload, find_gpu


def ask(
    engine="sglang",
    gpu="mi300x",
    heads=16,
    requests=1,
    context=262144,
    q="bf16",
    kv="fp8",
    q_len=1,
    **k,
):
    return predict(
        engine, find_gpu(gpu), Workload(heads, q_len, requests, context, q=q, kv=kv), **k
    )


def test_the_study():
    p = ask()
    assert p.kernel == "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps"
    assert (p.padding, p.busy_units, p.units) == (0.75, 16, 304)
    assert p.bytes == 262144 * 576
    assert any("16 of 304 CUs" in s for s in p.sentences)
    assert any("--max-splits 64" in n for n in p.notes)
    assert ask(max_splits=64).busy_units == 64
    assert [ask(requests=n).busy_units for n in (8, 16, 32)] == [128, 256, 304]
    assert ask(context=600).busy_units == 4  # one split for about 196 tokens


def test_query_rows_fill_the_tile():
    assert ask(q_len=4).padding == 0.0
    assert ask(heads=128).padding == 0.75
    assert ask(heads=128).busy_units == 128  # eight groups of 16 heads


@pytest.mark.parametrize(
    ("asked", "backend", "kernel", "padding", "reads"),
    [
        ({"engine": "vllm"}, "TRITON_MLA", "_fwd_grouped_kernel_stage1", 0.0, "as-is"),
        ({"engine": "vllm", "backend": "rocm_aiter_mla"}, "ROCM_AITER_MLA", "mla_a8w8_qh16_qseqlen1_gqaratio16_ps", 0.0, "query-quantised"),
        ({"kv": "bf16"}, "aiter", "mla_dec_stage1_bf16_a16w16_subQ16_mqa16", 0.0, "as-is"),
        ({"heads": 24}, "triton", "_fwd_grouped_kernel_stage1", 0.25, "as-is"),
        ({"engine": "vllm", "gpu": "h200"}, "FLASHMLA", "flash_fwd_splitkv_mla_kernel", 0.75, "query-quantised"),
        ({"engine": "vllm", "gpu": "h200", "kv": "bf16"}, "FLASH_ATTN_MLA", "FlashAttnFwdSm90", 0.75, "as-is"),
        ({"engine": "vllm", "gpu": "h200", "page_size": 16}, "TRITON_MLA", "_fwd_grouped_kernel_stage1", 0.0, "as-is"),
        ({"gpu": "h200"}, "fa3", "FlashAttnFwdSm90", 0.75, "pool-converted"),
        ({"gpu": "h200", "backend": "flashmla"}, "flashmla", "flash_fwd_splitkv_mla_kernel", 0.75, "query-quantised"),
    ],
)  # fmt: skip
def test_engines(asked, backend, kernel, padding, reads):
    p = ask(**asked)
    assert (p.backend, p.padding, p.reads) == (backend, padding, reads)
    assert kernel in p.kernel


def test_an_unknown_grid_stays_unknown():
    assert ask(heads=24).busy_units is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"engine": "tgi"}, "--engine: need one of sglang, vllm"),
        ({"gpu": "b300"}, "--gpu: need one of"),
        ({"kv": "int4"}, "kv: need one of"),
        ({"kv": "fp8_ds_mla"}, "no published rule covers"),
        ({"q_len": 8}, "no published rule covers"),  # aiter aborts: its catalogue ends at 4
        ({"heads": None}, "predict needs --heads"),
        (
            {"gpu": "h200", "backend": "cutlass_mla"},
            "no published rule covers sglang cutlass_mla on h200",
        ),
        ({"gpu": "cpu"}, "no published rule covers"),
    ],
)
def test_no_rule_is_no_guess(asked, message):
    with pytest.raises(DoctorError, match=message):
        ask(**asked)


def test_rules_are_sourced_and_readable():
    text = resources.files("streamla.doctor").joinpath("rules/engines.json").read_text("utf-8")
    for rule in json.loads(text)["rules"]:
        assert rule["source"]
        assert rule["why"]
        assert len(rule["date"]) == 10
        kernel = decode(rule["kernel"].format(q_len=1))
        assert kernel.family is not None, rule["kernel"]
        assert not kernel.unknown
