"""The rules that users of `custom_partitioning` gave: Shardy's notation, one name a factor.

The collective of a reduction factor, as JAX calls it, is written by the user's partitioning function, where no plan can
see it: the factor is whole here, as are factors that need replication or a permutation.
Source: `jax/_src/custom_partitioning_sharding_rule.py`, JAX 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.experimental.custom_partitioning import BATCHING

from alpa_lite import _jax
from alpa_lite.ir import notation
from alpa_lite.ir.notation import Names, Notation, Tensor
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.factors.base import Call, make_opaque_rule, shape


def custom_partitioning_rule(call: Call) -> Rule:
    """Returns the rule of a call of `custom_partitioning`; an opaque one where the user gave none that can be read."""
    given = call.params.get("sharding_rule")
    remedy = "; give one, or use alpa_lite.register_rule on the function that calls it"
    if given is None:
        return make_opaque_rule(call, f"custom_partitioning has no sharding_rule{remedy}")
    operands, results = [shape(aval) for aval in call.operands], [shape(aval) for aval in call.results]
    try:
        found = _jax.sdy_rule(given, call.params["static_args"], call.operands, call.results)
        rule = Notation(
            _tensors(found.operand_mappings, operands),
            _tensors(found.result_mappings, results),
            whole=(*found.reduction_factors, *found.need_replication_factors, *found.permutation_factors),
            text="of custom_partitioning",
        )
        sizes = dict(found.factor_sizes)
        described = notation.rule_of(rule, operands, results, "custom_partitioning", sizes)
    except Exception as error:  # the user's function, or a rule of another form
        return make_opaque_rule(call, f"the sharding_rule of custom_partitioning cannot be read: {error}{remedy}")
    return replace(described, source="table")


def _tensors(mappings: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    return tuple(_tensor(tuple(m), len(size)) for m, size in zip(mappings, shapes, strict=True))


def _tensor(mapping: tuple[Any, ...], rank: int) -> Tensor:
    """Returns the dims of a tensor; a leading `…` stands for as many as are left."""
    lead: list[Names] = []
    if mapping and isinstance(mapping[0], str) and mapping[0].startswith(BATCHING):
        lead = [(f"{mapping[0]} {i}",) for i in range(rank - len(mapping) + 1)]
        mapping = mapping[1:]
    return (*lead, *((dim,) if isinstance(dim, str) else tuple(dim) for dim in mapping))
