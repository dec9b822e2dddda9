"""FlashAttention-3 with `qv`, on a contiguous bf16 cache: the build on PyPI leaves paged caches out."""

from __future__ import annotations

import torch

from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs
from streamla.bench.peers.base import BF16, Peer, cache_of, needs, returning
from streamla.spec import MLASpec


class FA3(Peer):
    """Keys are the rope part, values the latent, and `qv` the query of the latent.

    It schedules in every call, so that its plan has no time of its own.
    """

    name = "fa3-qv"
    modules = ("fa3_fwd_interface",)
    distributions = ("fa3-fwd", "fa3_fwd")
    install = "pip install --no-deps fa3-fwd"
    differs = "bf16, contiguous"
    cache = BF16

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return super().refuse(spec, device) or needs(spec)

    def prepare(self, inputs: Inputs) -> Prepared:
        spec = inputs.workload.spec
        rank = spec.kv_lora_rank
        pages = cache_of(inputs, BF16)
        caches = [
            pages[table.long()].flatten(1, 2).unsqueeze(2)  # (batch, tokens, 1, head_dim)
            for table in inputs.page_tables
        ]
        q_nope, q_pe = inputs.q[..., :rank], inputs.q[..., rank:]

        def call(region: int) -> torch.Tensor:
            cache = caches[region]
            return self.library.flash_attn_with_kvcache(
                q_pe, cache[..., rank:], cache[..., :rank], qv=q_nope,
                cache_seqlens=inputs.cache_seqlens, softmax_scale=inputs.softmax_scale,
                causal=True, num_splits=0, return_softmax_lse=True,
            )[0]  # fmt: skip

        return returning(call, inputs)
