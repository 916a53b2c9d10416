"""The one way to edit a graph: fresh values, new ops, copies of ops, and putting a new block in place.

A rewriting keeps old value numbers where it can, gives new ones to what it adds, and numbers its new ops anywhere above
the old ones; `finish` removes what became dead and numbers everything densely, in program order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Traced, Value, check
from alpa_lite.passes.ir import pruning
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.loops import Carry, ScanView


@dataclass(frozen=True, eq=False)
class RewrittenStep:
    """A rewritten step.

    Attributes:
      traced: the step; arguments, outputs and state as before.
      scan: the index of the scan over micro-batches.
      origin: op index -> the index that the op had before the rewriting, or that of the op that it copies or is a part
        of; ops without one are new.
      copies: the ops that are copies.
    """

    traced: Traced
    scan: int
    origin: Mapping[int, int]
    copies: frozenset[int]


class Rewriter:
    """The tables of one rewriting.

    Attributes:
      values: by number, old and new.
      keys: writes the keys of new ops.
      place: op index before `finish` -> after it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: list[Value] = list(graph.values)
        self.keys: Keys = graph.keys or Keys()
        self.place: dict[int, int] = {}
        self._constants: list[tuple[int, Any]] = []
        self._origin: dict[int, int] = {}
        self._copies: set[int] = set()
        self._shaped: dict[tuple[int, tuple[int, ...]], Value] = {}  # by the `id` of another, which `values` keeps
        self._last: int | None = None  # index of an op, once one was asked for

    def new_value(self, like: int | Value) -> int:
        """Returns a new value number, of the type of another value or of a given one."""
        self.values.append(self.values[like] if isinstance(like, int) else like)
        return len(self.values) - 1

    def new_value_of_shape(self, like: int, shape: tuple[int, ...]) -> int:
        """Returns a new value number, of the type of another value but of a shape of its own."""
        before = self.values[like]
        if before.shape == shape:
            return self.new_value(before)
        made = self._shaped.get((id(before), shape))
        if made is None:
            made = self._shaped[id(before), shape] = Value(shape, before.dtype, before.aval.update(shape=shape))
        return self.new_value(made)

    def constant(self, like: Value, array: Any) -> int:
        """Returns a new constant of the graph: an input of the top block."""
        number = self.new_value(like)
        self._constants.append((number, array))
        return number

    def index(self, origin: int | None = None, *, is_copy: bool = False) -> int:
        """Returns a new op index."""
        if self._last is None:
            self._last = max((op.index for op in self.graph.ops()), default=-1)
        self._last += 1
        if origin is not None:
            self._origin[self._last] = self._origin.get(origin, origin)
        if is_copy:
            self._copies.add(self._last)
        return self._last

    def op(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        operands: Sequence[Atom],
        results: Sequence[int],
        source: Any,
        origin: int | None = None,
        ctx: Any = None,
    ) -> Op:
        """Returns a new op without bodies."""
        described = [a if isinstance(a, Lit) else self.values[a] for a in operands]
        key = self.keys.key(self.keys.head(primitive, params), described)
        return Op(self.index(origin), primitive, params, tuple(operands), tuple(results), (), source, key, ctx)

    def barrier(self, values: Sequence[int], source: Any) -> tuple[Op, dict[int, int]]:
        """Returns an `optimization_barrier` on some values, and the name of each after it."""
        after = {value: self.new_value(value) for value in values}
        return self.op(_jax.optimization_barrier_primitive(), {}, values, list(after.values()), source), after

    def copy(
        self,
        op: Op,
        operands: Mapping[int, Atom] | Sequence[Atom],
        results: Sequence[int] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        values: Sequence[Value] | None = None,
        source: Any = None,
    ) -> Op:
        """A copy of an op, everything in its bodies fresh. Its key is written when it is numbered, if it is another.

        Args:
          operands: new ones, of other types perhaps, or the names of those that change.
          results: new ones; fresh values of the same types by default.
          params: in place of its own.
          values: of the graph that the op is from, by default this one.
          source: in place of its own.
        """
        known = self.values if values is None else values
        if isinstance(operands, Mapping):
            operands = [rename_atom(a, operands) for a in op.operands]
        is_alike = params is None and len(operands) == len(op.operands)  # fewer of a part of a barrier
        is_alike = is_alike and all(self._is_alike(a, known, b) for a, b in zip(op.operands, operands, strict=True))
        return Op(
            self.index(op.index if values is None else None, is_copy=True),
            op.primitive,
            op.params if params is None else params,
            tuple(operands),
            tuple([self.new_value(known[v]) for v in op.results] if results is None else results),
            tuple([self.copy_block(body, known) for body in op.bodies]),
            op.source if source is None else source,
            op.key if is_alike else None,
            op.ctx,
            op.has_effects,
        )

    def _is_alike(self, before: Atom, known: Sequence[Value], after: Atom) -> bool:
        """Returns whether an operand, of a graph with these values, is like a new one to the key of an op."""
        if isinstance(before, Lit) or isinstance(after, Lit):
            return before is after
        one, other = known[before], self.values[after]
        return one is other or (one.shape, one.dtype) == (other.shape, other.dtype)

    def copy_block(self, block: Block, values: Sequence[Value] | None = None) -> Block:
        """Returns a copy of a block, in which everything is fresh.

        `values`: of the graph that it is from, by default this.
        """
        known = self.values if values is None else values
        inputs = tuple([self.new_value(known[value]) for value in block.inputs])
        ops, outputs = self.inline(block, dict(zip(block.inputs, inputs, strict=True)), known)
        return Block(inputs, tuple(ops), tuple(outputs))

    def inline(
        self, block: Block, given: Mapping[int, Atom], values: Sequence[Value] | None = None, source: Any = None
    ) -> tuple[list[Op], list[Atom]]:
        """Copies of the operations of a block, and the atoms of its outputs.

        Args:
          given: the atoms of its inputs; operations whose results are among them are left out.
          values: of the graph that it is from, by default this one.
          source: of all operations, in place of their own.
        """
        names, ops = dict(given), []
        for op in block.ops:
            if not op.results or not names.keys() >= set(op.results):
                ops.append(self.copy(op, names, values=values, source=source))
                names.update(zip(op.results, ops[-1].results, strict=True))
        return ops, [rename_atom(atom, names) for atom in block.outputs]

    def finish(self, block: Block) -> Graph:
        """Returns the graph with another top block; `place` says where its ops are."""
        constants = (*self.graph.constants, *(array for _, array in self._constants))
        inputs = (*block.inputs, *(number for number, _ in self._constants))
        graph = Graph(tuple(self.values), replace(block, inputs=inputs), constants, self.keys)
        pruned, before = pruning.prune_tracked(graph)
        check(pruned)
        self.place = {index: new for new, index in before.items()}
        return pruned

    def step(self, traced: Traced, block: Block, scan: int) -> RewrittenStep:
        """Returns the step with another top block; `scan` is the index of the scan over micro-batches in it."""
        graph = self.finish(block)
        known = {op.index for op in self.graph.ops()}
        origin = {new: self._origin.get(index, index) for index, new in self.place.items()}
        return RewrittenStep(
            replace(traced, graph=graph),
            self.place[scan],
            {new: index for new, index in origin.items() if index in known},
            frozenset(new for index, new in self.place.items() if index in self._copies),
        )


