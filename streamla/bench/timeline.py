"""From the producer's end to attention's first read: how long, and what happens meanwhile.

Debug builds of the kernels note the GPU's clock when a program comes to its wait, when that is over and when its
last store is issued. A lane is one way from the producer to attention; `lanes` has them all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from streamla import api
from streamla.bench.epilogue import EpilogueRecord, Tensors
from streamla.kernels.sm90 import narrow
from streamla.kernels.sm90.launch import cache_view, launch_attention, step_arguments
from streamla.plan import DecodePlan
from streamla.runtime.driver import I32, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.spec import KVFormat
from streamla.step import NewTokens

SCHEMA = "streamla-timeline/1"
PRODUCER = Path(__file__).with_name("timeline.cu")
PRODUCER_PROGRAMS, PRODUCER_NS = 132, 4000
REPLAYS = 51
STAMPS = 3  # as in ptx.cuh: arrived, released, done
MAX_PROGRAMS = 4096


@dataclass(frozen=True)
class Span:
    """A kernel's time, in microseconds after the producer's end.

    Attributes:
        name: of the kernel.
        begin: when its first program came to its wait.
        released: when the wait was over, in the first program.
        end: when the last program had issued its stores; None where that is not drawn.
    """

    name: str
    begin: float
    released: float
    end: float | None


@dataclass(frozen=True)
class Lane:
    """One way from the producer to attention, in the replay of the median window.

    Attributes:
        window_us: from the producer's end to attention's first read, the median of all replays.
        windows_us: of each replay, in rising order.
        launches: kernels from the producer to attention, both counted.
    """

    name: str
    window_us: float
    windows_us: list[float]
    launches: int
    spans: list[Span]


class Stamped:
    """A debug build of a kernel, and the times its last launch left."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.times = torch.zeros(MAX_PROGRAMS, STAMPS, dtype=torch.int64, device=device)

    @property
    def defines(self) -> dict[str, int]:
        return {"STREAMLA_STAMPS": self.times.data_ptr()}

    def span(self, zero: int, ends: bool) -> Span:
        times = self.times[self.times[:, 0] > 0].cpu() - zero
        begin, released, end = times[:, 0].min(), times[:, 1].min(), times[:, 2].max()
        return Span(
            self.name, int(begin) / 1e3, int(released) / 1e3, int(end) / 1e3 if ends else None
        )


