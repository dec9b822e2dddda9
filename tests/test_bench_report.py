"""Figures and the page: drawn from any results, complete, and asking for nothing in a real browser."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from streamla.bench import drawing, figures, page, same_work
from streamla.bench.published import mi300x_blog, table
from streamla.bench.records import Record, Results
from streamla.bench.repeat import merged
from streamla.bench.report import same_work_table
from streamla.bench.workloads import make_grid
from streamla.spec import MLASpec

SPEC = MLASpec(16, "fp8_e4m3fn")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
IMPLS = (
    ("sm90", False, None),
    ("flashmla-a8w8", True, "fp8 query"),
    ("fa3-qv", True, "bf16, contiguous"),
)


def records_of(grid, floor=True, ragged=False):
    """What a run might give: made-up times, for the looks alone."""
    records = []
    for number, w in enumerate(make_grid(grid, SPEC)):
        lengths = None
        if ragged:
            lengths = [w.context + i for i in range(w.requests)]
        for i, (impl, peer, differs) in enumerate(IMPLS):
            us = w.bytes / 4e6 * (1.2 + i) + 5 + number % 3
            records.append(
                Record(
                    grid="ragged" if ragged else grid, num_heads=w.spec.num_heads,
                    kv_format=w.spec.kv_format.value, page_size=w.spec.page_size,
                    seqlen_q=w.spec.seqlen_q, context=w.context, requests=w.requests,
                    tokens=w.tokens, cache_seqlens=lengths, bytes=w.bytes, impl=impl, version="1",
                    exact=differs != "fp8 query", peer=peer, differs=differs, read_bytes=w.bytes,
                    us=us, us_p25=us, us_p75=us, floor_us=w.bytes / 4.2e6 if floor else None,
                    x_floor=us / (w.bytes / 4.2e6) if floor else None, gbps=w.bytes / us / 1e3,
                    error=2e-3 * (1 + 10 * i), checked=[0],
                )
            )  # fmt: skip
    return records


def results_of(records):
    state = {"sm_mhz": 1980, "memory_mhz": 3201, "celsius": 40, "watts": 300.0}
    absent = [{"name": "tileops", "reason": "not installed", "install": "pip install tileops"}]
    return Results(
        "streamla bench --peers <all>", "cuda", "a GPU", "2", "3", "0", "2026-01-01", 1, 60 << 20, records,
        {"before": state, "after": {**state, "sm_mhz": 1500}}, [], absent,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "floor"),
    [
        *((g, True) for g in ("blog", "small", "heads", "formats", "pages", "mtp", "ragged")),
        ("blog", False),
    ],
)
def test_every_grid_is_drawn(grid, floor, tmp_path):
    ragged = grid == "ragged"
    drawn = figures.draw(records_of("blog" if ragged else grid, floor, ragged))
    kinds = {d.name.split("-")[1] for d in drawn}
    assert kinds >= {"latency", "accuracy"}
    assert ("floor" in kinds) == (floor and not ragged)
    for d in drawn:
        assert d.name.startswith(grid)
        d.figure.savefig(tmp_path / "x.svg")
        labelled = [t.get_text() for t in d.figure.texts if t.get_text()]
        single = d.figure.axes[0]
        assert len(labelled) + bool(single.get_xlabel()) + bool(single.get_ylabel()) >= 2, d.name


def test_gaps_and_single_shapes_are_drawn():
    records = records_of("blog")
    holes = [replace(r, us=None, x_floor=None) if i % 7 == 0 else r for i, r in enumerate(records)]
    assert figures.draw(holes)
    assert figures.draw(records[:1])
    assert figures.draw([replace(r, us=None) for r in records]) == []


def test_an_implementation_looks_the_same_everywhere_and_unlike_the_others():
    look = drawing.looks([*records_of("blog"), *mi300x_blog()])
    assert next(iter(look)) == "sm90"
    assert look["sm90"].ours
    assert not look["fa3-qv"].ours
    assert len({(x.color, x.marker) for x in look.values()}) == len(look)


def test_the_same_results_give_the_same_svg(tmp_path):
    for name in ("a", "b"):
        drawing.save(figures.draw(records_of("mtp")), tmp_path / name, ["svg"])
    files = sorted((tmp_path / "a").iterdir())
    assert files
    for path in files:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_same_work_groups_equal_tokens():
    spreads = [s for s in same_work.spreads(mi300x_blog()) if s.impl == "aiter, MI300X"]
    group = next(s for s in spreads if s.tokens == 256 * 1024)
    assert (group.fastest, group.slowest) == (190.50, 1356.62)
    assert [r.requests for r in group.records] == [8, 1]
    assert same_work.worst(mi300x_blog())["study, MI300X"] < 1.05
    assert same_work_table(mi300x_blog()).row_count == len(same_work.spreads(mi300x_blog()))
    assert same_work_table(records_of("heads")) is None


def test_the_published_table_is_whole():
    records = table("mi300x-blog")
    assert len(records) == 28
    assert {r.version for r in records} == {"published"}
    with pytest.raises(ValueError, match="mi300x-blog; got 'x'"):
        table("x")


def test_runs_are_merged_into_the_middle_one():
    first = records_of("mtp")
    runs = [[replace(r, us=r.us * f, error=r.error * f) for r in first] for f in (1.2, 1.0, 1.1)]
    for one, base in zip(merged(runs), first, strict=True):
        assert one.us == pytest.approx(1.1 * base.us)
        assert one.us_runs == pytest.approx([1.2 * base.us, base.us, 1.1 * base.us])
        assert one.error == pytest.approx(1.2 * base.error)
    runs[1][0] = replace(runs[1][0], us=None, note="no time: wrong")
    assert merged(runs)[0].note == "no time: wrong"


def test_the_page_says_what_a_reader_must_know(tmp_path):
    records = records_of("blog")
    records[3] = replace(
        records[3], us=None, x_floor=None, note="no time: error 1.0e-01 is 9.0 times its budget"
    )
    *files, written = page.write(results_of(records), tmp_path, mi300x_blog(), ["svg"])
    assert written.name == page.PAGE
    assert sorted(f.name for f in files) == [
        f"blog-{n}.svg" for n in ("accuracy", "floor", "latency", "spread")
    ]
    text = written.read_text()
    for part in ("fp8 query", "pip install tileops", "9.0 times its budget", "sm_mhz moved from 1980 to 1500",
                 "&lt;all&gt;", "aiter, MI300X", "The same work"):  # fmt: skip
        assert part in text
    assert "<all>" not in text
    assert "<script" not in text
    assert (
        page.write(results_of(records), tmp_path / "b", formats=["png"], whole=False)[0].suffix
        == ".png"
    )


def browse(path: Path, folder: Path) -> tuple[str, list[str], list[str]]:
    """Open a file in headless Chromium: its rendered DOM, console errors, and addresses asked for."""
    log = folder / "net.json"
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--enable-logging=stderr", f"--log-net-log={log}",
         f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'page.png'}", "--dump-dom",
         path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    net = json.loads(log.read_text())
    kinds = {number: name for name, number in net["constants"]["logEventTypes"].items()}
    # What Chromium asks for on its own account has no origin; what a page asks for has the page's.
    asked = [
        event["params"]["url"]
        for event in net["events"]
        if kinds[event["type"]] == "URL_REQUEST_START_JOB"
        and event.get("params", {}).get("initiator", "not an origin") != "not an origin"
    ]
    return done.stdout, console, asked


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_renders_in_a_browser_without_errors_or_requests(tmp_path):
    records = [*records_of("blog"), *records_of("heads"), *records_of("blog", ragged=True)]
    written = page.write(results_of(records), tmp_path, mi300x_blog(), ["svg"])[-1]
    dom, console, asked = browse(written, tmp_path)
    assert console == []
    assert asked == []
    assert dom.count("<img") == len(list(tmp_path.glob("*.svg")))
    assert "MLA decode on a GPU" in dom
    assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_browser_test_would_see_an_error_and_a_request(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<script>undefined_function()</script><img src='http://127.0.0.1:9/x.png'>")
    _, console, asked = browse(bad, tmp_path)
    assert any("undefined_function" in line for line in console)
    assert "http://127.0.0.1:9/x.png" in asked
