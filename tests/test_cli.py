"""The command line: what it prints, what it writes, and its exit codes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from streamla import cli
from streamla.bench import records as bench_records
from streamla.cli import console
from streamla.cli.app import app
from streamla.cli.bench import _command

README = Path(__file__).parents[1] / "README.md"
runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"})
console.out = Console(width=100, color_system=None)  # whatever terminal the tests run in


def invoke(*arguments):
    return runner.invoke(app, [str(a) for a in arguments])


def main(monkeypatch, *arguments):
    """The console script in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["streamla", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    return exit.value.code


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("verify", "soak", "bench", "plan", "compile", "support", "doctor"):
        assert command in result.output


def test_version():
    assert invoke("--version").output.startswith("streamla 0.")


def test_help_does_not_import_torch():
    code = (
        "import sys\nsys.argv = ['streamla', '--help']\nfrom streamla.cli import main\n"
        "try: main()\nfinally: assert not {'torch', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("rich", "cli")])
def test_a_missing_extra_is_one_line(module, extra):
    code = (
        f"import sys\nsys.modules[{module!r}] = None\nsys.argv = ['streamla', 'support']\n"
        "from streamla.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"needs {module}: pip install 'streamla[{extra}]'" in done.stderr


def test_plan_of_the_trap_is_balanced():
    # 16 requests on 264 programs: a grid of whole splits a request would leave some idle.
    result = invoke("plan", "--programs", 264, "--impl", "portable", "--json", "-")
    assert result.exit_code == 0, result.output
    (plan,) = json.loads(result.output)["plans"]
    assert (plan["requests"], plan["tokens"]) == (16, 16 * 131072)
    assert plan["programs_busy"] == 264
    assert plan["share_max"] - plan["share_min"] <= 1
    assert plan["items"] <= 264 + 15
    assert plan["bytes"] == 16 * 131072 * 576


def test_plan_prints_a_line_for_each_shape():
    result = invoke("plan", "--contexts", "32K,1K", "--requests", "1,4", "--device", "mi300x",
                    "--impl", "portable")  # fmt: skip
    assert result.exit_code == 0, result.output
    for shape in ("32K x 1", "32K x 4", "1K x 1", "1K x 4"):
        assert shape in result.output
    assert all(len(line) <= 100 for line in result.output.splitlines())


def test_plan_takes_one_ragged_batch():
    result = invoke("plan", "--lengths", "5,0,8192", "--device", "cpu", "--json", "-")
    (plan,) = json.loads(result.output)["plans"]
    assert (plan["requests"], plan["tokens"], plan["floor_us"]) == (3, 8197, None)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 40 * i, "input_length": 90 * i, "output_length": 30} for i in range(40)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_plan_of_a_trace(trace):
    result = invoke("plan", "--trace", trace, "--concurrency", 3, "--device", "cpu", "--json", "-")
    assert result.exit_code == 0, result.output
    assert [p["requests"] for p in json.loads(result.output)["plans"]] == [3] * 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--contexts", "many"), "contexts: need whole numbers"),
        (("plan", "--device", "abacus"), "device: need one of h200"),
        (("plan", "--heads", "0"), "num_heads: need an int >= 1"),
        (("plan", "--format", "int4", "--device", "cpu"), "kv_format: need one of"),
        (("plan", "--programs", "0", "--device", "cpu"), "programs: need >= 1"),
        (("plan", "--trace", "absent.jsonl", "--device", "cpu"), "absent.jsonl"),
        (("bench", "--grid", "blogs"), "grid: need one of blog"),
        (("bench", "--impl", "abacus", "--device", "cpu"), "impl: need one of"),
        (("bench", "compare", "a.json", "b.json"), "a.json"),
        (("compile", "--target", "z80"), "target: need one of sm_90a"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(monkeypatch, capsys, arguments, said):
    assert main(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["bench", "--json", "/a/b.json", "--heads", "8"], "streamla bench --heads 8"),
        (["bench", "--trace=/a/t.jsonl", "--json=/a/b.json"], "streamla bench --trace=t.jsonl"),
        (["bench", "--trace", "../a/t.jsonl"], "streamla bench --trace t.jsonl"),
    ],
)
def test_the_recorded_command_has_no_folders(arguments, kept):
    assert _command(arguments) == kept


def test_integers():
    assert console.integers("x", "1, 4,32K,1m") == [1, 4, 32768, 1 << 20]
    with pytest.raises(ValueError, match="x: need whole numbers"):
        console.integers("x", "1,,2")


@pytest.fixture(scope="module")
def run_of_a_trace(tmp_path_factory):
    """One real run of the benchmark on the CPU, small enough for a test."""
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "trace.jsonl"
    rows = [{"timestamp": 40 * i, "input_length": 9000, "output_length": 30} for i in range(40)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = folder / "out.json"
    result = invoke("bench", "--trace", path, "--concurrency", "1,2", "--samples", 2,
                    "--heads", 4, "--device", "cpu", "--json", out)  # fmt: skip
    return result, bench_records.load(out), out


def test_bench_says_that_there_is_no_gpu(run_of_a_trace):
    result, _, _ = run_of_a_trace
    assert result.exit_code == 0, result.output
    assert "No GPU: timing the CPU implementation on contexts 256 times shorter" in result.output
    assert "4 heads, fp8_e4m3fn cache" in result.output
    assert "trace.jsonl: 2 slots, steps of 25 ms" in result.output
    assert all(len(line) <= 100 for line in result.output.splitlines())


def test_bench_records(run_of_a_trace):
    _, results, _ = run_of_a_trace
    assert results.device == "cpu"
    assert results.scaled_down == 256
    assert [t["concurrency"] for t in results.traffic] == [1, 2]
    assert [r.requests for r in results.records] == [1, 1, 2, 2]
    assert all(r.us > 0 and r.budget_used <= 1 and r.plan_us > 0 for r in results.records)
    assert {r.impl for r in results.records} == {"reference"}


def test_compare_exit_codes(run_of_a_trace, tmp_path):
    _, results, path = run_of_a_trace
    same = invoke("bench", "compare", path, path)
    assert same.exit_code == 0, same.output
    assert "geometric mean 1.000" in same.output

    slow = [
        replace(r, us=3 * r.us, us_p25=3 * r.us_p75, us_p75=4 * r.us_p75) for r in results.records
    ]
    bench_records.save(replace(results, records=slow), tmp_path / "slow.json")
    slower = invoke("bench", "compare", path, tmp_path / "slow.json")
    assert slower.exit_code == 1
    assert "4 slower by more than 5%" in slower.output
    lost = invoke("bench", "compare", path, tmp_path / "slow.json", "--json", "-")
    assert json.loads(lost.output)["slower"] == 4


def test_verify_one_case():
    result = invoke("verify", "--only", "wild-pages-none", "--device", "cpu", "--impl", "reference")
    assert result.exit_code == 0, result.output
    assert "passed" in result.output


def test_support_says_why_not():
    result = invoke("support", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "not sm90: needs sm_90a (Hopper), this is cpu" in result.output


def test_compile_prints_a_row_for_each_variant():
    # In a process of its own: Triton compiles nothing in one that has loaded its interpreter.
    command = [sys.executable, "-m", "streamla", "compile", "--target", "sm_90a", "--only", "portable/merge", "--json", "-"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert all(f["spills"] == 0 and f["registers"] > 0 for f in facts)


def test_doctor_is_mounted():
    result = invoke("doctor", "--help")
    assert result.exit_code == 0
    assert "explain" in result.output


def test_readme_runs(device):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    names = {}
    exec(code.replace('"cuda"', repr(device.type)), names)
    assert names["out"].shape == (4, 1, 16, 512)
    assert names["out"][:3].any(-1).all()
    assert not names["out"][3].any()  # an empty request
