"""Attention and merge in two launches, and the warm-up of both and of the planner."""

from __future__ import annotations

import torch

from streamla.arch import arch_of
from streamla.kernels.portable.attention import attention, cost_model
from streamla.kernels.portable.merge import merge
from streamla.kernels.portable.plan import plan as run_planner
from streamla.plan import DecodePlan, empty_plan
from streamla.spec import MLASpec


def decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    page_table: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_scale: float,
) -> None:
    attention(
        q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale
    )  # fmt: skip
    if plan.lse_partial.shape[0]:
        merge(plan, out, lse, lse_scale)


def warmup(spec: MLASpec, batch_sizes: list[int], device: torch.device) -> None:
    """Compile every variant that `spec` can launch: one empty request is enough, since neither the batch
    nor the lengths nor any stride is compiled in."""
    cost = cost_model(spec, arch_of(device))
    rows = (1, spec.seqlen_q, spec.num_heads)
    q = torch.zeros((*rows, spec.head_dim), dtype=torch.bfloat16, device=device)
    q_nope, q_pe = q[..., : spec.kv_lora_rank], q[..., spec.kv_lora_rank :]
    cache_bytes = torch.zeros(spec.page_size * spec.row_bytes, dtype=torch.uint8, device=device)
    kv_cache = cache_bytes.view(spec.kv_format.storage_dtype).view(1, spec.page_size, -1)
    page_table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    cache_seqlens = torch.zeros(1, dtype=torch.int32, device=device)
    k_scale = torch.ones(1, dtype=torch.float32, device=device)
    out, lse = torch.empty_like(q_nope), torch.empty(rows, dtype=torch.float32, device=device)
    for batch_invariant in (False, True):
        plan = empty_plan(1, spec, "portable", cost, device, None, batch_invariant)
        run_planner(cache_seqlens, plan)
    for causal in (True, False) if spec.seqlen_q > 1 else (True,):
        for scale in (None, k_scale) if spec.kv_format.has_scale else (None,):
            decode(
                q_nope, q_pe, kv_cache, scale, page_table, plan, out, lse, 1.0, causal, 1.0
            )  # fmt: skip
    torch.cuda.synchronize(device) if device.type == "cuda" else None
