"""From a kernel name as a profiler prints it to text that the grammars can read."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

_SUFFIXES = re.compile(r"( \[clone[^\]]*\]|\.kd|\.hsaco)+$")
_CAST = re.compile(r"\((?:unsigned )?(?:int|long|short|char)\)(\d+)")
_UNSIGNED = re.compile(r"\b(\d+)(?:u|ul|l|ll|ull)\b")
_BOOL_CAST = {"(bool)0": "false", "(bool)1": "true"}


@dataclass(frozen=True)
class CleanName:
    """A kernel name without a profiler's habits.

    Attributes:
        text: demangled, with plain literals, without return type and parameters.
        truncated: the profiler cut the name; what its last piece was is unknown.
        mangled: the name stayed mangled; only its identifiers are in `text`.
    """

    text: str
    truncated: bool = False
    mangled: bool = False


@functools.cache
def _library_demangle() -> Callable[..., int | None] | None:
    """The C++ runtime's demangler, None where there is no C++ runtime."""
    for library in ("libstdc++.so.6", "libc++abi.so.1", "libc++abi.dylib", "libc++.1.dylib"):
        try:
            function = ctypes.CDLL(library).__cxa_demangle
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        function.argtypes = [
            ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
        ]  # fmt: skip
        return function
    return None


def demangle(symbol: str) -> str | None:
    """The C++ name of an Itanium-mangled symbol; None if it is none, or is cut off."""
    function = _library_demangle()
    if function is None:
        return None
    status = ctypes.c_int()
    pointer = function(symbol.encode(), None, None, ctypes.byref(status))
    if not pointer:
        return None
    text = ctypes.string_at(pointer).decode(errors="replace")
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(pointer)
    return text


def identifiers(symbol: str) -> tuple[list[str], bool]:
    """The identifiers of a mangled symbol, in order, and whether the last one is whole: every one is
    written as its length and its text."""
    found, at, whole = [], 2, True
    while match := re.compile(r"\d+").search(symbol, at):
        length = int(match.group())
        literal = symbol[match.start() - 2 : match.start()]
        piece = symbol[match.end() : match.end() + length]
        # A template literal (Li64E) is a number that no identifier follows.
        if re.fullmatch(r"L[a-z]", literal) or not re.match(r"[A-Za-z_]", piece):
            at = match.end()
            continue
        found.append(piece)
        whole = len(piece) == length
        at = match.end() + length
    return found, whole


def _without_parameters(text: str) -> str:
    """Cut the parameter list: the first parenthesis that template brackets do not hold."""
    depth = 0
    for i, c in enumerate(text):
        if c == "<":
            depth += 1
        elif c == ">" and text[i - 1] != "-":
            depth -= 1
        elif c == "(" and depth == 0 and not text.startswith("(anonymous namespace)", i):
            return text[:i]
    return text


def clean(name: str) -> CleanName:
    """Undo what profilers do to a kernel name: mangling, suffixes, quotes, cuts, casts in literals."""
    text = name.strip().strip('"').strip()
    truncated = text.endswith(("...", "…"))
    text = text.rstrip(".…") if truncated else _SUFFIXES.sub("", text)
    mangled = False
    if text.startswith("_Z"):
        plain = None if truncated else demangle(text)
        mangled = plain is None
        if plain is None:
            found, whole = identifiers(text)
            text, truncated = "::".join(found), truncated or not whole
        else:
            text = plain
    for cast, value in _BOOL_CAST.items():
        text = text.replace(cast, value)
    text = _UNSIGNED.sub(r"\1", _CAST.sub(r"\1", text))
    text = _without_parameters(text).strip()
    text = re.sub(r"^(?:static |__global__ )*void ", "", text)
    return CleanName(text, truncated, mangled)


def template_depth(text: str) -> int:
    """Template brackets that are open at the end of `text`: above 0, the name was cut inside them."""
    return text.count("<") - text.replace("->", "").count(">")
