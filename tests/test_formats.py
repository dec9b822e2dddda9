"""What stored bytes mean: tables of single values, every byte, and whole rows."""

import math

import pytest
import torch

from streamla.formats import decode_rows, ds_mla_scales, encode_rows, to_fp8
from streamla.spec import KVFormat, MLASpec

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
NAN, INF = math.nan, math.inf


def spec(fmt: str, **kwargs) -> MLASpec:
    return MLASpec(num_heads=1, kv_format=fmt, **kwargs)


def value_of_byte(byte: int, bias: int, nan_codes: tuple[int, ...]) -> float:
    """An e4m3 byte by definition: sign, four exponent bits, three mantissa bits."""
    if byte in nan_codes:
        return NAN
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize(
    ("fmt", "bias", "nan_codes"),
    [("fp8_e4m3fn", 7, (0x7F, 0xFF)), ("fp8_e4m3fnuz", 8, (0x80,))],
)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_every_byte_decodes_to_its_value(fmt, bias, nan_codes, as_bytes):
    rows = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    if not as_bytes:
        rows = rows.view(KVFormat(fmt).storage_dtype)
    values = decode_rows(rows, spec(fmt, kv_lora_rank=16, qk_rope_head_dim=16))
    want = torch.tensor(
        [value_of_byte(b, bias, nan_codes) for b in range(256)], dtype=torch.float64
    )
    assert torch.equal(values.flatten().nan_to_num(nan=1e9), want.nan_to_num(nan=1e9))


def test_the_same_byte_is_worth_half_in_fnuz():
    byte = torch.tensor([0x38], dtype=torch.uint8)
    assert byte.view(FN).float().item() == 1.0
    assert byte.view(FNUZ).float().item() == 0.5
    assert torch.tensor([0x7F], dtype=torch.uint8).view(FNUZ).float().item() == 240.0
    assert torch.tensor([0x80], dtype=torch.uint8).view(FN).float().item() == 0.0


# value, scale 1: e4m3fn byte, e4m3fnuz byte
ENCODED = [
    (0.0, 0x00, 0x00),
    (1.0, 0x38, 0x40),
    (-1.0, 0xB8, 0xC0),
    (239.0, 0x77, 0x7F),
    (240.0, 0x77, 0x7F),
    (447.0, 0x7E, 0x7F),
    (448.0, 0x7E, 0x7F),
    (463.0, 0x7E, 0x7F),
    (464.0, 0x7E, 0x7F),
    (465.0, 0x7E, 0x7F),
    (480.0, 0x7E, 0x7F),
    (1e4, 0x7E, 0x7F),
    (3e38, 0x7E, 0x7F),
    (INF, 0x7E, 0x7F),
    (-INF, 0xFE, 0xFF),
    (-465.0, 0xFE, 0xFF),
    (-0.0, 0x80, 0x00),
    (1e-9, 0x00, 0x00),
    (-1e-9, 0x80, 0x00),
    (2**-9, 0x01, 0x02),
    (-(2**-10), 0x80, 0x81),
    (2**-10, 0x00, 0x01),
    (-(2**-11), 0x80, 0x00),
    (3 * 2**-11, 0x01, 0x02),
    (1.0625, 0x38, 0x40),  # halfway: to even
    (1.1875, 0x3A, 0x42),
]


@pytest.mark.parametrize(("value", "fn", "fnuz"), ENCODED)
def test_encoding_saturates_rounds_to_even_and_keeps_signs(value, fn, fnuz):
    values = torch.tensor([value])
    assert to_fp8(values, FN).view(torch.uint8).item() == fn
    assert to_fp8(values, FNUZ).view(torch.uint8).item() == fnuz


@pytest.mark.parametrize("value", [value for value, _, _ in ENCODED])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz"])
def test_a_scale_divides_on_write_and_multiplies_on_read(value, fmt):
    narrow = spec(fmt, kv_lora_rank=16, qk_rope_head_dim=16)
    scale = torch.tensor([2.0])
    rows = encode_rows(torch.full((1, 32), value), narrow, scale)
    assert torch.equal(
        rows.view(torch.uint8),
        encode_rows(torch.full((1, 32), value / 2), narrow).view(torch.uint8),
    )
    back = decode_rows(rows, narrow, scale)
    assert torch.equal(back, 2 * decode_rows(rows, narrow))
    assert back.isfinite().all()


@pytest.mark.parametrize("fmt", [FN, FNUZ])
@pytest.mark.parametrize("value", [NAN, -NAN])
def test_nan_stays_nan(fmt, value):
    assert to_fp8(torch.tensor([value]), fmt).float().isnan().all()


