"""Split-KV attention (portable Triton), for NVIDIA, AMD and, interpreted, the CPU.

    for each item of this program:              tokens [begin, end) of one request
        load the query rows                     (BLOCK_R, D) and (BLOCK_R, R)
        for each tile of TILE_N tokens:
            page ids -> rows -> scores -> online softmax -> accumulate
        write out and lse, or a partial slot if the request is split

The grid is (programs of the plan, row tiles): a row tile is BLOCK_R of the seqlen_q * num_heads query
rows of a request, row = query * num_heads + head. More row tiles read the cache again, through L2.
Softmax runs in base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from streamla.arch import Arch, arch_of
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.capture import require_compiled
from streamla.spec import DS_MLA_GROUP, KVFormat, MLASpec

LN2: tl.constexpr = tl.constexpr(math.log(2.0))
GROUP: tl.constexpr = tl.constexpr(DS_MLA_GROUP)


BLOCK_R = 16  # query rows a program holds: the least that a matrix instruction takes


def num_row_tiles(spec: MLASpec) -> int:
    return triton.cdiv(spec.rows, BLOCK_R)


def tile_tokens(spec: MLASpec, target: str) -> int:
    """Tokens a tile: what the registers bear without a spill. Masked rows, group scales and decoding by hand
    need some. The page size has no say, so that bits do not depend on it."""
    if target == "cpu":
        return 64
    # Several queries: larger tiles are right where they are not pipelined (compile_options), but were not timed.
    if target == "gfx942" or spec.seqlen_q > 1:
        return 16
    is_plain = spec.kv_format is KVFormat.BF16 or (
        spec.kv_format is KVFormat.FP8_E4M3FN and spec.rows == BLOCK_R
    )
    return 64 if is_plain else 32


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    tile_n = tile_tokens(spec, arch.target)
    return CostModel(
        tile_n=tile_n,
        num_programs=max(1, arch.units // num_row_tiles(spec)),
        overhead_tiles=64 // tile_n,
        min_split_tiles=128 // tile_n,
    )


@triton.jit
def row_offset(
    request, row, stride_b, stride_s, stride_h, NUM_HEADS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Element offset of query row `row` in a (batch, seqlen_q, num_heads, *) tensor."""
    offset = request * stride_b + (row // NUM_HEADS) * stride_s + (row % NUM_HEADS) * stride_h
    # A hint holds only on the result of an operation that stays: it is lost on an argument or a call.
    return tl.multiple_of(offset, 8 if ALIGNED else 1)


@triton.jit
def load_rows(rows, row_bytes, mask, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """(tokens, WIDTH) values of `rows`, each row `row_bytes` after the first; 0 where masked."""
    ITEM: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    offset = tl.multiple_of(row_bytes // ITEM, 16 // ITEM if ALIGNED else 1)
    column = tl.arange(0, WIDTH)
    return tl.load(rows + offset[:, None] + column[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def decode_fnuz(byte):
    """e4m3fnuz bytes as float16, exactly, where the compiler has no such type (all but gfx942).

    The seven bits below the sign are those of a float16 with four exponent bits; the exponent
    biases (8 and 15) differ by a factor 2 ** 7. 0x80 is the one NaN.
    """
    bits = byte.to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where(bits == 0x80, float("nan"), half * 128.0).to(tl.float16)


@triton.jit
def rescale_groups(value, scales, TILE_N: tl.constexpr, D: tl.constexpr):
    """fp8_ds_mla: every 128 latents have a scale. A power of two, as writers store it, is exact here."""
    grouped = tl.reshape(value.to(tl.float32), (TILE_N, D // GROUP, GROUP)) * scales[:, :, None]
    return tl.reshape(grouped, (TILE_N, D))


@triton.jit
def dot(a, b, acc, DTYPE: tl.constexpr):
    """Operands in DTYPE, accumulated in float32; float32 operands are multiplied exactly as such."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), acc, input_precision="ieee")


@triton.jit(
    do_not_specialize=[
        "q_b", "q_s", "q_h", "pe_b", "pe_s", "pe_h", "page_bytes", "token_bytes", "page_table_b",
        "out_b", "out_s", "out_h", "lse_b", "lse_s", "lse_h", "softmax_scale_log2", "lse_scale",
    ],
    do_not_specialize_on_alignment=[
        "group_scales", "k_scale", "page_table", "lse", "lse_partial", "work", "work_indptr",
    ],
)  # fmt: skip
def mla_attention_kernel(
    q_nope, q_b: tl.int64, q_s: tl.int64, q_h: tl.int64,  # (batch, seqlen_q, num_heads, D) bf16
    q_pe, pe_b: tl.int64, pe_s: tl.int64, pe_h: tl.int64,  # (batch, seqlen_q, num_heads, R) bf16
    latents,       # (num_pages, page_size, D)
    ropes,         # (num_pages, page_size, R)
    group_scales,  # (num_pages, page_size, D / 128) fp32, fp8_ds_mla only
    page_bytes: tl.int64, token_bytes: tl.int64,  # strides of the three above
    k_scale,       # (1,) fp32, or None
    page_table, page_table_b: tl.int64,  # (batch, width) int32
    work, work_indptr,  # the plan
    out, out_b: tl.int64, out_s: tl.int64, out_h: tl.int64,  # (batch, seqlen_q, num_heads, D) bf16
    lse, lse_b: tl.int64, lse_s: tl.int64, lse_h: tl.int64,  # (batch, seqlen_q, num_heads) fp32
    out_partial, lse_partial,  # (num_slots, seqlen_q, num_heads, D) and without D, fp32, contiguous
    softmax_scale_log2, lse_scale,
    NUM_HEADS: tl.constexpr, SEQLEN_Q: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE_N: tl.constexpr, BLOCK_R: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_GROUP_SCALES: tl.constexpr, DECODE_FNUZ: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One program runs its items of the plan for one row tile."""
    ROWS: tl.constexpr = NUM_HEADS * SEQLEN_Q
    program = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < ROWS
    if ROWS % BLOCK_R == 0:
        is_row = tl.full([BLOCK_R], True, tl.int1)
    d, r, n = tl.arange(0, D), tl.arange(0, R), tl.arange(0, TILE_N)
    chunk = tl.arange(0, CHUNK)

    value_scale = 1.0
    if HAS_SCALE:
        value_scale = tl.load(k_scale)
    score_scale = softmax_scale_log2 * value_scale

    for item in range(tl.load(work_indptr + program), tl.load(work_indptr + program + 1)):
        request, begin = tl.load(work + item * 8).to(tl.int64), tl.load(work + item * 8 + 1)
        end, seqlen = tl.load(work + item * 8 + 2), tl.load(work + item * 8 + 3)
        slot = tl.load(work + item * 8 + 4)

        q_base = q_nope + row_offset(request, row, q_b, q_s, q_h, NUM_HEADS, ALIGNED)
        pe_base = q_pe + row_offset(request, row, pe_b, pe_s, pe_h, NUM_HEADS, ALIGNED)
        query_pe = tl.load(pe_base[:, None] + r[None, :], mask=is_row[:, None], other=0.0)
        pages = page_table + request * page_table_b

        # A causal query sees `limit` tokens; the queries are the last SEQLEN_Q tokens of the request.
        limit = tl.zeros([BLOCK_R], tl.int32) + seqlen
        if CAUSAL:
            limit = seqlen - SEQLEN_Q + 1 + row // NUM_HEADS

        acc = tl.zeros([BLOCK_R, D], tl.float32)
        m = tl.full([BLOCK_R], -float("inf"), tl.float32)
        denom = tl.zeros([BLOCK_R], tl.float32)
        for tile in range(begin, end, TILE_N):
            token = tile + n
            is_token = token < end
            page = tl.load(pages + token // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
            page_base, token_base = page * page_bytes, (token % PAGE_SIZE) * token_bytes
            if ALIGNED:  # 16-byte loads
                page_base = tl.multiple_of(page_base, 16)
                token_base = tl.multiple_of(token_base, 16)
            row_bytes = page_base + token_base

            rope = load_rows(ropes, row_bytes, is_token, R, ALIGNED)
            if DECODE_FNUZ:
                rope = decode_fnuz(rope)
            scores = tl.zeros([BLOCK_R, TILE_N], tl.float32)
            scores = dot(query_pe, tl.trans(rope), scores, DTYPE)
            # The query would fill the registers: it is read again for every tile, a piece at a time.
            for c in range(0, D, CHUNK):
                query = tl.load(
                    q_base[:, None] + (c + chunk)[None, :], mask=is_row[:, None], other=0.0
                )
                key = load_rows(latents + c, row_bytes, is_token, CHUNK, ALIGNED)
                if DECODE_FNUZ:
                    key = decode_fnuz(key)
                if HAS_GROUP_SCALES:
                    scale = tl.load(group_scales + row_bytes // 4 + c // GROUP, is_token, other=0.0)
                    scores += dot(query, tl.trans(key), None, DTYPE) * scale[None, :]
                else:
                    scores = dot(query, tl.trans(key), scores, DTYPE)

            seen = (token[None, :] < limit[:, None]) & is_token[None, :]
            scores = tl.where(seen, scores * score_scale, -float("inf"))

            value = load_rows(latents, row_bytes, is_token, D, ALIGNED)
            if DECODE_FNUZ:
                value = decode_fnuz(value)
            if HAS_GROUP_SCALES:
                scales = load_rows(group_scales, row_bytes, is_token, D // GROUP, ALIGNED)
                value = rescale_groups(value, scales, TILE_N, D)

            m_new = tl.maximum(m, tl.max(scores, 1))
            # A row may have seen nothing yet: keep -inf - (-inf) out of exp.
            base = tl.where(m_new == -float("inf"), 0.0, m_new)
            alpha = tl.exp2(m - base)
            p = tl.exp2(scores - base[:, None])
            denom = denom * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            if CAUSAL and SEQLEN_Q > 1:
                if tile + TILE_N > seqlen - SEQLEN_Q + 1:
                    # Some rows must not see some keys, whatever those hold (0 * NaN is NaN): one
                    # product a query, over its own keys.
                    for s in range(SEQLEN_Q):
                        own = token < seqlen - SEQLEN_Q + 1 + s
                        own_value = tl.where(own[:, None], value.to(DTYPE), 0.0)
                        added = dot(p, own_value, acc, DTYPE)
                        acc = tl.where((row // NUM_HEADS == s)[:, None], added, acc)
                else:
                    acc = dot(p, value, acc, DTYPE)
            else:
                acc = dot(p, value, acc, DTYPE)
            m = m_new

        # A row that saw nothing has m == -inf: values 0 and a log mass of -inf.
        denom = tl.where(denom == 0.0, 1.0, denom)
        values = acc * (value_scale / denom)[:, None]
        log_mass = (m + tl.log2(denom)) * LN2
        if slot < 0:
            out_base = out + row_offset(request, row, out_b, out_s, out_h, NUM_HEADS, ALIGNED)
            tl.store(
                out_base[:, None] + d[None, :], values.to(out.dtype.element_ty), is_row[:, None]
            )
            lse_base = lse + row_offset(request, row, lse_b, lse_s, lse_h, NUM_HEADS, False)
            tl.store(lse_base, log_mass * lse_scale, is_row)
        else:
            partial = slot.to(tl.int64) * ROWS + row
            tl.store(out_partial + partial[:, None] * D + d[None, :], values, is_row[:, None])
            tl.store(lse_partial + partial, log_mass, is_row)


def cache_parts(
    kv_cache: torch.Tensor, spec: MLASpec, as_bytes: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a cache's latents, rope values and group scales (only fp8_ds_mla has those)."""
    latent_width = spec.kv_lora_rank
    if spec.kv_format is KVFormat.FP8_DS_MLA:
        scales_end = latent_width + 4 * (latent_width // DS_MLA_GROUP)
        latent = kv_cache[..., :latent_width].view(torch.float8_e4m3fn)
        scales = kv_cache[..., latent_width:scales_end].view(torch.float32)
        return latent, kv_cache[..., scales_end:].view(torch.bfloat16), scales
    kv_cache = kv_cache.view(torch.uint8 if as_bytes else spec.kv_format.storage_dtype)
    return kv_cache[..., :latent_width], kv_cache[..., latent_width:], kv_cache


def compile_options(spec: MLASpec, target: str, interpreted: bool) -> dict:
    """The constants of the attention kernel: everything that the compiled code depends on."""
    # A bf16 product holds the query and any fp8 value exactly. Triton's interpreter miscomputes those.
    dtype = tl.float32 if interpreted else tl.bfloat16
    # On gfx942 the whole query and the keys of a tile would spill, and so they would beside causal masks;
    # a group scale belongs to one piece.
    pieces = target == "gfx942" or spec.kv_format is KVFormat.FP8_DS_MLA
    pieces |= spec.seqlen_q > 1 and not interpreted
    # Triton 3.6.0 pipelines the loads of a bf16 loop with causal products into wrong results on an H200.
    pipelined = target != "gfx942" and spec.page_size > 1 and spec.seqlen_q == 1
    return {
        "NUM_HEADS": spec.num_heads,
        "SEQLEN_Q": spec.seqlen_q,
        "D": spec.kv_lora_rank,
        "R": spec.qk_rope_head_dim,
        "PAGE_SIZE": spec.page_size,
        "BLOCK_R": BLOCK_R,
        "HAS_SCALE": spec.kv_format.has_scale,
        "HAS_GROUP_SCALES": spec.kv_format is KVFormat.FP8_DS_MLA,
        "DECODE_FNUZ": spec.kv_format is KVFormat.FP8_E4M3FNUZ and target != "gfx942",
        "CHUNK": min(DS_MLA_GROUP, spec.kv_lora_rank) if pieces else spec.kv_lora_rank,
        "DTYPE": dtype,
        "num_warps": 8,
        "num_stages": 2 if pipelined else 1,
    }


def attention(
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
    """Run the plan's items: final rows of `out` and `lse`, or partial slots of split requests."""
    spec = plan.spec
    options = compile_options(spec, arch_of(out.device).target, out.device.type == "cpu")
    options["HAS_SCALE"] &= k_scale is not None
    latents, ropes, group_scales = cache_parts(kv_cache, spec, as_bytes=options["DECODE_FNUZ"])
    item = kv_cache.element_size()
    aligned = all(
        address % 16 == 0
        for address in (
            kv_cache.stride(0) * item, kv_cache.stride(1) * item,
            latents.data_ptr(), ropes.data_ptr(),
            *(t.data_ptr() for t in (q_nope, q_pe, out)),
            *(2 * stride for t in (q_nope, q_pe, out) for stride in t.stride()[:3]),
        )
    )  # fmt: skip
    options |= {"TILE_N": plan.cost.tile_n, "CAUSAL": causal, "ALIGNED": aligned}
    require_compiled(out.device, "mla_attention_kernel", *options.values())
    mla_attention_kernel[plan.cost.num_programs, num_row_tiles(spec)](
        q_nope, *q_nope.stride()[:3],
        q_pe, *q_pe.stride()[:3],
        latents, ropes, group_scales, kv_cache.stride(0) * item, kv_cache.stride(1) * item,
        k_scale,
        page_table, page_table.stride(0),
        plan.work, plan.work_indptr,
        out, *out.stride()[:3],
        lse, *lse.stride(),
        plan.out_partial, plan.lse_partial,
        softmax_scale / math.log(2.0), lse_scale,
        **options,
    )  # fmt: skip
