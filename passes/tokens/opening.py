"""Operations that stand for others, as the operations that they consist of: attention, and loops over layers.

`jax.nn.dot_product_attention` is one operation for the other passes (`kernels`), and so are its derivatives. Which keys
a slice needs is seen in their operations: the mask, the maximum of a row, the sums. Barriers are
left out: phases keep the passes apart, and values behind barriers have one name.

Loops that do not run along the sequence, such as a scan over layers, are written out: slices cut operations, and a
loop's body is one for all iterations, so that a slice of it would have to leave keys and values of every iteration for
the slices behind it. Written out, iterations are layers like any others. A value that an iteration stacks, and the same
iteration of another loop takes from the stack (a residual), goes there directly; only other readers see the stack,
which is then put together once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Bounds, Graph, Op
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom, renamed_block, renamed_op
from alpa_lite.passes.layers.stacks import StackWalk
from alpa_lite.passes.tracing import conversion

MOST = 20_000
"""Operations that loops may become; more would take longer to plan and to compile than slices can save."""


def opened(rewriter: Rewriter, block: Block) -> tuple[Block, dict[int, int]]:
    """The block with such operations in place of the one, and for each of them, by index, the one that it is part of.

    Functions that are written for a device (Pallas, custom calls) stay as they are.
    """
    names: dict[int, Atom] = {}
    out: list[Op] = []
    part_of: dict[int, int] = {}
    for op in block.ops:
        op = renamed_op(op, names)
        if op.name in primitives.PAIRWISE:
            names.update(zip(op.results, op.operands, strict=True))
            continue
        inner = _inner(rewriter, op) if op.primitive is KERNEL else None
        if inner is None:
            out.append(op)
            continue
        ops, results = rewriter.inline(
            inner.block, dict(zip(inner.block.inputs, op.operands, strict=True)), inner.values, op.source
        )
        out += ops
        part_of.update((one.index, op.index) for one in ops)
        names.update(zip(op.results, results, strict=True))
    outputs = tuple(renamed_atom(a, names) for a in block.outputs)
    return Block(block.inputs, tuple(out), outputs), part_of


def _inner(rewriter: Rewriter, op: Op) -> Graph | None:
    """Returns the graph of a kernel; None if it holds a kernel of unknown operations, or arrays of its own."""
    if len(values_in(op.operands)) < len(op.operands):
        return None
    specs = [_jax.spec_of(rewriter.values[v].aval) for v in values_in(op.operands)]
    jaxpr = jax.make_jaxpr(op.params["kernel"].fun)(*specs)
    graph = conversion.graph_of(jaxpr, rewriter.keys)
    if graph.constants and all(_counts(array) for array in graph.constants):  # positions: made in the program
        graph = conversion.graph_of(jax.make_jaxpr(functools.partial(_counting, jaxpr))(*specs), rewriter.keys)
    opaque = any(one.name in primitives.KERNELS for one in graph.ops())
    return None if opaque or graph.constants else graph


def _counts(array: Any) -> bool:
    """Whether an array is 0, 1, 2, ..."""
    return np.ndim(array) == 1 and np.array_equal(array, np.arange(len(array)))


def _counting(jaxpr: Any, *operands: Any) -> Any:
    """A program whose constants are all 0, 1, 2, ..."""
    opened, constants = _jax.open_jaxpr(jaxpr)
    counts = [lax.iota(array.dtype, len(array)) for array in constants]
    return eval_jaxpr(opened, counts, *operands)


# -- loops -------------------------------------------------------------------------------------------------------------


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
