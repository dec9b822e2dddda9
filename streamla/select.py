"""One table of implementations. A refusal is a sentence; nothing falls back silently."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from streamla.arch import Arch
from streamla.spec import MLASpec

AUTO = "auto"


@dataclass(frozen=True)
class Impl:
    """An implementation of plan, epilogue, attention, merge and decode.

    Attributes:
        name: what `impl=` takes.
        module: imported at first use; see `kernels/portable` for the functions it has.
        why_not: None if it serves this spec on this GPU, else the reason as a sentence.
        why_no_epilogue: the same for the epilogue, which is chosen by itself.
        why_two_launches: None if its `decode_step` needs no epilogue, else the reason as a sentence.
    """

    name: str
    module: str
    why_not: Callable[[MLASpec, Arch], str | None]
    why_no_epilogue: Callable[[MLASpec, Arch], str | None]
    why_two_launches: Callable[[MLASpec], str | None]

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


def _why_not_hopper(arch: Arch) -> str | None:
    return None if arch.target == "sm_90a" else f"needs sm_90a (Hopper), this is {arch.target}"


def _why_not_sm90(spec: MLASpec, arch: Arch) -> str | None:
    return _why_not_hopper(arch) or importlib.import_module("streamla.kernels.sm90").why_not(
        spec, arch
    )


def _why_no_epilogue_sm90(spec: MLASpec, arch: Arch) -> str | None:
    return _why_not_hopper(arch) or importlib.import_module(
        "streamla.kernels.sm90"
    ).why_no_epilogue(spec)


def _why_not_reference(spec: MLASpec, arch: Arch) -> str | None:
    return None if arch.target == "cpu" else f"runs on the CPU only, this is {arch.target}"


def _why_not_portable(spec: MLASpec, arch: Arch) -> str | None:
    if arch.target == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU, or TRITON_INTERPRET=1 to run interpreted"
    return None


def _two_launches_sm90(spec: MLASpec) -> str | None:
    return importlib.import_module("streamla.kernels.sm90").why_two_launches(spec)


def _two_launches(spec: MLASpec) -> str | None:
    return "its attention takes the whole query and a cache that is complete"


IMPLS = (  # the first that serves is chosen
    Impl("sm90", "streamla.kernels.sm90", _why_not_sm90, _why_no_epilogue_sm90, _two_launches_sm90),
    Impl("reference", "streamla.reference", _why_not_reference, _why_not_reference, _two_launches),
    Impl(
        "portable", "streamla.kernels.portable", _why_not_portable, _why_not_portable, _two_launches
    ),
)


def refusals(spec: MLASpec, arch: Arch) -> dict[str, str | None]:
    """Every implementation's answer for this spec and GPU: None if it serves, else why not."""
    return {impl.name: impl.why_not(spec, arch) for impl in IMPLS}


def launches(impl: str, spec: MLASpec) -> str:
    """How the implementation called `impl` runs `decode_step`."""
    reason = next(i for i in IMPLS if i.name == impl).why_two_launches(spec)
    return "one launch" if reason is None else f"epilogue, then decode: {reason}"


def answers(spec: MLASpec, arch: Arch) -> list[str]:
    """Who serves a cache format, in how many launches a `decode_step`, and why others do not, as lines."""
    reasons = refusals(spec, arch)
    chosen = next((name for name, reason in reasons.items() if reason is None), "none")
    lines = [f"  {spec.kv_format.value:14} {chosen}"]
    if chosen != "none":
        epilogue = select(spec, arch, epilogue=True).name
        if epilogue != chosen:
            lines.append(f"    epilogue: {epilogue}")
        lines.append(f"    decode_step: {launches(chosen, spec)}")
    return lines + [f"    not {name}: {reason}" for name, reason in reasons.items() if reason]


def select(spec: MLASpec, arch: Arch, impl: str = AUTO, epilogue: bool = False) -> Impl:
    """The implementation called `impl`, or the first that serves; for the epilogue, or for all else.

    Raises:
        ValueError: no such implementation, or it does not serve; the message says why.
    """
    names = [i.name for i in IMPLS]
    if impl != AUTO and impl not in names:
        raise ValueError(f"impl: need one of {', '.join([AUTO, *names])}; got {impl!r}")
    reasons = {}
    for candidate in IMPLS:
        if impl in (AUTO, candidate.name):
            why_not = candidate.why_no_epilogue if epilogue else candidate.why_not
            reason = why_not(spec, arch)
            if reason is None:
                return candidate
            reasons[candidate.name] = reason
    told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise ValueError(f"impl: {impl!r} does not serve {spec} on {arch.name}: {told}")
