"""NVRTC, its disk cache and the driver. Everything but the marked tests runs without a GPU."""

import hashlib
import subprocess
import sys
import threading

import pytest
import torch

from streamla.runtime import cache
from streamla.runtime.driver import F32, I32, I64, PTR, DriverError, Kernel, cuda_driver
from streamla.runtime.nvrtc import CompileError, compile_cuda

SOURCE = """
#include "scale.cuh"
extern "C" __global__ void scale(float* x, int n, long long offset, float factor) {
  extern __shared__ float shared[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  shared[LAST_WORD] = 0.0f;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (i < n) x[offset + i] = scaled(x[offset + i], factor);
}
"""
HEADER = "__device__ float scaled(float x, float factor) { return x * factor; }\n"
PARAMS = (PTR, I32, I64, F32)

NEEDS_NVRTC = pytest.mark.skipif(
    sys.platform != "linux", reason="the dev extra brings NVRTC on Linux only"
)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    """Each test has a cache of its own."""
    directory = tmp_path / "cache"
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(directory))
    return directory


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cuh").write_text(HEADER)
    path = folder / "scale.cu"
    path.write_text(SOURCE)
    return path


def entries(directory):
    return sorted(p.name for p in directory.iterdir()) if directory.exists() else []


# --- cache


def test_cache_builds_once():
    calls = []
    for _ in range(2):
        assert cache.get_or_build("key", lambda: calls.append(1) or b"payload") == b"payload"
    assert len(calls) == 1


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda entry: entry[:-1], id="truncated"),
        pytest.param(lambda entry: entry[:-1] + b"X", id="flipped"),
        pytest.param(lambda entry: b"", id="empty"),
        pytest.param(lambda entry: entry + b"tail", id="extended"),
    ],
)
def test_damaged_entry_is_rebuilt(cache_dir, damage):
    cache.get_or_build("key", lambda: b"payload")
    path = cache_dir / "key"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get_or_build("key", lambda: b"payload") == b"payload"
    assert path.read_bytes() == hashlib.sha256(b"payload").digest() + b"payload"


def test_unusable_directory_costs_only_time(tmp_path, monkeypatch):
    # A file where the directory should be stops root too, which a permission would not.
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(blocker / "below"))
    assert cache.get_or_build("key", lambda: b"payload") == b"payload"


