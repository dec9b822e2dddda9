"""What every peer has, and the two forms of the cache that peers read."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from streamla.bench.candidates import Prepared, first_line
from streamla.bench.inputs import Inputs
from streamla.spec import KVFormat, MLASpec

STORED, BF16 = "stored", "bf16"


class Peer:
    """Another library's MLA decode.

    Attributes:
        name: unique among the peers.
        modules: what is imported: the first of these that there is.
        distributions: packages on PyPI that bring it, to ask for the version.
        install: the line that installs it.
        exact: it rounds neither the query nor the cached values further than they come.
        differs: in what its work is not the same, in a few words; None if in nothing.
        cache: "stored" reads the bytes of the workload; "bf16" reads the same values converted ahead of time.
        error_budget: of a peer that is not exact, what |out - oracle| / |oracle| may be.
    """

    name: str
    modules: ClassVar[tuple[str, ...]]
    distributions: ClassVar[tuple[str, ...]]
    install: str
    peer: bool = True
    exact: bool = True
    differs: str | None = None
    cache: str = STORED
    error_budget: float | None = None

    def __init__(self) -> None:
        self.library: Any = None
        self.version = "unknown"

    def load(self) -> str | None:
        """Import the library. Why it cannot be used, or None."""
        reason = "not installed"
        for module in self.modules:
            try:
                self.library = importlib.import_module(module)
                break
            except ModuleNotFoundError as error:
                if error.name and not (module + ".").startswith(error.name + "."):
                    reason = f"needs {error.name}"
            except Exception as error:  # a binary for another torch or GPU fails in its own way
                reason = f"does not load: {first_line(error)}"
        if self.library is None:
            return reason
        self.version = self._version()
        return self.why_unusable()

    def why_unusable(self) -> str | None:
        """For a library that is there in another build than the one meant."""
        return None

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        """Why it cannot take this spec here, or None."""
        if device.type != "cuda":
            return f"{self.name} needs a GPU"
        return None

    def prepare(self, inputs: Inputs) -> Prepared:
        """Allocate, convert and plan; nothing here is timed."""
        raise NotImplementedError

    def _version(self) -> str:
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return str(getattr(self.library, "__version__", "unknown"))


def needs(
    spec: MLASpec,
    *,
    formats: Sequence[KVFormat] = (KVFormat.BF16, KVFormat.FP8_E4M3FN),
    page_size: int | None = None,
    seqlen_q: int | None = None,
) -> str | None:
    """A sentence if `spec` is outside of what is given, else None."""
    if spec.kv_format not in formats:
        return (
            f"needs a cache of {' or '.join(f.value for f in formats)}, not {spec.kv_format.value}"
        )
    if page_size is not None and spec.page_size != page_size:
        return f"needs pages of {page_size}, not {spec.page_size}"
    if seqlen_q is not None and spec.seqlen_q != seqlen_q:
        return f"needs {seqlen_q} query token a request, not {spec.seqlen_q}"
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) != (512, 64):
        return f"needs rows of 512 + 64, not {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
    return None


def cache_of(inputs: Inputs, form: str) -> torch.Tensor:
    """(num_pages, page_size, head_dim): the cache as it is stored, or as bfloat16 of the same values."""
    if form == STORED:
        return inputs.kv_cache
    spec = inputs.workload.spec
    rows = inputs.pool.bf16_rows
    num_pages = inputs.kv_cache.shape[0]
    return rows[: num_pages * spec.page_size].view(num_pages, spec.page_size, spec.head_dim)


def returning(
    function: Callable[[int], torch.Tensor],
    inputs: Inputs,
    plan: Callable[[], None] | None = None,
    plan_on_host: bool = False,
) -> Prepared:
    """A candidate whose call returns its result in a tensor of its own."""
    shape = (*inputs.q.shape[:3], inputs.workload.spec.kv_lora_rank)
    return Prepared(function, inputs.q.new_empty(shape), plan, plan_on_host)
