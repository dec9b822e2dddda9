"""Decode with the narrow Hopper kernel built from several folders, each checked, in one run beside the read floor.

    git worktree add ../other some-branch
    python benchmarks/variants.py --grid blog streamla/kernels/sm90 ../other/streamla/kernels/sm90

A folder holds attention.cu and its headers. Plans and launches are those of the streamla that is imported, so variants
must take the same arguments and shared memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from streamla.arch import arch_of
from streamla.bench.candidates import Prepared, Streamla
from streamla.bench.inputs import Inputs
from streamla.bench.report import bench_table, summary_lines
from streamla.bench.run import run
from streamla.bench.workloads import make_grid
from streamla.kernels.sm90 import narrow
from streamla.runtime.driver import Kernel
from streamla.spec import MLASpec


class Variant(Streamla):
    """The kernel in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__("sm90")
        self.name = name
        self.source = folder / "attention.cu"
        if not self.source.is_file():
            raise ValueError(f"folders: need attention.cu in each; {folder} has none")
        self.kernel: Kernel | None = None

    def prepare(self, inputs: Inputs) -> Prepared:
        self.use(narrow.Variant.of(inputs.workload.spec))
        prepared = Streamla("sm90").prepare(inputs)
        prepared.call = self.with_own_kernel(prepared.call)
        return prepared

    def refuse(self, spec: MLASpec, device: torch.device) -> str | None:
        return Streamla("sm90").refuse(spec, device)

    def use(self, variant: narrow.Variant) -> None:
        """Compile and load it as `narrow` would its own."""
        narrow.SOURCE = self.source
        narrow.attention_kernel.cache_clear()
        self.kernel = narrow.attention_kernel(variant)
        self.kernel.load()

    def with_own_kernel(self, call: Callable) -> Callable:
        def own(region: int) -> torch.Tensor | None:
            launched, narrow.attention_kernel = narrow.attention_kernel, lambda _: self.kernel
            try:
                return call(region)
            finally:
                narrow.attention_kernel = launched

        return own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "folders", nargs="+", type=Path, help="each with attention.cu and its headers"
    )
    parser.add_argument("--grid", default="blog", help="blog, heads, small, ...: as streamla bench")
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    try:
        variants = [Variant(f"{i}:{folder}", folder) for i, folder in enumerate(options.folders)]
        spec = MLASpec(options.heads, "fp8_e4m3fn")
        workloads = [
            w for w in make_grid(options.grid, spec) if w.spec.rows <= narrow.ROW_STEPS[-1]
        ]
        if not torch.cuda.is_available() or arch_of(torch.device("cuda")).target != "sm_90a":
            raise ValueError("variants: need a Hopper GPU")
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    records, _ = run(
        workloads, lambda _: variants, torch.device("cuda"),
        on_shape=lambda w: console.print(f"measured {w.label}", highlight=False),
    )  # fmt: skip
    console.print(bench_table(records, torch.cuda.get_device_name()))
    for line in summary_lines(records):
        console.print(line)


if __name__ == "__main__":
    main()
