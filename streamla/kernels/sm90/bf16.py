"""Hopper attention for up to 32 query rows over a bf16 cache, with or without its merge
(docs/attention-sm90-bf16.md)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from streamla.arch import Arch
from streamla.kernels.sm90.launch import (
    TILE_N,
    attention_params,
    cache_view,
    launch_attention,
)
from streamla.plan import CostModel, DecodePlan
from streamla.runtime.driver import (
    I64,
    PTR,
    TENSOR_MAP,
    TENSOR_MAP_BYTES,
    Kernel,
    encode_tensor_map,
)
from streamla.runtime.nvrtc import compile_cuda
from streamla.runtime.offline import CudaVariant
from streamla.spec import KVFormat, MLASpec

SOURCE = Path(__file__).with_name("attention_bf16.cu")

RUN_N = 8  # tokens of a tensor copy
RUN_BYTES = 9216
BLOCK_DIM = 64
THREADS = 256

# a tensor map of kv_cache, then its address, page stride and token stride
_PARAMS = attention_params(TENSOR_MAP, PTR, I64, I64)


@dataclass(frozen=True)
class Variant:
    """What one cubin is compiled for."""

    num_heads: int
    seqlen_q: int
    page_size: int

    @staticmethod
    def of(spec: MLASpec) -> Variant:
        return Variant(spec.num_heads, spec.seqlen_q, spec.page_size)

    @property
    def copy_engine(self) -> bool:
        """Whether tensor copies load the cache: pages are whole runs."""
        return self.page_size % RUN_N == 0

    @property
    def defines(self) -> dict[str, int]:
        return {
            "STREAMLA_NUM_HEADS": self.num_heads,
            "STREAMLA_SEQLEN_Q": self.seqlen_q,
            "STREAMLA_PAGE_SIZE": self.page_size,
            "STREAMLA_SHARED_BYTES": self.shared_bytes,
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a program: bf16_tile.cuh lays it out and checks this sum."""
        rows = -(-self.num_heads * self.seqlen_q // 8) * 8
        ring = (176 if rows <= 16 else 160) * RUN_BYTES // RUN_N
        query, probabilities = 9 * rows * 128, 2 * TILE_N * rows * 2
        maxima_and_sums, barriers = 2 * rows * 4 * 4, (2 * 3 + 2) * 8
        return ring + query + probabilities + maxima_and_sums + barriers + 1024

    def cubin(self) -> bytes:
        return compile_cuda(SOURCE, defines=self.defines)


def num_row_tiles(spec: MLASpec) -> int:
    return 1


def cost_model(spec: MLASpec, arch: Arch) -> CostModel:
    return CostModel(tile_n=TILE_N, num_programs=arch.units, overhead_tiles=1)


@functools.cache
def attention_kernel(variant: Variant) -> Kernel:
    return Kernel(
        variant.cubin,
        "mla_attention_bf16",
        _PARAMS,
        threads=THREADS,
        shared_bytes=variant.shared_bytes,
        cooperative=True,
        pdl=True,
    )


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    page_table: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    lse_scale: float,
    *,
    merges: bool,
) -> None:
    """Attention, and the merge in the same launch if it `merges`; else partials of split requests are left."""
    variant = Variant.of(plan.spec)
    address, page_stride, token_stride = view = cache_view(kv_cache)
    pages = kv_cache.shape[0]
    tensor_map = bytes(TENSOR_MAP_BYTES)
    if variant.copy_engine and pages:
        tensor_map = _tensor_map(address, pages, variant.page_size, page_stride, token_stride)
    launch_attention(
        attention_kernel(variant), plan.cost.num_programs, q_nope, q_pe, (tensor_map, *view),
        page_table, plan, out, lse, softmax_scale, causal, lse_scale, merges,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)  # the layers of some models
def _tensor_map(
    address: int, pages: int, page_size: int, page_stride: int, token_stride: int
) -> bytes:
    """A cache as tensor copies see it: (64 dimensions, token of the page, block, page); a box is a run."""
    return encode_tensor_map(
        address,
        shape=(BLOCK_DIM, page_size, RUN_BYTES // RUN_N // 2 // BLOCK_DIM, pages),
        strides=(token_stride, 2 * BLOCK_DIM, page_stride if pages > 1 else 2**20),
        box=(BLOCK_DIM, RUN_N, RUN_BYTES // RUN_N // 2 // BLOCK_DIM, 1),
    )


def warmup(spec: MLASpec) -> None:
    """Compile and load the kernels of `spec` on the current device."""
    variant = Variant.of(spec)
    attention_kernel(variant).load()


def offline_variants(target: str) -> list[CudaVariant]:
    """One variant for each number of accumulators and each way of loading."""
    if target != "sm_90a":
        return []
    specs = [
        MLASpec(num_heads, KVFormat.BF16, page_size, seqlen_q)
        for num_heads, seqlen_q, page_size in (
            (16, 1, 64), (8, 1, 64), (24, 1, 64), (32, 1, 64), (4, 4, 64), (16, 1, 1), (16, 1, 12),
        )
    ]  # fmt: skip
    return [
        CudaVariant(
            f"sm90/attention-bf16/h{s.num_heads}-q{s.seqlen_q}-p{s.page_size}", SOURCE,
            "mla_attention_bf16", THREADS, Variant.of(s).shared_bytes,
            Variant.of(s).defines,
        )
        for s in specs
    ]  # fmt: skip
