"""What kernel names tell, as profilers print them, and what they must not be made to tell."""

import pytest

from streamla.doctor.names import decode, padding
from streamla.doctor.names.text import clean, demangle, identifiers

# name: family, query, cache, heads and query rows of the tile, persistent
SEEN = {
    "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps": ("aiter-asm-mla", "bf16", "fp8", 16, 4, True),
    "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps_page64_ds32": ("aiter-asm-mla", "bf16", "fp8_ds_mla", 16, 4, True),
    "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1": ("aiter-asm-mla", "bf16", "bf16", 16, 4, False),
    "mla_a8w8_qh16_qseqlen2_gqaratio16": ("aiter-asm-mla", "fp8", "fp8", 16, 2, False),
    "mla_a8w8_qh64_qseqlen4_gqaratio16_ps": ("aiter-asm-mla", "fp8", "fp8", 16, 4, True),
    "mla_a8w8_qh128_m32x4_n16x2_msk0_ps": ("aiter-asm-mla", "fp8", "fp8", 128, 1, True),
    "mla_a16w16_qh8_qseqlen2_gqaratio8_causal": ("aiter-asm-mla", "bf16", "bf16", 8, 2, False),
    "_ZN5aiter39mla_a8w8_qh64_qseqlen1_gqaratio64_v3_psE": ("aiter-asm-mla", "fp8", "fp8", 64, 1, True),
    "mla_dec_stage1_bf16_a16w16_subQ16_mqa16": ("aiter-asm-mla", "bf16", "bf16", 16, 1, False),
    "mla_dec_stage1_bf16_a16w16_subQ128_mqa128": ("aiter-asm-mla", "bf16", "bf16", 128, 1, False),
    "MLA_A16W16_1TG_4W_32mx1_16nx1_Coex0_Msk1_QH16": ("aiter-asm-mla", "bf16", "bf16", 32, 1, False),
    "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk576HV512HVPerCta256PagedKvDenseP64VarSeqQ64Kv128Persistent2CtaKeepsAbForGen":
        ("trtllm-gen", "bf16", "bf16", 64, 1, True),
    "fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512PagedKvDenseP32VarSeqQ16Kv128StaticSwapsAbForGen":
        ("trtllm-gen", "fp8", "fp8", 16, 1, False),
    "void flash::flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8, cutlass::float_e4m3_t, "
    "cutlass::bfloat16_t, 512>, false, flash::SharedStorageMLA<int> >(DecodingParams_fp8)":
        ("flashmla", "fp8", "fp8", 64, 1, True),
    # nsys writes literals as casts
    "void flash::flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<(int)576, (int)64, (int)64, (int)8, "
    "cutlass::float_e4m3_t, cutlass::bfloat16_t, (int)512>, (bool)0>(DecodingParams_fp8)":
        ("flashmla", "fp8", "fp8", 64, 1, True),
    "void sm90::decode::dense::flash_fwd_splitkv_mla_kernel<sm90::decode::dense::Traits<cutlass::bfloat16_t, 576>, int>(int)":
        ("flashmla", "bf16", "bf16", 64, 1, True),
    "void sm90::decode::sparse::flash_fwd_splitkv_mla_fp8_sparse_kernel<sm90::decode::sparse::KernelTemplate<(ModelType)0, 128>, int>(int)":
        ("flashmla-sparse", "bf16", "fp8", 128, 1, True),
    "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<flashinfer::mla::hopper::HopperKernelTraits<"
    "false, 2u, 512u, 64u, 64u, 64u, __nv_bfloat16, __nv_fp8_e4m3, __nv_bfloat16, int>, int>(int)":
        ("flashinfer-mla-fa3", "bf16", "fp8", 64, 1, True),
    "void flashinfer::mla::BatchMLAPagedAttentionKernel<flashinfer::mla::KernelTraits<false, 2u, true, 512u, 64u, "
    "64u, 32u, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int>, int>(int)":
        ("flashinfer-mla-fa2", "bf16", "bf16", 64, 1, True),
    "_fwd_grouped_kernel_stage1": ("triton-mla", None, None, 16, 1, False),
    "_fwd_grouped_kernel_stage1_rope": ("triton-mla", None, None, 16, 1, False),
    "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<cute::tuple<cute::C<128>, "
    "cute::C<128>, cute::tuple<cute::C<512>, cute::C<64> > >, cutlass::bfloat16_t, float, cutlass::bfloat16_t, float, "
    "cutlass::fmha::kernel::Sm100MlaPersistentTileScheduler, true> >(int)": ("cutlass-mla", "bf16", "bf16", 128, 1, True),
    "mla_attention_kernel": ("streamla-portable", None, None, None, None, True),
    "mla_attention": ("streamla-sm90", "bf16", "fp8", None, None, True),
    "mla_attention_ds_mla": ("streamla-sm90", "bf16", "fp8_ds_mla", None, None, True),
    "mla_attention_bf16": ("streamla-sm90", "bf16", "bf16", None, None, True),
    "_mla_gluon": ("aiter-gluon-mla", None, None, None, None, None),
    "main_split_kernel": ("tilelang", None, None, None, None, None),
}  # fmt: skip

