"""Gathers and scatters in which every example picks from its own row: `x[arange(N), i]` and its gradient.

Their rule shards the rows of the indices or the indexed dim, since an index may point anywhere. But where the component
of the indices for a dim is the row number itself, example n reads and writes row n alone: the dim is a batch dim. `lax`
has a form for that (`operand_batching_dims`), in which nothing is indexed along the dim, so that it may be sharded or
cut into micro-batches without communication.

A position is known through reshapes, normalised negative indices, the constants of loops (the rows of a scanned layer
are made before the scan), and what one scan stacks for another, such as the backward pass of a layer.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import primitives as lax_primitives

from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.rewriting import Rewriter, shape_of
from alpa_lite.passes.tracing.statics import Statics


def batch_rows(graph: Graph) -> Graph:
    """The same program, with rows that are indexed by their own number as batch dims; it is still to be pruned."""
    if not any(_indexes(op) for op in graph.ops()):
        return graph
    rows = _Rows(graph)
    block = rows.block(graph.block)
    return replace(graph, values=tuple(rows.values), block=block)


def _indexes(op: Op) -> bool:
    return op.name == "gather" or op.name in primitives.SCATTERS


class _Fields(NamedTuple):
    """Names of the dimension-number fields that gathers and scatters have in common, for one of the two."""

    index_dims: str
    single_dims: str
    batching_dims: str


_GATHER = _Fields("start_index_map", "collapsed_slice_dims", "start_indices_batching_dims")
_SCATTER = _Fields("scatter_dims_to_operand_dims", "inserted_window_dims", "scatter_indices_batching_dims")


class _Rows:
    """The rewriting of one graph. `makers`: value -> the op that makes it."""

    def __init__(self, graph: Graph) -> None:
        self.rewriter = Rewriter(graph)
        self.values = self.rewriter.values
        self.makers = flow.producers(graph.ops())
        constants = graph.block.inputs[len(graph.block.inputs) - len(graph.constants) :]
        self.statics = Statics(graph.block.ops, graph.values, dict(zip(constants, graph.constants, strict=True)))

    def block(self, block: Block) -> Block:
        """Returns the block with batch dims; itself if nothing changes."""
        ops: list[Op] = []
        for op in block.ops:
            new = [op]
            if op.bodies:
                bodies = tuple(map(self.block, op.bodies))
                if not all(map(operator.is_, bodies, op.bodies)):
                    new = [replace(op, bodies=bodies, key=None)]
            elif _indexes(op):
                new = self._batched(op)
            ops += new
        same = len(ops) == len(block.ops) and all(map(operator.is_, ops, block.ops))
        return block if same else Block(block.inputs, tuple(ops), block.outputs)

    def _batched(self, op: Op) -> list[Op]:
        """Returns the operation with batch dims for rows that it indexes by their own number, behind new index ops."""
        operand, indices = op.operands[:2]
        if isinstance(operand, Lit) or isinstance(indices, Lit):
            return [op]
        names, numbers = _GATHER if op.name == "gather" else _SCATTER, op.params["dimension_numbers"]
        indexed, single = getattr(numbers, names.index_dims), getattr(numbers, names.single_dims)
        sizes, shape, parts = self.values[operand].shape, self.values[indices].shape, self._components(indices)
        pairs = dict(zip(numbers.operand_batching_dims, getattr(numbers, names.batching_dims), strict=True))
        kept = []
        for component, (dim, part) in enumerate(zip(indexed, parts, strict=False)):
            row = _position_in(self.statics.array_of(part))
            is_free = row is not None and row < len(shape) - 1 and row not in pairs.values()
            if row is not None and is_free and dim in single and shape[row] == sizes[dim]:
                pairs[dim] = row
            else:
                kept.append(component)
        if len(kept) == len(parts):
            return [op]
        ops: list[Op] = []
        rest = self._joined(op, indices, kept, parts, ops)
        fields = {
            names.index_dims: tuple(indexed[component] for component in kept),
            names.single_dims: tuple(dim for dim in single if dim not in pairs),
            names.batching_dims: tuple(pairs[dim] for dim in sorted(pairs)),
            "operand_batching_dims": tuple(sorted(pairs)),
        }
        params = {**op.params, "dimension_numbers": numbers._replace(**fields), "indices_are_sorted": False}
        operands = (operand, rest, *op.operands[2:])
        return [*ops, self.rewriter.op(op.primitive, params, operands, op.results, op.source, op.index, op.ctx)]

    def _components(self, indices: int) -> list[Atom]:
        """The components of index vectors, each with a last dim of one; none if they are not made one by one."""
        outside, last = self.statics.resolve(indices), len(self.values[indices].shape) - 1
        op, parts = self.makers.get(outside) if isinstance(outside, int) else None, [outside]
        if op is not None and op.name == "concatenate" and op.params["dimension"] == last:
            parts = list(op.operands)
        return (
            parts if isinstance(outside, int) and all(shape_of(part, self.values)[last] == 1 for part in parts) else []
        )

    def _joined(self, op: Op, indices: int, kept: list[int], parts: list[Atom], ops: list[Op]) -> Atom:
        """Returns index vectors of some components, or of none; appends the operations that make them to `ops`."""
        (*rows, _), dtype = self.values[indices].shape, self.values[indices].dtype

        def emit(primitive: Any, size: int, operands: list[Atom], **params: Any) -> Atom:
            result = self.rewriter.new_value_of_shape(indices, (*rows, size))
            ops.append(self.rewriter.op(primitive, params, operands, [result], op.source, op.index, op.ctx))
            return result

        if not kept:
            zero: list[Atom] = [Lit(np.zeros((), dtype), ShapedArray((), dtype))]
            params: dict[str, Any] = {"shape": (*rows, 0), "broadcast_dimensions": (), "sharding": None}
            return emit(lax_primitives.broadcast_in_dim_p, 0, zero, **params)
        own = [parts[component] for component in kept]
        if indices not in self.makers:  # the components are made elsewhere
            starts, ends = ([(*before, c + more) for c in kept] for before, more in (([0] * len(rows), 0), (rows, 1)))
            own = [
                emit(lax_primitives.slice_p, 1, [indices], start_indices=start, limit_indices=end, strides=None)
                for start, end in zip(starts, ends, strict=True)
            ]
        return own[0] if len(own) == 1 else emit(lax_primitives.concatenate_p, len(own), own, dimension=len(rows))


def _position_in(array: np.ndarray | None) -> int | None:
    """Returns the dim along which each element of an array of integers is its own position; None if there is none."""
    if array is None or array.dtype.kind not in "iu":
        return None
    for dim, size in enumerate(array.shape):
        positions = np.arange(size).reshape([size if d == dim else 1 for d in range(array.ndim)])
        if size > 1 and np.array_equal(array, np.broadcast_to(positions, array.shape)):
            return dim
    return None
