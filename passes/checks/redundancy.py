"""The written collectives that a compiler may leave out without changing the results of the step.

Compilers merge two collectives of one value, fold one of a constant, add first and sum once where two sums are added,
and compute a loop-invariant one before its loop. Each is allowed exactly as often as the lowered program admits it: a
copy of the module is optimised as far as that concerns collectives, and their executions are counted in between. In the
copy functions are inlined, and a collective is an opaque operation without side effects, so that MLIR's elimination of
common subexpressions (its pass `cse`, which compares regions, too) merges equal ones, equal loops and equal branches.
Before it values are replaced by those that they equal: a slice of all, or a reshape to the same shape, by what it is
made from, and so are what is multiplied or divided by one, what zero is added to or taken from, what is chosen between
equal values, what is reduced over one element, what a loop carries unchanged, and what stands behind a barrier, which
some compilers drop before they merge (XLA:CPU before JAX 0.12). With e the executions of a collective per step:

    merged duplicates   e of each that `cse` removes
    hoisted             e - e', where no operand changes in the innermost loops; e' counts those loops once
    removed constants   e, where everything it depends on is a constant, a remainder of a division by one included
    reassociated sums   e, for each sum of two all-reduces of one kind, or of such sums, also if both are multiplied or
                        divided by the same constants
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir, passmanager

from alpa_lite import _jax
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.checks.reading import (
    callee,
    create,
    create_opaque,
    functions_of,
    is_public,
    item_bits,
    maker,
    operations,
    replace_values,
    terminator,
    trip_count,
)
from alpa_lite.passes.checks.shardy import WRITTEN, read_collective

REASONS = ("hoisted", "merged duplicates", "reassociated sums", "removed constants")
_COLLECTIVE = "collective "
_NOT_CONSTANT = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.custom_call")

Sent = tuple[str, Axes, int, int]
"""Kind, axes and bytes of a collective, and the bits of an item that it sends; 0 where they are not known."""

Opaque = Mapping[str, Sequence[Sent]]
"""Name of an opaque collective -> the collective that each of its results is of."""


@dataclass(frozen=True)
class Redundancy:
    """Executions per step of the collectives that a module writes.

    Attributes:
      removals: those that may go, by each of `REASONS`.
      collectives: all that are written.
    """

    removals: Mapping[str, Counter[Sent]]
    collectives: Counter[Sent]


def redundant_collectives(module: Any, mesh: LogicalMesh) -> Redundancy:
    """Returns the executions of written collectives that a compiler may leave out, found in a lowered StableHLO module.

    Args:
      module: as in `check_shardy`; not changed.
      mesh: the mesh of the plan.
    """
    with module.operation.context, ir.Location.unknown():
        copy = module.operation.clone().operation
        _inline_calls(copy)
        opaque = _make_opaque(copy, mesh)
        steps = [_executions(copy, opaque)]
        for simplify in (_merge, _hoist, _merge):
            simplify(copy)
            steps.append(_executions(copy, opaque))
        constant, reassociated = _foldable(copy, opaque)
    written, merged, hoisted, again = steps
    removals = merged - hoisted, (written - merged) + (hoisted - again), reassociated, constant
    return Redundancy(dict(zip(REASONS, removals, strict=True)), written)


def _walk(module: Any) -> list[tuple[Any, int]]:
    """Returns the operations that public functions reach, and their executions per step; those in regions first."""

    def visit(region: Any, times: int) -> Iterator[tuple[Any, int]]:
        for op in operations(region):
            inner = times * (trip_count(op) or 1) if op.name == "stablehlo.while" else times
            for inside in op.regions:
                yield from visit(inside, inner)
            yield op, times

    return [one for f in functions_of(module).values() if is_public(f) for one in visit(f.regions[0], 1)]


def _inline_calls(module: Any) -> None:
    """Replaces calls by the operations of their functions (MLIR's pass does not, in manual regions)."""
    functions = functions_of(module)
    while calls := [op for op, _ in _walk(module) if op.name == "func.call"]:
        for call in calls:
            copy = functions[callee(call)].clone().operation
            replace_values(copy.regions[0].blocks[0].arguments, call.operands)
            *ops, end = operations(copy.regions[0])
            for op in ops:
                op.move_before(call)
            _replace(call, end.operands)
            copy.erase()
    for op in functions.values():
        if not is_public(op):
            op.erase()


def _make_opaque(module: Any, mesh: LogicalMesh) -> Opaque:
    """Puts an opaque operation without effects for each collective; equal ones have one name."""
    numbers: dict[Any, str] = {}
    opaque: dict[str, list[Sent]] = {}
    for op, _ in _walk(module):
        if op.name in WRITTEN:
            inner = [(one.name, _attributes(one)) for region in op.regions for one in operations(region)]
            same = op.name, _attributes(op), *(v.type for v in op.operands), *inner
            name = numbers.setdefault(same, f"{_COLLECTIVE}{len(numbers)}")
            found = zip(read_collective(op, mesh), op.operands, strict=False)
            opaque[name] = [(c.kind, c.axes, c.bytes, item_bits(value.type)) for c, value in found]
            made = create_opaque(name, op, [r.type for r in op.results], op.operands, effects=False)
            _replace(op, made.results)
    return opaque


def _name(op: Any) -> str:
    """Returns the name of an opaque collective; that of its operation for another."""
    if op.name != "stablehlo.custom_call":
        return op.name
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    return target if target.startswith(_COLLECTIVE) else op.name


def _executions(module: Any, opaque: Opaque) -> Counter[Sent]:
    counts: Counter[Sent] = Counter()
    for op, times in _walk(module):
        for sent in opaque.get(_name(op), ()):
            counts[sent] += times
    return counts


def _merge(module: Any) -> None:
    """Replaces values by those that they equal, until none does any more."""
    merging = passmanager.PassManager.parse("builtin.module(cse)")
    merging.run(module)
    while sum(_simplify(op) for op, _ in _walk(module)):
        merging.run(module)


def _simplify(op: Any) -> bool:
    """Replaces values that equal an operand of an operation. Returns whether there is anything."""
    if op.name == "stablehlo.while":
        condition, body = (region.blocks[0] for region in op.regions)
        unchanged = [i for i, v in enumerate(terminator(body).operands) if v == body.arguments[i]]
        for i in unchanged:
            for value in (body.arguments[i], condition.arguments[i], op.results[i]):
                value.replace_all_uses_with(op.operands[i])
        return bool(unchanged)
    if (same := _equal_operands(op)) is not None:
        _replace(op, same)
    elif _only_reshapes(op):
        value, kind = op.operands[0], op.results[0].type
        while (made := maker(value)) is not None and made.name == "stablehlo.reshape":
            value = made.operands[0]
        if op.name == "stablehlo.reshape" and value == op.operands[0]:
            return False
        _replace(op, [value] if value.type == kind else create("stablehlo.reshape", op, [kind], [value], {}).results)
    else:
        return False
    return True


def _equal_operands(op: Any) -> list[Any] | None:
    """Returns the operands that the results of an operation equal; None if they equal none."""
    name, operands, same = op.name.removeprefix("stablehlo."), list(op.operands), False
    match name:
        case "optimization_barrier":
            return operands
        case "slice" | "dynamic_slice" | "reshape" | "convert":
            same = operands[0].type == op.results[0].type
        case "reverse":  # along dims of one element
            shape = ir.RankedTensorType(operands[0].type).shape
            same = all(shape[dim] == 1 for dim in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
        case "reduce_window":  # of one element each, as those of a running sum over one element
            types = [v.type for v in operands[: len(op.results)]], [r.type for r in op.results]
            same = set(ir.DenseI64ArrayAttr(op.attributes["window_dimensions"])) == {1} and types[0] == types[1]
        case "select" if operands[1] == operands[2]:
            return operands[1:2]
        case "multiply" | "divide" | "add" | "subtract":
            first, second = (_fill_value(v) == (name in ("multiply", "divide")) for v in operands)
            if first and name in ("multiply", "add"):
                return operands[1:]
            same = second
    return operands[: len(op.results)] if same else None


def _only_reshapes(op: Any) -> bool:
    """Whether an operation is a reshape, be it written as a broadcast that adds dims of one element, or a sum."""
    if op.name not in ("stablehlo.reshape", "stablehlo.broadcast_in_dim", "stablehlo.reduce") or len(op.results) != 1:
        return False
    before, after = (ir.RankedTensorType(one.type).shape for one in (op.operands[0], op.results[0]))
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])) if "broadcast" in op.name else []
    return math.prod(before) == math.prod(after) and dims == sorted(dims)


