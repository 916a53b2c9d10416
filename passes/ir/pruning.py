"""Removal of dead operations and values, and dense numbering of the remaining ones.

An op is live if one of its results is read by a live op or by an output, or if it has effects. Liveness goes backward
through a block once. Through control flow it goes value by value:

    scan     a carry is live if its final value is, or if the body reads it for something live (least fixed point); of
             a single iteration nothing is read again, and its initial value is a constant if its end is not live
    while    likewise, and every carry that the condition reads
    cond     a result that is not read is removed from every branch
    io_callback   a result that is not read is removed: no device sends it to the others
    optimization_barrier    result i keeps operand i alive, and no other

so a scan stops carrying, and stacking, what is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.loops import ScanView, ports


def prune(graph: Graph, *, keep_inputs: int | None = None) -> Graph:
    """Returns the same program without dead ops, dead control-flow operands and results, and unused constants.

    Args:
      graph: any graph.
      keep_inputs: the number of leading block inputs that are the step's arguments and stay even if unused; by default
        all but the constants.
    """
    return prune_tracked(graph, keep_inputs=keep_inputs)[0]


def renumber(graph: Graph) -> Graph:
    """The same graph, its values and ops numbered densely, in program order; values that do not appear are left out.

    Graphs that do the same then have the same numbers, and differ in names and source lines alone: what has been found
    out about one of them, keyed by value or by operation, holds for the others.
    """
    numbering = _Numbering(graph.values, graph.keys or Keys())
    block = numbering.block(graph.block)
    return replace(graph, values=tuple(numbering.values), block=block)


def number_ops(block: Block) -> tuple[Block, dict[int, int]]:
    """A block whose ops are numbered densely, in program order, with the new index by the old one; values stay."""
    place: dict[int, int] = {}

    def visit(block: Block) -> Block:
        ops = []
        for op in block.ops:
            bodies = tuple(map(visit, op.bodies))
            place[op.index] = len(place)
            ops.append(replace(op, index=place[op.index], bodies=bodies))
        return replace(block, ops=tuple(ops))

    return visit(block), place


def live_block(block: Block) -> Block:
    """Returns a block without its dead ops; nothing is renumbered, and all inputs stay."""
    return Block(block.inputs, _live_ops(block.ops, block.outputs)[0], block.outputs)


def prune_tracked(graph: Graph, *, keep_inputs: int | None = None) -> tuple[Graph, dict[int, int]]:
    """As `prune`, with the old index of every op by its new index."""
    keep = len(graph.block.inputs) - len(graph.constants) if keep_inputs is None else keep_inputs
    ops, live = _live_ops(graph.block.ops, graph.block.outputs)
    kept_constants = [i for i, value in enumerate(graph.block.inputs[keep:]) if value in live]
    inputs = (*graph.block.inputs[:keep], *(graph.block.inputs[keep + i] for i in kept_constants))
    numbering = _Numbering(graph.values, graph.keys or Keys())
    block = numbering.block(Block(inputs, ops, graph.block.outputs))
    constants = tuple(graph.constants[i] for i in kept_constants)
    return Graph(tuple(numbering.values), block, constants, graph.keys), numbering.origin


def _live_ops(ops: Sequence[Op], outputs: Sequence[Atom]) -> tuple[tuple[Op, ...], set[Atom]]:
    """Returns the live ops, their control flow pruned, and all that they or the outputs read."""
    live = set(outputs)
    kept: list[Op] = []
    for op in reversed(ops):
        if live.isdisjoint(op.results) and not op.has_effects:
            continue
        rule = _RULES.get(op.name)
        op = op if rule is None else rule(op, [result in live for result in op.results])
        kept.append(op)
        live.update(op.operands)
    return tuple(reversed(kept)), live


def _region(op: Op, used: list[bool]) -> Op:
    """Removes dead values from the border of a scan, while or cond; live carries are the least fixed point."""
    op, used = _once(op, used) if op.name == "scan" else (op, used)
    border, is_used = ports(op), dict(zip(op.results, used, strict=True))
    live = [port.result is not None and is_used[port.result] for port in border]
    conditions = op.bodies[: op.name == "while"]
    while True:
        mask = [alive for alive, port in zip(live, border, strict=True) if port.result is not None]
        outputs = [body.outputs if body in conditions else _select(body.outputs, mask) for body in op.bodies]
        found = [_live_ops(body.ops, kept) for body, kept in zip(op.bodies, outputs, strict=True)]
        read = set[Atom]().union(*(values for _, values in found))
        grown = [alive or not read.isdisjoint(port.inputs) for alive, port in zip(live, border, strict=True)]
        if grown == live:
            break
        live = grown
    inputs = {value for alive, port in zip(live, border, strict=True) if alive for value in port.inputs}
    bodies = [
        Block(tuple(v for v in body.inputs if v in inputs), ops, kept)
        for body, (ops, _), kept in zip(op.bodies, found, outputs, strict=True)
    ]
    taken = [alive for alive, port in zip(live, border, strict=True) if port.operand is not None]
    carries = sum(alive for alive, port in zip(live, border, strict=True) if port.role == "carry")
    params = op.params
    if op.name == "scan":
        params = {**params, "num_consts": sum(taken[: ScanView(op).num_consts]), "num_carry": carries}
    elif op.name == "while":
        cond_nconsts, body_nconsts = (len(body.inputs) - carries for body in bodies)
        params = {**params, "cond_nconsts": cond_nconsts, "body_nconsts": body_nconsts}
    return _changed(op, [True, *taken] if op.name == "cond" else taken, mask, params=params, bodies=tuple(bodies))


def _once(op: Op, used: list[bool]) -> tuple[Op, list[bool]]:
    """Turns carries of a one-iteration scan with unread ends into constants; returns it, and which results are used."""
    view = ScanView(op)
    ends, ys = view.split_results(used)
    if view.length != 1 or all(ends):
        return op, used

    def turned(items: Sequence[Any]) -> tuple[Any, ...]:
        consts, carry, xs = view.split_operands(items)
        return (*consts, *_select(carry, [not end for end in ends]), *_select(carry, ends), *xs)

    kept = (*ends, *(True for _ in ys))
    params = dict(op.params, num_consts=view.num_consts + len(ends) - sum(ends), num_carry=sum(ends))
    body = Block(turned(view.body.inputs), view.body.ops, _select(view.body.outputs, kept))
    once = _changed(op, None, kept, params=params, bodies=(body,), operands=turned(op.operands))
    return once, list(_select(used, kept))


def _barrier(op: Op, used: list[bool]) -> Op:
    """Returns a barrier without the values that nothing reads after it."""
    return op if all(used) else _changed(op, used, used)


def _callback(op: Op, used: list[bool]) -> Op:
    """Returns a callback without the results that nothing reads."""
    kept = [i for i, is_read in enumerate(used) if is_read]
    return op if all(used) else _changed(op, None, used, params=_jax.keep_callback_results(op.params, kept))


_RULES = {**dict.fromkeys(primitives.CONTROL, _region), "optimization_barrier": _barrier, "io_callback": _callback}


def _select(items: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(item for item, keep in zip(items, mask, strict=True) if keep)


def _changed(op: Op, operands: Sequence[bool] | None, results: Sequence[bool], /, **parts: Any) -> Op:
    """Returns an op with some of its operands (None for all) and results, and with other parts.

    Its key is written when it is numbered.
    """
    if operands is not None:
        parts["operands"] = _select(op.operands, operands)
    return replace(op, results=_select(op.results, results), key=None, **parts)


class _Numbering:
    """Numbers values and ops densely, in program order."""

    def __init__(self, values: Sequence[Value], keys: Keys) -> None:
        self.values: list[Value] = []
        self._old = values
        self._new: dict[int, int] = {}
        self._keys = keys
        self._heads: dict[tuple[int, int], str] = {}  # by the `id` of primitive and parameters, which the ops keep
        self._ops = 0
        self.origin: dict[int, int] = {}

    def block(self, block: Block) -> Block:
        inputs = tuple(map(self._define, block.inputs))
        ops = tuple(map(self._op, block.ops))
        return Block(inputs, ops, tuple(map(self._read, block.outputs)))

    def _op(self, op: Op) -> Op:
        new = self._new
        operands = tuple([atom if isinstance(atom, Lit) else new[atom] for atom in op.operands])
        bodies = tuple(map(self.block, op.bodies)) if op.bodies else ()
        results = tuple(map(self._define, op.results))
        index, key = self._ops, op.key
        self._ops += 1
        self.origin[index] = op.index
        if key is None:
            parts = id(op.primitive), id(op.params)
            head = self._heads.get(parts)
            if head is None:
                head = self._heads[parts] = self._keys.head(op.primitive, op.params, structured=bool(bodies))
            described = [atom if isinstance(atom, Lit) else self.values[atom] for atom in operands]
            key = self._keys.key(head, described, [self._keys.block(body, self.values.__getitem__) for body in bodies])
        return Op(index, op.primitive, op.params, operands, results, bodies, op.source, key, op.ctx, op.has_effects)

    def _define(self, value: int) -> int:
        number = self._new[value] = len(self.values)
        self.values.append(self._old[value])
        return number

    def _read(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Lit) else self._new[atom]
