"""A case: one batch of requests, and how its tensors lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamla.spec import DS_MLA_GROUP, KVFormat, MLASpec


@dataclass(frozen=True)
class Case:
    """One batch of requests and how its tensors lie in memory.

    Attributes:
        name, reason: what the case is called, and what it is for.
        lengths: tokens cached for each request.
        num_heads ... qk_rope_head_dim: the MLASpec.
        causal, lse_base, batch_invariant, max_seqlen: as in the public calls.
        k_scale: the cache's scale, for formats that have one.
        data: the pattern of values, a key of `patterns.PATTERNS`.
        query_layout: "packed"; "padded": heads followed by NaN, in a wider row; "halves": q_nope is
            a transposed matrix product and q_pe a slice of a wider projection.
        page_stride: distance of pages in whole packed pages (engines interleave their layers).
        page_gap, row_gap: bytes added to the distance of pages and of rows.
        table_extra: columns past the last needed one; they hold wild page ids.
        garbage: the wild page id; None takes several in turn.
        pool_pages: pages in the pool; None for just more than needed.
        distinct_pages: the requests share this many pages, in random order; None for pages of their own.
        poisons: what the bytes that no request owns hold, one run each.
        keep_width: `narrow` changes nothing.
        gpu: needs a GPU.
    """

    name: str
    reason: str
    lengths: tuple[int, ...]
    num_heads: int = 16
    kv_format: str = "fp8_e4m3fn"
    page_size: int = 64
    seqlen_q: int = 1
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    causal: bool = True
    lse_base: str = "e"
    batch_invariant: bool = False
    max_seqlen: int | None = None
    k_scale: float = 0.37
    data: str = "normal"
    query_layout: str = "packed"
    page_stride: int = 1
    page_gap: int = 0
    row_gap: int = 0
    table_extra: int = 3
    garbage: int | None = None
    pool_pages: int | None = None
    distinct_pages: int | None = None
    poisons: tuple[str, ...] = ("nan", "huge")
    keep_width: bool = False
    gpu: bool = False

    def narrow(self) -> Case:
        """The same case at small widths, for Triton's interpreter, whose every operation is slow. The
        merge is a program a head there: cases that are not about heads get 4."""
        if self.keep_width:
            return self
        latent = DS_MLA_GROUP if self.spec.kv_format is KVFormat.FP8_DS_MLA else 64
        heads = self.num_heads if self.name.startswith(("heads", "causal")) else 4
        return replace(self, num_heads=heads, kv_lora_rank=latent, qk_rope_head_dim=16)

    @property
    def spec(self) -> MLASpec:
        return MLASpec(
            num_heads=self.num_heads,
            kv_format=self.kv_format,
            page_size=self.page_size,
            seqlen_q=self.seqlen_q,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
        )

    @property
    def tokens(self) -> int:
        return sum(self.lengths)
