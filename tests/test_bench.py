"""The benchmark measures what it says: its inputs, its floor, and no time for a wrong answer."""

import gc
import itertools
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from streamla import reference
from streamla.arch import CPU, arch_by_name
from streamla.bench import check, floor, report, same_work, timing, workloads
from streamla.bench.candidates import Prepared
from streamla.bench.compare import compare
from streamla.bench.inputs import COLD_FACTOR, CachePool, num_regions
from streamla.bench.records import Results, dumps, load, save
from streamla.bench.run import roof, run
from streamla.bench.workloads import GRIDS, Workload, make_grid, scaled_down
from streamla.plan import empty_plan
from streamla.spec import KVFormat, MLASpec

DEVICE = torch.device("cpu")
SPEC = MLASpec(4, "fp8_e4m3fn", page_size=16)


class ReferenceCandidate:
    """The CPU implementation without the public API, so that a test can make it wrong."""

    version = "0"
    peer = False
    differs = None
    cache = "stored"
    error_budget = 8e-2

    def __init__(self, name="right", exact=True, spoil=None, refusal=None):
        self.name, self.exact = name, exact
        self.spoil, self.refusal = spoil, refusal
        self.calls = []

    def refuse(self, spec, device):
        return self.refusal

    def prepare(self, inputs):
        spec = inputs.workload.spec
        cost = reference.cost_model(spec, CPU)
        plan = empty_plan(inputs.workload.requests, spec, self.name, cost, DEVICE)
        reference.plan(inputs.cache_seqlens, plan)
        out = torch.empty((*inputs.q.shape[:3], spec.kv_lora_rank), dtype=torch.bfloat16)
        lse = torch.empty(inputs.q.shape[:3])

        def call(region):
            self.calls.append(region)
            reference.decode(
                inputs.q[..., : spec.kv_lora_rank], inputs.q[..., spec.kv_lora_rank :],
                inputs.kv_cache, inputs.k_scale, inputs.page_tables[region], plan,
                out, lse, inputs.softmax_scale, True, 1.0,
            )  # fmt: skip
            if self.spoil:
                self.spoil(out, len(self.calls))

        return Prepared(call, out, programs=8, programs_busy=8, splits=1)


def shape(lengths, spec=SPEC, grid="test"):
    return Workload(grid, spec, tuple(lengths))


def test_blog_grid_is_the_twenty_shapes():
    grid = make_grid("blog", SPEC)
    assert len(grid) == 20
    assert {w.context for w in grid} == {n * 1024 for n in (32, 64, 128, 256)}
    assert {w.requests for w in grid} == {1, 2, 4, 8, 16}
    assert max(w.bytes for w in grid) == 256 * 1024 * 16 * 576


@pytest.mark.parametrize("name", GRIDS)
def test_grids_differ_only_along_their_axis(name):
    grid = make_grid(name, SPEC)
    keys = [(w.spec, w.lengths) for w in grid]
    assert len(set(keys)) == len(keys)
    assert all(w.grid == name for w in grid)


def test_unknown_grid_names_those_there_are():
    with pytest.raises(ValueError, match="blog, heads"):
        make_grid("blogs", SPEC)


def test_scaled_down_keeps_requests():
    (small,) = scaled_down([shape((100, 65, 0))], 64)
    assert small.lengths == (2, 2, 0)


def test_regions_are_colder_than_the_cache():
    l2 = 60 << 20
    for w in make_grid("blog", SPEC) + make_grid("small", SPEC):
        assert num_regions(w, l2) * w.bytes > COLD_FACTOR * l2
    assert num_regions(shape((64,)), 0) == 1


