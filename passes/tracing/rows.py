"""Gathers and scatters in which every example picks from its own row: `x[arange(N), i]` and its gradient.

Their rule shards the rows of the indices or the indexed dim, since an index may point anywhere. But where the component
of the indices for a dim is the row number itself, example n reads and writes row n alone: the dim is a batch dim. `lax`
has a form for that (`operand_batching_dims`), in which nothing is indexed along the dim, so that it may be sharded or
cut into micro-batches without communication.

A position is known through reshapes, normalised negative indices, the constants of loops (the rows of a scanned layer
are made before the scan), and what one scan stacks for another, such as the backward pass of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core.primitives import broadcast_in_dim_p, concatenate_p, slice_p

from alpa_lite.ir.graph import Atom, Lit, Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.rewriting import Rewriter, shape_of
from alpa_lite.passes.tracing.statics import Statics

INDEXING = primitives.SCATTERS | {"gather"}

_GATHER = ("start_index_map", "collapsed_slice_dims", "start_indices_batching_dims")
_SCATTER = ("scatter_dims_to_operand_dims", "inserted_window_dims", "scatter_indices_batching_dims")
"""Names of the dimension numbers that gathers and scatters have in common: indexed dims, single dims, batch dims."""


def batch_rows(op: Op, rewriter: Rewriter, statics: Statics, makers: Mapping[int, Op]) -> list[Op]:
    """Returns one of `INDEXING` with batch dims for rows that it indexes by their own number, behind new index ops.

    Args:
      op: any of these operations.
      rewriter: of the graph.
      statics: of all that comes before.
      makers: value -> the op before that makes it.
    """
    operand, indices = op.operands[:2]
    if isinstance(operand, Lit) or isinstance(indices, Lit):
        return [op]
    names, numbers = _GATHER if op.name == "gather" else _SCATTER, op.params["dimension_numbers"]
    indexed, single, batching = (getattr(numbers, name) for name in names)
    sizes, shape = rewriter.values[operand].shape, rewriter.values[indices].shape
    parts = _components(statics.resolve(indices), len(shape) - 1, rewriter, makers)
    pairs, kept = dict(zip(numbers.operand_batching_dims, batching, strict=True)), []
    for component, (dim, part) in enumerate(zip(indexed, parts, strict=False)):
        row = _position_in(statics.array_of(part))
        is_free = row is not None and row < len(shape) - 1 and row not in pairs.values()
        if row is not None and is_free and dim in single and shape[row] == sizes[dim]:
            pairs[dim] = row
        else:
            kept.append(component)
    if len(kept) == len(parts):
        return [op]
    ops: list[Op] = []
    # The components can be read where the indices are made.
    rest = _joined(op, kept, parts if indices in makers else None, rewriter, ops)
    new = (
        tuple(indexed[component] for component in kept),
        tuple(dim for dim in single if dim not in pairs),
        tuple(pairs[dim] for dim in sorted(pairs)),
    )
    fields = dict(zip(names, new, strict=True)) | {"operand_batching_dims": tuple(sorted(pairs))}
    params = {**op.params, "dimension_numbers": numbers._replace(**fields), "indices_are_sorted": False}
    operands = (operand, rest, *op.operands[2:])
    return [*ops, rewriter.op(op.primitive, params, operands, op.results, op.source, op.index, op.ctx)]


def _components(indices: Atom, last: int, rewriter: Rewriter, makers: Mapping[int, Op]) -> Sequence[Atom]:
    """The components of index vectors along the last dim, each of size one; none if they are not made one by one."""
    if isinstance(indices, Lit):
        return []
    op = makers.get(indices)
    is_joined = op is not None and op.name == "concatenate" and op.params["dimension"] == last
    parts = op.operands if op is not None and is_joined else [indices]
    return parts if all(shape_of(part, rewriter.values)[last] == 1 for part in parts) else []


def _joined(
    op: Op, kept: Sequence[int], parts: Sequence[Atom] | None, rewriter: Rewriter, ops: list[Op]
) -> Atom:  # fmt: skip
    """Returns index vectors of some components of those of `op`; appends the operations that make them to `ops`.

    `parts`: the components; None if they are to be cut out of the vectors.
    """
    indices = op.reads[1]
    (*rows, _), dtype = rewriter.values[indices].shape, rewriter.values[indices].dtype

    def emit(primitive: Any, size: int, operands: list[Atom], **params: Any) -> Atom:
        result = rewriter.new_value_of_shape(indices, (*rows, size))
        ops.append(rewriter.op(primitive, params, operands, [result], op.source, op.index, op.ctx))
        return result

    def cut(component: int) -> Atom:
        start, limit = (*(0 for _ in rows), component), (*rows, component + 1)
        return emit(slice_p, 1, [indices], start_indices=start, limit_indices=limit, strides=None)

    if not kept:
        zero: list[Atom] = [Lit(np.zeros((), dtype), ShapedArray((), dtype))]
        return emit(broadcast_in_dim_p, 0, zero, shape=(*rows, 0), broadcast_dimensions=(), sharding=None)
    own = [cut(component) if parts is None else parts[component] for component in kept]
    return own[0] if len(own) == 1 else emit(concatenate_p, len(own), own, dimension=len(rows))


def _position_in(array: np.ndarray | None) -> int | None:
    """Returns the dim along which each element of an array of integers is its own position; None if there is none."""
    if array is None or array.dtype.kind not in "iu":
        return None
    for dim, size in enumerate(array.shape):
        positions = np.arange(size).reshape([size if d == dim else 1 for d in range(array.ndim)])
        if size > 1 and np.array_equal(array, np.broadcast_to(positions, array.shape)):
            return dim
    return None
