"""Programmatic launches on a GPU, as `streamla verify` checks them."""

import pytest
import torch

from streamla.arch import arch_of
from streamla.select import select
from streamla.testing.overlap import OVERLAP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or arch_of(torch.device("cuda")).target != "sm_90a",
        reason="needs Hopper",
    ),
]


@pytest.mark.parametrize("invariant", OVERLAP, ids=lambda i: i.name)
def test_overlapped_layers_are_those_in_order(invariant, seed):
    device = torch.device("cuda")
    assert select(invariant.case.spec, arch_of(device)).name == "sm90"
    invariant.check(invariant.case, "auto", device, seed)
