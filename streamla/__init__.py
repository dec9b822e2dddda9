"""streamla: MLA decode attention at the speed of memory.

Importing this package imports neither torch nor a GPU nor a kernel language; the first use of a public
name imports torch.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

from streamla.version import __version__

if TYPE_CHECKING:
    from streamla.api import attention, decode, decode_step, epilogue, merge, plan, support, warmup
    from streamla.plan import DecodePlan
    from streamla.spec import KVFormat, MLASpec

_HOMES = {
    "DecodePlan": "streamla.plan",
    "KVFormat": "streamla.spec",
    "MLASpec": "streamla.spec",
    "attention": "streamla.api",
    "decode": "streamla.api",
    "decode_step": "streamla.api",
    "epilogue": "streamla.api",
    "merge": "streamla.api",
    "plan": "streamla.api",
    "support": "streamla.api",
    "warmup": "streamla.api",
}

__all__ = [
    "DecodePlan", "KVFormat", "MLASpec", "__version__",
    "attention", "decode", "decode_step", "epilogue", "merge", "plan", "support", "warmup",
]  # fmt: skip


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds every submodule here. `streamla.plan` is the function: the module of
        # that name is reached by `from streamla.plan import ...`.
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
