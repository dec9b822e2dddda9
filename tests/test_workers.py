"""Jobs in worker processes: the results of one process, whatever becomes of a worker."""

import json
import multiprocessing
import os
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

from typer.testing import CliRunner

from streamla.cli.app import app
from streamla.testing.budget import Deviation
from streamla.testing.cases import Case, case_by_name
from streamla.testing.invariants import Invariant
from streamla.testing.verify import FAILED, PASSED, SKIPPED, check_of, verify
from streamla.testing.workers import Died, run_jobs


def passes(case, impl, device, seed):
    return Deviation(seed, 1.0, "out")


def fails(case, impl, device, seed):
    raise AssertionError("out: wrong")


def dies(case, impl, device, seed):
    os._exit(7)


def of(check, number):
    case = Case(f"{number}-{check.__name__}", "a test", (1,))
    return Invariant(case.name, case.reason, case, check)


def test_the_results_are_those_of_one_process(seed):
    names = ("empty-first", "gpu-million", "wild-pages-none", "tail-page-7")
    checks = [*(check_of(case_by_name(name)) for name in names), of(fails, 0), of(passes, 1)]
    seen = []
    alone, together = (
        verify("reference", "cpu", checks, lambda done, total, _: seen.append((done, total)), seed, jobs=jobs)
        for jobs in (1, 2)
    )  # fmt: skip
    assert [r.status for r in alone] == [PASSED, SKIPPED, PASSED, PASSED, FAILED, PASSED]
    assert [replace(r, seconds=0) for r in together] == [replace(r, seconds=0) for r in alone]
    assert seen == 2 * [(done, len(checks)) for done in range(1, len(checks) + 1)]


def test_a_worker_that_dies_fails_its_case_and_no_other():
    checks = [of(dies if n in (1, 4) else passes, n) for n in range(5)]
    results = verify("reference", "cpu", checks, jobs=2)
    assert [r.name for r in results] == [c.name for c in checks]
    assert [r.status for r in results] == [PASSED, FAILED, PASSED, PASSED, FAILED]
    assert {r.detail for r in results if r.status == FAILED} == {"its process ended, exit code 7"}
    assert not multiprocessing.active_children()


def test_processes_end_with_the_generator_though_they_are_busy():
    jobs = [os.getpid, partial(time.sleep, 600)]
    with closing(run_jobs(jobs, 2)) as ended:
        number, pid = next(ended)
        assert number == 0
        assert pid != os.getpid()
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


def test_no_job_needs_no_worker_and_the_last_may_die():
    assert list(run_jobs([], 2)) == []
    assert list(run_jobs([partial(os._exit, 3)], 2)) == [(0, Died(3))]


def test_the_command_runs_jobs_and_interprets_kernels_in_them_without_a_gpu(tmp_path):
    command = ["verify", "--jobs", "2", "--only", "wild-pages-none", "--impl", "portable"]
    path = tmp_path / "verify.json"
    done = CliRunner().invoke(app, [*command, "--json", str(path)])
    assert done.exit_code == 0, done.output
    (result,) = json.loads(path.read_text())
    assert result["status"] == PASSED
