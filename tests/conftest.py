"""Seeds, GPU skipping, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

SEED_VARIABLE = "STREAMLA_TEST_SEED"

if not torch.cuda.is_available():
    # Read when Triton is first imported, so it must be set before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"
    # One thread a test process: the tensors are small, and pytest-xdist fills the other cores.
    torch.set_num_threads(1)

    from streamla.testing.interpreter import repair

    repair()


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="seed of the inputs; a fresh one by default")


def pytest_configure(config):
    # In the environment, so that the workers of pytest-xdist take the same one.
    seed = config.getoption("--seed")
    if seed is None:
        seed = int.from_bytes(os.urandom(3), "little")
    if config.getoption("--seed") is not None or SEED_VARIABLE not in os.environ:
        os.environ[SEED_VARIABLE] = str(seed)


def pytest_report_header():
    return f"streamla: inputs from --seed {os.environ[SEED_VARIABLE]}"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def environment_as_it_was(monkeypatch):
    """`streamla compile` takes TRITON_INTERPRET out of its environment, which here is that of all tests."""
    if "TRITON_INTERPRET" in os.environ:
        monkeypatch.setenv("TRITON_INTERPRET", os.environ["TRITON_INTERPRET"])


@pytest.fixture
def seed() -> int:
    """The session's seed; rerun with `--seed` to see the same inputs again."""
    seed = int(os.environ[SEED_VARIABLE])
    print(f"inputs from --seed {seed}")
    return seed


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def nan_filled_empty(monkeypatch):
    """torch.empty gives NaN: whatever is not written shows."""
    empty = torch.empty

    def filled(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            tensor.fill_(torch.nan)
        return tensor

    monkeypatch.setattr(torch, "empty", filled)
