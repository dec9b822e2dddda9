"""Validation of the epilogue's arguments: as in `checks`, before any launch and without a sync.

Slots and positions are values on the device: they are checked on the CPU, and on a GPU with
STREAMLA_DEBUG=1.
"""

from __future__ import annotations

import torch

from streamla.checks import (
    check_cache,
    check_int,
    check_one_scale,
    check_tensor,
    check_written,
    values_are_checked,
)
from streamla.plan import LENGTH_CLAMPED, DecodePlan
from streamla.spec import KVFormat, MLASpec

ROPES = ("interleaved", "neox")


def check_inputs(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    spec: MLASpec,
    reserved_slot: int | None,
    tokens: int | None = None,
    device: torch.device | None = None,
) -> None:
    """The projections, the cache and the slots fit together, and `tokens` and `device` if given."""
    if not isinstance(q_nope, torch.Tensor):
        raise TypeError(f"q_nope: need a tensor; got {type(q_nope).__name__}")
    if q_nope.dim() != 3:
        raise ValueError(
            f"q_nope: need shape ({'tokens' if tokens is None else tokens}, {spec.num_heads}, "
            f"{spec.kv_lora_rank}); got {tuple(q_nope.shape)}"
        )
    tokens = q_nope.shape[0] if tokens is None else tokens
    device = q_nope.device if device is None else device
    bf16 = torch.bfloat16
    latent, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    check_tensor("q_nope", q_nope, (tokens, spec.num_heads, latent), bf16, device)
    check_tensor("q_pe", q_pe, (tokens, spec.num_heads, rope), bf16, device)
    check_tensor("kv_c", kv_c, (tokens, latent), bf16, device)
    check_tensor("k_pe", k_pe, (tokens, rope), bf16, device)
    check_cache(kv_cache, spec, device)
    check_written("kv_cache", kv_cache)

    if not isinstance(slot_mapping, torch.Tensor):
        raise TypeError(f"slot_mapping: need a tensor; got {type(slot_mapping).__name__}")
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > tokens:
        raise ValueError(
            f"slot_mapping: need one slot for each of the {tokens} tokens, or fewer: tokens past its end "
            f"write no row; got shape {tuple(slot_mapping.shape)}"
        )
    num_slots = slot_mapping.shape[0]
    check_tensor("slot_mapping", slot_mapping, (num_slots,), torch.int64, device)
    if reserved_slot is not None:
        check_int("reserved_slot", reserved_slot, 0)


def check_rope(
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    rope: str | None,
    tokens: int,
    spec: MLASpec,
    device: torch.device,
) -> None:
    """All three of them, or none."""
    given = {"positions": positions, "cos_sin": cos_sin, "rope": rope}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return
    if missing:
        raise ValueError(
            f"{missing[0]}: need positions, cos_sin and rope to rotate, or none of them; "
            f"got no {' and no '.join(missing)}"
        )
    if rope not in ROPES:
        raise ValueError(f"rope: need 'interleaved', 'neox' or None; got {rope!r}")
    check_tensor("positions", positions, (tokens,), torch.int64, device)  # type: ignore[arg-type]
    if not isinstance(cos_sin, torch.Tensor):
        raise TypeError(f"cos_sin: need a tensor; got {type(cos_sin).__name__}")
    rows = cos_sin.shape[0] if cos_sin.dim() else 0
    check_tensor("cos_sin", cos_sin, (rows, spec.qk_rope_head_dim), torch.float32, device)
    if rows == 0:
        raise ValueError("cos_sin: need at least one row")


