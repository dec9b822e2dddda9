"""Findings: the sentence, its arithmetic, and silence where nothing is known."""

from pathlib import Path

import pytest
from doctor_traces import A16W8, EPILOGUE, GEMM, H200, LAYER, MI300X, NORM, REDUCE, Builder

from streamla.doctor import diff
from streamla.doctor.analyze import analyze, as_json
from streamla.doctor.counters import read_bytes
from streamla.doctor.events import CounterSample, DoctorError
from streamla.doctor.readers import open_trace
from streamla.doctor.stats import stable
from streamla.doctor.workload import Workload, find_gpu, workload_of_mark

pytest.importorskip("ijson")

DATA = Path(__file__).parent / "data" / "doctor"
FLASHMLA = "flash_fwd_splitkv_mla_kernel"
TRITON = "_fwd_grouped_kernel_stage1"


def report(path, gpu=None, layers=None, **workload):
    trace = open_trace(path)
    return analyze(trace, find_gpu(gpu, trace), Workload(**workload), layers)


def finding(r, kind):
    found = [f for f in r.findings if f.id == kind]
    return found[0] if found else None


def test_the_study_comes_out():
    """16 heads, one query row, bf16 query over an fp8 cache, on one MI300X, graph-launched."""
    r = report(DATA / "study_mi300x.json.gz", heads=16, kv="fp8")
    padding = finding(r, "padding")
    assert padding.waste == 0.75
    assert padding.sentence.startswith("75% of every matrix multiply is padding")
    assert "16 heads x 4 query rows = 64 rows" in padding.arithmetic
    parallel = finding(r, "parallelism")
    assert parallel.sentence.startswith("At most 16 of 304 CUs have work")
    assert parallel.waste == pytest.approx(1 - 16 / 304)
    assert "16x the tokens take 1.31x the time" in finding(r, "longest").sentence
    # The device events of HIP carry no grid: said, not taken for 0 or 100 %.
    assert any("no grid" in n for n in r.notes)


def test_the_grid_says_16_of_304():
    r = report(DATA / "rocprofv3_results.json", heads=16)
    assert "16 of 304 CUs" in finding(r, "parallelism").sentence
    assert finding(r, "padding").waste == 0.75


def test_nothing_is_said_without_facts():
    r = report(DATA / "rocprof_results.csv")
    assert {f.id for f in r.findings} <= {"amdahl"}
    assert any("--gpu" in n for n in r.notes)
    assert any("--heads" in n for n in r.notes)


def test_a_grid_that_fills_the_gpu_is_no_finding(tmp_path):
    b = Builder(H200)
    for _ in range(4):
        b.layer(((NORM, 4.0), (FLASHMLA, 50.0)), grid=(1, 1, 132))
    assert finding(report(b.write(tmp_path / "t.json"), heads=64), "parallelism") is None


def test_same_name_other_grid(tmp_path):
    """The grid of Triton's kernels tells requests, head groups and splits."""
    b = Builder(H200)
    for splits in (1, 32):
        for _ in range(4):
            b.kernel(TRITON, 80.0, grid=(8, 1, splits))
    r = report(b.write(tmp_path / "t.json"), heads=16)
    assert [g.programs for g in r.groups] == [8, 256]
    assert (
        "8 requests x 1 head group x 1 split = 8 programs" in finding(r, "parallelism").arithmetic
    )


def test_bandwidth(tmp_path):
    b = Builder(H200)
    for _ in range(4):
        b.kernel(FLASHMLA, 400.0, grid=(1, 1, 132))
    path = b.write(tmp_path / "t.json")
    found = finding(report(path, requests=16, context=131072, kv="fp8"), "bandwidth")
    floor_us = 16 * 131072 * 576 / 4.66e12 * 1e6
    assert found.waste == pytest.approx(1 - floor_us / 400)
    assert "1208.0 MB" in found.arithmetic
    assert (
        finding(report(path, requests=16, context=262144, kv="fp8"), "bandwidth").waste is None
    )  # faster than memory
    assert (
        finding(report(path, requests=16, context=131072), "bandwidth") is None
    )  # a cache of unknown dtype


def test_preparing_kernels(tmp_path):
    quantise = "void vllm::scaled_fp8_quant_kernel_strided<c10::BFloat16>(int)"
    b = Builder(H200)
    for _ in range(4):
        b.layer(
            ((GEMM, 9.0), ("CatArrayBatchedCopy", 3.0), (quantise, 4.0), (FLASHMLA, 43.0)),
            grid=(1, 1, 132),
        )
    r = report(b.write(tmp_path / "t.json"))
    assert finding(r, "preparing").waste == pytest.approx(7 / 50)
    assert "the query is prepared" in finding(r, "preparing").sentence
    b = Builder(H200)
    for _ in range(4):
        b.layer(((GEMM, 9.0), ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)", 300.0),
                 (FLASHMLA, 160.0)), grid=(1, 1, 132))  # fmt: skip
    assert (
        "a whole cache is converted"
        in finding(report(b.write(tmp_path / "u.json")), "preparing").sentence
    )


