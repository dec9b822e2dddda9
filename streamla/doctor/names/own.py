"""streamla's own kernels: `mla_<stage>`. A kernel is compiled for the rows it serves, so its tile is the
smallest of a few sizes that holds them; the name does not carry it."""

from __future__ import annotations

from streamla.doctor.names.grammar import ATTENTION, Family

_AXES = ("program", "row tile")
_ATTENTION = {"mla": True, "persistent": True, "split": True, "grid_axes": _AXES}
_FP8 = {**_ATTENTION, "q_dtype": "bf16", "kv_dtype": "fp8"}

OWN: tuple[Family, ...] = (
    Family("streamla", "plan", r"^mla_plan(?:_by_length)?_kernel$"),
    Family("streamla", "epilogue", r"^mla_epilogue_kernel$"),
    Family("streamla", "merge", r"^mla_merge(?:_kernel)?$"),
    Family(
        "streamla-portable", ATTENTION, r"^mla_attention_kernel$",
        {**_ATTENTION, "merge": "mla_merge_kernel", "row_steps": (16,)},
        note="tiles of 16 rows, as many as hold the rows",
    ),
    Family(
        "streamla-sm90", ATTENTION, r"^mla_attention$",
        {**_FP8, "merge": "in the same kernel", "row_steps": (8, 16, 24, 32)},
        note="one binary a shape: the tile is the least of 8, 16, 24 and 32 rows that holds the rows",
    ),
    Family(
        "streamla-sm90", ATTENTION, r"^mla_attention_bf16$",
        {
            **_ATTENTION, "q_dtype": "bf16", "kv_dtype": "bf16", "merge": "in the same kernel",
            "row_steps": (8, 16, 24, 32),
        },
        note="one binary a shape: the tile is the least of 8, 16, 24 and 32 rows that holds the rows",
    ),
    Family(
        "streamla-sm90", ATTENTION, r"^mla_attention_ds_mla$",
        {**_FP8, "kv_dtype": "fp8_ds_mla", "merge": "in the same kernel", "row_steps": (8, 16, 24)},
        note="one binary a shape: the tile is the least of 8, 16 and 24 rows that holds the rows",
    ),
    Family(
        "streamla-sm90", ATTENTION, r"^mla_attention_wide$",
        {**_FP8, "merge": "in the same kernel", "row_steps": (48, 64)},
        note="one binary a shape: the tile is the lesser of 48 and 64 rows that holds the rows",
    ),
)  # fmt: skip
