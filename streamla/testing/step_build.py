"""A decode step whose new tokens have yet to be written: their rows, their places, and poison where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from streamla import api
from streamla.plan import DecodePlan
from streamla.testing.build import Inputs, build, poison_row
from streamla.testing.case import Case
from streamla.testing.epilogue_build import draw, draw_table

NUM_POSITIONS = 4096


@dataclass(frozen=True)
class StepCase(Case):
    """A batch, and what becomes of its new tokens.

    Attributes:
        rope, reserved_slot: as in the public call.
        slots: which tokens have a slot: "all", "some", "none", or "short", a mapping that ends early. A token of an
            empty request has one of a page that nobody reads.
        values: of the new tokens, as in `EpilogueCase`.
        places: positions are the tokens' places in their requests, as in a model; else random.
        gap: elements between the parts of a new row's projection: 8 keeps rows aligned to 16 bytes, 1 does not.
    """

    rope: str | None = "interleaved"
    slots: str = "all"
    values: str = "normal"
    reserved_slot: int | None = None
    places: bool = False
    gap: int = 8


@dataclass
class StepInputs:
    """What the public call takes. `held` has the cache, the lengths and the page table."""

    case: StepCase
    held: Inputs
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None
    cos_sin: torch.Tensor | None

    @property
    def read(self) -> dict[str, torch.Tensor]:
        """What may not be written, and may change between replays of a graph."""
        names = ("q_nope", "q_pe", "kv_c", "k_pe", "slot_mapping", "positions", "cos_sin")
        tensors = {name: getattr(self, name) for name in names}
        tensors |= {"page_table": self.held.page_table, "cache_seqlens": self.held.cache_seqlens}
        return {name: t for name, t in tensors.items() if t is not None}

    @property
    def rotation(self) -> dict[str, Any]:
        """Keyword arguments that epilogue and decode_step share."""
        return {
            "positions": self.positions,
            "cos_sin": self.cos_sin,
            "rope": self.case.rope,
            "k_scale": self.held.k_scale,
            "reserved_slot": self.case.reserved_slot,
        }

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that decode and decode_step share, without outputs."""
        return {
            "softmax_scale": self.held.softmax_scale,
            "causal": self.case.causal,
            "lse_base": self.case.lse_base,
        }

    def step(self, plan: DecodePlan, **outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result = api.decode_step(
            self.q_nope, self.q_pe, self.kv_c, self.k_pe, self.held.kv_cache, self.slot_mapping,
            self.held.page_table, plan, **self.rotation, **self.options, **outputs, return_lse=True,
        )  # fmt: skip
        assert isinstance(result, tuple)
        return result

    def two_calls(self, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by the public calls that it must equal."""
        spec = self.held.spec
        q = api.epilogue(
            self.q_nope, self.q_pe, self.kv_c, self.k_pe, self.held.kv_cache, self.slot_mapping, spec,
            **self.rotation, impl=plan.impl,
        )  # fmt: skip
        result = api.decode(
            q.unflatten(0, (plan.batch, spec.seqlen_q)), self.held.kv_cache, self.held.page_table, plan,
            k_scale=self.held.k_scale, **self.options, return_lse=True,
        )  # fmt: skip
        assert isinstance(result, tuple)
        return result


def build_step(
    case: StepCase, device: torch.device, seed: int, poison: str | None = "nan"
) -> StepInputs:
    """Inputs of `case`: those of decode, with poison where the new rows will be."""
    held = build(case, device, seed, poison=poison)
    spec, tokens = held.spec, len(case.lengths) * case.seqlen_q
    generator = torch.Generator(device).manual_seed(seed + 3)
    projection = draw(case.values, (tokens, spec.head_dim + 3 * case.gap), generator)
    k_pe = spec.kv_lora_rank + case.gap
    positions = cos_sin = None
    if case.rope is not None:
        positions = torch.randint(NUM_POSITIONS, (tokens,), generator=generator, device=device)
        if case.places:
            place = held.cache_seqlens.long()[:, None] - spec.seqlen_q
            place = place + torch.arange(spec.seqlen_q, device=device)
            positions = place.clamp(0, NUM_POSITIONS - 1).flatten()
        cos_sin = draw_table(NUM_POSITIONS, spec.qk_rope_head_dim, generator)
    slots = _slots(case, held)
    written = slots[
        (slots >= 0) & (slots != (-1 if case.reserved_slot is None else case.reserved_slot))
    ]
    if poison is not None and len(written):
        at = (written // spec.page_size, written % spec.page_size)
        held.kv_cache.view(torch.uint8)[at] = poison_row(spec, poison, device)
    nope, pe = held.q_halves
    return StepInputs(
        case=case,
        held=held,
        q_nope=nope.flatten(0, 1),
        q_pe=pe.flatten(0, 1),
        kv_c=projection[:, : spec.kv_lora_rank],
        k_pe=projection[:, k_pe : k_pe + spec.qk_rope_head_dim],
        slot_mapping=slots,
        positions=positions,
        cos_sin=cos_sin,
    )


def _slots(case: StepCase, held: Inputs) -> torch.Tensor:
    """The places of the last seqlen_q tokens of each request, less those that have none."""
    page_size, device = case.page_size, held.q.device
    table, used = held.page_table.tolist(), set()
    for b, seqlen in enumerate(case.lengths):
        used |= set(table[b][: -(-seqlen // page_size)])
    free = [page for page in range(len(held.kv_cache)) if page not in used]
    free_slots = [page * page_size + i for page in free for i in range(page_size)]
    slots = []
    for b, seqlen in enumerate(case.lengths):
        for token in range(seqlen - case.seqlen_q, seqlen):
            if token >= 0:
                slots.append(table[b][token // page_size] * page_size + token % page_size)
            else:
                slots.append(free_slots.pop() if free_slots else -1)
    if case.slots == "short":
        slots = slots[: 2 * len(slots) // 3]
    skipped = {"none": range(len(slots)), "some": range(1, len(slots), 3)}.get(case.slots, ())
    for i in skipped:
        slots[i] = (-1, -7, -(2**40))[i % 3]
    return torch.tensor(slots, dtype=torch.int64, device=device)
