"""The epilogue beside vLLM's fused operator and plain torch: launch after launch in a graph.

All candidates of a shape take the same tensors, and they are replayed in turn. Nothing is evicted between
launches: the product that makes the query has just written it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from streamla import api
from streamla.arch import arch_of
from streamla.bench import timing
from streamla.bench.peers import vllm_epilogue
from streamla.formats import encode_rows, to_fp8
from streamla.reference import epilogue_reference, rotate
from streamla.select import select
from streamla.spec import KVFormat, MLASpec

SCHEMA = "streamla-epilogue/1"
LAUNCHES = 64  # in a graph
PAGE_SIZE = 64
NUM_POSITIONS = 4096
FORMATS = (  # of the cache and of the query
    (KVFormat.BF16, KVFormat.BF16),
    (KVFormat.FP8_E4M3FN, KVFormat.FP8_E4M3FN),
    (KVFormat.FP8_E4M3FN, KVFormat.BF16),
    (KVFormat.FP8_DS_MLA, KVFormat.BF16),
)


@dataclass(frozen=True)
class EpilogueRecord:
    """One shape. Times are microseconds a launch, medians over replays of a graph; None where not measured.

    Attributes:
        tokens, num_heads, format, q_format, rope: the shape: formats of the cache and of the query.
        impl: which of ours is `us`.
        us, us_p25, us_p75: ours, and its quartiles.
        vllm_us, torch_us: vLLM's fused operator; concatenation, rounding and index_put in plain torch.
        vllm_same: share of vLLM's bytes of query and new rows that are ours.
    """

    tokens: int
    num_heads: int
    format: str
    q_format: str
    rope: str | None
    impl: str
    us: float | None = None
    us_p25: float | None = None
    us_p75: float | None = None
    vllm_us: float | None = None
    torch_us: float | None = None
    vllm_same: float | None = None


class Tensors:
    """What one shape reads and writes, laid out as in an engine."""

    def __init__(self, record: EpilogueRecord, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        tokens, heads, self.rope = record.tokens, record.num_heads, record.rope
        self.formats = (KVFormat(record.format), KVFormat(record.q_format))
        self.spec = MLASpec(heads, self.formats[0], PAGE_SIZE)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        q_nope = values(heads, tokens, 512).transpose(0, 1)  # a batched product's result
        q_pe = values(tokens, heads, 192)[..., 128:]
        self.inputs = (q_nope, q_pe, values(tokens, 512), values(tokens, 2112)[:, 2048:])
        pages = -(-2 * tokens // PAGE_SIZE) + 1
        shape = (pages, PAGE_SIZE, self.spec.row_width)
        self.kv_cache = torch.zeros(shape, dtype=self.formats[0].storage_dtype, device=device)
        self.slots = torch.randperm(pages * PAGE_SIZE, generator=generator, device=device)[:tokens]
        self.q_scale = self.k_scale = torch.ones(1, device=device)
        angle = 100 * torch.rand(NUM_POSITIONS, 32, generator=generator, device=device)
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
        self.positions = torch.randint(NUM_POSITIONS, (tokens,), generator=generator, device=device)
        self.q_out = torch.empty(
            (tokens, heads, 576), dtype=self.formats[1].storage_dtype, device=device
        )

    @property
    def options(self) -> dict:
        kv_format, q_format = self.formats
        return {
            "positions": self.positions if self.rope else None,
            "cos_sin": self.cos_sin if self.rope else None,
            "rope": self.rope,
            "q_scale": self.q_scale if q_format.has_scale else None,
            "k_scale": self.k_scale if kv_format.has_scale else None,
            "q_format": q_format,
        }

    def written(self) -> torch.Tensor:
        """Bytes of the query and of the new rows."""
        rows = self.kv_cache.view(torch.uint8).flatten(0, 1)[self.slots]
        return torch.cat([self.q_out.view(torch.uint8).flatten(), rows.flatten()])

    def wipe(self) -> None:
        self.q_out.view(torch.uint8).fill_(0x55)
        self.kv_cache.view(torch.uint8).fill_(0x55)

    def ours(self, impl: str) -> None:
        api.epilogue(
            *self.inputs, self.kv_cache, self.slots, self.spec, **self.options, q_out=self.q_out,
            inputs_ready=True, impl=impl,
        )  # fmt: skip

    def plain_torch(self) -> None:
        q_nope, q_pe, kv_c, k_pe = self.inputs
        kv_format, q_format = self.formats
        if self.rope:
            table = self.cos_sin[self.positions]
            q_pe, k_pe = (rotate(t, table, self.rope).to(torch.bfloat16) for t in (q_pe, k_pe))
        if q_format is KVFormat.BF16:
            torch.cat([q_nope, q_pe], -1, out=self.q_out)
        else:
            q = torch.cat([q_nope, q_pe], -1)
            self.q_out.copy_(to_fp8(q / self.q_scale, q_format.storage_dtype))
        scale = self.k_scale if kv_format.has_scale else None
        rows = encode_rows(torch.cat([kv_c, k_pe], -1), self.spec, scale)
        as_stored = torch.bfloat16 if kv_format is KVFormat.BF16 else torch.uint8
        cache = self.kv_cache.view(as_stored).flatten(0, 1)
        cache[self.slots] = rows.view(as_stored)

    def vllm(self) -> Callable[[], None] | None:
        if self.rope == "neox":
            return None
        return vllm_epilogue.call(
            self.formats, self.inputs, self.q_out, self.kv_cache, self.slots,
            (self.q_scale, self.k_scale), (self.positions, self.cos_sin) if self.rope else None,
        )  # fmt: skip


def measure(
    record: EpilogueRecord, device: torch.device, with_vllm: bool, seed: int = 0
) -> EpilogueRecord:
    """Check ours against the oracle, bit for bit, then time all three. Raises ValueError if ours is wrong."""
    tensors = Tensors(record, device, seed)
    tensors.wipe()
    tensors.q_out.copy_(
        epilogue_reference(
            *tensors.inputs, tensors.kv_cache, tensors.slots, tensors.spec, **tensors.options
        )
    )
    want = tensors.written()
    tensors.wipe()
    tensors.ours(record.impl)
    if not torch.equal(tensors.written(), want):
        raise ValueError(f"epilogue: {record.impl} differs from the oracle for {record}")
    calls = {"ours": [lambda: tensors.ours(record.impl)] * LAUNCHES}
    vllm, same = tensors.vllm() if with_vllm else None, None
    if vllm is not None:
        tensors.wipe()
        vllm()
        same = float((tensors.written() == want).float().mean())
        calls["vllm"] = [vllm] * LAUNCHES
    tensors.plain_torch()
    calls["torch"] = [tensors.plain_torch] * LAUNCHES
    times = timing.time_graphs(calls)
    ours = times["ours"]
    return replace(
        record, us=ours.us, us_p25=ours.us_p25, us_p75=ours.us_p75, torch_us=times["torch"].us,
        vllm_us=times["vllm"].us if vllm is not None else None, vllm_same=same,
    )  # fmt: skip


def shapes(
    tokens: Sequence[int],
    heads: Sequence[int],
    ropes: Sequence[str | None],
    device: torch.device,
    impl: str,
) -> list[EpilogueRecord]:
    """Every combination, not yet measured."""
    arch = arch_of(device)
    return [
        EpilogueRecord(
            n, h, kv_format.value, q_format.value, rope,
            select(MLASpec(h, kv_format, PAGE_SIZE), arch, impl, epilogue=True).name,
        )
        for rope in ropes
        for kv_format, q_format in FORMATS
        for h in heads
        for n in tokens
    ]  # fmt: skip
