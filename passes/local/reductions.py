"""Local forms of reductions and scans over a sharded dim: each device does its block, a small collective combines.

With x cut into blocks x_0 .. x_{p-1} along the reduced dim:

- max, min: max_b max(x_b), an all-reduce. Floats travel as integers of the same order, with NaN above (below) all,
  since the all-reduce of some backends drops NaN, which JAX's `reduce_max` never does.
- argmax, argmin: (value, index) of each block are gathered, of blocks of one element the value alone; ties go to the
  lowest block and so to the lowest index.
- prod, and, or, xor: block results are gathered and reduced again.
- cumulative: block totals t_b are gathered, and block b combines its own running values with t_0 .. t_{b-1}.
- top_k: the k largest of x are among the k largest of each block, which are gathered in the order of the blocks, so
  that ties still go to the lowest index. Values and indices travel in one gather, as integers of one width: the gather
  is there, and of this size, whether or not the step reads both.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite.ir.layout import Axes
from alpa_lite.passes.local.types import (
    LocalCollective,
    LocalForm,
    Setting,
    apply_in_bytes,
    bind,
    block_number,
    extreme_value,
    offset,
    sharded_dims,
)


def _reduced_axes(s: Setting, dims: tuple[int, ...]) -> Axes:
    return tuple(axis for d in dims for axis in s.operands[0].dims[d])


def _gather(x: jax.Array, axes: Axes, dim: int = 0, *, tiled: bool = False) -> jax.Array:
    return apply_in_bytes(lambda x: lax.all_gather(x, axes, axis=dim, tiled=tiled), x)


def extremum(s: Setting) -> LocalForm | None:
    """`reduce_max` and `reduce_min`."""
    axes = _reduced_axes(s, s.op.params["axes"])
    if not axes:
        return s.bind()
    largest = s.op.name == "reduce_max"
    dtype = s.result_dtype()
    floating = jnp.issubdtype(dtype, jnp.floating)
    if dtype == np.bool_ or not (floating or jnp.issubdtype(dtype, jnp.integer)):
        return None
    carrier = np.dtype(f"int{max(32, dtype.itemsize * 8)}") if floating else dtype
    params = s.params()

    def run(x: jax.Array) -> list:
        (out,) = bind(s.op, [x], params)
        if floating:
            out = float_order_to_int(out, carrier, largest)
        out = (lax.pmax if largest else lax.pmin)(out, axes)
        return [int_to_float_order(out, dtype) if floating else out]

    size = math.prod(s.local_result()) * carrier.itemsize
    return s.form(run, LocalCollective("all_reduce", axes, size))


def float_order_to_int(x: jax.Array, carrier: np.dtype, nan_high: bool) -> jax.Array:
    """Returns integers in the order of the floats x; NaN becomes the largest (or the smallest) integer."""
    wide = np.dtype(f"float{carrier.itemsize * 8}")
    bits = lax.bitcast_convert_type(lax.convert_element_type(x, wide), carrier)
    info = np.iinfo(carrier)
    bits = jnp.where(bits < 0, bits ^ info.max, bits)
    return jnp.where(jnp.isnan(x), jnp.asarray(info.max if nan_high else info.min, carrier), bits)


def int_to_float_order(bits: jax.Array, dtype: Any) -> jax.Array:
    """Returns the inverse of `float_order_to_int`: the extreme integers are the bits of a NaN."""
    info = np.iinfo(bits.dtype)
    bits = jnp.where(bits < 0, bits ^ info.max, bits)
    wide = lax.bitcast_convert_type(bits, np.dtype(f"float{bits.dtype.itemsize * 8}"))
    return lax.convert_element_type(wide, dtype)


def reduce_again(s: Setting) -> LocalForm | None:
    """`reduce_prod`, `reduce_and`, `reduce_or`, `reduce_xor`: block results are gathered and reduced."""
    axes = _reduced_axes(s, s.op.params["axes"])
    if not axes:
        return s.bind()

    params = s.params()

    def run(x: jax.Array) -> list:
        parts = _gather(bind(s.op, [x], params)[0], axes)
        return bind(s.op, [parts], {**params, "axes": (0,)})

    return s.form(run, LocalCollective("all_gather", axes, s.mesh.product(axes) * s.result_bytes()))


def arg_extremum(s: Setting) -> LocalForm | None:
    """`argmax` and `argmin`, with JAX's rules: the first NaN wins, then the first of equals."""
    (dim,) = s.op.params["axes"]
    axes = s.operands[0].dims[dim]
    if not axes:
        return s.bind()
    block, parts = s.local_operand(0)[dim], s.mesh.product(axes)

    def run(x: jax.Array) -> list:
        if block == 1:
            values = _gather(lax.squeeze(x, (dim,)), axes)
            return list(bind(s.op, [values], {**s.op.params, "axes": (0,)}))
        (index,) = bind(s.op, [x])
        value = jnp.take_along_axis(x, lax.expand_dims(index, (dim,)), axis=dim, mode="promise_in_bounds")
        values = _gather(lax.squeeze(value, (dim,)), axes)
        (best,) = bind(s.op, [values], {**s.op.params, "axes": (0,)})
        indices = lax.all_gather(index + offset(axes, block, index.dtype), axes, axis=0)
        return [jnp.take_along_axis(indices, best[None], axis=0, mode="promise_in_bounds")[0]]

    sizes = [math.prod(s.local_result()) * s.operand_dtype(0).itemsize, *([] if block == 1 else [s.result_bytes()])]
    return s.form(run, *(LocalCollective("all_gather", axes, parts * size) for size in sizes))


