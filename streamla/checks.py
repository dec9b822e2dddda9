"""Validation at the public boundary: the argument, what it needs and what came, before any launch.

Nothing here reads device memory, so nothing synchronises: values (lengths, page ids) are checked where
they are on the host, and on a GPU only with STREAMLA_DEBUG=1.
"""

from __future__ import annotations

import math
import os

import torch

from streamla.plan import CostModel, DecodePlan, workspace_bytes
from streamla.spec import KVFormat, MLASpec

WORKSPACE_LIMIT = 4 << 30
LSE_SCALE = {"e": 1.0, "2": math.log2(math.e)}


def check_tensor(
    name: str,
    t: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    last_contiguous: bool = True,
) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: need a tensor; got {type(t).__name__}")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if t.dtype not in dtypes:
        raise TypeError(f"{name}: need {' or '.join(map(str, dtypes))}; got {t.dtype}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: need shape {shape}; got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name}: need a tensor on {device}; got {t.device}")
    if last_contiguous and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name}: need a contiguous last dimension; got strides {t.stride()}")


def check_written(name: str, t: torch.Tensor) -> None:
    """An output must not hold two elements in one place."""
    if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
        raise ValueError(
            f"{name}: need every element in memory of its own; got strides {t.stride()}"
        )


def check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: need an int >= {least}; got {value!r}")


def check_workspace(
    batch: int, spec: MLASpec, cost: CostModel, max_seqlen: int | None, batch_invariant: bool
) -> None:
    """Only batch-invariant plans can ask for much: the others' slots are bounded by the programs."""
    needed = workspace_bytes(batch, spec, cost, batch_invariant, max_seqlen)
    if needed > WORKSPACE_LIMIT:
        raise ValueError(
            f"batch_invariant: need partial slots of at most {WORKSPACE_LIMIT >> 30} GiB; {batch} requests "
            f"of {spec.rows} query rows ask for {needed / 2**30:.1f} GiB: give a smaller max_seqlen or batch"
        )


def check_plan(plan: DecodePlan) -> None:
    if not isinstance(plan, DecodePlan):
        raise TypeError(f"plan: need a DecodePlan from streamla.plan; got {type(plan).__name__}")


def check_reused(
    out: DecodePlan,
    spec: MLASpec,
    batch: int,
    device: torch.device,
    max_seqlen: int | None,
    batch_invariant: bool,
    impl: str,
) -> None:
    if not isinstance(out, DecodePlan):
        raise TypeError(f"out: need a DecodePlan; got {type(out).__name__}")
    for name, need, got in (
        ("spec", spec, out.spec),
        ("batch", batch, out.batch),
        ("device", device, out.device),
        ("max_seqlen", max_seqlen, out.max_seqlen),
        ("batch_invariant", batch_invariant, out.batch_invariant),
        ("impl", out.impl if impl == "auto" else impl, out.impl),
    ):
        if need != got:
            raise ValueError(f"out: need a plan with {name} {need}; got {got}")


def check_lengths(cache_seqlens: torch.Tensor, max_seqlen: int | None) -> None:
    if not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(f"cache_seqlens: need a tensor; got {type(cache_seqlens).__name__}")
    if cache_seqlens.dtype is not torch.int32:
        raise TypeError(f"cache_seqlens: need torch.int32; got {cache_seqlens.dtype}")
    if cache_seqlens.dim() != 1 or not cache_seqlens.is_contiguous():
        raise ValueError(
            "cache_seqlens: need a contiguous (batch,) tensor; "
            f"got shape {tuple(cache_seqlens.shape)}, strides {cache_seqlens.stride()}"
        )
    if max_seqlen is not None:
        check_int("max_seqlen", max_seqlen, 0)
    if cache_seqlens.numel() and values_are_checked(cache_seqlens.device):
        least, most = int(cache_seqlens.min()), int(cache_seqlens.max())
        if least < 0:
            raise ValueError(f"cache_seqlens: need lengths >= 0; got {least}")
        if max_seqlen is not None and most > max_seqlen:
            raise ValueError(f"cache_seqlens: need lengths <= max_seqlen {max_seqlen}; got {most}")


