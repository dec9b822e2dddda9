"""Triton kernels for both vendors: the implementation that serves whatever no other claims."""

from streamla.kernels.portable.attention import attention, cost_model
from streamla.kernels.portable.decode import decode, warmup
from streamla.kernels.portable.epilogue import epilogue, warm_epilogue
from streamla.kernels.portable.merge import merge
from streamla.kernels.portable.plan import plan

__all__ = [
    "attention",
    "cost_model",
    "decode",
    "epilogue",
    "merge",
    "plan",
    "warm_epilogue",
    "warmup",
]
