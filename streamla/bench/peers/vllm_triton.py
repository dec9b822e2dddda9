"""vLLM's Triton MLA decode, from an installed vLLM."""

from __future__ import annotations

import inspect

import torch

from streamla.arch import arch_of
from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs
from streamla.bench.peers.base import Peer, needs, returning
from streamla.spec import MLASpec

TOKENS_A_SPLIT = 512
SPLITS_A_UNIT = 2


class VLLMTriton(Peer):
    """The caller chooses the splits: as in vLLM 0.33, a power of two by the longest request, up to two an SM."""

    name = "vllm-triton"
    modules = (
        "vllm.v1.attention.ops.triton_decode_attention",
        "vllm.attention.ops.triton_decode_attention",
    )
    distributions = ("vllm",)
    install = "pip install vllm"

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return super().refuse(spec, device) or needs(spec, seqlen_q=1)

    def prepare(self, inputs: Inputs) -> Prepared:
        spec, q = inputs.workload.spec, inputs.q.squeeze(1)
        batch = inputs.workload.requests
        wanted = max(1, inputs.workload.context // TOKENS_A_SPLIT)
        splits = min(1 << (wanted - 1).bit_length(), SPLITS_A_UNIT * arch_of(q.device).units)
        logits = torch.empty(
            (batch, spec.num_heads, splits, spec.kv_lora_rank + 1), device=q.device
        )
        out = q.new_empty((batch, spec.num_heads, spec.kv_lora_rank))
        lse = q.new_empty((batch, spec.num_heads))
        keys = inputs.kv_cache.unsqueeze(2)
        decode = self.library.decode_attention_fwd
        named = {"k_scale": inputs.k_scale, "v_scale": inputs.k_scale, "is_mla": True}
        parameters = inspect.signature(decode).parameters
        options = {k: v for k, v in named.items() if k in parameters and v is not None}

        def call(region: int) -> torch.Tensor:
            decode(
                q, keys, keys[..., : spec.kv_lora_rank], out, lse, inputs.page_tables[region],
                inputs.cache_seqlens, logits, splits, inputs.softmax_scale, spec.page_size, **options,
            )  # fmt: skip
            return out

        return returning(call, inputs)
