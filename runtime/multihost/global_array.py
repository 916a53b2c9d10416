"""Arrays of a multi-process run, of which a process has some blocks, or none.

Of a leaf on devices of other processes, a process holds a `jax.Array` with shape, dtype and sharding alone: a
*non-addressable* array. A value that a process has by itself (of NumPy, or on devices of its own) is the whole value,
which every process has alike. An array over devices of other processes, or on a mesh of a plan, is one *global* array;
if it has to move, every process that is concerned moves its part (`multihost.permute`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from alpa_lite import _jax
from alpa_lite.runtime import meshes
from alpa_lite.runtime.multihost.permute import PermuteTransfer, spec_between


def is_addressable(sharding: Any) -> bool:
    """Returns whether this process has a device of a sharding."""
    return bool(sharding.addressable_devices)


def make_non_addressable(shape: Sequence[int], dtype: Any, sharding: Sharding) -> jax.Array:
    """Returns an array on devices of other processes."""
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def put(leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Puts each leaf like `jax.device_put`, also where a sharding has devices of other processes.

    All processes call it with the same leaves in the same order. May share memory with a leaf.
    """
    if jax.process_count() == 1:
        return jax.device_put(list(leaves), list(shardings))
    return [_put(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _put(leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # by the integers of the keys
        spec = (*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec)), None)
        numbers = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return _jax.keys_of_data(_put(_jax.data_of_keys(leaf), numbers), leaf.dtype)
    if is_global(leaf):
        return _move(leaf, sharding)
    if not is_addressable(sharding):
        return make_non_addressable(np.shape(leaf), _dtype_of(leaf), sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf, _dtype_of(leaf))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def even_sharding(shape: Sequence[int], devices: Sequence[Any]) -> NamedSharding:
    """Returns a sharding over devices that cuts one dim, not the first, in as many equal blocks as it can."""
    count, dim = max(
        ((count, -dim) for dim, size in enumerate(shape) for count in range(1, len(devices) + 1)
         if dim and len(devices) % count == 0 and size % count == 0),
        default=(1, 0),
    )  # fmt: skip
    mesh = Mesh(np.array(devices).reshape(count, -1), ("cut", "copy"))
    return NamedSharding(mesh, PartitionSpec(*(None,) * -dim, "cut") if dim else PartitionSpec())


def gather_whole(leaf: Any) -> Any:
    """Returns a leaf with all its blocks in every process. All processes call it for the same leaves, in one order."""
    if jax.process_count() == 1 or not is_global(leaf):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return _jax.keys_of_data(gather_whole(_jax.data_of_keys(leaf)), leaf.dtype)
    mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
    return _put(leaf, NamedSharding(mesh, PartitionSpec())).addressable_data(0)


def is_global(leaf: Any) -> bool:
    """Returns whether an array is one of all processes, not a value that this one has by itself."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf.sharding, SingleDeviceSharding):
        return False
    return not leaf.is_fully_addressable or meshes.is_planned(leaf.sharding)


def _move(leaf: jax.Array, sharding: NamedSharding) -> Any:
    """Returns a global array with another sharding. All processes must take the same branch."""
    have = leaf.sharding
    owners = {device.process_index for device in have.device_set}
    goals = {device.process_index for device in sharding.device_set}
    if have.is_fully_replicated and goals <= owners:
        if is_addressable(sharding):  # by the host: JAX would compile a slicing program, and in one process keep it
            host = np.asarray(leaf.addressable_data(0))
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    elif have.device_set == sharding.device_set:
        if is_addressable(sharding):
            return jax.device_put(leaf, sharding)
    elif is_addressable(have) or is_addressable(sharding):
        (moved,) = _transfer(leaf.shape, leaf.dtype, have, sharding)([leaf])
        if moved is not None:
            return moved
    return make_non_addressable(leaf.shape, leaf.dtype, sharding)


@functools.lru_cache(maxsize=1000)
def _transfer(shape: tuple[int, ...], dtype: Any, have: Any, goal: NamedSharding) -> PermuteTransfer:
    """Moves such arrays; it is compiled once."""
    sources = list(have._device_assignment)
    union = list(dict.fromkeys([*sources, *np.array(goal.mesh.devices).flat]))
    return PermuteTransfer([spec_between(shape, dtype, have, goal, union)], sources, union)


def _dtype_of(leaf: Any) -> Any:
    """Returns the dtype that JAX gives a leaf."""
    return leaf.dtype if isinstance(leaf, jax.Array) else jax.dtypes.result_type(leaf)
