"""What a compiled kernel is made of: registers, spills, shared memory, occupancy, instruction mix.

Read from the machine code itself, so no GPU is needed: sm_90a from what `cuobjdump` (in the Triton wheel)
says of the cubin, gfx942 from the assembly text and its metadata.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Groups of instructions, by the opcode's beginning.
_GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "sm_90a": {
        "matrix": ("HMMA", "HGMMA", "QGMMA", "IMMA", "IGMMA", "DMMA"),
        "convert": ("F2F", "F2I", "I2F"),  # F2FP too: the packed conversions
        "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
        "bulk_copies": ("UBLKCP", "UTMALDG"),
        "local": ("LDL", "STL"),
    },
    "gfx942": {
        "matrix": ("v_mfma", "v_smfmac"),
        "convert": ("v_cvt",),
        "shared": ("ds_read", "ds_write"),
        "bulk_copies": (),
        "local": ("scratch_load", "scratch_store"),
    },
}


@dataclass(frozen=True)
class KernelFacts:
    """Facts of one compiled variant. Counts are of instructions in the code, not of executions.

    Attributes:
        variant, kernel, target: what was compiled, its entry, and for what.
        threads: threads a program.
        registers: a thread's registers; on gfx942 VGPRs of both kinds together.
        agprs: accumulation VGPRs among them (gfx942).
        sgprs: scalar registers a wave (gfx942).
        spills: gfx942: registers spilled. sm_90a: instructions that touch local memory.
        scratch_bytes: local (scratch) memory a thread.
        shared_bytes: shared memory (LDS) a program, static and dynamic.
        programs_per_unit: programs that fit an SM or CU at once.
        limit: what stops one more: "registers", "shared memory", "threads" or "slots".
        opcodes: opcode -> instructions; sm_90a without modifiers (LDS of LDS.128).
    """

    variant: str
    kernel: str
    target: str
    threads: int
    registers: int
    agprs: int
    sgprs: int
    spills: int
    scratch_bytes: int
    shared_bytes: int
    programs_per_unit: int
    limit: str
    opcodes: Mapping[str, int] = field(repr=False)

    def count(self, *beginnings: str) -> int:
        """Instructions whose opcode begins with one of `beginnings`."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(beginnings))

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def matrix(self) -> int:
        return self.count(*_GROUPS[self.target]["matrix"])

    @property
    def convert(self) -> int:
        return self.count(*_GROUPS[self.target]["convert"])

    @property
    def shared(self) -> int:
        return self.count(*_GROUPS[self.target]["shared"])

    @property
    def bulk_copies(self) -> int:
        """Copies that the TMA unit makes. gfx942 has none."""
        return self.count(*_GROUPS[self.target]["bulk_copies"])

    def as_dict(self) -> dict[str, str | int]:
        """One flat record: the fields, and the counts of the groups instead of every opcode."""
        record = asdict(self)
        del record["opcodes"]
        groups = ("instructions", "matrix", "convert", "shared", "bulk_copies")
        return record | {group: getattr(self, group) for group in groups}


# --- occupancy

# sm_90 gives a program 1 KB of shared memory more than it asks for. ptxas counts it as the program's own,
# `KernelFacts.shared_bytes` does not.
_RESERVED_SHARED_SM90 = 1024


