"""What the machine code of the fp8 Hopper kernels must be: its pipeline, not only its results."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from streamla.arch import arch_by_name
from streamla.kernels import sm90
from streamla.kernels.sm90 import narrow, wide
from streamla.kernels.sm90.launch import rows_of_program
from streamla.runtime.facts import KernelFacts
from streamla.runtime.offline import compile_variant, find_variants
from streamla.select import select
from streamla.spec import KVFormat, MLASpec

SHARED_LIMIT = 227 << 10  # bytes one program may have on sm_90
KEY_STEPS = 576 // 16  # wgmma steps of 16 dimensions
VALUE_STEPS = 64 // 16 * (512 // 64)  # of 16 tokens, for each 64 latents


def facts(name: str) -> KernelFacts:
    (variant,) = find_variants("sm_90a", f"sm90/{name}")
    return compile_variant(variant, "sm_90a")


@pytest.mark.parametrize(
    ("name", "halves"),
    [
        ("attention/h16-q1-p64", 2), ("attention/h8-q1-p64", 2), ("attention/h16-q1-p1", 2),
        ("attention/h12-q2-p64", 1), ("attention/h32-q1-p16", 1),
        ("attention-step/h16-q1-p64", 2), ("attention-step/h12-q2-p64", 1),
    ],
)  # fmt: skip
def test_a_tile_is_multiplied_without_padding_spills_or_serialised_wgmma(name, halves):
    f = facts(name)
    # One address, loaded once a tile.
    allowed = 8 if name == "attention-step/h16-q1-p64" else 0
    assert f.scratch_bytes <= allowed
    assert f.spills <= allowed // 4
    assert f.opcodes["HGMMA"] == (KEY_STEPS + VALUE_STEPS) // halves
    # A compiler that serialises wgmma fences and waits around every one of them.
    assert f.opcodes["WARPGROUP"] < f.opcodes["HGMMA"]
    # Two fp8 values an instruction: 64 x 576 as keys and 64 x 512 as values, over the team's threads. The rest packs
    # results, once for each team and place they go to.
    widening = 64 * (576 + 512) // 2 // (128 * halves)
    assert widening <= f.opcodes["F2FP"] < 2 * widening


@pytest.mark.parametrize(
    "name",
    ["h64-q1-p64", *(pytest.param(n, marks=pytest.mark.slow) for n in ("h96-q1-p64", "h16-q4-p1"))],
)
def test_a_wide_tile_is_multiplied_without_spills_or_serialised_wgmma(name):
    f = facts(f"attention-wide/{name}")
    assert (f.scratch_bytes, f.spills) == (0, 0)
    # Values are added in three places, each for half of the latents: of the tile before, own, and the last of an item.
    assert f.opcodes["HGMMA"] == KEY_STEPS + 3 * VALUE_STEPS // 2
    assert f.opcodes["WARPGROUP"] < f.opcodes["HGMMA"] / 2  # four wgmma a commit group


@pytest.mark.parametrize("rows", [33, 48, 64, 72, 96, 128])
def test_shared_memory_fits_one_wide_program(rows):
    assert wide.shared_bytes(MLASpec(rows, KVFormat.FP8_E4M3FN)) <= SHARED_LIMIT


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 24, 25, 32])
def test_shared_memory_fits_one_program(rows):
    variant = narrow.Variant.of(MLASpec(rows, KVFormat.FP8_E4M3FN))
    assert variant.rows >= rows
    assert variant.rows - rows < 8
    step = narrow.Variant.of(MLASpec(rows, KVFormat.FP8_E4M3FN), step=True)
    assert variant.shared_bytes < step.shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize(("num_heads", "seqlen_q"), [(128, 67), (64, 133)])
def test_programs_that_could_not_all_be_resident_are_refused(num_heads, seqlen_q):
    spec = MLASpec(num_heads, KVFormat.FP8_E4M3FN, seqlen_q=seqlen_q)
    tiles = wide.num_row_tiles(spec)
    h200 = arch_by_name("h200")
    assert sm90.why_not(replace(spec, seqlen_q=h200.units * seqlen_q // tiles), h200) is None
    assert (
        sm90.why_not(spec, h200)
        == f"needs at most 132 tiles of query rows, one an SM, these are {tiles}"
    )
    chosen = select(spec, h200, "auto").name
    assert chosen == "portable"


def test_a_merge_of_more_requests_than_a_grid_holds_is_refused():
    with pytest.raises(ValueError, match=r"plan: need at most 65535 requests .*; got 65536"):
        sm90.merge(SimpleNamespace(batch=65536), None, None, 1.0)


def test_row_tiles_are_few_and_then_narrow():
    assert [rows_of_program(rows, narrow.ROW_STEPS) for rows in (1, 12, 40, 64, 72)] == [
        8,
        16,
        24,
        32,
        24,
    ]


@pytest.mark.parametrize(
    ("page_size", "run"), [(1, 1), (16, 16), (48, 16), (64, 32), (96, 32), (7, 1)]
)
def test_a_bulk_copy_stays_in_a_page_and_in_half_a_tile(page_size, run):
    spec = MLASpec(16, KVFormat.FP8_E4M3FN, page_size)
    assert narrow.Variant.of(spec).run == run
    assert narrow.Variant.of(spec, contiguous_tokens=False).run == 1
