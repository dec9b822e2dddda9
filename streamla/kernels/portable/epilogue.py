"""The epilogue (portable Triton): one launch writes the query and the new cache rows.

    program (token, 0)      kv_c, k_pe -> rotate -> scale, round -> the token's cache row
    program (token, 1 + i)  q_nope, q_pe -> rotate -> scale, round -> BLOCK_H heads of the query

The result is `epilogue_reference`'s to the last bit: products and sums are rounded one by one
(`enable_fp_fusion=False`), quotients are IEEE, and fp8 is rounded in integers, since the conversions of the
targets differ in saturation, in the sign of zero and in which flavour they have at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from streamla.arch import arch_of
from streamla.formats import DS_MLA_MIN_SCALE
from streamla.kernels.portable.attention import cache_parts
from streamla.runtime.capture import require_compiled
from streamla.spec import DS_MLA_GROUP, KVFormat, MLASpec

GROUP: tl.constexpr = tl.constexpr(DS_MLA_GROUP)
MIN_SCALE: tl.constexpr = tl.constexpr(DS_MLA_MIN_SCALE)
LARGEST_BF16: tl.constexpr = tl.constexpr(torch.finfo(torch.bfloat16).max)
LARGEST_FN: tl.constexpr = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)

PIECE = 8  # bf16 values a lane moves: 16 bytes


@triton.jit
def to_fp8(value, FNUZ: tl.constexpr):
    """float32 to the bytes of e4m3fn or e4m3fnuz as `formats.to_fp8` does: nearest even, saturating."""
    # Bit patterns of float32: the largest value, the least normal one, and the power of two whose
    # unit in the last place is the format's least value, so that adding it rounds to a multiple.
    LARGEST: tl.constexpr = 0x43700000 if FNUZ else 0x43E00000
    LEAST_NORMAL: tl.constexpr = 0x3C000000 if FNUZ else 0x3C800000
    ROUNDER: tl.constexpr = 0x46000000 if FNUZ else 0x46800000
    BIAS: tl.constexpr = 119 if FNUZ else 120  # difference of the exponent biases

    bits = value.to(tl.uint32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, LARGEST)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (BIAS << 3)
    rounder = tl.full([1], ROUNDER, tl.uint32).to(tl.float32, bitcast=True)
    rounded = magnitude.to(tl.float32, bitcast=True) + rounder
    subnormal = rounded.to(tl.uint32, bitcast=True) - ROUNDER
    code = tl.where(magnitude < LEAST_NORMAL, subnormal, normal)
    if FNUZ:  # has no negative zero: 0x80 is its one NaN
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(is_nan, 0x80, code)
    else:
        code = tl.where(is_nan, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def stored(value, scale, FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Values (bf16 or float32) as `FORMAT` stores them."""
    if FORMAT == "bf16":
        result = value.to(tl.bfloat16)
    else:
        value = value.to(tl.float32)
        if HAS_SCALE:
            value = tl.div_rn(value, scale)
        result = to_fp8(value, FORMAT == "fp8_e4m3fnuz")
    return result


