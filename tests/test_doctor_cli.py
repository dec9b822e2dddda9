"""`streamla doctor`: exit codes, JSON, HTML, and no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("ijson")

from typer.testing import CliRunner

from streamla.doctor import cli
from streamla.doctor.cli import app

DATA = Path(__file__).parent / "data" / "doctor"
STUDY = str(DATA / "study_mi300x.json.gz")
A16W8 = "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps"
PREDICT = ["predict", "--gpu", "mi300x", "--engine", "sglang", "--q", "bf16", "--kv", "fp8", "--heads", "16",
           "--requests", "1", "--context", "262144"]  # fmt: skip


def run(*args):
    return CliRunner().invoke(app, list(args))


def test_trace_is_the_default_command():
    for args in ((STUDY,), ("trace", STUDY), ("--heads", "16", STUDY)):
        result = run(*args)
        assert result.exit_code == 0, result.output
        assert "aiter-asm-mla" in result.output


def test_trace_json():
    out = json.loads(run(STUDY, "--heads", "16", "--kv", "fp8", "--json").output)
    assert out["gpu"] == {"name": "AMD Instinct MI300X", "units": 304}
    assert out["complete"] is True
    assert {f["id"] for f in out["findings"]} >= {
        "padding",
        "parallelism",
        "longest",
        "bandwidth",
        "amdahl",
    }
    assert out["kernels"][0]["padding"] == 0.75
    assert out["steps"] == {"count": 12, "whole": 12, "layers": 3, "device": "2"}
    for f in out["findings"]:
        assert f["sentence"]
        assert f["evidence"]
        assert f["arithmetic"]


def test_explain():
    out = json.loads(run("explain", A16W8, "--heads", "16", "--json").output)
    expected = {"family": "aiter-asm-mla", "q_dtype": "bf16", "kv_dtype": "fp8", "tile_heads": 16, "tile_q_rows": 4,
                "persistent": True, "padding": 0.75}  # fmt: skip
    assert {k: out[k] for k in expected} == expected
    assert "padding" not in json.loads(run("explain", A16W8, "--json").output)
    text = run("explain", A16W8, "--heads", "16", "--q-len", "4").output
    assert "0%" in text
    assert "4 waves x 16 rows" in text
    assert "the name does not say" in run("explain", "_mla_gluon").output


def test_predict():
    out = json.loads(run(*PREDICT, "--json").output)
    assert (out["kernel"], out["padding"], out["busy_units"], out["units"]) == (
        A16W8,
        0.75,
        16,
        304,
    )
    assert "16 of 304 CUs" in run(*PREDICT).output


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((STUDY, "--heads", "16"), 0),
        ((STUDY, "--heads", "16", "--fail-on", "waste=0.5"), 1),
        ((STUDY, "--heads", "16", "--fail-on", "padding=0.7"), 1),
        ((STUDY, "--heads", "16", "--fail-on", "padding=0.75"), 0),
        ((STUDY, "--heads", "16", "--fail-on", "merge=0.1"), 0),
        ((*PREDICT, "--fail-on", "waste=0.5"), 1),
        ((*PREDICT, "--fail-on", "merge=0.5"), 0),
        ((STUDY, "--fail-on", "lots"), 2),
        ((STUDY, "--gpu", "abacus"), 2),
        ((STUDY, "--heads", "0"), 2),
        ((STUDY, "--layers", "0"), 2),
        ((STUDY, "--from", "("), 2),
        (("no_such_trace.json",), 2),
        ((__file__,), 2),
        (("explain", "x", "--heads", "-1"), 2),
        (("diff", STUDY, str(DATA / "nsys_cuda_gpu_kern_sum.csv")), 2),
        (("diff", STUDY, STUDY), 0),
    ],
)
def test_exit_codes(args, code):
    result = run(*args)
    assert result.exit_code == code, result.output
    if code == 2:
        message = [line for line in result.stderr.splitlines() if line]
        assert len(message) == 1
        assert message[0].startswith("streamla doctor: ")


def test_html_is_self_contained(tmp_path):
    for args in ((STUDY, "--heads", "16"), ("diff", STUDY, STUDY)):
        page = tmp_path / "page.html"
        assert run(*args, "--html", str(page)).exit_code == 0
        text = page.read_text()
        assert text.startswith("<!doctype html>")
        for outside in ("http", "<script", "<link", "<img"):
            assert outside not in text
    assert run(STUDY, "--html", str(tmp_path / "no" / "page.html")).exit_code == 2


def test_a_progress_bar_for_large_files(monkeypatch, capfd):
    monkeypatch.setattr(cli, "_BAR_BYTES", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert len(cli._read(Path(STUDY))) == 180


def test_diff_json():
    out = json.loads(run("diff", STUDY, STUDY, "--json").output)
    assert out["attention_ratio"] == 1.0
    assert {"what", "a", "b", "ratio"} == set(out["lines"][0])


def test_it_needs_no_torch_and_no_kernel_language(tmp_path):
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'cuda', 'numpy'): sys.modules[name] = None\n"
        "from streamla.doctor.cli import app\n"
        "app()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    for args in (["explain", A16W8], [STUDY, "--heads", "16"], PREDICT):
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            env=env,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    loaded = "import sys; import streamla.doctor.cli; print(*(m for m in sys.modules if m.startswith('streamla.')))"
    done = subprocess.run(
        [sys.executable, "-c", loaded], env=env, capture_output=True, text=True, check=True
    )
    outside = [m for m in done.stdout.split() if not m.startswith("streamla.doctor")]
    assert set(outside) <= {"streamla.arch", "streamla.version"}
