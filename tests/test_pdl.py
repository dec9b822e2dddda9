"""Producer, epilogue and attention overlap on Hopper, and the bits are those of one kernel after another."""

import pytest
import torch

import streamla
from streamla import MLASpec
from streamla.arch import arch_of
from streamla.formats import encode_rows
from streamla.runtime.driver import I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.select import select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or arch_of(torch.device("cuda")).target != "sm_90a",
        reason="needs Hopper",
    ),
]

# Lets the next grid in as soon as the rule allows, and writes late.
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


class Step:
    """Layers that share the query's buffers, the cache and the slots, so that every one rewrites what the
    one before has just read."""

    def __init__(self, spec: MLASpec, producer: Kernel, lengths: list[int], seed: int) -> None:
        device = torch.device("cuda")
        generator = torch.Generator(device).manual_seed(seed)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        self.spec, self.producer, batch = spec, producer, len(lengths)
        tokens = batch * spec.seqlen_q
        pages = [-(-n // spec.page_size) for n in lengths]
        self.table = torch.zeros(batch, max(pages), dtype=torch.int32, device=device)
        for b in range(batch):
            self.table[b, : pages[b]] = torch.arange(pages[b]) + sum(pages[:b])
        self.slots = torch.tensor(
            [
                sum(pages[:b]) * spec.page_size + lengths[b] - spec.seqlen_q + i
                for b in range(batch)
                for i in range(spec.seqlen_q)
            ],
            device=device,
        )
        rows = values(sum(pages), spec.page_size, spec.head_dim)
        self.cache = encode_rows(rows, spec)
        self.sources = values(LAYERS, tokens, spec.num_heads, spec.head_dim)
        self.new_rows = values(LAYERS, tokens, spec.head_dim)
        self.query = torch.empty_like(self.sources[0])
        self.q = torch.empty_like(self.query)
        self.positions = torch.arange(tokens, device=device)
        angle = torch.rand(tokens, 32, generator=generator, device=device)
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
        self.plan = streamla.plan(
            torch.tensor(lengths, dtype=torch.int32, device=device), spec, impl="sm90"
        )
        shape = (LAYERS, batch, spec.seqlen_q, spec.num_heads)
        self.out = torch.empty(*shape, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=device)

    def run(self, between=lambda: None) -> None:
        latent = self.spec.kv_lora_rank
        for layer in range(LAYERS):
            words = self.query.numel() // 2
            source = self.sources[layer]
            self.producer.launch(100, source.data_ptr(), self.query.data_ptr(), words)
            between()
            row = self.new_rows[layer]
            streamla.epilogue(
                self.query[..., :latent], self.query[..., latent:], row[:, :latent], row[:, latent:], self.cache,
                self.slots, self.spec, q_out=self.q, positions=self.positions, cos_sin=self.cos_sin,
                rope="interleaved", inputs_ready=True, impl="sm90",
            )  # fmt: skip
            between()
            streamla.decode(
                self.q.unflatten(0, self.out.shape[1:3]), self.cache, self.table, self.plan,
                softmax_scale=0.07, out=self.out[layer], lse=self.lse[layer], return_lse=True,
            )  # fmt: skip
            between()


@pytest.mark.parametrize(
    ("num_heads", "kv_format", "seqlen_q"),
    [
        (16, "fp8_e4m3fn", 1),
        (8, "fp8_e4m3fn", 2),
        (16, "bf16", 1),
        (16, "fp8_ds_mla", 1),
        (64, "fp8_e4m3fn", 1),
    ],
)
def test_overlapped_layers_are_those_in_order(tmp_path, num_heads, kv_format, seqlen_q, seed):
    (tmp_path / "produce.cu").write_text(PRODUCER)
    producer = Kernel(
        compile_cuda(tmp_path / "produce.cu"), "produce", (PTR, PTR, I64), threads=256, pdl=True
    )
    spec = MLASpec(num_heads, kv_format, seqlen_q=seqlen_q)
    assert select(spec, arch_of(torch.device("cuda"))).name == "sm90"
    step = Step(
        spec, producer, [700, 2100, 65, 64, 3000, 129, 1, 1500][:: 1 + (seqlen_q > 1)], seed
    )
    step.run(torch.cuda.synchronize)
    want_out, want_lse = step.out.view(torch.int16).clone(), step.lse.clone()
    want_cache = step.cache.view(torch.uint8).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    wrong = torch.zeros(3, dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        step.out.zero_()
        graph.replay()
        for i, (got, want) in enumerate(
            (
                (step.out.view(torch.int16), want_out),
                (step.lse, want_lse),
                (step.cache.view(torch.uint8), want_cache),
            )
        ):
            wrong[i] += (got != want).any()
    assert wrong.tolist() == [0, 0, 0], f"replays with another out, lse or cache: {wrong.tolist()}"
