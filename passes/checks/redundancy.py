"""The written collectives that a compiler may leave out without changing the results of the step.

Compilers merge two collectives of one value, fold one of a constant, add first and sum once where two sums are added,
and compute a loop-invariant one before its loop. Each is allowed exactly as often as the lowered program admits it, as
value numbering determines: two values have one number if the same operation with the same attributes makes them from
values of equal numbers; a slice of all, or a reshape to the same shape, is what it is made from, and so are what is
multiplied or divided by one, what zero is added to or taken from, what is chosen between equal values, what is reduced
over one element, and what stands behind a barrier, which some compilers drop before they merge (XLA:CPU before JAX
0.12). Functions are followed at every call with the numbers of its operands; a loop's body sees the number of the
initial value for what it carries unchanged, and a new one for what it changes; loops and branches without collectives
are values like others. With e the executions of a collective per step:

    merged        e, where its number was already made in a block that reaches it, or in a loop before it: what has the
                  same number outside does not change in that loop, and can be computed before it
    constant      e, where everything it depends on is a constant, a remainder of a division by one included
    reassociated  e, for each sum of two all-reduces of one kind, or of such sums, also if both are multiplied or
                  divided by the same constants
    hoisted       e - e', where no operand changes in the innermost loops; e' counts those loops once

(Aho, Lam, Sethi, Ullman, Compilers, section 6.1.2 on value numbers.)
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir

from alpa_lite import _jax
from alpa_lite.layout import Axes, LogicalMesh
from alpa_lite.passes.checks.reading import item_bits, operations, symbol, trip_count, visibility
from alpa_lite.passes.checks.shardy import WRITTEN, read_collective

Key = tuple[str, Axes, int]
_MAYBE_NOTHING = ("stablehlo.slice", "stablehlo.dynamic_slice", "stablehlo.reshape", "stablehlo.convert")
_NEUTRAL = ("stablehlo.multiply", "stablehlo.divide", "stablehlo.add", "stablehlo.subtract")
_BRANCHES = ("stablehlo.case", "stablehlo.if")


@dataclass(frozen=True)
class Redundancy:
    """Executions per step that may go, by (kind, axes, bytes) and by the reason that allows it.

    `item_bits` holds, for every collective of the module, its executions by the width of the items that it sends.
    """

    merged: Counter[Key]
    constant: Counter[Key]
    reassociated: Counter[Key]
    hoisted: Counter[Key]
    item_bits: dict[Key, Counter[int]]


def redundant_collectives(module: Any, mesh: LogicalMesh) -> Redundancy:
    """The executions of written collectives that a compiler may leave out, found in a lowered StableHLO module.

    Args:
      module: as in `check_shardy`; not changed.
      mesh: the mesh of the plan.
    """
    operation = module.operation
    numbering = _Numbering(operation, mesh)
    with operation.context, ir.Location.unknown():
        for op in numbering.functions.values():
            if visibility(op) != "private":
                block = op.regions[0].blocks[0]
                numbering.block(block, [numbering.fresh() for _ in block.arguments], (), {})
    n = numbering
    return Redundancy(n.merged, n.constant, n.reassociated, n.hoisted, dict(n.item_bits))


@dataclass(frozen=True)
class _Loop:
    """A loop around the operation at hand; values numbered from `first` on may differ between its iterations."""

    trips: int
    first: int


class _Numbering:
    """The walk: numbers for values, and the counters that it fills."""

    def __init__(self, operation: Any, mesh: LogicalMesh) -> None:
        self.functions = {symbol(op): op for op in operations(operation) if op.name == "func.func"}
        self.mesh = mesh
        self.next = 0
        self.constants: set[int] = set()
        self.zeros: set[int] = set()
        self.ones: set[int] = set()
        # Sums over devices, and the constants that each has been multiplied or divided by since.
        self.sums: dict[int, tuple[Key, tuple[tuple[str, int], ...]]] = {}
        self.reshaped: dict[int, tuple[int, Any]] = {}  # what it is a reshape of, and of which type
        self.communicating: dict[str, bool] = {}  # functions by name
        self.varies: dict[int, int] = {}  # the newest loop-carried number that a number depends on
        self.merged: Counter[Key] = Counter()
        self.constant: Counter[Key] = Counter()
        self.reassociated: Counter[Key] = Counter()
        self.hoisted: Counter[Key] = Counter()
        self.item_bits: dict[Key, Counter[int]] = defaultdict(Counter)

    def fresh(self) -> int:
        """A number that no other value has."""
        self.next += 1
        return self.next

    def block(
        self, block: Any, arguments: list[int], loops: tuple[_Loop, ...], known: dict[Any, list[int]]
    ) -> list[int]:
        """Numbers the operations of a block, given its arguments' numbers and the operations known at its place.

        Returns:
          The numbers of the operands of its terminator.
        """
        values = dict(zip(block.arguments, arguments, strict=True))
        return self._operations(block, values, loops, known)

    def _operations(
        self, block: Any, values: dict[Any, int], loops: tuple[_Loop, ...], known: dict[Any, list[int]]
    ) -> list[int]:
        operands: list[int] = []
        for view in block.operations:
            op = view.operation
            operands = [values[v] for v in op.operands]
            numbers = self._operation(op, operands, values, loops, known)
            values.update(zip(op.results, numbers, strict=True))
        return operands

    def _operation(
        self,
        op: Any,
        operands: list[int],
        values: dict[Any, int],
        loops: tuple[_Loop, ...],
        known: dict[Any, list[int]],
    ) -> list[int]:
        name = op.name
        if name == "func.call":
            callee = self.functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
            return self.block(callee.regions[0].blocks[0], operands, loops, known)
        if name in ("stablehlo.while", *_BRANCHES) and not self._communicates(op):
            return self._numbered(op, operands, values, known)
        if name == "stablehlo.while":
            return self._while(op, operands, values, loops, known)
        if name == "sdy.manual_computation":
            block = op.regions[0].blocks[0]
            return self._region(block, [self.fresh() for _ in block.arguments], values, loops, {}, op)
        if name in _BRANCHES:
            for region in op.regions:
                self._operations(region.blocks[0], dict(values), loops, dict(known))
            return [self._outside(loops) for _ in op.results]
        if name in _MAYBE_NOTHING and op.operands[0].type == op.results[0].type:
            return operands[:1]
        if name == "stablehlo.optimization_barrier" or (name == "stablehlo.reverse" and _moves_nothing(op)):
            return operands
        if name == "stablehlo.reduce_window" and _is_of_single_elements(op):
            return operands[: len(op.results)]
        if _only_reshapes(op):
            return [self._reshaped(op, operands[0], known)]
        if (same := self._unchanged(name, operands)) is not None:
            return [same]
        key = (name, tuple(operands), _attributes(op), tuple(r.type for r in op.results), _regions(op))
        is_known = key in known
        numbers = known[key] if is_known else [self.fresh() for _ in op.results]
        known[key] = numbers
        if not is_known:
            newest = max((self.varies.get(n, 0) for n in operands), default=0)
            self.varies.update((n, newest) for n in numbers if newest)
            if (
                name in ("stablehlo.constant", "stablehlo.iota")
                or (operands and name not in WRITTEN and self.constants.issuperset(operands))
                or (name == "stablehlo.remainder" and operands[1] in self.ones and _is_integer(op))
            ):
                self.constants.update(numbers)
        if name in WRITTEN:
            self._collective(op, operands, numbers, loops, is_known)
        elif not is_known:
            self._sum(op, operands, numbers, loops)
        return numbers

    def _unchanged(self, name: str, operands: list[int]) -> int | None:
        """The number of the operand that equals the result (x * 1, x / 1, x + 0, x - 0, equal choices); else None."""
        if name == "stablehlo.select":
            return operands[1] if operands[1] == operands[2] else None
        neutral = self.ones if name in ("stablehlo.multiply", "stablehlo.divide") else self.zeros
        if name in ("stablehlo.multiply", "stablehlo.add") and operands[0] in neutral:
            return operands[1]
        if name in _NEUTRAL and operands[1] in neutral:
            return operands[0]
        return None

    def _reshaped(self, op: Any, operand: int, known: dict[Any, list[int]]) -> int:
        """Returns the number of a reshape, as one of the value from which its operand was reshaped."""
        origin, shape = self.reshaped.get(operand, (operand, op.operands[0].type))
        if shape == op.results[0].type:
            return origin
        key = ("stablehlo.reshape", origin, op.results[0].type)
        if key not in known:
            number = self.fresh()
            known[key], self.reshaped[number] = [number], (origin, shape)
            if origin in self.varies:
                self.varies[number] = self.varies[origin]
            for kind in (self.constants, self.zeros, self.ones):
                if origin in kind:
                    kind.add(number)
            if origin in self.sums:
                self.sums[number] = self.sums[origin]
        return known[key][0]

    def _numbered(self, op: Any, operands: list[int], values: dict[Any, int], known: dict[Any, list[int]]) -> list[int]:
        """Returns the numbers of the results of a loop or branches without collectives, which are one operation."""
        read: list[int] = []
        regions = _regions(op, values, read, self.functions)
        key = (op.name, tuple(operands), _attributes(op), tuple(r.type for r in op.results), regions)
        if key not in known:
            known[key] = [self.fresh() for _ in op.results]
            newest = max((self.varies.get(n, 0) for n in (*operands, *read)), default=0)
            self.varies.update((n, newest) for n in known[key] if newest)
        return known[key]

    def _communicates(self, op: Any) -> bool:
        """Whether a loop or a branch has collectives, in functions that it calls included."""
        for region in op.regions:
            for block in region.blocks:
                for view in block.operations:
                    inner = view.operation
                    if inner.name in WRITTEN or inner.name == "sdy.manual_computation":
                        return True
                    if inner.name == "func.call":
                        callee = ir.FlatSymbolRefAttr(inner.attributes["callee"]).value
                        if callee not in self.communicating:
                            self.communicating[callee] = self._communicates(self.functions[callee])
                        if self.communicating[callee]:
                            return True
                    if self._communicates(inner):
                        return True
        return False

    def _sum(self, op: Any, operands: list[int], numbers: list[int], loops: tuple[_Loop, ...]) -> None:
        """Follows sums over devices through additions, reshapes, and products with constants."""
        name = op.name.removeprefix("stablehlo.")
        spread = name == "broadcast_in_dim"
        if (spread and operands[0] in self.zeros) or (name == "constant" and _is_zero(op)):
            self.zeros.update(numbers)
        elif (spread and operands[0] in self.ones) or (name == "constant" and _is_one(op)):
            self.ones.update(numbers)
        elif name in ("add", "subtract"):
            first, second = (self.sums.get(n) for n in operands)
            if first is not None and first == second:
                self.sums[numbers[0]] = first
                self.reassociated[first[0]] += _times(loops)
        elif name in ("multiply", "divide"):
            value, scale = operands if operands[1] in self.constants or name == "divide" else operands[::-1]
            if value in self.sums and scale in self.constants:
                key, scales = self.sums[value]
                self.sums[numbers[0]] = key, (*scales, (name, scale))

    def _collective(
        self, op: Any, operands: list[int], numbers: list[int], loops: tuple[_Loop, ...], is_known: bool
    ) -> None:
        times = _times(loops)
        outer = loops
        while outer and all(self.varies.get(n, 0) < outer[-1].first for n in operands):
            outer = outer[:-1]
        found = zip(read_collective(op, self.mesh), op.operands, operands, numbers, strict=False)
        for c, value, operand, number in found:
            key = (c.kind, c.axes, c.bytes)
            self.item_bits[key][item_bits(value.type)] += times
            if is_known:
                self.merged[key] += times
            elif operand in self.constants:
                self.constant[key] += times
            elif len(outer) < len(loops):
                self.hoisted[key] += times - _times(outer)
            if c.kind == "all_reduce":
                self.sums[number] = key, ()

    def _while(
        self,
        op: Any,
        operands: list[int],
        values: dict[Any, int],
        loops: tuple[_Loop, ...],
        known: dict[Any, list[int]],
    ) -> list[int]:
        condition, body = (region.blocks[0] for region in op.regions)
        passed = list(body.operations)[-1].operation.operands
        kept = [value == argument for value, argument in zip(passed, body.arguments, strict=True)]
        first = self.next + 1
        arguments = [n if keep else self.fresh() for n, keep in zip(operands, kept, strict=True)]
        self.varies.update((n, n) for n, keep in zip(arguments, kept, strict=True) if not keep)
        inner = (*loops, _Loop(trip_count(op) or 1, first))
        for block in (condition, body):
            self._region(block, arguments, values, inner, known, None)
        return [n if keep else self._outside(loops) for n, keep in zip(operands, kept, strict=True)]

    def _outside(self, loops: tuple[_Loop, ...]) -> int:
        """Returns the number of a result of a loop or a branch; to be safe, it varies with every loop around."""
        number = self.fresh()
        if loops:
            self.varies[number] = number
        return number

    def _region(
        self,
        block: Any,
        arguments: list[int],
        values: dict[Any, int],
        loops: tuple[_Loop, ...],
        known: dict[Any, list[int]],
        op: Any,
    ) -> list[int]:
        """A block that may also read values from around it; a manual region's results are new numbers."""
        inner = dict(values)
        inner.update(zip(block.arguments, arguments, strict=True))
        out = self._operations(block, inner, loops, known)
        return out if op is None else [self._outside(loops) for _ in op.results]


