"""Random shapes, lengths and graph replays until the time is up: what `streamla soak` does.

Named cases hold the faults that somebody thought of; this looks for the others. Batch `i` of a seed is always
the same batch, so a failure is repeated by its number alone.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import torch

from streamla.spec import KVFormat
from streamla.testing.budget import Deviation
from streamla.testing.case import Case
from streamla.testing.checks import check_case
from streamla.testing.invariants import replay_lengths
from streamla.testing.verify import FAILED, Progress, Result, run_job, why_skipped

MAX_TOKENS = {"cuda": 1 << 19, "cpu": 1 << 11}
NUM_SPECS = 32  # of one seed: each is compiled once, and the time belongs to running
REPLAYS = 6

_HEADS = (1, 3, 4, 6, 8, 8, 8, 12, 16, 16, 16, 16, 24, 32, 48, 64, 96, 128)
_SEQLENS_Q = (1, 1, 1, 1, 2, 3, 4)
_PAGE_SIZES = (64, 64, 64, 64, 64, 1, 2, 7, 16, 32, 48, 96, 128, 256, 480, 544)
_PATTERNS = ("normal",) * 8 + ("all-bytes", "peaked", "spike", "rising", "one-hot", "offset+300")


def soak(
    seconds: float,
    impl: str = "auto",
    device: torch.device | str | None = None,
    seed: int = 0,
    first: int = 0,
    count: int | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Check random batches, from number `first` on, for `seconds` or until `count` are done.

    Each batch passes `check_case`; on a GPU it is then captured once and replayed with other lengths. The
    first failure ends the soak, as it may have left the device unusable.

    Raises:
        ValueError: `impl` serves none of the seed's specs on this device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    specs = served_specs(seed, impl, device)
    end = time.monotonic() + seconds
    results: list[Result] = []
    numbers = itertools.count(first) if count is None else range(first, first + count)
    for number in numbers:
        if time.monotonic() >= end:
            break
        case = draw(seed, number, specs, MAX_TOKENS[device.type])
        result = run_job(case.name, repr(case), None, _job(case, impl, device, seed, number))
        results.append(result)
        if progress is not None:
            progress(len(results), count or 0, result)
        if result.status == FAILED:
            break
    return results


def _job(
    case: Case, impl: str, device: torch.device, seed: int, number: int
) -> Callable[[], Deviation]:
    def job() -> Deviation:
        worst = check_case(case, impl, device, seed + number)
        if device.type != "cuda":
            return worst
        rng = random.Random(f"replays {seed} {number}")
        lengths = [
            tuple(rng.choice((0, n, n, rng.randint(0, n))) for n in case.lengths)
            for _ in range(REPLAYS)
        ]
        replayed = replay_lengths(case, impl, device, seed + number, lengths)
        return max(worst, replayed, key=lambda d: d.used)

    return job


def served_specs(seed: int, impl: str, device: torch.device) -> list[Case]:
    """`NUM_SPECS` cases without requests whose specs `impl` serves on `device`."""
    rng = random.Random(f"specs {seed}")
    specs = []
    for _ in range(20 * NUM_SPECS):
        case = Case(
            "", "", (),
            num_heads=rng.choice(_HEADS),
            kv_format=rng.choice(("fp8_e4m3fn", *(fmt.value for fmt in KVFormat))),
            page_size=rng.choice(_PAGE_SIZES),
            seqlen_q=rng.choice(_SEQLENS_Q),
        )  # fmt: skip
        refusal = why_skipped(case, impl, device)
        if refusal is None:
            specs.append(case)
        if len(specs) == NUM_SPECS:
            break
    if not specs:
        raise ValueError(f"impl: {refusal}")
    return specs


def draw(seed: int, number: int, specs: list[Case], max_tokens: int) -> Case:
    """Batch `number` of `seed`: one of `specs` with random lengths, layouts and values."""
    rng = random.Random(f"batch {seed} {number}")
    spec = rng.choice(specs)
    interleaved = rng.random() < 0.2
    return Case(
        f"soak-{number}", "", _lengths(rng, max_tokens),
        num_heads=spec.num_heads,
        kv_format=spec.kv_format,
        page_size=spec.page_size,
        seqlen_q=spec.seqlen_q,
        causal=rng.random() < 0.85,
        lse_base=rng.choice("ee2"),
        batch_invariant=rng.random() < 0.25,
        k_scale=math.exp(rng.gauss(0, 2)),
        data=rng.choice(_PATTERNS),
        query_layout=rng.choice(("packed", "packed", "padded", "halves")),
        page_stride=rng.randint(2, 3) if interleaved else 1,
        page_gap=rng.choice((0, 0, 0, 128)),
        row_gap=rng.choice((0, 0, 0, 0, 16, 64)),
        table_extra=rng.randint(0, 5),
    )  # fmt: skip


def _lengths(rng: random.Random, max_tokens: int) -> tuple[int, ...]:
    """Up to 256 lengths of at most `max_tokens` together, 0 among them."""
    tokens = int(2 ** rng.uniform(3, math.log2(max_tokens)))
    batch = min(int(2 ** rng.uniform(0, 8)), tokens)
    kind = rng.choice(("equal", "ragged", "ragged", "one-long", "tile-edges"))
    mean = tokens // batch
    if kind == "equal":
        return (mean,) * batch
    if kind == "one-long":
        lengths = [rng.randint(0, 8) for _ in range(batch - 1)] + [tokens]
    elif kind == "tile-edges":
        lengths = [
            max(0, 64 * rng.randint(0, mean // 64 + 1) + rng.randint(-1, 1)) for _ in range(batch)
        ]
    else:
        weights = [
            rng.choice((0.0, rng.random(), math.exp(rng.gauss(0, 1.5)))) for _ in range(batch)
        ]
        total = sum(weights) or 1.0
        lengths = [int(tokens * w / total) for w in weights]
    rng.shuffle(lengths)
    return tuple(lengths)
