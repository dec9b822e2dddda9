"""Cases and checks of the epilogue: equal to `epilogue_reference` to the last bit, and nothing else written.

`verify` runs them after those of attention. A case's `lengths` are the new tokens; its pages, gaps,
scale and query layout mean what they mean everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from streamla.formats import DS_MLA_GROUP
from streamla.reference import epilogue_reference
from streamla.spec import KVFormat, MLASpec
from streamla.testing.budget import Deviation
from streamla.testing.canary import NAN_BYTE
from streamla.testing.case import Case
from streamla.testing.epilogue_build import EpilogueCase, EpilogueInputs, build
from streamla.testing.invariants import Check, Invariant

EQUAL = Deviation(0.0, 1.0, "q")


def check_epilogue(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Query and cache equal the oracle's, whatever the layout; not a byte beside them is written."""
    assert isinstance(case, EpilogueCase)
    inputs = build(case, device, seed)
    want, want_cache = expect(inputs)
    before = {name: t.clone() for name, t in inputs.read.items()}
    shape = (case.tokens + 2, *want.shape[1:])
    q_out = inputs.canaries.empty("q_out", shape, want.dtype, device, NAN_BYTE)
    q = inputs.run(impl, q_out)
    assert_equal("q", q, want)
    beyond = q_out[case.tokens :].view(torch.uint8)
    assert (beyond == NAN_BYTE).all(), "q_out: rows past the last token were written"
    check_cache(inputs, want_cache)
    inputs.canaries.check()
    for name, then in before.items():
        assert_equal(name, inputs.read[name], then)

    # Tensors of their own, other poison, a new output: the same bits.
    other = build(case, device, seed, poison="huge")
    for name in ("q_nope", "q_pe", "kv_c", "k_pe"):
        setattr(other, name, getattr(other, name).contiguous())
    _, want_cache = expect(other)
    assert_equal("q", other.run(impl), want)
    check_cache(other, want_cache)
    return EQUAL


