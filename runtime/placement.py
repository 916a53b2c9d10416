"""Arrays where the plan wants them, in buffers that nobody else holds.

A step that donates its state overwrites the state's buffers, so these must not be the caller's. `jax.device_put` does
not promise
that: even with `may_alias=False` it shares memory with NumPy arrays, with a replica on the same device, and with a
block of a replicated array (measured on CPU, JAX 0.10.2 and 0.12). The outputs of an executable that donates nothing
are always fresh. So an
array is put first and copied then, a group of arrays at a time: the first copy of a group is dropped before the next
group is put, and never is more than a fraction of the state there twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.runtime import presence

# The state is placed in about so many groups: each costs one small compilation, and a copy of 1/_GROUPS of the state.
_GROUPS = 8


def as_array(leaf: Any) -> Any:
    """A leaf of the caller as a result: arrays of JAX themselves, copies of NumPy arrays, numbers as arrays of JAX."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(snapshot([leaf])[0])


def snapshot(leaves: Sequence[Any]) -> Sequence[Any]:
    """The leaves with copies of NumPy arrays, which their holder may write as soon as the call returns.

    JAX reads them later: it copies to several devices while the step runs, and on CPUs an executable reads the memory
    itself if it is aligned. So copies are aligned, which makes them the only ones there. A list or a tuple, as it came.
    """
    if _IMMUTABLE.issuperset(map(type, leaves)):
        return leaves
    out = [_aligned(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    return out if isinstance(leaves, list) else tuple(out)


_IMMUTABLE = frozenset({_jax.PlainArray, bool, int, float, complex})
_ALIGNMENT = 64  # bytes; of XLA's CPU buffers


def _aligned(array: np.ndarray) -> np.ndarray:
    if array.dtype.hasobject or not array.dtype.itemsize:  # JAX refuses these
        return array
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    out = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def is_placed(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether a leaf already lies as the plan wants it, on the plan's own mesh.

    An array on one device is equivalent to one on a mesh of that device, but is the caller's: only arrays on an equal
    mesh count.
    """
    if not isinstance(leaf, jax.Array):
        return False
    have = leaf.sharding
    return have is sharding or (
        isinstance(have, NamedSharding) and have.mesh == sharding.mesh and have.is_equivalent_to(sharding, leaf.ndim)
    )


def settle(
    leaves: Sequence[Any], shardings: Sequence[NamedSharding], ours: Callable[[Any], bool]
) -> list[Any]:  # fmt: skip
    """The leaves, ready to be donated: copies of those that are not ours or not placed.

    Args:
      leaves: arrays, NumPy arrays or Python scalars.
      shardings: where each must lie.
      ours: whether an array may be overwritten.
    """
    pairs = enumerate(zip(leaves, shardings, strict=True))
    foreign = [i for i, (leaf, sharding) in pairs if not (ours(leaf) and is_placed(leaf, sharding))]
    out = list(leaves)
    for i, copied in zip(foreign, copies([leaves[i] for i in foreign], [shardings[i] for i in foreign]), strict=True):
        out[i] = copied
    return out


@_jax.without_mesh()
def copies(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Copies of the leaves that lie as `shardings` say and share no memory with anything."""
    sizes = [np.size(leaf) * getattr(getattr(leaf, "dtype", None), "itemsize", 4) for leaf in leaves]
    limit = max([sum(sizes) // _GROUPS, *sizes]) if sizes else 0
    out: list[jax.Array] = []
    start = 0
    while start < len(leaves):
        stop, total = start + 1, sizes[start]
        while stop < len(leaves) and total + sizes[stop] <= limit:
            total += sizes[stop]
            stop += 1
        put = fresh(presence.put(leaves[start:stop], shardings[start:stop]))
        if any(isinstance(leaves[i], np.ndarray) for i in range(start, stop)):
            jax.block_until_ready(put)  # what was put may be the caller's memory, which the caller may write next
        out.extend(put)
        del put
        start = stop
    return out


@_jax.without_mesh()
def fresh(arrays: Sequence[Any]) -> list[Any]:
    """Copies of arrays where they are; what has no block here as it is. One executable copies those of a mesh."""
    out = list(arrays)
    meshes: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        if presence.is_here(array.sharding):
            meshes.setdefault(array.sharding.mesh, []).append(i)
    for here in meshes.values():
        for i, copied in zip(here, _fresh([arrays[i] for i in here]), strict=True):
            out[i] = copied
    return out


@functools.partial(jax.jit, donate_argnums=())
def _fresh(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]
