"""Every case and every whole-step check, on each implementation that runs here."""

import pytest
import torch

from streamla.testing.cases import CASES, HEAD_COUNTS, Case, case_by_name
from streamla.testing.checks import check_case
from streamla.testing.invariants import INVARIANTS, Invariant
from streamla.testing.patterns import PATTERNS
from streamla.testing.verify import FAILED, PASSED, SKIPPED, check_of, verify, why_skipped

CPU = torch.device("cpu")
ON_CPU = [case for case in CASES if not case.gpu]
INVARIANTS_ON_CPU = [i for i in INVARIANTS if not i.case.gpu]


def by_name(thing: Case | Invariant) -> str:
    return thing.name


@pytest.mark.parametrize("impl", ["reference", "portable"])
@pytest.mark.parametrize("case", ON_CPU, ids=by_name)
def test_case_on_cpu(case, impl, seed):
    case = case.narrow() if impl == "portable" else case
    if (reason := why_skipped(case, impl, CPU)) is not None:
        pytest.skip(reason)
    check_case(case, impl, CPU, seed)


@pytest.mark.parametrize("impl", ["reference", "portable"])
@pytest.mark.parametrize("invariant", INVARIANTS_ON_CPU, ids=by_name)
def test_invariant_on_cpu(invariant, impl, seed):
    case = invariant.case.narrow() if impl == "portable" else invariant.case
    if (reason := why_skipped(case, impl, CPU)) is not None:
        pytest.skip(reason)
    invariant.check(case, impl, CPU, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["sm90", "portable"])
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_case_on_gpu(case, impl, seed):
    if (reason := why_skipped(case, impl, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    check_case(case, impl, torch.device("cuda"), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["sm90", "portable"])
@pytest.mark.parametrize("invariant", INVARIANTS, ids=by_name)
def test_invariant_on_gpu(invariant, impl, seed):
    if (reason := why_skipped(invariant.case, impl, torch.device("cuda"))) is not None:
        pytest.skip(reason)
    invariant.check(invariant.case, impl, torch.device("cuda"), seed)


def test_a_million_tokens_of_one_page(seed):
    case = case_by_name("gpu-million")
    small = Case(
        case.name, case.reason, case.lengths, num_heads=1, kv_format="bf16", data=case.data,
        distinct_pages=1, kv_lora_rank=16, qk_rope_head_dim=16,
    )  # fmt: skip
    check_case(small, "reference", CPU, seed)


def test_cases_have_distinct_names_reasons_and_known_patterns():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.reason for case in CASES)
    assert {case.data for case in CASES} == set(PATTERNS)
    assert {case.num_heads for case in CASES} >= set(HEAD_COUNTS)
    assert {case.seqlen_q for case in CASES} == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="none is called 'x'"):
        case_by_name("x")


def test_verify_reports_passes_skips_and_failures(monkeypatch, seed):
    checks = [check_of(case_by_name(name)) for name in ("empty-first", "gpu-million")]
    seen = []
    results = verify(
        "reference", "cpu", checks, lambda done, total, result: seen.append((done, total)), seed
    )
    assert seen[-1] == (len(results), len(results))
    by_case = {result.name: result for result in results}
    assert by_case["empty-first"].status == PASSED
    assert 0 < by_case["empty-first"].error <= by_case["empty-first"].budget
    assert by_case["gpu-million"].status == SKIPPED
    assert "GPU" in by_case["gpu-million"].detail
    assert {r.status for r in results} == {PASSED, SKIPPED}

    # A wrong scale in one place is a failure that says what is wrong.
    import streamla.reference

    right = streamla.reference.attend
    monkeypatch.setattr(
        streamla.reference, "attend",
        lambda q, kv, rank, scale: right(q, kv, rank, scale * (1 if q.dtype is torch.float64 else 1.1)),
    )  # fmt: skip
    (failed, *_) = verify("reference", "cpu", checks[:1], None, seed)
    assert failed.status == FAILED
    assert "budget" in failed.detail