@pytest.mark.parametrize("fmt", list(KVFormat))
def test_regions_are_disjoint_pages_and_the_floor_reads_them(fmt):
    w = shape((33, 0, 16, 1), replace(SPEC, kv_format=fmt))
    pool = CachePool([w, shape((200,), w.spec)], DEVICE, l2_bytes=64 * w.bytes // COLD_FACTOR)
    inputs = pool.inputs(w)
    assert inputs.regions == 65
    needed = inputs.page_tables[:, [0, 0, 0, 2, 3], [0, 1, 2, 0, 0]]
    assert len(needed.unique()) == 65 * 5  # no page twice
    first, last = needed[1].min(), needed[1].max()
    assert last - first == 4  # a region is one contiguous run of pages
    region = inputs.region_words[1]
    start = region.data_ptr() - inputs.kv_cache.data_ptr()
    assert start == int(first) * SPEC.page_size * w.spec.row_bytes
    assert 0 <= region.numel() * 4 - w.bytes < 16
    assert inputs.kv_cache.shape[1:] == (16, w.spec.row_width)
    assert inputs.kv_cache.dtype == fmt.storage_dtype


def test_pool_repeats_its_pattern_to_the_end(monkeypatch):
    from streamla.bench import inputs as inputs_module

    monkeypatch.setattr(inputs_module, "PATTERN_ROWS", 48)
    pool = CachePool([shape((100,))], DEVICE, 0)
    assert torch.equal(pool.rows[:48], pool.rows[48:96])
    assert torch.equal(pool.rows[96:112], pool.rows[:16])


def test_floor_kernel_reads_every_word(device, monkeypatch):
    floor.check(device, units=2)
    monkeypatch.setattr(floor, "read", lambda words, folded: folded.zero_())
    with pytest.raises(RuntimeError, match="the read kernel folded 0x0"):
        floor.check(device, units=2)


def test_sampled_requests_are_extremes_and_middle():
    assert check.sampled_requests((5, 9, 0, 1, 7, 3)) == [0, 1, 3]
    assert check.sampled_requests((4, 4)) == [0, 1]
    assert check.sampled_requests(()) == []


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp8_ds_mla"])
def test_a_right_candidate_is_timed(fmt):
    w = shape((70, 3, 0, 130, 40), replace(SPEC, kv_format=fmt))
    (record,), state = run([w], lambda spec: [ReferenceCandidate()], DEVICE)
    assert state is None
    assert record.note is None
    assert 0 < record.error < 4e-3
    assert record.budget_used < 1
    assert record.checked == [1, 3, 4]
    assert record.us_p25 <= record.us <= record.us_p75
    assert record.floor_us is None  # there is none on a CPU
    assert record.gbps == pytest.approx(w.bytes / record.us / 1e3)
    assert record.cache_seqlens == [70, 3, 0, 130, 40]


def scale_output(out, calls):
    out.mul_(1.05)


def nan_in_a_request_that_is_not_sampled(out, calls):
    out[0] = torch.nan


def wrong_once(out, calls):
    if calls == 5:
        out.mul_(1.05)


def wrong_only_later(out, calls):
    if calls > check.CHECKED_CALLS:
        out.mul_(1.05)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (scale_output, "times its budget"),
        (nan_in_a_request_that_is_not_sampled, "not finite"),
        (wrong_once, "times its budget"),
        (wrong_only_later, "after replay"),
    ],
)
def test_a_wrong_candidate_gets_no_time(spoil, why):
    wrong = ReferenceCandidate("wrong", spoil=spoil)
    records, _ = run(
        [shape((70, 3, 0, 130, 40))], lambda spec: [wrong, ReferenceCandidate()], DEVICE
    )
    by_impl = {r.impl: r for r in records}
    assert by_impl["wrong"].us is None
    assert by_impl["wrong"].x_floor is None
    assert why in by_impl["wrong"].note
    assert by_impl["right"].us > 0


def test_a_candidate_that_rounds_the_query_has_its_own_budget():
    rounded = ReferenceCandidate("rounded", exact=False, spoil=scale_output)
    (record,), _ = run([shape((70,))], lambda spec: [rounded], DEVICE)
    assert record.us is not None
    assert record.error == pytest.approx(0.05, rel=0.1)


def test_a_refusal_is_told_and_nothing_runs():
    refusing = ReferenceCandidate("no", refusal="needs an abacus")
    (record,), _ = run([shape((70,))], lambda spec: [refusing], DEVICE)
    assert record.note == "needs an abacus"
    assert refusing.calls == []
    assert report.notes([record, record]) == ["no: needs an abacus (2 shapes)"]


def test_records_keep_the_order_of_the_workloads():
    formats = ("fp8_e4m3fn", "bf16", "fp8_e4m3fn")
    shapes = [shape((20 + i,), replace(SPEC, kv_format=f)) for i, f in enumerate(formats)]
    records, _ = run(shapes, lambda spec: [ReferenceCandidate()], DEVICE)
    assert [r.context for r in records] == [20, 21, 22]


