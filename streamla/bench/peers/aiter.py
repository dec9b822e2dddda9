"""aiter's MLA decode, on ROCm."""

from __future__ import annotations

import inspect

import torch

from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs
from streamla.bench.peers.base import Peer, needs, returning
from streamla.spec import KVFormat, MLASpec


class Aiter(Peer):
    """The cache is viewed as pages of one token, as vLLM does; it chooses its splits in every call."""

    name = "aiter"
    modules = ("aiter.mla",)
    distributions = ("amd-aiter", "aiter")
    install = "pip install amd-aiter"

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        if not torch.version.hip:
            return "aiter needs ROCm"
        return super().refuse(spec, device) or needs(
            spec, formats=(KVFormat.BF16, KVFormat.FP8_E4M3FNUZ)
        )

    def prepare(self, inputs: Inputs) -> Prepared:
        spec, device = inputs.workload.spec, inputs.q.device
        batch = inputs.workload.requests
        q = inputs.q.flatten(0, 1)
        cache = inputs.kv_cache.view(-1, 1, 1, spec.head_dim)
        out = q.new_empty((*q.shape[:2], spec.kv_lora_rank))
        q_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * spec.seqlen_q
        kv_indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        kv_indptr[1:] = inputs.cache_seqlens.cumsum(0)
        last_page = torch.ones(batch, dtype=torch.int32, device=device)
        within = torch.arange(spec.page_size, device=device, dtype=torch.int32)
        indices = []
        for table in inputs.page_tables:
            tokens = (table[..., None] * spec.page_size + within).flatten(1)
            indices.append(
                torch.cat([tokens[b, :n] for b, n in enumerate(inputs.workload.lengths)])
            )
        decode = self.library.mla_decode_fwd
        scaled = inputs.k_scale is not None and "kv_scale" in inspect.signature(decode).parameters
        options = {"kv_scale": inputs.k_scale} if scaled else {}

        def call(region: int) -> torch.Tensor:
            decode(
                q, cache, out, q_indptr, kv_indptr, indices[region], last_page, spec.seqlen_q,
                sm_scale=inputs.softmax_scale, **options,
            )  # fmt: skip
            return out

        return returning(call, inputs)
