"""Cases and checks of `decode_step`: to the last bit what `epilogue` and `decode` give, cache included.

`verify` runs them after those of the epilogue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from streamla import api
from streamla.plan import DecodePlan
from streamla.testing.budget import Deviation
from streamla.testing.build import Inputs
from streamla.testing.canary import HUGE_BYTE, NAN_BYTE
from streamla.testing.case import Case
from streamla.testing.checks import assert_same_bits, guarded
from streamla.testing.epilogue import assert_equal, memory_of, row_parts
from streamla.testing.invariants import Check, Invariant
from streamla.testing.step_build import StepCase, StepInputs, build_step

EQUAL = Deviation(0.0, 1.0, "out")


@contextmanager
def kept(inputs: StepInputs) -> Iterator[None]:
    """The cache is afterwards as it was, gaps included."""
    memory = memory_of(inputs.held.kv_cache)
    before = memory.clone()
    yield
    memory.copy_(before)


def expect(inputs: StepInputs, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, lse and all memory of the cache after `epilogue` and `decode`; the cache is left as it was."""
    with kept(inputs):
        out, lse = inputs.two_calls(plan)
        return out, lse, memory_of(inputs.held.kv_cache).clone()


def check_equal(
    inputs: StepInputs, out: torch.Tensor, lse: torch.Tensor,
    want: tuple[torch.Tensor, torch.Tensor, torch.Tensor], what: str,
) -> None:  # fmt: skip
    check_cache(inputs.held, want[2])
    assert_same_bits("out", out, want[0], what)
    assert_same_bits("lse", lse, want[1], what)


def check_cache(held: Inputs, want: torch.Tensor) -> None:
    """Every byte that holds the cache, gaps included; any NaN of a row equals any other."""
    actual = memory_of(held.kv_cache)
    if torch.equal(actual, want):
        return
    cache = held.kv_cache
    wanted = want.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())
    rows, want_rows = (t.view(torch.uint8).flatten(0, 1) for t in (cache, wanted))
    for name, dtype, part in row_parts(held.spec):
        assert_equal(
            f"kv_cache {name}", *(r[:, part].contiguous().view(dtype) for r in (rows, want_rows))
        )
    gaps = actual.clone()
    gaps.view(cache.dtype).as_strided(wanted.shape, wanted.stride(), wanted.storage_offset()).copy_(
        wanted
    )
    changed = int((gaps != want).sum())
    assert changed == 0, f"kv_cache: {changed} bytes written between rows"


