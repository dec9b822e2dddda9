"""The oracle of every stage (`*_reference`: slow, obvious), and the CPU implementation below it.

The oracles are the specification: tests and benchmarks import them and nobody writes a second. The
plan's oracle is `plan.plan_reference`.
"""

from __future__ import annotations

import torch

from streamla.arch import Arch
from streamla.formats import decode_rows, encode_rows, to_fp8
from streamla.plan import NO_SLOT, CostModel, DecodePlan, plan_reference
from streamla.spec import KVFormat, MLASpec


def gather_rows(
    kv_cache: torch.Tensor, page_ids: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Stored rows of tokens [begin, end) of one request: (end - begin, row_width).

    Args:
        kv_cache: (num_pages, page_size, row_width).
        page_ids: (width,) int32, the request's row of the page table.
    """
    page_size = kv_cache.shape[1]
    tokens = torch.arange(begin, end, device=kv_cache.device)
    pages = page_ids.to(kv_cache.device)[tokens // page_size].long()
    return kv_cache.view(torch.uint8)[pages, tokens % page_size].view(kv_cache.dtype)


def attend(
    q: torch.Tensor, kv: torch.Tensor, kv_lora_rank: int, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of (heads, head_dim) queries over (tokens, head_dim) rows, in the dtype given.

    Returns:
        out (heads, kv_lora_rank) and lse (heads,), natural log; (0, -inf) for no tokens.
    """
    if kv.shape[0] == 0:
        return q.new_zeros(q.shape[0], kv_lora_rank), q.new_full((q.shape[0],), -torch.inf)
    scores = (q @ kv.T) * softmax_scale
    return scores.softmax(-1) @ kv[:, :kv_lora_rank], scores.logsumexp(-1)


def visible(seqlen: int, query: int, seqlen_q: int, causal: bool) -> int:
    """Tokens that query `query` of `seqlen_q` may see; the queries are a request's last tokens."""
    return max(0, seqlen - seqlen_q + 1 + query) if causal else seqlen


def attention_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    spec: MLASpec,
    softmax_scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of `decode`, in float64 on the dequantised bytes that are really in the cache.

    Args:
        q_nope: (batch, seqlen_q, num_heads, kv_lora_rank).
        q_pe: (batch, seqlen_q, num_heads, qk_rope_head_dim).
        kv_cache: (num_pages, page_size, row_width).
        k_scale: float32, one element, or None.
        page_table: (batch, width) int32.
        cache_seqlens: (batch,) int32.

    Returns:
        out (batch, seqlen_q, num_heads, kv_lora_rank) and lse (batch, seqlen_q, num_heads), float64.
    """
    q = torch.cat([q_nope, q_pe], -1).double()
    out = q.new_empty((*q.shape[:3], spec.kv_lora_rank))
    lse = q.new_empty(q.shape[:3])
    for b, seqlen in enumerate(cache_seqlens.tolist()):
        kv = decode_rows(gather_rows(kv_cache, page_table[b], 0, max(0, seqlen)), spec, k_scale)
        for s in range(spec.seqlen_q):
            seen = kv[: visible(seqlen, s, spec.seqlen_q, causal)]
            out[b, s], lse[b, s] = attend(q[b, s], seen, spec.kv_lora_rank, softmax_scale)
    return out, lse


def merge_reference(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, split_indptr: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of `merge`, in float64: the partials of each request weighed by exp(lse).

    A partial whose lse is -inf saw nothing and has no weight, whatever its values. So has +inf, which
    some libraries write for an empty row.

    Args:
        out_partial: (num_slots, seqlen_q, num_heads, kv_lora_rank).
        lse_partial: (num_slots, seqlen_q, num_heads), natural log.
        split_indptr: (batch + 1,) int32.

    Returns:
        out (batch, ...) and lse (batch, ...), float64; (0, -inf) for a request without partials.
    """
    bounds = split_indptr.tolist()
    batch = len(bounds) - 1
    out = out_partial.new_zeros((batch, *out_partial.shape[1:]), dtype=torch.float64)
    lse = out.new_full(out.shape[:3], -torch.inf)
    for b in range(batch):
        if bounds[b] == bounds[b + 1]:
            continue
        log_mass = lse_partial[bounds[b] : bounds[b + 1]].double()
        log_mass = log_mass.masked_fill(log_mass == torch.inf, -torch.inf)
        values = out_partial[bounds[b] : bounds[b + 1]].double()
        lse[b] = log_mass.logsumexp(0)
        weight = (log_mass - torch.where(lse[b] == -torch.inf, 0.0, lse[b])).exp()
        weighed = torch.where((weight == 0)[..., None], 0.0, weight[..., None] * values)
        out[b] = weighed.sum(0)
    return out, lse


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, rope: str) -> torch.Tensor:
    """Rotary embedding in float32, every product and sum rounded once: the bits kernels must give.

    Args:
        x: (tokens, ..., qk_rope_head_dim), converted to float32.
        cos_sin: (tokens, qk_rope_head_dim) float32: cosines, then sines.
        rope: "interleaved" (pairs 2i, 2i + 1) or "neox" (pairs i, i + half).
    """
    x, half = x.float(), x.shape[-1] // 2
    cos_sin = cos_sin.reshape(x.shape[0], *[1] * (x.dim() - 2), 2 * half)
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    if rope == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def epilogue_reference(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    spec: MLASpec,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    rope: str | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    q_format: KVFormat = KVFormat.BF16,
) -> torch.Tensor:
    """Oracle of the epilogue: writes one cache row a token and returns the query.

    Rotation is in float32 and is rounded once, to the stored format. A token without a slot, or with a
    negative one, writes no row; its query is still returned. A position outside the table counts as the
    nearest inside it.

    Args:
        q_nope: (tokens, num_heads, kv_lora_rank) bfloat16.
        q_pe: (tokens, num_heads, qk_rope_head_dim) bfloat16, not rotated.
        kv_c: (tokens, kv_lora_rank) bfloat16.
        k_pe: (tokens, qk_rope_head_dim) bfloat16, not rotated.
        kv_cache: (num_pages, page_size, row_width), written in place.
        slot_mapping: (up to tokens,) int64: page * page_size + place in the page.
        positions: (tokens,) int64 and cos_sin: (max_position, qk_rope_head_dim) float32, cosines then
            sines, go with `rope`; without them nothing is rotated.
        q_scale, k_scale: float32, one element; real = stored * scale.
        q_format: BF16, or FP8_E4M3FN / FP8_E4M3FNUZ for a quantised query.

    Returns:
        (tokens, num_heads, head_dim) in q_format's dtype.
    """
    q_rope, k_rope = q_pe.float(), k_pe.float()
    if rope is not None:
        assert positions is not None, "positions: go with rope"
        assert cos_sin is not None, "cos_sin: goes with rope"
        table = cos_sin[positions.clamp(0, len(cos_sin) - 1)]
        q_rope, k_rope = rotate(q_pe, table, rope), rotate(k_pe, table, rope)

    rows = encode_rows(torch.cat([kv_c.float(), k_rope], -1), spec, k_scale)
    slots = slot_mapping.tolist()
    for token, slot in enumerate(slots):
        if slot >= 0:
            kv_cache[slot // spec.page_size, slot % spec.page_size] = rows[token]

    q = torch.cat([q_nope.float(), q_rope], -1)
    if q_format is KVFormat.BF16:
        return q.to(torch.bfloat16)
    return to_fp8(q if q_scale is None else q / q_scale.float(), q_format.storage_dtype)


# The CPU implementation: float32, vectorised over heads and tokens, driven by the same plan as the
# kernels, so that splitting and merging are the same on a machine without a GPU.


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(tile_n=64, num_programs=arch.units)


def plan(cache_seqlens: torch.Tensor, plan: DecodePlan) -> None:
    plan_reference(cache_seqlens, plan)


def attention(
    q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale
) -> None:
    spec = plan.spec
    q = torch.cat([q_nope, q_pe], -1).float()
    num_items = int(plan.work_indptr[-1])
    for b, begin, end, seqlen, slot, _, _, _ in plan.work[:num_items].tolist():
        kv = decode_rows(gather_rows(kv_cache, page_table[b], begin, end), spec, k_scale).float()
        for s in range(spec.seqlen_q):
            seen = kv[: max(0, visible(seqlen, s, spec.seqlen_q, causal) - begin)]
            values, log_mass = attend(q[b, s], seen, spec.kv_lora_rank, softmax_scale)
            if slot == NO_SLOT:
                out[b, s], lse[b, s] = values.to(out.dtype), log_mass * lse_scale
            else:
                plan.out_partial[slot, s], plan.lse_partial[slot, s] = values, log_mass


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, lse_scale: float) -> None:
    merged = merge_reference(plan.out_partial, plan.lse_partial, plan.split_indptr)
    split = plan.split_indptr[1:] > plan.split_indptr[:-1]
    out[split] = merged[0][split].to(out.dtype)
    lse[split] = (merged[1][split] * lse_scale).to(lse.dtype)


def decode(
    q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale
) -> None:
    attention(
        q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, softmax_scale, causal, lse_scale
    )  # fmt: skip
    merge(plan, out, lse, lse_scale)


def epilogue(
    q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, q_out, spec, positions, cos_sin, rope, q_scale, k_scale,
    q_format, reserved_slot, inputs_ready,
) -> None:  # fmt: skip
    if reserved_slot is not None:
        slot_mapping = slot_mapping.masked_fill(slot_mapping == reserved_slot, NO_SLOT)
    q = epilogue_reference(
        q_nope, q_pe, kv_c, k_pe, kv_cache.view(spec.kv_format.storage_dtype), slot_mapping, spec,
        positions=positions, cos_sin=cos_sin, rope=rope, q_scale=q_scale, k_scale=k_scale,
        q_format=q_format,
    )  # fmt: skip
    q_out[: len(q)] = q.view(q_out.dtype)


def warmup(spec: MLASpec, batch_sizes: list[int], device: torch.device) -> None:
    """Nothing to compile."""


def warm_epilogue(spec: MLASpec, device: torch.device) -> None:
    """Nothing to compile."""
