"""The oracle against attention as the model defines it, and the numbers of scale and rope."""

import math

import pytest
import torch

from streamla.formats import decode_rows
from streamla.reference import (
    attend,
    attention_reference,
    epilogue_reference,
    rotate,
    visible,
)
from streamla.spec import KVFormat, MLASpec
from streamla.testing.budget import eager_attention, expect, relative_error
from streamla.testing.build import SOFTMAX_SCALE, build
from streamla.testing.cases import Case


def yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 and mscale else 1.0


def test_absorbed_attention_is_the_models_attention():
    """The model projects the latent up to 128-wide keys and values and attends in 192 dimensions;
    the oracle attends to the latent itself with an absorbed query. They are the same function."""
    generator = torch.Generator().manual_seed(2)
    heads, tokens, nope, rank, rope = 5, 70, 128, 512, 64

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, q_pe = normal(heads, nope), normal(heads, rope)
    latent, k_pe = normal(tokens, rank), normal(tokens, rope)
    w_k, w_v = normal(heads, nope, rank) / rank**0.5, normal(heads, nope, rank) / rank**0.5

    keys = torch.cat([torch.einsum("tr,hnr->htn", latent, w_k), k_pe.expand(heads, -1, -1)], -1)
    values = torch.einsum("tr,hnr->htn", latent, w_v)
    query = torch.cat([q, q_pe], -1)[:, None]
    model = torch.nn.functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], scale=SOFTMAX_SCALE
    )[0, :, 0]

    absorbed = torch.cat([torch.einsum("hn,hnr->hr", q, w_k), q_pe], -1)
    out, lse = attend(absorbed, torch.cat([latent, k_pe], -1), rank, SOFTMAX_SCALE)
    torch.testing.assert_close(torch.einsum("hr,hnr->hn", out, w_v), model, rtol=1e-10, atol=1e-12)
    scores = torch.einsum("hqd,htd->hqt", query, keys)[:, 0] * SOFTMAX_SCALE
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fmt", [fmt.value for fmt in KVFormat])
def test_the_oracle_is_plain_attention_over_the_gathered_pages(fmt, seed):
    """Written once more, with a loop over tokens instead of gathers, and torch's attention."""
    case = Case("", "", (7, 0, 40, 3), num_heads=3, page_size=4, seqlen_q=3, kv_format=fmt)
    inputs = build(case, "cpu", seed)
    expected = expect(inputs)
    for b, seqlen in enumerate(case.lengths):
        stored = [
            inputs.kv_cache.view(torch.uint8)[int(inputs.page_table[b, t // 4]), t % 4]
            for t in range(seqlen)
        ]
        rows = torch.stack(stored) if stored else torch.empty(0, case.spec.row_bytes).byte()
        kv = decode_rows(rows.view(inputs.kv_cache.dtype), case.spec, inputs.k_scale)
        query = torch.cat(inputs.q_halves, -1)[b].double()
        for s in range(3):
            n = max(0, seqlen - 3 + 1 + s)
            if n == 0:
                assert (expected.out[b, s] == 0).all()
                assert (expected.lse[b, s] == -math.inf).all()
                continue
            want = torch.nn.functional.scaled_dot_product_attention(
                query[s][None], kv[None, :n], kv[None, :n, :512], scale=SOFTMAX_SCALE
            )[0]
            torch.testing.assert_close(expected.out[b, s], want, rtol=1e-10, atol=1e-10)
    assert relative_error(eager_attention(inputs)[0], expected.out) < 5e-3


@pytest.mark.parametrize(
    ("seqlen", "seqlen_q", "causal", "seen"),
    [
        (5, 1, True, [5]), (5, 3, True, [3, 4, 5]), (2, 4, True, [0, 0, 1, 2]),
        (0, 2, True, [0, 0]), (5, 3, False, [5, 5, 5]), (0, 2, False, [0, 0]),
    ],
)  # fmt: skip
def test_which_keys_a_query_sees(seqlen, seqlen_q, causal, seen):
    assert [visible(seqlen, s, seqlen_q, causal) for s in range(seqlen_q)] == seen


def test_four_queries_are_four_calls_of_one_query(seed):
    case = Case("", "", (70, 5), num_heads=4, seqlen_q=4)
    inputs = build(case, "cpu", seed)
    expected = expect(inputs)
    q_nope, q_pe = inputs.q_halves
    one = MLASpec(num_heads=4, kv_format=case.kv_format)
    for s in range(4):
        seqlens = inputs.cache_seqlens - 3 + s
        out, lse = attention_reference(
            q_nope[:, s : s + 1], q_pe[:, s : s + 1], inputs.kv_cache, inputs.k_scale,
            inputs.page_table, seqlens, one, inputs.softmax_scale,
        )  # fmt: skip
        assert torch.equal(out[:, 0], expected.out[:, s])
        assert torch.equal(lse[:, 0], expected.lse[:, s])


def test_equal_scores_have_lse_ln_n():
    out, lse = attend(torch.zeros(2, 576), torch.ones(4, 576), 512, SOFTMAX_SCALE)
    torch.testing.assert_close(lse, torch.full((2,), 1.386294))
    assert (out == 1).all()


def test_the_scale_comes_from_128_and_64():
    """And from the square of the one of YaRN's two factors that the model means."""
    plain = (128 + 64) ** -0.5
    assert plain == pytest.approx(SOFTMAX_SCALE)
    assert plain == pytest.approx(0.072169, abs=1e-6)
    assert plain * yarn_mscale(40, 1.0) ** 2 == pytest.approx(0.135234, abs=1e-6)
    assert plain * yarn_mscale(40, 0.707) ** 2 == pytest.approx(0.114721, abs=1e-6)
    # Two keys with raw scores 0 and 10: the weights tell which scale was used.
    q = torch.zeros(1, 576, dtype=torch.float64)
    q[0, 0] = 10
    kv = torch.zeros(2, 576, dtype=torch.float64)
    kv[1, 0] = 1
    for scale in (0.135234, 0.114721, 0.072169):
        out, _ = attend(q, kv, 512, scale)
        assert out[0, 0].item() == pytest.approx(1 / (1 + math.exp(-10 * scale)), rel=1e-9)


def cos_sin_at(position: float, width: int = 64) -> torch.Tensor:
    angle = position * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.cat([angle.cos(), angle.sin()])[None]


def test_rope_pairs():
    """A unit vector at position 1 lands on two places, and which two is the pairing."""
    x = torch.zeros(1, 64)
    x[0, 0] = 1
    table = cos_sin_at(1.0)
    interleaved, neox = rotate(x, table, "interleaved"), rotate(x, table, "neox")
    assert interleaved.nonzero()[:, 1].tolist() == [0, 1]
    assert neox.nonzero()[:, 1].tolist() == [0, 32]
    for rotated in (interleaved[0, [0, 1]], neox[0, [0, 32]]):
        torch.testing.assert_close(rotated, torch.tensor([math.cos(1.0), math.sin(1.0)]))


@pytest.mark.parametrize("rope", ["interleaved", "neox"])
def test_rope_is_relative(rope):
    """Scores depend on the distance of positions only; lengths are kept."""
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 64, generator=generator)
    scores = [
        (rotate(q, cos_sin_at(p + 7), rope) * rotate(k, cos_sin_at(p), rope)).sum()
        for p in (0, 1, 100)
    ]
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(rotate(q, cos_sin_at(5), rope).norm(), q.norm())


def test_the_cached_bytes_tell_the_pairing():
    """Backends that share a prefix must agree on the bytes, not only on the scores."""
    spec = MLASpec(num_heads=1, page_size=4)
    cache = torch.full((2, 4, 576), 7.0, dtype=torch.bfloat16)
    k_pe = torch.zeros(1, 64, dtype=torch.bfloat16)
    k_pe[0, 0] = 1
    zeros = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    table = torch.cat([cos_sin_at(0.0), cos_sin_at(1.0)])
    for rope, places in (("interleaved", [0, 1]), ("neox", [0, 32])):
        q = epilogue_reference(
            zeros, k_pe[:, None], zeros[0], k_pe, cache, torch.tensor([6]), spec,
            positions=torch.tensor([1]), cos_sin=table, rope=rope,
        )  # fmt: skip
        assert cache[1, 2, 512:].nonzero()[:, 0].tolist() == places
        assert q[0, 0, 512:].nonzero()[:, 0].tolist() == places
        untouched = cache.view(8, 576)[[0, 1, 2, 3, 4, 5, 7]]
        assert (untouched == 7).all()


def test_the_epilogue_skips_negative_slots():
    spec = MLASpec(num_heads=2, page_size=4, kv_format="fp8_e4m3fn")
    cache = torch.zeros(2, 4, 576, dtype=torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(4)
    q_nope, q_pe = (torch.randn(5, 2, n, generator=generator).bfloat16() for n in (512, 64))
    kv_c, k_pe = (torch.randn(5, n, generator=generator).bfloat16() for n in (512, 64))
    slots = torch.tensor([3, -1, 7, -1, 0])
    scale = torch.tensor([0.37])
    q = epilogue_reference(q_nope, q_pe, kv_c, k_pe, cache, slots, spec, k_scale=scale)
    assert torch.equal(q, torch.cat([q_nope, q_pe], -1))
    written = (cache.view(8, 576).float() != 0).any(-1)
    assert written.nonzero()[:, 0].tolist() == [0, 3, 7]
    decoded = decode_rows(cache.view(8, 576)[3], spec, scale)
    want = torch.cat([kv_c[0], k_pe[0]]).double()
    assert ((decoded - want).abs() <= want.abs() * 2**-4 + 2**-9 * 0.37).all()
