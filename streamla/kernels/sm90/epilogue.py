"""The epilogue on Hopper: one launch, for every cache format of 512 + 64 values (docs/epilogue.md)."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from streamla.runtime.driver import I32, I64, PTR, U32, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.runtime.offline import CudaVariant
from streamla.spec import KVFormat, MLASpec

SOURCE = Path(__file__).with_name("epilogue.cu")

# As epilogue.cu numbers them.
FORMATS = (KVFormat.BF16, KVFormat.FP8_E4M3FN, KVFormat.FP8_E4M3FNUZ, KVFormat.FP8_DS_MLA)
ROPES = (None, "interleaved", "neox")

PIECES = (1, 2, 4)  # of latents a thread, of 8 values each
CROWDED = 1.1  # programs an SM at which more pieces a thread pay


def rows_of_program(pieces: int) -> int:
    return 4 * pieces


def threads(pieces: int) -> int:
    """256 for the latents, and 8 a row for the ropes."""
    return 256 + 8 * rows_of_program(pieces)


PARAMS = (
    PTR, I64, I64, PTR, I64, I64,        # q_nope, q_pe
    PTR, I64, PTR, I64,                  # kv_c, k_pe
    PTR, I64, I64, U32, U32, I64,        # kv_cache, its strides in bytes, page_size, its magic, slots
    PTR, I64, I64, PTR,                  # slot_mapping, num_slots, reserved_slot, k_scale
    PTR, PTR, I64, I64, I32,             # positions, cos_sin, its stride, num_positions, rope
    PTR, I64, I64, PTR, U32, U32, U32,   # q_out, its strides in bytes, q_scale, num_heads, its magic, rows
    U32, I32, I32,                       # programs of cache rows, aligned, early
)  # fmt: skip


def why_not(spec: MLASpec) -> str | None:
    """None if the kernel serves `spec`, else the reason as a sentence."""
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) != (512, 64):
        return f"needs rows of 512 + 64, these are {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
    return None


def defines(kv_format: KVFormat, q_format: KVFormat) -> dict[str, int]:
    return {
        "STREAMLA_KV_FORMAT": FORMATS.index(kv_format),
        "STREAMLA_Q_FORMAT": FORMATS.index(q_format),
    }


@functools.cache
def kernel(kv_format: KVFormat, q_format: KVFormat, pieces: int) -> Kernel:
    return Kernel(
        lambda: compile_cuda(SOURCE, defines=defines(kv_format, q_format)),
        f"mla_epilogue_{pieces}",
        PARAMS,
        threads=threads(pieces),
        pdl=True,
    )


@functools.cache
def _units(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_pieces(query_rows: int, num_slots: int, units: int) -> int:
    """Pieces a thread: as few as leave an SM about one program, or the most there are."""
    return next(
        (p for p in PIECES if sum(programs(query_rows, num_slots, p)) <= CROWDED * units),
        PIECES[-1],
    )


def programs(query_rows: int, num_slots: int, pieces: int) -> tuple[int, int]:
    """Programs of cache rows and of query rows."""
    rows = rows_of_program(pieces)
    return -(-num_slots // rows), -(-query_rows // rows)


def epilogue(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
    spec: MLASpec,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    rope: str | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    q_format: KVFormat,
    reserved_slot: int | None,
    inputs_ready: bool,
) -> None:
    """Write the query of every token to `q_out` and the cache row of every token that has a slot."""
    query_rows = q_nope.shape[0] * q_nope.shape[1]
    pieces = choose_pieces(query_rows, slot_mapping.shape[0], _units(q_out.device.index))
    launch(
        kernel(spec.kv_format, q_format, pieces), pieces, q_nope, q_pe, kv_c, k_pe, kv_cache,
        slot_mapping, q_out, spec, positions, cos_sin, rope, q_scale, k_scale, reserved_slot, inputs_ready,
    )  # fmt: skip


def launch(
    kernel: Kernel,
    pieces: int,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
    spec: MLASpec,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    rope: str | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    reserved_slot: int | None,
    inputs_ready: bool,
) -> None:
    """The launch of `kernel`, whose threads have so many pieces."""
    tokens, num_heads = q_nope.shape[:2]
    query_rows, num_slots = tokens * num_heads, slot_mapping.shape[0]
    cache_programs, query_programs = programs(query_rows, num_slots, pieces)
    item, q_item = kv_cache.element_size(), q_out.element_size()
    kernel.launch(
        cache_programs + query_programs,
        q_nope.data_ptr(), *q_nope.stride()[:2], q_pe.data_ptr(), *q_pe.stride()[:2],
        kv_c.data_ptr(), kv_c.stride(0), k_pe.data_ptr(), k_pe.stride(0),
        kv_cache.data_ptr(), item * kv_cache.stride(0), item * kv_cache.stride(1),
        spec.page_size, _magic(spec.page_size), kv_cache.shape[0] * spec.page_size,
        slot_mapping.data_ptr(), num_slots, -1 if reserved_slot is None else reserved_slot, _address(k_scale),
        _address(positions), _address(cos_sin),
        *((0, 0) if cos_sin is None else (cos_sin.stride(0), cos_sin.shape[0])), ROPES.index(rope),
        q_out.data_ptr(), q_item * q_out.stride(0), q_item * q_out.stride(1), _address(q_scale),
        num_heads, _magic(num_heads), query_rows,
        cache_programs, _alignment(q_nope, q_pe, kv_c, k_pe, kv_cache, cos_sin, q_out), inputs_ready,
        device=q_out.device.index,
    )  # fmt: skip


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _magic(divisor: int) -> int:
    """What the kernel multiplies by in place of a division."""
    return min((1 << 32) // divisor, (1 << 32) - 1)


def _alignment(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    cos_sin: torch.Tensor | None,
    q_out: torch.Tensor,
) -> int:
    """A bit for each group of tensors whose rows all start at a multiple of 16 bytes."""
    table = () if cos_sin is None else (cos_sin,)
    groups = ((q_nope, q_pe), (kv_c, k_pe), table, (kv_cache,), (q_out,))
    return sum(1 << i for i, group in enumerate(groups) if all(map(_rows_aligned, group)))


def _rows_aligned(t: torch.Tensor) -> bool:
    places = (t.data_ptr(), *(s * t.element_size() for s in t.stride()[:-1]))
    return not any(place % 16 for place in places)


def warm_epilogue(spec: MLASpec, device: torch.device) -> None:
    """Compile and load for a bf16 query, and for one in the cache's own fp8 flavour."""
    own = (spec.kv_format,) if spec.kv_format.has_scale else ()
    with torch.cuda.device(device):
        for q_format in (KVFormat.BF16, *own):
            for pieces in PIECES:
                kernel(spec.kv_format, q_format, pieces).load()


def offline_variants(target: str) -> list[CudaVariant]:
    """Each format once as the cache's and once as the query's, and each number of pieces."""
    if target != "sm_90a":
        return []
    bf16, fn, fnuz, ds_mla = FORMATS
    return [
        CudaVariant(
            f"sm90/epilogue/{kv_format.value}-q-{q_format.value}-{pieces}", SOURCE,
            f"mla_epilogue_{pieces}", threads(pieces), defines=defines(kv_format, q_format),
        )
        for kv_format, q_format, pieces in (
            (bf16, bf16, 1), (fn, bf16, 1), (fn, bf16, 2), (fn, fn, 4), (fnuz, fnuz, 4), (ds_mla, bf16, 1),
        )
    ]  # fmt: skip
