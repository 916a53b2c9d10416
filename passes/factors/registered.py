"""The rules that users gave, by `register_rule` and by `custom_partitioning`, for equations of their sizes.

A registered rule that says more than is true would give wrong results, so what can be seen without running is looked
at: for each name that may be sharded, the function is traced on the largest block of it, and must return blocks of the
results.

`custom_partitioning` has Shardy's notation, one name a factor. The collective of a reduction factor, as JAX calls it,
is written by the user's partitioning function, where no plan can see it: the factor is whole here, as are factors that
need replication or a permutation. Source: `jax/_src/custom_partitioning_sharding_rule.py`, JAX 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.experimental.custom_partitioning import BATCHING

from alpa_lite import _jax
from alpa_lite.errors import RuleError
from alpa_lite.ir import kernels, notation, registration
from alpa_lite.ir.kernels import KERNEL, Kernel, Types
from alpa_lite.ir.notation import Names, Notation, Tensor
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.factors.base import Call, make_opaque_rule, shape


def registered_rule(call: Call) -> Rule | None:
    """Returns the rule of a call, if its user gave one.

    Raises:
      RuleError: the rule does not fit the operands and results, or the function does not run on blocks.
    """
    given = registration.find_registered_rule(call.primitive, call.params)
    if given is None:
        return None
    who = registration.label(call.primitive, call.params)
    operands, results = [shape(aval) for aval in call.operands], [shape(aval) for aval in call.results]
    if call.primitive is KERNEL:
        kernel = call.params["kernel"]
        if not kernel.trusted:
            _try_blocks(kernel, kernels.types_of(call.operands))
    else:
        given = notation.expand_rule(given, operands, results, who)
    return notation.rule_of(given, operands, results, who)


@functools.lru_cache(maxsize=256)
def _try_blocks(kernel: Kernel, types: Types) -> None:
    """Traces a kernel on the largest block of each name that may be sharded."""
    rule = kernel.notation
    results = kernels.results_of(kernel, types)
    sizes = notation.sizes_of(rule, [s for s, _ in types], [tuple(x.shape) for x in results], kernel.name)
    for name, size in sizes.items():
        if rule.kind(name) != "replicate" and size > 1:
            parts = next(p for p in range(2, size + 1) if size % p == 0)
            blocks = _blocks(rule, types, name, parts)
            try:
                kernels.results_of(kernel, blocks)
            except RuleError as error:
                raise RuleError(
                    f"{kernel.name}: on blocks of {name!r} with {size // parts} instead of {size}, it does not return "
                    f"a block of its result: {error}. Take sizes from the operands, or list {name!r} in replicate"
                ) from None
            except Exception as error:  # whatever a user's function raises
                raise RuleError(
                    f"{kernel.name}: its rule {rule.text!r} says that {name!r} may be sharded, but the function cannot "
                    f"be traced on operands of shapes {', '.join(str(s) for s, _ in blocks)}: {error}. List {name!r} "
                    "in replicate, or let the function take its sizes from its operands"
                ) from error


def _blocks(rule: Notation, types: Types, name: str, parts: int) -> Types:
    """Returns the types of one device's blocks of the operands, if one name is cut into parts."""
    return tuple(
        (tuple(n // parts if name in dim else n for dim, n in zip(tensor, size, strict=True)), dtype)
        for tensor, (size, dtype) in zip(rule.operands, types, strict=True)
    )


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
