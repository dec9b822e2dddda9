"""The public calls: validate, select, launch.

    plan = streamla.plan(cache_seqlens, spec)                      # once a step
    q = streamla.epilogue(q_nope, q_pe, kv_c, k_pe, kv_cache, slots, spec)     # once a layer
    out = streamla.decode(q, kv_cache, page_table, plan, softmax_scale=scale)  # once a layer

`decode_step` is the last two in one, without a launch of the epilogue where a kernel can do it.

No call synchronises with the device, and with `out=` and `lse=` none allocates but a `decode_step` that
launches the epilogue, so all of them may be captured in a CUDA graph once `warmup` has compiled what
they launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from streamla import checks, checks_epilogue, ops
from streamla.arch import arch_of
from streamla.plan import CostModel, DecodePlan, empty_plan
from streamla.select import answers, select
from streamla.spec import KVFormat, MLASpec


def plan(
    cache_seqlens: torch.Tensor,
    spec: MLASpec,
    *,
    max_seqlen: int | None = None,
    batch_invariant: bool = False,
    impl: str = "auto",
    out: DecodePlan | None = None,
) -> DecodePlan:
    """Divide the work of one decode step among the programs of the GPU.

    Runs on the device that holds the lengths, without a host sync: a graph that captured it serves
    every later content of `cache_seqlens`.

    Args:
        cache_seqlens: (batch,) int32, tokens of each request, the seqlen_q new ones included. 0 is an
            empty row: its output is 0 and its lse -inf.
        spec: what the plan is for.
        max_seqlen: lengths are cut to this many tokens on the device, and `plan.status` says so. Give
            the page table's width in tokens, and no length can lead past the table.
        batch_invariant: cut each request by its own length alone, so that its bits do not depend on the
            rest of the batch. Costs balance, and up to `cost.max_splits` partial slots a request (fewer
            with a small `max_seqlen`).
        impl: "auto" or an implementation's name; see `support`.
        out: a plan of the same batch size, spec and options, whose buffers are filled again.

    Returns:
        The plan, `out` if it was given. One plan serves all layers of the step, on one stream.

    Raises:
        ValueError, TypeError: an argument is not as above; lengths on the CPU are checked too.
    """
    if not isinstance(spec, MLASpec):
        raise TypeError(f"spec: need an MLASpec; got {type(spec).__name__}")
    checks.check_lengths(cache_seqlens, max_seqlen)
    batch, device = cache_seqlens.shape[0], cache_seqlens.device
    if out is None:
        chosen, *cost = _choose(ops.spec_facts("", spec), device, impl)
        checks.check_workspace(batch, spec, CostModel(*cost), max_seqlen, batch_invariant)
        out = empty_plan(
            batch, spec, chosen, CostModel(*cost), device, max_seqlen, batch_invariant
        )  # fmt: skip
    else:
        checks.check_reused(out, spec, batch, device, max_seqlen, batch_invariant, impl)
    torch.ops.streamla.plan(cache_seqlens, *ops.plan_arguments(out))
    return out


# Both take the spec as a string: Dynamo does not hand a dataclass to a function whose result it keeps as a constant.
def _choose(facts: str, device: torch.device, impl: str) -> tuple[str, int, int, int, int, int]:
    """The implementation's name and its cost model, as constants that a compiled graph can hold."""
    spec, arch = ops.read_spec(facts), arch_of(device)
    chosen = select(spec, arch, impl)
    return chosen.name, *dataclasses.astuple(chosen.load().cost_model(spec, arch))


