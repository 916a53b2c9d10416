"""The written collectives that a compiler may leave out without changing the results of the step.

Compilers merge two collectives of one value, fold one of a constant, add first and sum once where two sums are added,
and compute a loop-invariant one before its loop. Each is allowed exactly as often as the lowered program admits it, as
value numbering determines: two values have one number if the same operation with the same attributes makes them from
values of equal numbers; a slice of all, or a reshape to the same shape, is what it is made from, and so are what is
multiplied or divided by one, what zero is added to or taken from, what is chosen between equal values, what is reduced
over one element, and what stands behind a barrier, which some compilers drop before they merge (XLA:CPU before JAX
0.12). Functions are followed at every call with the numbers of its operands; a loop's body sees the number of the
initial value for what it carries unchanged, and a new one for what it changes; loops and branches are values like
others. With e the executions of a collective per step:

    merged duplicates   e, where its number was already made in a block that reaches it, or in a loop before it: what
                        has the same number outside does not change in that loop, and can be computed before it
    removed constants   e, where everything it depends on is a constant, a remainder of a division by one included
    reassociated sums   e, for each sum of two all-reduces of one kind, or of such sums, also if both are multiplied or
                        divided by the same constants
    hoisted             e - e', where no operand changes in the innermost loops; e' counts those loops once

(Aho, Lam, Sethi, Ullman, Compilers, section 6.1.2 on value numbers.)
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jax.extend.mlir import ir

from alpa_lite import _jax
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.reading import callee, functions_of, is_public, item_bits, trip_count
from alpa_lite.passes.checks.shardy import WRITTEN, Key, read_collective

REASONS = ("hoisted", "merged duplicates", "reassociated sums", "removed constants")
_MAYBE_NOTHING = ("stablehlo.slice", "stablehlo.dynamic_slice", "stablehlo.reshape", "stablehlo.convert")
_NEUTRAL = {"multiply": 1.0, "divide": 1.0, "add": 0.0, "subtract": 0.0}
_BRANCHES = ("stablehlo.case", "stablehlo.if")
_MANUAL = "sdy.manual_computation"


@dataclass(frozen=True)
class Redundancy:
    """Executions per step by (kind, axes, bytes).

    Attributes:
      removals: those that may go, by each of `REASONS`.
      item_bits: those of every collective of the module, by the width of the items that it sends.
    """

    removals: Mapping[str, Counter[Key]]
    item_bits: Mapping[Key, Counter[int]]


def redundant_collectives(module: Any, mesh: LogicalMesh) -> Redundancy:
    """Returns the executions of written collectives that a compiler may leave out, found in a lowered StableHLO module.

    Args:
      module: as in `check_shardy`; not changed.
      mesh: the mesh of the plan.
    """
    operation = module.operation
    numbering = _Numbering(operation, mesh)
    with operation.context, ir.Location.unknown():
        for op in numbering.functions.values():
            if is_public(op):
                block = op.regions[0].blocks[0]
                numbering.block(block, [numbering.new_number() for _ in block.arguments], _Scope({}, (), {}))
    widths: dict[Key, Counter[int]] = defaultdict(Counter)
    for (key, bits), n in numbering.executed.items():
        widths[key][bits] += n
    return Redundancy(numbering.lost, widths)


@dataclass(eq=False)
class _Number:
    """Facts about equal values, which share one of these.

    Attributes:
      varies: the newest loop-carried value that it depends on, by its place among all; 0 without one.
      is_constant: whether everything that it depends on is a constant.
      fill_value: the number that every element is, where that is known.
      sum: the collective, if it is a sum over devices, and what it has been multiplied or divided by since.
      origin: what it is a reshape of, and of which type.
    """

    varies: int = 0
    is_constant: bool = False
    fill_value: float | None = None
    sum: tuple[Key, tuple[Any, ...]] | None = None
    origin: tuple[_Number, Any] | None = None


class _Loop(NamedTuple):
    """A loop around the operation at hand; carried values from the place `first` on may differ in its iterations."""

    trips: int
    first: int


class _Scope(NamedTuple):
    """The place of an operation: numbers of the values that it may read, loops around it, operations known there."""

    values: dict[Any, _Number]
    loops: tuple[_Loop, ...]
    operations: dict[Any, list[_Number]]

    @property
    def times(self) -> int:
        """Executions per step."""
        return _times(self.loops)


class _Numbering:
    """The walk: numbers for values, and the counters that it fills."""

    def __init__(self, operation: Any, mesh: LogicalMesh) -> None:
        self.functions = functions_of(operation)
        self.mesh = mesh
        self.carried = 0  # loop-carried values so far
        self.lost: dict[str, Counter[Key]] = {reason: Counter() for reason in REASONS}
        self.executed: Counter[tuple[Key, int]] = Counter()  # by the width of items
        self.inside: dict[Any, dict[tuple[Key, int], int]] = {}  # executions in a known loop, or branches, for each run
        self.calls_communicate = functools.cache(lambda name: self._communicates(self.functions[name]))

    def new_number(self, loops: tuple[_Loop, ...] = ()) -> _Number:
        """A number that no other value has; with loops around, one that, to be safe, varies with all of them."""
        self.carried += bool(loops)
        return _Number(self.carried if loops else 0)

    def block(self, block: Any, arguments: list[_Number], scope: _Scope) -> list[_Number]:
        """Returns numbers the operations of a block, given its arguments' numbers.

        Returns:
          The numbers of the operands of its terminator.
        """
        values = {**scope.values, **dict(zip(block.arguments, arguments, strict=True))}
        inner = scope._replace(values=values)
        operands: list[_Number] = []
        for view in block.operations:
            op = view.operation
            operands = [values[v] for v in op.operands]
            values.update(zip(op.results, self._operation(op, operands, inner), strict=True))
        return operands

    def _operation(self, op: Any, operands: list[_Number], scope: _Scope) -> list[_Number]:
        name = op.name
        if name == "func.call":
            return self.block(self.functions[callee(op)].regions[0].blocks[0], operands, scope._replace(values={}))
        if name == _MANUAL:
            block = op.regions[0].blocks[0]
            self.block(block, [self.new_number() for _ in block.arguments], scope._replace(operations={}))
            return [self.new_number(scope.loops) for _ in op.results]
        structured = name in ("stablehlo.while", *_BRANCHES)
        if name in _MAYBE_NOTHING and op.operands[0].type == op.results[0].type:
            return operands[:1]
        if name == "stablehlo.optimization_barrier" or (name == "stablehlo.reverse" and _moves_nothing(op)):
            return operands
        if name == "stablehlo.reduce_window" and _is_of_single_elements(op):
            return operands[: len(op.results)]
        if _only_reshapes(op):
            return [_reshaped(op, operands[0], scope.operations)]
        if (same := _unchanged(name, operands)) is not None:
            return [same]
        inside = _Inner(scope.values if structured else {}, self.functions)
        key = (name, tuple(operands), _attributes(op), tuple(r.type for r in op.results), inside.regions(op))
        if structured and self._communicates(op):
            return self._structured(op, operands, scope, key)
        if not (is_known := key in scope.operations):
            varies = max((n.varies for n in (*operands, *inside.read)), default=0)
            constant = not structured and _is_constant(op, operands)
            scope.operations[key] = [_Number(varies, constant, _filled_with(op, operands)) for _ in op.results]
        numbers = scope.operations[key]
        if name in WRITTEN:
            self._collective(op, operands, numbers, scope.loops, is_known)
        elif not is_known and name.removeprefix("stablehlo.") in _NEUTRAL:
            numbers[0].sum = self._sum(name, operands, scope.times)
        return numbers

    def _communicates(self, op: Any) -> bool:
        """Returns whether an operation has collectives inside, in functions that it calls included."""
        inside = (view.operation for region in op.regions for block in region.blocks for view in block.operations)
        return any(
            inner.name in WRITTEN
            or inner.name == _MANUAL
            or (self.calls_communicate(callee(inner)) if inner.name == "func.call" else self._communicates(inner))
            for inner in inside
        )

    def _sum(self, name: str, operands: list[_Number], times: int) -> tuple[Key, tuple[Any, ...]] | None:
        """Returns the sum over devices that an addition of two still is, or the product of one with a constant."""
        if name in ("stablehlo.add", "stablehlo.subtract"):
            total, other = (n.sum for n in operands)
            if total is not None and total == other:
                self.lost["reassociated sums"][total[0]] += times
                return total
            return None
        value, scale = operands if operands[1].is_constant or name == "stablehlo.divide" else operands[::-1]
        return (value.sum[0], (*value.sum[1], (name, scale))) if value.sum is not None and scale.is_constant else None

    def _collective(
        self, op: Any, operands: list[_Number], numbers: list[_Number], loops: tuple[_Loop, ...], is_known: bool
    ) -> None:
        times, outer = _times(loops), loops
        while outer and all(n.varies < outer[-1].first for n in operands):
            outer = outer[:-1]
        found = zip(read_collective(op, self.mesh), op.operands, operands, numbers, strict=False)
        for c, value, operand, number in found:
            key = (c.kind, c.axes, c.bytes)
            self.executed[key, item_bits(value.type)] += times
            if is_known:
                self.lost["merged duplicates"][key] += times
            elif operand.is_constant:
                self.lost["removed constants"][key] += times
            elif len(outer) < len(loops):
                self.lost["hoisted"][key] += times - _times(outer)
            if c.kind == "all_reduce":
                number.sum = key, ()

    def _structured(self, op: Any, operands: list[_Number], scope: _Scope, key: Any) -> list[_Number]:
        """Numbers a loop or branches with collectives; of those that were made before, all collectives are merged."""
        if key in scope.operations:
            for (collective, bits), number in self.inside[key].items():
                self.executed[collective, bits] += number * scope.times
                self.lost["merged duplicates"][collective] += number * scope.times
            return scope.operations[key]
        before = self.executed.copy()
        if op.name == "stablehlo.while":
            scope.operations[key] = self._while(op, operands, scope)
        else:
            for region in op.regions:
                self.block(region.blocks[0], [], scope._replace(operations=dict(scope.operations)))
            scope.operations[key] = [self.new_number(scope.loops) for _ in op.results]
        self.inside[key] = {one: n // scope.times for one, n in (self.executed - before).items()}
        return scope.operations[key]

    def _while(self, op: Any, operands: list[_Number], scope: _Scope) -> list[_Number]:
        condition, body = (region.blocks[0] for region in op.regions)
        passed = list(body.operations)[-1].operation.operands
        kept = [value == argument for value, argument in zip(passed, body.arguments, strict=True)]
        inner = (*scope.loops, _Loop(trip_count(op) or 1, self.carried + 1))
        arguments = [n if keep else self.new_number(inner) for n, keep in zip(operands, kept, strict=True)]
        for block in (condition, body):
            self.block(block, arguments, scope._replace(loops=inner))
        return [n if keep else self.new_number(scope.loops) for n, keep in zip(operands, kept, strict=True)]


def _times(loops: tuple[_Loop, ...]) -> int:
    return math.prod(loop.trips for loop in loops)


def _is_constant(op: Any, operands: list[_Number]) -> bool:
    """Returns whether everything that an operation without regions depends on is a constant."""
    if op.name == "stablehlo.remainder" and operands[1].fill_value == 1 and _is_integer(op):
        return True
    if not operands or op.name in WRITTEN:
        return op.name in ("stablehlo.constant", "stablehlo.iota")
    return all(n.is_constant or _is_empty(v) for n, v in zip(operands, op.operands, strict=True))


def _unchanged(name: str, operands: list[_Number]) -> _Number | None:
    """The number of the operand that equals the result (x * 1, x / 1, x + 0, x - 0, equal choices); else None."""
    name = name.removeprefix("stablehlo.")
    if name == "select":
        return operands[1] if operands[1] is operands[2] else None
    if name not in _NEUTRAL:
        return None
    first, second = (n.fill_value == _NEUTRAL[name] for n in operands)
    return operands[1] if first and name in ("multiply", "add") else operands[0] if second else None


def _reshaped(op: Any, operand: _Number, known: dict[Any, list[_Number]]) -> _Number:
    """Returns the number of a reshape, as one of the value from which its operand was reshaped."""
    origin, shape = operand.origin or (operand, op.operands[0].type)
    if shape == op.results[0].type:
        return origin
    key = ("stablehlo.reshape", origin, op.results[0].type)
    if key not in known:
        known[key] = [replace(origin, origin=(origin, shape))]
    return known[key][0]


def _filled_with(op: Any, operands: list[_Number]) -> float | None:
    """Returns the number that every element of a result is; None where they differ, or it is not a finite one."""
    if op.name == "stablehlo.broadcast_in_dim":
        return operands[0].fill_value
    if op.name != "stablehlo.constant":
        return None
    match = re.search(r"dense<(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)>", str(_jax.constant_of(op)))
    return float(match[1]) if match else None


def _is_empty(value: Any) -> bool:
    """Whether a value has no elements: what is made of it and of constants, such as its padding, is a constant."""
    return isinstance(value.type, ir.RankedTensorType) and 0 in value.type.shape


def _is_integer(op: Any) -> bool:
    """Returns whether an operation makes integers: the remainder of a float divided by one need not be zero."""
    return isinstance(ir.RankedTensorType(op.results[0].type).element_type, ir.IntegerType)


def _attributes(op: Any) -> tuple[Any, ...]:
    """Names and attributes, but for the channel, which no two collectives share."""
    return tuple(pair for pair in _jax.attributes_of(op) if pair[0] != "channel_handle")


def _only_reshapes(op: Any) -> bool:
    """Whether an operation is a reshape, be it written as a broadcast that adds dims of one element, or a sum."""
    if op.name == "stablehlo.reshape":
        return True
    if op.name not in ("stablehlo.broadcast_in_dim", "stablehlo.reduce") or len(op.results) != 1:
        return False
    before, after = (ir.RankedTensorType(one.type).shape for one in (op.operands[0], op.results[0]))
    if math.prod(before) != math.prod(after) or op.name == "stablehlo.reduce":
        return math.prod(before) == math.prod(after)
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    return dims == sorted(dims)


def _moves_nothing(op: Any) -> bool:
    """Returns whether a reversal is along dims of one element."""
    shape = ir.RankedTensorType(op.operands[0].type).shape
    return all(shape[dim] == 1 for dim in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))


def _is_of_single_elements(op: Any) -> bool:
    """Returns whether the windows of an operation have one element each, as those of a running sum over one element."""
    windows = list(ir.DenseI64ArrayAttr(op.attributes["window_dimensions"]))
    operands = list(op.operands)[: len(op.results)]
    return set(windows) == {1} and [o.type for o in operands] == [r.type for r in op.results]


@dataclass(frozen=True)
class _Inner:
    """Regions as data: each operation's name, attributes, operands by position, types and regions.

    Attributes:
      values: numbers of values around them, which they may read.
      functions: by name; calls of those with equal bodies are equal.
      read: the numbers that they do read.
    """

    values: Mapping[Any, _Number]
    functions: Mapping[str, Any]
    read: list[_Number] = field(default_factory=list)
    numbers: dict[Any, Any] = field(default_factory=dict)

    def regions(self, op: Any) -> tuple[Any, ...]:
        """Returns an operation's own regions (the sum of an all-reduce, the body of a loop)."""
        return tuple(self._block(block) for region in op.regions for block in region.blocks)

    def _block(self, block: Any) -> tuple[Any, ...]:
        self._see(block.arguments)
        out = []
        for view in block.operations:
            op = view.operation
            at = tuple(self._operand(operand) for operand in op.operands)
            attributes = _attributes(op)
            if op.name == "func.call":
                attributes = tuple(pair for pair in attributes if pair[0] != "callee")
                inside = _Inner({}, self.functions).regions(self.functions[callee(op)])
            else:
                inside = self.regions(op)
            out.append((op.name, attributes, at, tuple(r.type for r in op.results), inside))
            self._see(op.results)
        return tuple(out)

    def _see(self, values: Any) -> None:
        self.numbers.update((value, (len(self.numbers) + i,)) for i, value in enumerate(values))

    def _operand(self, operand: Any) -> Any:
        if operand in self.numbers:
            return self.numbers[operand]
        if operand in self.values:
            self.read.append(self.values[operand])
        return self.values.get(operand, -1 - hash(operand) % (1 << 60))
