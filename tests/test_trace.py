"""The server model: who decodes when, and the batches that are taken from it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamla.bench.trace import Request, admit, occupancy, ragged, read_trace, replay
from streamla.spec import MLASpec

KIMI = Path(__file__).parents[2] / "shared" / "data" / "kimi_conversation_trace.jsonl"


def write_trace(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp, input_length, output_length, **others):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        **others,
    }


def test_reads_by_arrival_and_ignores_other_fields(tmp_path):
    rows = [row(200, 7, 2), row(100, 5, 1, hash_ids=[0, 1])]
    path = write_trace(tmp_path / "trace.jsonl", rows)
    assert read_trace(path) == [Request(100, 5, 1), Request(200, 7, 2)]


@pytest.mark.parametrize("line", ["{}", "[1]", "not json", '{"timestamp": 0, "input_length": "x"}'])
def test_names_the_line_that_is_wrong(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row(0, 1, 1)) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


def test_refuses_negative_lengths(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [row(0, 1, -1)])
    with pytest.raises(ValueError, match="lengths >= 0"):
        read_trace(path)


def test_admits_in_order_into_the_first_free_slot():
    requests = [Request(0, 10, 5), Request(0, 20, 2), Request(0, 30, 3), Request(100, 40, 1)]
    spans = [(a.begin, a.end) for a in admit(requests, slots=2, step_ms=10)]
    # The third waits for the second's slot; the last finds one free when it comes.
    assert spans == [(0, 5), (0, 2), (2, 5), (10, 11)]


def test_a_request_is_longer_by_one_token_each_step():
    (admitted,) = admit([Request(25, 10, 3)], slots=1, step_ms=10)
    assert admitted.begin == 3
    assert [admitted.length(step) for step in range(admitted.begin, admitted.end)] == [11, 12, 13]


def test_nothing_to_generate_takes_no_slot():
    assert admit([Request(0, 10, 0)], slots=1, step_ms=10) == []


requests_lists = st.lists(
    st.builds(Request, st.integers(0, 5000), st.integers(0, 1000), st.integers(0, 50)),
    min_size=1,
    max_size=60,
).map(lambda rs: sorted(rs, key=lambda r: r.arrival))


@settings(deadline=None, max_examples=60)
@given(requests_lists, st.integers(1, 8))
def test_no_more_than_the_slots_are_held_and_nobody_overtakes(requests, slots):
    admitted = admit(requests, slots, step_ms=10)
    assert all(held <= slots for _, _, held in occupancy(admitted))
    assert all(a.begin <= b.begin for a, b in pairwise(admitted))
    assert all(a.begin * 10 >= a.request.arrival for a in admitted)
    assert sum(a.end - a.begin for a in admitted) == sum(r.output_length for r in requests)


def test_slow_arrivals_are_replayed_faster_until_the_slots_are_full():
    requests = [Request(1000 * i, 100, 10) for i in range(64)]  # 10 steps of work a second
    assert replay(requests, 1, step_ms=100).speedup == 1
    result = replay(requests, 4, samples=5, step_ms=10)
    assert result.speedup == 64
    assert result.full_share >= 0.5
    assert [len(batch) for batch in result.batches] == [4] * 5
    assert all(101 <= n <= 110 for batch in result.batches for n in batch)


def test_too_few_requests_is_said():
    with pytest.raises(ValueError, match="at least 3 requests"):
        replay([Request(0, 1, 1)] * 2, 3)


def test_workloads_carry_the_batches(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [row(0, 100 * i, 20) for i in range(12)])
    workloads, traffic = ragged(path, MLASpec(16), [2, 3], samples=4)
    assert [w.requests for w in workloads] == [2] * 4 + [3] * 4
    assert [t["concurrency"] for t in traffic] == [2, 3]
    assert traffic[0]["trace"] == "trace.jsonl"


@pytest.mark.skipif(not KIMI.exists(), reason="Kimi's trace is not beside the checkout")
@pytest.mark.parametrize("concurrency", [1, 64])
def test_kimi_trace(concurrency):
    requests = read_trace(KIMI)
    assert len(requests) == 12031
    result = replay(requests, concurrency)
    assert {len(batch) for batch in result.batches} == {concurrency}
    longest = max(r.input_length + r.output_length for r in requests)
    assert all(1 <= n <= longest for batch in result.batches for n in batch)
