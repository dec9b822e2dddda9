"""torch.library ops: what graphs capture. Each writes the buffers it is given and returns nothing.

A plan crosses the boundary as its tensors and one string of its static facts.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from streamla.arch import arch_of
from streamla.plan import CostModel, DecodePlan
from streamla.select import IMPLS, select
from streamla.spec import KVFormat, MLASpec
from streamla.step import NewTokens

_PLAN = (
    "Tensor{0} work, Tensor{1} work_indptr, Tensor{2} split_indptr, Tensor{3} status, "
    "Tensor{4} counters, Tensor{5} out_partial, Tensor{6} lse_partial, str facts"
)
_INPUTS = "Tensor q_nope, Tensor q_pe, Tensor kv_cache, Tensor? k_scale, Tensor page_table"
_OUTPUTS = "Tensor(x!) out, Tensor(y!) lse"
_OPTIONS = "float softmax_scale, bool causal, float lse_scale"


def _written(*names: str) -> str:
    """The plan's part of a schema, with the buffers an op writes marked."""
    fields = ("work", "work_indptr", "split_indptr", "status", "counters", "out", "lse")
    return _PLAN.format(*(f"({f[0]}{i}!)" if f in names else "" for i, f in enumerate(fields)))


_filled = _written("work", "work_indptr", "split_indptr", "status", "counters")
_worked = _written("counters", "out", "lse")

library = torch.library.Library("streamla", "DEF")
library.define(f"plan(Tensor cache_seqlens, {_filled}) -> ()")
library.define(f"attention({_INPUTS}, {_worked}, {_OUTPUTS}, {_OPTIONS}) -> ()")
library.define(f"merge({_written()}, {_OUTPUTS}, float lse_scale) -> ()")
library.define(f"decode({_INPUTS}, {_worked}, {_OUTPUTS}, {_OPTIONS}) -> ()")
library.define(
    "epilogue(Tensor q_nope, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, "
    "Tensor slot_mapping, Tensor(b!) q_out, Tensor? positions, Tensor? cos_sin, str? rope, "
    "Tensor? q_scale, Tensor? k_scale, str q_format, int? reserved_slot, bool inputs_ready, "
    "str facts) -> ()"
)
library.define(
    "decode_step(Tensor q_nope, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, "
    "Tensor slot_mapping, Tensor? positions, Tensor? cos_sin, str? rope, Tensor? k_scale, "
    f"int? reserved_slot, Tensor page_table, {_worked}, {_OUTPUTS}, {_OPTIONS}) -> ()"
)


def plan_arguments(plan: DecodePlan) -> tuple:
    """A plan as the ops take it."""
    return (
        plan.work, plan.work_indptr, plan.split_indptr, plan.status, plan.counters,
        plan.out_partial, plan.lse_partial, facts_of(plan),
    )  # fmt: skip


def facts_of(plan: DecodePlan) -> str:
    cost = plan.cost
    limit = -1 if plan.max_seqlen is None else plan.max_seqlen
    return (
        f"{spec_facts(plan.impl, plan.spec)} {cost.tile_n} {cost.num_programs} "
        f"{cost.overhead_tiles} {cost.min_split_tiles} {cost.max_splits} {limit} "
        f"{int(plan.batch_invariant)}"
    )


def spec_facts(impl: str, spec: MLASpec) -> str:
    return (
        f"{impl} {spec.kv_format.value} {spec.num_heads} {spec.page_size} {spec.seqlen_q} "
        f"{spec.kv_lora_rank} {spec.qk_rope_head_dim}"
    )


@functools.lru_cache(maxsize=1024)
def _read_spec_facts(facts: str) -> tuple[ModuleType, MLASpec]:
    impl, rest = facts.split(maxsplit=1)
    return next(i for i in IMPLS if i.name == impl).load(), read_spec(rest)


def read_spec(facts: str) -> MLASpec:
    """The spec of `spec_facts` without an implementation's name."""
    kv_format, *numbers = facts.split()
    heads, page_size, seqlen_q, latent, rope = (int(n) for n in numbers)
    return MLASpec(heads, kv_format, page_size, seqlen_q, latent, rope)


@functools.lru_cache(maxsize=1024)
def _read_facts(facts: str) -> tuple:
    words = facts.split()
    module, spec = _read_spec_facts(" ".join(words[:7]))
    *costs, limit, invariant = (int(n) for n in words[7:])
    cost = CostModel(*costs)
    return module, spec, words[0], cost, None if limit < 0 else limit, bool(invariant)


def _rebuild(*arguments):
    *tensors, facts = arguments
    module, spec, impl, cost, limit, invariant = _read_facts(facts)
    batch = tensors[2].shape[0] - 1
    return module, DecodePlan(spec, impl, cost, batch, limit, invariant, *tensors)


def _plan(cache_seqlens, *plan_args):
    module, plan = _rebuild(*plan_args)
    module.plan(cache_seqlens, plan)


def _run(stage):
    def run(q_nope, q_pe, kv_cache, k_scale, page_table, *rest):
        plan_args, (out, lse, softmax_scale, causal, lse_scale) = rest[:8], rest[8:]
        module, plan = _rebuild(*plan_args)
        getattr(module, stage)(
            q_nope, q_pe, kv_cache, k_scale, page_table, plan, out, lse,
            softmax_scale, causal, lse_scale,
        )  # fmt: skip

    return run


def _merge(*arguments):
    *plan_args, out, lse, lse_scale = arguments
    module, plan = _rebuild(*plan_args)
    module.merge(plan, out, lse, lse_scale)


def _epilogue(
    q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, q_out, positions, cos_sin, rope, q_scale, k_scale,
    q_format, reserved_slot, inputs_ready, facts,
):  # fmt: skip
    module, spec = _read_spec_facts(facts)
    module.epilogue(
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, q_out, spec, positions, cos_sin, rope,
        q_scale, k_scale, KVFormat(q_format), reserved_slot, inputs_ready,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _epilogue_module(spec: MLASpec, device: torch.device) -> ModuleType:
    return select(spec, arch_of(device), epilogue=True).load()


def _decode_step(
    q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, positions, cos_sin, rope, k_scale, reserved_slot,
    page_table, *rest,
):  # fmt: skip
    plan_args, (out, lse, *options) = rest[:8], rest[8:]
    module, plan = _rebuild(*plan_args)
    spec = plan.spec
    if next(i for i in IMPLS if i.name == plan.impl).why_two_launches(spec) is None:
        new = NewTokens(kv_c, k_pe, slot_mapping, positions, cos_sin, rope, reserved_slot)
        module.decode_step(
            q_nope, q_pe, new, kv_cache, k_scale, page_table, plan, out, lse, *options
        )
        return
    q = q_nope.new_empty((*q_nope.shape[:2], spec.head_dim))
    _epilogue_module(spec, q.device).epilogue(
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, q, spec, positions, cos_sin, rope,
        None, k_scale, KVFormat.BF16, reserved_slot, False,
    )  # fmt: skip
    q = q.unflatten(0, (plan.batch, spec.seqlen_q))
    halves = q[..., : spec.kv_lora_rank], q[..., spec.kv_lora_rank :]
    module.decode(*halves, kv_cache, k_scale, page_table, plan, out, lse, *options)


def _nothing(*arguments):
    """The fake of an op that only writes: no new tensor, so no shape to tell."""


for _name, _op in (
    ("plan", _plan),
    ("attention", _run("attention")),
    ("merge", _merge),
    ("decode", _run("decode")),
    ("epilogue", _epilogue),
    ("decode_step", _decode_step),
):
    library.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"streamla::{_name}", _nothing, lib=library)
