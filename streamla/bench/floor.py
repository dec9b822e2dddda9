"""The floor: a kernel that reads the same bytes and does nothing else.

It reads each region in address order with the widest loads and folds the words with XOR, which the
compiler cannot drop and which costs next to nothing. What decode takes beyond this time is its own doing.
"""

from __future__ import annotations

from functools import reduce

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words a program reads in one step
PROGRAMS_PER_UNIT = 2
NUM_WARPS = 4
NUM_STAGES = 4


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def read_kernel(words, num_words, folded, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Program p folds blocks p, p + P, p + 2P, ... of `words` (int32) into folded[p]."""
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for begin in tl.range(program * BLOCK, num_words, step, num_stages=STAGES):
        acc ^= tl.load(words + begin + lanes, mask=begin + lanes < num_words, other=0)
    tl.store(folded + program, tl.reduce(acc, 0, _xor))


def read(words: torch.Tensor, folded: torch.Tensor) -> None:
    """One launch over `words`, a contiguous int32 tensor; one program for each element of `folded`."""
    read_kernel[(folded.numel(),)](
        words, words.numel(), folded, BLOCK=BLOCK, STAGES=NUM_STAGES, num_warps=NUM_WARPS
    )


def folded_buffer(units: int, device: torch.device) -> torch.Tensor:
    """Where `read` leaves its results on a GPU with `units` SMs or CUs."""
    return torch.empty(PROGRAMS_PER_UNIT * units, dtype=torch.int32, device=device)


def check(device: torch.device, units: int) -> None:
    """Raise if the read kernel does not see every word, on a buffer that ends inside a block."""
    generator = torch.Generator(device).manual_seed(0)
    words = torch.randint(
        -(2**31), 2**31, (5 * BLOCK + 52,), dtype=torch.int32, device=device, generator=generator
    )
    folded = folded_buffer(units, device)
    read(words, folded)
    seen, wanted = (reduce(int.__xor__, t.tolist()) for t in (folded, words))
    if seen != wanted:
        raise RuntimeError(f"floor: the read kernel folded {seen:#x}; the buffer holds {wanted:#x}")
