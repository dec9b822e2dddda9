"""What plain PyTorch does: gather the pages, convert them to bf16, attend. In every call."""

from __future__ import annotations

import torch

from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs
from streamla.bench.peers.base import Peer, needs, returning
from streamla.spec import MLASpec


class _Torch(Peer):
    modules = ("torch",)
    distributions = ("torch",)
    install = "pip install torch"
    differs = "gathers the cache"

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return needs(spec)

    def prepare(self, inputs: Inputs) -> Prepared:
        spec = inputs.workload.spec
        tokens = inputs.page_tables.shape[2] * spec.page_size
        # Query i of n sees keys [0, seqlen - n + 1 + i); rows of q are ordered by query, then head.
        last = inputs.cache_seqlens[:, None] - spec.seqlen_q + 1
        last = last + torch.arange(spec.seqlen_q, device=inputs.q.device)
        keys = torch.arange(tokens, device=inputs.q.device)
        seen = (keys < last[..., None]).repeat_interleave(spec.num_heads, 1)
        q = inputs.q.flatten(1, 2)  # (batch, rows, head_dim)
        stored = inputs.kv_cache.view(torch.uint8)  # fp8 tensors cannot be indexed everywhere

        def call(region: int) -> torch.Tensor:
            pages = stored[inputs.page_tables[region].long()].view(inputs.kv_cache.dtype)
            kv = pages.flatten(1, 2).to(torch.bfloat16)
            if inputs.k_scale is not None:
                kv *= inputs.k_scale.to(torch.bfloat16)
            return self.attend(q, kv, seen, inputs.softmax_scale, spec.kv_lora_rank)

        return returning(call, inputs)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, seen: torch.Tensor, scale: float, rank: int
    ) -> torch.Tensor:
        """Attention of q (batch, rows, head_dim) over kv (batch, tokens, head_dim)."""
        raise NotImplementedError


class TorchEager(_Torch):
    """Two matrix products with a softmax between them; the first one rounds the scores to bf16."""

    name = "torch-eager"
    exact = False
    differs = "bf16 scores"
    error_budget = 2e-2

    def attend(self, q, kv, seen, scale, rank):
        scores = (q @ kv.mT).float() * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        return weights.to(torch.bfloat16) @ kv[..., :rank]


class TorchSDPA(_Torch):
    """torch.nn.functional.scaled_dot_product_attention, with the heads as queries of one head."""

    name = "torch-sdpa"

    def attend(self, q, kv, seen, scale, rank):
        kv = kv.unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(
            q.unsqueeze(1), kv, kv[..., :rank], attn_mask=seen.unsqueeze(1), scale=scale
        )
