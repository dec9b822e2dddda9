"""Peers are found or reported absent, are called as their libraries want it, and may fail alone."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from streamla.arch import CPU
from streamla.bench import peers, timing
from streamla.bench import run as bench_run
from streamla.bench.candidates import Prepared, first_line
from streamla.bench.check import Oracle
from streamla.bench.inputs import CachePool
from streamla.bench.peers.base import Peer
from streamla.bench.peers.fa3 import FA3
from streamla.bench.peers.flashinfer import FlashInfer
from streamla.bench.peers.flashmla import FlashMLABF16, FlashMLAQuantised, TokenspeedFlashMLA
from streamla.bench.peers.tileops import TileOPs
from streamla.bench.peers.torch_baseline import TorchEager, TorchSDPA
from streamla.bench.peers.vllm_triton import VLLMTriton
from streamla.bench.run import run
from streamla.bench.workloads import Workload
from streamla.spec import MLASpec

DEVICE = torch.device("cpu")
SPEC = MLASpec(4, "fp8_e4m3fn", page_size=64)
LENGTHS = (70, 3, 130, 64)
L2_BYTES = 20_000  # so that there are several regions


def attend(q, kv, seen, scale):
    """q (batch, rows, 576), kv (batch, tokens, 576), seen (batch, rows, tokens) -> (batch, rows, 512)."""
    scores = (q.float() @ kv.float().mT) * scale
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ kv[..., :512].float()).bfloat16()


def paged(q, cache, table, seqlens, scale, causal=True):
    """q (batch, queries, heads, 576) over cache (pages, page, 576), as every library does it."""
    batch, queries, heads, _ = q.shape
    kv = cache[table.long()].flatten(1, 2)
    last = seqlens[:, None] - (queries - 1 - torch.arange(queries)) * int(causal)
    seen = torch.arange(kv.shape[1]) < last[..., None]
    out = attend(q.flatten(1, 2), kv, seen.repeat_interleave(heads, 1), scale)
    return out.view(batch, queries, heads, 512)


def stored(cache, scale):
    """fp8 as float32."""
    return cache.float() * (scale if scale is not None else 1.0)


class FakeFlashMLA:
    """flash_mla of sgl-flash-mla: only what its interface has."""

    def get_mla_metadata(self):
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def get_mla_decoding_metadata(
        self, seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None,
        use_legacy=False,
    ):  # fmt: skip
        assert use_legacy
        assert h_k == 1
        return seqlens_k, num_q_tokens_per_head_k

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
        num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None,
        use_legacy=False, descale_q=None, descale_k=None,
    ):  # fmt: skip
        assert use_legacy
        assert k_cache.shape[1:] == (64, 1, 576)
        if is_fp8_kvcache:
            assert q.dtype == k_cache.dtype == torch.float8_e4m3fn
            assert tile_scheduler_metadata.tile_scheduler_metadata is cache_seqlens
            assert tile_scheduler_metadata.num_splits == q.shape[1] * q.shape[2]
            q = stored(q, descale_q)
            k_cache = stored(k_cache, descale_k)
        else:
            assert q.dtype == k_cache.dtype == torch.bfloat16
        cache = k_cache.squeeze(2)
        return paged(q, cache, block_table, cache_seqlens, softmax_scale, causal), None


class FakeTokenspeed(FakeFlashMLA):
    get_mla_decoding_metadata = None

    def flash_mla_with_kvcache(self, *args, **options):
        return FakeFlashMLA.flash_mla_with_kvcache(
            self, *args, **options, is_fp8_kvcache=False, use_legacy=True
        )


class FakeFA3:
    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, qv=None, cache_seqlens=None, softmax_scale=None, causal=False,
        num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert q.shape[-1] == k_cache.shape[-1] == 64
        assert qv.shape[-1] == v_cache.shape[-1] == 512
        assert causal
        assert return_softmax_lse
        cache = torch.cat((v_cache, k_cache), -1).squeeze(2)
        alone = torch.arange(len(q), dtype=torch.int32)[:, None]  # one long page a request
        out = paged(torch.cat((qv, q), -1), cache, alone, cache_seqlens, softmax_scale)
        return out, None, None, None


class FakeFlashInfer:
    def __init__(self):
        self.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=self.Wrapper)

    class Wrapper:
        def __init__(self, workspace, backend):
            assert backend in ("fa2", "fa3")

        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
            head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
        ):  # fmt: skip
            assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, True)
            assert q_data_type == torch.bfloat16
            self.planned = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, sm_scale, kv_data_type)

        def run(self, q_nope, q_pe, ckv, kpe, ckv_scale=None, kpe_scale=None):
            q_indptr, kv_indptr, indices, lengths, scale, dtype = self.planned
            assert ckv.dtype == dtype
            assert ckv_scale is None or isinstance(ckv_scale, float)
            q = torch.cat((q_nope, q_pe), -1)
            cache = torch.cat((stored(ckv, ckv_scale), stored(kpe, kpe_scale)), -1)
            outs = []
            for b, length in enumerate(lengths.tolist()):
                table = indices[kv_indptr[b] : kv_indptr[b + 1]][None]
                rows = q[q_indptr[b] : q_indptr[b + 1]][None]
                outs.append(paged(rows, cache, table, torch.tensor([length]), scale)[0])
            return torch.cat(outs)


class FakeTileOPs:
    def MLAPagedFwdOp(self, kv_lora_rank, is_causal=False, sm_scale=None):
        assert (kv_lora_rank, is_causal) == (512, True)

        def op(q, kv_cache, block_table, cache_seqlens, kv_scale=None):
            assert (kv_scale is None) == (kv_cache.dtype == q.dtype)
            cache = stored(kv_cache, kv_scale)
            return paged(q, cache, block_table, cache_seqlens, sm_scale), None

        return op


class FakeVLLM:
    def decode_attention_fwd(
        self, q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits,
        sm_scale, page_size=1, logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False,
    ):  # fmt: skip
        assert num_kv_splits == attn_logits.shape[2]
        assert k_buffer.shape[1:] == (page_size, 1, 576)
        assert is_mla
        cache = stored(k_buffer.squeeze(2), k_scale)
        o.copy_(paged(q[:, None], cache, req_to_token, b_seq_len, sm_scale).squeeze(1))


def inputs_of(spec=SPEC, lengths=LENGTHS):
    workload = Workload("test", spec, lengths)
    return CachePool([workload], DEVICE, L2_BYTES).inputs(workload)


@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "bf16"])
@pytest.mark.parametrize("seqlen_q", [1, 2])
@pytest.mark.parametrize(
    ("peer", "library"),
    [
        (FlashMLABF16(), FakeFlashMLA),
        (FlashMLAQuantised(), FakeFlashMLA),
        (TokenspeedFlashMLA(), FakeTokenspeed),
        (FA3(), FakeFA3),
        (FlashInfer("fa3", "stored"), FakeFlashInfer),
        (FlashInfer("fa2", "bf16"), FakeFlashInfer),
        (TileOPs("stored"), FakeTileOPs),
        (TileOPs("bf16"), FakeTileOPs),
        (VLLMTriton(), FakeVLLM),
        (TorchEager(), None),
        (TorchSDPA(), None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_peer_is_called_as_its_library_wants_it(peer, library, seqlen_q, fmt):
    spec = replace(SPEC, seqlen_q=seqlen_q, kv_format=fmt)
    peer.library = library() if library else None
    refusal = peer.refuse(spec, torch.device("cuda"))
    if refusal:
        assert "needs" in refusal
        return
    inputs = inputs_of(spec)
    assert inputs.regions > 1
    prepared = peer.prepare(inputs)
    if prepared.plan:
        prepared.plan()
    checked = Oracle(inputs).check_calls(
        prepared, inputs.regions - 1, None if peer.exact else peer.error_budget
    )
    assert checked.budget_used <= 1, checked
    assert peer.exact or checked.error > 2.2e-3  # what is called rounded does round


def test_bf16_rows_are_the_stored_values():
    inputs = inputs_of()
    real = inputs.pool.rows.view(torch.float8_e4m3fn).float() * inputs.k_scale
    assert torch.equal(inputs.pool.bf16_rows.float(), real)


def test_absent_peers_are_named_with_the_line_that_installs_them():
    found, absent = peers.find(["flashinfer-fa3", "torch-sdpa"])
    assert [p.name for p in found] == ["torch-sdpa"]
    assert found[0].version == torch.__version__
    assert [(a.name, a.reason) for a in absent] == [("flashinfer-fa3", "not installed")]
    assert absent[0].install.startswith("pip install")
    assert peers.find(["none"]) == ([], [])
    assert len({p.name for p in peers.PEERS}) == len(peers.PEERS)
    assert sum(map(len, peers.find(["all"]))) == len(peers.PEERS)


def test_an_unknown_peer_names_those_there_are():
    with pytest.raises(ValueError, match=r"flashmla-a8w8.*got 'flashmla'"):
        peers.find(["flashmla"])


def test_a_library_that_does_not_load_is_absent(tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("raise OSError('undefined symbol: x\\nsecond line')")
    (tmp_path / "poor_peer.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    for module, reason in (("broken_peer", "does not load: OSError: undefined symbol: x"),
                           ("poor_peer", "needs no_such_module")):  # fmt: skip
        peer = FA3()
        monkeypatch.setattr(FA3, "modules", (module,))
        assert peer.load() == reason
        sys.modules.pop(module, None)


class Failing(Peer):
    name, version = "failing", "0"

    def __init__(self, where):
        super().__init__()
        self.where = where

    def refuse(self, spec, device):
        return None

    def prepare(self, inputs):
        def call(region):
            raise RuntimeError("no kernel image\nand more")

        if self.where == "prepare":
            call(0)
        return Prepared(call, inputs.q.new_empty(1))


@pytest.mark.parametrize("where", ["prepare", "call"])
def test_a_failing_peer_fails_alone(where):
    shapes = [Workload("test", SPEC, (64,)), Workload("test", SPEC, (128,))]
    records, _ = run(shapes, lambda spec: [TorchSDPA(), Failing(where)], DEVICE)
    assert [r.us is not None for r in records] == [True, False] * 2
    assert records[1].note == "no time: RuntimeError: no kernel image"
    assert all(r.peer for r in records)


def test_our_own_failure_is_raised():
    ours = Failing("call")
    ours.peer = False
    with pytest.raises(RuntimeError, match="no kernel image"):
        run([Workload("test", SPEC, (64,))], lambda spec: [ours], DEVICE)


def test_a_reason_is_one_line():
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(ValueError()) == "ValueError: "


class FakeGraph:
    """Stands in for a CUDA graph: it runs its calls as they were captured."""

    def __init__(self, calls):
        self.calls = calls
        self.replay()

    def replay(self):
        for call in self.calls:
            call()


class FailingInCapture(TorchSDPA):
    name = "failing-in-capture"
    capturing = False

    def attend(self, *args):
        if FailingInCapture.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().attend(*args)


@pytest.fixture
def without_a_gpu(monkeypatch):
    """The GPU's way through a run, with what needs one replaced."""

    def capture(calls):
        FailingInCapture.capturing = True
        try:
            return FakeGraph(calls)
        finally:
            FailingInCapture.capturing = False

    def replays(graphs, repeats=None):
        return {name: timing.Times(10.0 + len(name), 9.0, 20.0, 11) for name in graphs}

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "time_replays", replays)
    monkeypatch.setattr(timing, "time_eager", lambda calls: timing.Times(50.0, 50.0, 50.0, 5))
    monkeypatch.setattr(bench_run, "_floor_calls", lambda inputs, arch, device: [lambda: None])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("without_a_gpu")
