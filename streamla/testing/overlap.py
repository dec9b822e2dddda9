"""Producer, epilogue and attention, layer after layer on one query buffer, one cache and the same slots: however
much their launches overlap, the bits are those of one kernel after another.

The producer writes the query late, and on Hopper lets the epilogue in as soon as the rule of programmatic
launch allows (docs/epilogue.md).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from streamla import api
from streamla.arch import arch_of
from streamla.formats import encode_rows
from streamla.plan import DecodePlan
from streamla.runtime.driver import I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.testing.budget import Deviation
from streamla.testing.case import Case
from streamla.testing.invariants import Invariant

PRODUCER = """
extern "C" __global__ void produce(const unsigned* source, unsigned* query, long long words) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < 3000);
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) query[i] = source[i];
}
"""
LAYERS, REPLAYS = 8, 1000

Produce = Callable[[torch.Tensor, torch.Tensor], None]


def late_producer(device: torch.device) -> Produce:
    """What copies its first argument to its second, some microseconds after it has begun."""
    if arch_of(device).target != "sm_90a":

        def sleep_and_copy(source: torch.Tensor, query: torch.Tensor) -> None:
            torch.cuda._sleep(5000)
            query.copy_(source)

        return sleep_and_copy

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "produce.cu"
        path.write_text(PRODUCER)
        cubin = compile_cuda(path)
    kernel = Kernel(cubin, "produce", (PTR, PTR, I64), threads=256, pdl=True)

    def produce(source: torch.Tensor, query: torch.Tensor) -> None:
        kernel.launch(100, source.data_ptr(), query.data_ptr(), query.numel() // 2)

    return produce


@dataclasses.dataclass
class Layers:
    """Layers that share the query's buffers, the cache and the slots, so that every one rewrites what the
    one before has just read."""

    case: Case
    impl: str
    produce: Produce
    cache: torch.Tensor  # (pages, page, row)
    page_table: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor  # (LAYERS, tokens, heads, head_dim)
    new_rows: torch.Tensor  # (LAYERS, tokens, head_dim)
    cos_sin: torch.Tensor
    plan: DecodePlan

    def __post_init__(self) -> None:
        spec, device = self.case.spec, self.cache.device
        self.query = torch.empty_like(self.sources[0])
        self.q = torch.empty_like(self.query)
        self.positions = torch.arange(len(self.query), device=device)
        shape = (LAYERS, len(self.case.lengths), spec.seqlen_q, spec.num_heads)
        self.out = torch.empty(*shape, spec.kv_lora_rank, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=device)

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        return self.out.view(torch.int16), self.lse, self.cache.view(torch.uint8)

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        spec, latent = self.case.spec, self.case.spec.kv_lora_rank
        for layer in range(LAYERS):
            self.produce(self.sources[layer], self.query)
            between()
            row = self.new_rows[layer]
            api.epilogue(
                self.query[..., :latent], self.query[..., latent:], row[:, :latent], row[:, latent:], self.cache,
                self.slots, spec, q_out=self.q, positions=self.positions, cos_sin=self.cos_sin,
                rope="interleaved", inputs_ready=True, impl=self.impl,
            )  # fmt: skip
            between()
            api.decode(
                self.q.unflatten(0, self.out.shape[1:3]), self.cache, self.page_table, self.plan,
                softmax_scale=0.07, out=self.out[layer], lse=self.lse[layer], return_lse=True,
            )  # fmt: skip
            between()


def build_layers(case: Case, impl: str, device: torch.device, seed: int) -> Layers:
    generator = torch.Generator(device).manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    spec, lengths = case.spec, case.lengths
    tokens = len(lengths) * spec.seqlen_q
    pages = [-(-n // spec.page_size) for n in lengths]
    first_page = [sum(pages[:b]) for b in range(len(pages))]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=device)
    for b, count in enumerate(pages):
        table[b, :count] = torch.arange(count) + first_page[b]
    slots = [
        first_page[b] * spec.page_size + lengths[b] - spec.seqlen_q + i
        for b in range(len(lengths))
        for i in range(spec.seqlen_q)
    ]
    angle = torch.rand(tokens, spec.qk_rope_head_dim // 2, generator=generator, device=device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Layers(
        case=case,
        impl=impl,
        produce=late_producer(device),
        cache=encode_rows(values(sum(pages), spec.page_size, spec.head_dim), spec),
        page_table=table,
        slots=torch.tensor(slots, device=device),
        sources=values(LAYERS, tokens, spec.num_heads, spec.head_dim),
        new_rows=values(LAYERS, tokens, spec.head_dim),
        cos_sin=torch.cat([angle.cos(), angle.sin()], -1),
        plan=api.plan(seqlens, spec, impl=impl),
    )


def overlapped_layers(case: Case, impl: str, device: torch.device, seed: int) -> Deviation:
    """Eight layers overlap over one cache, a thousand times: the bits of one kernel after another."""
    layers = build_layers(case, impl, device, seed)
    layers.run(torch.cuda.synchronize)
    want = [tensor.clone() for tensor in layers.written]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run()
    wrong = torch.zeros(3, dtype=torch.int64, device=device)
    for _ in range(REPLAYS):
        layers.out.zero_()
        graph.replay()
        for i, tensor in enumerate(layers.written):
            wrong[i] += (tensor != want[i]).any()
    assert wrong.tolist() == [0, 0, 0], (
        f"replays with another out, lse or cache: {wrong.tolist()} of {REPLAYS}"
    )
    return Deviation(0.0, 0.0, "out, lse and cache")


_LENGTHS = (700, 2100, 65, 64, 3000, 129, 1, 1500)


def _on(num_heads: int, kv_format: str, seqlen_q: int = 1) -> Invariant:
    name = f"gpu-overlap-{kv_format}-{num_heads}-heads" + ("-causal" if seqlen_q > 1 else "")
    case = Case(
        name, "", _LENGTHS[::seqlen_q], num_heads=num_heads, kv_format=kv_format, seqlen_q=seqlen_q,
        gpu=True,
    )  # fmt: skip
    return Invariant(name, str(overlapped_layers.__doc__), case, overlapped_layers)


OVERLAP: tuple[Invariant, ...] = (
    _on(16, "fp8_e4m3fn"),
    _on(8, "fp8_e4m3fn", seqlen_q=2),
    _on(16, "bf16"),
    _on(16, "fp8_ds_mla"),
    _on(64, "fp8_e4m3fn"),
)
