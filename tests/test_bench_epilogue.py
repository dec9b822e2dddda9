"""The epilogue's benchmark and the picture of the window around it, as far as they need no GPU."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from streamla.bench.epilogue import FORMATS, EpilogueRecord, Tensors, shapes
from streamla.bench.peers import vllm_epilogue
from streamla.cli.app import app

hopper = importlib.import_module("streamla.kernels.sm90.epilogue")
CPU = torch.device("cpu")
SPAN = {"name": "producer", "begin": -4.0, "released": -4.0, "end": 0.0}
READ = {"name": "attention", "begin": 1.0, "released": 1.5, "end": None}
DOCUMENT = {
    "requests": 8, "context": 4096, "num_heads": 16,
    "lanes": [
        {"name": "torch", "window_us": 40.0, "launches": 9, "spans": [SPAN, READ | {"begin": 39.0, "released": 40.0}]},
        {"name": "fused", "window_us": 1.5, "launches": 2, "spans": [SPAN, READ]},
    ],
}  # fmt: skip


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_vllm_is_absent_with_a_reason(tmp_path):
    assert "no path was given" in (vllm_epilogue.load(None) or "")
    (tmp_path / "other.so").write_bytes(b"no library")
    assert "does not load" in (vllm_epilogue.load(tmp_path / "other.so") or "")


@pytest.mark.parametrize("rope", [None, "interleaved"])
@pytest.mark.parametrize(("kv_format", "q_format"), FORMATS)
def test_plain_torch_does_the_same_work(kv_format, q_format, rope):
    record = EpilogueRecord(5, 3, kv_format.value, q_format.value, rope, "reference")
    tensors = Tensors(record, CPU, 0)
    tensors.wipe()
    tensors.plain_torch()
    plain = tensors.written()
    tensors.wipe()
    tensors.ours("reference")
    same = (plain == tensors.written()).float().mean()
    assert same == 1 if rope is None or kv_format.value == "bf16" else same > 0.95


def test_shapes_are_every_combination():
    found = shapes((1, 2), (8,), (None, "neox"), CPU, "reference")
    assert len(found) == len(set(found)) == 2 * 2 * len(FORMATS)


def test_threads_get_more_pieces_as_an_sm_gets_more_programs():
    chosen = [hopper.choose_pieces(n * 16, n, 132) for n in (1, 16, 32, 64, 128, 4096)]
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (1, 4)
    assert hopper.programs(17, 5, 1) == (2, 5)


def test_the_timeline_is_drawn_from_its_lanes(tmp_path):
    source, target = tmp_path / "lanes.json", tmp_path / "deep" / "lanes.svg"
    source.write_text(json.dumps(DOCUMENT))
    result = run("timeline", "--from", str(source), "--svg", str(target))
    assert result.exit_code == 0, result.output
    assert "1.50 us  fused (2 launches)" in result.output
    first = target.read_text()
    assert "<svg" in first
    run("timeline", "--from", str(source), "--svg", str(target))
    assert target.read_text() == first


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_timed():
    result = run("epilogue")
    assert isinstance(result.exception, ValueError)
    assert "there is none" in str(result.exception)


COMMITTED = Path(__file__).parents[1] / "benchmarks" / "results" / "h200" / "epilogue.json"


@pytest.mark.skipif(not COMMITTED.exists(), reason="nothing is committed")
def test_committed_records_are_read():
    document = json.loads(COMMITTED.read_text())
    for record in document["records"]:
        assert EpilogueRecord(**record).us
