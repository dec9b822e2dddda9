"""Run an implementation through every case by the public calls: what `streamla verify` does.

A case passes if the result is within its error budget of the oracle and nothing that may not matter
matters: poison, wild page ids, where the pages lie, what the workspaces and the outputs held, whether
the outputs were given, how often it is run. Those comparisons are to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from streamla.arch import arch_of
from streamla.select import select
from streamla.testing.budget import Deviation
from streamla.testing.cases import CASES, Case
from streamla.testing.checks import check_case
from streamla.testing.epilogue import EPILOGUE
from streamla.testing.epilogue_build import EpilogueCase
from streamla.testing.interpreter import is_interpreted, repair
from streamla.testing.invariants import INVARIANTS, Invariant
from streamla.testing.overlap import OVERLAP
from streamla.testing.step import STEP
from streamla.testing.workers import Died, run_jobs

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Result:
    """What became of one case or check.

    Attributes:
        name, reason: the case's.
        status: "passed", "failed" or "skipped".
        error, budget: of the output that came nearest to its budget.
        detail: what failed, or why it was skipped.
        seconds: how long it took.
    """

    name: str
    reason: str
    status: str
    error: float = 0.0
    budget: float = 0.0
    detail: str = ""
    seconds: float = 0.0


Progress = Callable[[int, int, Result], None]


def check_of(case: Case) -> Invariant:
    """What every case is put through, as a check."""
    return Invariant(case.name, case.reason, case, check_case)


CHECKS: tuple[Invariant, ...] = (
    *(check_of(case) for case in CASES),
    *INVARIANTS,
    *EPILOGUE,
    *STEP,
    *OVERLAP,
)


def verify(
    impl: str = "auto",
    device: torch.device | str | None = None,
    checks: Iterable[Invariant] = CHECKS,
    progress: Progress | None = None,
    seed: int = 0,
    only: str | None = None,
    jobs: int = 1,
) -> list[Result]:
    """Run `checks`: the cases, then those of `invariants.py`, `epilogue.py`, `step.py` and `overlap.py`.

    Args:
        impl: an implementation's name; with "auto" each case runs what would be chosen for it.
        device: where to run; the GPU if there is one.
        progress: called after each with (number done, number in all, result).
        only: run just the cases and checks whose name contains this.
        jobs: processes to run them in. One that ends fails the check that it ran, and no other. Results have the
            order of `checks` all the same.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    checks = [check for check in checks if only is None or only in check.name]
    results: dict[int, Result] = {}
    ended = run_jobs([partial(run_check, check, impl, device, seed) for check in checks], jobs)
    with closing(ended):
        for number, result in ended:
            if isinstance(result, Died):
                check, detail = checks[number], f"its process ended, exit code {result.exitcode}"
                result = Result(check.name, check.reason, FAILED, detail=detail)
            results[number] = result
            if progress is not None:
                progress(len(results), len(checks), result)
    return [results[number] for number in range(len(checks))]


def run_check(check: Invariant, impl: str, device: torch.device, seed: int) -> Result:
    """What becomes of `check` in this process."""
    case = check.case
    # Triton's interpreter needs its float conversions put right, and small widths.
    if impl == "portable" and is_interpreted(device):
        repair()
        case = case.narrow()

    def job() -> Deviation:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other processes check on this GPU too
        return check.check(case, impl, device, seed)

    return run_job(check.name, check.reason, why_skipped(case, impl, device), job)


def why_skipped(case: Case, impl: str, device: torch.device) -> str | None:
    """Why `impl` does not run `case` on `device`; None if it does."""
    if case.gpu and device.type != "cuda":
        return "needs a GPU"
    try:
        select(case.spec, arch_of(device), impl, isinstance(case, EpilogueCase))
    except ValueError as refusal:
        return str(refusal)
    return None


def run_job(name: str, reason: str, skip: str | None, job: Callable[[], Deviation]) -> Result:
    """The result of `job`, or of not running it because of `skip`."""
    if skip is not None:
        return Result(name, reason, SKIPPED, detail=skip)
    start = time.perf_counter()
    try:
        deviation = job()
    except Exception as failure:  # any exception is a failed case; the others still run
        detail = f"{type(failure).__name__}: {failure}"
        return Result(name, reason, FAILED, detail=detail, seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return Result(name, reason, PASSED, deviation.error, deviation.budget, seconds=seconds)
