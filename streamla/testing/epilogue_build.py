"""New tokens for the epilogue, laid out as engines lay them out, with poison in the cache around their rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamla import api
from streamla.spec import KVFormat, MLASpec
from streamla.testing.build import lay_out_query, pool_of
from streamla.testing.canary import Canaries
from streamla.testing.case import Case

NUM_POSITIONS = 4096

# What a conversion may get wrong: both zeros, the largest values of the formats and what lies around
# them, ties, subnormals of fp8 and of bf16, values that vanish, infinities, NaN.
SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 239.0, 240.0, -248.0, 256.0, 447.0, 448.0, -456.0, 464.0, 466.0, 480.0, -1e4,
    3e38, -3e38, 17.0, 19.0, 0.013671875, 2**-6, -(2**-7), 3 * 2**-10, 2**-10, -(2**-10), 2**-11, -(2**-11),
    1e-9, -1e-9, 1e-39, -1e-40, torch.inf, -torch.inf, torch.nan, -torch.nan,
)  # fmt: skip


@dataclass(frozen=True)
class EpilogueCase(Case):
    """New tokens, how they lie in memory, and what becomes of them.

    Attributes:
        rope, q_format, q_scale, reserved_slot: as in the public call.
        slots: which tokens have a slot: "all", "some", "none", or "short", a mapping that ends early.
        values: "normal", "wide" (magnitudes from 2 ** -20 to 2 ** 20) or "special" (`SPECIAL`).
    """

    rope: str | None = "interleaved"
    q_format: str = "bf16"
    q_scale: float = 5.3
    slots: str = "some"
    values: str = "wide"
    reserved_slot: int | None = None


@dataclass
class EpilogueInputs:
    """What the public call takes, and the canaries around what it writes."""

    case: EpilogueCase
    spec: MLASpec
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None
    cos_sin: torch.Tensor | None
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    canaries: Canaries

    @property
    def options(self) -> dict:
        """Keyword arguments that the public call and the oracle share."""
        return {
            "positions": self.positions,
            "cos_sin": self.cos_sin,
            "rope": self.case.rope,
            "q_scale": self.q_scale,
            "k_scale": self.k_scale,
            "q_format": KVFormat(self.case.q_format),
        }

    @property
    def read(self) -> dict[str, torch.Tensor]:
        """What may not be written."""
        names = ("q_nope", "q_pe", "kv_c", "k_pe", "slot_mapping", "positions", "cos_sin")
        tensors = {name: getattr(self, name) for name in names}
        return {name: t for name, t in tensors.items() if t is not None}

    def run(self, impl: str, q_out: torch.Tensor | None = None) -> torch.Tensor:
        return api.epilogue(
            self.q_nope, self.q_pe, self.kv_c, self.k_pe, self.kv_cache, self.slot_mapping, self.spec,
            **self.options, q_out=q_out, reserved_slot=self.case.reserved_slot, impl=impl,
        )  # fmt: skip


def build(
    case: EpilogueCase, device: torch.device, seed: int, poison: str = "nan"
) -> EpilogueInputs:
    """Inputs of `case`. The cache holds poison, which no new row leaves and nothing else changes."""
    spec, tokens = case.spec, case.tokens
    generator = torch.Generator(device).manual_seed(seed)

    q = draw(case.values, (tokens, 1, spec.num_heads, spec.head_dim), generator)
    q_nope, q_pe = lay_out_query(case.query_layout, spec, q)
    if q_pe is None:
        q_nope, q_pe = q_nope[..., : spec.kv_lora_rank], q_nope[..., spec.kv_lora_rank :]
    # The new rows are slices of one wider projection.
    projection = draw(case.values, (tokens, spec.head_dim + 24), generator)
    table = None
    if case.rope is not None:
        table = draw_table(NUM_POSITIONS, spec.qk_rope_head_dim, generator)
    positions = torch.randint(NUM_POSITIONS, (tokens,), generator=generator, device=device)
    pool_pages = case.pool_pages or -(-2 * tokens // spec.page_size) + 1
    fp8_query = case.q_format != "bf16"
    return EpilogueInputs(
        case=case,
        spec=spec,
        q_nope=q_nope[:, 0],
        q_pe=q_pe[:, 0],
        kv_c=projection[:, : spec.kv_lora_rank],
        k_pe=projection[:, spec.kv_lora_rank + 8 : spec.head_dim + 8],
        kv_cache=pool_of(case, spec, pool_pages, poison, device),
        slot_mapping=_slots(case, pool_pages * spec.page_size, generator, device),
        positions=None if case.rope is None else positions,
        cos_sin=table,
        q_scale=torch.tensor([case.q_scale], device=device) if fp8_query else None,
        k_scale=torch.tensor([case.k_scale], device=device) if spec.kv_format.has_scale else None,
        canaries=Canaries(),
    )


def draw(values: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """bfloat16 values of a kind that `EpilogueCase.values` names, on the generator's device."""
    device = generator.device
    drawn = torch.randn(shape, generator=generator, device=device)
    if values == "wide":
        drawn *= 2 ** (40 * torch.rand(shape, generator=generator, device=device) - 20)
    if values == "special":
        pick = torch.randint(len(SPECIAL), shape, generator=generator, device=device)
        drawn = torch.tensor(SPECIAL, device=device)[pick]
    return drawn.bfloat16()


def draw_table(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Cosines and sines of random angles."""
    angle = 100 * torch.rand((rows, width // 2), generator=generator, device=generator.device)
    return torch.cat([angle.cos(), angle.sin()], -1)


def _slots(
    case: EpilogueCase, pool: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Distinct slots of the pool, its first and its last among them."""
    tokens = case.tokens
    slots = torch.randperm(pool, generator=generator, device=device)[:tokens]
    if tokens > 2:
        ends = (0, pool - 1)
        missing = [end for end in ends if not (slots == end).any()]
        places = [i for i in range(tokens // 2, tokens) if int(slots[i]) not in ends]
        for place, end in zip(places, missing, strict=False):
            slots[place] = end
    if case.slots == "short":
        return slots[: 2 * tokens // 3]
    skipped = {"all": [], "none": list(range(tokens)), "some": list(range(1, tokens, 3))}[
        case.slots
    ]
    for i in skipped:
        slots[i] = (-1, -7, -(2**40))[i % 3]
    return slots
