"""The checks bite: an implementation with a common fault fails the case that is there for it."""

import dataclasses

import pytest
import torch

from streamla import reference
from streamla.formats import decode_rows
from streamla.plan import NO_SLOT
from streamla.testing.cases import case_by_name
from streamla.testing.checks import check_case
from streamla.testing.invariants import INVARIANTS

CPU = torch.device("cpu")
right = {name: getattr(reference, name) for name in ("plan", "attention", "merge", "decode")}


def with_attention(attention):
    """A decode whose attention stage is this one."""

    def decode(*arguments):
        attention(*arguments)
        right["merge"](*arguments[5:8], arguments[-1])

    return {"attention": attention, "decode": decode}


def after_decode(change):
    """A decode whose result is then changed."""

    def decode(*arguments):
        right["decode"](*arguments)
        change(*arguments)

    return {"decode": decode, "change": change}


def masks_only_the_scores(
    q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse, scale, causal, lse_scale
):
    """Reads whole pages and masks the scores: 0 * NaN reaches the sum."""
    q = torch.cat([q_nope, q_pe], -1).float()
    page_size = plan.spec.page_size
    for b, begin, end, _, slot, *_ in plan.work[: int(plan.work_indptr[-1])].tolist():
        whole = -(-end // page_size) * page_size
        rows = reference.gather_rows(kv_cache, page_table[b], begin, max(begin, whole))
        kv = decode_rows(rows, plan.spec, k_scale).float()
        scores = (q[b, 0] @ kv.T) * scale
        scores[:, end - begin :] = -torch.inf
        values, log_mass = reference.attend(
            q[b, 0], kv[: end - begin], plan.spec.kv_lora_rank, scale
        )
        if end > begin:
            values, log_mass = (
                scores.softmax(-1) @ kv[:, : plan.spec.kv_lora_rank],
                scores.logsumexp(-1),
            )
        if slot == NO_SLOT:
            out[b, 0], lse[b, 0] = values.to(out.dtype), log_mass * lse_scale
        else:
            plan.out_partial[slot, 0], plan.lse_partial[slot, 0] = values, log_mass


def ignores_the_page_stride(*arguments):
    cache = arguments[2]
    shape = (cache.shape[0], *cache.shape[1:])
    rebuilt = cache.as_strided(shape, (cache.shape[1] * cache.stride(1), cache.stride(1), 1))
    right["attention"](*arguments[:2], rebuilt, *arguments[3:])


def ignores_the_token_stride(*arguments):
    cache = arguments[2]
    rebuilt = cache.as_strided(cache.shape, (cache.stride(0), cache.shape[2], 1))
    right["attention"](*arguments[:2], rebuilt, *arguments[3:])


def takes_heads_as_adjacent(*arguments):
    q_nope = arguments[0]
    b, s, h, d = q_nope.shape
    wrong = q_nope.as_strided((b, s, h, d), (s * h * d, h * d, d, 1))
    right["attention"](wrong, *arguments[1:])


def leaves_empty_rows(*arguments):
    plan, out, lse = arguments[5:8]
    before = out.clone(), lse.clone()
    right["attention"](*arguments)
    for b, begin, end, *_ in plan.work[: int(plan.work_indptr[-1])].tolist():
        if begin == end:
            out[b], lse[b] = before[0][b], before[1][b]


def writes_plus_infinity(*arguments):
    lse = arguments[7]
    right["attention"](*arguments)
    lse[lse == -torch.inf] = torch.inf


def leaves_the_lse_of_one_split(*arguments):
    lse = arguments[7]
    before = lse.clone()
    right["attention"](*arguments)
    lse.copy_(before)


def is_always_causal(*arguments):
    right["attention"](*arguments[:9], True, arguments[10])


def is_never_causal(*arguments):
    right["attention"](*arguments[:9], False, arguments[10])


def ignores_the_base(*arguments):
    right["attention"](*arguments[:10], 1.0)


def ignores_the_scale(*arguments):
    right["attention"](*arguments[:3], None, *arguments[4:])


def swaps_two_heads(*arguments):
    out = arguments[6]
    out[:, :, [0, 1]] = out[:, :, [1, 0]]


def spoils_other_heads_with_nan(*arguments):
    out = arguments[6]
    out += 0 * out.sum(dim=2, keepdim=True)


def hides_nan(*arguments):
    arguments[6].nan_to_num_(nan=0.0)


def writes_past_the_output(*arguments):
    out = arguments[6]
    if out.storage_offset():  # not on its own in memory
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)


def writes_to_the_cache(*arguments):
    cache, table = arguments[2].view(torch.uint8), arguments[4].flatten().tolist()
    unowned = next(page for page in range(len(cache)) if page not in table)
    cache[unowned, 0, 0] += 1


