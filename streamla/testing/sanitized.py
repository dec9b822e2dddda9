"""Every kernel of an implementation on small shapes, each result checked: what `make sanitized` runs under
compute-sanitizer.

    python -m streamla.testing.sanitized --impl sm90
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from streamla.testing.case import Case
from streamla.testing.epilogue import EPILOGUE
from streamla.testing.invariants import Invariant
from streamla.testing.step import STEP
from streamla.testing.verify import FAILED, PASSED, SKIPPED, Result, check_of, verify


def _decode(
    num_heads: int, kv_format: str, page_size: int, lengths: tuple[int, ...], **options: Any
) -> Invariant:
    """plan, decode, attention and merge of one batch."""
    name = f"{kv_format}-{num_heads}-heads-page-{page_size}-{len(lengths)}-requests"
    name += "".join(f"-{key}-{value}" for key, value in options.items())
    return check_of(Case(name, "", lengths, num_heads, kv_format, page_size, **options))


# Every attention kernel and merge of Hopper; requests in splits, one without tokens, tails; pages that hold a tile,
# parts of one, a token.
CHECKS: tuple[Invariant, ...] = (
    _decode(16, "fp8_e4m3fn", 64, (1300, 0, 77)),
    _decode(16, "fp8_e4m3fn", 64, (300, 5), batch_invariant=True),  # a planner of its own
    _decode(8, "fp8_e4m3fn", 16, (700, 64)),
    _decode(12, "fp8_e4m3fn", 1, (130, 3), seqlen_q=2),
    _decode(24, "fp8_e4m3fn", 64, (500, 65)),
    _decode(32, "fp8_e4m3fn", 64, (900, 65)),
    _decode(16, "fp8_e4m3fn", 64, (513, 5), seqlen_q=4),
    _decode(64, "fp8_e4m3fn", 64, (900, 1)),
    _decode(64, "fp8_e4m3fn", 64, (900,)),  # in 15 splits: several warps merge a unit
    _decode(64, "fp8_e4m3fn", 64, (300, 5), row_gap=4),  # rows that bulk copies cannot take
    _decode(128, "fp8_e4m3fn", 32, (300, 64)),
    _decode(16, "bf16", 64, (1300, 0, 77)),
    _decode(8, "bf16", 7, (130, 3), seqlen_q=2),
    _decode(32, "bf16", 64, (300, 64)),
    _decode(16, "fp8_ds_mla", 64, (1300, 0, 77)),
    _decode(8, "fp8_ds_mla", 1, (130, 3), seqlen_q=2),
    _decode(64, "fp8_ds_mla", 64, (300, 64)),
    *EPILOGUE[:12],  # every format, rotated either way or not
    *STEP[:10],  # the same, and several new tokens
)


def run(impl: str = "auto", device: str | None = None, checks: Sequence[Invariant] = CHECKS) -> int:
    """Run `checks` and tell of each: 0 if all that `impl` serves passed, 1 if one failed or none ran."""

    def tell(done: int, total: int, result: Result) -> None:
        said = f"{result.error:.1e} of {result.budget:.1e}" if result.budget else ""
        detail = said if result.status == PASSED else result.detail
        print(f"{done:2}/{total} {result.status:7} {result.name}  {detail}", flush=True)

    statuses = [r.status for r in verify(impl, device, checks, progress=tell)]
    print(", ".join(f"{statuses.count(s)} {s}" for s in (PASSED, FAILED, SKIPPED)))
    return int(FAILED in statuses or PASSED not in statuses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m streamla.testing.sanitized",
        description="Every kernel of an implementation on small shapes. Exit code 1 if a result is wrong.",
    )
    parser.add_argument("--impl", default="auto", help="implementation; auto is what would run")
    parser.add_argument("--device", help="cuda or cpu; the GPU if there is one")
    sys.exit(run(**vars(parser.parse_args())))