def shape_of(atom: Atom, values: Sequence[Value]) -> tuple[int, ...]:
    """Returns the shape of an atom."""
    return tuple(atom.aval.shape) if isinstance(atom, Lit) else values[atom].shape


def rename_atom(atom: Atom, names: Mapping[int, Atom]) -> Any:
    """Returns the new name of an atom; itself if it has no other name."""
    return names.get(atom, atom) if isinstance(atom, int) else atom


def rename_op(op: Op, names: Mapping[int, Atom]) -> Op:
    """Returns an op with some operands renamed; itself if it reads none of them."""
    if names.keys().isdisjoint(op.reads):
        return op
    return replace(op, operands=tuple([rename_atom(a, names) for a in op.operands]))


def rename_block(block: Block, names: Mapping[int, Atom]) -> Block:
    """Returns a block with some of the values that its ops and outputs read renamed."""
    ops = tuple([rename_op(op, names) for op in block.ops])
    return Block(block.inputs, ops, tuple([rename_atom(a, names) for a in block.outputs]))


def rename_parts(view: ScanView, names: Mapping[int, Atom]) -> tuple[list[Op], list[Carry], list[tuple[Atom, int]]]:
    """Returns the body's ops, the carries and the ys of a scan, with some of the values that its body reads renamed."""
    carries = [one._replace(output=rename_atom(one.output, names)) for one in view.carries]
    return (
        [rename_op(op, names) for op in view.body.ops],
        carries,
        [(rename_atom(atom, names), result) for atom, result in view.ys],
    )


def replace_body(op: Op, body: Block) -> Op:
    """Returns a scan with another body of the same inputs and outputs; its key is written when it is numbered."""
    return replace(op, bodies=(body,), key=None)


def replace_op(block: Block, scan: Op, ops: Iterable[Op]) -> Block:
    """Returns a top block with other ops in place of one."""
    return Block(block.inputs, tuple(o for op in block.ops for o in (ops if op is scan else (op,))), block.outputs)
