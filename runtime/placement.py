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
    """A leaf of the caller as a result: arrays of JAX themselves, NumPy arrays and numbers as arrays of JAX."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


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
    """The leaves, ready to be donated: copies of those that are not ours, not placed, or came before in the list.

    Args:
      leaves: arrays, NumPy arrays or Python scalars.
      shardings: where each must lie.
      ours: whether an array may be overwritten.
    """
    seen: set[int] = set()
    foreign = []
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if id(leaf) in seen or not ours(leaf) or not is_placed(leaf, sharding):
            foreign.append(i)
        seen.add(id(leaf))
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
        put = presence.put(leaves[start:stop], shardings[start:stop])
        for here in _by_mesh(shardings[start:stop]):
            for i, copied in zip(here, _fresh([put[i] for i in here]), strict=True):
                put[i] = copied
        if any(isinstance(leaves[i], np.ndarray) for i in range(start, stop)):
            jax.block_until_ready(put)  # what was put may be the caller's memory, which the caller may write next
        out.extend(put)
        del put
        start = stop
    return out


def _by_mesh(shardings: Sequence[NamedSharding]) -> list[list[int]]:
    """The positions of arrays that have a block here, those of one mesh together: one executable copies them."""
    found: dict[Any, list[int]] = {}
    for i, sharding in enumerate(shardings):
        if presence.is_here(sharding):
            found.setdefault(sharding.mesh, []).append(i)
    return list(found.values())


@functools.partial(jax.jit, donate_argnums=())
def _fresh(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]
