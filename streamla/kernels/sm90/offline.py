"""The variants of the Hopper kernels that are compiled without a GPU, to read and to check."""

from __future__ import annotations

from streamla.kernels.sm90 import ds_mla, narrow, wide
from streamla.kernels.sm90.merge import SOURCE as MERGE_SOURCE
from streamla.kernels.sm90.merge import defines as merge_defines
from streamla.kernels.sm90.merge import merge_kernel
from streamla.runtime.offline import CudaVariant
from streamla.spec import KVFormat, MLASpec

_FP8 = KVFormat.FP8_E4M3FN
_DS_MLA = KVFormat.FP8_DS_MLA

# Each meets a branch that the others do not.
_NARROW = (
    MLASpec(16, _FP8),
    MLASpec(8, _FP8),
    MLASpec(16, _FP8, page_size=1),  # a bulk copy for every token
    MLASpec(12, _FP8, seqlen_q=2),
    MLASpec(32, _FP8, page_size=16),
)
_GROUP_SCALES = (
    MLASpec(16, _DS_MLA),
    MLASpec(8, _DS_MLA),
    MLASpec(16, _DS_MLA, page_size=1),  # a bulk copy for every token
    MLASpec(4, _DS_MLA, seqlen_q=4, page_size=16),
    MLASpec(24, _DS_MLA),
    MLASpec(32, _DS_MLA),  # two programs side by side
)
_WIDE = (
    MLASpec(64, _FP8),
    MLASpec(96, _FP8),  # two tiles of 48 rows
    MLASpec(16, _FP8, seqlen_q=4, page_size=1),
)


def offline_variants(target: str) -> list[CudaVariant]:
    if target != "sm_90a":
        return []
    narrows = [_narrow(spec) for spec in _NARROW]
    steps = [_narrow(spec, step=True) for spec in _NARROW]
    group_scales = [_group_scales(spec) for spec in _GROUP_SCALES]
    wides = [*(_wide(spec) for spec in _WIDE), _wide(_WIDE[0], bulk_copies=False)]
    return [*narrows, *steps, *group_scales, *wides, _merge(_NARROW[0])]


def _name(kernel: str, spec: MLASpec) -> str:
    return f"sm90/{kernel}/h{spec.num_heads}-q{spec.seqlen_q}-p{spec.page_size}"


def _narrow(spec: MLASpec, step: bool = False) -> CudaVariant:
    variant = narrow.Variant.of(spec, step=step)
    kernel = narrow.attention_kernel(variant)
    return CudaVariant(
        _name("attention-step" if step else "attention", spec), narrow.SOURCE, kernel.name, kernel.threads, kernel.shared_bytes,
        variant.defines,
    )  # fmt: skip


def _group_scales(spec: MLASpec) -> CudaVariant:
    variant = ds_mla.Variant.of(spec)
    kernel = ds_mla.attention_kernel(variant)
    return CudaVariant(
        _name("attention-ds-mla", spec), ds_mla.SOURCE, kernel.name, kernel.threads, kernel.shared_bytes,
        variant.defines,
    )  # fmt: skip


def _wide(spec: MLASpec, bulk_copies: bool = True) -> CudaVariant:
    kernel = wide.attention_kernel(spec, bulk_copies)
    return CudaVariant(
        _name("attention-wide" if bulk_copies else "attention-wide-bytes", spec), wide.SOURCE, kernel.name, kernel.threads, kernel.shared_bytes,
        wide.defines(spec, bulk_copies),
    )  # fmt: skip


def _merge(spec: MLASpec) -> CudaVariant:
    kernel = merge_kernel(spec.num_heads, spec.seqlen_q)
    return CudaVariant(
        f"sm90/merge/h{spec.num_heads}-q{spec.seqlen_q}", MERGE_SOURCE, kernel.name, kernel.threads,
        defines=merge_defines(spec.num_heads, spec.seqlen_q),
    )  # fmt: skip