def test_no_home_is_no_cache(monkeypatch):
    for name in (cache.CACHE_VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert cache.cache_dir() is None
    assert cache.get_or_build("key", lambda: b"payload") == b"payload"


def test_parts_of_a_key_do_not_run_together():
    assert cache.cache_key(["ab", "c"]) != cache.cache_key(["a", "bc"])


def test_many_processes_share_a_cache(cache_dir):
    """Readers beside writers: whoever finds an entry finds a whole one."""
    program = (
        "import hashlib, os\n"
        "from streamla.runtime import cache\n"
        "payload = b'p' * 300_000\n"
        "for turn in range(100):\n"
        "    assert cache.get_or_build('key', lambda: payload) == payload\n"
        "    cache._write(cache.cache_dir() / 'key', payload)\n"
        "    entry = (cache.cache_dir() / 'key').read_bytes()\n"
        "    assert hashlib.sha256(entry[32:]).digest() == entry[:32]\n"
    )
    workers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    assert entries(cache_dir) == ["key"], "temporary files were left behind"


# --- nvrtc


@NEEDS_NVRTC
def test_compiles_without_a_gpu_and_hits_the_cache(source, cache_dir, monkeypatch):
    cubin = compile_cuda(source, defines={"LAST_WORD": 0})
    assert cubin[:4] == b"\x7fELF"
    assert b"scale" in cubin
    assert len(entries(cache_dir)) == 1

    monkeypatch.setattr("streamla.runtime.nvrtc._compile", lambda *_: pytest.fail("compiled again"))
    assert compile_cuda(source, defines={"LAST_WORD": 0}) == cubin


@NEEDS_NVRTC
def test_everything_that_decides_the_cubin_is_in_the_key(source, cache_dir):
    def compiled(**how):
        compile_cuda(source, **({"defines": {"LAST_WORD": 0}} | how))
        return len(entries(cache_dir))

    assert compiled() == 1
    assert compiled(defines={"LAST_WORD": 1}) == 2
    assert compiled(target="sm_90") == 3
    assert compiled(options=["-lineinfo"]) == 4
    (source.parent / "scale.cuh").write_text(HEADER + "// changed\n")
    assert compiled() == 5
    source.write_text(SOURCE + "// changed\n")
    assert compiled() == 6
    # Seen or not, a header of the folder counts: what is unused today is included tomorrow.
    (source.parent / "other.cuh").write_text("")
    assert compiled() == 7
    assert compiled() == 7


@NEEDS_NVRTC
def test_compile_error_carries_the_log(source, cache_dir):
    (source.parent / "scale.cuh").write_text("__device__ float scaled(float x) { return y; }\n")
    with pytest.raises(CompileError, match=r'scale.cu did not compile.*\n.*"y" is undefined'):
        compile_cuda(source, defines={"LAST_WORD": 0})
    assert entries(cache_dir) == []


@NEEDS_NVRTC
@NEEDS_NVRTC
def test_a_build_for_racecheck_is_another_one(source, cache_dir, monkeypatch):
    """What racecheck cannot follow is built so that it can, and not taken from the cache of plain builds."""
    source.write_text("#if STREAMLA_RACECHECK\n#error seen\n#endif\n")
    compile_cuda(source)
    monkeypatch.setenv("STREAMLA_RACECHECK", "1")
    with pytest.raises(CompileError, match="seen"):
        compile_cuda(source)


def test_only_the_folder_is_searched(source, tmp_path, monkeypatch):
    (tmp_path / "stray.cuh").write_text("")
    monkeypatch.chdir(tmp_path)
    source.write_text('#include "stray.cuh"\n')
    with pytest.raises(CompileError, match="could not open source file"):
        compile_cuda(source)


def test_missing_source_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nothing.cu"):
        compile_cuda(tmp_path / "nothing.cu")


# --- driver


def test_arguments_are_laid_out_as_the_kernel_reads_them():
    kernel = Kernel(b"", "k", (I32, PTR, I32, F32, I64, I32, I64), threads=32)
    base = kernel._pointers[0]
    assert [p - base for p in kernel._pointers] == [0, 8, 16, 20, 24, 32, 40]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 1, 2), "scale: need 4 arguments; got 3"),
        ((0, 1, 2, 3.0, 4), "scale: need 4 arguments; got 5"),
        ((0.5, 1, 2, 3.0), "scale: argument 0: need a pointer .int.; got 0.5"),
        ((None, 1, 2, 3.0), "scale: argument 0: need a pointer .int.; got None"),
        ((torch.zeros(1, dtype=torch.int32), 1, 2, 3.0), "argument 0: .*; got a tensor"),
        ((0, 2**31, 2, 3.0), "scale: argument 1: need int32; got 2147483648"),
        ((0, 1, 2**63, 3.0), "scale: argument 2: need int64"),
        ((0, 1, 2, "3"), "scale: argument 3: need float; got '3'"),
    ],
)
def test_wrong_arguments_are_named(args, message):
    kernel = Kernel(b"", "scale", PARAMS, threads=32)
    with pytest.raises(TypeError, match=message):
        kernel._check(args)


def has_driver():
    try:
        cuda_driver()
    except DriverError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda kernel: kernel.launch(1, 0, 1, 2, 3.0), id="launch"),
        pytest.param(lambda kernel: kernel.load(), id="load"),
        pytest.param(lambda kernel: kernel.resident_programs(), id="resident_programs"),
    ],
)
def test_without_a_driver_the_error_says_so(use):
    with pytest.raises(DriverError, match=r"need an NVIDIA driver|package cuda-bindings"):
        use(Kernel(b"", "scale", PARAMS, threads=32))