@triton.jit
def rotated(a, b, table_row, pair, HALF: tl.constexpr, HAS_ROPE: tl.constexpr):
    """Pairs of rope values in float32, rotated by a row of the table: cosines, then sines."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    if HAS_ROPE:
        cos, sin = tl.load(table_row + pair), tl.load(table_row + HALF + pair)
        a, b = a * cos - b * sin, b * cos + a * sin
    return a, b


@triton.jit
def group_exponents(latent, D: tl.constexpr):
    """fp8_ds_mla: biased exponents of the power-of-two scales, as `formats.ds_mla_scales` has them."""
    magnitude = tl.minimum(tl.abs(latent), LARGEST_BF16)
    magnitude = tl.where(latent != latent, 0.0, magnitude)
    largest = tl.max(tl.reshape(magnitude, (D // GROUP, GROUP)), 1)
    needed = tl.maximum(tl.div_rn(largest, LARGEST_FN), MIN_SCALE)
    # Up to the next power of two: any bit of the mantissa carries into the exponent.
    return (needed.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def power_of_two(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "q_nope_t", "q_nope_h", "q_pe_t", "q_pe_h", "kv_c_t", "k_pe_t", "page_bytes", "token_bytes",
        "page_size", "pool_slots", "num_slots", "reserved_slot", "cos_sin_t", "num_positions", "pair_step",
        "pair_distance", "q_out_t", "q_out_h", "num_heads",
    ],
    do_not_specialize_on_alignment=[
        "q_pe", "k_pe", "ropes", "group_scales", "slot_mapping", "positions", "cos_sin", "q_scale",
        "k_scale",
    ],
)  # fmt: skip
def mla_epilogue_kernel(
    q_nope, q_nope_t: tl.int64, q_nope_h: tl.int64,  # (tokens, num_heads, D) bf16
    q_pe, q_pe_t: tl.int64, q_pe_h: tl.int64,        # (tokens, num_heads, R) bf16
    kv_c, kv_c_t: tl.int64,  # (tokens, D) bf16
    k_pe, k_pe_t: tl.int64,  # (tokens, R) bf16
    latents,       # (num_pages, page_size, D), bf16 or bytes
    ropes,         # (num_pages, page_size, R), bf16 or bytes
    group_scales,  # (num_pages, page_size, D / 128) fp32, fp8_ds_mla only
    page_bytes: tl.int64, token_bytes: tl.int64,  # strides of the three above
    page_size: tl.int64, pool_slots: tl.int64,
    slot_mapping, num_slots: tl.int64, reserved_slot: tl.int64,  # (num_slots,) int64
    positions,                                          # (tokens,) int64, or None
    cos_sin, cos_sin_t: tl.int64, num_positions: tl.int64,  # (num_positions, R) fp32, or None
    pair_step, pair_distance,  # pair i is (i * pair_step, i * pair_step + pair_distance)
    q_scale, k_scale,          # (1,) fp32, or None
    q_out, q_out_t: tl.int64, q_out_h: tl.int64,  # (tokens, num_heads, D + R), bf16 or bytes
    num_heads,
    D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr,
    KV_FORMAT: tl.constexpr, Q_FORMAT: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_Q_SCALE: tl.constexpr, HAS_K_SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program writes one cache row or BLOCK_H query rows. Nothing here depends on another program."""
    HALF: tl.constexpr = R // 2
    token = tl.program_id(0).to(tl.int64)
    d, pair = tl.arange(0, D), tl.arange(0, HALF)
    first = pair * pair_step
    second = first + pair_distance

    table_row = cos_sin
    if HAS_ROPE:
        # A token that writes no row may lie past the table: nothing is read there.
        position = tl.minimum(tl.maximum(tl.load(positions + token), 0), num_positions - 1)
        table_row += position * cos_sin_t

    if tl.program_id(1) == 0:
        slot = tl.load(slot_mapping + token, mask=token < num_slots, other=-1)
        if (slot >= 0) & (slot < pool_slots) & (slot != reserved_slot):
            row_bytes = (slot // page_size) * page_bytes + (slot % page_size) * token_bytes
            row_bytes = tl.multiple_of(row_bytes, 16 if ALIGNED else 1)
            source = tl.multiple_of(token * kv_c_t, 8 if ALIGNED else 1)
            latent = tl.load(kv_c + source + d)
            rope = k_pe + token * k_pe_t
            a, b = rotated(
                tl.load(rope + first), tl.load(rope + second), table_row, pair, HALF, HAS_ROPE
            )
            scale = 1.0
            if HAS_K_SCALE:
                scale = tl.load(k_scale)
            if KV_FORMAT == "fp8_ds_mla":
                value = latent.to(tl.float32)
                exponent = group_exponents(value, D)
                grouped = tl.reshape(value, (D // GROUP, GROUP))
                # The inverse of a power of two, so the product is rounded as the quotient is.
                grouped = grouped * power_of_two(254 - exponent)[:, None]
                tl.store(latents + row_bytes + d, to_fp8(tl.reshape(grouped, (D,)), False))
                group = tl.arange(0, D // GROUP)
                tl.store(group_scales + row_bytes // 4 + group, power_of_two(exponent))
                tl.store(ropes + row_bytes // 2 + first, a.to(tl.bfloat16))
                tl.store(ropes + row_bytes // 2 + second, b.to(tl.bfloat16))
            else:
                ITEM: tl.constexpr = 2 if KV_FORMAT == "bf16" else 1
                row = tl.multiple_of(row_bytes // ITEM, 16 // ITEM if ALIGNED else 1)
                tl.store(latents + row + d, stored(latent, scale, KV_FORMAT, HAS_K_SCALE))
                tl.store(ropes + row + first, stored(a, scale, KV_FORMAT, HAS_K_SCALE))
                tl.store(ropes + row + second, stored(b, scale, KV_FORMAT, HAS_K_SCALE))
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = (head < num_heads)[:, None]
        source = token * q_nope_t + head * q_nope_h
        source = tl.multiple_of(source, [8 if ALIGNED else 1])
        nope = tl.load(q_nope + source[:, None] + d[None, :], mask=is_head)
        rope = (q_pe + token * q_pe_t + head * q_pe_h)[:, None]
        a = tl.load(rope + first[None, :], mask=is_head)
        b = tl.load(rope + second[None, :], mask=is_head)
        a, b = rotated(a, b, table_row, pair[None, :], HALF, HAS_ROPE)
        scale = 1.0
        if HAS_Q_SCALE:
            scale = tl.load(q_scale)
        target = token * q_out_t + head * q_out_h
        target = tl.multiple_of(target, [16 if ALIGNED else 1])
        nope_out = q_out + target[:, None] + d[None, :]
        tl.store(nope_out, stored(nope, scale, Q_FORMAT, HAS_Q_SCALE), mask=is_head)
        rope_out = q_out + target[:, None] + D
        a = stored(a, scale, Q_FORMAT, HAS_Q_SCALE)
        tl.store(rope_out + first[None, :], a, mask=is_head)
        b = stored(b, scale, Q_FORMAT, HAS_Q_SCALE)
        tl.store(rope_out + second[None, :], b, mask=is_head)


def compile_options(
    spec: MLASpec,
    q_format: KVFormat,
    target: str,
    *,
    has_rope: bool,
    has_q_scale: bool,
    has_k_scale: bool,
) -> dict:
    """The constants of the kernel, and how it is launched: all that the compiled code depends on."""
    interpreted = target == "cpu"
    lanes = 64 if target.startswith("gfx9") else 32
    return {
        "D": spec.kv_lora_rank,
        "R": spec.qk_rope_head_dim,
        # Interpreted, every operation is slow, whatever its size.
        "BLOCK_H": triton.next_power_of_2(spec.num_heads) if interpreted else 1,
        "KV_FORMAT": spec.kv_format.value,
        "Q_FORMAT": q_format.value,
        "HAS_ROPE": has_rope,
        "HAS_Q_SCALE": has_q_scale,
        "HAS_K_SCALE": has_k_scale,
        "num_warps": min(16, max(1, spec.kv_lora_rank // (PIECE * lanes))),
        "enable_fp_fusion": False,
    }


def epilogue(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
    spec: MLASpec,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    rope: str | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    q_format: KVFormat,
    reserved_slot: int | None,
    inputs_ready: bool,
) -> None:
    """Write the query of every token to `q_out` and the cache row of every token that has a slot."""
    tokens, num_heads = q_nope.shape[:2]
    if tokens == 0:
        return
    latents, ropes, group_scales = cache_parts(kv_cache, spec, as_bytes=spec.kv_format.has_scale)
    if spec.kv_format is KVFormat.FP8_DS_MLA:
        latents = latents.view(torch.uint8)
    if q_format is not KVFormat.BF16:
        q_out = q_out.view(torch.uint8)
    options = compile_options(
        spec, q_format, arch_of(q_out.device).target,
        has_rope=rope is not None, has_q_scale=q_scale is not None, has_k_scale=k_scale is not None,
    )  # fmt: skip
    item = kv_cache.element_size()
    page_bytes, token_bytes = kv_cache.stride(0) * item, kv_cache.stride(1) * item
    # A launch compiles for the alignment of these.
    addresses = [t.data_ptr() % 16 == 0 for t in (q_nope, kv_c, latents, q_out)]
    options["ALIGNED"] = (
        all(addresses)
        and all(t % 8 == 0 for t in (*q_nope.stride()[:2], kv_c.stride(0)))
        and all(t % 16 == 0 for t in (page_bytes, token_bytes, *q_out.stride()[:2]))
    )
    require_compiled(q_out.device, "mla_epilogue_kernel", *options.values(), *addresses)
    step, distance = (2, 1) if rope == "interleaved" else (1, spec.qk_rope_head_dim // 2)
    programs = 1 + triton.cdiv(num_heads, options["BLOCK_H"])
    mla_epilogue_kernel[tokens, programs](
        q_nope, *q_nope.stride()[:2],
        q_pe, *q_pe.stride()[:2],
        kv_c, kv_c.stride(0),
        k_pe, k_pe.stride(0),
        latents, ropes, group_scales, page_bytes, token_bytes,
        spec.page_size, kv_cache.shape[0] * spec.page_size,
        slot_mapping, slot_mapping.shape[0], -1 if reserved_slot is None else reserved_slot,
        positions,
        cos_sin, *((0, 0) if cos_sin is None else (cos_sin.stride(0), cos_sin.shape[0])),
        step, distance,
        q_scale, k_scale,
        q_out, *q_out.stride()[:2],
        num_heads,
        **options,
    )  # fmt: skip


def warm_epilogue(spec: MLASpec, device: torch.device) -> None:
    """Compile the variants that `spec` can launch, by one token that writes no row: neither tokens, heads,
    pages nor strides are compiled in. The query is bf16, or fp8 of the cache's own flavour."""
    q_nope, q_pe, kv_c, k_pe = (
        torch.zeros(shape, dtype=torch.bfloat16, device=device)
        for shape in (
            (1, spec.num_heads, spec.kv_lora_rank), (1, spec.num_heads, spec.qk_rope_head_dim),
            (1, spec.kv_lora_rank), (1, spec.qk_rope_head_dim),
        )
    )  # fmt: skip
    cache_bytes = torch.zeros(spec.row_bytes, dtype=torch.uint8, device=device)
    kv_cache = cache_bytes.view(spec.kv_format.storage_dtype).expand(1, spec.page_size, -1)
    slot_mapping = torch.full((1,), -1, dtype=torch.int64, device=device)
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    cos_sin = torch.zeros((1, spec.qk_rope_head_dim), dtype=torch.float32, device=device)
    one = torch.ones(1, dtype=torch.float32, device=device)

    k_scales = (None, one) if spec.kv_format.has_scale else (None,)
    queries = [(KVFormat.BF16, None)]
    if spec.kv_format.has_scale:
        queries += [(spec.kv_format, None), (spec.kv_format, one)]
    for q_format, q_scale in queries:
        shape = (1, spec.num_heads, spec.head_dim)
        q_out = torch.empty(shape, dtype=q_format.storage_dtype, device=device)
        for k_scale in k_scales:
            for ropes in ((None, None, None), (positions, cos_sin, "interleaved")):
                epilogue(
                    q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, q_out, spec, *ropes,
                    q_scale, k_scale, q_format, None, False,
                )  # fmt: skip
