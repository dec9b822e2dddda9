"""Patterns of query and cache values, by name. Each makes one kind of fault visible.

A pattern edits normally distributed float32 values in place, before they are rounded: `query` the
queries (batch, seqlen_q, num_heads, head_dim), `rows` the cached rows of some tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from streamla.spec import MLASpec


@dataclass(frozen=True)
class Tokens:
    """Some cached tokens: `rows` (tokens, head_dim), and for each its request, its place in the
    request and the request's length. Shared pages count as one request that is as long as they are."""

    rows: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor

    def newest(self) -> torch.Tensor:
        return self.position == self.length - 1


@dataclass(frozen=True)
class Pattern:
    query: Callable[[MLASpec, torch.Tensor], None] | None = None
    rows: Callable[[MLASpec, Tokens], None] | None = None


def zero(spec: MLASpec, q: torch.Tensor) -> None:
    q.zero_()


def one_hot(spec: MLASpec, q: torch.Tensor) -> None:
    q.zero_()
    for head in range(spec.num_heads):
        q[:, :, head, head % spec.kv_lora_rank] = 16


def times_8(spec: MLASpec, q: torch.Tensor) -> None:
    q.mul_(8)


def one_nan_head(spec: MLASpec, q: torch.Tensor) -> None:
    q[q.shape[0] // 2, :, spec.num_heads // 2] = torch.nan


def one_nan_row(spec: MLASpec, tokens: Tokens) -> None:
    tokens.rows[(tokens.request == 1) & (tokens.position == tokens.length // 2), 3] = torch.nan


def same_query(spec: MLASpec, q: torch.Tensor) -> None:
    q.copy_(q[:1].clone())


def rows_of_position(spec: MLASpec, tokens: Tokens) -> None:
    column = torch.arange(spec.head_dim, device=tokens.rows.device)
    tokens.rows.copy_(
        2 * (tokens.position[:, None] * 0.377 + column * 1.71 + 1).double().pow(1.1).sin()
    )


def alternate(spec: MLASpec, tokens: Tokens) -> None:
    tokens.rows[:, 0] = 1 - 2 * (tokens.position % 2)
    tokens.rows[:, 1] = 1


def _score_through_rope(q_value: float, *, alone: bool = False) -> Callable[..., None]:
    """The first rope value of every query; a key's first rope value then adds a chosen score."""

    def query(spec: MLASpec, q: torch.Tensor) -> None:
        if alone:
            q.zero_()
        q[..., spec.kv_lora_rank] = q_value

    return query


def _rope_key(score: float, q_value: float) -> float:
    """The key's first rope value that adds `score`, under softmax_scale = 1 / sqrt(192)."""
    return score * 192**0.5 / q_value


def spike(spec: MLASpec, tokens: Tokens) -> None:
    tokens.rows[:, spec.kv_lora_rank] = torch.where(tokens.newest(), _rope_key(30, 16), 0.0)
    tokens.rows[:, 0] = torch.where(tokens.newest(), 100.0, tokens.rows[:, 0])


def rising(spec: MLASpec, tokens: Tokens) -> None:
    tokens.rows[:, spec.kv_lora_rank] = _rope_key(40, 16) * tokens.position / tokens.length


def _constant(score: float, q_value: float) -> Callable[..., None]:
    def rows(spec: MLASpec, tokens: Tokens) -> None:
        tokens.rows[:, spec.kv_lora_rank] = _rope_key(score, q_value)

    return rows


PATTERNS: dict[str, Pattern] = {
    "normal": Pattern(),
    # Made of stored bytes: build.py writes every finite byte value once the rows are encoded.
    "all-bytes": Pattern(),
    # fp8_ds_mla: build.py multiplies the stored scales by numbers that are no powers of two.
    "odd-scales": Pattern(),
    # All scores are 0.
    "zero-query": Pattern(zero),
    # Head h asks for latent h.
    "one-hot": Pattern(one_hot),
    # Every request holds the same tokens and asks the same.
    "identical": Pattern(same_query, rows_of_position),
    # One key takes nearly all the weight.
    "peaked": Pattern(times_8),
    "nan-head": Pattern(one_nan_head),
    "nan-row": Pattern(rows=one_nan_row),
    # The newest token has score +30 and a large latent: a query that must not see it would show it.
    "spike": Pattern(_score_through_rope(16), spike),
    # Scores grow by 40 along the request.
    "rising": Pattern(_score_through_rope(16), rising),
    # Latent 0 is +1 and -1 in turn and latent 1 is 1, under equal scores: the means are 0 and 1.
    "alternating": Pattern(zero, alternate),
    # Scores lie around an offset, or are all equal to one large value.
    "offset+300": Pattern(_score_through_rope(64), _constant(300, 64)),
    "offset-300": Pattern(_score_through_rope(64), _constant(-300, 64)),
    "constant+1e4": Pattern(_score_through_rope(2048, alone=True), _constant(1e4, 2048)),
    "constant-1e4": Pattern(_score_through_rope(2048, alone=True), _constant(-1e4, 2048)),
}