def check_step(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """out, lse and every byte of the cache equal what epilogue and decode give; nothing else is written."""
    assert isinstance(case, StepCase)
    inputs = build_step(case, device, seed, case.poisons[0])
    plan = guarded(inputs.held, impl, NAN_BYTE)
    want = expect(inputs, plan)
    before = {name: t.clone() for name, t in inputs.read.items()}
    out, lse = inputs.held.outputs()
    with kept(inputs):
        check_equal(inputs, *inputs.step(plan, out=out, lse=lse), want, "decode_step")
    inputs.held.check_canaries()
    for name, then in before.items():
        assert_equal(name, inputs.read[name], then)
    # The plan's second use, tensors of their own, outputs that are allocated.
    for name in ("q_nope", "q_pe", "kv_c", "k_pe"):
        setattr(inputs, name, getattr(inputs, name).contiguous())
    check_equal(inputs, *inputs.step(plan), want, "decode_step again")
    return EQUAL


def check_repeats(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Hundreds of steps on one plan, poison under the new rows each time: not a bit changes."""
    assert isinstance(case, StepCase)
    inputs = build_step(case, device, seed)
    plan = guarded(inputs.held, impl, NAN_BYTE)
    want = expect(inputs, plan)
    memory = memory_of(inputs.held.kv_cache)
    poisoned = memory.clone()
    for repetition in range(300):
        memory.copy_(poisoned)
        check_equal(inputs, *inputs.step(plan), want, f"repetition {repetition}")
    return EQUAL


def check_graph(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Captured once; replayed with other lengths, tokens, slots, positions and tables."""
    assert isinstance(case, StepCase)
    inputs = build_step(case, device, seed)
    held = inputs.held
    plan = guarded(held, impl, NAN_BYTE)
    out, lse = held.outputs()

    def step() -> None:
        api.plan(held.cache_seqlens, held.spec, impl=impl, out=plan)
        inputs.step(plan, out=out, lse=lse)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    longest = case.lengths
    replays = (
        longest, (0,) * len(longest), tuple(min(n, 1) for n in longest), tuple(n // 2 for n in longest),
        tuple(n * (b % 2) for b, n in enumerate(longest)), tuple(min(n, 65) for n in longest), longest,
    )  # fmt: skip
    for i, lengths in enumerate(replays):
        other_case = dataclasses.replace(
            case, lengths=lengths, slots=("all", "some")[i % 2], table_extra=held.page_table.shape[1],
            pool_pages=len(held.kv_cache),
        )  # fmt: skip
        other = build_step(other_case, device, seed + i, ("nan", "huge")[i % 2])
        other.held.page_table = other.held.page_table[:, : held.page_table.shape[1]].contiguous()
        want = expect(other, guarded(other.held, impl, HUGE_BYTE))
        memory_of(held.kv_cache).copy_(memory_of(other.held.kv_cache))
        for name, target in inputs.read.items():
            target.copy_(other.read[name])
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check_equal(inputs, out, lse, want, f"replay {i}")
    held.check_canaries()
    return EQUAL


def _case(
    name: str, reason: str, lengths: tuple[int, ...] = (130, 0, 64, 65, 1), **options
) -> Invariant:
    case = StepCase(f"step-{name}", reason, lengths, **options)
    return Invariant(case.name, reason, case, check_step)


def _on(check: Check, name: str, lengths: tuple[int, ...], **options) -> Invariant:
    case = StepCase(name, str(check.__doc__), lengths, **options)
    return Invariant(name, case.reason, case, check)


_ROPES = (None, "interleaved", "neox")
_LONG = (5000, 1, 700, 64, 0, 129, 20000, 33)
_FAR = tuple(64 * k - k % 3 for k in range(301, 333))

STEP: tuple[Invariant, ...] = (
    *(_case(f"{rope or 'nope'}", "rotated either way or not", rope=rope) for rope in _ROPES),
    *(_case(f"{f}", "every format", kv_format=f, rope=rope) for f, rope in (("bf16", "neox"), ("fp8_e4m3fnuz", None), ("fp8_ds_mla", "interleaved"))),
    *(
        _case(f"queries-{s}-{rope or 'nope'}", "several new tokens, over tiles and pages", (130, 65, s - 1, 0, 66, 200), seqlen_q=s, num_heads=4, rope=rope)
        for s, rope in ((2, "neox"), (3, None), (4, "interleaved"), (5, "neox"))
    ),
    _case("places", "positions as a model has them", places=True),
    _case("places-neox", "the same of several new tokens", (130, 65, 1, 0, 66), seqlen_q=4, num_heads=4, rope="neox", places=True),
    _case("not-causal", "every query sees every new token", (130, 65, 2), seqlen_q=3, num_heads=8, causal=False),
    _case("some-slots", "rows that are skipped are read as they are", (130, 0, 64, 65, 1, 300, 2), slots="some"),
    _case("some-slots-causal", "the same beside rows that are written", (130, 3, 64, 65, 1, 300), slots="some", seqlen_q=4, num_heads=4),
    _case("no-slot", "queries without rows: another rank owns them", slots="none", rope="neox"),
    _case("short-slots", "tokens past the end of slot_mapping are padding", (130, 5, 64, 1, 0, 0), slots="short"),
    _case("reserved", "a slot that engines keep for padding", (1, 64), page_size=1, pool_pages=65, reserved_slot=0),
    _case("scale-7", "quotients that are ties: the inverse would miss them", k_scale=7.0),
    _case("scale-tiny", "quotients overflow", k_scale=1e-3),
    _case("no-scale", "a scale of one", k_scale=1.0, values="wide"),
    _case("special", "zeros, ties, subnormals, overflow, infinity, NaN", values="special", k_scale=1.0, rope=None),
    _case("special-rotated", "infinity and NaN through the rotation", (130, 64, 65, 1, 7, 9, 300), values="special", k_scale=2.0),
    _case("halves", "transposed q_nope, sliced q_pe", query_layout="halves", num_heads=12),
    _case("padded", "heads and rows apart", query_layout="padded", num_heads=8),
    _case("unaligned", "new rows that no 16-byte load may take", gap=1),
    _case("page-1", "a page of one token", page_size=1),
    _case("page-7", "not a power of two", page_size=7, seqlen_q=3, num_heads=5),
    _case("page-48", "tiles that end within a page", page_size=48, seqlen_q=2),
    _case("page-stride-61", "layers interleaved in one pool", (30, 5, 64), page_stride=61, page_size=4),
    _case("page-gap", "pages apart by no whole row", page_gap=128),
    _case("row-gap", "rows wider than what is stored", row_gap=64),
    _case("one-head", "the fewest rows", num_heads=1),
    _case("heads-24", "more than 16 rows", num_heads=24),
    _case("heads-32", "the most rows of the narrow kernel", num_heads=32, rope="neox"),
    _case("heads-64", "more rows than it takes", num_heads=64),
    _case("base-2", "logarithms of base 2", lse_base="2"),
    _case("invariant", "split points of their own", (3000, 5, 700), batch_invariant=True),
    *(
        _case(f"gpu-{f}-{rope or 'nope'}-{s}", "many splits, empty requests, one token", _LONG, gpu=True, kv_format=f, rope=rope, seqlen_q=s, num_heads=16 // s)
        for f, rope, s in (("fp8_e4m3fn", "interleaved", 1), ("fp8_e4m3fn", "neox", 2), ("fp8_e4m3fn", None, 4), ("bf16", "interleaved", 1))
    ),
    _case("gpu-many", "several requests a program", tuple(1 + 37 * b % 150 for b in range(700)), gpu=True, slots="some", places=True),
    _on(check_repeats, "gpu-step-repeats", _FAR, gpu=True, places=True),
    _on(check_repeats, "gpu-step-repeats-short", tuple(range(1, 400)), gpu=True),
    _on(check_repeats, "gpu-step-repeats-causal", _FAR, seqlen_q=4, num_heads=8, gpu=True, rope="neox"),
    _on(check_graph, "gpu-step-graph", _LONG, gpu=True),
    _on(check_graph, "gpu-step-graph-causal", _LONG, seqlen_q=4, num_heads=4, rope="neox", gpu=True),
    _on(check_graph, "gpu-step-graph-bf16", _LONG, kv_format="bf16", gpu=True),
)  # fmt: skip