def _times(loops: tuple[_Loop, ...]) -> int:
    times = 1
    for loop in loops:
        times *= loop.trips
    return times


def _is_zero(op: Any) -> bool:
    """Whether a constant is zero throughout."""
    return bool(re.search(r"dense<-?0(?:\.0*(?:e[+-]?\d+)?)?>", str(_jax.constant_of(op))))


def _is_one(op: Any) -> bool:
    """Whether a constant is one throughout."""
    return bool(re.search(r"dense<1(?:\.0*(?:e[+-]?0+)?)?>", str(_jax.constant_of(op))))


def _is_integer(op: Any) -> bool:
    """Whether an operation makes integers: the remainder of a float divided by one need not be zero."""
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
    if op.name == "stablehlo.reduce":
        return math.prod(before) == math.prod(after)
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    return math.prod(before) == math.prod(after) and dims == sorted(dims)


def _moves_nothing(op: Any) -> bool:
    """Whether a reversal is along dims of one element."""
    shape = ir.RankedTensorType(op.operands[0].type).shape
    return all(shape[dim] == 1 for dim in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))


def _is_of_single_elements(op: Any) -> bool:
    """Whether the windows of an operation have one element each, as those of a running sum over one element."""
    windows = list(ir.DenseI64ArrayAttr(op.attributes["window_dimensions"]))
    operands = list(op.operands)[: len(op.results)]
    return set(windows) == {1} and [o.type for o in operands] == [r.type for r in op.results]


