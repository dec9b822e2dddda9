"""Triton's interpreter, made to convert floats as GPUs do.

The interpreter of Triton 3.6 truncates float32 to bfloat16 where GPUs round to nearest even, and reads the
NaN of float8 as 480. Kernels are tested through it bit by bit, so both are put right here.
"""

from __future__ import annotations

import os

import torch


def is_interpreted(device: torch.device) -> bool:
    """Whether Triton kernels for `device` run in the interpreter."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def repair() -> None:
    """Replace the interpreter's conversion between floating-point types. Harmless when repeated."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if getattr(original, "repaired", False):
        return
    torch_dtype = {
        tl.float32: torch.float32,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e4b8: torch.float8_e4m3fnuz,
    }

    def convert(values, from_dtype, to_dtype, rounding_mode):
        """Arrays of stored bits in, arrays of stored bits out."""
        source, target = torch_dtype.get(from_dtype), torch_dtype.get(to_dtype)
        # Narrowing to float8 saturates on a GPU and not in torch: left to the original.
        if source is None or target is None or target.itemsize == 1 or values.size == 0:
            return original(values, from_dtype, to_dtype, rounding_mode)
        bits = {2: torch.uint16, 4: torch.uint32}[target.itemsize]
        converted = torch.frombuffer(bytearray(values.tobytes()), dtype=source).to(target)
        return converted.view(bits).numpy().reshape(values.shape)

    convert.repaired = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert
