"""How one operation takes part in grouping: whether it follows, is lazy, and where its rule puts factors of a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.strategy import Factor, Rule
from alpa_lite.passes.ir import keys, primitives
from alpa_lite.passes.sharding.groups import Dims, factors_in
from alpa_lite.passes.sharding.linear import keeps_dims


@dataclass(frozen=True, eq=False)
class Form:
    """The properties that an operation's key determines, computed once for all operations of one key.

    Attributes:
      rule: its rule.
      key: as `keys.placeless`.
      light: whether it only follows, see `is_light`.
      lazy: whether its result is made anew for each consumer, or is so where its operands are.
      whole: the operands that have all factors of the results; literals may be among them.
    """

    rule: Rule
    key: str
    light: bool
    lazy: Literal["", "always", "as operands"]
    whole: tuple[int, ...]


def opaque_rule(op: Op, values: Sequence[Value]) -> Rule:
    """The rule of an operation that takes and gives whole values."""
    operands = tuple(() if isinstance(a, Lit) else ((),) * len(values[a].shape) for a in op.operands)
    return Rule((), operands, tuple(((),) * len(values[v].shape) for v in op.results), "opaque")


def form_of(op: Op, rule: Rule, values: Sequence[Value]) -> Form:
    """Returns the properties that an operation and its rule determine."""
    light = is_light(rule, op)
    lazy: Literal["", "always", "as operands"] = ""
    if len(op.results) == 1 and all(len(dim) <= 1 for dims in (*rule.operands, *rule.results) for dim in dims):
        tensors = any(not isinstance(atom, Lit) for atom in op.operands)
        lazy = "always" if is_lazy_source(op, values) else "as operands" if light and tensors else ""
    every = factors_in(*rule.results)
    whole = tuple(k for k, dims in enumerate(rule.operands) if every <= factors_in(dims))
    return Form(rule, keys.placeless(op, values.__getitem__), light, lazy, whole)


def is_lazy_source(op: Op, values: Sequence[Value]) -> bool:
    """Whether an operation makes a large value out of nothing, or out of a small one."""
    if op.name == "broadcast_in_dim":
        source = op.operands[0]
        return isinstance(source, Lit) or values[op.results[0]].nbytes > values[source].nbytes
    return op.name == "iota"


def is_light(rule: Rule, op: Op) -> bool:
    """Whether an operation only follows: every factor parallel, no dim of several factors, every factor in a result."""
    if op.name == primitives.CONSTRAINT and any(axes is not None for axes in op.params["dims"]):
        return False
    turns = op.name == "reshape" and op.params.get("dimensions")
    return keeps_dims(rule) and not turns and op.name not in primitives.DECIDING


def placed_dims(tensors: Sequence[Dims], factors: tuple[int, ...] | None) -> tuple[Dims, ...]:
    """The dims of tensors, by factors of a group."""
    if factors is None:
        return tuple(((),) * len(dims) for dims in tensors)
    return tuple(tuple(tuple(factors[f] for f in dim) for dim in dims) for dims in tensors)


def followed_factors(rule: Rule, main: int, dims: Dims) -> tuple[int, ...] | None:
    """For each factor of a rule the factor that an operand of these dims gives it; None if it lacks one."""
    of = {f[0]: g[0] for f, g in zip(rule.operands[main], dims, strict=True) if f and g}
    return tuple(of[f] for f in range(len(rule.factors))) if len(of) == len(rule.factors) else None


def leaf_dims(shape: tuple[int, ...]) -> tuple[list[Factor], Dims]:
    """The factors of a tensor of which every dim may be sharded, and its dims by these."""
    factors = [Factor(size, "parallel") for size in shape if size > 1]
    numbers = itertools.count()
    return factors, tuple([(next(numbers),) if size > 1 else () for size in shape])
