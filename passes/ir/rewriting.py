"""What passes that rewrite a `Graph` share: fresh values, copies of ops, and putting a new block in place.

A rewrite keeps old value numbers where it can, gives new ones to what it adds, and numbers its new ops anywhere above
the old ones; `finish` removes what became dead and numbers everything densely, in program order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite import _jax
from alpa_lite.graph import Atom, Block, Graph, Lit, Op, Traced, Value, check
from alpa_lite.passes.ir import pruning
from alpa_lite.passes.ir.flow import reads
from alpa_lite.passes.ir.keys import Keys


@dataclass(frozen=True, eq=False)
class Rewritten:
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
    """The tables of one rewriting."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.values: list[Value] = list(traced.graph.values)
        self.keys = Keys()
        self.origin: dict[int, int] = {}
        self.copies: set[int] = set()
        self.place: dict[int, int] = {}  # set by `finish`: the index of an op before it -> after it
        self._index = 1 + max((op.index for op in traced.graph.ops()), default=0)

    def fresh(self, like: int | Value) -> int:
        """A new value number, of the type of another value or of a given one."""
        self.values.append(self.values[like] if isinstance(like, int) else like)
        return len(self.values) - 1

    def shaped(self, like: int, shape: tuple[int, ...]) -> int:
        """A new value number, of the type of another value but of a shape of its own."""
        before = self.values[like]
        same = before.shape == shape
        return self.fresh(before if same else replace(before, shape=shape, aval=before.aval.update(shape=shape)))

    def index(self, origin: int | None = None, *, is_copy: bool = False) -> int:
        """A new op index."""
        self._index += 1
        if origin is not None:
            self.origin[self._index] = self.origin.get(origin, origin)
        if is_copy:
            self.copies.add(self._index)
        return self._index

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
        """A new op without bodies."""
        described = [a if isinstance(a, Lit) else self.values[a] for a in operands]
        key = self.keys.key(self.keys.head(primitive, params), described)
        return Op(self.index(origin), primitive, params, tuple(operands), tuple(results), (), source, key, ctx)

    def copy(self, op: Op, renamed: Mapping[int, Atom], source: Any = None) -> Op:
        """A copy of an op: its operands renamed, its results and everything in its bodies fresh."""
        bodies = tuple(self.copy_block(body) for body in op.bodies)
        return replace(
            op,
            index=self.index(op.index, is_copy=True),
            operands=tuple([renamed_atom(a, renamed) for a in op.operands]),
            results=tuple(map(self.fresh, op.results)),
            bodies=bodies,
            source=op.source if source is None else source,
        )

    def copy_block(self, block: Block) -> Block:
        """A copy of a block: everything in it is fresh."""
        renamed: dict[int, Atom] = {value: self.fresh(value) for value in block.inputs}
        ops = []
        for op in block.ops:
            made = self.copy(op, renamed)
            renamed.update(zip(op.results, made.results, strict=True))
            ops.append(made)
        inputs = tuple(i for v in block.inputs if isinstance(i := renamed[v], int))
        return Block(inputs, tuple(ops), tuple([renamed_atom(a, renamed) for a in block.outputs]))

    def barrier(self, values: Sequence[int], source: Any) -> tuple[Op, dict[int, int]]:
        """An `optimization_barrier` on some values, and what each is called after it."""
        after = {value: self.fresh(value) for value in values}
        return self.op(_jax.optimization_barrier_primitive(), {}, values, list(after.values()), source), after

    def finish(self, block: Block, scan: int) -> Rewritten:
        """The step with another top block; `scan` is the index of the scan over micro-batches in it."""
        graph = Graph(tuple(self.values), block, self.traced.graph.constants)
        pruned, old = pruning.prune_tracked(graph, self.keys)
        check(pruned)
        self.place = {index: new for new, index in old.items()}
        known = {op.index for op in self.traced.graph.ops()}
        origin = {new: self.origin.get(index, index) for new, index in old.items()}
        return Rewritten(
            replace(self.traced, graph=pruned),
            next(new for new, index in old.items() if index == scan),
            {new: index for new, index in origin.items() if index in known},
            frozenset(new for new, index in old.items() if index in self.copies),
        )


def renamed_atom(atom: Atom, names: Mapping[int, Atom]) -> Atom:
    """What an atom is called; itself if it has no other name."""
    return names.get(atom, atom) if isinstance(atom, int) else atom


def with_body(op: Op, body: Block) -> Op:
    """A scan with another body of the same inputs and outputs; its key is written when it is numbered."""
    return replace(op, bodies=(body,), key=None)


def substituted(block: Block, scan: Op, ops: Iterable[Op]) -> Block:
    """A top block with other ops in place of one."""
    return Block(block.inputs, tuple(o for op in block.ops for o in (ops if op is scan else (op,))), block.outputs)


def renamed_op(op: Op, names: Mapping[int, Atom]) -> Op:
    """An op with some operands renamed; itself if it reads none of them."""
    if names.keys().isdisjoint(reads(op)):
        return op
    return replace(op, operands=tuple([renamed_atom(a, names) for a in op.operands]))