def occupancy_sm90(threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Programs an SM and what limits them.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (9.0): an SM holds 64
    warps, 32 programs and 228 KB of shared memory, of which each program takes 1 KB more than it asks for, in
    units of 128 B; each of its four quarters has 16,384 registers, which a warp takes in units of 256.
    """
    warps = -(-threads // 32)
    by_registers = _divide(4 * (16384 // _round_up(max(registers, 1) * 32, 256)), warps)
    by_shared = _divide(228 << 10, _round_up(shared_bytes + _RESERVED_SHARED_SM90, 128))
    return _least(registers=by_registers, shared=by_shared, threads=64 // warps, slots=32)


def occupancy_gfx942(threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Programs a CU and what limits them.

    LLVM's AMDGPUBaseInfo and GCNSubtarget for gfx90a and later: each of a CU's four SIMDs holds 8 waves
    and 512 VGPRs a lane, which a wave takes in units of 8; a CU holds 64 KB of LDS and barriers for 16
    programs of more than one wave.
    """
    waves = -(-threads // 64)
    by_registers = _divide(4 * (512 // _round_up(max(registers, 1), 8)), waves)
    by_shared = _divide(64 << 10, shared_bytes)
    slots = 32 if waves == 1 else 16
    return _least(registers=by_registers, shared=by_shared, threads=32 // waves, slots=slots)


def _divide(room: int, need: int) -> int:
    return room // need if need else 1 << 30


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _least(**limits: int) -> tuple[int, str]:
    limit = min(limits, key=limits.__getitem__)
    return limits[limit], {"shared": "shared memory"}.get(limit, limit)


# --- sm_90a


def facts_of_cubin(
    cubin: bytes, *, variant: str, kernel: str, threads: int, dynamic_shared_bytes: int
) -> KernelFacts:
    """Facts of the entry `kernel` of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _cuobjdump("--dump-resource-usage", path)
        sass = _cuobjdump("--dump-sass", path)
    return read_sm90(
        usage, sass, variant=variant, kernel=kernel, threads=threads,
        dynamic_shared_bytes=dynamic_shared_bytes,
    )  # fmt: skip


def read_sm90(
    usage: str, sass: str, *, variant: str, kernel: str, threads: int, dynamic_shared_bytes: int
) -> KernelFacts:
    """Facts of the entry `kernel` from the two listings of cuobjdump."""
    found = re.search(rf"Function {re.escape(kernel)}:\s*\n?\s*(.*)", usage)
    code = re.search(rf"Function : {re.escape(kernel)}\n(.*?)(?=\n\s*Function : |\Z)", sass, re.S)
    if found is None or code is None:
        names = re.findall(r"Function (\S+):", usage)
        raise ValueError(f"kernel: need one of {names}; got {kernel!r}")
    resources = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", found[1])}
    opcodes = count_sass(code[1])
    static_shared_bytes = max(0, resources["SHARED"] - _RESERVED_SHARED_SM90)
    shared_bytes = static_shared_bytes + dynamic_shared_bytes
    programs, limit = occupancy_sm90(threads, resources["REG"], shared_bytes)
    return KernelFacts(
        variant=variant,
        kernel=kernel,
        target="sm_90a",
        threads=threads,
        registers=resources["REG"],
        agprs=0,
        sgprs=0,
        spills=sum(opcodes[name] for name in _GROUPS["sm_90a"]["local"]),
        scratch_bytes=resources["STACK"] + resources["LOCAL"],
        shared_bytes=shared_bytes,
        programs_per_unit=programs,
        limit=limit,
        opcodes=opcodes,
    )


def count_sass(text: str) -> Counter[str]:
    """Opcode -> instructions of `cuobjdump --dump-sass`, without the padding after the end."""
    # An address, perhaps a predicate, and the opcode; the second line of an encoding has no opcode.
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", text, re.M)
    opcodes = Counter(found)
    del opcodes["NOP"]
    return opcodes


def _cuobjdump(option: str, path: Path) -> str:
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, option, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


# --- gfx942


def facts_of_amdgcn(
    text: str, *, variant: str, kernel: str, threads: int, dynamic_shared_bytes: int
) -> KernelFacts:
    """Facts of the entry `kernel` of an AMD GPU's assembly text."""
    metadata = _amd_metadata(text, kernel)
    opcodes = count_amdgcn(text, kernel)
    shared_bytes = metadata["group_segment_fixed_size"] + dynamic_shared_bytes
    programs, limit = occupancy_gfx942(threads, metadata["vgpr_count"], shared_bytes)
    return KernelFacts(
        variant=variant,
        kernel=kernel,
        target="gfx942",
        threads=threads,
        registers=metadata["vgpr_count"],
        agprs=metadata["agpr_count"],
        sgprs=metadata["sgpr_count"],
        spills=metadata["vgpr_spill_count"] + metadata["sgpr_spill_count"],
        scratch_bytes=metadata["private_segment_fixed_size"],
        shared_bytes=shared_bytes,
        programs_per_unit=programs,
        limit=limit,
        opcodes=opcodes,
    )


def _amd_metadata(text: str, kernel: str) -> dict[str, int]:
    """The integers in the entry of `kernel` in the `amdhsa.kernels` metadata."""
    listing = text[text.index("amdhsa.kernels:") :]
    names = []
    for entry in re.split(r"^  - (?=\.)", listing, flags=re.M)[1:]:
        name = re.search(r"^\s*\.name:\s+(\S+)", entry, re.M)
        if name and name[1] == kernel:
            return {k: int(v) for k, v in re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", entry, re.M)}
        names += [name[1]] if name else []
    raise ValueError(f"kernel: need one of {names}; got {kernel!r}")


def count_amdgcn(text: str, kernel: str) -> Counter[str]:
    """Opcode -> instructions between the label of `kernel` and its end label."""
    body = re.search(rf"^{re.escape(kernel)}:(.*?)^\.Lfunc_end", text, re.M | re.S)
    if body is None:
        raise ValueError(f"kernel: there is no label {kernel}: in the assembly")
    # Encodings differ only in the suffix: v_add_f32_e32 and v_add_f32_e64 are one instruction.
    found = re.findall(r"^\s+([a-z]\w*?)(?:_e32|_e64|_sdwa|_dpp)?(?=\s|$)", body[1], re.M)
    return Counter(found)