def cumulative_form(s: Setting) -> LocalForm | None:
    """`cumsum`, `cumprod`, `cummax`, `cummin`, `cumlogsumexp`, in either direction."""
    dim, reverse = s.op.params["axis"], s.op.params["reverse"]
    axes = s.operands[0].dims[dim]
    if not axes:
        return s.bind()
    name, parts = s.op.name, s.mesh.product(axes)
    identity = _identity(name, s.result_dtype())

    def run(x: jax.Array) -> list:
        (running,) = bind(s.op, [x])
        at = 0 if reverse else running.shape[dim] - 1
        last = lax.slice_in_dim(running, at, at + 1, axis=dim)
        totals = _gather(last, axes, dim, tiled=True)
        number = lax.broadcasted_iota(np.int32, totals.shape, dim)
        mine = block_number(axes)
        earlier = number > mine if reverse else number < mine
        totals = jnp.where(earlier, totals, identity)
        return [_COMBINE[name](running, _REDUCE[name](totals, dim))]

    total = s.result_bytes() // max(1, s.local_result()[dim])
    return s.form(run, LocalCollective("all_gather", axes, parts * total))


def _identity(name: str, dtype: Any) -> Any:
    if name in ("cumsum", "cumprod"):
        return np.asarray(name == "cumprod", dtype)
    return extreme_value(dtype, highest=name == "cummin")


_REDUCE = {
    "cumsum": lambda x, dim: jnp.sum(x, axis=dim, keepdims=True, dtype=x.dtype),
    "cumprod": lambda x, dim: jnp.prod(x, axis=dim, keepdims=True, dtype=x.dtype),
    "cummax": lambda x, dim: jnp.max(x, axis=dim, keepdims=True),
    "cummin": lambda x, dim: jnp.min(x, axis=dim, keepdims=True),
    "cumlogsumexp": lambda x, dim: jax.nn.logsumexp(x, axis=dim, keepdims=True),
}
_COMBINE = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}


def top_k(s: Setting) -> LocalForm | None:
    """`top_k` along a sharded dim."""
    k, dim = s.op.params["k"], s.op.params.get("axis", -1) % len(s.operand_shape(0))
    axes = s.operands[0].dims[dim]
    if not axes:
        return s.bind()
    if any(layout.dims[dim] for layout in s.results):
        return None
    shape = s.local_operand(0)
    parts, kept = s.mesh.product(axes), min(k, shape[dim])
    dtype, index = s.result_dtype(0), s.result_dtype(1)
    own = np.dtype(f"uint{dtype.itemsize * 8}")
    carrier = np.dtype(f"uint{8 * max(dtype.itemsize, index.itemsize)}")

    def run(x: jax.Array) -> list:
        values, indices = bind(s.op, [x], {**s.op.params, "k": kept})
        indices = indices + offset(axes, shape[dim], indices.dtype)
        sent = jnp.stack([lax.bitcast_convert_type(values, own).astype(carrier), indices.astype(carrier)])
        values, indices = lax.all_gather(sent, axes, axis=dim + 1, tiled=True)
        values, places = bind(s.op, [lax.bitcast_convert_type(values.astype(own), dtype)])
        taken = jnp.take_along_axis(indices, places, axis=dim, mode="promise_in_bounds")
        return [values, taken.astype(index)]

    candidates = math.prod(shape[:dim] + shape[dim + 1 :]) * kept * parts
    return s.form(run, LocalCollective("all_gather", axes, 2 * candidates * carrier.itemsize))


def generic_reduce(s: Setting) -> LocalForm | None:
    """`reduce` with the user's own computation: only over whole dims."""
    dims = s.op.params["dimensions"]
    return None if any(set(dims) & set(sharded_dims(layout)) for layout in s.operands) else s.bind()
