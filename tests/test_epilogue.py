"""The epilogue: bit for bit, at the public boundary and as an operator."""

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import streamla
from streamla import KVFormat, MLASpec, ops, reference
from streamla.formats import to_fp8
from streamla.runtime import capture
from streamla.testing.epilogue import EPILOGUE, assert_equal
from streamla.testing.epilogue_build import EpilogueCase, build
from streamla.testing.interpreter import is_interpreted
from streamla.testing.verify import why_skipped

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ON_GPU = ("portable", "sm90")
hopper = importlib.import_module("streamla.kernels.sm90.epilogue")
ON_CPU = [i for i in EPILOGUE if not i.case.gpu]
SMALL = EpilogueCase(
    "", "", (4,), num_heads=3, page_size=4, kv_lora_rank=32, qk_rope_head_dim=16, k_scale=0.37,
    slots="all", values="normal",
)  # fmt: skip


@pytest.mark.parametrize("impl", ["reference", "portable"])
@pytest.mark.parametrize("invariant", ON_CPU, ids=lambda i: i.name)
def test_epilogue_on_cpu(invariant, impl, seed):
    case = invariant.case.narrow() if impl == "portable" else invariant.case
    if (reason := why_skipped(case, impl, CPU)) is not None:
        pytest.skip(reason)
    invariant.check(case, impl, CPU, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ON_GPU)
@pytest.mark.parametrize("invariant", EPILOGUE, ids=lambda i: i.name)
def test_epilogue_on_gpu(invariant, impl, seed):
    if (reason := why_skipped(invariant.case, impl, GPU)) is not None:
        pytest.skip(reason)
    invariant.check(invariant.case, impl, GPU, seed)


@pytest.fixture(params=["reference", "portable"])
def impl(request) -> str:
    """Those that run on the CPU."""
    if request.param == "portable" and not is_interpreted(CPU):
        pytest.skip("needs Triton's interpreter")
    return request.param


# --- the public boundary


def arguments(**options):
    inputs = build(dataclasses.replace(SMALL, **options), CPU, 0)
    names = ("q_nope", "q_pe", "kv_c", "k_pe", "kv_cache", "slot_mapping", "spec")
    return {name: getattr(inputs, name) for name in names} | inputs.options


def with_value(tensor, index, value):
    changed = tensor.clone()
    changed[index] = value
    return changed