def test_what_comes_before_the_projection_is_not_attentions(tmp_path):
    b = Builder(H200)
    for _ in range(4):
        b.layer((("CatArrayBatchedCopy", 30.0), (GEMM, 9.0), (FLASHMLA, 43.0)), grid=(1, 1, 132))
    assert finding(report(b.write(tmp_path / "t.json")), "preparing") is None


def test_merge_and_gap(tmp_path):
    b = Builder(H200)
    for _ in range(4):
        b.kernel(GEMM, 9.0)
        b.kernel(FLASHMLA, 20.0, grid=(1, 1, 132), gap=15.0)
        b.kernel("flash_fwd_mla_combine_kernel", 10.0)
    r = report(b.write(tmp_path / "t.json"))
    assert finding(r, "merge").waste == pytest.approx(1 / 3)
    assert finding(r, "gap").waste == pytest.approx(15 / 45)
    assert GEMM.split("<")[0] in finding(r, "gap").arithmetic


def steps(b, number, layers, sampler=400.0, **k):
    for _ in range(number):
        for _ in range(layers):
            b.layer(**k)
        b.kernel("argmax_kernel", sampler)


def test_steps_by_gaps_and_amdahl(tmp_path):
    b = Builder(H200)
    steps(b, 4, 5)
    r = report(b.write(tmp_path / "t.json"))
    assert [len(s.layers) for s in r.timeline.steps] == [5, 5, 5, 5]
    span = 5 * (sum(us for _, us in LAYER) + 2.5) + 400.5
    share = 5 * 106 / span
    assert finding(r, "amdahl").sentence.startswith(f"Attention is {share:.0%} of a step")
    assert r.times[0].token.median == pytest.approx(span * 1e3)
    assert r.times[0].layers[2].window.median == pytest.approx(
        13.5e3
    )  # end of the norm to attention
    assert r.times[0].layers[2].epilogue.median == pytest.approx(3e3)


def test_a_graph_without_any_host_operator(tmp_path):
    """All kernels of a step hang under one graph launch."""
    b = Builder(H200)
    for step in range(40):
        for _ in range(61):
            b.layer(correlation=1000 + step)
    r = report(b.write(tmp_path / "t.json"))
    assert (len(r.timeline.steps), r.timeline.layers_per_step, r.complete) == (40, 61, True)


@pytest.mark.parametrize("layers", [61, None])
def test_missing_layers_are_said_not_averaged(tmp_path, layers):
    """53 attention kernels where 61 caches were written."""
    b = Builder(H200)
    for i in range(61):
        b.layer(LAYER if i >= 8 else LAYER[:3])
    r = report(b.write(tmp_path / "t.json"), layers=layers, heads=16)
    assert not r.complete
    assert "53 of 61" in r.timeline.incomplete
    assert r.timeline.whole_steps == []
    assert finding(r, "amdahl") is None
    assert as_json(r)["complete"] is False


def test_a_window_that_cuts_the_first_step_is_said_to(tmp_path):
    b = Builder(H200)
    steps(b, 1, 3)
    steps(b, 4, 5)
    r = report(b.write(tmp_path / "t.json"))
    assert "window cuts" in r.timeline.incomplete
    assert len(r.timeline.whole_steps) == 4


def test_annotations_give_steps_and_workloads(tmp_path):
    b = Builder(MI300X)
    for requests in (1, 8, 1, 8):
        start = b.now
        for _ in range(2):
            b.kernel(A16W8, 185.0 if requests == 1 else 190.0)
        b.mark(f"decode requests={requests} context=32768 heads=16 kv=fp8", start)
    r = report(b.write(tmp_path / "t.json"))
    assert [s.workload.requests for s in r.timeline.steps] == [1, 8, 1, 8]
    assert finding(r, "longest").waste == pytest.approx(1 - 190 / 185 / 8)
    assert "At most 16 of 304" in finding(r, "parallelism").sentence


def test_one_long_request_among_short_ones(tmp_path):
    b = Builder(H200)
    for us, longest in ((100.0, 32768), (250.0, 131072)):
        start = b.now
        for _ in range(4):
            b.kernel(TRITON, us, grid=(8, 1, 8))
        b.mark(f"decode requests=8 context=32768 longest={longest}", start)
    r = report(b.write(tmp_path / "t.json"))
    assert "1 - 32768/131072 = 75%" in finding(r, "imbalance").arithmetic
    found = finding(r, "longest")
    assert found.waste == pytest.approx(1 - 100 / 250)
    assert "as many tokens take 2.50x the time" in found.sentence


