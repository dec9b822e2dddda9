"""Inputs to time: one pool of cache rows, and for each shape several disjoint regions of it.

A graph runs a shape once on each region in turn. The regions together are larger than the last-level cache
several times over, so a launch finds nothing of its region there: reads come from memory, as they do
in a server, where 60 other layers have run since this cache was last read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from streamla.bench.workloads import Workload
from streamla.formats import decode_rows, encode_rows
from streamla.spec import KVFormat, MLASpec

SOFTMAX_SCALE = 192**-0.5  # of the models: 128 + 64 before absorption
K_SCALE = 0.0625
COLD_FACTOR = 4  # regions hold more than this many times the last-level cache
MIN_REGIONS = 4  # spreads the launch of a graph over several runs of the largest shapes
PATTERN_ROWS = 1 << 16  # distinct random rows; the pool repeats them


@dataclass(frozen=True)
class Inputs:
    """What one decode call needs, with one page table a region.

    Attributes:
        q: (batch, seqlen_q, num_heads, head_dim) bfloat16.
        kv_cache: (num_pages, page_size, row_width), the whole pool.
        page_tables: (regions, batch, width) int32; pages of a region are in random order.
        cache_seqlens: (batch,) int32.
        k_scale: (1,) float32, or None if the format has none.
        region_words: (regions, words) int32: the memory of each region, in address order.
        pool: where `kv_cache` lies.
    """

    workload: Workload
    q: torch.Tensor
    kv_cache: torch.Tensor
    page_tables: torch.Tensor
    cache_seqlens: torch.Tensor
    k_scale: torch.Tensor | None
    region_words: torch.Tensor
    pool: CachePool
    softmax_scale: float = SOFTMAX_SCALE

    @property
    def regions(self) -> int:
        return self.page_tables.shape[0]


def pages_of(workload: Workload) -> list[int]:
    """Pages that each request occupies."""
    return [-(-n // workload.spec.page_size) for n in workload.lengths]


def num_regions(workload: Workload, l2_bytes: int) -> int:
    """Regions that keep reads cold; one where there is no cache to defeat (the CPU)."""
    if not l2_bytes or not workload.bytes:
        return 1
    return max(MIN_REGIONS, COLD_FACTOR * l2_bytes // workload.bytes + 1)


class CachePool:
    """Rows of one format, allocated once for all shapes that are measured in it.

    Args:
        workloads: every shape that will ask for inputs; all of one format and row width.
        l2_bytes: last-level cache of the device.
    """

    def __init__(
        self, workloads: list[Workload], device: torch.device, l2_bytes: int, seed: int = 0
    ) -> None:
        spec = workloads[0].spec
        self.spec = spec
        self.l2_bytes = l2_bytes
        self.generator = torch.Generator(device).manual_seed(seed)
        self.k_scale = None
        if spec.kv_format.has_scale:
            self.k_scale = torch.tensor([K_SCALE], device=device)
        tokens = max(
            num_regions(w, l2_bytes) * sum(pages_of(w)) * w.spec.page_size for w in workloads
        )
        self.rows = self._fill(spec, max(tokens, 1), device)

    def _fill(self, spec: MLASpec, tokens: int, device: torch.device) -> torch.Tensor:
        count = min(tokens, PATTERN_ROWS)
        values = torch.randn((count, spec.head_dim), device=device, generator=self.generator)
        pattern = encode_rows(values.to(torch.bfloat16), spec, self.k_scale).view(torch.uint8)
        if device.type == "cuda" and tokens * spec.row_bytes > torch.cuda.mem_get_info(device)[0]:
            raise ValueError(
                f"bench: the largest shape needs a pool of {tokens * spec.row_bytes / 1e9:.1f} GB; "
                f"{torch.cuda.mem_get_info(device)[0] / 1e9:.1f} GB are free on {device}"
            )
        rows = torch.empty((tokens, spec.row_bytes), dtype=torch.uint8, device=device)
        whole = tokens // count * count
        rows[:whole].view(-1, count, spec.row_bytes).copy_(pattern)
        rows[whole:].copy_(pattern[: tokens - whole])
        return rows

    @cached_property
    def bf16_rows(self) -> torch.Tensor:
        """(tokens, head_dim): the same values in bfloat16, for candidates that read nothing else."""
        stored = self.rows.view(self.spec.kv_format.storage_dtype)
        if self.spec.kv_format is KVFormat.BF16:
            return stored
        count = min(len(self.rows), PATTERN_ROWS)
        pattern = decode_rows(stored[:count], self.spec, self.k_scale).to(torch.bfloat16)
        rows = pattern.new_empty((len(self.rows), self.spec.head_dim))
        whole = len(rows) // count * count
        rows[:whole].view(-1, count, self.spec.head_dim).copy_(pattern)
        rows[whole:].copy_(pattern[: len(rows) - whole])
        return rows

    def inputs(self, workload: Workload) -> Inputs:
        """Queries, lengths and page tables of a shape, on views of the pool."""
        spec, device = workload.spec, self.rows.device
        regions, pages = num_regions(workload, self.l2_bytes), pages_of(workload)
        per_region = sum(pages)

        num_pages = self.rows.shape[0] // spec.page_size
        cache = self.rows[: num_pages * spec.page_size].view(spec.kv_format.storage_dtype)
        cache = cache.view(num_pages, spec.page_size, spec.row_width)

        keys = torch.rand((regions, per_region), device=device, generator=self.generator)
        first = torch.arange(regions, device=device)[:, None] * per_region
        order = (keys.argsort(1) + first).int()
        tables = torch.zeros((regions, len(pages), max(pages, default=0)), dtype=torch.int32)
        tables = tables.to(device)
        begin = 0
        for b, n in enumerate(pages):
            tables[:, b, :n] = order[:, begin : begin + n]
            begin += n

        shape = (workload.requests, spec.seqlen_q, spec.num_heads, spec.head_dim)
        q = torch.randn(shape, device=device, generator=self.generator).to(torch.bfloat16)
        seqlens = torch.tensor(workload.lengths, dtype=torch.int32, device=device)
        words = self._region_words(regions, per_region * spec.page_size, workload.bytes)
        return Inputs(workload, q, cache, tables, seqlens, self.k_scale, words, self)

    def _region_words(self, regions: int, tokens: int, num_bytes: int) -> torch.Tensor:
        # A region is contiguous, so its pages in address order are one long run. Of a last page only the
        # tokens count: the floor reads as many bytes as decode must, to the next multiple of 16.
        flat = self.rows[: regions * tokens].view(regions, -1)
        return flat[:, : min(flat.shape[1], -(-num_bytes // 16) * 16)].view(torch.int32)
