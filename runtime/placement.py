"""Arrays where the plan reads them: copies in buffers that nobody else holds, and frozen weights that stay.

State that a step overwrites must not be in the caller's buffers. `jax.device_put` does not promise that: even with
`may_alias=False` it shares memory with NumPy arrays, with a replica on the same device, and with a block of a
replicated array (measured on CPU, JAX 0.10.2 and 0.12). The outputs of an executable that donates nothing are always
fresh. So arrays are put first and copied then, a group at a time, and only a fraction of the state is ever held twice.

*Frozen weights*, which steps read and do not return, are placed once. The first call copies them to the mesh, and the
copy is found again by the identity of the caller's array, for as long as that array lives, by all executables of a step
and the steps that share its state. A NumPy array, which can change, is copied at every call, with a warning once it
comes again: even if it is read-only, other views of its memory may be written.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.runtime.multihost import global_array

logger = logging.getLogger(__name__)

_GROUPS = 8
"""The number of groups, about, in which state is placed: each costs a small compilation, and its share of memory."""


def as_array(leaf: Any) -> Any:
    """Returns a leaf of the caller as a result: arrays of JAX themselves, copies of NumPy arrays, numbers as arrays."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(snapshot([leaf])[0])


def snapshot(leaves: Sequence[Any]) -> Sequence[Any]:
    """Returns the leaves with copies of NumPy arrays, which their holder may write as soon as the call returns.

    JAX reads them later: it copies to several devices while the step runs, and on CPUs an executable may read the
    memory itself.
    """
    return [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def is_placed(leaf: Any, sharding: NamedSharding, *, own_mesh: bool = True) -> bool:
    """Returns whether a leaf is placed as the plan reads it.

    Args:
      own_mesh: whether only arrays on the plan's own mesh count. An array on one device is equivalent to one on a mesh
        of that device, but is the caller's.
    """
    if not isinstance(leaf, jax.Array):
        return False
    have = leaf.sharding
    if have is sharding:
        return True
    is_own = isinstance(have, NamedSharding) and have.mesh == sharding.mesh
    return (is_own or not own_mesh) and have.is_equivalent_to(sharding, leaf.ndim)


@_jax.clear_mesh_context()
def copies(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Returns copies of the leaves with these shardings that share no memory with anything."""
    out: list[jax.Array] = []
    for group in group_positions(
        [np.size(leaf) * getattr(getattr(leaf, "dtype", None), "itemsize", 4) for leaf in leaves]
    ):
        put = copy_arrays(global_array.put(leaves[group.start : group.stop], shardings[group.start : group.stop]))
        if any(isinstance(leaves[i], np.ndarray) for i in group):
            jax.block_until_ready(put)  # what was put may be the caller's memory, which the caller may write next
        out.extend(put)
        del put
    return out


def group_positions(sizes: Sequence[int]) -> list[range]:
    """Returns ranges of positions, each with about an eighth of the bytes, or no more than the largest item has."""
    limit = max([sum(sizes) // _GROUPS, *sizes])
    stops = []
    held = 0
    for n, size in enumerate(sizes):
        if held + size > limit:
            stops.append(n)
            held = 0
        held += size
    return [range(*ends) for ends in itertools.pairwise([0, *stops, len(sizes)])]


@_jax.clear_mesh_context()
def copy_arrays(arrays: Sequence[Any]) -> list[Any]:
    """Returns copies of arrays where they are; non-addressable ones as they are. One executable copies a mesh's."""
    out = dict(enumerate(arrays))
    meshes: defaultdict[Any, list[int]] = defaultdict(list)
    for i, array in out.items():
        if global_array.is_addressable(array.sharding):
            meshes[array.sharding.mesh].append(i)
    for here in meshes.values():
        out.update(zip(here, _fresh([arrays[i] for i in here]), strict=True))
    return list(out.values())


@functools.partial(jax.jit, donate_argnums=())
def _fresh(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


class DeviceCopies:
    """Copies of callers' arrays on the mesh, each for as long as the caller's array lives."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, NamedSharding], tuple[weakref.ref[Any], jax.Array]] = {}
        self._hosts: weakref.WeakValueDictionary[tuple[int, NamedSharding], np.ndarray] = weakref.WeakValueDictionary()
        self._warned = False

    def get(self, leaf: Any, sharding: NamedSharding) -> Any:
        """Returns a leaf with this sharding: itself, or a copy that is kept; None if it may change between calls."""
        if is_placed(leaf, sharding):
            return leaf
        key = id(leaf), sharding
        if not isinstance(leaf, jax.Array):
            if isinstance(leaf, np.ndarray) and not self._warned:
                self._warned = self._hosts.get(key) is leaf  # again: data are others in every call
                self._hosts[key] = leaf
                if self._warned:
                    logger.warning(
                        "frozen weights come in NumPy arrays %s, such as one of %s bytes: they are copied to the "
                        "devices in every call; pass jax.Arrays, or what step.place returns",
                        "that can be written" if leaf.flags.writeable else "whose memory may be written", leaf.nbytes,
                    )  # fmt: skip
            return None
        found = self._held.get(key)
        if found is None or found[0]() is not leaf:
            (copy,) = copies([leaf], [sharding])
            found = self._held[key] = weakref.ref(leaf, lambda _: self._held.pop(key, None)), copy
        return found[1]
