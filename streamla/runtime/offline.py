"""Compile every kernel of the package for a target, without a GPU.

A kernel module that has something to compile defines

    def offline_variants(target: str) -> list[Variant]

for each target name in TARGETS: the variants that its launcher would compile there, enough of them to
meet every branch of the source. Modules are found by walking `streamla.kernels`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamla.runtime.facts import KernelFacts, facts_of_amdgcn, facts_of_cubin
from streamla.runtime.nvrtc import compile_cuda

TARGETS = ("sm_90a", "gfx942")


@dataclass(frozen=True)
class TritonVariant:
    """One compilation of a Triton kernel.

    Attributes:
        name: unique in the package: implementation/kernel/what is special.
        fn: the `triton.jit` function.
        signature: type of each run-time argument ("*bf16", "i32", a tuple for a tuple), as
            triton.compiler.ASTSource takes it. A launch also compiles for what it sees of the
            values; here a suffix says it: ":16" is a multiple of 16, ":1" is the value 1.
        constexprs: value of each constexpr argument.
        num_warps, num_stages: launch options.
        options: further options of the backend.
    """

    name: str
    fn: Any
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CudaVariant:
    """One compilation of a .cu file of the package.

    Attributes:
        name: unique in the package: implementation/kernel/what is special.
        source, defines, options: as `compile_cuda` takes them.
        kernel: the `extern "C"` entry.
        threads: threads a program.
        shared_bytes: dynamic shared memory a program.
    """

    name: str
    source: Path
    kernel: str
    threads: int
    shared_bytes: int = 0
    defines: Mapping[str, str | int] = field(default_factory=dict)
    options: tuple[str, ...] = ()


Variant = TritonVariant | CudaVariant


def find_variants(target: str, pattern: str | None = None) -> list[Variant]:
    """Every variant of the package for `target` whose name contains `pattern`."""
    if target not in TARGETS:
        raise ValueError(f"target: need one of {', '.join(TARGETS)}; got {target!r}")
    return [
        variant
        for module in _kernel_modules()
        for variant in module.offline_variants(target)
        if pattern is None or pattern in variant.name
    ]


def compile_variant(variant: Variant, target: str) -> KernelFacts:
    """Compile one variant and read its facts."""
    if isinstance(variant, TritonVariant):
        return _compile_triton(variant, target)
    cubin = compile_cuda(
        variant.source, defines=variant.defines, target=target, options=variant.options
    )
    return facts_of_cubin(
        cubin,
        variant=variant.name,
        kernel=variant.kernel,
        threads=variant.threads,
        dynamic_shared_bytes=variant.shared_bytes,
    )


def compile_report(target: str, pattern: str | None = None) -> list[KernelFacts]:
    """Facts of every variant for `target` whose name contains `pattern`."""
    return [compile_variant(variant, target) for variant in find_variants(target, pattern)]


def _kernel_modules() -> Iterator[Any]:
    import streamla.kernels as kernels

    for info in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        module = importlib.import_module(info.name)
        if hasattr(module, "offline_variants"):
            yield module


def _compile_triton(variant: TritonVariant, target: str) -> KernelFacts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(variant.fn, triton.runtime.JITFunction):
        raise RuntimeError(
            f"{variant.name}: imported under Triton's interpreter (TRITON_INTERPRET=1), which does "
            f"not compile; compile in a process without it"
        )
    source = ASTSource(variant.fn, *_specialised(variant))
    is_nvidia = target == "sm_90a"
    triton_target = GPUTarget("cuda", 90, 32) if is_nvidia else GPUTarget("hip", target, 64)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=triton_target, options=options | dict(variant.options))
    common = {
        "variant": variant.name,
        "kernel": compiled.metadata.name,
        "threads": variant.num_warps * triton_target.warp_size,
        # Triton asks for all its shared memory at launch.
        "dynamic_shared_bytes": compiled.metadata.shared,
    }
    if is_nvidia:
        return facts_of_cubin(compiled.asm["cubin"], **common)
    return facts_of_amdgcn(compiled.asm["amdgcn"], **common)


ArgPath = tuple[int, ...]


def _specialised(
    variant: TritonVariant,
) -> tuple[dict[str, Any], dict[ArgPath, Any], dict[ArgPath, list[Any]]]:
    """Signature, constants and attributes as ASTSource takes them. A path is the index of an argument,
    followed by the index in its tuple."""
    signature: dict[str, Any] = {}
    constants: dict[ArgPath, Any] = {}
    attrs: dict[ArgPath, list[Any]] = {}

    def specialise(kind: Any, path: ArgPath) -> Any:
        if isinstance(kind, tuple):
            return tuple(specialise(k, (*path, i)) for i, k in enumerate(kind))
        kind, _, seen = kind.partition(":")
        if seen == "1":
            constants[path] = 1
            return "constexpr"
        if seen:
            attrs[path] = [["tt.divisibility", int(seen)]]
        return kind

    names = variant.fn.arg_names
    given = [*variant.signature, *variant.constexprs]
    if sorted(given) != sorted(names):
        raise ValueError(f"{variant.name}: the kernel takes {names}; the variant gives {given}")
    for i, name in enumerate(names):
        if name in variant.constexprs:
            constants[(i,)] = variant.constexprs[name]
            signature[name] = "constexpr"
        else:
            signature[name] = specialise(variant.signature[name], (i,))
    return signature, constants, attrs