def test_no_finite_value_becomes_nan_in_fnuz():
    values = torch.linspace(-500, 500, 20001)
    values = torch.cat([values, values * 1e-6, -torch.logspace(-30, 3, 500)])
    stored = to_fp8(values, FNUZ)
    assert not stored.float().isnan().any()
    assert not (stored.view(torch.uint8) == 0x80).any()


def test_encoding_every_value_gives_its_byte_back():
    for dtype in (FN, FNUZ):
        bytes_ = torch.arange(256, dtype=torch.uint8)
        values = bytes_.view(dtype).float()
        back = to_fp8(values, dtype).view(torch.uint8)
        same = (back == bytes_) | values.isnan()
        assert same.all()


def test_bf16_rows_are_the_values():
    values = torch.randn(5, 576).bfloat16()
    rows = encode_rows(values, spec("bf16"))
    assert rows.dtype is torch.bfloat16
    assert torch.equal(decode_rows(rows, spec("bf16")), values.double())


def test_a_ds_mla_row_is_512_bytes_4_scales_and_64_bf16():
    values = torch.randn(3, 576, generator=torch.Generator().manual_seed(1))
    values[:, 128:256] *= 100
    rows = encode_rows(values, spec("fp8_ds_mla"))
    assert rows.shape == (3, 656)
    assert rows.dtype is torch.uint8
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, ds_mla_scales(values[:, :512]))
    rope = rows[:, 528:].contiguous().view(torch.bfloat16)
    assert torch.equal(rope, values[:, 512:].bfloat16())
    latent = rows[:, :512].contiguous().view(FN).double() * scales.double().repeat_interleave(
        128, 1
    )
    decoded = decode_rows(rows, spec("fp8_ds_mla"))
    assert torch.equal(decoded[:, :512], latent)
    assert torch.equal(decoded[:, 512:], rope.double())
    # A value is off by half a step at most: 2^-4 of it, or of the group's smallest normal value.
    smallest = scales.double().repeat_interleave(128, 1) * 2**-6
    bound = torch.maximum(values[:, :512].double().abs(), smallest) * 2**-4
    assert ((latent - values[:, :512].double()).abs() <= bound).all()


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (448.0, 1.0), (448.1, 2.0), (447.0, 1.0), (896.0, 2.0), (1.0, 2.0**-8), (0.875, 2.0**-9),
        (0.0, 2.0**-13), (1e-20, 2.0**-13), (3e38, 2.0**120), (INF, 2.0**120),
    ],
)  # fmt: skip
def test_ds_mla_scales_are_the_next_power_of_two(largest, scale):
    latent = torch.zeros(1, 512)
    latent[0, 130] = -largest
    scales = ds_mla_scales(latent)
    assert scales[0, 1].item() == scale
    assert scales[0, 0].item() == 2.0**-13
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all()


def test_nan_in_a_ds_mla_group_spoils_neither_the_scale_nor_the_neighbours():
    values = torch.ones(1, 576)
    values[0, 5] = NAN
    decoded = decode_rows(encode_rows(values, spec("fp8_ds_mla")), spec("fp8_ds_mla"))
    assert decoded[0, 5].isnan()
    assert decoded.isnan().sum() == 1
    assert torch.equal(decoded[0, 6:], values[0, 6:].double())


def test_row_bytes():
    assert [spec(fmt.value).row_bytes for fmt in KVFormat] == [1152, 576, 576, 656]
    assert [spec(fmt.value).row_width for fmt in KVFormat] == [576, 576, 576, 656]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_heads": 0}, "num_heads: need an int >= 1; got 0"),
        ({"num_heads": 129}, "num_heads: need 1 to 128; got 129"),
        ({"num_heads": True}, "num_heads: need an int"),
        ({"num_heads": 16.0}, "num_heads: need an int"),
        ({"num_heads": 16, "page_size": 0}, "page_size: need an int >= 1"),
        ({"num_heads": 16, "seqlen_q": -1}, "seqlen_q: need an int >= 1"),
        (
            {"num_heads": 16, "kv_lora_rank": 500},
            "kv_lora_rank: need a power of two >= 16; got 500",
        ),
        ({"num_heads": 16, "qk_rope_head_dim": 8}, "qk_rope_head_dim: need a power of two >= 16"),
        ({"num_heads": 16, "kv_format": "fp8"}, "kv_format: need one of bf16, fp8_e4m3fn"),
        ({"num_heads": 16, "kv_format": "fp8_ds_mla", "kv_lora_rank": 64}, "multiple of 128"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MLASpec(**kwargs)
