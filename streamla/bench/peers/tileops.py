"""TileOPs' paged MLA operator."""

from __future__ import annotations

import torch

from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs
from streamla.bench.peers.base import BF16, Peer, cache_of, needs, returning
from streamla.spec import MLASpec


class TileOPs(Peer):
    """It has no plan: the width of the page table sets its splits."""

    modules = ("tileops.attention",)
    distributions = ("tileops",)
    install = "pip install tileops"

    def __init__(self, cache: str) -> None:
        super().__init__()
        self.cache = cache
        self.name = "tileops" + ("-bf16" if cache == BF16 else "")
        self.differs = "bf16 cache" if cache == BF16 else None

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return super().refuse(spec, device) or needs(spec)

    def prepare(self, inputs: Inputs) -> Prepared:
        cache = cache_of(inputs, self.cache)
        scale = None if cache.dtype == torch.bfloat16 else inputs.k_scale
        op = self.library.MLAPagedFwdOp(
            inputs.workload.spec.kv_lora_rank, is_causal=True, sm_scale=inputs.softmax_scale
        )

        def call(region: int) -> torch.Tensor:
            out, _ = op(
                inputs.q, cache, inputs.page_tables[region], inputs.cache_seqlens, kv_scale=scale
            )
            return out

        return returning(call, inputs)
