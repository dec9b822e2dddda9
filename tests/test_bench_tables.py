"""README's tables are those of the committed results, and a plain list of records says how each was made."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from streamla.bench import collect, tables, timing
from streamla.bench.records import Record, Results, save
from streamla.bench.workloads import make_grid
from streamla.cli.app import app
from streamla.spec import MLASpec

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"})


def record(w, impl="sm90", us=10.0, peer=False, **changes):
    fields = dict(
        grid=w.grid, num_heads=w.spec.num_heads, kv_format=w.spec.kv_format.value,
        page_size=w.spec.page_size, seqlen_q=w.spec.seqlen_q, context=w.context,
        requests=w.requests, tokens=w.tokens, cache_seqlens=None, bytes=w.bytes, impl=impl,
        version="1", exact=True, peer=peer, us=us, floor_us=5.0, x_floor=us / 5, error=1e-3,
    )  # fmt: skip
    return Record(**{**fields, **changes})


def results(records, gpu="H200", command="streamla bench"):
    return Results(
        command=command, device="cuda", gpu=gpu, torch="2", triton="3", streamla="1",
        started="now", scaled_down=1, l2_bytes=1, records=records,
    )  # fmt: skip


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", RESULTS / "README.md"], ids=["readme", "h200"]
)
def test_markdown_holds_the_tables_of_the_committed_results(path):
    text = path.read_text()
    assert tables.MARKERS.search(text)
    assert tables.fill(text, collect.load(RESULTS / "attention.json")) == text


def test_the_committed_list_is_that_of_the_committed_runs():
    listed = collect.load(RESULTS / "attention.json")
    times = {(r["command"], r["us"]) for r in listed}
    assert len({r["command"] for r in listed}) > 1
    for path in RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        if isinstance(document, dict) and document.get("schema") == "streamla-bench/1":
            assert {(document["command"], r["us"]) for r in document["records"]} <= times, path


def test_a_list_names_command_and_machine_and_ragged_batches_have_no_context(tmp_path):
    even = record(make_grid("blog", MLASpec(16, "fp8_e4m3fn"))[0])
    uneven = replace(even, grid="ragged", requests=2, cache_seqlens=[5, 32768], tokens=32773)
    save(results([even], command="one"), tmp_path / "a.json")
    save(results([uneven], command="two"), tmp_path / "b.json")
    names = [str(tmp_path / f"{name}.json") for name in ("a", "b", "list")]
    done = runner.invoke(app, ["bench", "collect", *names[:2], "--json", names[2]])
    assert done.exit_code == 0, done.output
    first, second = collect.load(names[2])
    assert (first["command"], first["context"], first["gpu"]) == ("one", 32768, "H200")
    assert (second["command"], second["context"], second["tokens"]) == ("two", None, 32773)
    with pytest.raises(ValueError, match="need runs of one machine"):
        collect.collect([results([even]), results([even], gpu="another")])
    with pytest.raises(ValueError, match="need a JSON list"):
        collect.load(names[0])


def test_tables_are_put_between_their_markers(tmp_path):
    spec = MLASpec(16, "fp8_e4m3fn")
    grid = make_grid("blog", spec)
    records = [record(w, us=7.0) for w in grid]
    records += [record(w, "fa3-qv", 20.0, peer=True, differs="bf16") for w in grid]
    records += [record(w, "tileops", 15.0, peer=True) for w in grid[:3]]
    records += [record(w, "tileops-bf16", 16.0, peer=True) for w in grid]
    collect.save(collect.collect([results(records)]), tmp_path / "list.json")
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- table blog -->\nold\n<!-- end -->\nb\n<!-- table peers -->\n<!-- end -->\n"
    )
    done = runner.invoke(app, ["bench", "tables", str(tmp_path / "list.json"), "--into", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "old" not in text
    assert "| 32K | 7.00 / 5.00 (1.40x) |" in text
    assert "| streamla sm90 1 |  | 7.00 | 7.00 | 7.00 | 1.40x | 1.0e-03 |" in text
    assert "| tileops 1 |  | 15.0 | - | - | 3.00x, 3 shapes | 1.0e-03 |" in text
    assert "tileops-bf16" not in text  # of a library only the fastest
    page.write_text("<!-- table nothing -->\n<!-- end -->\n")
    done = runner.invoke(app, ["bench", "tables", str(tmp_path / "list.json"), "--into", str(page)])
    assert "table: need one of" in str(done.exception)


def test_a_grid_can_be_cut_and_ours_left_out():
    arguments = ["bench", "--device", "cpu", "--grid", "blog"]
    done = runner.invoke(
        app,
        [
            *arguments,
            "--max-tokens",
            "64K",
            "--impl",
            "none",
            "--peers",
            "torch-eager",
            "--json",
            "-",
        ],
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [(r["impl"], r["tokens"]) for r in document["records"]] == [
        ("torch-eager", n // 256) for n in (32768, 65536, 65536)
    ]
    for extra, message in (
        (["--max-tokens", "1K"], "max-tokens: need"),
        (["--impl", "none"], "need something to time"),
    ):
        assert message in str(runner.invoke(app, [*arguments, *extra]).exception)


def test_a_slow_candidate_misses_rounds_evenly(monkeypatch):
    class Event:
        now = 0.0

        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = Event.now

        def elapsed_time(self, other):
            return other.at - self.at

    played = []

    def graph(name, ms):
        def replay():
            played.append(name)
            Event.now += ms

        return timing.Graph(SimpleNamespace(replay=replay), calls=(lambda: None,) * 2)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = timing.time_replays({"fast": graph("fast", 1.0), "slow": graph("slow", 100.0)})
    assert (times["fast"].us, times["slow"].us) == (500.0, 50000.0)
    assert times["slow"].repeats == timing.MIN_SLOW_REPEATS
    assert times["fast"].repeats == timing.MIN_REPEATS
    timed = played[4:]
    places = [i for i, name in enumerate(timed) if name == "slow"]
    assert [i * len(places) // len(timed) for i in places] == [0, 1, 2]