def test_host_annotations_hold_the_launch_not_the_kernel(tmp_path):
    b = Builder(H200)
    for i in range(3):
        for _ in range(2):
            b.layer(correlation=50 + i)
        b.events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 10.0 * i, "dur": 2.0,
                         "args": {"correlation": 50 + i}})  # fmt: skip
        b.events.append({"ph": "X", "cat": "user_annotation", "ts": 10.0 * i - 1, "dur": 5.0,
                         "name": f"execute_context_0(0)_generation_{i + 1}({i + 1})"})  # fmt: skip
    r = report(b.write(tmp_path / "t.json"))
    assert [s.workload.requests for s in r.timeline.steps] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "decode step requests=8 context=32768 heads=16 kv=fp8 q=bf16",
            Workload(16, 1, 8, 32768, q="bf16", kv="fp8"),
        ),
        ("execute_context_0(0)_generation_12(12)", Workload(requests=12)),
        ("step[DECODE bs=4]", Workload(requests=4)),
        ("ProfilerStep#3", None),
        ("requests=two", None),
        ("requests=4 kv=int3", None),
    ],
)
def test_marks(text, expected):
    assert workload_of_mark(text) == expected


def test_counters_compare_two_kernels():
    r = report(DATA / "rocprofv3_counter_collection.csv", requests=16, context=131072)
    assert (
        finding(r, "comparison").sentence
        == "The same 1.19 GB in, 2.4x the time: the gap is compute, not traffic."
    )
    assert "0.99x the bytes that must move" in finding(r, "traffic").sentence


def test_requests_of_the_memory_make_bytes():
    """gfx942: 32, 64 or 128 bytes a request; without all three counters nothing is said."""
    requests = {"TCC_EA0_RDREQ_sum": 100.0, "TCC_EA0_RDREQ_32B_sum": 10.0, "TCC_BUBBLE_sum": 60.0}
    assert read_bytes(CounterSample("k", requests)) == 32 * 10 + 128 * 60 + 64 * 30
    del requests["TCC_BUBBLE_sum"]
    assert read_bytes(CounterSample("k", requests)) is None


def test_traffic_that_explains_the_gap(tmp_path):
    text = (DATA / "ncu_raw.csv").read_text().replace('"302.51","451.4"', '"1210.04","451.4"')
    (tmp_path / "n.csv").write_text(text)
    assert "traffic is all of the gap" in finding(report(tmp_path / "n.csv"), "comparison").sentence


def test_summary_without_times():
    r = report(
        DATA / "nsys_cuda_gpu_kern_sum.csv", gpu="h200", heads=16, requests=4, context=131072
    )
    assert r.timeline is None
    assert finding(r, "padding").waste == 0.75
    assert finding(r, "bandwidth").waste == pytest.approx(1 - 64.8 / 126.53, abs=1e-3)


def test_no_attention_is_said(tmp_path):
    b = Builder(H200)
    b.kernel(GEMM, 5.0)
    b.kernel("flash_fwd_kernel", 5.0)
    r = report(b.write(tmp_path / "t.json"))
    assert not r.findings
    assert "no MLA decode attention kernel" in r.notes[0]


def test_unknown_parts_of_a_name_are_said(tmp_path):
    b = Builder(MI300X)
    b.kernel(A16W8 + "_wizard7", 5.0)
    assert any("not understood: wizard7" in n for n in report(b.write(tmp_path / "t.json")).notes)


def test_stable_median():
    assert stable([900, 100, 101, 99, 100, 5000]).median == 100  # warm-up and outlier dropped
    assert (
        stable([900, 100, 101, 99, 100, 5000]).used,
        stable([900, 100, 101, 99, 100, 5000]).dropped,
    ) == (4, 2)
    assert stable([3, 1, 2]).median == 2
    assert stable([]) is None


def test_diff(tmp_path):
    a, b = Builder(H200), Builder(H200)
    faster = ((NORM, 4.0), (GEMM, 9.0), (EPILOGUE, 1.0), (A16W8, 47.0), (REDUCE, 6.0))
    steps(a, 5, 3)
    for _ in range(5):
        for _ in range(3):
            b.layer(faster)
        b.kernel("argmax_kernel", 400.0)
    d = diff.diff(report(a.write(tmp_path / "a.json")), report(b.write(tmp_path / "b.json")))
    assert d.attention_ratio == pytest.approx(2.0)
    lines = {x.what: x for x in d.lines}
    assert lines["layer 1 epilogue"].ratio == pytest.approx(3.0)
    assert lines["layer 1 window"].b.median == pytest.approx(11.5e3)
    assert lines["token"].ratio > 1
    assert len([x for x in d.lines if x.what.endswith("attention")]) == 3


def test_diff_of_counters_and_of_what_does_not_compare(tmp_path):
    counted = report(DATA / "ncu_raw.csv")
    assert "compute, not traffic" in diff.diff(counted, counted).findings[0].sentence
    with pytest.raises(DoctorError, match="diff needs"):
        diff.diff(
            report(DATA / "nsys_cuda_gpu_kern_sum.csv"), report(DATA / "nsys_cuda_gpu_trace.csv")
        )


def test_the_busiest_gpu_is_reported(tmp_path):
    b = Builder(H200)
    for _ in range(4):
        b.kernel(FLASHMLA, 20.0, grid=(1, 1, 132))
        b.kernel(FLASHMLA, 30.0, grid=(1, 1, 132))
        b.events[-1]["args"]["device"] = 1
    r = report(b.write(tmp_path / "t.json"))
    assert (r.timeline.device, r.groups[0].launches) == ("1", 4)
    assert any("2 GPUs" in n for n in r.notes)
