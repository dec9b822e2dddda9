"""MLASpec and KVFormat: the frozen facts that code generation may depend on, and nothing else."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

DS_MLA_GROUP = 128  # latents that share one scale in an fp8_ds_mla row
MAX_HEADS = 128


class KVFormat(enum.Enum):
    """How one cached token is stored. The value is the name used in the API, the CLI and in results.

    BF16: latent and rope as bfloat16.
    FP8_E4M3FN / FP8_E4M3FNUZ: latent and rope as fp8 (the OCP flavour of NVIDIA; the flavour of
        gfx942), one fp32 scale for the whole cache, real = stored * scale.
    FP8_DS_MLA: 512 e4m3fn latents, four fp32 scales (one for each 128 latents), 64 bf16 rope values,
        in 656 bytes. The scales live in the row; there is none for the cache.
    """

    BF16 = "bf16"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"
    FP8_DS_MLA = "fp8_ds_mla"

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the cache tensor. fp8 caches are also taken as uint8 views."""
        return _STORAGE_DTYPE[self]

    @property
    def has_scale(self) -> bool:
        """Whether a cache of this format comes with one fp32 scale."""
        return self in (KVFormat.FP8_E4M3FN, KVFormat.FP8_E4M3FNUZ)


_STORAGE_DTYPE = {
    KVFormat.BF16: torch.bfloat16,
    KVFormat.FP8_E4M3FN: torch.float8_e4m3fn,
    KVFormat.FP8_E4M3FNUZ: torch.float8_e4m3fnuz,
    KVFormat.FP8_DS_MLA: torch.uint8,
}


@dataclass(frozen=True)
class MLASpec:
    """Everything a compiled kernel may depend on. What changes per step (batch, lengths, strides,
    scales) is a run-time argument.

    Args:
        num_heads: query heads on this rank, 1 to 128.
        kv_format: a KVFormat or its name.
        page_size: tokens a page, any >= 1.
        seqlen_q: query tokens a request, >= 1; they are the last seqlen_q tokens of the request.
        kv_lora_rank: width of the latent, which is also the value: a power of two >= 16.
        qk_rope_head_dim: width of the rope part: a power of two >= 16.
    """

    num_heads: int
    kv_format: KVFormat = KVFormat.BF16
    page_size: int = 64
    seqlen_q: int = 1
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64

    if TYPE_CHECKING:  # a name is taken for the format, and is a KVFormat from then on

        def __init__(
            self,
            num_heads: int,
            kv_format: KVFormat | str = ...,
            page_size: int = ...,
            seqlen_q: int = ...,
            kv_lora_rank: int = ...,
            qk_rope_head_dim: int = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kv_format", KVFormat(self.kv_format))
        except ValueError:
            names = ", ".join(f.value for f in KVFormat)
            raise ValueError(f"kv_format: need one of {names}; got {self.kv_format!r}") from None
        for name in ("num_heads", "page_size", "seqlen_q", "kv_lora_rank", "qk_rope_head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: need an int >= 1; got {value!r}")
        if self.num_heads > MAX_HEADS:
            raise ValueError(f"num_heads: need 1 to {MAX_HEADS}; got {self.num_heads}")
        for name in ("kv_lora_rank", "qk_rope_head_dim"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}: need a power of two >= 16; got {value}")
        if self.kv_format is KVFormat.FP8_DS_MLA and self.kv_lora_rank % DS_MLA_GROUP:
            raise ValueError(
                f"kv_lora_rank: fp8_ds_mla rows need a multiple of {DS_MLA_GROUP}; "
                f"got {self.kv_lora_rank}"
            )

    @property
    def head_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rows(self) -> int:
        """Query rows a request: every one of them meets every cached token."""
        return self.num_heads * self.seqlen_q

    @property
    def row_width(self) -> int:
        """Width of the last dimension of the cache tensor, in elements of the storage dtype."""
        if self.kv_format is KVFormat.FP8_DS_MLA:
            return self.row_bytes
        return self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one cached token: what decode must read."""
        if self.kv_format is KVFormat.BF16:
            return 2 * self.head_dim
        if self.kv_format is KVFormat.FP8_DS_MLA:
            scales = 4 * (self.kv_lora_rank // DS_MLA_GROUP)
            return self.kv_lora_rank + scales + 2 * self.qk_rope_head_dim
        return self.head_dim
