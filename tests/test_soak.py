"""The soak draws the same batches again, holds an implementation to them, and says how to repeat a failure."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from streamla import reference
from streamla.cli.app import app
from streamla.testing.soak import draw, served_specs, soak
from streamla.testing.verify import FAILED, PASSED

CPU = torch.device("cpu")
SHORT = {"seconds": 600, "impl": "reference", "device": CPU}


def test_batches_are_drawn_again_by_their_number():
    specs = served_specs(3, "reference", CPU)
    cases = [draw(3, n, specs, 2048) for n in range(200)]
    assert cases == [draw(3, n, specs, 2048) for n in range(200)]
    assert cases != [draw(4, n, specs, 2048) for n in range(200)]
    assert all(sum(c.lengths) <= 2048 + 64 * len(c.lengths) + 8 * len(c.lengths) for c in cases)
    assert {c.kv_format for c in cases} >= {"bf16", "fp8_e4m3fn", "fp8_ds_mla"}
    assert any(0 in c.lengths for c in cases)
    assert max(len(c.lengths) for c in cases) > 64


def test_a_right_implementation_passes():
    results = soak(**SHORT, seed=1, count=4)
    assert [r.status for r in results] == [PASSED] * 4


def test_a_wrong_implementation_ends_the_soak_and_is_repeated_by_number(monkeypatch):
    right = reference.decode

    def wrong(*args, **kwargs):
        right(*args, **kwargs)
        out = args[6] if len(args) > 6 else kwargs["out"]
        if len(out) > 3:
            out[3] *= 1.05

    monkeypatch.setattr(reference, "decode", wrong)
    results = soak(**SHORT, seed=1, count=30)
    assert results[-1].status == FAILED
    assert all(r.status == PASSED for r in results[:-1])
    number = results[-1].name.rsplit("-", 1)[1]
    command = ["soak", "--seed", "1", "--first", number, "--count", "1", "--impl", "reference",
               "--device", "cpu"]  # fmt: skip
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1
    assert f"repeat: --seed 1 --first {number} --count 1" in again.stdout


def test_an_implementation_that_does_not_run_here_is_refused():
    with pytest.raises(ValueError, match="impl"):
        soak(1, impl="sm90", device=CPU)
