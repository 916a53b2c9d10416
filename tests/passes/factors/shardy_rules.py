"""The oracle of the table: the rules that XLA's partitioner Shardy attaches to the operations of StableHLO."""

import itertools
import math
from typing import Any

import jax
from jax.extend.mlir import passmanager
from jax.extend.mlir.dialects import sdy

from alpa_lite.ir.strategy import Factor, FactorKind, Rule
from alpa_lite.passes.factors.base import Call, shape
from alpa_lite.passes.factors.rules import finish

REDUCTION: dict[str, FactorKind] = {
    "dot_general": "sum",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
}


def shardy_rule(call: Call) -> Rule | None:
    """Shardy's rule of the operation that an equation lowers to; None if no operation of these shapes has a rule.

    Operations before and after it prepare indices, convert, or spread scalars: no dims change their meaning there.
    """
    if call.name.startswith("random_"):  # on the words of keys, which the equation does not have
        return None
    avals = [jax.ShapeDtypeStruct(shape(a), a.dtype) for a in call.operands]
    params = {name: None if name in ("sharding", "out_sharding") else value for name, value in call.params.items()}
    with jax.enable_x64(True):  # else 64-bit equations would be lowered as 32-bit ones
        traced = jax.jit(lambda *operands: call.primitive.bind(*operands, **params)).trace(*avals)
        module: Any = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(module.operation)
        blocks = (block for function in module.body.operations for block in function.regions[0].blocks)
        found = (_rule_of(op, call) for block in blocks for op in block.operations)
        return next(filter(None, found), None)


def _rule_of(op: Any, call: Call) -> Rule | None:
    """The rule of an operation, if it is one of the equation's operands, in any order, and of its results."""
    if "sdy.sharding_rule" not in op.attributes:
        return None
    rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
    wanted, made = [shape(aval) for aval in call.operands], [shape(aval) for aval in call.results]
    given, results = [tuple(v.type.shape) for v in op.operands], [tuple(v.type.shape) for v in op.results]
    orders = itertools.permutations(range(len(wanted))) if len(given) >= len(wanted) else ()
    order = next((o for o in orders if all(want in ((), given[i]) for want, i in zip(wanted, o, strict=True))), None)
    if rule.is_custom or results != made or order is None or any(given[len(wanted) :]):
        return None
    sizes = tuple(rule.factor_sizes)

    def dims(mapping: Any, extents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The factors of each dim; none of one that they do not make up, such as one that is repeated."""
        views = [sdy.DimMappingAttr(dim).factor_indices for dim in sdy.TensorMappingAttr(mapping).dim_mappings]
        own = [tuple(f for f in view if sizes[f] > 1) for view in views]
        return tuple(d if math.prod(sizes[f] for f in d) == n else () for d, n in zip(own, extents, strict=True))

    def kind(factor: int) -> FactorKind:
        if sizes[factor] == 1 or factor in rule.need_replication_factors or factor in rule.permutation_factors:
            return "special" if call.name == "rev" and sizes[factor] > 1 else "replicate"
        return REDUCTION.get(call.name, "special") if factor in rule.reduction_factors else "parallel"

    operands = list(map(dims, rule.operand_mappings, given))
    return finish(
        Rule(
            tuple(Factor(size, kind(n)) for n, size in enumerate(sizes)),
            tuple(operands[i] if want else () for want, i in zip(wanted, order, strict=True)),
            tuple(map(dims, rule.result_mappings, made)),
        ),
        call,
    )
