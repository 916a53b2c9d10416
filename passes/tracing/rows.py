"""Gathers and scatters in which every example picks from its own row: `x[arange(N), i]` and its gradient.

Their rule shards the rows of the indices or the indexed dim, since an index may point anywhere. But where the component
of the indices for a dim is the row number itself, example n reads and writes row n alone: the dim is a batch dim. `lax`
has a form for that (`operand_batching_dims`), in which nothing is indexed along the dim, so that it may be sharded or
cut into micro-batches without communication.

A position is known through reshapes, normalised negative indices, the constants of loops (the rows of a scanned layer
are made before the scan), and what one scan stacks for another, such as the backward pass of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import primitives as lax_primitives

from alpa_lite.graph import Atom, Block, Graph, Lit, Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tracing.trip_counts import constant_inputs


def with_batched_rows(graph: Graph) -> Graph:
    """The same program, with rows that are indexed by their own number as batch dims; it is still to be pruned."""
    if not any(_indexes(op) for op in graph.ops()):
        return graph
    walk = _Rows(graph)
    block = walk.block(graph.block)
    return replace(graph, values=tuple(walk.rewriter.values), block=block)


def _indexes(op: Op) -> bool:
    return op.name == "gather" or op.name in primitives.SCATTERS


class _Rows:
    """Walks a graph in program order.

    Attributes:
      makers: value -> the op that makes it.
      names: input of a body -> what it is in each run of the body: a value outside, or in the scan that stacks it.
      arrays: value -> the constant that it is.
    """

    def __init__(self, graph: Graph) -> None:
        self.rewriter = Rewriter(graph)
        self.values = self.rewriter.values
        self.makers: dict[int, Op] = {}
        self.names: dict[int, Atom] = {}
        constants = graph.block.inputs[len(graph.block.inputs) - len(graph.constants) :]
        self.arrays: Mapping[int, Any] = dict(zip(constants, graph.constants, strict=True))

    def block(self, block: Block) -> Block:
        """The block with batch dims; itself if nothing changes."""
        ops: list[Op] = []
        for op in block.ops:
            made = [op]
            if op.bodies:
                for atoms, inputs in [*constant_inputs(op), self._unstacked(op)]:
                    self.names.update(zip(inputs, atoms, strict=True))
                bodies = tuple(map(self.block, op.bodies))
                if any(new is not old for new, old in zip(bodies, op.bodies, strict=True)):
                    made = [replace(op, bodies=bodies, key=None)]
            elif _indexes(op):
                made = self._batched(op)
            ops += made
            self.makers.update((value, one) for one in made for value in one.results)
        same = len(ops) == len(block.ops) and all(map(lambda new, old: new is old, ops, block.ops))
        return block if same else Block(block.inputs, tuple(ops), block.outputs)

    def _unstacked(self, op: Op) -> tuple[list[Atom], list[int]]:
        """What a scan takes from stacks that another scan made: there, and here."""
        found: list[tuple[Atom, int]] = []
        for stack, value in ScanView(op).xs if op.name == "scan" else ():
            maker = self.makers.get(stack) if isinstance(stack, int) else None
            if maker is not None and maker.name == "scan":
                found += [(output, value) for output, result in ScanView(maker).ys if result == stack]
        return [output for output, _ in found], [value for _, value in found]

    def _batched(self, op: Op) -> list[Op]:
        """The operation with batch dims for rows that it indexes by their own number, and what it takes instead."""
        operand, indices = op.operands[:2]
        if isinstance(operand, Lit) or isinstance(indices, Lit):
            return [op]
        numbers = op.params["dimension_numbers"]
        gathers = op.name == "gather"
        indexed = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
        single = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
        rows_name = "start_indices_batching_dims" if gathers else "scatter_indices_batching_dims"
        shape, parts = self.values[indices].shape, self._components(indices)
        pairs = dict(zip(numbers.operand_batching_dims, getattr(numbers, rows_name), strict=True))
        kept = []
        for component, (dim, part) in enumerate(zip(indexed, parts, strict=False)):
            row = self._position(part)
            is_free = row is not None and row < len(shape) - 1 and row not in pairs.values()
            if row is not None and is_free and dim in single and shape[row] == self.values[operand].shape[dim]:
                pairs[dim] = row
            else:
                kept.append(component)
        if len(kept) == len(parts):
            return [op]
        ops: list[Op] = []
        rest = self._joined(op, indices, kept, parts, ops)
        numbers = numbers._replace(
            **{
                "start_index_map" if gathers else "scatter_dims_to_operand_dims": tuple(indexed[c] for c in kept),
                "collapsed_slice_dims" if gathers else "inserted_window_dims": tuple(
                    d for d in single if d not in pairs
                ),
                "operand_batching_dims": tuple(sorted(pairs)),
                rows_name: tuple(pairs[dim] for dim in sorted(pairs)),
            }
        )
        params = {**op.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        operands = (operand, rest, *op.operands[2:])
        return [*ops, self.rewriter.op(op.primitive, params, operands, op.results, op.source, op.index, op.ctx)]

    def _components(self, indices: int) -> list[Atom]:
        """The components of index vectors, each with a last dim of one; none if they are not made one by one."""
        while (outside := self.names.get(indices)) is not None:
            if isinstance(outside, Lit):
                return []
            indices = outside
        op, last = self.makers.get(indices), len(self.values[indices].shape) - 1
        if op is not None and op.name == "concatenate" and op.params["dimension"] == last:
            alone = all(self._shape(a)[-1] == 1 for a in op.operands)
            return list(op.operands) if alone else []
        return [indices] if self.values[indices].shape[last] == 1 else []

    def _joined(self, op: Op, indices: int, kept: list[int], parts: list[Atom], ops: list[Op]) -> Atom:
        """Index vectors of some components, or of none."""
        before = self.values[indices]
        start, last = [0] * len(before.shape), len(before.shape) - 1

        def made(primitive: Any, params: Mapping[str, Any], operands: list[Atom], size: int) -> Atom:
            result = self.rewriter.shaped(indices, (*before.shape[:-1], size))
            ops.append(self.rewriter.op(primitive, params, operands, [result], op.source, op.index, op.ctx))
            return result

        if not kept:
            params = {"shape": (*before.shape[:-1], 0), "broadcast_dimensions": (), "sharding": None}
            zero = Lit(np.zeros((), before.dtype), ShapedArray((), before.dtype))
            return made(lax_primitives.broadcast_in_dim_p, params, [zero], 0)
        if indices in self.makers:
            own = [parts[component] for component in kept]
        else:  # the components are made elsewhere
            own = [
                made(
                    lax_primitives.slice_p,
                    {
                        "start_indices": (*start[:-1], c),
                        "limit_indices": (*before.shape[:-1], c + 1),
                        "strides": None,
                    },
                    [indices],
                    1,
                )
                for c in kept
            ]
        if len(own) == 1:
            return own[0]
        return made(lax_primitives.concatenate_p, {"dimension": last}, own, len(own))

    def _position(self, atom: Atom) -> int | None:
        """The dim d for which every element of a value is its own position along d; None if that is not certain."""
        while atom in self.names:
            atom = self.names[atom]  # type: ignore[index]
        array = atom.value if isinstance(atom, Lit) else self.arrays.get(atom)
        if array is not None:
            return _position_in(np.asarray(array)) if _are_indices(array) else None
        if isinstance(atom, Lit) or atom not in self.makers:
            return None
        op = self.makers[atom]
        if op.name == "iota":
            return op.params["dimension"]
        if op.name == "select_n":
            # Negative indices count from the end: an index that is a position is none of these.
            chosen = self.arrays.get(op.operands[0]) if isinstance(op.operands[0], int) else op.operands[0].value
            if chosen is not None:
                return None if np.any(np.asarray(chosen)) else self._position(op.operands[1])
            test = self.makers.get(op.operands[0]) if isinstance(op.operands[0], int) else None
            zero = test.operands[1] if test is not None and test.name == "lt" else None
            if not isinstance(zero, Lit) or np.any(zero.value) or len(op.operands) != 3:
                return None
            assert test is not None
            return None if self._position(test.operands[0]) is None else self._position(op.operands[1])
        if op.name not in primitives.RESHAPES:
            return None
        source = op.operands[0]
        dim = self._position(source)
        if dim is None:
            return None
        if op.name == "convert_element_type":
            dtype = np.dtype(self.values[atom].dtype)
            return dim if dtype.kind in "iu" and dtype.itemsize >= 4 else None
        if op.name == "broadcast_in_dim":
            return op.params["broadcast_dimensions"][dim]
        if op.name == "copy":
            return dim
        return _place(self._shape(source), self.values[atom].shape, dim)

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self.values[atom].shape


def _are_indices(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu" and np.ndim(array) > 0


def _position_in(array: np.ndarray) -> int | None:
    """The dim of an array of integers along which each is its own position."""
    for dim, size in enumerate(array.shape):
        positions = np.arange(size).reshape([size if d == dim else 1 for d in range(array.ndim)])
        if size > 1 and np.array_equal(array, np.broadcast_to(positions, array.shape)):
            return dim
    return None


def _place(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Where a dim is after dims of one element have been added or removed."""
    large = [d for d, n in enumerate(before) if n != 1]
    later = [d for d, n in enumerate(after) if n != 1]
    if [before[d] for d in large] != [after[d] for d in later] or dim not in large:
        return None
    return later[large.index(dim)]
