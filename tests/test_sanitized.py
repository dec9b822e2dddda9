"""What runs under compute-sanitizer: every kernel, small shapes, and an exit code that tells of a wrong result."""

import subprocess
import sys

from streamla.arch import arch_by_name
from streamla.kernels import sm90
from streamla.spec import KVFormat
from streamla.testing.epilogue import check_epilogue
from streamla.testing.invariants import Invariant
from streamla.testing.sanitized import CHECKS, run
from streamla.testing.step import check_step

H200 = arch_by_name("h200")
COMMAND = [sys.executable, "-m", "streamla.testing.sanitized", "--device", "cpu", "--impl"]


def test_it_passes_and_tells_of_each():
    done = subprocess.run([*COMMAND, "reference"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert len(lines) == len(CHECKS)
    assert last == f"{len(CHECKS)} passed, 0 failed, 0 skipped"


def test_a_wrong_result_and_nothing_that_runs_are_exit_code_1(capsys):
    def wrong(case, impl, device, seed):
        raise AssertionError("out: wrong")

    one = Invariant("one", "", CHECKS[0].case, wrong)
    assert run("reference", "cpu", [CHECKS[1], one]) == 1
    assert "failed  one  AssertionError: out: wrong" in capsys.readouterr().out
    assert run("sm90", "cpu", CHECKS[:2]) == 1
    assert capsys.readouterr().out.endswith("0 passed, 0 failed, 2 skipped\n")


def test_it_has_every_hopper_kernel():
    decodes = [c.case.spec for c in CHECKS if c.check not in (check_epilogue, check_step)]
    assert all(sm90.why_not(spec, H200) is None for spec in decodes)
    narrow = [spec for spec in decodes if sm90._kernels(spec) is sm90.narrow]
    assert {sm90.narrow.Variant.of(spec).rows for spec in narrow} == set(sm90.narrow.ROW_STEPS)
    assert {sm90._kernels(spec) for spec in decodes} == {sm90.narrow, sm90.wide, sm90.bf16, sm90.ds_mla}  # fmt: skip
    for check in (check_epilogue, check_step):
        cases = [c.case for c in CHECKS if c.check is check]
        assert {case.kv_format for case in cases} == {f.value for f in KVFormat}
        assert {case.rope for case in cases} == {None, "interleaved", "neox"}
    assert all(max(c.case.lengths) <= 1300 for c in CHECKS)
