"""Buffers that notice a write beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from streamla.plan import DecodePlan

_MARGIN = 2048  # bytes on each side: more than a kernel's widest store
_PATTERN = 0xA5


class Canaries:
    """Hands out tensors that lie inside larger buffers whose margins hold a known pattern."""

    def __init__(self) -> None:
        self._buffers: list[tuple[str, torch.Tensor, int]] = []

    def empty(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, byte: int
    ) -> torch.Tensor:
        """A contiguous tensor, aligned to 256 bytes, whose bytes are all `byte`."""
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * _MARGIN,), _PATTERN, dtype=torch.uint8, device=device)
        inner = buffer[_MARGIN : _MARGIN + size]
        inner.fill_(byte)
        self._buffers.append((name, buffer, size))
        return inner.view(dtype).view(shape)

    def around(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` between margins."""
        copy = self.empty(name, tuple(tensor.shape), tensor.dtype, tensor.device, 0)
        return copy.copy_(tensor)

    def check(self) -> None:
        """Raise AssertionError naming the first buffer that was written outside."""
        for name, buffer, size in self._buffers:
            margins = (("before", buffer[:_MARGIN]), ("after", buffer[_MARGIN + size :]))
            for side, margin in margins:
                changed = int((margin != _PATTERN).sum())
                assert changed == 0, f"{name}: {changed} bytes written {side} the tensor"


NAN_BYTE = 0xFF  # NaN in float32, bfloat16 and float8_e4m3fn
HUGE_BYTE = 0x7E  # 8.5e37 in float32 and bfloat16, 2122219134 in int32


def guarded_plan(plan: DecodePlan, canaries: Canaries, byte: int) -> DecodePlan:
    """The same plan with every buffer between margins and full of `byte`: not planned yet."""
    buffers: dict[str, Any] = {
        field.name: canaries.empty(field.name, tuple(old.shape), old.dtype, old.device, byte)
        for field in dataclasses.fields(plan)
        if isinstance(old := getattr(plan, field.name), torch.Tensor)
    }
    return dataclasses.replace(plan, **buffers)
