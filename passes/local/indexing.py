"""Local forms of gathers, scatters and dynamic slices, the indexed dim sharded included.

Let dim d of the operand, of size N, be indexed with windows of one element and cut into blocks of B; a device's
block starts at o. A row of indices with component i for dim d belongs to the device with o <= i < o + B, where its
local index is i - o.

Gather. Every device looks its own rows up and has zeros elsewhere: a partial sum. JAX's handling of i outside
[0, N) is kept: "clip" clips i globally first; "fill_or_drop" yields the fill value, exactly once over the devices, from
the first of them; "promise_in_bounds" promises nothing, and is clipped as the compiler does.

Scatter. Every device shifts i by o and applies its own rows; the rows of others fall outside of its block and are
dropped, which is "fill_or_drop" for the local scatter. Under "clip" all components are clipped globally first.
Sharding the rows of a scatter-add instead leaves a partial sum, with the operand on the first device only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from alpa_lite.ir.layout import Axes
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.local.types import LocalForm, Setting, bind, block_number, offset, sharded_dims


def gather(s: Setting) -> LocalForm | None:
    """`gather`: parallel in index rows, batching dims and whole windows; partial where an indexed dim is sharded."""
    numbers, slice_sizes = s.op.params["dimension_numbers"], list(s.op.params["slice_sizes"])
    shape, local = s.operand_shape(0), s.local_operand(0)
    looked_up: list[tuple[int, int]] = []  # (component of the index vector, operand dim)
    for dim in sharded_dims(s.operands[0]):
        if dim in numbers.operand_batching_dims:
            continue
        if dim in numbers.collapsed_slice_dims and dim in numbers.start_index_map:
            looked_up.append((numbers.start_index_map.index(dim), dim))
        elif slice_sizes[dim] == shape[dim] and dim not in numbers.collapsed_slice_dims:
            slice_sizes[dim] = local[dim]
        else:
            return None
    if s.operands[1].dims[-1]:  # the dim of the index vector
        return None
    changes = {"slice_sizes": tuple(slice_sizes)}
    if not looked_up:
        return s.bind(**changes)
    mode, dtype = s.op.params["mode"], s.result_dtype()
    if mode == GatherScatterMode.ONE_HOT or not _addable(dtype):
        return None
    batch_dims = tuple(d for d in range(len(s.result_shape())) if d not in numbers.offset_dims)
    result = s.local_result()
    fills = mode == GatherScatterMode.FILL_OR_DROP
    params = {**s.op.params, **changes, "indices_are_sorted": False, "unique_indices": False}

    def run(operand: jax.Array, indices: jax.Array) -> list:
        indices = _signed(indices, max(shape))
        inside, bounded = _split_rows(indices, [(component, shape[dim]) for component, dim in looked_up])
        blocks = [(component, local[dim]) for component, dim in looked_up]
        keep, own = _split_rows(_shift(s, indices if fills else bounded, looked_up), blocks)
        if fills:
            first: Any = True  # this device answers for rows that are outside of the array
            for component, dim in looked_up:
                first = first & (block_number(s.operands[0].dims[dim]) == 0)
                own = own.at[..., component].set(jnp.where(inside, own[..., component], local[dim]))
            keep = jnp.where(inside, keep, first)
        (out,) = bind(s.op, [operand, own], params)
        keep = lax.broadcast_in_dim(keep, result, batch_dims)
        return [jnp.where(keep, out, jnp.zeros((), dtype))]

    return s.form(run)


def _shift(s: Setting, indices: jax.Array, looked_up: Sequence[tuple[int, int]]) -> jax.Array:
    """Returns indices relative to this device's block; `looked_up` holds (component of the index, operand dim)."""
    starts: list[Any] = [jnp.zeros((), indices.dtype)] * indices.shape[-1]
    for component, dim in looked_up:
        starts[component] = offset(s.operands[0].dims[dim], s.local_operand(0)[dim], indices.dtype)
    return indices - jnp.stack(starts)


def _split_rows(indices: jax.Array, sizes: Sequence[tuple[int, int]]) -> tuple[jax.Array, jax.Array]:
    """Which rows of indices are within some sizes, by component, and the indices with these components clipped."""
    inside = jnp.ones(indices.shape[:-1], bool)
    for component, size in sizes:
        index = indices[..., component]
        inside &= (index >= 0) & (index < size)
        indices = indices.at[..., component].set(jnp.clip(index, 0, size - 1))
    return inside, indices