def _choose_epilogue(facts: str, device: torch.device, impl: str) -> str:
    return select(ops.read_spec(facts), arch_of(device), impl, epilogue=True).name


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]
_choose_epilogue._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    *,
    softmax_scale: float,
    q_pe: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "e",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention stage alone: final rows of requests in one piece, partial slots of the others.

    Arguments and errors are those of `decode`. Rows of split requests are left as they were in `out`
    and `lse` until `merge` finishes them.
    """
    arguments = _arguments(
        q, kv_cache, page_table, plan, softmax_scale, q_pe, k_scale, causal, out, lse, lse_base
    )
    torch.ops.streamla.attention(*arguments)
    return arguments[-5], arguments[-4]


def merge(plan: DecodePlan, out: torch.Tensor, lse: torch.Tensor, *, lse_base: str = "e") -> None:
    """Finish `out` and `lse` of every split request, in place, from the plan's partial slots.

    Args:
        plan: the plan that `attention` ran.
        out: (batch, seqlen_q, num_heads, kv_lora_rank) bfloat16.
        lse: (batch, seqlen_q, num_heads) float32.
        lse_base: "e" or "2", as given to `attention`.

    Raises:
        ValueError, TypeError: an argument is not as above.
    """
    checks.check_plan(plan)
    lse_scale = checks.check_lse_base(lse_base)
    out, lse = checks.outputs(out, lse, plan)
    torch.ops.streamla.merge(*ops.plan_arguments(plan), out, lse, lse_scale)


def decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    *,
    softmax_scale: float,
    q_pe: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: str = "e",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MLA decode: attention and merge. Reads the engine's own tensors; copies none.

    Args:
        q: (batch, seqlen_q, num_heads, kv_lora_rank + qk_rope_head_dim) bfloat16, or with `q_pe` its
            first kv_lora_rank columns. Any strides, the last dimension contiguous.
        kv_cache: (num_pages, page_size, row_width) of the format's dtype (fp8 also as uint8), any page
            and token stride, the last dimension contiguous.
        page_table: (batch, width) int32. Entries past a request's last page are never read.
        plan: from `plan`, for these lengths.
        softmax_scale: the model's: MLA scales by its un-absorbed head width, (128 + 64) ** -0.5, times
            what its rope scaling adds. There is no default, since head_dim here is not that width.
        q_pe: (batch, seqlen_q, num_heads, qk_rope_head_dim) bfloat16.
        k_scale: one float32 on the device, for the fp8 formats: real = stored * k_scale. None is 1.
        causal: query i of n sees keys [0, seqlen - n + 1 + i), else all.
        out: (batch, seqlen_q, num_heads, kv_lora_rank) bfloat16, written; else a new tensor.
        lse: (batch, seqlen_q, num_heads) float32, written; else a new tensor.
        return_lse: also return the log of the sum of exponentials, -inf where nothing was seen.
        lse_base: "e" for natural logarithms, "2" for base 2.

    Returns:
        out, or (out, lse).

    Raises:
        ValueError, TypeError: an argument is not as above, or does not fit the plan. Lengths and page
            ids are checked on the CPU, and on a GPU with STREAMLA_DEBUG=1 (which synchronises).
    """
    arguments = _arguments(
        q, kv_cache, page_table, plan, softmax_scale, q_pe, k_scale, causal, out, lse, lse_base
    )
    torch.ops.streamla.decode(*arguments)
    out, lse = arguments[-5], arguments[-4]
    return (out, lse) if return_lse else out


