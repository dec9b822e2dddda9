"""What the epilogue costs a decode step: decode alone, decode_step, and the two calls one after the other.

The three are replayed in turn, on the same plan and the same cold regions of the cache (timing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamla import api
from streamla.bench import timing
from streamla.bench.inputs import CachePool, Inputs
from streamla.bench.workloads import Workload
from streamla.select import launches

ROPE = "interleaved"
NUM_POSITIONS = 1 << 17


@dataclass(frozen=True)
class StepRecord:
    """Microseconds of one layer's step, by graph replay.

    Attributes:
        requests, num_heads, context, kv_format, rope: the shape. rope: None if nothing is rotated.
        impl, launches: who ran it, and in how many launches decode_step did.
        decode_us: attention and merge, of a query and a cache that are complete.
        decode_step_us: the same with what the epilogue does, in one call.
        two_calls_us: epilogue, then decode.
    """

    requests: int
    num_heads: int
    context: int
    kv_format: str
    rope: str | None
    impl: str
    launches: str
    decode_us: float
    decode_step_us: float
    two_calls_us: float


def measure_steps(
    workloads: Sequence[Workload],
    device: torch.device,
    *,
    impl: str = "auto",
    rope: str | None = ROPE,
    seed: int = 0,
    repeats: int | None = None,
) -> list[StepRecord]:
    """Time every shape; all of one cache format, and every length at least seqlen_q.

    Raises:
        AssertionError: decode_step gave other bits than the two calls, so it has no time.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    pool = CachePool(list(workloads), device, l2_bytes, seed)
    return [_measure(pool.inputs(w), impl, rope, repeats) for w in workloads]


def _measure(inputs: Inputs, impl: str, rope: str | None, repeats: int | None) -> StepRecord:
    workload, spec, device = inputs.workload, inputs.workload.spec, inputs.q.device
    tokens = workload.requests * spec.seqlen_q
    plan = api.plan(inputs.cache_seqlens, spec, impl=impl)
    generator = inputs.pool.generator
    new = torch.randn((tokens, spec.head_dim), generator=generator, device=device).bfloat16()
    kv_c, k_pe = new[:, : spec.kv_lora_rank], new[:, spec.kv_lora_rank :]
    query = inputs.q.flatten(0, 1)
    q_nope, q_pe = query[..., : spec.kv_lora_rank], query[..., spec.kv_lora_rank :]
    rotation: dict[str, Any] = {"positions": None, "cos_sin": None, "rope": None}
    if rope is not None:
        angle = torch.rand(
            (NUM_POSITIONS, spec.qk_rope_head_dim // 2), generator=generator, device=device
        )
        first = inputs.cache_seqlens.long()[:, None] - spec.seqlen_q
        positions = (first + torch.arange(spec.seqlen_q, device=device)).flatten()
        rotation = {
            "positions": positions % NUM_POSITIONS,
            "cos_sin": torch.cat([angle.cos(), angle.sin()], -1),
            "rope": rope,
        }
    slots = [_slots(inputs, region) for region in range(inputs.regions)]
    outputs: list[dict[str, Any]] = [
        {
            "out": torch.empty(
                (*inputs.q.shape[:3], spec.kv_lora_rank), dtype=torch.bfloat16, device=device
            ),
            "lse": torch.empty(inputs.q.shape[:3], device=device),
        }
        for _ in range(3)
    ]
    q_out = torch.empty_like(query)
    options: dict[str, Any] = {
        "softmax_scale": inputs.softmax_scale,
        "k_scale": inputs.k_scale,
        "return_lse": True,
    }
    cache, tables = inputs.kv_cache, inputs.page_tables

    def decode(region: int, q: torch.Tensor = inputs.q, which: int = 0) -> None:
        api.decode(q, cache, tables[region], plan, **options, **outputs[which])

    def decode_step(region: int) -> None:
        api.decode_step(
            q_nope, q_pe, kv_c, k_pe, cache, slots[region], tables[region], plan, **rotation, **options,
            **outputs[1],
        )  # fmt: skip

    def two_calls(region: int) -> None:
        api.epilogue(
            q_nope, q_pe, kv_c, k_pe, cache, slots[region], spec, q_out=q_out, **rotation,
            k_scale=inputs.k_scale, impl=plan.impl,
        )  # fmt: skip
        decode(region, q_out.view(inputs.q.shape), 2)

    calls = {}
    for name, call in (("decode", decode), ("decode_step", decode_step), ("two_calls", two_calls)):
        call(0)
        calls[name] = [
            lambda region=region, call=call: call(region) for region in range(inputs.regions)
        ]
    times = timing.time_graphs(calls, repeats)
    for name, tensor in outputs[1].items():
        assert torch.equal(tensor, outputs[2][name]), f"decode_step: {name} has other bits"
    return StepRecord(
        requests=workload.requests,
        num_heads=spec.num_heads,
        context=workload.context,
        kv_format=spec.kv_format.value,
        rope=rope,
        impl=plan.impl,
        launches=launches(plan.impl, spec),
        decode_us=times["decode"].us,
        decode_step_us=times["decode_step"].us,
        two_calls_us=times["two_calls"].us,
    )


def _slots(inputs: Inputs, region: int) -> torch.Tensor:
    """Where the last seqlen_q tokens of every request lie in a region."""
    spec = inputs.workload.spec
    token = inputs.cache_seqlens.long()[:, None] - spec.seqlen_q
    token = token + torch.arange(spec.seqlen_q, device=token.device)
    pages = inputs.page_tables[region].long().gather(1, token // spec.page_size)
    return (pages * spec.page_size + token % spec.page_size).flatten()