FA3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, "
    "cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<64>, cute::C<64>, cute::C<64> >, 512, "
    "cutlass::bfloat16_t, float, cutlass::arch::Sm90, false, false, false, {varlen}, false, false, {qv}, false, false, "
    "{pack}, {split}, false>, flash::CollectiveEpilogueFwd<int>, flash::{scheduler}<false> > > >(int)"
)


@pytest.mark.parametrize("name", SEEN, ids=lambda n: n[:60])
def test_names_seen_in_the_field(name):
    family, q, kv, heads, q_rows, persistent = SEEN[name]
    k = decode(name)
    assert (k.family, k.role, k.unknown) == (family, "attention", ())
    assert (k.q_dtype, k.kv_dtype, k.tile_heads, k.tile_q_rows, k.persistent) == (
        q,
        kv,
        heads,
        q_rows,
        persistent,
    )


@pytest.mark.parametrize(
    ("name", "family", "role"),
    [
        ("kn_mla_reduce_v1", "aiter-mla-reduce", "merge"),
        ("void aiter::kn_mla_reduce_v1<512, 16>(int)", "aiter-mla-reduce", "merge"),
        ("void flash::flash_fwd_splitkv_mla_combine_kernel<cutlass::bfloat16_t, float, long, 512, 32>(int)", "flashmla", "merge"),
        ("flash_fwd_mla_combine_kernel", "flashmla", "merge"),
        ("get_mla_metadata_kernel(Mla_metadata_params)", "flashmla", "plan"),
        ("_fwd_kernel_stage2", "triton-mla", "merge"),
        ("mla_merge_kernel", "streamla", "merge"),
        ("mla_epilogue_kernel", "streamla", "epilogue"),
        ("mla_plan_by_length_kernel", "streamla", "plan"),
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>(int)", "vllm", "epilogue"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int>(int)", "torch", "concat"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(int)", "communication", "communication"),
    ],
)  # fmt: skip
def test_helpers(name, family, role):
    k = decode(name)
    assert (k.family, k.role) == (family, role)
    assert not k.is_decode_attention


def test_fa3_tells_mla_from_other_attention():
    def name(**k):
        return decode(FA3.format(**{"varlen": "false", "qv": "true", "pack": "true", "split": "true",
                                    "scheduler": "SingleTileScheduler", **k}))  # fmt: skip

    mla = name()
    assert (mla.mla, mla.split, mla.persistent, mla.tile_rows, mla.flattened) == (
        True,
        True,
        False,
        64,
        True,
    )
    assert name(qv="false").mla is False
    assert not name(qv="false").is_decode_attention
    assert name(split="false").split is False
    assert name(scheduler="VarlenDynamicPersistentTileScheduler").persistent is True
    # Without packing every head has a tile of its own.
    assert padding(name(pack="false"), 16) == pytest.approx(1 - 1 / 64)


def test_unknown_parts_are_reported_and_nothing_else_changes():
    k = decode("mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_wizard7_ps")
    assert k.unknown == ("wizard7",)
    assert (k.tile_heads, k.tile_q_rows, k.persistent) == (16, 4, True)
    t = decode("fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512PagedKvDenseWizardQ16Kv128Persistent")
    assert t.unknown == ("Wizard",)
    assert t.tile_rows == 16


@pytest.mark.parametrize(
    "name",
    [
        "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1...",
        "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_p...",
        "void aiter::mla_a16w8_qh16_m16x4_n16x1_coe…",
        "_ZN5aiter41mla_a16w8_qh16_m16x4_n16x1_coex0_ma",
    ],
)
def test_a_cut_name_does_not_say_persistent_or_not(name):
    k = decode(name)
    assert (k.family, k.persistent, k.truncated) == ("aiter-asm-mla", None, True)
    assert (k.q_dtype, k.kv_dtype, k.tile_heads, k.tile_q_rows) == ("bf16", "fp8", 16, 4)
    assert "cut off" in k.unknown[-1]