def values_are_checked(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        return False
    if device.type == "cpu":
        return True
    debug = os.environ.get("STREAMLA_DEBUG") == "1"
    return debug and not torch.cuda.is_current_stream_capturing()


def split_query(
    q: torch.Tensor, q_pe: torch.Tensor | None, plan: DecodePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the rope part of a query that comes whole or in two halves."""
    spec = plan.spec
    rows = (plan.batch, spec.seqlen_q, spec.num_heads)
    width = spec.head_dim if q_pe is None else spec.kv_lora_rank
    check_tensor("q", q, (*rows, width), torch.bfloat16, plan.device)
    if q_pe is None:
        return q[..., : spec.kv_lora_rank], q[..., spec.kv_lora_rank :]
    check_tensor("q_pe", q_pe, (*rows, spec.qk_rope_head_dim), torch.bfloat16, plan.device)
    return q, q_pe


def check_cache(kv_cache: torch.Tensor, spec: MLASpec, device: torch.device) -> None:
    if not isinstance(kv_cache, torch.Tensor):
        raise TypeError(f"kv_cache: need a tensor; got {type(kv_cache).__name__}")
    dtypes = {spec.kv_format.storage_dtype}
    if spec.kv_format is not KVFormat.BF16:
        dtypes.add(torch.uint8)
    pages = kv_cache.shape[0] if kv_cache.dim() else 0
    shape = (pages, spec.page_size, spec.row_width)
    check_tensor("kv_cache", kv_cache, shape, tuple(sorted(dtypes, key=str)), device)
    page, token = kv_cache.stride(0), kv_cache.stride(1)
    if spec.page_size > 1 and token < spec.row_width:
        raise ValueError(f"kv_cache: need a token stride >= {spec.row_width}; got {token}")
    if pages > 1 and page < 0:
        raise ValueError(f"kv_cache: need a page stride >= 0; got {page}")
    if spec.kv_format is KVFormat.FP8_DS_MLA and not torch.compiler.is_compiling():
        offset = kv_cache.storage_offset()
        if page % 4 or token % 4 or offset % 4:
            raise ValueError(
                "kv_cache: fp8_ds_mla rows hold fp32 scales and need strides and an offset that are "
                f"multiples of 4 bytes; got strides {kv_cache.stride()}, offset {offset}"
            )


def check_page_table(page_table: torch.Tensor, kv_cache: torch.Tensor, plan: DecodePlan) -> None:
    if not isinstance(page_table, torch.Tensor):
        raise TypeError(f"page_table: need a tensor; got {type(page_table).__name__}")
    width = page_table.shape[-1] if page_table.dim() == 2 else -1
    if width < 0:
        raise ValueError(f"page_table: need shape (batch, width); got {tuple(page_table.shape)}")
    check_tensor("page_table", page_table, (plan.batch, width), torch.int32, plan.device)
    page_size = plan.spec.page_size
    if plan.max_seqlen is not None and width * page_size < plan.max_seqlen:
        raise ValueError(
            f"page_table: need {-(-plan.max_seqlen // page_size)} columns for the plan's max_seqlen "
            f"{plan.max_seqlen} at page size {page_size}; got {width}"
        )
    if values_are_checked(plan.device):
        check_pages(page_table, kv_cache.shape[0], plan)


def check_pages(page_table: torch.Tensor, num_pages: int, plan: DecodePlan) -> None:
    """Every page that the plan's items read exists. Reads the plan, so it waits for the device."""
    page_size, width = plan.spec.page_size, page_table.shape[1]
    items = plan.work[: int(plan.work_indptr[-1])].tolist()
    longest: dict[int, int] = {}
    for request, _, _, seqlen, *_ in items:
        longest[request] = seqlen
    for request, seqlen in longest.items():
        needed = -(-seqlen // page_size)
        if needed > width:
            raise ValueError(
                f"page_table: need {needed} columns for request {request} of {seqlen} tokens at page "
                f"size {page_size}; got {width}"
            )
        ids = page_table[request, :needed]
        if needed and (int(ids.min()) < 0 or int(ids.max()) >= num_pages):
            raise ValueError(
                f"page_table: need page ids in [0, {num_pages}) in the first {needed} columns of "
                f"request {request}; got {int(ids.min())} to {int(ids.max())}"
            )


def check_one_scale(
    name: str, scale: torch.Tensor | None, fmt: KVFormat, holder: str, device: torch.device
) -> None:
    """None, or one float32 on the device if what is stored in `fmt` has a scale."""
    if scale is None:
        return
    if not fmt.has_scale:
        raise ValueError(f"{name}: a {fmt.value} {holder} has no scale; pass None")
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name}: need a float32 tensor; got {type(scale).__name__}")
    if scale.numel() != 1:
        raise ValueError(f"{name}: need one element; got shape {tuple(scale.shape)}")
    check_tensor(name, scale.reshape(1), (1,), torch.float32, device)


def check_scale(softmax_scale: float) -> float:
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, int | float):
        raise TypeError(f"softmax_scale: need a float; got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: need a finite number; got {softmax_scale}")
    return float(softmax_scale)


def check_lse_base(lse_base: str) -> float:
    """What a natural logarithm is multiplied by to be one in `lse_base`."""
    if lse_base not in LSE_SCALE:
        raise ValueError(f"lse_base: need 'e' or '2'; got {lse_base!r}")
    return LSE_SCALE[lse_base]


def outputs(
    out: torch.Tensor | None, lse: torch.Tensor | None, plan: DecodePlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's output tensors, checked, or new ones."""
    spec, device = plan.spec, plan.device
    rows = (plan.batch, spec.seqlen_q, spec.num_heads)
    shape = (*rows, spec.kv_lora_rank)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    else:
        check_tensor("out", out, shape, torch.bfloat16, device)
        check_written("out", out)
    if lse is None:
        lse = torch.empty(rows, dtype=torch.float32, device=device)
    else:
        check_tensor("lse", lse, rows, torch.float32, device, last_contiguous=False)
        check_written("lse", lse)
    return out, lse
