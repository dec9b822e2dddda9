"""Every kernel compiled without a GPU, for both targets, and what is read from the machine code."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from triton.runtime import JITFunction

from streamla.runtime import facts
from streamla.runtime.facts import KernelFacts, occupancy_gfx942, occupancy_sm90
from streamla.runtime.offline import (
    TARGETS,
    CudaVariant,
    TritonVariant,
    compile_variant,
    find_variants,
)

# Bytes of local memory a thread that a kernel is known to need. They may shrink, never grow.
SCRATCH_BUDGET = {"sm90/attention-step": 8, "sm90/attention-ds-mla": 8}

# In a process of its own: in this one Triton may be an interpreter.
REPORT = """
import json, sys
from streamla.runtime.offline import compile_variant, find_variants
target, names = sys.argv[1], json.loads(sys.argv[2])
for variant in find_variants(target):
    if variant.name in names:
        found = compile_variant(variant, target)
        print(json.dumps(found.as_dict() | {"opcodes": dict(found.opcodes)}))
"""


def compile_in_new_process(target: str, names: list[str]) -> list[KernelFacts]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", REPORT, target, json.dumps(names)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fields = KernelFacts.__dataclass_fields__
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [KernelFacts(**{k: v for k, v in r.items() if k in fields}) for r in records]


def variant_names(target: str) -> tuple[list[str], list[str]]:
    """The first variant of every kernel, and the rest."""
    names = [v.name for v in find_variants(target)]
    kernels = itertools.groupby(names, key=lambda name: name.rsplit("/", 1)[0])
    first = [next(group) for _, group in kernels]
    return first, [name for name in names if name not in first]


def check(found: list[KernelFacts], names: list[str], target: str) -> None:
    assert [f.variant for f in found] == names
    bad = [
        f"{f.variant}: {f.spills} spills, {f.scratch_bytes} B of scratch"
        for f in found
        if f.scratch_bytes > (budget := SCRATCH_BUDGET.get(f.variant.rsplit("/", 1)[0], 0))
        or (f.spills and not budget)
    ]
    assert not bad, "\n".join(bad)
    for f in found:
        assert f.programs_per_unit >= 1, f"{f.variant} does not fit: {f.limit}"
        assert f.instructions > 20, f.variant
        assert (f.matrix > 0) == ("/attention" in f.variant), f.variant
        if target == "sm_90a" and f.variant.startswith("sm90/"):
            check_order(f)


def check_order(f: KernelFacts) -> None:
    """Where a kernel may start before the one ahead has ended, its first wait comes before the first store and
    before the next kernel is let in; in attention, before the first load too."""
    order = list(f.opcodes)  # by first occurrence
    if "/merge" not in f.variant:
        assert "ACQBULK" in order, f"{f.variant} is launched early and never waits"
    if "ACQBULK" not in order:
        return
    after = ["STG", "ST", "RED", "ATOMG", "UBLKCP", "PREEXIT"]
    after += ["LDG", "LD"] if "/attention" in f.variant else []
    early = [op for op in after if op in order and order.index(op) < order.index("ACQBULK")]
    assert not early, f"{f.variant}: {early} before the wait"


@pytest.mark.parametrize("target", TARGETS)
def test_names_are_unique(target):
    names = [v.name for v in find_variants(target)]
    assert len(names) == len(set(names))
    assert all(len(name.split("/")) == 3 for name in names), names


@pytest.mark.parametrize("target", TARGETS)
def test_one_variant_of_every_kernel_compiles_without_spills(target):
    names, _ = variant_names(target)
    check(compile_in_new_process(target, names), names, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_other_variant_compiles_without_spills(target):
    _, names = variant_names(target)
    check(compile_in_new_process(target, names), names, target)


def test_unknown_target_is_named():
    with pytest.raises(ValueError, match="target: need one of sm_90a, gfx942; got 'sm_80'"):
        find_variants("sm_80")


def test_pattern_selects_by_name():
    merges = find_variants("gfx942", "portable/merge")
    assert merges
    assert all("portable/merge" in v.name for v in merges)


def test_a_variant_that_does_not_fit_its_kernel_is_named():
    merge = find_variants("gfx942", "portable/merge")[0]
    if not isinstance(merge.fn, JITFunction):  # imported under the interpreter, as without a GPU
        with pytest.raises(RuntimeError, match="interpreter"):
            compile_variant(merge, "gfx942")
        return
    signature = dict(merge.signature)
    signature.popitem()
    broken = TritonVariant("broken", merge.fn, signature, merge.constexprs)
    with pytest.raises(ValueError, match="broken: the kernel takes"):
        compile_variant(broken, "gfx942")


# --- reading machine code

SASS = """
\t\tFunction : other
        /*0000*/                   HGMMA.64x16x16.F32 R4, R8, gdesc[UR4], R4 ;   /* 0x1 */
\t\tFunction : mine
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDS.128 R4, [R2] ;                  /* 0x1 */
        /*0020*/              @UP1 UBLKCP [UR8], [UR4] ;               /* 0x1 */
        /*0030*/                   F2FP.F16.E4M3.UNPACK_B R4, R4 ;     /* 0x1 */
        /*0040*/                   HGMMA.64x16x16.F32 R4, R8, gdesc[UR4], R4 ;   /* 0x1 */
        /*0050*/                   STL.64 [R1], R4 ;                   /* 0x1 */
        /*0060*/                   NOP;                                /* 0x1 */
