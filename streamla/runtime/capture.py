"""Nothing compiles inside a CUDA graph capture: the launch that would is refused by a sentence."""

from __future__ import annotations

from collections.abc import Hashable

import torch

_launched: set[Hashable] = set()


def require_compiled(device: torch.device, *variant: Hashable) -> None:
    """Remember that `variant` was launched, or refuse it in a capture if it never was.

    Args:
        device: where it is launched; only GPUs capture.
        variant: everything that the compiled code depends on.

    Raises:
        RuntimeError: the launch would compile while a graph is captured.
    """
    if device.type != "cuda":
        return
    key = (device.index, *variant)
    if key in _launched:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{variant[0]}: not compiled yet, and a CUDA graph is being captured; call "
            "streamla.warmup(spec, batch_sizes), or this once, before the capture"
        )
    _launched.add(key)
