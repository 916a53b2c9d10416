"""Asks Shardy, XLA's partitioner, for the factor rules of equations.

All equations are lowered in one module and one compiler pass attaches a rule to every StableHLO operation, so that a
few hundred equations take a fraction of a second. Most equations are one operation and splat constants; those
that are several (an FFT of reals converts first) get the composition of the rules: factors that meet in a dim of an
intermediate value are one factor, of the more restrictive kind.

Composition is sound because a factor that is parallel in every operation splits them all; a sum stays a sum only if
what comes after it is a conversion, which the equation itself applies to each summand. Where dims that meet have
other factor sizes, or an operation has no rule, the factors that meet there are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scipy.cluster.hierarchy import DisjointSet

from alpa_lite.ir.strategy import Factor, FactorKind, Rule
from alpa_lite.passes.factors.base import Call, is_key, opaque, shape
from alpa_lite.passes.factors.stablehlo import Lowered, ShardingRule, lower

REDUCTION: dict[str, FactorKind] = {
    "dot_general": "sum",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
}


def shardy_rules(calls: Sequence[Call]) -> list[Rule]:
    """Shardy's rule of each equation; an opaque one where it does not lower."""
    equations = [(c.primitive, c.params, [logical(aval) for aval in c.operands]) for c in calls]
    out = []
    for call, lowered in zip(calls, _lower(equations), strict=True):
        if isinstance(lowered, str):
            out.append(opaque(call, f"{call.name} cannot be lowered: {lowered}"))
        else:
            out.append(compose(call, lowered))
    return out


def logical(aval: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype to lower with: what moves typed keys moves words just so."""
    return shape(aval), "uint32" if is_key(aval) else aval.dtype


def _lower(equations: list[Any]) -> list[Lowered | str]:
    """Lowers all in one module; if that fails, halves, so that one bad equation costs only itself."""
    if not equations:
        return []
    try:
        return list(lower(equations))
    except Exception as error:  # anything may be raised by a primitive's own lowering rule
        if len(equations) == 1:
            return [str(error).partition("\n")[0] or type(error).__name__]
    half = len(equations) // 2
    return _lower(equations[:half]) + _lower(equations[half:])


class _Factors:
    """Factors of several operations, merged as they meet; `kind` of a merged one, at its root, is the stricter."""

    def __init__(self) -> None:
        self.merged = DisjointSet()
        self.size: list[int] = []
        self.kind: list[FactorKind] = []

    def new(self, size: int, kind: FactorKind) -> int:
        factor = len(self.size)
        self.merged.add(factor)
        self.size.append(size)
        self.kind.append(kind)
        return factor

    def find(self, factor: int) -> int:
        return self.merged[factor]

    def freeze(self, factors: Sequence[int]) -> None:
        for factor in factors:
            self.kind[self.find(factor)] = "replicate"

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        kind = self.kind[a]
        if kind == "parallel":
            kind = self.kind[b]
        elif self.kind[b] != "parallel":  # two reductions over one index are not a reduction of their composition
            kind = "replicate"
        self.merged.merge(a, b)
        self.kind[self.find(a)] = kind

    def meet(self, a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> None:
        """Merges the factors of two views of one tensor, dim by dim."""
        for left, right in zip(a, b, strict=True):
            left, right = [f for f in left if self.size[f] > 1], [f for f in right if self.size[f] > 1]
            if [self.size[f] for f in left] == [self.size[f] for f in right]:
                for f, g in zip(left, right, strict=True):
                    self.union(f, g)
            else:
                self.freeze([*left, *right])


def compose(call: Call, lowered: Lowered) -> Rule:
    """The rule of a chain of operations."""
    factors = _Factors()
    inputs = {value: shape(aval) for value, aval in zip(lowered.inputs, call.operands, strict=True)}
    dims: dict[int, list[list[int]]] = {}  # of each value that has been met, the factors of its dims
    summed: set[int] = set()  # values that hold a reduction's result, or conversions of it
    for op in lowered.ops:
        if op.rule is None:
            for value in op.operands:
                if value in dims:
                    factors.freeze([f for dim in dims[value] for f in dim])
                elif value in inputs:
                    dims[value] = [[factors.new(s, "replicate")] for s in inputs[value]]
            for value, size in zip(op.results, op.result_shapes, strict=True):
                dims[value] = [[factors.new(s, "replicate")] for s in size]
            continue
        names = [factors.new(size, _kind(call.name, op.rule, n)) for n, size in enumerate(op.rule.sizes)]
        for value, mapping in zip(op.operands, op.rule.operands, strict=True):
            view = [[names[f] for f in dim] for dim in mapping]
            if value in dims:
                factors.meet(dims[value], view)
            elif value in inputs:
                dims[value] = view
            elif value not in lowered.splats:  # an iota or a table: its blocks differ
                factors.freeze([f for dim in view for f in dim])
        for value, mapping in zip(op.results, op.rule.results, strict=True):
            dims[value] = [[names[f] for f in dim] for dim in mapping]
        after_sum = bool(summed & set(op.operands))
        if op.rule.reduction or (after_sum and op.name == "stablehlo.convert"):
            summed |= set(op.results)
        if after_sum and (op.rule.reduction or op.name != "stablehlo.convert"):
            for f in range(len(factors.size)):
                if factors.kind[factors.find(f)] in ("sum", "max", "min"):
                    factors.freeze([f])
    return _rule(call, lowered, factors, dims)


def _kind(name: str, rule: ShardingRule, factor: int) -> FactorKind:
    if factor in rule.replicated:
        return "replicate"
    if factor in rule.permuted:
        return "special" if name == "rev" else "replicate"
    if factor in rule.reduction:
        return REDUCTION.get(name, "special")
    return "parallel"


def _rule(call: Call, lowered: Lowered, factors: _Factors, dims: dict[int, list[list[int]]]) -> Rule:
    """The chain's rule in terms of the equation's own operands and results."""
    ends = [*zip(lowered.inputs, call.operands, strict=True), *zip(lowered.outputs, call.results, strict=True)]
    for value, aval in ends:
        if value not in dims:  # an unused operand, or a constant result
            dims[value] = [[factors.new(size, "replicate")] for size in shape(aval)]
        for size, dim in zip(shape(aval), dims[value], strict=True):
            if math.prod(factors.size[f] for f in dim) != size:  # a factor of another tensor's size: concatenation
                factors.freeze(dim)
    found: list[Factor] = []
    number: dict[int, int] = {}
    in_result = {factors.find(f) for v in lowered.outputs for dim in dims[v] for f in dim}

    def kind(root: int) -> FactorKind:
        known = factors.kind[root]
        # Else an operand's dim that the result does not depend on, or a reduction over what is in the result too.
        return known if known == "special" or (known == "parallel") == (root in in_result) else "replicate"

    def tensor(value: int, aval: Any) -> tuple[tuple[int, ...], ...]:
        out = []
        for size, dim in zip(shape(aval), dims[value], strict=True):
            roots = [factors.find(f) for f in dim if factors.size[f] > 1]
            if math.prod(factors.size[root] for root in roots) != size:
                roots = [factors.new(size, "replicate")]
            for root in roots:
                if root not in number:
                    number[root] = len(found)
                    found.append(Factor(factors.size[root], kind(root)))
            out.append(tuple(number[root] for root in roots if factors.size[root] > 1))
        return tuple(out)

    operands = tuple(tensor(v, aval) for v, aval in zip(lowered.inputs, call.operands, strict=True))
    results = tuple(tensor(v, aval) for v, aval in zip(lowered.outputs, call.results, strict=True))
    return Rule(tuple(found), operands, results, "shardy")
