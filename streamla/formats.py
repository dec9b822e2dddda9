"""Encode and decode cache rows: the one statement of what the stored bytes mean.

Encoding saturates (an infinity becomes the largest finite value) and keeps NaN. `decode_rows` gives
float64, so a comparison against it never charges a kernel for the rounding of the format.
"""

from __future__ import annotations

import torch

from streamla.spec import DS_MLA_GROUP, KVFormat, MLASpec

# Smallest tile scale of an fp8_ds_mla row before it is rounded up to a power of two.
DS_MLA_MIN_SCALE = 1e-4


def to_fp8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to fp8 (to nearest even), saturating; NaN stays NaN, fnuz has no negative zero.

    Args:
        values: any shape, float32.
        dtype: torch.float8_e4m3fn (largest 448) or torch.float8_e4m3fnuz (largest 240).
    """
    largest = torch.finfo(dtype).max
    rounded = values.clamp(-largest, largest).to(dtype)  # clamp keeps NaN
    if dtype is torch.float8_e4m3fnuz:
        # 0x80 is NaN in this flavour: a negative value that rounds to zero must lose its sign.
        lost = (rounded.view(torch.uint8) == 0x80) & ~values.isnan()
        rounded = torch.where(lost, 0, rounded.view(torch.uint8)).view(dtype)
    return rounded


def ds_mla_scales(latent: torch.Tensor) -> torch.Tensor:
    """The power-of-two scale of every group of 128 latents: 2 ** ceil(log2(max(amax / 448, 1e-4))).

    Readers that keep only the exponent, or round the scale to bf16, then still read it exactly.

    Args:
        latent: (..., kv_lora_rank) float32. NaN does not count; an infinity counts as the largest bf16.

    Returns:
        (..., kv_lora_rank / 128) float32.
    """
    groups = latent.unflatten(-1, (-1, DS_MLA_GROUP)).abs()
    groups = groups.nan_to_num(nan=0.0, posinf=torch.finfo(torch.bfloat16).max)
    needed = (groups.amax(-1) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=DS_MLA_MIN_SCALE)
    mantissa, exponent = torch.frexp(needed)
    return torch.ldexp(torch.ones_like(needed), exponent - (mantissa == 0.5).int())


def encode_rows(
    values: torch.Tensor, spec: MLASpec, k_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Cache rows of `spec.kv_format` from latent and rope values.

    Args:
        values: (..., head_dim) bfloat16 or float32.
        spec: gives the format and the widths.
        k_scale: float32, one element; stored = value / k_scale. None is 1. fp8 formats only.

    Returns:
        (..., spec.row_width) of the format's storage dtype.
    """
    fmt, latent_width = spec.kv_format, spec.kv_lora_rank
    if fmt is KVFormat.BF16:
        return values.to(torch.bfloat16)
    values = values.float()
    if fmt.has_scale:
        if k_scale is not None:
            values = values / k_scale.float()
        return to_fp8(values, fmt.storage_dtype)
    latent, rope = values[..., :latent_width], values[..., latent_width:]
    scales = ds_mla_scales(latent)
    stored = latent / scales.repeat_interleave(DS_MLA_GROUP, -1)
    parts = (to_fp8(stored, torch.float8_e4m3fn), scales, rope.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def decode_rows(
    rows: torch.Tensor, spec: MLASpec, k_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """What stored rows are worth, exactly.

    Args:
        rows: (..., spec.row_width) of the storage dtype; fp8 rows may come as uint8.
        spec: gives the format and the widths.
        k_scale: float32, one element; real = stored * k_scale. None is 1. fp8 formats only.

    Returns:
        (..., head_dim) float64.
    """
    fmt, latent_width = spec.kv_format, spec.kv_lora_rank
    if fmt is KVFormat.BF16:
        return rows.double()
    if fmt.has_scale:
        values = rows.view(fmt.storage_dtype).float().double()
        return values if k_scale is None else values * k_scale.double()
    rows = rows.contiguous()
    scales_end = latent_width + 4 * (latent_width // DS_MLA_GROUP)
    latent = rows[..., :latent_width].contiguous().view(torch.float8_e4m3fn).float().double()
    scales = rows[..., latent_width:scales_end].contiguous().view(torch.float32).double()
    rope = rows[..., scales_end:].contiguous().view(torch.bfloat16).double()
    return torch.cat([latent * scales.repeat_interleave(DS_MLA_GROUP, -1), rope], -1)
