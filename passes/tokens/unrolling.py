"""Loops that do not run along the sequence, such as a scan over layers, as the operations of their iterations.

Slices cut operations, and a loop's body is one for all iterations: a slice of it would have to leave keys and values
of every iteration for the slices behind it. Written out, iterations are layers like any others. A value that an
iteration stacks, and the same iteration of another loop takes from the stack (a residual), goes there directly; only
other readers see the stack, which is then put together once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax import lax

from alpa_lite.ir.graph import Atom, Block, Bounds, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom, renamed_block
from alpa_lite.passes.layers.stacks import StackWalk

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


def unrolled(rewriter: Rewriter, block: Block, loops: Set[int]) -> Unrolled:
    """The block with some scans, and those that read their stacks row by row (residuals), written out.

    Args:
      loops: indices of their ops.
    """
    walk = _Unrolling(rewriter, block, loops)
    walk.run()
    outputs = tuple([walk.whole(atom, None) for atom in block.outputs])
    made = renamed_block(Block(block.inputs, tuple(walk.out), outputs), walk.names)
    return Unrolled(made, walk.part_of, walk.rows)


class _Unrolling(StackWalk):
    """A walk that writes loops out: a piece of a stack is what one iteration takes or gives.

    Attributes:
      names: what a value that a loop ended with is called.
      part_of, rows: as `Unrolled` has them. makers: stack -> the loop that makes it.
      loop: index of the loop that is written out.
    """

    def __init__(self, rewriter: Rewriter, block: Block, loops: Set[int]) -> None:
        every = {op.index: tuple(range(ScanView(op).length + 1)) for op in block.ops if op.index in loops}
        super().__init__(rewriter, {}, block, every)
        self.names: dict[int, Atom] = {}
        self.part_of: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.makers: dict[int, Op] = {}
        self.loop = -1

    def cut(self, op: Op, bounds: Bounds) -> None:
        """Writes a loop out."""
        view = ScanView(op)
        for atom in (*view.operands.consts, *view.operands.carry):
            self.whole(atom, op.source)
        self.loop = op.index
        taken = [self.parts(value, bounds, op.source) for value in values_in(view.operands.xs)]
        carry: Sequence[Atom] = view.operands.carry
        given: dict[int, Sequence[Any]] = {}
        order = range(view.length)
        for number in reversed(order) if op.params["reverse"] else order:
            xs = [rows[number] for rows in taken]
            names: dict[int, Atom] = dict(zip(view.body.inputs, [*view.operands.consts, *carry, *xs], strict=True))
            for inner in view.body.ops:
                made = self.rewriter.copy(inner, names)
                names.update(zip(inner.results, made.results, strict=True))
                self.out.append(made)
                self.part_of[made.index] = op.index
            carry, given[number] = view.given([renamed_atom(a, names) for a in view.body.outputs])
        self.names.update((v, renamed_atom(a, self.names)) for v, a in zip(view.results.carry, carry, strict=True))
        for value, *rows in zip(view.results.ys, *(given[number] for number in order), strict=True):
            self.pieces[value] = bounds, tuple(rows)
            self.makers[value] = op

    def slice(self, value: int, low: int, high: int, source: Any, part: int | None = None) -> int:
        """The row of a stack that an iteration takes."""
        cut = super().slice(value, low, high, source)
        row = self.rewriter.shaped(value, self.rewriter.values[value].shape[1:])
        self.out.append(self.rewriter.op(lax.squeeze_p, {"dimensions": (0,)}, [cut], [row], source))
        for op in self.out[-2:]:
            self.part_of[op.index], self.rows[op.index] = self.loop, value
        return row

    def join(self, value: int, parts: Sequence[int], source: Any) -> None:
        """Puts a stack together."""
        loop, first = self.makers[value], len(self.out)
        shape = (1, *self.rewriter.values[value].shape[1:])
        params = {"shape": shape, "broadcast_dimensions": tuple(range(1, len(shape))), "sharding": None}
        made = [self.rewriter.shaped(value, shape) for _ in parts]
        for row, part in zip(parts, made, strict=True):
            self.out.append(self.rewriter.op(lax.broadcast_in_dim_p, params, [row], [part], loop.source))
        super().join(value, made, loop.source)
        self.part_of.update((op.index, loop.index) for op in self.out[first:])
