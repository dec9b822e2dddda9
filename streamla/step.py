"""The new tokens of a decode step, as `decode_step` hands them to a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NewTokens:
    """What the epilogue takes beside the query, the cache and its scale: one row a token.

    Token seqlen_q * b + i is query i of request b, and place seqlen - seqlen_q + i of its tokens.
    """

    kv_c: torch.Tensor
    k_pe: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None
    cos_sin: torch.Tensor | None
    rope: str | None
    reserved_slot: int | None
