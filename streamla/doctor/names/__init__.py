"""Decode kernel names: `decode(name)` says what a name tells, and what it does not."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from streamla.doctor.names.families import FAMILIES
from streamla.doctor.names.grammar import ATTENTION, read
from streamla.doctor.names.helpers import HELPERS
from streamla.doctor.names.own import OWN
from streamla.doctor.names.text import clean, template_depth

__all__ = ["ATTENTION", "KernelName", "decode", "padding"]


@dataclass(frozen=True)
class KernelName:
    """What a kernel's name says. None means that it does not say.

    Attributes:
        raw, text: as printed, and as read.
        family: naming scheme; None if no grammar owns the name.
        role: attention, merge, plan, epilogue, quantize, ...; "other" if unknown.
        q_dtype, kv_dtype: of the query and of the cache, as the kernel reads them.
        tile_heads, tile_q_rows: heads and query rows that one tile was built for.
        tile_rows: rows of one tile.
        flattened: heads and query rows share the rows of the tile in any mix.
    row_steps: sizes of tile, of which the kernel is compiled for the least that holds the rows.
        tile_kv: cache tokens a step.
        split: whether one request can be cut over programs.
        merge: the kernel that merges the pieces.
        persistent: whether a grid of fixed size takes work from a list.
        mla: whether it is absorbed multi-head latent attention.
        grid_axes: what the axes of the grid count.
        says, unknown: the parts of the name in words; the parts that no grammar explains.
        note: what the name alone cannot say.
        truncated: the profiler cut the name.
    """

    raw: str
    text: str
    family: str | None = None
    role: str = "other"
    q_dtype: str | None = None
    kv_dtype: str | None = None
    tile_heads: int | None = None
    tile_q_rows: int | None = None
    tile_rows: int | None = None
    flattened: bool = False
    row_steps: tuple[int, ...] = ()
    tile_kv: int | None = None
    split: bool | None = None
    merge: str | None = None
    persistent: bool | None = None
    mla: bool | None = None
    grid_axes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    note: str = ""
    truncated: bool = False

    @property
    def is_decode_attention(self) -> bool:
        return self.role == ATTENTION and self.mla is not False

    @property
    def short(self) -> str:
        """The name's last identifier, for tables."""
        text = self.text.replace("(anonymous namespace)::", "")
        head = re.split(r"[<(]", text, maxsplit=1)[0]
        inner = re.search(r"(FlashAttnFwd\w+|Sm100FmhaMla\w+)", self.text)
        return inner.group(1) if inner else head.split("::")[-1] or self.text


def _tile(facts: dict[str, Any]) -> None:
    """Fill in what follows from the parts: rows = heads x query rows."""
    if "wave_rows" in facts:
        facts.setdefault("tile_rows", facts["wave_rows"] * facts["waves"])
    heads = facts.get("gqa_heads", facts.get("qh"))
    # One wave along M: aiter uses these kernels for 32 and 64 heads as well as for more query rows.
    if facts.get("waves") == 1 and heads is not None:
        facts["flattened"] = True
    elif heads is not None:
        facts.setdefault("tile_heads", heads)
    heads, q_rows, rows = (facts.get(k) for k in ("tile_heads", "tile_q_rows", "tile_rows"))
    if heads and q_rows:
        facts["tile_rows"] = heads * q_rows
    elif heads and rows:
        facts["tile_q_rows"] = max(1, rows // heads)
    elif rows and facts.get("packed") is False:
        facts["tile_heads"], facts["tile_q_rows"] = 1, rows
    elif rows:
        facts["tile_heads"], facts["tile_q_rows"], facts["flattened"] = rows, 1, True
    if facts.get("q_dtype"):
        facts.setdefault("kv_dtype", facts["q_dtype"])


@functools.lru_cache(maxsize=65536)
def decode(name: str) -> KernelName:
    """Read a kernel name as any profiler prints it."""
    cleaned = clean(name)
    text = cleaned.text
    for family in (*OWN, *FAMILIES, *HELPERS):
        if not re.search(family.match, text):
            continue
        # An identifier is whole without its template arguments; template arguments are not.
        cut_inside = not family.tokens and (cleaned.mangled or template_depth(text) > 0)
        truncated = cleaned.truncated or cut_inside
        reading = read(family, text, truncated)
        facts: dict[str, Any] = reading.facts
        _tile(facts)
        fields = {k: v for k, v in facts.items() if k in KernelName.__dataclass_fields__}
        fields.setdefault("role", family.role)
        return KernelName(
            name, text, family.name, says=tuple(reading.says), unknown=tuple(reading.unknown),
            note=family.note, truncated=truncated, **fields,
        )  # fmt: skip
    return KernelName(name, text, truncated=cleaned.truncated)


def padding(kernel: KernelName, heads: int, q_len: int = 1) -> float | None:
    """Share of the rows of a tile that no query fills, None if the tile is unknown."""
    computed = computed_rows(kernel, heads, q_len)
    return None if computed is None else 1 - heads * q_len / computed


def computed_rows(kernel: KernelName, heads: int, q_len: int = 1) -> int | None:
    """Rows that the tiles of one request compute, None if the tile is unknown."""
    if kernel.row_steps:
        rows = heads * q_len
        tiles = -(-rows // kernel.row_steps[-1])
        return tiles * next(step for step in kernel.row_steps if step * tiles >= rows)
    if not kernel.tile_heads or not kernel.tile_q_rows:
        return None
    if kernel.flattened and kernel.tile_rows:
        return -(-heads * q_len // kernel.tile_rows) * kernel.tile_rows
    groups = -(-heads // kernel.tile_heads)
    windows = -(-q_len // kernel.tile_q_rows)
    return groups * kernel.tile_heads * windows * kernel.tile_q_rows
