"""FlashInfer's MLA wrapper. Its plan runs on the host, from lengths and page tables that are there."""

from __future__ import annotations

import torch

from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs, pages_of
from streamla.bench.peers.base import BF16, Peer, cache_of, needs, returning
from streamla.spec import MLASpec

WORKSPACE_BYTES = 128 << 20


class FlashInfer(Peer):
    """Backend "fa2" or "fa3", on the stored cache or on bf16."""

    modules = ("flashinfer",)
    distributions = ("flashinfer-python",)
    install = "pip install --no-deps flashinfer-python apache-tvm-ffi"

    def __init__(self, backend: str, cache: str) -> None:
        super().__init__()
        self.backend, self.cache = backend, cache
        self.name = f"flashinfer-{backend}" + ("-bf16" if cache == BF16 else "")
        self.differs = "bf16 cache" if cache == BF16 else None

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return super().refuse(spec, device) or needs(spec)

    def prepare(self, inputs: Inputs) -> Prepared:
        spec, device = inputs.workload.spec, inputs.q.device
        rank, batch = spec.kv_lora_rank, inputs.workload.requests
        cache = cache_of(inputs, self.cache)
        ckv, kpe = cache[..., :rank], cache[..., rank:]
        q = inputs.q.flatten(0, 1)
        num_pages = torch.tensor(pages_of(inputs.workload), dtype=torch.int32)
        kv_indptr = torch.zeros(batch + 1, dtype=torch.int32)
        kv_indptr[1:] = num_pages.cumsum(0)
        lengths = torch.tensor(inputs.workload.lengths, dtype=torch.int32)
        q_indptr = torch.arange(batch + 1, dtype=torch.int32) * spec.seqlen_q
        indices = [
            torch.cat([table[b, :n] for b, n in enumerate(num_pages.tolist())])
            for table in inputs.page_tables
        ]
        # A plan holds the page indices, so each region has a wrapper. They run one after another, so that one
        # workspace for their partial results is enough.
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrappers = [
            self.library.mla.BatchMLAPagedAttentionWrapper(workspace, backend=self.backend)
            for _ in indices
        ]
        scales = {}
        if cache.dtype != torch.bfloat16 and inputs.k_scale is not None:
            scale = float(
                inputs.k_scale
            )  # numbers on the host: a tensor would be read back in every call
            scales = {"ckv_scale": scale, "kpe_scale": scale}

        def plan_region(region: int) -> None:
            wrappers[region].plan(
                q_indptr, kv_indptr, indices[region], lengths, spec.num_heads, rank,
                spec.qk_rope_head_dim, spec.page_size, True, inputs.softmax_scale, torch.bfloat16,
                cache.dtype,
            )  # fmt: skip

        def call(region: int) -> torch.Tensor:
            return wrappers[region].run(q[..., :rank], q[..., rank:], ckv, kpe, **scales)

        for region in range(inputs.regions):
            plan_region(region)
        return returning(call, inputs, lambda: plan_region(0), plan_on_host=True)