def test_a_gpu_run_times_floor_graphs_eager_plan_and_energy(monkeypatch):
    readings = iter(range(0, 10**9, 500))
    monkeypatch.setattr(timing, "_ask_nvml", lambda device, question: next(readings))
    monkeypatch.setattr(timing, "ENERGY_SECONDS", 1e-4)
    inputs = inputs_of()
    planned = FlashMLABF16()
    planned.library, planned.version = FakeFlashMLA(), "1"
    monkeypatch.setattr(planned, "refuse", lambda spec, device: None)
    candidates = [TorchSDPA(), planned, FailingInCapture()]
    entries = [
        bench_run.Entry(c, bench_run._empty_record(c, inputs.workload, CPU)) for c in candidates
    ]
    oracle = Oracle(inputs)
    for entry in entries:
        bench_run._check(entry, inputs, oracle, DEVICE)
    bench_run._time_on_gpu(entries, inputs, oracle, CPU, DEVICE, energy=True)
    plain, flashmla, failing = (entry.record for entry in entries)
    assert plain.us == 10 + len("torch-sdpa")
    assert plain.floor_us == 10 + len("floor")
    assert plain.x_floor == plain.us / plain.floor_us
    assert (plain.us_eager, plain.plan_us) == (50.0, None)
    assert plain.joules_per_mtoken > 0
    assert flashmla.plan_us is not None
    assert flashmla.read_bytes == 2 * flashmla.bytes
    assert flashmla.gbps == pytest.approx(flashmla.read_bytes / flashmla.us / 1e3)
    assert failing.us is None
    assert "not permitted when stream is capturing" in failing.note


def test_energy_is_none_without_a_counter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.joules(FakeGraph([lambda: None]), 1e5, DEVICE) is None


def test_a_lost_gpu_ends_the_run_and_keeps_what_there_is(monkeypatch):
    def raise_lost(self, action, needed=True):
        if len(done) > 1:
            raise bench_run.DeviceLost("failing: AcceleratorError: illegal memory access")
        done.append(1)
        return action()

    done = []
    monkeypatch.setattr(bench_run.Entry, "attempt", raise_lost)
    shapes = [Workload("test", SPEC, (64 + i,)) for i in range(4)]
    records, state = run(shapes, lambda spec: [TorchSDPA()], DEVICE)
    assert [r.us is not None for r in records] == [True, True, False]
    assert state is None
    assert bench_run.lost(records)
    assert "illegal memory access" in records[-1].note
