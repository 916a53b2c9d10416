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
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Graph, Op
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.blockwise.parts import rows_of
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
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
    return _Unrolling(rewriter, loops).block(block)


class _Unrolling:
    """The writing out of loops.

    Attributes:
      rows: stack -> what each iteration takes of it, or gives to it.
      makers: stack that exists in rows alone -> the loop that makes it.
      cuts: index of an op that takes a row -> the stack.
      names: what a value that a loop ended with is called.
    """

    def __init__(self, rewriter: FunctionWriter, loops: Set[int]) -> None:
        self.rewriter, self.loops = rewriter, loops
        self.out: list[Op] = []
        self.rows: dict[int, list[Atom]] = {}
        self.makers: dict[int, Op] = {}
        self.cuts: dict[int, int] = {}
        self.names: dict[int, Atom] = {}

    def block(self, block: Block) -> tuple[Block, Mapping[int, int]]:
        """Returns the new block, and the stacks whose rows are taken."""
        for op in block.ops:
            if op.name == "scan" and (
                op.index in self.loops or not self.rows.keys().isdisjoint(ScanView(op).operands.xs)
            ):
                self.unroll(op)
                continue
            self.put_together(op.reads)
            self.out.append(op)
        self.put_together(values_in(block.outputs))
        return rename_block(Block(block.inputs, tuple(self.out), block.outputs), self.names), self.cuts

    def unroll(self, op: Op) -> None:
        """Writes a loop out."""
        view = ScanView(op)
        self.put_together(values_in((*view.operands.consts, *view.operands.carry)))
        first = len(self.out)
        taken = [self.rows_of(value, op.source) for value in values_in(view.operands.xs)]
        carry: Sequence[Atom] = view.operands.carry
        given: dict[int, Sequence[Any]] = {}
        order = range(view.length)
        for number in reversed(order) if op.params["reverse"] else order:
            operands = [*view.operands.consts, *carry, *(rows[number] for rows in taken)]
            ops, outputs = self.rewriter.inline(view.body, dict(zip(view.body.inputs, operands, strict=True)))
            self.out += ops
            carry, given[number] = view.split_results(outputs)
        self.names.update((v, rename_atom(a, self.names)) for v, a in zip(view.results.carry, carry, strict=True))
        for value, *rows in zip(view.results.ys, *(given[number] for number in order), strict=True):
            self.rows[value], self.makers[value] = rows, op
        self.rewriter.attribute(self.out[first:], op.index)

    def rows_of(self, stack: int, source: Any) -> list[Atom]:
        """Returns the rows of a stack that the iterations of a loop take."""
        shape = self.rewriter.values[stack].shape
        for number in range(shape[0]) if stack not in self.rows else ():
            cut, row = (
                rows_of(self.rewriter, stack, number, number + 1, source),
                self.rewriter.new_value_of_shape(stack, shape[1:]),
            )
            self.out += (cut, self.rewriter.op(lax.squeeze_p, {"dimensions": (0,)}, cut.results, [row], source))
            self.cuts.update((op.index, stack) for op in self.out[-2:])
            self.rows.setdefault(stack, []).append(row)
        return self.rows[stack]

    def put_together(self, values: Iterable[int]) -> None:
        """Makes those values that exist in rows alone."""
        for stack in values:
            loop = self.makers.pop(stack, None)
            if loop is None:
                continue
            shape, first = (1, *self.rewriter.values[stack].shape[1:]), len(self.out)
            params = {"shape": shape, "broadcast_dimensions": tuple(range(1, len(shape))), "sharding": None}
            made = [self.rewriter.new_value_of_shape(stack, shape) for _ in self.rows[stack]]
            for row, part in zip(self.rows[stack], made, strict=True):
                self.out.append(self.rewriter.op(lax.broadcast_in_dim_p, params, [row], [part], loop.source))
            self.out.append(self.rewriter.op(lax.concatenate_p, {"dimension": 0}, made, [stack], loop.source))
            self.rewriter.attribute(self.out[first:], loop.index)