def results(records):
    return Results(
        "streamla bench", "cpu", None, "2", "3", "0", "2026-01-01", 64, 0, records, None, []
    )


@pytest.fixture(scope="module")
def measured():
    shapes = [shape((64,) * 2), shape((128,)), shape((5, 64))]
    return run(shapes, lambda spec: [ReferenceCandidate()], DEVICE)[0]


def test_json_round_trip(measured, tmp_path):
    save(results(measured), tmp_path / "a" / "b.json")
    assert load(tmp_path / "a" / "b.json") == results(measured)
    assert dumps(results(measured)).count('\n  {"grid"') == 3  # a record a line


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": "streamla-bench/99"}', "{"])
def test_load_refuses_other_documents(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="need"):
        load(path)


def slower(record, factor):
    times = {k: getattr(record, k) * factor for k in ("us", "us_p25", "us_p75")}
    return replace(record, **times)


def test_compare_finds_the_slow_down_and_the_lost(measured):
    steady = [replace(r, us_p25=r.us * 0.99, us_p75=r.us * 1.01) for r in measured]
    after = [slower(steady[0], 1.2), slower(steady[1], 1.01), replace(steady[2], us=None)]
    comparison = compare(results(steady), results(after))
    assert [c.slower(0.05) for c in comparison.changes] == [True, False]
    assert [r.cache_seqlens for r in comparison.lost] == [[5, 64]]
    assert comparison.geomean == pytest.approx((1.2 * 1.01) ** 0.5)


def test_compare_does_not_call_noise_a_slow_down(measured):
    noisy = [replace(r, us_p25=r.us * 0.8, us_p75=r.us * 1.3) for r in measured]
    comparison = compare(results(noisy), results([slower(r, 1.2) for r in noisy]))
    assert not any(c.slower(0.05) for c in comparison.changes)


def test_same_work_spread_compares_equal_bytes_only(measured):
    a, b, c = (replace(r, us=us) for r, us in zip(measured, (10.0, 15.0, 99.0), strict=True))
    assert same_work.worst([a, b, c]) == {a.impl: pytest.approx(1.5)}


def test_median_and_quartiles():
    times = timing.summary([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (times.us, times.us_p25, times.us_p75, times.repeats) == (3.0, 2.0, 4.0, 5)


def test_a_graph_keeps_the_tensors_of_its_calls(monkeypatch):
    """A replay writes to the addresses of the capture: nothing else may have been put there."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    target = torch.zeros(4)
    written = weakref.ref(target)
    graph = timing.capture([partial(target.fill_, 1.0)])
    del target
    gc.collect()
    assert written() is not None
    assert written()[0] == 1.0
    del graph
    gc.collect()
    assert written() is None


def test_drift_is_a_warning():
    before = timing.GPUState(1980, 3201, 40, 300.0)
    assert timing.drift(before, replace(before, celsius=70)) is None
    assert "sm_mhz moved from 1980 to 1500" in timing.drift(before, replace(before, sm_mhz=1500))
    assert timing.drift(None, before) is None


def test_roof_is_compute_for_many_heads():
    h200 = arch_by_name("h200")
    assert roof(shape((1024,), MLASpec(16, "fp8_e4m3fn")), h200) == "memory"
    assert roof(shape((1024,), MLASpec(128, "fp8_e4m3fn")), h200) == "compute"
    assert roof(shape((1024,)), CPU) is None


def test_workload_text():
    assert shape((131072,) * 16, MLASpec(16)).label == "128K x 16, 16 heads, bf16"
    assert workloads.tokens_text(777) == "777"


def test_replays_are_mixed_and_none_follows_itself():
    counts = {"floor": 11, "ours": 11, "slow": 3}
    order = timing._mixed_rounds(counts)
    assert {name: order.count(name) for name in counts} == counts
    assert all(a != b for a, b in itertools.pairwise(order))
    followed_by = {after for before, after in itertools.pairwise(order) if before == "floor"}
    assert followed_by == {"ours", "slow"}
    assert order == timing._mixed_rounds(counts)
    assert timing._mixed_rounds({"alone": 3}) == ["alone"] * 3
