"""`streamla bench` with peers, a published table and a report; `streamla bench report` of what is there."""

import json
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from streamla.bench import workloads
from streamla.bench.records import load, save
from streamla.bench.workloads import Workload
from streamla.cli import console
from streamla.cli.app import app
from streamla.cli.bench import _command

runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two small shapes with everything on."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            workloads.GRIDS, "blog",
            lambda spec: [Workload("blog", spec, lengths) for lengths in ((1 << 14,), (1 << 13,) * 2)],
        )  # fmt: skip
        patch.setattr(console, "out", Console(width=130, color_system=None))
        arguments = ["bench", "--device", "cpu", "--peers", "torch-sdpa,tileops", "--repeat", "2",
                     "--against", "mi300x-blog", "--json", folder / "a.json", "--report", folder / "report"]  # fmt: skip
        result = runner.invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_a_run_shows_peers_absent_peers_and_equal_work(run):
    folder, output = run
    records = load(folder / "a.json").records
    assert [r.impl for r in records] == ["reference", "torch-sdpa"] * 2
    assert all(len(r.us_runs) == 2 for r in records)
    assert [a["name"] for a in load(folder / "a.json").absent] == ["tileops"]
    for part in ("gathers the cache", "absent: tileops", "The same work", "aiter, MI300X"):
        assert part in output


def test_a_run_writes_its_report(run):
    names = {p.name for p in (run[0] / "report").iterdir()}
    assert {"index.html", "blog-latency.svg", "blog-latency.png", "blog-spread.svg"} <= names


def test_the_report_of_a_file_is_that_of_its_run(run, tmp_path):
    folder, _ = run
    result = runner.invoke(
        app,
        [
            "bench",
            "report",
            str(folder / "a.json"),
            "--out",
            str(tmp_path),
            "--against",
            "mi300x-blog",
        ],
    )
    assert result.exit_code == 0, result.output
    for name in ("index.html", "blog-latency.svg"):
        assert (tmp_path / name).read_text() == (folder / "report" / name).read_text()
    figures = tmp_path / "figures"
    runner.invoke(
        app,
        [
            "bench",
            "report",
            str(folder / "a.json"),
            "--out",
            str(figures),
            "--formats",
            "svg",
            "--no-page",
        ],
    )
    assert {p.suffix for p in figures.iterdir()} == {".svg"}


def test_a_report_is_of_one_machine(run, tmp_path):
    other = tmp_path / "b.json"
    save(replace(load(run[0] / "a.json"), gpu="another"), other)
    result = runner.invoke(
        app, ["bench", "report", str(run[0] / "a.json"), str(other), "--out", str(tmp_path)]
    )
    assert "need runs of one machine" in str(result.exception)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--peers", "x", "peers: need all, none or some of"),
        ("--against", "x", "against: need one of mi300x-blog"),
        ("--repeat", "0", "repeat: need at least 1"),
    ],
)
def test_bad_options_say_what_is_needed(option, value, message):
    result = runner.invoke(app, ["bench", "--device", "cpu", option, value])
    assert message in str(result.exception)


def test_a_recorded_command_has_no_outputs():
    arguments = ["bench", "--json", "/x/a.json", "--report=/x", "--peers", "all", "--report", "/y"]
    assert _command(arguments) == "streamla bench --peers all"


def test_results_say_what_they_are(run):
    document = json.loads((run[0] / "a.json").read_text())
    assert document["schema"] == "streamla-bench/1"
    peer = document["records"][1]
    assert (peer["peer"], peer["cache"], peer["differs"]) == (True, "stored", "gathers the cache")
