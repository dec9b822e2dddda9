"""Inputs of a case: fresh random values in random pages, and poison wherever nobody may read.

The values depend on the case and the seed alone, so that two placements of the same requests must give
the same result to the last bit. The benchmark builds its inputs here as well (`poison=None`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from streamla.formats import encode_rows
from streamla.spec import DS_MLA_GROUP, KVFormat, MLASpec
from streamla.testing.canary import NAN_BYTE, Canaries
from streamla.testing.cases import Case
from streamla.testing.patterns import PATTERNS, Tokens

# The model's scale: it comes from 128 + 64 dimensions, whatever absorption makes of them.
SOFTMAX_SCALE = 1 / math.sqrt(192)

CHUNK_TOKENS = 1 << 16

# Two bytes that are NaN, infinity or the largest value, whichever the format; fp8 has no infinity.
# 0x7FFF holds both NaN codes of e4m3fn, and is NaN in bfloat16 and float32 as well.
_POISON = {
    "nan": {"bf16": 0x7FC0, "fp8_e4m3fn": 0x7FFF, "fp8_e4m3fnuz": 0x8080, "fp8_ds_mla": 0x7FFF},
    "inf": {"bf16": 0x7F80, "fp8_e4m3fn": 0x7FFF, "fp8_e4m3fnuz": 0x8080, "fp8_ds_mla": 0x7F80},
    "huge": {"bf16": 0x7F7F, "fp8_e4m3fn": 0x7E7E, "fp8_e4m3fnuz": 0x7F7F, "fp8_ds_mla": 0x7E7E},
}


@dataclass
class Inputs:
    """What the public calls take, and the canaries around it.

    `q_pe` is None when `q` is whole. `decode_args` and `options` are the arguments that every
    public call of one step shares.
    """

    case: Case
    spec: MLASpec
    q: torch.Tensor
    q_pe: torch.Tensor | None
    kv_cache: torch.Tensor
    page_table: torch.Tensor
    cache_seqlens: torch.Tensor
    k_scale: torch.Tensor | None
    canaries: Canaries
    softmax_scale: float = SOFTMAX_SCALE

    @property
    def q_halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q_nope and q_pe, as views."""
        if self.q_pe is not None:
            return self.q, self.q_pe
        rank = self.spec.kv_lora_rank
        return self.q[..., :rank], self.q[..., rank:]

    @property
    def options(self) -> dict:
        """Keyword arguments of attention and decode, without outputs."""
        return {
            "softmax_scale": self.softmax_scale,
            "q_pe": self.q_pe,
            "k_scale": self.k_scale,
            "causal": self.case.causal,
            "lse_base": self.case.lse_base,
        }

    def outputs(self, byte: int = NAN_BYTE) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse full of `byte` (NaN by default), between canaries."""
        rows = (len(self.case.lengths), self.spec.seqlen_q, self.spec.num_heads)
        device = self.q.device
        out = self.canaries.empty(
            "out", (*rows, self.spec.kv_lora_rank), torch.bfloat16, device, byte
        )
        return out, self.canaries.empty("lse", rows, torch.float32, device, byte)

    def check_canaries(self) -> None:
        self.canaries.check()


def build(
    case: Case,
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    poison: str | None = "nan",
    placement: str = "shuffled",
    garbage: int | None = None,
) -> Inputs:
    """Inputs of `case`.

    Args:
        poison: "nan", "inf", "huge" (largest finite), "nan_latent" or "nan_rope" (that part of the rows
            past a request's end, zeros in the other); None leaves what happens to be there.
        placement: "shuffled", "low" or "high" physical pages.
        garbage: wild page id past the last needed column, in place of the case's.
    """
    device = torch.device(device)
    spec = case.spec
    canaries = Canaries()
    generator = torch.Generator(device).manual_seed(seed)

    q = torch.randn(
        (len(case.lengths), spec.seqlen_q, spec.num_heads, spec.head_dim),
        generator=generator, device=device,
    )  # fmt: skip
    if (edit := PATTERNS[case.data].query) is not None:
        edit(spec, q)
    query, q_pe = lay_out_query(case.query_layout, spec, q.to(torch.bfloat16))

    k_scale = None
    if spec.kv_format.has_scale:
        k_scale = torch.tensor([case.k_scale], device=device)

    num_pages = [-(-n // spec.page_size) for n in case.lengths]
    num_logical = case.distinct_pages or sum(num_pages)
    pool_pages = case.pool_pages or num_logical + 3
    physical = _place(placement, num_logical, pool_pages, seed, device)
    kv_cache = pool_of(case, spec, pool_pages, poison, device)
    _write_pages(case, kv_cache, physical, k_scale, poison, generator)

    return Inputs(
        case=case,
        spec=spec,
        q=query,
        q_pe=q_pe,
        kv_cache=kv_cache,
        page_table=_page_table(case, num_pages, physical, pool_pages, seed, garbage, canaries),
        cache_seqlens=canaries.around(
            "cache_seqlens", torch.tensor(case.lengths, dtype=torch.int32, device=device)
        ),
        k_scale=k_scale,
        canaries=canaries,
    )


def lay_out_query(
    layout: str, spec: MLASpec, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values of `q` in the memory layout asked for; all memory between is NaN."""
    batch, seqlen_q, heads, width = q.shape
    if layout == "packed":
        return q, None
    if layout == "padded":
        wide = q.new_full((batch, seqlen_q, heads + 2, width + 64), torch.nan)
        view = wide[:, :, :heads, :width]
        return view.copy_(q), None
    if layout != "halves":
        raise ValueError(f"query_layout: need packed, padded or halves; got {layout!r}")
    rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    tokens = batch * seqlen_q
    product = q.new_empty((heads, tokens, rank)).transpose(0, 1)  # as a batched product leaves it
    projection = q.new_full((tokens, heads, 2 * rope + rope), torch.nan)[..., 2 * rope :]
    product.copy_(q[..., :rank].flatten(0, 1))
    projection.copy_(q[..., rank:].flatten(0, 1))
    rows = (batch, seqlen_q)
    return product.unflatten(0, rows), projection.unflatten(0, rows)


def _place(
    placement: str, count: int, pool_pages: int, seed: int, device: torch.device
) -> torch.Tensor:
    """Physical page of every logical page."""
    if placement == "low":
        return torch.arange(count, device=device)
    if placement == "high":
        return pool_pages - 1 - torch.arange(count, device=device)
    if placement != "shuffled":
        raise ValueError(f"placement: need shuffled, low or high; got {placement!r}")
    generator = torch.Generator(device).manual_seed(seed + 1)
    return torch.randperm(pool_pages, generator=generator, device=device)[:count]


def pool_of(
    case: Case, spec: MLASpec, pool_pages: int, poison: str | None, device: torch.device
) -> torch.Tensor:
    """(pool_pages, page_size, row_width) of the storage dtype, poison everywhere, gaps included."""
    itemsize = spec.kv_format.storage_dtype.itemsize
    row = spec.row_bytes + case.row_gap
    page = spec.page_size * row * case.page_stride + case.page_gap
    size = pool_pages * page + 4096
    storage = torch.empty(size + size % 2, dtype=torch.uint8, device=device)
    if poison is not None:
        storage.view(torch.int16).fill_(_poison_word(spec.kv_format, poison))
    strides = (page // itemsize, row // itemsize, 1)
    elements = storage.view(spec.kv_format.storage_dtype)
    return elements.as_strided((pool_pages, spec.page_size, spec.row_width), strides)


def _poison_word(fmt: KVFormat, poison: str) -> int:
    """Two bytes of poison as a signed int16."""
    word = _POISON[poison.split("_")[0]][fmt.value]
    return word - (1 << 16) if word >= 1 << 15 else word


def _write_pages(
    case: Case,
    kv_cache: torch.Tensor,
    physical: torch.Tensor,
    k_scale: torch.Tensor | None,
    poison: str | None,
    generator: torch.Generator,
) -> None:
    """Draw the requests' rows and write them to their pages, in chunks; poison past the last token."""
    spec, device = case.spec, kv_cache.device
    page_size = spec.page_size
    if case.distinct_pages:
        lengths = torch.tensor([case.distinct_pages * page_size], device=device)
    else:
        lengths = torch.tensor(case.lengths, dtype=torch.int64, device=device)
    pages = (lengths + page_size - 1) // page_size
    request_of_page = torch.repeat_interleave(torch.arange(len(lengths), device=device), pages)
    first_page = pages.cumsum(0) - pages
    page_in_request = (
        torch.arange(len(request_of_page), device=device) - first_page[request_of_page]
    )

    edit = PATTERNS[case.data].rows
    pool = kv_cache.view(torch.uint8)
    step = max(1, CHUNK_TOKENS // page_size)
    for chunk in range(0, len(physical), step):
        request = request_of_page[chunk : chunk + step].repeat_interleave(page_size)
        position = (
            page_in_request[chunk : chunk + step, None] * page_size
            + torch.arange(page_size, device=device)
        ).flatten()
        values = torch.randn((len(request), spec.head_dim), generator=generator, device=device)
        if edit is not None:
            edit(spec, Tokens(values, request, position, lengths[request]))
        rows = encode_rows(values, spec, k_scale).view(torch.uint8)
        if case.data == "all-bytes":
            _write_all_bytes(spec, rows)
        if case.data == "odd-scales":
            _change_scales(spec, rows, generator)
        if poison is not None:
            rows[position >= lengths[request]] = poison_row(spec, poison, device)
        pool[physical[chunk : chunk + step]] = rows.unflatten(0, (-1, page_size))


def _write_all_bytes(spec: MLASpec, rows: torch.Tensor) -> None:
    """Give the stored latents every finite byte value: 126 and its negatives, or 255 without NaN."""
    fmt = spec.kv_format
    if fmt is KVFormat.BF16:
        return
    finite = torch.arange(256, dtype=torch.uint8, device=rows.device)
    dtype = fmt.storage_dtype if fmt.has_scale else torch.float8_e4m3fn
    finite = finite[finite.view(dtype).float().isfinite()]
    repeats = -(-spec.kv_lora_rank // len(finite))
    rows[:, : spec.kv_lora_rank] = finite.repeat(repeats)[: spec.kv_lora_rank]


def _change_scales(spec: MLASpec, rows: torch.Tensor, generator: torch.Generator) -> None:
    """Multiply every group's scale by a number of its own, from 2^-6 to 4."""
    begin, groups = spec.kv_lora_rank, spec.kv_lora_rank // DS_MLA_GROUP
    stored = rows[:, begin : begin + 4 * groups]
    exponents = 8 * torch.rand((len(rows), groups), generator=generator, device=rows.device) - 6
    scales = stored.contiguous().view(torch.float32) * exponents.exp2()
    stored.copy_(scales.view(torch.uint8))


def poison_row(spec: MLASpec, poison: str, device: torch.device) -> torch.Tensor:
    """The bytes of one row past a request's end."""
    word = _poison_word(spec.kv_format, poison)
    words = torch.full((spec.row_bytes // 2,), word, dtype=torch.int16, device=device)
    row = words.view(torch.uint8)
    latent_end = spec.row_bytes * spec.kv_lora_rank // spec.head_dim
    if spec.kv_format is KVFormat.FP8_DS_MLA:
        latent_end = spec.row_bytes - 2 * spec.qk_rope_head_dim
    if poison == "nan_latent":
        row[latent_end:] = 0
    if poison == "nan_rope":
        row[:latent_end] = 0
    return row


def _page_table(
    case: Case,
    num_pages: list[int],
    physical: torch.Tensor,
    pool_pages: int,
    seed: int,
    garbage: int | None,
    canaries: Canaries,
) -> torch.Tensor:
    """(batch, width) int32; wild ids past each request's last needed column."""
    device = physical.device
    width = max(num_pages, default=0) + case.table_extra
    if case.max_seqlen is not None:
        width = max(width, -(-case.max_seqlen // case.page_size))
    batch = len(num_pages)
    column = torch.arange(width, device=device)
    garbage = case.garbage if garbage is None else garbage
    if garbage is None:
        unowned = torch.ones(pool_pages, dtype=torch.bool, device=device)
        unowned[physical] = False
        poisoned_page = unowned.int().argmax().view(1)
        ids = torch.tensor([-1, pool_pages, 2**31 - 1, -(2**31)], device=device)
        wild = torch.cat([poisoned_page, ids])[column % 5]
    else:
        wild = torch.full((width,), garbage, device=device)

    counts = torch.tensor(num_pages, dtype=torch.int64, device=device)
    if case.distinct_pages:
        generator = torch.Generator(device).manual_seed(seed + 2)
        index = torch.randint(
            case.distinct_pages, (batch, width), generator=generator, device=device
        )
    else:
        index = (counts.cumsum(0) - counts)[:, None] + column
        index = index.clamp(max=max(0, len(physical) - 1))
    owned = column < counts[:, None]
    pages = physical[index] if len(physical) else torch.zeros_like(index)
    table = torch.where(owned, pages, wild)
    return canaries.around("page_table", table.to(torch.int32))
