"""vLLM's fused epilogue of Kimi K3: concatenation, quantisation and cache insert in one launch.

Its operators are registered by one extension module of a vLLM wheel, which needs no Python of vLLM's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from streamla.bench.candidates import first_line
from streamla.spec import KVFormat

MODULE = "_C_stable_libtorch"
VLLM_FP8 = (KVFormat.FP8_E4M3FN, KVFormat.FP8_E4M3FN)

# (cache, query) -> operator
OPERATORS = {
    (KVFormat.BF16, KVFormat.BF16): "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert",
    VLLM_FP8: "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert",
    (KVFormat.FP8_DS_MLA, KVFormat.BF16): "fused_kimi_k3_mla_decode_q_concat_ds_mla_insert",
}


def load(path: Path | None) -> str | None:
    """Register the operators, from `path` or from the vLLM that is installed. Why they are not there, or None."""
    if path is None:
        spec = importlib.util.find_spec("vllm")
        folders = spec.submodule_search_locations if spec else None
        found = [f for folder in folders or () for f in Path(folder).glob(f"{MODULE}*.so")]
        if not found:
            return f"no vllm with a {MODULE} is installed, and no path was given"
        path = found[0]
    try:
        torch.ops.load_library(path)
        return None if all(map(_operator, OPERATORS.values())) else "it has no epilogue of Kimi K3"
    except (OSError, RuntimeError, AttributeError) as error:  # for another torch or GPU
        return f"does not load: {first_line(error)}"


def call(
    formats: tuple[KVFormat, KVFormat],
    inputs: tuple[torch.Tensor, ...],
    q_out: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor] | None,
) -> Callable[[], None] | None:
    """One launch, or None where it has no such pair of formats.

    Args:
        formats: of the cache and of the query.
        inputs: q_nope, q_pe, kv_c, k_pe.
        scales: of the query and of the cache; it takes their inverses.
        rope: positions and cos_sin of interleaved pairs.
    """
    if formats not in OPERATORS:
        return None
    operator = _operator(OPERATORS[formats])
    inverses = tuple(1 / s for s in scales) if formats == VLLM_FP8 else ()
    page_size, positions_and_table = kv_cache.shape[1], rope or (None, None)

    def launch() -> None:
        operator(*inputs, q_out, kv_cache, slot_mapping, *inverses, page_size, *positions_and_table)

    return launch


def _operator(name: str) -> Any:
    return getattr(torch.ops._C, name)
