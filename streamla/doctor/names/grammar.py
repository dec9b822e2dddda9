"""The shape of a grammar: a family of kernels, the parts of its names, and what each part says.

A grammar is data. A `Family` says which names it owns and what is true of all of them; each `Part` is a
pattern whose named groups become facts. What no part explains is reported as unknown, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DTYPES = {
    "cutlass::bfloat16_t": "bf16", "__nv_bfloat16": "bf16", "nv_bfloat16": "bf16", "bfloat16": "bf16",
    "bf16": "bf16", "__hip_bfloat16": "bf16", "c10::BFloat16": "bf16",
    "cutlass::half_t": "fp16", "__half": "fp16", "half": "fp16", "fp16": "fp16", "float16": "fp16",
    "cutlass::float_e4m3_t": "fp8", "cutlass::float_e5m2_t": "fp8", "__nv_fp8_e4m3": "fp8",
    "__nv_fp8_e5m2": "fp8", "e4m3": "fp8", "fp8": "fp8", "e2m1": "fp4", "float": "fp32",
}  # fmt: skip

ATTENTION = "attention"


@dataclass(frozen=True)
class Part:
    """One readable piece of a name.

    Attributes:
        pattern: a regular expression. Each named group is a fact (an int if it is one; a dtype if
            the fact's name ends in `dtype`).
        facts: facts that hold whenever the pattern is there. They win over a group of the same name.
        says: the piece in words, with {group} for what was found.
    """

    pattern: str
    facts: Mapping[str, object] = field(default_factory=dict)
    says: str = ""


@dataclass(frozen=True)
class Family:
    """Kernels that share a naming scheme.

    Attributes:
        name: the family.
        role: attention, merge, plan, epilogue, quantize, dequantize, concat, copy, ...
        match: pattern that a name of this family holds.
        facts: true for every kernel of the family.
        parts: the pieces of a name.
        absent: facts that hold when the name is whole and no part said otherwise.
        tokens: "_" if the name is a list of pieces with that separator, each of which some part must
            explain in full; "camel" for pieces that follow each other; "" for template arguments.
        note: what the name alone cannot say.
    """

    name: str
    role: str
    match: str
    facts: Mapping[str, object] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    absent: Mapping[str, object] = field(default_factory=dict)
    tokens: str = ""
    note: str = ""


@dataclass
class Reading:
    """What the parts of one name said."""

    facts: dict[str, object]
    says: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def _value(fact: str, text: str) -> object:
    if fact.endswith("dtype"):
        return DTYPES.get(text, DTYPES.get(text.lower()))
    return int(text) if text.isdigit() else text


def _take(reading: Reading, part: Part, match: re.Match[str]) -> None:
    groups = {k: v for k, v in match.groupdict().items() if v is not None}
    for fact, text in groups.items():
        reading.facts.setdefault(fact, _value(fact, text))
    reading.facts.update(part.facts)
    if part.says:
        reading.says.append(f"{match.group().strip('_')}: {part.says.format(**groups)}")


def _read_tokens(family: Family, text: str, truncated: bool, reading: Reading) -> None:
    pieces = [p for p in text.split("_") if p]
    cut = pieces.pop() if truncated and pieces else None
    for piece in pieces:
        for part in family.parts:
            if match := re.fullmatch(part.pattern, piece, re.IGNORECASE):
                _take(reading, part, match)
                break
        else:
            reading.unknown.append(piece)
    if cut is not None:
        reading.unknown.append(f"{cut}... (cut off)")


def _read_camel(family: Family, text: str, truncated: bool, reading: Reading) -> None:
    at = 0
    start = re.search(family.match, text)
    text = text[start.end() :] if start else text
    while at < len(text):
        for part in family.parts:
            match = re.compile(part.pattern).match(text, at)
            if match and match.end() > at:
                break
        else:
            match = None
        if match is None:
            following = re.compile(r".[a-z0-9]*").match(text, at)
            end = following.end() if following else len(text)
            cut = "... (cut off)" if truncated and end == len(text) else ""
            reading.unknown.append(text[at:end] + cut)
            at = end
        elif truncated and match.end() == len(text):
            reading.unknown.append(f"{match.group()}... (cut off)")
            return
        else:
            _take(reading, part, match)
            at = match.end()


def read(family: Family, text: str, truncated: bool) -> Reading:
    """Facts of one name under the grammar of its family."""
    reading = Reading(dict(family.facts))
    if family.tokens == "_":
        _read_tokens(family, text.split("::")[-1], truncated, reading)
    elif family.tokens == "camel":
        _read_camel(family, text, truncated, reading)
    else:
        for part in family.parts:
            if match := re.search(part.pattern, text):
                _take(reading, part, match)
        if truncated:
            reading.unknown.append("what was cut off")
    if not truncated:
        for fact, value in family.absent.items():
            reading.facts.setdefault(fact, value)
    return reading