calls = 0


def changes_from_run_to_run(*arguments):
    global calls
    calls += 1
    arguments[6][2, 0, 0, 0] *= 1 + 2**-7 * (calls % 2)


def rounds_the_partials(plan, out, lse, lse_scale):
    """Keeps the partials' lse in bfloat16."""
    plan.lse_partial.copy_(plan.lse_partial.bfloat16())
    right["merge"](plan, out, lse, lse_scale)


def multiplies_by_weight_zero(plan, out, lse, lse_scale):
    """Merges one slot more than there are, with weight 0."""
    right["merge"](plan, out, lse, lse_scale)
    last = int(plan.split_indptr[-1])
    if last:
        out[plan.split_indptr.diff() > 0] += 0 * plan.out_partial[last % len(plan.out_partial)].to(
            out
        )


def with_merge(merge):
    def decode(*arguments):
        right["attention"](*arguments)
        merge(*arguments[5:8], arguments[-1])

    return {"merge": merge, "decode": decode}


def plans_one_token_short(cache_seqlens, plan):
    right["plan"](cache_seqlens - (cache_seqlens > 1).int(), plan)


def leaves_the_unused_items(cache_seqlens, plan):
    before = plan.work.clone()
    right["plan"](cache_seqlens, plan)
    used = int(plan.work_indptr[-1])
    plan.work[used:] = before[used:]


def fault_name(faulty):
    (name,) = {function.__name__ for function in faulty.values()} - {"decode"}
    return name


FAULTS = [
    ("tail-bf16-page-64", with_attention(masks_only_the_scores), "finite unlike the oracle"),
    ("tail-infinity", with_attention(masks_only_the_scores), "finite unlike the oracle"),
    ("tail-latent-only", with_attention(masks_only_the_scores), "finite unlike the oracle"),
    ("layers-2", with_attention(ignores_the_page_stride), ""),
    ("layers-61", with_attention(ignores_the_page_stride), ""),
    ("page-gap-bf16", with_attention(ignores_the_page_stride), ""),
    ("row-stride-640", with_attention(ignores_the_token_stride), ""),
    ("query-halves", with_attention(takes_heads_as_adjacent), "budget"),
    ("empty-middle-last", with_attention(leaves_empty_rows), "finite unlike the oracle"),
    ("empty-first", with_attention(writes_plus_infinity), "lse: 16 elements -inf unlike"),
    ("short-beside-long", with_attention(leaves_the_lse_of_one_split), "lse"),
    ("not-causal", with_attention(is_always_causal), "budget"),
    ("causal-2-heads-12", with_attention(is_never_causal), "budget"),
    ("equal-scores-base-2", with_attention(ignores_the_base), "lse"),
    ("scale-5.3", with_attention(ignores_the_scale), "budget"),
    ("heads-12", after_decode(swaps_two_heads), "budget"),
    ("nan-head", after_decode(spoils_other_heads_with_nan), "finite unlike the oracle"),
    ("nan-row", after_decode(hides_nan), "finite unlike the oracle"),
    ("ragged", after_decode(writes_past_the_output), "out: 2 bytes written after"),
    ("ragged", after_decode(writes_to_the_cache), "kv_cache: an input was written"),
    ("ragged", after_decode(changes_from_run_to_run), "differ between runs"),
    ("offset+300", with_merge(rounds_the_partials), "budget"),
    ("short-beside-long", with_merge(multiplies_by_weight_zero), "finite unlike the oracle"),
    ("ragged", {"plan": plans_one_token_short}, "plan.work"),
    ("few-tokens", {"plan": leaves_the_unused_items}, "plan.work"),
]


@pytest.mark.parametrize(
    ("name", "faulty", "message"), FAULTS,
    ids=[f"{name}-{fault_name(faulty)}" for name, faulty, _ in FAULTS],
)  # fmt: skip
def test_a_fault_fails_its_case(monkeypatch, name, faulty, message, seed):
    for stage in faulty.keys() & right.keys():
        monkeypatch.setattr(reference, stage, faulty[stage])
    with pytest.raises(AssertionError, match=message):
        check_case(case_by_name(name), "reference", CPU, seed)


def test_a_split_point_that_depends_on_batch_mates_fails(monkeypatch, seed):
    def cuts_evenly(cache_seqlens, plan):
        right["plan"](cache_seqlens, dataclasses.replace(plan, batch_invariant=False))

    invariant = next(i for i in INVARIANTS if i.name == "batch-mates-invariant")
    monkeypatch.setattr(reference, "plan", cuts_evenly)
    with pytest.raises(AssertionError, match="differ between runs"):
        invariant.check(invariant.case, "reference", CPU, seed)
