"""Gathers and scatters in which every example picks from its own row: `x[arange(N), i]` and its gradient.

Their rule shards the rows of the indices or the indexed dim, since an index may point anywhere. But where the
component of the indices for the batch dim is the row number itself, example n reads and writes row n alone. Then a
micro-batch needs its own rows only, and that component counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from alpa_lite.graph import Atom, Lit, Op, Value
from alpa_lite.layout import Layout
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.local.types import LocalForm, bind
from alpa_lite.passes.microbatches.states import AXIS

Producers = Mapping[int, tuple[Op, int]]


def aligned_form(op: Op, values: Sequence[Value], producers: Producers, parts: int) -> LocalForm | None:
    """The local form of a gather or scatter whose rows belong to the examples; None for any other operation."""
    if op.name != "gather" and op.name not in primitives.SCATTERS:
        return None
    numbers = op.params["dimension_numbers"]
    gathers = op.name == "gather"
    indexed = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    whole = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
    operand, indices = op.operands[:2]
    if isinstance(operand, Lit) or isinstance(indices, Lit):
        return None
    for component, dim in enumerate(indexed):
        row = _row_of_component(indices, component, values, producers)
        size = values[operand].shape[dim]
        if row is None or dim not in whole or size != values[indices].shape[row] or size % parts:
            continue
        if gathers:
            result = values[op.results[0]]
            rest = [d for d in range(len(result.shape)) if d not in numbers.offset_dims]
            layouts = (_cut(values[operand], dim), _cut(values[indices], row))
            made = _cut(result, rest[row])
        else:
            updates = op.operands[2]
            if isinstance(updates, Lit):
                return None
            shape = values[updates].shape
            rest = [d for d in range(len(shape)) if d not in numbers.update_window_dims]
            layouts = (_cut(values[operand], dim), _cut(values[indices], row), _cut(values[updates], rest[row]))
            made = _cut(values[op.results[0]], dim)
        return LocalForm(layouts, (made,), (), _own(op, component, row))
    return None


def _own(op: Op, component: int, row: int) -> Any:
    """The operation on the rows of one micro-batch, which are numbered from zero, whichever they are of the batch."""

    def run(operand: jax.Array, indices: jax.Array, *rest: jax.Array) -> list:
        number = lax.broadcasted_iota(np.int32, indices.shape, indices.ndim - 1)
        rows = lax.broadcasted_iota(indices.dtype, indices.shape, row)
        return bind(op, [operand, lax.select(lax.eq(number, np.int32(component)), rows, indices), *rest])

    return run


def _cut(value: Value, dim: int) -> Layout:
    return Layout(tuple((AXIS,) if d == dim else () for d in range(len(value.shape))))


def _row_of_component(indices: int, component: int, values: Sequence[Value], producers: Producers) -> int | None:
    """The dim of the indices whose position a component always is."""
    if indices not in producers:
        return None
    op = producers[indices][0]
    last = len(values[indices].shape) - 1
    if op.name == "concatenate" and op.params["dimension"] == last:
        if any(isinstance(a, Lit) or values[a].shape[-1] != 1 for a in op.operands):
            return None
        return row_number(op.operands[component], values, producers)
    return row_number(indices, values, producers) if values[indices].shape[last] == 1 else None


def row_number(atom: Atom, values: Sequence[Value], producers: Producers) -> int | None:
    """The dim d for which every element of a value is its own position along d; None if that is not certain."""
    if isinstance(atom, Lit) or atom not in producers:
        return None
    op = producers[atom][0]
    if op.name == "iota":
        return op.params["dimension"]
    if op.name == "select_n":
        # Negative indices count from the end: an index that is a position is none of these.
        predicate = op.operands[0]
        if isinstance(predicate, Lit) or predicate not in producers or len(op.operands) != 3:
            return None
        test = producers[predicate][0]
        zero = test.operands[1] if test.name == "lt" else None
        if not isinstance(zero, Lit) or np.any(zero.value) or row_number(test.operands[0], values, producers) is None:
            return None
        return row_number(op.operands[1], values, producers)
    if op.name not in primitives.RESHAPES:
        return None
    source = op.operands[0]
    dim = row_number(source, values, producers)
    if dim is None or isinstance(source, Lit):
        return None
    if op.name == "convert_element_type":
        return dim if np.dtype(values[atom].dtype).kind in "iu" and np.dtype(values[atom].dtype).itemsize >= 4 else None
    if op.name == "broadcast_in_dim":
        return op.params["broadcast_dimensions"][dim]
    if op.name == "copy":
        return dim
    return _place(values[source].shape, values[atom].shape, dim)


def _place(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Where a dim is after dims of one element have been added or removed."""
    large = [d for d, n in enumerate(before) if n != 1]
    later = [d for d, n in enumerate(after) if n != 1]
    if [before[d] for d in large] != [after[d] for d in later] or dim not in large:
        return None
    return later[large.index(dim)]
