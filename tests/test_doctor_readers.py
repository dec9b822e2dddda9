"""Every format is read, and what cannot be read is one clear line."""

import gzip
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_traces import A16W8, H200, Builder, write_large

from streamla.doctor.events import DoctorError
from streamla.doctor.readers import open_trace

pytest.importorskip("ijson")

DATA = Path(__file__).parent / "data" / "doctor"


@pytest.fixture
def nsys_sqlite(tmp_path):
    path = tmp_path / "report1.sqlite"
    db = sqlite3.connect(path)
    db.executescript((DATA / "nsys.sql").read_text())
    db.commit()
    db.close()
    return path


# file: format, kernels, timed, GPU, units
FORMATS = {
    "rocprofv3_kernel_trace.csv": ("rocprofv3 csv", 95, True, "AMD Instinct MI300X", 304),
    "rocprofv3_results.json": ("rocprofv3 json", 57, True, "AMD Instinct MI300X", 304),
    "rocprofv3_kernel_stats.csv": ("rocprof stats csv", 3, False, "AMD Instinct MI300X", 304),
    "rocprof_results.csv": ("rocprof csv", 19, True, None, None),
    "nsys_cuda_gpu_trace.csv": ("nsys gpu trace csv", 85, True, "NVIDIA H200", None),
    "nsys_cuda_gpu_kern_sum.csv": ("nsys kernel summary csv", 3, False, None, None),
    "study_mi300x.json.gz": ("chrome trace", 180, True, "AMD Instinct MI300X", 304),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    trace = open_trace(DATA / name)
    assert (trace.format, len(trace), trace.timed, trace.gpu_name, trace.units) == FORMATS[name]


def test_nsys_sqlite(nsys_sqlite):
    trace = open_trace(nsys_sqlite)
    assert (trace.format, len(trace), trace.gpu_name, trace.units) == (
        "nsys sqlite",
        84,
        "NVIDIA H200",
        132,
    )
    event = trace[4]
    assert "flash_fwd_splitkv_mla_kernel" in event.name
    assert (event.grid, event.block, event.dur_ns, event.stream) == (
        (1, 1, 132),
        (256, 1, 1),
        122430,
        7,
    )
    assert trace.launches()[event.correlation] == event.start_ns - 6000
    assert trace.marks[0].name == "execute_context_0(0)_generation_4(4)"


def test_nsys_sqlite_without_kernels_says_how_to_get_them(tmp_path):
    path = tmp_path / "g.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT)")
    db.commit()
    db.close()
    with pytest.raises(DoctorError, match="--cuda-graph-trace=node"):
        open_trace(path)


def test_rocm_grids_are_work_items():
    csv = next(e for e in open_trace(DATA / "rocprofv3_kernel_trace.csv") if e.name == A16W8)
    js = next(e for e in open_trace(DATA / "rocprofv3_results.json") if e.name == A16W8)
    v1 = next(e for e in open_trace(DATA / "rocprof_results.csv") if e.name.startswith(A16W8))
    assert csv.grid == js.grid == v1.grid == (16, 1, 1)
    assert csv.dur_ns == js.dur_ns == v1.dur_ns


def test_counters():
    rocprof = open_trace(DATA / "rocprofv3_counter_collection.csv").counters
    assert len(rocprof) == 4
    assert rocprof[0].counters["FETCH_SIZE"] == pytest.approx(1190e6 / 1024)
    assert (rocprof[0].dur_ns, rocprof[0].grid) == (890290, (304, 1, 1))
    for name in ("ncu_details.csv", "ncu_raw.csv"):
        a, b = open_trace(DATA / name).counters
        assert a.counters["dram__bytes_read.sum"] == pytest.approx(302.51e6)
        assert (a.dur_ns, b.dur_ns) == (pytest.approx(451400), pytest.approx(122400))
    assert open_trace(DATA / "rocprof_results.csv").counters[3].counters == {"FETCH_SIZE": 147456.0}


def test_gzip_and_a_bare_array(tmp_path):
    b = Builder()
    b.layer()
    (tmp_path / "bare.json.gz").write_bytes(gzip.compress(json.dumps(b.events).encode()))
    assert len(open_trace(tmp_path / "bare.json.gz")) == 5


def test_a_missing_grid_is_unknown_not_zero(tmp_path):
    b = Builder()
    b.kernel(A16W8, 5.0)
    b.kernel(A16W8, 5.0, grid=(0, 0, 0))
    b.kernel(A16W8, 5.0, grid=(16, 1, 1))
    events = list(open_trace(b.write(tmp_path / "t.json")))
    assert [e.grid for e in events] == [None, None, (16, 1, 1)]
    assert [e.programs for e in events] == [None, None, 16]


