"""What the machine code of the Hopper kernel for fp8_ds_mla rows must be: its pipeline, not only its results."""

import pytest

from streamla.arch import arch_by_name
from streamla.kernels import sm90
from streamla.kernels.sm90 import ds_mla
from streamla.runtime.facts import KernelFacts
from streamla.runtime.offline import compile_variant, find_variants
from streamla.spec import KVFormat, MLASpec

H200 = arch_by_name("h200")
SHARED_LIMIT = 227 << 10  # bytes one program may have on sm_90
KEY_STEPS = 576 // 16  # wgmma steps of 16 dimensions
VALUE_STEPS = 64 // 16 * (512 // 64)  # of 16 tokens, for each 64 latents


def facts(name: str) -> KernelFacts:
    (variant,) = find_variants("sm_90a", f"sm90/attention-ds-mla/{name}")
    return compile_variant(variant, "sm_90a")


@pytest.mark.parametrize(
    ("name", "halves"), [("h16-q1-p64", 2), ("h8-q1-p64", 2), ("h4-q4-p16", 2), ("h24-q1-p64", 1)]
)
def test_a_tile_is_multiplied_without_padding_or_serialised_wgmma(name, halves):
    f = facts(name)
    assert f.scratch_bytes <= (
        8 if name == "h16-q1-p64" else 0
    )  # two registers outside of the products
    assert f.spills <= (5 if name == "h16-q1-p64" else 0)
    assert f.registers == {2: 96, 1: 168}[halves]  # at launch; setmaxnreg deals them out
    assert f.opcodes["HGMMA"] == (KEY_STEPS + VALUE_STEPS) // halves
    # A compiler that serialises wgmma fences and waits around every one of them.
    assert f.opcodes["WARPGROUP"] < f.opcodes["HGMMA"]
    # Two fp8 values an instruction: 64 x 512 as keys and as values, over the team's threads. Rope is bf16. The
    # rest packs probabilities, and results once for each team and place they go to.
    widening = 64 * (512 + 512) // 2 // (128 * halves)
    assert widening <= f.opcodes["F2FP"] < 2 * widening


@pytest.mark.parametrize(
    ("rows", "tile", "tiles"),
    [
        (1, 8, 1),
        (8, 8, 1),
        (9, 16, 1),
        (17, 24, 1),
        (24, 24, 1),
        (32, 16, 2),
        (48, 24, 2),
        (64, 24, 3),
    ],
)
def test_rows_take_as_few_programs_as_hold_them(rows, tile, tiles):
    variant = ds_mla.Variant.of(MLASpec(rows, KVFormat.FP8_DS_MLA))
    assert (variant.rows, variant.row_tiles) == (tile, tiles)
    assert variant.shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize(("page_size", "run"), [(1, 1), (16, 16), (48, 16), (64, 32), (7, 1)])
def test_a_bulk_copy_stays_in_a_page_and_in_half_a_tile(page_size, run):
    spec = MLASpec(16, KVFormat.FP8_DS_MLA, page_size)
    assert ds_mla.Variant.of(spec).run == run
    assert ds_mla.Variant.of(spec, contiguous_tokens=False).run == 1


def test_rows_of_many_programs_are_served_up_to_a_limit():
    assert sm90.why_not(MLASpec(128, KVFormat.FP8_DS_MLA, seqlen_q=4), H200) is None
    reason = sm90.why_not(MLASpec(128, KVFormat.FP8_DS_MLA, seqlen_q=5), H200)
    assert reason == "needs at most 512 query rows over fp8_ds_mla, these are 640"
