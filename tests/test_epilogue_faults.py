"""Faulty epilogues: each fails the case that is there for it, so the checks are shown to bite."""

import pytest
import torch

from streamla import reference
from streamla.testing.epilogue import EPILOGUE, check_epilogue

CPU = torch.device("cpu")


def faulty(change):
    """An epilogue that is given changed arguments; `change` may also act on the result."""
    names = (
        "q_nope", "q_pe", "kv_c", "k_pe", "kv_cache", "slot_mapping", "q_out", "spec", "positions",
        "cos_sin", "rope", "q_scale", "k_scale", "q_format", "reserved_slot", "inputs_ready",
    )  # fmt: skip
    right = reference.epilogue

    def epilogue(*arguments):
        given = dict(zip(names, arguments, strict=True))
        after = change(given)
        right(*given.values())
        if after is not None:
            after()

    return epilogue


def wraps_negative_slots(given):
    pool = given["kv_cache"].shape[0] * given["spec"].page_size
    given["slot_mapping"] = given["slot_mapping"] % pool


def leaves_queries_without_a_slot(given):
    rows = (given["slot_mapping"] < 0).nonzero()[:, 0]
    before = given["q_out"][rows].clone()
    return lambda: given["q_out"].__setitem__(rows, before)


def pads_the_slots_with_zero(given):
    missing = len(given["q_nope"]) - len(given["slot_mapping"])
    given["slot_mapping"] = torch.nn.functional.pad(given["slot_mapping"], (0, missing))


def ignores_the_page_stride(given):
    cache = given["kv_cache"]
    strides = (cache.shape[1] * cache.stride(1), cache.stride(1), 1)
    given["kv_cache"] = cache.as_strided(cache.shape, strides)


def ignores_the_reserved_slot(given):
    given["reserved_slot"] = None


def multiplies_by_the_inverse(given):
    given["kv_c"] = given["kv_c"].float() * (1 / given["k_scale"])
    given["k_pe"] = given["k_pe"].float() * (1 / given["k_scale"])
    given["k_scale"] = None


def multiplies_by_the_scale(given):
    given["k_scale"] = 1 / given["k_scale"]


def rounds_the_rotated_key(given):
    table = given["cos_sin"][given["positions"]]
    given["q_pe"] = reference.rotate(given["q_pe"], table, given["rope"])
    given["k_pe"] = reference.rotate(given["k_pe"], table, given["rope"]).bfloat16()
    given["rope"] = None


def pairs_the_other_way(given):
    given["rope"] = {"neox": "interleaved", "interleaved": "neox"}[given["rope"]]


def drops_nan(given):
    given["kv_c"] = given["kv_c"].nan_to_num(nan=-448.0, posinf=torch.inf, neginf=-torch.inf)


def writes_one_query_more(given):
    return lambda: given["q_out"][len(given["q_nope"])].fill_(0)


def swaps_the_scales(given):
    given["q_scale"], given["k_scale"] = given["k_scale"], given["q_scale"]


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("fp8_e4m3fn-nope", wraps_negative_slots, "belong to no new row"),
        ("no-slot", leaves_queries_without_a_slot, "q: "),
        ("short-slots", pads_the_slots_with_zero, "kv_cache"),
        ("page-stride-61", ignores_the_page_stride, "kv_cache"),
        ("page-gap", ignores_the_page_stride, "kv_cache"),
        ("reserved", ignores_the_reserved_slot, "belong to no new row"),
        ("scale-7", multiplies_by_the_inverse, "kv_cache row"),
        ("fp8_e4m3fn-nope", multiplies_by_the_scale, "kv_cache row"),
        ("tokens-33", rounds_the_rotated_key, "kv_cache row"),
        ("bf16-neox", pairs_the_other_way, "q: "),
        ("special-fp8_e4m3fn", drops_nan, "kv_cache row"),
        ("fp8_ds_mla-nope", writes_one_query_more, "rows past the last token"),
        ("q-e4m3fn", swaps_the_scales, "q: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_fails_its_case(monkeypatch, name, fault, message, seed):
    invariant = next(i for i in EPILOGUE if i.name == f"epilogue-{name}")
    monkeypatch.setattr(reference, "epilogue", faulty(fault))
    with pytest.raises(AssertionError, match=message):
        check_epilogue(invariant.case, "reference", CPU, seed)