def test_cut_template_arguments_are_unknown():
    k = decode("void flash::flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_tra...")
    assert (k.family, k.q_dtype, k.tile_rows) == ("flashmla", None, 64)
    # Cut without dots: the brackets are open.
    assert decode("void flash::flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_tra").truncated
    t = decode(
        "fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512PagedKvDenseStaticTokenSparseP1VarSeqQ8Kv128Pe..."
    )
    assert (t.persistent, t.split, t.tile_rows) == (None, None, 8)


def test_no_family_is_said_when_there_is_none():
    for name in ("my_attention_kernel", "mla", "", "mla_attention_kernel_of_another_project"):
        assert decode(name).family is None


@pytest.mark.parametrize("suffix", [".kd", " [clone .kd]", ".hsaco"])
def test_suffixes(suffix):
    name = "mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps"
    assert decode(name + suffix).text == name


def test_padding():
    study = decode("mla_a16w8_qh16_m16x4_n16x1_coex0_mask1_ps")
    assert padding(study, heads=16, q_len=1) == 0.75
    assert padding(study, heads=16, q_len=4) == 0.0
    assert padding(study, heads=16, q_len=5) == pytest.approx(1 - 5 / 8)
    assert padding(study, heads=32, q_len=1) == 0.75  # folded into groups of 16
    assert padding(study, heads=12, q_len=1) == pytest.approx(1 - 12 / 64)
    flashmla = decode("flash_fwd_splitkv_mla_kernel")
    assert padding(flashmla, heads=16) == 0.75
    assert padding(flashmla, heads=16, q_len=4) == 0.0  # rows of heads and queries share a tile
    assert padding(flashmla, heads=96) == 0.25
    assert padding(decode("_fwd_grouped_kernel_stage1"), heads=8) == 0.5
    assert padding(decode("_mla_gluon"), heads=16) is None


@pytest.mark.parametrize(("heads", "q_len", "sm90", "portable"), [(16, 1, 16, 16), (8, 1, 8, 16), (12, 1, 16, 16),
                                                                  (16, 2, 32, 32), (24, 1, 24, 32), (96, 1, 96, 96)])  # fmt: skip
def test_own_kernels_fit_their_rows(heads, q_len, sm90, portable):
    rows = heads * q_len
    assert padding(decode("mla_attention"), heads, q_len) == pytest.approx(1 - rows / sm90)
    assert padding(decode("mla_attention_kernel"), heads, q_len) == pytest.approx(
        1 - rows / portable
    )


def test_demangling_and_its_fallback():
    symbol = "_ZN5flash28flash_fwd_splitkv_mla_kernelI27Flash_fwd_kernel_traits_mlaILi576ELi64ELi64ELi8EN7cutlass12float_e4m3_tENS2_10bfloat16_tELi512EELb0EEEv6Params"
    plain = demangle(symbol)
    if plain is not None:  # a C++ runtime is here
        assert "Flash_fwd_kernel_traits_mla<576, 64, 64, 8, cutlass::float_e4m3_t" in plain
        assert decode(symbol).q_dtype == "fp8"
    found, whole = identifiers(symbol)
    assert found[:3] == ["flash", "flash_fwd_splitkv_mla_kernel", "Flash_fwd_kernel_traits_mla"]
    assert whole
    assert clean("_ZN5aiter41mla_a16w8_qh16_m16x4_n16x1_coex0_ma").truncated


def test_without_a_demangler_template_arguments_stay_unknown(monkeypatch):
    monkeypatch.setattr("streamla.doctor.names.text.demangle", lambda symbol: None)
    decode.cache_clear()
    k = decode(
        "_ZN5flash28flash_fwd_splitkv_mla_kernelI27Flash_fwd_kernel_traits_mlaILi576ELi64ELi64ELi8EN7cutlass12float_e4m3_tELi512EEEEv6Params"
    )
    assert (k.family, k.q_dtype, k.truncated) == ("flashmla", None, True)
    assert decode("_ZN5aiter39mla_a8w8_qh64_qseqlen1_gqaratio64_v3_psE").persistent is True
    decode.cache_clear()