class Chain:
    """The tensors and the stamped kernels of one shape."""

    def __init__(self, requests: int, context: int, num_heads: int, device: torch.device) -> None:
        fp8 = KVFormat.FP8_E4M3FN.value
        record = EpilogueRecord(requests, num_heads, fp8, "bf16", "interleaved", "sm90")
        self.device, self.tensors = device, Tensors(record, device, 0)
        spec = self.tensors.spec
        pages = -(-context // spec.page_size)
        self.cache = torch.zeros(
            requests * pages, spec.page_size, spec.row_width, dtype=torch.uint8, device=device
        ).view(spec.kv_format.storage_dtype)
        self.table = torch.arange(requests * pages, dtype=torch.int32, device=device)
        self.table = self.table.view(requests, pages)
        self.tensors.kv_cache = self.cache
        self.tensors.slots = (
            self.table[:, -1].long() * spec.page_size + (context - 1) % spec.page_size
        )
        lengths = torch.full((requests,), context, dtype=torch.int32, device=device)
        self.plan: DecodePlan = api.plan(lengths, spec, impl="sm90")
        rows = (requests, 1, num_heads)
        self.out = torch.empty(*rows, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.query = torch.randn(num_heads, requests, 576, device=device).bfloat16()
        self.source = self.query.clone()
        q_nope, q_pe = self.query.transpose(0, 1).split((512, 64), -1)
        self.tensors.inputs = (q_nope, q_pe, *self.tensors.inputs[2:])
        self.producer, self.epilogue, self.attention = (
            Stamped(name, device) for name in ("producer", "epilogue", "attention")
        )
        self._produce = Kernel(
            compile_cuda(PRODUCER), "produce", (PTR, PTR, I32, I32, I32, PTR), threads=256, pdl=True
        )

    def run_producer(self, early: bool) -> None:
        self._produce.launch(
            PRODUCER_PROGRAMS, self.source.data_ptr(), self.query.data_ptr(), self.query.numel() // 8,
            PRODUCER_NS, early, self.producer.times.data_ptr(),
        )  # fmt: skip

    def epilogue_call(self, pdl: bool) -> Callable[[], None]:
        from streamla.kernels.sm90.epilogue import PARAMS, SOURCE, defines, launch, threads

        t = self.tensors
        kernel = Kernel(
            compile_cuda(SOURCE, defines={**defines(*t.formats), **self.epilogue.defines}),
            "mla_epilogue_1", PARAMS, threads=threads(1), pdl=pdl,
        )  # fmt: skip
        return lambda: launch(
            kernel, 1, *t.inputs, self.cache, t.slots, t.q_out, t.spec, t.positions, t.cos_sin, t.rope,
            None, t.k_scale, None, pdl,
        )  # fmt: skip

    def attention_call(self, pdl: bool, step: bool = False) -> Callable[[], None]:
        """Attention of the epilogue's query; or with `step`, of the producer's, and it writes the new rows."""
        t, variant = self.tensors, narrow.Variant.of(self.tensors.spec, step=step)
        model = narrow.attention_kernel(variant)
        kernel = Kernel(
            compile_cuda(narrow.SOURCE, defines={**variant.defines, **self.attention.defines}),
            model.name, model.params, threads=model.threads, shared_bytes=model.shared_bytes,
            cooperative=model.cooperative, pdl=pdl,
        )  # fmt: skip
        cache = (*cache_view(self.cache), t.k_scale.data_ptr())
        programs = self.plan.cost.num_programs * variant.row_tiles
        q_nope, q_pe = t.q_out.split((512, 64), -1)
        arguments: tuple[int, ...] = ()
        if step:
            q_nope, q_pe, kv_c, k_pe = t.inputs
            new = NewTokens(kv_c, k_pe, t.slots, t.positions, t.cos_sin, t.rope, None)
            arguments = step_arguments(new, self.cache, self.plan)
        return lambda: launch_attention(
            kernel, programs, q_nope.unsqueeze(1), q_pe.unsqueeze(1), cache, self.table, self.plan, self.out,
            self.lse, 0.07, True, 1.0, True, arguments,
        )  # fmt: skip

    def lane(
        self,
        name: str,
        calls: Sequence[Callable[[], None]],
        launches: int,
        stamped: Sequence[Stamped],
    ) -> Lane:
        """Replay `calls` and read the stamps of `stamped`: the producer's first, attention's last."""
        for call in calls:  # what compiles does so now
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        samples: list[tuple[float, list[Span]]] = []
        for replay in range(REPLAYS + 3):
            for s in stamped:
                s.times.zero_()
            graph.replay()
            torch.cuda.synchronize()
            if replay < 3:
                continue
            zero = int(stamped[0].times[:, STAMPS - 1].max())
            spans = [s.span(zero, ends=s is not stamped[-1]) for s in stamped]
            samples.append((spans[-1].released, spans))
        samples.sort(key=lambda sample: sample[0])
        windows = [window for window, _ in samples]
        return Lane(
            name, statistics.median(windows), windows, launches, samples[len(samples) // 2][1]
        )


def lanes(requests: int, context: int, num_heads: int, device: torch.device) -> list[Lane]:
    """Plain torch; the epilogue, in stream order and in both ways of programmatic launch; no epilogue at all."""
    chain = Chain(requests, context, num_heads, device)
    late, early = (lambda early=early: chain.run_producer(early) for early in (False, True))
    ends = (chain.producer, chain.attention)
    all_three = (chain.producer, chain.epilogue, chain.attention)
    ordered, overlapped = chain.attention_call(False), chain.attention_call(True)
    torch_launches = _launches(chain.tensors.plain_torch)
    return [
        chain.lane("torch", [late, chain.tensors.plain_torch, ordered], torch_launches + 2, ends),
        chain.lane("epilogue", [late, chain.epilogue_call(False), ordered], 3, all_three),
        chain.lane(
            "epilogue, programmatic launch",
            [late, chain.epilogue_call(True), overlapped], 3, all_three,
        ),
        chain.lane(
            "epilogue, programmatic launch, producer too",
            [early, chain.epilogue_call(True), overlapped], 3, all_three,
        ),
        chain.lane(
            "decode_step, programmatic launch, producer too",
            [early, chain.attention_call(True, step=True)], 2, ends,
        ),
    ]  # fmt: skip


def _launches(call: Callable[[], None]) -> int:
    """Kernels and copies that `call` launches."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())
