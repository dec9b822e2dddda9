"""The merge in a launch of its own: any cache leaves the same partials."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from streamla.kernels.sm90.launch import rows_aligned, view
from streamla.plan import DecodePlan
from streamla.runtime.driver import F32, I32, I64, PTR, Kernel
from streamla.runtime.nvrtc import compile_cuda
from streamla.spec import MLASpec

SOURCE = Path(__file__).with_name("merge.cu")
THREADS = 512
MAX_BATCH = 65535  # programs along the second axis of a grid

_VIEW = (PTR, I64, I64, I64)
_PARAMS = (PTR, *_VIEW, I32, *_VIEW, PTR, PTR, F32)


def defines(num_heads: int, seqlen_q: int) -> dict[str, int]:
    """Everything the compiled code depends on."""
    return {
        "STREAMLA_NUM_HEADS": num_heads,
        "STREAMLA_SEQLEN_Q": seqlen_q,
        "STREAMLA_ROWS": num_heads * seqlen_q,
    }


@functools.cache
def merge_kernel(num_heads: int, seqlen_q: int) -> Kernel:
    return Kernel(
        lambda: compile_cuda(SOURCE, defines=defines(num_heads, seqlen_q)),
        "mla_merge",
        _PARAMS,
        threads=THREADS,
    )


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, lse_scale: float) -> None:
    """Finish the split requests from their partials.

    Raises:
        ValueError: more requests than a grid has room for.
    """
    if plan.batch > MAX_BATCH:
        raise ValueError(
            f"plan: need at most {MAX_BATCH} requests for merge with impl='sm90'; got {plan.batch}"
        )
    spec = plan.spec
    merge_kernel(spec.num_heads, spec.seqlen_q).launch(
        (spec.rows, plan.batch, 1),
        plan.split_indptr.data_ptr(),
        *view(out), rows_aligned(out), *view(lse),
        plan.out_partial.data_ptr(), plan.lse_partial.data_ptr(), lse_scale,
        device=out.device.index,
    )  # fmt: skip


def warmup(spec: MLASpec) -> None:
    """Compile and load the kernel of `spec` on the current device."""
    merge_kernel(spec.num_heads, spec.seqlen_q).load()
