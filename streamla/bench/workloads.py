"""What is measured: named grids of shapes. A shape is a spec and the lengths of its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamla.spec import KVFormat, MLASpec

K = 1024
HEADS = 16  # Kimi-K2 (64 heads) on four GPUs


@dataclass(frozen=True)
class Workload:
    """One shape: a decode step over requests with these many cached tokens."""

    grid: str
    spec: MLASpec
    lengths: tuple[int, ...]

    @property
    def requests(self) -> int:
        return len(self.lengths)

    @property
    def context(self) -> int:
        """Tokens of the longest request."""
        return max(self.lengths, default=0)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """What any kernel must read of the cache."""
        return self.tokens * self.spec.row_bytes

    @property
    def flops(self) -> int:
        """Useful work: every query row meets every cached row, once over 576 and once over 512."""
        spec = self.spec
        return 2 * spec.rows * self.tokens * (spec.head_dim + spec.kv_lora_rank)

    @property
    def label(self) -> str:
        """Short and unique within a grid."""
        even = len(set(self.lengths)) <= 1
        shape = f"{tokens_text(self.context)}{'' if even else ' (longest)'} x {self.requests}"
        return f"{shape}, {self.spec.num_heads} heads, {self.spec.kv_format.value}"


def tokens_text(n: int) -> str:
    """131072 -> "128K"; other numbers as they are."""
    return f"{n // K}K" if n and n % K == 0 else str(n)


def _grid(name: str, spec: MLASpec, contexts, requests) -> list[Workload]:
    return [Workload(name, spec, (n,) * r) for n in contexts for r in requests]


def blog(spec: MLASpec) -> list[Workload]:
    """The 20 shapes of the MI300X study: long contexts, few requests."""
    return _grid("blog", spec, (32 * K, 64 * K, 128 * K, 256 * K), (1, 2, 4, 8, 16))


def small(spec: MLASpec) -> list[Workload]:
    """Short contexts, where launches, the plan and the merge weigh most."""
    return _grid("small", spec, (1 * K, 2 * K, 4 * K, 8 * K, 16 * K), (1, 4, 16, 64))


# One shape that fits a few SMs badly, one in the middle, one that is all streaming.
_PROBES = ((32 * K, 1), (128 * K, 1), (128 * K, 16))


def _probes(name: str, spec: MLASpec) -> list[Workload]:
    return [Workload(name, spec, (n,) * r) for n, r in _PROBES]


def heads(spec: MLASpec) -> list[Workload]:
    """Query heads of one rank: 8 and 16 are Kimi-K2 at TP8 and TP4, 12 and 24 are K3, 128 is DeepSeek at TP1."""
    counts = (8, 12, 16, 24, 32, 64, 128)
    return [w for h in counts for w in _probes("heads", replace(spec, num_heads=h))]


def formats(spec: MLASpec) -> list[Workload]:
    """Every cache format. The times of two formats are not of the same bytes."""
    return [w for f in KVFormat for w in _probes("formats", replace(spec, kv_format=f))]


def pages(spec: MLASpec) -> list[Workload]:
    """Page sizes: 1 and 16 of vLLM and SGLang, 64 of most MLA kernels, 128, and 480 of a hybrid model."""
    sizes = (1, 16, 32, 64, 128, 480)
    return [w for p in sizes for w in _probes("pages", replace(spec, page_size=p))]


def mtp(spec: MLASpec) -> list[Workload]:
    """Query tokens a step, as multi-token prediction verifies them."""
    return [w for q in (1, 2, 3, 4) for w in _probes("mtp", replace(spec, seqlen_q=q))]


GRIDS = {f.__name__: f for f in (blog, heads, formats, pages, mtp, small)}


def make_grid(name: str, spec: MLASpec) -> list[Workload]:
    """The shapes of a named grid for `spec` (the grid's own axis replaces the spec's value)."""
    if name not in GRIDS:
        raise ValueError(f"grid: need one of {', '.join(GRIDS)}; got {name!r}")
    return GRIDS[name](spec)


def scaled_down(workloads: list[Workload], factor: int) -> list[Workload]:
    """The same shapes with contexts divided by `factor`, so that a CPU gets through them."""
    return [replace(w, lengths=tuple(-(-n // factor) for n in w.lengths)) for w in workloads]
