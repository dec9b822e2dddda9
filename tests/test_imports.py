"""The layers: which module may import which, and what importing the package brings in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import streamla

ROOT = Path(streamla.__file__).parent

# A module imports only from its own layer or those before it.
LAYERS = (
    ("version", "spec", "arch"),
    ("formats", "plan", "reference", "step"),
    ("runtime",),
    ("kernels",),
    ("select",),
    ("checks", "checks_epilogue", "ops", "api"),
    ("testing", "integrations"),
    ("bench", "doctor"),
    ("cli", "__main__"),
)
LAYER = {name: level for level, names in enumerate(LAYERS) for name in names}
# Compiling everything for a target without a GPU walks the kernels.
LAYER_OF_MODULE = {("runtime", "offline"): LAYER["cli"]}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Absolute names that a module imports anywhere, `from a import b` as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


@pytest.mark.parametrize("path", modules(), ids=lambda p: "/".join(parts(p)))
def test_a_module_imports_only_what_lies_below_it(path):
    own = parts(path)
    if own == ("__init__",):
        return  # its names are imported at first use
    for name in imported(path):
        top, *rest = name.split(".")
        if top != "streamla" or not rest or rest[0] not in LAYER:
            continue
        assert LAYER[rest[0]] <= LAYER_OF_MODULE.get(own, LAYER[own[0]]), (
            f"{'.'.join(own)} imports {name}"
        )
        if own[0] == rest[0] == "kernels" and len(rest) > 1 and len(own) > 1:
            shared = own[1] == "__init__" or rest[1] in ("portable", own[1])
            assert shared, f"{'.'.join(own)} imports another architecture's {name}"


@pytest.mark.parametrize(
    "path", [p for p in modules() if parts(p)[0] == "doctor"], ids=lambda p: p.name
)
def test_the_doctor_imports_no_kernels_and_no_torch(path):
    for name in imported(path):
        assert name.split(".")[0] not in ("torch", "triton", "cuda"), f"{path.name} imports {name}"
        assert not name.startswith(("streamla.kernels", "streamla.api")), f"{path.name}: {name}"


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import streamla", ("torch", "triton", "cuda", "typer", "numpy")),
        (
            "from streamla import MLASpec, plan, decode",
            ("triton", "typer", "vllm", "sglang"),
        ),
        ("import streamla.testing.verify", ("triton", "typer", "pytest", "hypothesis")),
    ],
)
def test_what_an_import_brings_in(statement, forbidden):
    # In a process of its own.
    program = f"import sys\n{statement}\nprint([n for n in {forbidden!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        cwd=ROOT.parent,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout
