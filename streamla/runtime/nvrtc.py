"""Compile the package's CUDA C++ to cubins with NVRTC. Needs no GPU, no nvcc and no CUDA headers.

A translation unit sees the .cu and .cuh files of its own folder and nothing else, and it sees them from
memory: the bytes that were compiled are the bytes in the cache key.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from streamla.runtime.cache import cache_key, get_or_build

_STANDARD = "-std=c++17"
# Without it NVRTC also looks in the current directory.
_NO_STRAY_INCLUDES = "--no-source-include"


class CompileError(RuntimeError):
    """A kernel did not compile; the message carries the compiler's log."""


def compile_cuda(
    source: Path,
    *,
    defines: Mapping[str, str | int] | None = None,
    target: str = "sm_90a",
    options: Sequence[str] = (),
) -> bytes:
    """The cubin of a .cu file, from the disk cache or compiled now.

    With STREAMLA_RACECHECK=1 in the environment, kernels are built so that compute-sanitizer's racecheck can follow them.

    Args:
        source: a .cu file. It may include files of its folder by name.
        defines: macros; a bool counts as 0 or 1.
        target: an architecture NVRTC knows.
        options: further NVRTC options, as "-lineinfo".
    """
    files = _folder_sources(source)
    if os.environ.get("STREAMLA_RACECHECK") == "1":
        defines = {**(defines or {}), "STREAMLA_RACECHECK": 1}
    flags = [_STANDARD, _NO_STRAY_INCLUDES, f"--gpu-architecture={target}", *options]
    flags += [
        f"-D{name}={int(value) if isinstance(value, int) else value}"
        for name, value in sorted((defines or {}).items())
    ]
    named = [part for name, text in files.items() for part in (name, text)]
    version = ".".join(map(str, nvrtc_version()))
    key = cache_key(["cubin", version, source.name, str(len(flags)), *flags, *named])
    return get_or_build(key, lambda: _compile(source, files, flags))


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC library found on this machine."""
    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there and the library is not
        raise CompileError(
            f"NVRTC: libnvrtc not found; it comes with torch's CUDA wheels and with the package "
            f"nvidia-cuda-nvrtc ({error})"
        ) from error
    return major, minor


@functools.cache
def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(
            "NVRTC: the package cuda-bindings is missing; it comes with torch's CUDA wheels"
        ) from error
    return nvrtc


def _folder_sources(source: Path) -> dict[str, bytes]:
    """Name -> text of every .cu and .cuh beside `source`, in a fixed order."""
    paths = sorted(p for p in source.parent.iterdir() if p.suffix in (".cu", ".cuh"))
    files = {path.name: path.read_bytes() for path in paths}
    if source.name not in files:
        raise FileNotFoundError(f"source: need a .cu file; there is no {source}")
    return files


def _compile(source: Path, files: dict[str, bytes], flags: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    headers = [name for name in files if name != source.name]
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            files[source.name],
            source.name.encode(),
            len(headers),
            [files[name] for name in headers],
            [name.encode() for name in headers],
        ),
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise CompileError(
                f"{source.name} did not compile ({status.name}) with {' '.join(flags)}\n"
                + log.rstrip(b"\0").decode(errors="replace")
            )
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: ModuleType, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if values else None