\t\t..........
"""


def test_sass_is_counted_by_opcode():
    usage = (
        "Resource usage:\n Function mine:\n  REG:40 STACK:8 SHARED:1424 LOCAL:0 CONSTANT[0]:544\n"
    )
    found = facts.read_sm90(
        usage, SASS, variant="v", kernel="mine", threads=128, dynamic_shared_bytes=1000
    )
    assert found.opcodes == {"LDC": 1, "LDS": 1, "UBLKCP": 1, "F2FP": 1, "HGMMA": 1, "STL": 1}
    assert (found.matrix, found.convert, found.shared, found.bulk_copies) == (1, 1, 1, 1)
    assert (found.registers, found.spills, found.scratch_bytes) == (40, 1, 8)
    assert found.shared_bytes == 400 + 1000
    with pytest.raises(ValueError, match=r"kernel: need one of \['mine'\]; got 'yours'"):
        facts.read_sm90(usage, SASS, variant="", kernel="yours", threads=1, dynamic_shared_bytes=0)


AMDGCN = """
\t.globl\tmine
mine:                                   ; @mine
; %bb.0:
\ts_load_dwordx2 s[0:1], s[4:5], 0x0
\tv_add_f32_e32 v0, v1, v2
\tv_add_f32_e64 v0, v1, s2
\tv_cvt_pk_f32_fp8_sdwa v[0:1], v2 src0_sel:WORD_1
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
\tds_read_b128 v[0:3], v4
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel mine
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     4
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
    .group_segment_fixed_size: 0
    .name:           mine
    .private_segment_fixed_size: 12
    .sgpr_count:     20
    .sgpr_spill_count: 1
    .symbol:         mine.kd
    .vgpr_count:     132
    .vgpr_spill_count: 2
    .wavefront_size: 64
amdhsa.target:   amdgcn-amd-amdhsa--gfx942
"""


def test_amdgcn_is_counted_by_opcode():
    how = {"variant": "v", "threads": 256, "dynamic_shared_bytes": 32768}
    found = facts.facts_of_amdgcn(AMDGCN, kernel="mine", **how)
    assert found.opcodes["v_add_f32"] == 2
    assert found.instructions == 7
    assert (found.matrix, found.convert, found.shared, found.bulk_copies) == (1, 1, 1, 0)
    assert (found.registers, found.agprs, found.sgprs) == (132, 4, 20)
    assert (found.spills, found.scratch_bytes, found.shared_bytes) == (3, 12, 32768)
    assert (found.programs_per_unit, found.limit) == (2, "shared memory")
    with pytest.raises(ValueError, match=r"kernel: need one of \['mine'\]; got 'yours'"):
        facts.facts_of_amdgcn(AMDGCN, kernel="yours", **how)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ((128, 255, 0), (2, "registers")),
        ((128, 128, 0), (4, "registers")),
        ((128, 24, 0), (16, "threads")),
        ((32, 32, 0), (32, "slots")),
        ((384, 168, 178 << 10), (1, "registers")),
        ((128, 64, 227 << 10), (1, "shared memory")),
        ((128, 64, (114 << 10) - 1024), (2, "shared memory")),
        ((128, 64, 114 << 10), (1, "shared memory")),
        ((1024, 65, 0), (0, "registers")),
    ],
)
def test_occupancy_of_an_sm(resources, expected):
    assert occupancy_sm90(*resources) == expected


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ((256, 512, 0), (1, "registers")),
        ((256, 256, 0), (2, "registers")),
        ((256, 129, 0), (3, "registers")),
        ((256, 32, 0), (8, "threads")),
        ((64, 32, 0), (32, "threads")),
        ((128, 32, 0), (16, "threads")),
        ((512, 128, 64 << 10), (1, "shared memory")),
        ((256, 64, (64 << 10) + 1), (0, "shared memory")),
    ],
)
def test_occupancy_of_a_cu(resources, expected):
    assert occupancy_gfx942(*resources) == expected


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is not None, reason="the CUDA driver's answer")
@pytest.mark.parametrize("threads", [32, 128, 256, 384, 1024])
def test_occupancy_agrees_with_the_driver(tmp_path, threads):
    from streamla.runtime.driver import I32, PTR, Kernel
    from streamla.runtime.nvrtc import compile_cuda

    source = tmp_path / "busy.cu"
    # Many values alive at once, so that the register limit is what decides.
    source.write_text(
        'extern "C" __global__ void busy(float* x, int n) {\n'
        "  __shared__ float last[1000];\n"
        "  float v[200];\n"
        "  #pragma unroll\n"
        "  for (int i = 0; i < 200; ++i) v[i] = x[i * n];\n"
        "  last[threadIdx.x % 1000] = x[0];\n"
        "  __syncthreads();\n"
        "  #pragma unroll\n"
        "  for (int i = 0; i < 200; ++i) x[i * n + 1] = v[i] * v[199 - i] + last[i];\n"
        "}\n"
    )
    units = torch.cuda.get_device_properties(0).multi_processor_count
    for limit in (32, 64, 96, 168, 255):
        if limit * threads > 65536:
            continue
        options = (f"--maxrregcount={limit}",)
        found = compile_variant(CudaVariant("", source, "busy", threads, options=options), "sm_90a")
        cubin = compile_cuda(source, options=options)
        assert found.shared_bytes == 4000
        for shared_bytes in (0, 10_000, 50_000, 112_000, 228_448):
            kernel = Kernel(cubin, "busy", (PTR, I32), threads=threads, shared_bytes=shared_bytes)
            expected, _ = occupancy_sm90(threads, found.registers, 4000 + shared_bytes)
            assert kernel.resident_programs() == expected * units, (found, shared_bytes)