WRONG = [
    ("q_nope", lambda a: a["q_nope"][0], ValueError, r"q_nope: need shape \(tokens, 3, 32\)"),
    ("q_nope", lambda a: a["q_nope"][:, :2], ValueError, r"q_nope: need shape \(4, 3, 32\)"),
    ("q_nope", lambda a: a["q_nope"].float(), TypeError, "q_nope: need torch.bfloat16"),
    ("q_pe", lambda a: a["q_pe"][:3], ValueError, r"q_pe: need shape \(4, 3, 16\); got \(3, 3, 16\)"),
    ("kv_c", lambda a: a["kv_c"][:3], ValueError, r"kv_c: need shape \(4, 32\); got \(3, 32\)"),
    ("k_pe", lambda a: a["k_pe"][:, None], ValueError, r"k_pe: need shape \(4, 16\)"),
    ("k_pe", lambda a: a["k_pe"].T.contiguous().T, ValueError, "k_pe: need a contiguous last"),
    ("kv_cache", lambda a: a["kv_cache"][..., :32], ValueError, "kv_cache: need shape"),
    ("kv_cache", lambda a: a["kv_cache"].float(), TypeError, "kv_cache: need torch.float8_e4m3fn"),
    ("kv_cache", lambda a: a["kv_cache"][:1].expand(3, -1, -1), ValueError, "memory of its own"),
    ("slot_mapping", lambda a: a["slot_mapping"].int(), TypeError, "slot_mapping: need torch.int64"),
    ("slot_mapping", lambda a: torch.arange(5), ValueError, r"4 tokens, or fewer.*got shape \(5,\)"),
    ("slot_mapping", lambda a: with_value(a["slot_mapping"], 2, 1000), ValueError, "slots below 12 .*1000 for token 2"),
    ("slot_mapping", lambda a: torch.tensor([3, 1, -1, 3]), ValueError, r"every slot once; got 3 for tokens \[0, 3\]"),
    ("spec", lambda a: "fp8_e4m3fn", TypeError, "spec: need an MLASpec"),
    ("positions", lambda a: None, ValueError, "positions: need positions, cos_sin and rope"),
    ("positions", lambda a: a["positions"][:3], ValueError, r"positions: need shape \(4,\)"),
    ("positions", lambda a: a["positions"].int(), TypeError, "positions: need torch.int64"),
    ("positions", lambda a: with_value(a["positions"], 1, 4096), ValueError, r"positions: need \[0, 4096\).*token 1"),
    ("positions", lambda a: with_value(a["positions"], 0, -1), ValueError, "got -1 for token 0"),
    ("cos_sin", lambda a: None, ValueError, "cos_sin: need positions, cos_sin and rope"),
    ("cos_sin", lambda a: a["cos_sin"][:, :8], ValueError, r"cos_sin: need shape \(4096, 16\)"),
    ("cos_sin", lambda a: a["cos_sin"].bfloat16(), TypeError, "cos_sin: need torch.float32"),
    ("cos_sin", lambda a: a["cos_sin"][:0], ValueError, "cos_sin: need at least one row"),
    ("rope", lambda a: None, ValueError, "rope: need positions, cos_sin and rope"),
    ("rope", lambda a: "gptj", ValueError, "rope: need 'interleaved', 'neox' or None; got 'gptj'"),
    ("k_scale", lambda a: torch.ones(2), ValueError, "k_scale: need one element"),
    ("k_scale", lambda a: torch.ones(1).double(), TypeError, "k_scale: need torch.float32"),
    ("k_scale", lambda a: 0.5, TypeError, "k_scale: need a float32 tensor; got float"),
    ("q_scale", lambda a: torch.ones(1), ValueError, "q_scale: a bf16 query has no scale"),
    ("q_format", lambda a: "fp8", ValueError, "q_format: need one of bf16, fp8_e4m3fn, fp8_e4m3fnuz"),
    ("q_format", lambda a: "fp8_ds_mla", ValueError, "q_format: need one of"),
    ("q_out", lambda a: torch.empty(3, 3, 48).bfloat16(), ValueError, "q_out: need at least 4 rows"),
    ("q_out", lambda a: torch.empty(4, 3, 48), TypeError, "q_out: need torch.bfloat16"),
    ("q_out", lambda a: torch.empty(1, 3, 48).bfloat16().expand(4, -1, -1), ValueError, "q_out: need every"),
    ("reserved_slot", lambda a: -1, ValueError, "reserved_slot: need an int >= 0"),
    ("inputs_ready", lambda a: None, TypeError, "inputs_ready: need a bool; got NoneType"),
    ("impl", lambda a: "sm90", ValueError, "needs sm_90a"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)]
)
def test_wrong_input_is_named_and_nothing_is_written(name, wrong, error, message):
    given = arguments()
    before = given["kv_cache"].view(torch.uint8).clone()
    q_out = torch.zeros(4, 3, 48, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        streamla.epilogue(**{"q_out": q_out, **given, name: wrong(given)})
    assert torch.equal(given["kv_cache"].view(torch.uint8), before)
    assert not q_out.any()


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_ds_mla"])
def test_formats_without_a_scale_refuse_one(kv_format):
    given = arguments(kv_format=kv_format, kv_lora_rank=128)
    with pytest.raises(ValueError, match=f"k_scale: a {kv_format} cache has no scale"):
        streamla.epilogue(**given | {"k_scale": torch.ones(1)})


def test_drafts_past_the_last_position(impl):
    """Tokens without a slot may lie past the table: nothing is read there, and they change no other."""
    given = arguments()
    table = torch.full((4098, 16), torch.nan)
    table[1:4097] = given["cos_sin"]
    given["cos_sin"] = table[1:4097]
    given["positions"] = torch.tensor([4094, 4095, 4096, -5])
    given["slot_mapping"] = torch.tensor([5, 2, -1, -1])
    q = streamla.epilogue(**given, impl=impl)
    assert q.isfinite().all()
    inside = given | {"positions": torch.tensor([4094, 4095, 4095, 0])}
    assert torch.equal(q, streamla.epilogue(**inside, impl=impl))


@pytest.mark.parametrize(("rope", "places"), [("interleaved", [32, 33]), ("neox", [32, 40])])
def test_pairs_are_seen_in_the_cached_bytes(impl, rope, places):
    given = arguments(kv_format="bf16", rope=rope)
    given["kv_c"], given["k_pe"] = torch.zeros_like(given["kv_c"]), torch.zeros_like(given["k_pe"])
    given["k_pe"][0, 0] = 1
    given["slot_mapping"] = torch.tensor([6])
    given["kv_cache"].zero_()
    streamla.epilogue(**given, impl=impl)
    assert given["kv_cache"].flatten(0, 1)[6].nonzero()[:, 0].tolist() == places


def test_bytes_at_the_ends_of_fp8(impl):
    values = [
        0,
        447,
        448,
        463,
        465,
        480,
        1e4,
        3e38,
        torch.inf,
        -torch.inf,
        torch.nan,
        -0.0,
        1e-9,
        -1e-9,
    ]
    fn = [0, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFF, 0x80, 0, 0x80]
    fnuz = [0, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0xFF, 0x80, 0, 0, 0]
    for kv_format, want in (("fp8_e4m3fn", fn), ("fp8_e4m3fnuz", fnuz)):
        given = arguments(kv_format=kv_format, rope=None)
        given["kv_c"][0, : len(values)] = torch.tensor(values)
        given["slot_mapping"] = torch.tensor([9])
        streamla.epilogue(**given | {"k_scale": None}, impl=impl)
        stored = given["kv_cache"].view(torch.uint8).flatten(0, 1)[9, : len(values)]
        is_nan = given["kv_c"][0, : len(values)].isnan()  # either of e4m3fn's two NaNs
        assert torch.where(is_nan, stored | 0x80, stored).tolist() == want, kv_format


@pytest.mark.parametrize(("impl", "width"), [("portable", 8192), ("sm90", 512)])
@pytest.mark.parametrize(
    "scale", [None, 1.0, -3.0, 0.0, 1e-39, 3e-37, 0.3, 1e30, torch.inf, torch.nan]
)
def test_every_bfloat16_is_rounded_to_fp8_as_the_oracle_rounds(device, impl, width, scale):
    tokens = (1 << 16) // width
    spec = MLASpec(1, KVFormat.FP8_E4M3FN, page_size=tokens, kv_lora_rank=width)
    if (
        reason := why_skipped(EpilogueCase("", "", (), kv_lora_rank=width), impl, device)
    ) is not None:
        pytest.skip(reason)
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = values.view(tokens, width).to(device)
    zeros = torch.zeros_like(rows)
    divisor = 1.0 if scale is None else torch.tensor([scale])
    for kv_format in (KVFormat.FP8_E4M3FN, KVFormat.FP8_E4M3FNUZ):
        spec = dataclasses.replace(spec, kv_format=kv_format)
        cache = torch.zeros(1, tokens, spec.row_width, dtype=torch.uint8, device=device)
        streamla.epilogue(
            zeros[:, None], zeros[:, None, :64], rows, zeros[:, :64], cache,
            torch.arange(tokens, device=device), spec, impl=impl,
            k_scale=None if scale is None else divisor.to(device),
        )  # fmt: skip
        want = to_fp8(values.view(tokens, width).float() / divisor, kv_format.storage_dtype)
        assert_equal(kv_format.value, cache[0, :, :width].view(kv_format.storage_dtype), want)


def test_new_rows_are_decoded():
    """Insert, decode, insert, decode: attention sees each new token, in a request of its own pages."""
    spec = MLASpec(3, "bf16", page_size=4, kv_lora_rank=32, qk_rope_head_dim=16)
    given = arguments(kv_format="bf16", rope=None) | {"spec": spec}
    given["kv_cache"].fill_(torch.nan)
    table, rows = torch.tensor([[2], [0], [1], [0]], dtype=torch.int32), []
    for step in range(2):
        given["slot_mapping"] = torch.tensor([8 + step, step, 4 + step, -1])
        given["kv_c"] = given["kv_c"].roll(step, 1)
        q = streamla.epilogue(**given).unflatten(0, (4, 1))
        rows.append(torch.cat([given["kv_c"], given["k_pe"]], -1))
        seqlens = torch.tensor([step + 1] * 3 + [0], dtype=torch.int32)
        plan = streamla.plan(seqlens, spec)
        out = streamla.decode(q, given["kv_cache"], table, plan, softmax_scale=0.1)
        for b in range(3):
            seen = torch.stack([r[b] for r in rows]).float()
            want, _ = reference.attend(q[b, 0].float(), seen, 32, 0.1)
            torch.testing.assert_close(out[b, 0].float(), want, atol=2**-7, rtol=2**-7)


# --- the operator


def on(device, given):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def implementation(device):
    return "reference" if device.type == "cpu" else "portable"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_e4m3fn"])
def test_opcheck(device, kv_format):
    given = on(device, arguments(kv_format=kv_format))
    kv_cache = given["kv_cache"]
    if kv_format != "bf16":
        kv_cache = kv_cache.view(torch.uint8)  # opcheck cannot compare fp8 tensors
    kv_cache.zero_()
    q_out = torch.zeros(5, 3, 48, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(
        torch.ops.streamla.epilogue.default,
        (
            given["q_nope"], given["q_pe"], given["kv_c"], given["k_pe"], kv_cache, given["slot_mapping"],
            q_out, given["positions"], given["cos_sin"], given["rope"], None, given["k_scale"], "bf16",
            None, False, ops.spec_facts(implementation(device), given["spec"]),
        ),
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("q_format", ["bf16", "fp8_e4m3fn"])
def test_a_compiled_step_keeps_both_inserts_and_copies_no_cache(device, q_format):
    """insert -> decode -> insert on one cache, k_pe a slice that both inserts read."""
    given = on(device, arguments(kv_format="bf16", q_format=q_format))
    spec, impl = given["spec"], implementation(device)
    projection = torch.randn(4, 64, device=device).bfloat16()
    table = torch.zeros(4, 1, dtype=torch.int32, device=device)
    plan = streamla.plan(torch.full((4,), 4, dtype=torch.int32, device=device), spec, impl=impl)
    options = {k: given[k] for k in ("positions", "cos_sin", "rope", "q_scale", "q_format")}

    def step(q_nope, q_pe, projection, kv_cache, slots):
        def insert(kv_c, slots):
            return streamla.epilogue(
                q_nope, q_pe, kv_c, projection[:, 40:56], kv_cache, slots, spec, impl=impl, **options
            )  # fmt: skip

        q = insert(projection[:, :32], slots)
        query = q.bfloat16()[:, None]
        out = streamla.decode(query, kv_cache, table, plan, softmax_scale=0.1)
        return q, out, insert(projection[:, 8:40], slots + 4)

    slots = torch.tensor([0, 1, 2, 3], device=device)
    caches = [torch.zeros(3, 4, 48, dtype=torch.bfloat16, device=device) for _ in range(3)]
    tensors = (given["q_nope"], given["q_pe"], projection)
    want = step(*tensors, caches[0], slots)
    for cache, backend in ((caches[1], "aot_eager"), (caches[2], "inductor")):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        got, code = run_and_get_code(compiled, *tensors, cache, slots)
        assert torch.equal(cache, caches[0])
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert caches[0].flatten(0, 1)[:8].any(-1).all()
    assert code[0].count("streamla.epilogue.default(") == 2
    assert f"empty_strided_{device.type}((3, 4, 48)" not in code[0], "the cache is copied"


# --- on a GPU


@pytest.fixture
def widths(impl) -> dict[str, int]:
    """Widths that nothing else here compiles, if there is a choice."""
    widths = {"kv_lora_rank": 512 if impl == "sm90" else 256}
    widths["qk_rope_head_dim"] = widths["kv_lora_rank"] // 8
    if (reason := why_skipped(EpilogueCase("", "", (), **widths), impl, GPU)) is not None:
        pytest.skip(reason)
    return widths


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ON_GPU)
def test_values_on_a_gpu_are_checked_in_debug_mode(monkeypatch, impl, widths):
    """Without it nothing waits for the device, and a slot past the pool writes nothing."""
    given = on(GPU, arguments(**widths))
    before = given["kv_cache"].view(torch.uint8).clone()
    given["slot_mapping"] = torch.tensor([12, 13, 2**40, 12], device="cuda")
    q = streamla.epilogue(**given, impl=impl)
    assert torch.equal(given["kv_cache"].view(torch.uint8), before)
    assert q.isfinite().all()
    monkeypatch.setenv("STREAMLA_DEBUG", "1")
    with pytest.raises(ValueError, match=r"slots below 12 .* got 12 for token 0"):
        streamla.epilogue(**given, impl=impl)
    given["slot_mapping"] = torch.tensor([3, 3, 1, 0], device="cuda")
    with pytest.raises(ValueError, match=r"every slot once; got 3 for tokens \[0, 1\]"):
        streamla.epilogue(**given, impl=impl)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("impl", ON_GPU)
def test_a_capture_is_served_once_warm(seed, impl, widths, monkeypatch):
    """`warmup` compiles what a bf16 query, or one in the cache's flavour, needs; no capture compiles."""
    hopper.kernel.cache_clear()
    monkeypatch.setattr(capture, "_launched", set())  # whatever ran before in this process
    case = EpilogueCase("", "", (3,), num_heads=5, **widths)
    graph = torch.cuda.CUDAGraph()
    cold = build(case, GPU, seed)
    with pytest.raises(RuntimeError, match=r"streamla.warmup"), torch.cuda.graph(graph):
        cold.run(impl)
    streamla.warmup(case.spec, [3], impl=impl, device=GPU)
    for rope, q_format in ((None, "bf16"), ("neox", "bf16"), ("interleaved", "fp8_e4m3fn")):
        inputs = build(dataclasses.replace(case, rope=rope, q_format=q_format), GPU, seed)
        eager = inputs.run(impl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = inputs.run(impl)
        graph.replay()
        assert_equal("q", q, eager)


# --- machine code

OPCODES = """
import json, sys
from streamla.runtime.offline import compile_variant, find_variants
for target in ("sm_90a", "gfx942"):
    (variant,) = find_variants(target, "portable/epilogue/bf16-q-bf16-rope")
    print(json.dumps(dict(compile_variant(variant, target).opcodes)))
"""


def test_the_rotation_is_compiled_without_fused_operations():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", OPCODES], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, fused in zip(
        done.stdout.splitlines(), (("FFMA",), ("v_fma_f32", "v_fmac_f32", "v_pk_fma_f32")), strict=True
    ):  # fmt: skip
        opcodes = json.loads(line)
        assert not opcodes.keys() & set(fused), opcodes
