"""What the machine code of the Hopper kernel for bf16 caches must be: its pipeline, not only its results."""

import pytest

from streamla.kernels.sm90 import bf16
from streamla.runtime.driver import I32, TENSOR_MAP, TENSOR_MAP_BYTES, Kernel
from streamla.runtime.facts import KernelFacts
from streamla.runtime.offline import compile_variant, find_variants
from streamla.spec import KVFormat, MLASpec

SHARED_LIMIT = 227 << 10  # bytes one program may have on sm_90
KEY_STEPS = 576 // 16  # wgmma steps of 16 dimensions
VALUE_STEPS = (2 + 3 + 4) * (512 // 64)  # of 16 tokens, for each 64 latents; a tile has 2, 3 or 4


def facts(name: str) -> KernelFacts:
    name = f"sm90/attention-bf16/{name}"
    (variant,) = (v for v in find_variants("sm_90a", name) if v.name == name)
    return compile_variant(variant, "sm_90a")


@pytest.mark.parametrize(("name", "products"), [("h16-q1-p64", 1), ("h32-q1-p64", 2)])
def test_operands_stay_in_shared_memory(name, products):
    f = facts(name)
    assert f.scratch_bytes == 0
    assert f.spills == 0
    assert f.opcodes["HGMMA"] == KEY_STEPS + products * VALUE_STEPS
    # A compiler that serialises wgmma fences and waits around every one of them.
    assert f.opcodes["WARPGROUP"] < 16
    assert "LDSM" not in f.opcodes


def test_pages_of_whole_runs_are_copied_by_the_copy_engine():
    assert facts("h16-q1-p64").opcodes["UTMALDG"] == 1
    f = facts("h16-q1-p1")
    assert "UTMALDG" not in f.opcodes
    assert f.opcodes["LDGSTS"] > 0


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 24, 25, 32])
def test_shared_memory_fits_one_program(rows):
    assert bf16.Variant.of(MLASpec(rows, KVFormat.BF16)).shared_bytes <= SHARED_LIMIT


def test_a_tensor_map_is_one_argument():
    kernel = Kernel(b"", "k", (I32, TENSOR_MAP, I32), threads=1)
    base, tensor_map, last = kernel._pointers
    assert (tensor_map - base, last - base) == (4, 4 + TENSOR_MAP_BYTES)
    with pytest.raises(TypeError, match="argument 1: need a tensor map"):
        kernel._check((1, 0, 2))