def check_query(
    q_out: torch.Tensor | None,
    q_format: KVFormat | str,
    q_scale: torch.Tensor | None,
    tokens: int,
    spec: MLASpec,
    device: torch.device,
) -> tuple[torch.Tensor, KVFormat]:
    """The output tensor, given or new, and the format."""
    taken = (KVFormat.BF16, KVFormat.FP8_E4M3FN, KVFormat.FP8_E4M3FNUZ)
    if q_format not in (*taken, *(f.value for f in taken)):
        names = ", ".join(f.value for f in taken)
        raise ValueError(f"q_format: need one of {names}; got {q_format!r}")
    q_format = KVFormat(q_format)
    check_one_scale("q_scale", q_scale, q_format, "query", device)
    dtype = q_format.storage_dtype
    if q_out is None:
        shape = (tokens, spec.num_heads, spec.head_dim)
        return torch.empty(shape, dtype=dtype, device=device), q_format
    if not isinstance(q_out, torch.Tensor):
        raise TypeError(f"q_out: need a tensor; got {type(q_out).__name__}")
    rows = q_out.shape[0] if q_out.dim() else 0
    if rows < tokens:
        raise ValueError(f"q_out: need at least {tokens} rows; got shape {tuple(q_out.shape)}")
    dtypes = (dtype,) if q_format is KVFormat.BF16 else (dtype, torch.uint8)
    check_tensor("q_out", q_out, (rows, spec.num_heads, spec.head_dim), dtypes, device)
    check_written("q_out", q_out)
    return q_out, q_format


def check_values(
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    kv_cache: torch.Tensor,
    spec: MLASpec,
    reserved_slot: int | None,
) -> None:
    """Slots lie in the pool, each is given once, and tokens that write a row have their place in the table.

    Waits for the device, where it checks at all.
    """
    if not slot_mapping.numel() or not values_are_checked(slot_mapping.device):
        return
    pool = kv_cache.shape[0] * spec.page_size
    slots = slot_mapping.cpu()
    writes = _written(slots, reserved_slot)
    used = slots[writes]
    if not used.numel():
        return
    if int(used.max()) >= pool:
        token = int((slots >= pool).nonzero()[0])
        raise ValueError(
            f"slot_mapping: need slots below {pool} ({kv_cache.shape[0]} pages of {spec.page_size}); "
            f"got {int(slots[token])} for token {token}"
        )
    distinct, times = used.unique(return_counts=True)
    if distinct.numel() < used.numel():
        slot = int(distinct[times > 1][0])
        tokens = ((slots == slot) & writes).nonzero()[:, 0].tolist()
        raise ValueError(f"slot_mapping: need every slot once; got {slot} for tokens {tokens}")
    if positions is not None and cos_sin is not None:
        own = positions[: len(slots)].cpu()
        outside = writes & ((own < 0) | (own >= cos_sin.shape[0]))
        if outside.any():
            token = int(outside.nonzero()[0])
            raise ValueError(
                f"positions: need [0, {cos_sin.shape[0]}), the rows of cos_sin, for tokens that write a "
                f"row; got {int(own[token])} for token {token}"
            )


def _written(slots: torch.Tensor, reserved_slot: int | None) -> torch.Tensor:
    writes = slots >= 0
    if reserved_slot is not None:
        writes &= slots != reserved_slot
    return writes


def check_places(
    slot_mapping: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    reserved_slot: int | None,
) -> None:
    """Attention finds each new row where it is written: its slot is its place in the page table.

    Waits for the device, where it checks at all. The page table has been checked.
    """
    if not slot_mapping.numel() or not values_are_checked(slot_mapping.device):
        return
    spec = plan.spec
    slots = slot_mapping.cpu()
    lengths = torch.zeros(plan.batch, dtype=torch.int64)
    for request, _, _, seqlen, *_ in plan.work[: int(plan.work_indptr[-1])].tolist():
        lengths[request] = seqlen
    if int(plan.status) & LENGTH_CLAMPED:  # what was cut off has no place
        lengths[lengths == plan.max_seqlen] = 0
    request = torch.arange(len(slots)) // spec.seqlen_q
    token = lengths[request] - spec.seqlen_q + torch.arange(len(slots)) % spec.seqlen_q
    checked = (_written(slots, reserved_slot) & (token >= 0)).nonzero()[:, 0]
    request, token = request[checked], token[checked]
    pages = page_table.cpu()[request, token // spec.page_size].long()
    places = pages * spec.page_size + token % spec.page_size
    wrong = (places != slots[checked]).nonzero()[:, 0]
    if wrong.numel():
        k = int(wrong[0])
        raise ValueError(
            f"slot_mapping: need the token's place in the page table; got {int(slots[checked[k]])} for token "
            f"{int(checked[k])}, which is token {int(token[k])} of request {int(request[k])}, at "
            f"{int(places[k])}"
        )
