"""FlashMLA's dense decode, from SGLang's or tokenspeed's build of it. Both install a module `flash_mla`."""

from __future__ import annotations

import torch

from streamla.bench.candidates import Prepared
from streamla.bench.inputs import Inputs
from streamla.bench.peers.base import BF16, Peer, cache_of, needs, returning
from streamla.spec import KVFormat, MLASpec


class _SGLang(Peer):
    modules = ("flash_mla",)
    distributions = ("sgl-flash-mla",)
    install = "pip install --no-deps sgl-flash-mla"

    def why_unusable(self) -> str | None:
        if not hasattr(self.library, "get_mla_decoding_metadata"):
            return "another build of flash_mla is installed"
        return None

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return super().refuse(spec, device) or needs(spec, page_size=64)


class FlashMLABF16(_SGLang):
    """bf16 query and cache. The first call plans for those that follow; the same planner is timed alone."""

    name = "flashmla-bf16"
    differs = "bf16 cache"
    cache = BF16

    def prepare(self, inputs: Inputs) -> Prepared:
        spec = inputs.workload.spec
        cache = cache_of(inputs, BF16).unsqueeze(2)
        metadata, _ = self.library.get_mla_metadata()

        def plan() -> None:
            self.library.get_mla_decoding_metadata(
                inputs.cache_seqlens, spec.rows, 1, spec.num_heads, use_legacy=True
            )

        def call(region: int) -> torch.Tensor:
            out, _ = self.library.flash_mla_with_kvcache(
                inputs.q, cache, inputs.page_tables[region], inputs.cache_seqlens, spec.kv_lora_rank,
                metadata, softmax_scale=inputs.softmax_scale, causal=spec.seqlen_q > 1,
                is_fp8_kvcache=False, use_legacy=True,
            )  # fmt: skip
            return out

        return returning(call, inputs, plan)


class FlashMLAQuantised(_SGLang):
    """The query is rounded to fp8 in every call, and that launch is part of the time."""

    name = "flashmla-a8w8"
    exact = False
    differs = "fp8 query"
    error_budget = 8e-2  # 3.7e-2 was measured on normal data

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return super().refuse(spec, device) or needs(spec, formats=(KVFormat.FP8_E4M3FN,))

    def prepare(self, inputs: Inputs) -> Prepared:
        spec = inputs.workload.spec
        cache = inputs.kv_cache.unsqueeze(2)
        one = torch.ones(1, device=inputs.q.device)
        metadata, _ = self.library.get_mla_metadata()

        def plan() -> None:
            metadata.tile_scheduler_metadata, metadata.num_splits = (
                self.library.get_mla_decoding_metadata(
                    inputs.cache_seqlens, spec.rows, 1, is_fp8_kvcache=True, use_legacy=True
                )
            )

        def call(region: int) -> torch.Tensor:
            out, _ = self.library.flash_mla_with_kvcache(
                inputs.q.to(torch.float8_e4m3fn), cache, inputs.page_tables[region],
                inputs.cache_seqlens, spec.kv_lora_rank, metadata,
                softmax_scale=inputs.softmax_scale, causal=spec.seqlen_q > 1,
                is_fp8_kvcache=True, use_legacy=True, descale_q=one, descale_k=inputs.k_scale,
            )  # fmt: skip
            return out

        plan()
        return returning(call, inputs, plan)


class TokenspeedFlashMLA(Peer):
    """bf16 query and cache. It plans inside the first call, so that its plan has no time of its own."""

    name = "flashmla-tokenspeed"
    modules = ("flash_mla",)
    distributions = ("tokenspeed-flashmla",)
    install = "pip install --no-deps tokenspeed-flashmla"
    differs = "bf16 cache"
    cache = BF16

    def why_unusable(self) -> str | None:
        if hasattr(self.library, "get_mla_decoding_metadata"):
            return "another build of flash_mla is installed"
        return None

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return super().refuse(spec, device) or needs(spec, page_size=64)

    def prepare(self, inputs: Inputs) -> Prepared:
        spec = inputs.workload.spec
        cache = cache_of(inputs, BF16).unsqueeze(2)
        metadata, _ = self.library.get_mla_metadata()

        def call(region: int) -> torch.Tensor:
            out, _ = self.library.flash_mla_with_kvcache(
                inputs.q, cache, inputs.page_tables[region], inputs.cache_seqlens, spec.kv_lora_rank,
                metadata, softmax_scale=inputs.softmax_scale, causal=spec.seqlen_q > 1,
            )  # fmt: skip
            return out

        return returning(call, inputs)