def epilogue(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    spec: MLASpec,
    *,
    q_out: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    rope: str | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    q_format: KVFormat | str = KVFormat.BF16,
    reserved_slot: int | None = None,
    inputs_ready: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """What comes between the projections and attention: rotate, write the new rows, join the query.

    One launch. Values are rotated in float32 and rounded once, to what is stored. Every argument but the
    spec, the formats and the strides may change between replays of a graph.

    Args:
        q_nope: (tokens, num_heads, kv_lora_rank) bfloat16, the absorbed query; any strides, the last
            dimension contiguous, as for q_pe, kv_c and k_pe.
        q_pe: (tokens, num_heads, qk_rope_head_dim) bfloat16, not rotated.
        kv_c: (tokens, kv_lora_rank) bfloat16, the normalised latent.
        k_pe: (tokens, qk_rope_head_dim) bfloat16, not rotated.
        kv_cache: as for `decode`; the rows of `slot_mapping` are written, in the spec's format.
        slot_mapping: (tokens,) int64, page * page_size + place in the page, every slot once. A negative slot
            writes no row, and neither do the tokens past the end of a shorter mapping; their queries
            are written all the same.
        spec: the cache's format, page size and widths, and the heads.
        q_out: (at least tokens, num_heads, head_dim) of q_format's dtype (fp8 also as uint8), written up to
            `tokens`; else a new tensor. It may not overlap an input.
        positions: (tokens,) int64, rows of cos_sin. None rotates nothing (NoPE).
        cos_sin: (num_positions, qk_rope_head_dim) float32: the cosines, then the sines.
        rope: which values are pairs: "interleaved" (2i, 2i + 1) or "neox" (i, i + half).
        q_scale: one float32 on the device, for an fp8 query: real = stored * q_scale. None is 1.
        k_scale: the same for an fp8 cache, as `decode` takes it.
        q_format: "bf16", whatever the cache's format, or "fp8_e4m3fn" or "fp8_e4m3fnuz". fp8 saturates;
            NaN stays NaN. `decode` takes bf16.
        reserved_slot: a slot that is never written, whoever names it (engines keep padding there).
        inputs_ready: all that is read but q_nope and q_pe was complete before the kernel just ahead on the
            stream could start. Hopper's kernel then reads it while that one still runs
            (docs/epilogue.md states the rule); else it waits before it reads anything.
        impl: as for `plan`, and chosen by itself: a spec's epilogue may be Hopper's where its attention is not.

    Returns:
        The query (tokens, num_heads, head_dim): the first rows of q_out if it was given. `decode` takes
        it as `q.unflatten(0, (batch, seqlen_q))`.

    Raises:
        ValueError, TypeError: an argument is not as above. Slots past the pool, slots given twice, and
            positions past the table of tokens that write a row are found on the CPU, and on a GPU with
            STREAMLA_DEBUG=1 (which synchronises); without, such a slot writes nothing, either of
            two rows or a mix stays, and such a position counts as the nearest in the table.
    """
    if not isinstance(spec, MLASpec):
        raise TypeError(f"spec: need an MLASpec; got {type(spec).__name__}")
    checks_epilogue.check_inputs(
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, spec, reserved_slot
    )
    tokens, device = q_nope.shape[0], q_nope.device
    checks_epilogue.check_rope(positions, cos_sin, rope, tokens, spec, device)
    checks.check_one_scale("k_scale", k_scale, spec.kv_format, "cache", device)
    q_out, q_format = checks_epilogue.check_query(q_out, q_format, q_scale, tokens, spec, device)
    checks_epilogue.check_values(slot_mapping, positions, cos_sin, kv_cache, spec, reserved_slot)
    if not isinstance(inputs_ready, bool):
        raise TypeError(f"inputs_ready: need a bool; got {type(inputs_ready).__name__}")
    facts = ops.spec_facts("", spec)
    facts = _choose_epilogue(facts, device, impl) + facts
    torch.ops.streamla.epilogue(
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, q_out, positions, cos_sin, rope,
        q_scale, k_scale, q_format.value, reserved_slot, inputs_ready, facts,
    )  # fmt: skip
    return q_out if q_out.shape[0] == tokens else q_out[:tokens]


def decode_step(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    *,
    softmax_scale: float,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    rope: str | None = None,
    k_scale: torch.Tensor | None = None,
    reserved_slot: int | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: str = "e",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`epilogue` with a bf16 query, then `decode`: the same bits in `out`, `lse` and the cache.

    One launch where `support` says so: attention rotates the query and the new rows, writes those to the
    cache, and reads the bytes it stored. Elsewhere the epilogue is launched first.

    Args:
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping: as for `epilogue`, with
            tokens = batch * seqlen_q: token b * seqlen_q + i is query i of request b.
        slot_mapping: a slot that is written is the token's place in the page table, too; a token that
            writes no row reads what is there.
        positions, cos_sin, rope, k_scale, reserved_slot: as for `epilogue`.
        page_table, plan, softmax_scale, causal, out, lse, return_lse, lse_base: as for `decode`.

    Returns:
        out (batch, seqlen_q, num_heads, kv_lora_rank), or (out, lse).

    Raises:
        ValueError, TypeError: as `epilogue` and `decode`. That a slot is the token's place in the page
            table is checked where other values are: on the CPU, and with STREAMLA_DEBUG=1.
    """
    checks.check_plan(plan)
    spec, device = plan.spec, plan.device
    tokens = plan.batch * spec.seqlen_q
    checks_epilogue.check_inputs(
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, spec, reserved_slot, tokens, device
    )
    checks_epilogue.check_rope(positions, cos_sin, rope, tokens, spec, device)
    checks_epilogue.check_values(slot_mapping, positions, cos_sin, kv_cache, spec, reserved_slot)
    shared = _shared_arguments(
        kv_cache, page_table, plan, softmax_scale, k_scale, causal, out, lse, lse_base
    )
    checks_epilogue.check_places(slot_mapping, page_table, plan, reserved_slot)
    torch.ops.streamla.decode_step(
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, positions, cos_sin, rope, k_scale, reserved_slot,
        page_table, *shared,
    )  # fmt: skip
    out, lse = shared[-5], shared[-4]
    return (out, lse) if return_lse else out


def _arguments(
    q, kv_cache, page_table, plan, softmax_scale, q_pe, k_scale, causal, out, lse, lse_base
) -> tuple:
    """Checked arguments in the order of the ops."""
    checks.check_plan(plan)
    query = checks.split_query(q, q_pe, plan)
    shared = _shared_arguments(
        kv_cache, page_table, plan, softmax_scale, k_scale, causal, out, lse, lse_base
    )
    return (*query, kv_cache, k_scale, page_table, *shared)


def _shared_arguments(
    kv_cache, page_table, plan, softmax_scale, k_scale, causal, out, lse, lse_base
) -> tuple:
    """The plan, the outputs and the options, in the order of the ops; all arguments are checked."""
    checks.check_cache(kv_cache, plan.spec, plan.device)
    checks.check_page_table(page_table, kv_cache, plan)
    checks.check_one_scale("k_scale", k_scale, plan.spec.kv_format, "cache", plan.device)
    softmax_scale = checks.check_scale(softmax_scale)
    lse_scale = checks.check_lse_base(lse_base)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: need a bool; got {type(causal).__name__}")
    out, lse = checks.outputs(out, lse, plan)
    return (*ops.plan_arguments(plan), out, lse, softmax_scale, causal, lse_scale)


def warmup(
    spec: MLASpec,
    batch_sizes: Sequence[int],
    *,
    impl: str = "auto",
    device: torch.device | str | None = None,
) -> None:
    """Compile and load all that decoding `spec` launches, so that no request and no capture waits.

    Args:
        spec: what will be decoded.
        batch_sizes: the batch sizes that will be captured or served.
        impl: as for `plan`.
        device: the GPU; the current one by default.
    """
    for batch in batch_sizes:
        checks.check_int("batch_sizes", batch, 0)
    device = _device(device)
    arch = arch_of(device)
    select(spec, arch, impl).load().warmup(spec, list(batch_sizes), device)
    select(spec, arch, impl, epilogue=True).load().warm_epilogue(spec, device)


def support(device: torch.device | str | None = None) -> str:
    """The support matrix of this machine: for each cache format, who serves it, in how many launches a
    `decode_step`, and why others do not."""
    arch = arch_of(_device(device))
    lines = [f"{arch.name} ({arch.target}, {arch.units} units)"]
    for kv_format in KVFormat:
        spec = dataclasses.replace(MLASpec(num_heads=16), kv_format=kv_format)
        lines += answers(spec, arch)
    return "\n".join(lines)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
