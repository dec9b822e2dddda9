"""One row per GPU: what the planner, the benchmark and the doctor may assume about it.

Numbers are the vendor's unless `source` says measured. The benchmark measures its own read floor and
never reports a fraction of these; they are for predictions without a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arch:
    """A GPU as decode sees it.

    Attributes:
        name: the name used on the command line (`--device h200`).
        target: compiler target: "sm_90a", "gfx942", or "cpu".
        units: SMs or CUs.
        shared_bytes: shared memory (LDS) one program may use, in bytes.
        l2_bytes: last-level cache in bytes.
        read_bytes_per_s: what a read-only kernel reaches, in bytes/s.
        flops_per_s: dense bf16 matrix rate, in FLOP/s.
        source: where the two rates come from.
    """

    name: str
    target: str
    units: int
    shared_bytes: int
    l2_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
    source: str


# fmt: off
ARCHS = (
    Arch("h200",   "sm_90a", 132, 227 << 10,  60 << 20, 4.66e12,  790e12, "measured: read kernel over 2.4 GB; 8192^3 bf16 matmul"),
    Arch("h100",   "sm_90a", 132, 227 << 10,  50 << 20, 3.35e12,  989e12, "datasheet, SXM"),
    Arch("mi300x", "gfx942", 304,  64 << 10, 256 << 20, 5.3e12,  1307e12, "datasheet"),
    Arch("mi325x", "gfx942", 304,  64 << 10, 256 << 20, 6.0e12,  1307e12, "datasheet"),
)
# fmt: on

# The CPU runs the reference; 8 programs make plans that split, so that CPU tests meet every path.
CPU = Arch("cpu", "cpu", 8, 0, 0, 0.0, 0.0, "no rate: a CPU is not measured against a roof")


def arch_by_name(name: str) -> Arch:
    """The row called `name`; ValueError names the rows there are."""
    for arch in (*ARCHS, CPU):
        if arch.name == name.lower():
            return arch
    known = ", ".join(a.name for a in (*ARCHS, CPU))
    raise ValueError(f"device: need one of {known}; got {name!r}")


def arch_of(device: torch.device) -> Arch:
    """The row of a device present here. An unknown GPU gets its own facts and no rates."""
    return CPU if device.type != "cuda" else _arch_of_gpu(device.index)


@functools.cache
def _arch_of_gpu(index: int | None) -> Arch:
    import torch  # here, so that the doctor can read the table above without it

    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        target = p.gcnArchName.split(":")[0]
    else:
        target = f"sm_{p.major}{p.minor}" + ("a" if p.major >= 9 else "")
    for arch in ARCHS:
        if arch.target == target and arch.name in p.name.lower():
            return arch
    return Arch(
        p.name, target, p.multi_processor_count,
        getattr(p, "shared_memory_per_block_optin", 48 << 10), p.L2_cache_size,
        0.0, 0.0, "unknown GPU: no rate",
    )  # fmt: skip
