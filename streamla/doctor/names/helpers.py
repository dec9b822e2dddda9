"""Kernels around attention: what each is for, by name. The first pattern found decides the role."""

from __future__ import annotations

from streamla.doctor.names.grammar import Family

_ROLES: tuple[tuple[str, str, str], ...] = (
    # role, family, pattern
    ("epilogue", "vllm", r"concat_and_cache_mla|mla_decode_q_concat_kv_cache|reshape_and_cache"),
    ("epilogue", "aiter", r"qk_rope_concat_and_cache"),
    ("epilogue", "sglang", r"set_mla_kv_(?:buffer|concat_q)|concat_mla_(?:absorb_)?[qk]|fused_qk_rope_reshape"),
    ("epilogue", "flashinfer", r"RopeQuantize|AppendPagedKV|QKApplyRotary"),
    ("epilogue", "trtllm", r"applyMLARope"),
    ("quantize", "torch", r"float8_copy_kernel|Float8_e4m3\w*_copy"),
    ("quantize", "", r"(?i)(?:scaled|static|dynamic|per_token\w*|per_tensor\w*|group)_(?:fp8_)?quant|quantize_fp8|fp8_quant"),
    ("dequantize", "", r"(?i)dequant"),
    ("concat", "torch", r"CatArrayBatchedCopy|cat_array"),
    ("cast", "torch", r"bfloat16_copy_kernel|float16_copy_kernel|LoadWithCast"),
    ("copy", "torch", r"direct_copy_kernel|(?i:memcpy)|copyBuffer|vectorized_gather|index_elementwise"),
    ("fill", "torch", r"FillFunctor|(?i:memset)|fillBuffer"),
    ("norm", "", r"(?i)rms_?norm|layer_?norm|add_residual|residual_add"),
    ("communication", "", r"(?i)nccl|rccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("moe", "", r"(?i)\bmoe|_moe|fused_experts|topk_gating|expert"),
    ("gemm", "", r"(?i)gemm|nvjet|cijk_|gemv|matmul|splitK_?reduce"),
    ("sampling", "", r"(?i)argmax|sampl|top_?[kp]\b|softmax"),
)  # fmt: skip

HELPERS: tuple[Family, ...] = tuple(
    Family(family or role, role, pattern) for role, family, pattern in _ROLES
)
