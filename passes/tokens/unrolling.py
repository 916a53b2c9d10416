"""Loops that do not run along the sequence, such as a scan over layers, as the operations of their iterations.

Slices cut operations, and a loop's body is one for all iterations: a slice of it would have to leave keys and values
of every iteration for the slices behind it. Written out, iterations are layers like any others. A value that an
iteration stacks, and the same iteration of another loop takes from the stack (a residual), goes there directly; only
other readers see the stack, which is then put together once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax import lax

from alpa_lite.ir.graph import Atom, Block, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom, renamed_op

MOST = 20_000
"""Operations that loops may become; more would take longer to plan and to compile than slices can save."""


@dataclass(frozen=True, eq=False)
class Unrolled:
    """A block without some of its loops.

    Attributes:
      part_of: index of an op that a loop became -> the loop's.
      rows: index of an op that cuts an iteration's row out of a stack -> the stack, made outside of these loops.
    """

    block: Block
    part_of: Mapping[int, int]
    rows: Mapping[int, int]


def operations(op: Op) -> int:
    """How many operations a loop becomes."""
    view = ScanView(op)
    return view.length * (len(view.body.ops) + 2 * len(view.inputs.xs))


def coupled(block: Block, loops: Set[int]) -> list[Op]:
    """Returns loops, given by the indices of their ops, and those that read their stacks row by row (residuals)."""
    stacks: set[int] = set()
    out = []
    for op in block.ops:
        if op.name != "scan":
            continue
        view = ScanView(op)
        if op.index in loops or not stacks.isdisjoint(values_in(view.operands.xs)):
            out.append(op)
            stacks.update(view.results.ys)
    return out


def unrolled(rewriter: Rewriter, block: Block, wanted: Callable[[Op], bool]) -> Unrolled:
    """The block with the wanted scans written out."""
    walk = _Unrolling(rewriter)
    for op in block.ops:
        if op.name == "scan" and wanted(op):
            walk.scan(op)
        else:
            walk.make_whole(op.reads)
            walk.out.append(renamed_op(op, walk.names))
    walk.make_whole(values_in(block.outputs))
    outputs = tuple(renamed_atom(a, walk.names) for a in block.outputs)
    return Unrolled(Block(block.inputs, tuple(walk.out), outputs), walk.part_of, walk.cuts)


class _Unrolling:
    """One block, its operations taken in order.

    Attributes:
      names: what a value that a loop ended with is called.
      stacks: stacked result -> the loop, and what each of its iterations gives.
    """

    def __init__(self, rewriter: Rewriter) -> None:
        self.rw = rewriter
        self.out: list[Op] = []
        self.part_of: dict[int, int] = {}
        self.cuts: dict[int, int] = {}
        self.names: dict[int, Atom] = {}
        self.stacks: dict[int, tuple[Op, list[Atom]]] = {}
        self.made: set[int] = set()  # stacks that exist whole
        self.rows: dict[tuple[int, int], int] = {}  # (stack, iteration) -> what was cut out of it

    def scan(self, op: Op) -> None:
        """Writes a loop out."""
        view = ScanView(op)
        consts = [renamed_atom(a, self.names) for a in view.operands.consts]
        carry = [renamed_atom(a, self.names) for a in view.operands.carry]
        self.make_whole(values_in((*view.operands.consts, *view.operands.carry)))
        given: list[list[Atom]] = [[] for _ in view.outputs.ys]
        order = range(view.length)
        for number in reversed(order) if op.params["reverse"] else order:
            xs = [self.row(op, a, number) for a in view.operands.xs]
            names: dict[int, Atom] = dict(zip(view.body.inputs, [*consts, *carry, *xs], strict=True))
            for inner in view.body.ops:
                made = self.rw.copy(inner, names)
                names.update(zip(inner.results, made.results, strict=True))
                self.out.append(made)
                self.part_of[made.index] = op.index
            carry = [renamed_atom(a, names) for a in view.outputs.carry]
            for some, atom in zip(given, view.outputs.ys, strict=True):
                some.append(renamed_atom(atom, names))
        self.names.update(zip(view.results.carry, carry, strict=True))
        for value, some in zip(view.results.ys, given, strict=True):
            self.stacks[value] = op, some[::-1] if op.params["reverse"] else some

    def row(self, op: Op, atom: Atom, number: int) -> Atom:
        """Returns the row of a stack that an iteration takes."""
        assert isinstance(atom, int)
        if atom in self.stacks:
            return self.stacks[atom][1][number]
        if (atom, number) not in self.rows:
            shape, given = self.rw.values[atom].shape[1:], self.names.get(atom, atom)
            cut, row = self.rw.shaped(atom, (1, *shape)), self.rw.shaped(atom, shape)
            starts, limits = (number, *(0,) * len(shape)), (number + 1, *shape)
            params = {"start_indices": starts, "limit_indices": limits, "strides": None}
            self.cuts[self._write(lax.slice_p, params, [given], cut, op)] = atom
            self.cuts[self._write(lax.squeeze_p, {"dimensions": (0,)}, [cut], row, op)] = atom
            self.rows[atom, number] = row
        return self.rows[atom, number]

    def make_whole(self, values: Iterable[int]) -> None:
        """Makes sure that stacks exist whole."""
        for value in values:
            if value not in self.stacks or value in self.made:
                continue
            self.made.add(value)
            op, rows = self.stacks[value]
            shape = (1, *self.rw.values[value].shape[1:])
            params = {"shape": shape, "broadcast_dimensions": tuple(range(1, len(shape))), "sharding": None}
            parts = [self.rw.shaped(value, shape) for _ in rows]
            for row, part in zip(rows, parts, strict=True):
                self._write(lax.broadcast_in_dim_p, params, [row], part, op)
            self._write(lax.concatenate_p, {"dimension": 0}, parts, value, op)

    def _write(self, primitive: Any, params: Mapping[str, Any], operands: Sequence[Atom], result: int, scan: Op) -> int:
        """Writes an operation that is a part of a loop; its index."""
        made = self.rw.op(primitive, params, operands, [result], scan.source)
        self.out.append(made)
        self.part_of[made.index] = scan.index
        return made.index