def _regions(
    op: Any,
    values: Mapping[Any, int] | None = None,
    read: list[int] | None = None,
    functions: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """The operations of an operator's own regions (the sum of an all-reduce, the comparison of a sort), in order.

    Args:
      values: numbers of values around it, which the regions may read.
      read: the numbers that they do read are added to it.
      functions: by name; calls of those with equal bodies are equal.
    """
    inner = _Inner(values or {}, [] if read is None else read, functions or {})
    return tuple(inner.block(block) for region in op.regions for block in region.blocks)


@dataclass(frozen=True)
class _Inner:
    """Blocks as data: each operation's name, attributes, operands by position, types and regions."""

    values: Mapping[Any, int]
    read: list[int]
    functions: Mapping[str, Any]
    seen: dict[Any, Any] = field(default_factory=dict)

    def block(self, block: Any) -> tuple[Any, ...]:
        """The operations of a block."""
        self.seen.update((argument, (len(self.seen) + i,)) for i, argument in enumerate(block.arguments))
        out = []
        for view in block.operations:
            op = view.operation
            at = tuple(self._operand(operand) for operand in op.operands)
            attributes, regions = _attributes(op), op.regions
            if op.name == "func.call" and self.functions:
                attributes = tuple(pair for pair in attributes if pair[0] != "callee")
                regions = self.functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value].regions
                own = _Inner({}, [], self.functions)
            else:
                own = self
            inside = tuple(own.block(inner) for region in regions for inner in region.blocks)
            out.append((op.name, attributes, at, tuple(r.type for r in op.results), inside))
            self.seen.update((result, (len(self.seen) + i,)) for i, result in enumerate(op.results))
        return tuple(out)

    def _operand(self, operand: Any) -> Any:
        if operand in self.seen:
            return self.seen[operand]
        if operand in self.values:
            self.read.append(self.values[operand])
        return self.values.get(operand, -1 - hash(operand) % (1 << 60))