def _hoist(module: Any) -> None:
    """Moves operations whose operands do not change in a loop in front of it, from the innermost loops outwards."""
    for loop, _ in _walk(module):
        for region in loop.regions if loop.name == "stablehlo.while" else ():
            changing = set(region.blocks[0].arguments)
            for op in operations(region)[:-1]:
                if _name(op) == "stablehlo.custom_call" or not changing.isdisjoint(_operands(op)):
                    changing.update(op.results)
                else:
                    op.move_before(loop)


def _foldable(module: Any, opaque: Opaque) -> tuple[Counter[Sent], Counter[Sent]]:
    """Returns the executions of collectives of constants, and of additions of two sums over devices of one kind."""
    constant: Counter[Sent] = Counter()
    reassociated: Counter[Sent] = Counter()
    constants: set[Any] = set()
    sums: dict[Any, tuple[Sent, tuple[Any, ...]]] = {}  # the all-reduce, and what its result was scaled by since
    for op, times in _walk(module):
        if (name := _name(op)) in opaque:
            for sent, operand, result in zip(opaque[name], op.operands, op.results, strict=False):
                constant.update({sent: times} if operand in constants else {})
                sums |= {result: (sent, ())} if sent[0] == "all_reduce" else {}
        elif _is_constant(op, constants):
            constants.update(op.results)
        elif name in ("stablehlo.add", "stablehlo.subtract"):
            total, other = (sums.get(v) for v in op.operands)
            if total is not None and total == other:
                reassociated[total[0]] += times
                sums[op.results[0]] = total
        elif name in ("stablehlo.multiply", "stablehlo.divide"):
            value, scale = op.operands
            if scale not in constants and name == "stablehlo.multiply":
                value, scale = scale, value
            if value in sums and scale in constants:
                sums[op.results[0]] = sums[value][0], (*sums[value][1], (name, scale))
    return constant, reassociated