def test_import_loads_no_cuda():
    program = (
        "import sys, torch\n"  # torch may look for cuda-bindings itself
        "before = set(sys.modules)\n"
        "import streamla.runtime.driver, streamla.runtime.nvrtc, streamla.runtime.cache\n"
        "new = set(sys.modules) - before\n"
        "assert not [m for m in new if m.split('.')[0] in ('cuda', 'triton')], new\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- on a GPU


def gpu_kernel(source, **how):
    how = {"threads": 128, "shared_bytes": 100 << 10} | how
    defines = {"LAST_WORD": how["shared_bytes"] // 4 - 1}
    return Kernel(lambda: compile_cuda(source, defines=defines), "scale", PARAMS, **how)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how",
    [{}, {"pdl": True}, {"cooperative": True}, {"cluster": 2}, {"cluster": 16, "threads": 32}],
    ids=str,
)
def test_launch(source, how):
    kernel = gpu_kernel(source, **how)
    x = torch.ones(4096, device="cuda")
    programs = 16
    n = programs * kernel.threads
    for _ in range(3):
        kernel.launch(programs, x.data_ptr(), n, 8, 2.0)
    expected = torch.ones(4096)
    expected[8 : 8 + n] = 8.0
    torch.testing.assert_close(x.cpu(), expected, rtol=0, atol=0)
    kernel.launch(0, x.data_ptr(), n, 8, 2.0)
    torch.testing.assert_close(x.cpu(), expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_launch_follows_the_current_stream(source):
    kernel = gpu_kernel(source)
    x = torch.ones(1024, device="cuda")
    # Loading a kernel, ours or torch's, may wait for the whole device.
    kernel.load()
    assert x.sum().item() == 1024
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        kernel.launch(8, x.data_ptr(), 1024, 0, 2.0)
    assert x.sum().item() == 1024, "the launch did not wait behind the side stream's work"
    side.synchronize()
    assert x.sum().item() == 2048


@pytest.mark.gpu
def test_launch_from_a_thread_that_never_used_the_gpu(source):
    kernel = gpu_kernel(source)
    x = torch.ones(1024, device="cuda")
    failures = []

    def work():
        try:
            for _ in range(100):
                kernel.launch(8, x.data_ptr(), 1024, 0, 1.0)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not failures


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_replays_and_refuses_to_load(source):
    kernel = gpu_kernel(source, pdl=True)
    x = torch.ones(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"streamla.warmup"), torch.cuda.graph(graph):
        kernel.launch(8, x.data_ptr(), 1024, 0, 2.0)

    kernel.load()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(8, x.data_ptr(), 1024, 0, 2.0)
        kernel.launch(8, x.data_ptr(), 1024, 0, 2.0)
    graph.replay()
    assert x.sum().item() == 4096


@pytest.mark.gpu
def test_refusals_on_the_device(source):
    too_large = gpu_kernel(source, cooperative=True)
    resident = too_large.resident_programs()
    units = torch.cuda.get_device_properties(0).multi_processor_count
    assert resident == 2 * units, "100 KB of shared memory: two programs a unit"
    x = torch.ones(1024, device="cuda")
    too_large.launch(resident, x.data_ptr(), 1024, 0, 1.0)
    with pytest.raises(DriverError, match=r"launch of scale.*COOPERATIVE_LAUNCH_TOO_LARGE"):
        too_large.launch(resident + 1, x.data_ptr(), 1024, 0, 1.0)
    with pytest.raises(DriverError, match="MAX_DYNAMIC_SHARED_SIZE_BYTES = 307200"):
        gpu_kernel(source, shared_bytes=300 << 10).load()
    clusters = gpu_kernel(source, cluster=4).resident_programs()
    assert clusters % 4 == 0
    assert 0 < clusters <= resident


@pytest.mark.gpu
def test_other_device(source):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = gpu_kernel(source)
    for device in (0, 1):
        x = torch.ones(1024, device=f"cuda:{device}")
        kernel.launch(8, x.data_ptr(), 1024, 0, 2.0, device=device)
        assert x.sum().item() == 2048