def scatter(s: Setting) -> LocalForm | None:
    """`scatter`, `scatter-add`, `-sub`, `-mul`, `-min`, `-max`."""
    numbers, mode = s.op.params["dimension_numbers"], s.op.params["mode"]
    shape, updates_shape = s.operand_shape(0), s.operand_shape(2)
    windows = [
        d for d in range(len(shape)) if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
    ]
    window_sizes = [1] * len(shape)
    for dim, update_dim in zip(windows, numbers.update_window_dims, strict=True):
        window_sizes[dim] = updates_shape[update_dim]
        if s.operands[0].dims[dim] != s.operands[2].dims[update_dim]:
            return None
        if s.operands[0].dims[dim] and window_sizes[dim] != shape[dim]:
            return None
    looked_up = []
    for dim in sharded_dims(s.operands[0]):
        if dim in numbers.inserted_window_dims:
            if dim not in numbers.scatter_dims_to_operand_dims:
                return None
            looked_up.append((numbers.scatter_dims_to_operand_dims.index(dim), dim))
    if s.operands[1].dims[-1] or s.operands[0].dims != s.results[0].dims:
        return None
    partial = s.results[0].partial
    if partial and (s.op.name not in primitives.SCATTER_ADDITIONS or not _addable(s.result_dtype())):
        return None
    if not looked_up and not partial:
        return s.bind()
    clips = mode == GatherScatterMode.CLIP
    adds = s.op.name in primitives.SCATTER_ADDITIONS and _addable(s.result_dtype())
    params = dict(s.op.params)
    if looked_up:
        # Several rows may now share the index of what is dropped.
        params["unique_indices"] = params["indices_are_sorted"] = False
        params["mode"] = GatherScatterMode.FILL_OR_DROP
    local = s.local_operand(0)

    def run(operand: jax.Array, indices: jax.Array, updates: jax.Array) -> list:
        if partial:
            operand = _on_first(operand, partial)
        if looked_up:
            indices = _signed(indices, max(shape))
            if clips:
                highest = [shape[d] - window_sizes[d] for d in numbers.scatter_dims_to_operand_dims]
                indices = jnp.clip(indices, 0, np.asarray(highest, indices.dtype))
            indices = _shift(s, indices, looked_up)
            if adds:
                # A scatter to an index out of bounds would do, were it not for XLA's CPU compiler: it turns a scatter
                # of one window into slices, and joins these with the slice that made the block as if no index were out
                # of bounds (seen on JAX 0.10.2).
                own, indices = _split_rows(indices, [(component, local[dim]) for component, dim in looked_up])
                rest = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
                mask = lax.broadcast_in_dim(own, updates.shape, rest)
                updates = jnp.where(mask, updates, jnp.zeros((), updates.dtype))
            else:
                operand, indices = _with_bin(operand, indices, looked_up)
        (out,) = bind(s.op, [operand, indices, updates], params)
        return [lax.slice(out, (0,) * out.ndim, local) if out.shape != local else out]

    return s.form(run)


def _with_bin(
    operand: jax.Array, indices: jax.Array, looked_up: Sequence[tuple[int, int]]
) -> tuple[jax.Array, jax.Array]:
    """The block with one more row along each dim that is looked up, and indices that put the rows of others there."""
    config = [(0, 0, 0)] * operand.ndim
    for component, dim in looked_up:
        size = operand.shape[dim]
        index = indices[..., component]
        outside = (index < 0) | (index >= size)
        indices = indices.at[..., component].set(jnp.where(outside, size, index))
        config[dim] = (0, 1, 0)
    return lax.pad(operand, jnp.zeros((), operand.dtype), config), indices


def _addable(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number)


def _signed(indices: jax.Array, largest: int) -> jax.Array:
    """The indices as signed integers of at least 32 bits, to have room for the shift; those out of bounds stay so."""
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger) and np.iinfo(indices.dtype).max > largest:
        indices = jnp.minimum(indices, jnp.asarray(largest, indices.dtype))
    return indices if indices.dtype in (np.int32, np.int64) else lax.convert_element_type(indices, np.int32)


def _on_first(x: jax.Array, axes: Axes) -> jax.Array:
    """x on the first device along `axes`, zeros on the others: x as a partial sum."""
    return jnp.where(block_number(axes) == 0, x, jnp.zeros((), x.dtype))


def dynamic_slice(s: Setting) -> LocalForm | None:
    """`dynamic_slice`: dims taken whole may be sharded, since their start can only be zero."""
    sizes = s.op.params["slice_sizes"]
    shape = s.operand_shape(0)
    if any(sizes[d] != shape[d] for d in sharded_dims(s.operands[0])) or s.operands[0].dims != s.results[0].dims:
        return None
    return s.bind(slice_sizes=s.local_result())


def dynamic_update_slice(s: Setting) -> LocalForm | None:
    """`dynamic_update_slice`: dims updated whole may be sharded."""
    shape, update = s.operand_shape(0), s.operand_shape(1)
    if not s.operands[0].dims == s.operands[1].dims == s.results[0].dims:
        return None
    return None if any(shape[d] != update[d] for d in sharded_dims(s.operands[0])) else s.bind()