def expect(inputs: EpilogueInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's query and cache, on the CPU. The cache shares no memory with the inputs'."""
    cache = inputs.kv_cache
    memory = memory_of(cache).cpu().clone().view(cache.dtype)
    expected = memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    slots = inputs.slot_mapping.cpu()
    if inputs.case.reserved_slot is not None:
        slots = slots.masked_fill(slots == inputs.case.reserved_slot, -1)
    q_nope, q_pe, kv_c, k_pe = (
        t.cpu() for t in (inputs.q_nope, inputs.q_pe, inputs.kv_c, inputs.k_pe)
    )
    options: dict[str, Any] = {
        k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in inputs.options.items()
    }
    q = epilogue_reference(
        q_nope, q_pe, kv_c, k_pe, expected, slots, inputs.spec, **options
    )  # fmt: skip
    return q, expected


def check_cache(inputs: EpilogueInputs, want: torch.Tensor) -> None:
    """Written rows are the oracle's; every other byte of the memory that holds the cache is as it was."""
    spec = inputs.spec
    actual = memory_of(inputs.kv_cache).cpu().clone().view(want.dtype)
    actual = actual.as_strided(want.shape, want.stride(), want.storage_offset())
    slots = inputs.slot_mapping.cpu()
    reserved = inputs.case.reserved_slot
    slots = slots[(slots >= 0) & (slots != (-1 if reserved is None else reserved))]
    at = (slots // spec.page_size, slots % spec.page_size)
    as_bytes = [t.view(torch.uint8) for t in (actual, want)]
    rows, want_rows = (t[at] for t in as_bytes)
    for name, dtype, part in row_parts(spec):
        assert_equal(
            f"kv_cache {name}", *(r[:, part].contiguous().view(dtype) for r in (rows, want_rows))
        )
    as_bytes[0][at] = want_rows
    changed = int((memory_of(actual) != memory_of(want)).sum())
    assert changed == 0, f"kv_cache: {changed} bytes written that belong to no new row"


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that holds `tensor`, gaps included."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def row_parts(spec: MLASpec) -> list[tuple[str, torch.dtype, slice]]:
    """Name, dtype and bytes of the parts of a row."""
    if spec.kv_format is not KVFormat.FP8_DS_MLA:
        return [("row", spec.kv_format.storage_dtype, slice(None))]
    latent = spec.kv_lora_rank
    scales = latent + 4 * (latent // DS_MLA_GROUP)
    return [
        ("latent", torch.float8_e4m3fn, slice(0, latent)),
        ("scales", torch.float32, slice(latent, scales)),
        ("rope", torch.bfloat16, slice(scales, None)),
    ]


def assert_equal(name: str, actual: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to the last bit; any NaN equals any other."""
    want = want.to(actual.device)
    assert actual.shape == want.shape, f"{name}: shape {tuple(actual.shape)}"
    assert actual.dtype == want.dtype, f"{name}: {actual.dtype}"
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.itemsize]
    bits, want_bits = (t.contiguous().view(integer) for t in (actual, want))
    differs = bits != want_bits
    if differs.any() and want.is_floating_point():
        differs &= ~(actual.float().isnan() & want.float().isnan())
    if differs.any():
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(differs.sum())} of {differs.numel()} elements differ from the oracle's, first at "
            f"{at}: {float(actual[at])!r} ({int(bits[at]):#x}), not {float(want[at])!r} "
            f"({int(want_bits[at]):#x})"
        )


def check_grid(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Every count of tokens and heads: parts of one large batch, since neither knows of the other."""
    assert isinstance(case, EpilogueCase)
    for rope, q_format in (
        (None, "bf16"), ("interleaved", "bf16"), ("neox", "fp8_e4m3fn"), ("interleaved", "fp8_e4m3fnuz"),
    ):  # fmt: skip
        whole = build(dataclasses.replace(case, rope=rope, q_format=q_format), device, seed)
        want, _ = expect(whole)
        want = want.to(device)
        poisoned = memory_of(whole.kv_cache).clone()
        for tokens in (1, 2, 63, 64, 65, 128, 257):
            part = dataclasses.replace(
                whole, q_nope=whole.q_nope[:tokens], q_pe=whole.q_pe[:tokens],
                kv_c=whole.kv_c[:tokens], k_pe=whole.k_pe[:tokens],
                slot_mapping=whole.slot_mapping[:tokens],
                positions=None if whole.positions is None else whole.positions[:tokens],
            )  # fmt: skip
            few = dataclasses.replace(part, q_nope=part.q_nope[:, :1], q_pe=part.q_pe[:, :1])
            memory_of(whole.kv_cache).copy_(poisoned)
            _, want_cache = expect(few)
            for heads in (8, 12, 16, 24, 64, 96, 128):
                shard = dataclasses.replace(
                    part, spec=dataclasses.replace(part.spec, num_heads=heads),
                    q_nope=part.q_nope[:, :heads], q_pe=part.q_pe[:, :heads],
                )  # fmt: skip
                memory_of(whole.kv_cache).copy_(poisoned)
                q = shard.run(impl)
                assert_equal(f"q of {tokens} tokens, {heads} heads", q, want[:tokens, :heads])
                check_cache(shard, want_cache)
    return EQUAL


def check_far_slots(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Slots beyond 2 ** 31 and 2 ** 32 bytes land where they belong, and nothing lands before the pool."""
    assert isinstance(case, EpilogueCase)
    spec = case.spec
    pages = 7_500_032 // spec.page_size
    pool_bytes = pages * spec.page_size * spec.row_bytes
    memory = torch.full((2 * pool_bytes,), 0xA5, dtype=torch.uint8, device=device)
    # A wrapped offset is negative: it would land in the half that lies before the pool.
    pool = memory[pool_bytes:].view(spec.kv_format.storage_dtype)
    inputs = build(case, device, seed)
    slots = [0, 3_728_270, 3_728_271, 7_456_540, 7_456_541, pages * spec.page_size - 1]
    inputs.slot_mapping = torch.tensor(slots, device=device)
    near = dataclasses.replace(inputs, slot_mapping=torch.arange(len(slots), device=device))
    _, want = expect(near)
    inputs.kv_cache = pool.view(pages, spec.page_size, spec.row_width)
    inputs.run(impl)
    at = (inputs.slot_mapping // spec.page_size, inputs.slot_mapping % spec.page_size)
    rows = inputs.kv_cache.view(torch.uint8)[at]
    want_rows = want.view(torch.uint8).flatten(0, 1)[: len(slots)]
    assert_equal("kv_cache", rows, want_rows)
    inputs.kv_cache.view(torch.uint8)[at] = 0xA5
    changed = sum(int((piece != 0xA5).sum()) for piece in memory.split(1 << 28))
    assert changed == 0, f"kv_cache: {changed} bytes written that belong to no new row"
    return EQUAL


def check_graph(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Captured once; replayed with other tokens, slots, positions, tables and scales."""
    assert isinstance(case, EpilogueCase)
    inputs = build(case, device, seed)
    q_out = inputs.canaries.empty(
        "q_out", (case.tokens, case.num_heads, inputs.spec.head_dim),
        KVFormat(case.q_format).storage_dtype, device, NAN_BYTE,
    )  # fmt: skip
    inputs.run(impl, q_out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.run(impl, q_out)
    for step in range(1, 5):
        other = build(case, device, seed + step, poison=("nan", "huge")[step % 2])
        want, want_cache = expect(other)
        memory_of(inputs.kv_cache).copy_(memory_of(other.kv_cache))
        for name in (*inputs.read, "q_scale", "k_scale"):
            if (target := getattr(inputs, name)) is not None:
                target.copy_(getattr(other, name))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal("q", q_out, want)
        check_cache(inputs, want_cache)
    return EQUAL


def _case(name: str, reason: str, tokens: int = 5, **options) -> Invariant:
    case = EpilogueCase(f"epilogue-{name}", reason, (tokens,), **options)
    return Invariant(case.name, reason, case, check_epilogue)


def _on(check: Check, name: str, tokens: int, **options) -> Invariant:
    case = EpilogueCase(name, str(check.__doc__), (tokens,), **options)
    return Invariant(name, case.reason, case, check)


_FORMATS = tuple(f.value for f in KVFormat)

EPILOGUE: tuple[Invariant, ...] = (
    *(
        _case(f"{kv_format}-{rope or 'nope'}", "every format, rotated either way or not", kv_format=kv_format, rope=rope)
        for kv_format in _FORMATS for rope in (None, "interleaved", "neox")
    ),
    *(
        _case(f"special-{kv_format}", "zeros, ties, subnormals, overflow, infinity, NaN", 9, kv_format=kv_format,
              values="special", rope=None, k_scale=k_scale)
        for kv_format, k_scale in zip(_FORMATS, (1.0, 1.0, 2.0, 1.0), strict=True)
    ),
    _case("special-rotated", "infinity and NaN through the rotation", 9, values="special", k_scale=1.0),
    _case("q-e4m3fn", "a quantised query beside a quantised cache", q_format="fp8_e4m3fn"),
    _case("q-e4m3fnuz", "the other flavour, cache too", q_format="fp8_e4m3fnuz", kv_format="fp8_e4m3fnuz", rope="neox"),
    _case("q-e4m3fn-bf16", "a quantised query beside a bf16 cache", q_format="fp8_e4m3fn", kv_format="bf16", rope=None),
    _case("scale-7", "quotients that are ties: the inverse would miss them", k_scale=7.0, rope=None),
    _case("scale-tiny", "quotients overflow", k_scale=1e-3),
    _case("scale-huge", "quotients vanish", k_scale=1e6),
    _case("halves", "transposed q_nope, sliced q_pe", 7, query_layout="halves", num_heads=12),
    _case("padded", "heads and rows apart", query_layout="padded", kv_format="fp8_ds_mla"),
    _case("no-slot", "queries without rows: another rank owns them", slots="none"),
    _case("short-slots", "tokens past the end of slot_mapping are padding", 16, slots="short", kv_format="bf16"),
    _case("reserved", "a slot that engines keep for padding", 6, slots="all", reserved_slot=0),
    _case("one-token", "the least batch", 1, slots="all", num_heads=1),
    _case("tokens-33", "a key that is rounded twice shows", 33, values="normal", k_scale=1.0),
    _case("no-token", "nothing to do", 0),
    _case("page-1", "a page of one token", page_size=1),
    _case("page-7", "not a power of two", page_size=7, kv_format="fp8_ds_mla"),
    _case("page-stride-61", "layers interleaved in one pool", page_stride=61, page_size=4),
    _case("page-gap", "pages apart by no whole row", page_gap=128, kv_format="bf16"),
    _case("row-gap", "rows wider than what is stored", row_gap=64, kv_format="fp8_ds_mla"),
    _case("unaligned", "rows that no 16-byte store may take", row_gap=2, page_gap=2, kv_format="bf16"),
    _case("unaligned-fp8", "the same at single bytes", row_gap=1, page_size=3),
    *(
        _on(check_grid, f"gpu-epilogue-grid-{f}", 257, kv_format=f, num_heads=128, query_layout="halves", gpu=True)
        for f in _FORMATS
    ),
    *(_on(check_far_slots, f"gpu-epilogue-far-{f}", 6, kv_format=f, slots="all", gpu=True) for f in ("fp8_e4m3fn", "bf16")),
    *(
        _on(check_graph, f"gpu-epilogue-graph-{q}-{f}", 17, kv_format=f, q_format=q, gpu=True)
        for q, f in (("bf16", "fp8_e4m3fn"), ("fp8_e4m3fn", "fp8_e4m3fn"), ("bf16", "fp8_ds_mla"))
    ),
)  # fmt: skip
