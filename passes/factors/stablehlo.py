"""Lowers equations to StableHLO and reads the sharding rules that the compiler attaches.

The rules come from the pass `sdy-populate-op-sharding-rules` of stock jaxlib. All equations are traced one after the
other into one function, so that there is one module to lower and to walk; which equation an operation belongs to
follows from its operands, and operations on constants alone belong to none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.mlir import passmanager
from jax.extend.mlir.dialects import sdy

from alpa_lite import _jax


@dataclass(frozen=True)
class ShardingRule:
    """Shardy's rule of one operation: factor sizes, the factors of each dim, and the factors that are not parallel."""

    sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduction: frozenset[int]
    replicated: frozenset[int]
    permuted: frozenset[int]


@dataclass(frozen=True)
class LoweredOp:
    """One StableHLO operation: its values as numbers, and its rule if it has one."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    rule: ShardingRule | None


@dataclass(frozen=True)
class Lowered:
    """One equation as StableHLO, private functions inlined; a value of `splats` is the same in every element."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[LoweredOp, ...]
    splats: frozenset[int]


def lower(
    equations: Sequence[tuple[Any, Mapping[str, Any], Sequence[tuple[tuple[int, ...], Any]]]],
) -> list[Lowered]:
    """Lowers equations (primitive, parameters, (shape, dtype) of each operand) together, with Shardy's rules attached.

    Raises whatever an equation's own lowering raises.
    """
    avals = [jax.ShapeDtypeStruct(*operand) for _, _, operands in equations for operand in operands]

    def together(*operands: Any) -> list[Any]:
        rest = iter(operands)
        out = []
        for primitive, params, own in equations:
            # A user's shardings name meshes that the lowering does not have, and do not change the rule.
            free = {name: None if name in ("sharding", "out_sharding") else value for name, value in params.items()}
            result = primitive.bind(*(next(rest) for _ in own), **free)
            out.extend(result if primitive.multiple_results else [result])
            ends.append(len(out))
        return out

    ends: list[int] = []
    with jax.enable_x64(True):  # else 64-bit equations would be lowered as 32-bit ones
        lowered = jax.jit(together).trace(*avals).lower(lowering_platforms=("cpu",))
        module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(module.operation)
        return _Reader(module).equations([len(operands) for _, _, operands in equations], ends)


class _Reader:
    """Walks a module with one function per program, numbering values and sorting operations by equation."""

    def __init__(self, module: Any) -> None:
        self.functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
        self.values = 0
        self.owner: dict[int, int] = {}  # value -> equation
        self.ops: dict[int, list[LoweredOp]] = {}
        self.splats: set[int] = set()

    def equations(self, arities: Sequence[int], ends: Sequence[int]) -> list[Lowered]:
        inputs = [[self.number(equation) for _ in range(arity)] for equation, arity in enumerate(arities)]
        outputs = self.function("main", [value for own in inputs for value in own])
        splats = frozenset(self.splats)
        starts = [0, *ends[:-1]]
        return [
            Lowered(tuple(own), tuple(outputs[start:end]), tuple(self.ops.get(equation, ())), splats)
            for equation, (own, start, end) in enumerate(zip(inputs, starts, ends, strict=True))
        ]

    def number(self, equation: int | None) -> int:
        self.values += 1
        if equation is not None:
            self.owner[self.values] = equation
        return self.values

    def function(self, name: str, arguments: Sequence[int]) -> list[int]:
        block = self.functions[name].regions[0].blocks[0]
        env = dict(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            operands = [env[value] for value in op.operands]
            if op.OPERATION_NAME == "func.return":
                return operands
            if op.OPERATION_NAME == "func.call":
                results = self.function(op.attributes["callee"].value, operands)
            else:
                results = self.operation(op, operands)
            env.update(zip(op.results, results, strict=True))
        raise AssertionError(f"function {name} does not return")

    def operation(self, op: Any, operands: list[int]) -> list[int]:
        name = op.operation.name
        equation = next((self.owner[value] for value in operands if value in self.owner), None)
        results = [self.number(equation) for _ in op.results]
        if name == "stablehlo.constant":
            if _jax.is_splat(op.operation):
                self.splats.update(results)
        elif operands and all(value in self.splats for value in operands):
            self.splats.update(results)
        elif equation is not None:
            shapes = tuple(tuple(getattr(result.type, "shape", ())) for result in op.results)
            lowered = LoweredOp(name, tuple(operands), tuple(results), shapes, _sharding_rule(op))
            self.ops.setdefault(equation, []).append(lowered)
        return results


def _sharding_rule(op: Any) -> ShardingRule | None:
    attributes = op.attributes
    if "sdy.sharding_rule" not in attributes:
        return None
    rule = sdy.OpShardingRuleAttr(attributes["sdy.sharding_rule"])
    if rule.is_custom:  # what a custom call says of itself need not be the truth about its dims
        return None

    def tensors(mappings: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        views = [sdy.TensorMappingAttr(mapping).dim_mappings for mapping in mappings]
        return tuple(tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in view) for view in views)

    return ShardingRule(
        tuple(rule.factor_sizes),
        tensors(rule.operand_mappings),
        tensors(rule.result_mappings),
        frozenset(rule.reduction_factors),
        frozenset(rule.need_replication_factors),
        frozenset(rule.permutation_factors),
    )