def _is_constant(op: Any, constants: set[Any]) -> bool:
    """Whether an operation depends on constants alone; an array of no elements is a constant, such as padding."""
    operands = list(op.operands)
    if op.name == "stablehlo.remainder" and isinstance(op.results[0].type.element_type, ir.IntegerType):
        return _fill_value(operands[1]) == 1 or constants.issuperset(operands)  # of a float it need not be zero
    if not operands:
        return op.name in ("stablehlo.constant", "stablehlo.iota")
    if op.name in _NOT_CONSTANT:
        return False
    return all(v in constants or (isinstance(v.type, ir.RankedTensorType) and 0 in v.type.shape) for v in operands)


def _fill_value(value: Any) -> float | None:
    """Returns the number that every element of a value is; None where they differ, or it is not a finite one."""
    op = maker(value)
    while op is not None and op.name in ("stablehlo.broadcast_in_dim", "stablehlo.reshape"):
        op = maker(op.operands[0])
    if op is None or op.name != "stablehlo.constant":
        return None
    match = re.search(r"dense<(-?\d+(?:\.\d*)?(?:e[+-]?\d+)?)>", str(_jax.constant_of(op)))
    return float(match[1]) if match else None


def _attributes(op: Any) -> tuple[Any, ...]:
    """Names and attributes, but for the channel, which no two collectives share."""
    return tuple(pair for pair in _jax.attributes_of(op) if pair[0] != "channel_handle")


def _operands(op: Any) -> Iterator[Any]:
    """Yields the operands of an operation, and of those in its regions."""
    yield from op.operands
    for region in op.regions:
        for inner in operations(region):
            yield from _operands(inner)


def _replace(op: Any, values: Iterable[Any]) -> None:
    """Removes an operation whose results are these values."""
    replace_values(op.results, values)
    op.erase()
