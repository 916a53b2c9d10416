"""Local forms of operations that make values from positions: iota, and the counter-based random streams.

With `jax_threefry_partitionable` (JAX's default) element n of a draw is a function of the key and of the 64-bit
counter n, its flat index in the whole draw: threefry2x32(key, (n >> 32, n & 0xffffffff)) = (b1, b2), and the bits
are b1 ^ b2 (for 64 bits b1 << 32 | b2, for 8 and 16 bits the low ones). So a block of the stream is computed from
the counters of its own elements, equal bit for bit to the same block of the whole draw, with no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from alpa_lite.ir.graph import Lit
from alpa_lite.passes.local.types import LocalForm, Setting, offset


def iota(s: Setting) -> LocalForm | None:
    """`iota` over a sharded dim: the local iota plus the block's offset."""
    dim, dtype = s.op.params["dimension"], np.dtype(s.op.params["dtype"])
    local, axes = s.local_result(), s.results[0].dims[dim]
    if not axes:
        return s.bind(shape=local)
    # Counted in int32, because adding an offset in a narrow float type would round twice.
    counter = dtype if dtype.kind in "iu" and dtype.itemsize == 8 else np.dtype(np.int32)

    def run() -> list:
        index = lax.broadcasted_iota(counter, local, dim) + offset(axes, local[dim], counter)
        return [lax.convert_element_type(index, dtype)]

    return s.form(run)


def random_bits(s: Setting) -> LocalForm | None:
    """`random_bits`: this device's block of the stream."""
    width = s.op.params["bit_width"]

    def draw(first: jax.Array, second: jax.Array) -> jax.Array:
        dtype = np.dtype(f"uint{width}")
        if width == 64:
            high, low = lax.convert_element_type(first, dtype), lax.convert_element_type(second, dtype)
            return lax.shift_left(high, jnp.asarray(32, dtype)) | low
        return lax.convert_element_type(first ^ second, dtype)

    return _stream(s, draw)


def random_split(s: Setting) -> LocalForm | None:
    """`random_split`: this device's block of the new keys, which are the same stream's words."""

    def keys(first: jax.Array, second: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(jnp.stack([first, second], axis=-1), impl="threefry2x32")

    return _stream(s, keys)


def _stream(s: Setting, finish: Any) -> LocalForm | None:
    """Returns the form that hashes each element's own counter; `finish` makes the result of the two words."""
    shape = tuple(s.op.params["shape"])
    lead = len(s.operand_shape(0))  # dims of the array of keys; each key has its own stream
    axes = s.results[0].dims[lead:]
    if s.operands[0].dims != s.results[0].dims[:lead]:
        return None
    if not any(axes):
        return s.bind()
    key = s.op.operands[0]
    if isinstance(key, Lit) or str(s.values[key].dtype) != "key<fry>" or not _partitionable(s):
        return None
    local = s.local_result()

    def run(key: jax.Array) -> list:
        data = jax.random.key_data(key)
        starts = [offset(a, n, np.dtype(np.uint32)) if a else None for a, n in zip(axes, local[lead:], strict=True)]
        words = [data[..., 0], data[..., 1], *counters(shape, local[lead:], starts)]
        if lead:
            dims = [range(lead)] * 2 + [range(lead, len(local))] * 2
            words = [lax.broadcast_in_dim(w, local, tuple(d)) for w, d in zip(words, dims, strict=True)]
        return [finish(*threefry2x32_p.bind(*words))]

    return s.form(run)


def _partitionable(s: Setting) -> bool:
    """Whether the draw was traced with the partitionable stream: a setting that may differ from one op to another."""
    here = getattr(s.op.ctx, "threefry_partitionable", None)
    return bool(jax.config.jax_threefry_partitionable if here is None else here)  # type: ignore[attr-defined]


def counters(shape: Sequence[int], local: Sequence[int], starts: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Returns the flat index in an array of `shape` of each element of a block of it, as two words.

    Args:
      shape: the whole array's.
      local: the block's.
      starts: for each dim a uint32 scalar, where the block starts, or None for zero.

    Returns:
      (high, low): uint32 arrays of shape `local`.
    """
    local = tuple(local)
    wide = math.prod(shape) > 2**32
    high = low = jnp.zeros(local, np.uint32)
    for dim, (size, start) in enumerate(zip(local, starts, strict=True)):
        index = lax.iota(np.uint32, size)
        if start is not None:
            index = index + start
        stride = math.prod(shape[dim + 1 :])
        factor = np.uint32(stride % 2**32)
        before, low = low, low + lax.broadcast_in_dim(index * factor, local, (dim,))
        if wide:
            step = lax.mulhi(index, lax.full_like(index, factor)) + index * np.uint32(stride >> 32)
            high = high + lax.broadcast_in_dim(step, local, (dim,)) + lax.convert_element_type(low < before, np.uint32)
    return high, low
