"""Traces recorded on an H200 (tests/data/doctor/README.md): the findings, checked by hand once, stay."""

from pathlib import Path

import pytest

from streamla.doctor import diff
from streamla.doctor.analyze import analyze
from streamla.doctor.readers import open_trace
from streamla.doctor.workload import Workload, find_gpu

pytest.importorskip("ijson")

DATA = Path(__file__).parent / "data" / "doctor" / "h200"

# trace: family, query x cache, rows of the tile, persistent, grids, findings that must be there, and must not
GOLDEN = {
    "streamla-portable-graph": ("streamla-portable", None, None, True, {(132, 1, 1)}, set(), {"padding", "merge", "preparing", "longest", "gap"}),
    "streamla-sm90-graph": ("streamla-sm90", "bf16", None, True, {(132, 1, 1)}, set(), {"padding", "merge", "preparing", "longest", "gap"}),
    "flashmla-bf16-graph": ("flashmla", "bf16", 64, True, {(1, 1, 132)}, {"padding", "merge"}, {"parallelism", "longest", "query-quantised", "gap"}),
    "flashmla-a8w8-graph": ("flashmla", "fp8", 64, True, {(1, 1, 132)}, {"padding", "merge", "preparing", "query-quantised"}, {"parallelism", "longest", "gap"}),
    "fa3-bf16-graph": ("fa3", "bf16", 64, True, {(132, 1, 1)}, {"padding", "merge"}, {"parallelism", "longest", "preparing", "gap"}),
    "fa3-converted-graph": ("fa3", "bf16", 64, True, {(132, 1, 1)}, {"padding", "preparing"}, {"parallelism", "longest", "gap"}),
    "sglang-triton-graph": ("triton-mla", None, 16, False, {(1, 1, 8), (8, 1, 8)}, {"parallelism", "longest"}, {"padding", "merge", "gap"}),
    "streamla-portable-eager": ("streamla-portable", None, None, True, {(132, 1, 1)}, {"gap"}, {"padding", "longest"}),
    "flashmla-a8w8-eager": ("flashmla", "fp8", 64, True, {(1, 1, 132)}, {"padding", "gap", "query-quantised"}, {"parallelism"}),
    "fa3-converted-eager": ("fa3", "bf16", 64, True, {(132, 1, 1)}, {"padding", "gap", "preparing"}, {"parallelism"}),
    "sglang-triton-eager": ("triton-mla", None, 16, False, {(1, 1, 8), (8, 1, 8)}, {"parallelism", "longest"}, {"padding", "merge"}),
}  # fmt: skip


def report(name):
    trace = open_trace(DATA / f"{name}.json.gz")
    return analyze(trace, find_gpu(None, trace), Workload())


def finding(r, kind):
    return next(f for f in r.findings if f.id == kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_findings(name):
    family, q, rows, persistent, grids, there, absent = GOLDEN[name]
    r = report(name)
    assert (r.gpu.arch.name, r.gpu.units, r.complete) == ("h200", 132, True)
    assert (len(r.timeline.steps), r.timeline.layers_per_step) == (16, 3)
    assert {g.grid for g in r.groups} == grids
    for g in r.groups:
        assert (g.kernel.family, g.kernel.q_dtype, g.kernel.tile_rows, g.kernel.persistent) == (
            family,
            q,
            rows,
            persistent,
        )
        assert g.kernel.unknown == ()
        assert (g.launches, g.workload.heads) == (12, 16)
    ids = {f.id for f in r.findings}
    assert there | {"bandwidth", "amdahl"} <= ids
    assert not absent & ids


@pytest.mark.parametrize("name", [n for n in GOLDEN if GOLDEN[n][2] == 64])
def test_padding_is_three_quarters(name):
    assert finding(report(name), "padding").waste == 0.75


def test_triton_runs_on_8_of_132():
    r = report("sglang-triton-graph")
    assert "8 of 132 SMs" in finding(r, "parallelism").sentence
    assert (
        "1 request x 1 head group x 8 splits = 8 programs" in finding(r, "parallelism").arithmetic
    )
    assert "follows the longest request" in finding(r, "longest").sentence
    assert "75% of the programs' time" in finding(r, "imbalance").sentence


def test_the_pool_is_converted():
    found = finding(report("fa3-converted-graph"), "preparing")
    assert "a whole cache is converted" in found.sentence
    assert found.waste > 0.9


def test_merges_by_few_programs():
    assert "merge (grid (1, 1, 2))" in finding(report("flashmla-bf16-graph"), "merge").arithmetic
    assert "merge (grid (2, 4, 1))" in finding(report("fa3-bf16-graph"), "merge").arithmetic


def test_same_kernels_eager_and_graph():
    """A graph removes gaps, not attention's own time."""
    d = diff.diff(report("flashmla-a8w8-eager"), report("flashmla-a8w8-graph"))
    assert d.attention_ratio == pytest.approx(1.0, abs=0.05)
    assert all(x.ratio > 2 for x in d.lines if x.what.endswith("token"))


def test_counters_tell_compute_from_traffic():
    r = analyze(open_trace(DATA / "ncu.csv"), None, Workload(requests=8, context=32768, kv="fp8"))
    assert (
        finding(r, "comparison").sentence
        == "The same 0.15 GB in, 6.5x the time: the gap is compute, not traffic."
    )
    assert all(
        "1.00x the bytes that must move" in f.sentence for f in r.findings if f.id == "traffic"
    )
