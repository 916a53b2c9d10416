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
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Bounds, Graph, Op
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.blockwise.functions import rows_of
from alpa_lite.passes.blockwise.stacks import StackWalk
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanResults, ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, rename_atom, rename_block, rename_op
from alpa_lite.passes.tracing import conversion

MOST = 20_000
"""Operations that loops may become; more would take longer to plan and to compile than slices can save."""


def replace_by_operations(rewriter: FunctionWriter, block: Block) -> Block:
    """Returns the block with such operations in place of the one, whose parts they are (`FunctionWriter.origin`).

    Functions that are written for a device (Pallas, custom calls) stay as they are.
    """
    names: dict[int, Atom] = {}
    out: list[Op] = []
    for op in block.ops:
        op = rename_op(op, names)
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
        rewriter.attribute(ops, op.index)
        names.update(zip(op.results, results, strict=True))
    outputs = tuple(rename_atom(a, names) for a in block.outputs)
    return Block(block.inputs, tuple(out), outputs)


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
    """Returns whether an array is 0, 1, 2, ..."""
    return np.ndim(array) == 1 and np.array_equal(array, np.arange(len(array)))


def _counting(jaxpr: Any, *operands: Any) -> Any:
    """Returns a program whose constants are all 0, 1, 2, ..."""
    opened, constants = _jax.open_jaxpr(jaxpr)
    counts = [lax.iota(array.dtype, len(array)) for array in constants]
    return eval_jaxpr(opened, counts, *operands)


# -- loops -------------------------------------------------------------------------------------------------------------


def operations(op: Op) -> int:
    """Returns how many operations a loop becomes."""
    view = ScanView(op)
    return view.length * (len(view.body.ops) + 2 * len(view.inputs.xs))


def unroll_scans(rewriter: FunctionWriter, block: Block, loops: Set[int]) -> tuple[Block, Mapping[int, int]]:
    """Returns the block with some scans, and those that read their stacks row by row (residuals), written out.

    Args:
      loops: indices of their ops.

    Returns:
      The block; and, by the index of an op that takes an iteration's row out of a stack, the stack.
    """
    walk = _Unrolling(rewriter, block, loops)
    walk.run()
    for value in values_in(block.outputs):
        walk.join_pieces(value, None)
    return rename_block(Block(block.inputs, tuple(walk.out), block.outputs), walk.names), walk.taken


class _Unrolling(StackWalk):
    """The writing out of loops: a walk in which each piece is the row of one iteration.

    Attributes:
      taken: index of an op that takes a row -> the stack.
      names: of the values that a loop ended with.
    """

    rewriter: FunctionWriter

    def __init__(self, rewriter: FunctionWriter, block: Block, loops: Set[int]) -> None:
        cuts = {op.index: tuple(range(ScanView(op).length + 1)) for op in block.ops if op.index in loops}
        super().__init__(rewriter, {}, block, cuts)  # without rules everything but loops is done whole
        self.taken: dict[int, int] = {}
        self.names: dict[int, Atom] = {}

    def cut(self, op: Op, bounds: Bounds) -> Sequence[Atom]:
        """Writes a loop out; returns the carry of its last iteration."""
        view = ScanView(op)
        for atom in (*view.operands.consts, *view.operands.carry):
            self.join_pieces(atom, op.source)
        first = len(self.out)
        carry = super().cut(op, bounds)
        self.names.update((v, rename_atom(a, self.names)) for v, a in zip(view.results.carry, carry, strict=True))
        self.rewriter.attribute(self.out[first:], op.index)
        return carry

    def iterate(self, op: Op, low: int, high: int, operands: Sequence[Atom]) -> ScanResults[Atom]:
        """Writes one iteration; returns its carry, and its rows of the stacked results."""
        view = ScanView(op)
        ops, outputs = self.rewriter.inline(view.body, dict(zip(view.body.inputs, operands, strict=True)))
        self.out += ops
        return view.split_results(outputs)

    def take(self, value: int, low: int, high: int, source: Any) -> Atom:
        """Returns one row of a stack."""
        row = self.rewriter.new_value_of_shape(value, self.rewriter.values[value].shape[1:])
        cut = rows_of(self.rewriter, value, low, high, source)
        self.out += (cut, self.rewriter.op(lax.squeeze_p, {"dimensions": (0,)}, cut.results, [row], source))
        self.taken.update((op.index, value) for op in self.out[-2:])
        return row

    def concatenate(self, parts: Sequence[Atom], stack: int, source: Any) -> None:
        """Makes a stack of its rows, as a part of the loop that they are from."""
        loop, first, shape = self.defined[stack], len(self.out), (1, *self.rewriter.values[stack].shape[1:])
        params = {"shape": shape, "broadcast_dimensions": tuple(range(1, len(shape))), "sharding": None}
        rows = [self.rewriter.new_value_of_shape(stack, shape) for _ in parts]
        for part, row in zip(parts, rows, strict=True):
            self.out.append(self.rewriter.op(lax.broadcast_in_dim_p, params, [part], [row], loop.source))
        super().concatenate(rows, stack, loop.source)
        self.rewriter.attribute(self.out[first:], loop.index)
