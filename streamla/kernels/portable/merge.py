"""Merge the partials of split requests into the final output (portable Triton)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from streamla.plan import DecodePlan
from streamla.runtime.capture import require_compiled

LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))
BLOCK_D = 64
BLOCK_S = 32


@triton.jit
def load_log_mass(lse_partial, slot, row, end, ROWS: tl.constexpr):
    """Log masses of a block of slots; +inf, which some libraries write for an empty row, counts as -inf."""
    log_mass = tl.load(lse_partial + slot * ROWS + row, mask=slot < end, other=-float("inf"))
    return tl.where(log_mass == float("inf"), -float("inf"), log_mass)


@triton.jit(
    do_not_specialize=["out_b", "out_s", "out_h", "lse_b", "lse_s", "lse_h", "lse_scale"],
    do_not_specialize_on_alignment=["out", "lse", "out_partial", "lse_partial", "split_indptr"],
)
def mla_merge_kernel(
    out, out_b: tl.int64, out_s: tl.int64, out_h: tl.int64,  # (batch, seqlen_q, num_heads, D) bf16
    lse, lse_b: tl.int64, lse_s: tl.int64, lse_h: tl.int64,  # (batch, seqlen_q, num_heads) fp32
    out_partial,   # (num_slots, seqlen_q * num_heads, D) fp32, each slot normalised
    lse_partial,   # (num_slots, seqlen_q * num_heads) fp32, natural log
    split_indptr,  # (batch + 1,) int32
    lse_scale,
    NUM_HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program for (request, query row, BLOCK_D latents). A request without slots is already final.

    The slots are added in one fixed order, so the result has the same bits every time.
    """
    b, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(split_indptr + b).to(tl.int64), tl.load(split_indptr + b + 1).to(tl.int64)
    if begin == end:
        return

    lane = tl.arange(0, BLOCK_S)
    m = -float("inf")
    for i in range(begin, end, BLOCK_S):
        m = tl.maximum(m, tl.max(load_log_mass(lse_partial, i + lane, row, end, ROWS), 0))
    # Every slot may be empty: keep -inf - (-inf) out of exp.
    base = tl.where(m == -float("inf"), 0.0, m)

    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    denom = 0.0
    for i in range(begin, end, BLOCK_S):
        slot = i + lane
        log_mass = load_log_mass(lse_partial, slot, row, end, ROWS)
        weight = tl.exp2((log_mass - base) * LOG2E)
        values = tl.load(
            out_partial + (slot * ROWS + row)[:, None] * D + d[None, :],
            mask=(slot < end)[:, None], other=0.0,
        )  # fmt: skip
        # No weight, no influence, whatever the slot holds.
        acc += tl.sum(tl.where((weight == 0.0)[:, None], 0.0, weight[:, None] * values), 0)
        denom += tl.sum(weight, 0)

    query, head = row // NUM_HEADS, row % NUM_HEADS
    denom = tl.where(denom == 0.0, 1.0, denom)
    out_row = out + b * out_b + query * out_s + head * out_h
    tl.store(out_row + d, (acc / denom).to(out.dtype.element_ty))
    if tl.program_id(2) == 0:
        log_mass = m + tl.log2(denom) / LOG2E
        tl.store(lse + b * lse_b + query * lse_s + head * lse_h, log_mass * lse_scale)


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, lse_scale: float) -> None:
    """Finish `out` and `lse` of every split request, in place, from the plan's partial slots.

    Args:
        plan: the plan that attention ran.
        out: (batch, seqlen_q, num_heads, kv_lora_rank) bfloat16.
        lse: (batch, seqlen_q, num_heads) float32.
        lse_scale: 1.0 for natural logarithms, log2(e) for base 2.
    """
    spec = plan.spec
    if plan.batch == 0:
        return
    block_d = min(BLOCK_D, spec.kv_lora_rank)
    shape = (spec.num_heads, spec.rows, spec.kv_lora_rank)
    require_compiled(out.device, "mla_merge_kernel", *shape)
    mla_merge_kernel[plan.batch, spec.rows, spec.kv_lora_rank // block_d](
        out, *out.stride()[:3],
        lse, *lse.stride(),
        plan.out_partial, plan.lse_partial, plan.split_indptr,
        lse_scale,
        NUM_HEADS=spec.num_heads, ROWS=spec.rows, D=spec.kv_lora_rank,
        BLOCK_D=block_d, BLOCK_S=BLOCK_S, num_warps=4,
    )  # fmt: skip