def test_events_without_the_one_or_the_other_link(tmp_path):
    b = Builder()
    b.layer()
    del b.events[0]["args"]["correlation"]
    b.events[1]["args"]["External id"] = 4
    assert len(open_trace(b.write(tmp_path / "t.json"))) == 5


def test_progress_reaches_the_end():
    seen = []
    open_trace(DATA / "rocprofv3_results.json", lambda at, size: seen.append((at, size)))
    assert seen[-1][0] == seen[-1][1] > 0


def _cut(name):
    data = (DATA / name).read_bytes()
    return data[: len(data) * 2 // 3]


def _sqlite_cut(tmp_path):
    path = tmp_path / "x.sqlite"
    db = sqlite3.connect(path)
    db.executescript((DATA / "nsys.sql").read_text())
    db.commit()
    db.close()
    return path.read_bytes()[:9000]


BAD = {
    "empty": (lambda t: b"", "is empty"),
    "blank": (lambda t: b" \n\n", "is empty"),
    "prose": (lambda t: b"hello, I am not a trace\n" * 9, "no known format"),
    "binary": (lambda t: bytes(range(128, 256)) * 99, "not text"),
    "json of something else": (lambda t: b'{"a": [1, 2, 3]}', "no traceEvents"),
    "no kernels": (lambda t: b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 2}]}', "no GPU kernels"),
    "kernel without time": (lambda t: b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "x"}]}', "no usable name, ts or dur"),
    "cut json": (lambda t: _cut("rocprofv3_results.json"), "cut off"),
    "cut chrome": (lambda t: gzip.decompress((DATA / "study_mi300x.json.gz").read_bytes())[:9000], "cut off"),
    "cut gzip": (lambda t: _cut("study_mi300x.json.gz"), "gzip stream is damaged or cut off"),
    "damaged json": (lambda t: b'{"traceEvents": [{"ph": "X" "cat"}]}', "damaged"),
    "cut sqlite": (_sqlite_cut, "SQLite"),
    "sqlite of something else": (lambda t: b"SQLite format 3\x00" + b"\x00" * 4000, "SQLite"),
    "damaged csv row": (lambda t: (DATA / "rocprofv3_kernel_trace.csv").read_bytes().replace(b"1000004700", b"x"), "row 3"),
    "header only": (lambda t: (DATA / "rocprofv3_kernel_trace.csv").read_bytes().split(b"\n")[0] + b"\n", "no GPU kernels"),
    "ncu header only": (lambda t: (DATA / "ncu_raw.csv").read_bytes().split(b"\n")[0] + b"\n", "without a single kernel"),
    "rocprof json of another layout": (lambda t: b'{"rocprofiler-sdk-tool": [{"kernel_symbols": [{"kernel_id": 1}], "buffer_records": {"kernel_dispatch": [{}]}}]}', "lacks"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line(what, tmp_path):
    make, message = BAD[what]
    path = tmp_path / "trace"
    path.write_bytes(make(tmp_path))
    with pytest.raises(DoctorError, match=message) as error:
        open_trace(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_missing_and_directory(tmp_path):
    with pytest.raises(DoctorError, match="No such file"):
        open_trace(tmp_path / "nothing.json")
    with pytest.raises(DoctorError, match="directory"):
        open_trace(tmp_path)


@pytest.mark.slow
def test_a_large_trace_fits_in_little_memory(tmp_path):
    """150 MB in under 200 MB, the interpreter included: memory follows the kernels."""
    path = tmp_path / "large.json"
    kernels = write_large(path, 150 << 20)
    code = (
        "import sys; from streamla.doctor.readers import open_trace;"
        "from streamla.doctor.analyze import analyze; from streamla.doctor.workload import Workload, find_gpu;"
        "t = open_trace(sys.argv[1]); r = analyze(t, find_gpu(None, t), Workload(heads=16));"
        # Not ru_maxrss: that starts from the size of the process that forked.
        "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'));"
        "print(len(t), r.timeline.layers_per_step, peak)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    shutil.rmtree(tmp_path)
    found, layers, peak_kb = map(int, out.stdout.split())
    assert (found, layers) == (kernels, 61)
    assert peak_kb < 200 << 10


def test_unit_of_the_gpu(tmp_path):
    trace = open_trace((lambda b: (b.layer(), b.write(tmp_path / "t.json"))[1])(Builder(H200)))
    assert (trace.gpu_name, trace.units) == ("NVIDIA H200", 132)
