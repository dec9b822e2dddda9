"""The epilogue, bit for bit."""

import pytest
import torch

from streamla.testing.epilogue import EPILOGUE
from streamla.testing.verify import why_skipped

CPU = torch.device("cpu")
ON_CPU = [i for i in EPILOGUE if not i.case.gpu]


@pytest.mark.parametrize("impl", ["reference", "portable"])
@pytest.mark.parametrize("invariant", ON_CPU, ids=lambda i: i.name)
def test_epilogue_on_cpu(invariant, impl, seed):
    case = invariant.case.narrow() if impl == "portable" else invariant.case
    if (reason := why_skipped(case, impl, CPU)) is not None:
        pytest.skip(reason)
    invariant.check(case, impl, CPU, seed)
