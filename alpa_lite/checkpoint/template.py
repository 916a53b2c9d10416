"""Restoring of a checkpoint into a template: leaves with a type and a sharding each, by any plan.

The types of all leaves are compared before anything is read. A Python number and a scalar array of the same kind match:
train states begin with `step=0` and have an array of it after the first step. Each process reads the blocks of its own
devices alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from alpa_lite import _jax
from alpa_lite.checkpoint import files
from alpa_lite.checkpoint.leaves import SCALARS, SEPARATOR, flatten, key_kind
from alpa_lite.checkpoint.metadata import read_metadata
from alpa_lite.errors import CheckpointError
from alpa_lite.passes.tracing import calls
from alpa_lite.plan import Plan
from alpa_lite.runtime import global_array

MAX_LISTED_LEAVES = 12
"""Maximum number of leaves in an error."""


LeafType = jax.ShapeDtypeStruct | None
"""Type of a leaf in the store: None of strings, weakly typed of numbers, and that of the integers of random keys."""


class OtherModelError(CheckpointError):
    """A checkpoint holds other leaves than the template."""


class Template:
    """State that is requested."""

    def __init__(self, like: Any, shardings: Any) -> None:
        """Args:
          like: a pytree of arrays, `jax.ShapeDtypeStruct`s, numbers and strings.
          shardings: a pytree of the same structure, or a plan; None for those of the leaves.

        Raises:
          CheckpointError: the two pytrees have different leaves.
        """
        self._leaves = leaves = flatten(like)
        given: Sequence[Any] = [None] * len(leaves.values)
        if shardings is not None:
            own = flatten(shardings.shardings(like) if isinstance(shardings, Plan) else shardings)
            if own.paths != leaves.paths:
                odd = sorted({*own.paths} ^ {*leaves.paths})
                raise CheckpointError(f"shardings= has other leaves than like=: {_join(odd)}")
            given = own.values
        self._types = dict(zip(leaves.paths, map(_requested_type, leaves.values, given), strict=True))

    def restore(self, folder: epath.Path) -> Any:
        """The state in a checkpoint.

        Raises:
          OtherModelError: it has other leaves.
          Exception: it cannot be read.
        """
        state = folder / files.STATE if (folder / files.STATE).is_dir() else folder
        handler, metadata = ocp.PyTreeCheckpointHandler(), read_metadata(folder)
        entries, treedef = jax.tree_util.tree_flatten_with_path(handler.metadata(state).tree)
        paths = [SEPARATOR.join(map(calls.key_text, path)) for path, _ in entries]
        types = {path: _stored_type(entry) for path, (_, entry) in zip(paths, entries, strict=True)}
        types |= {path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in metadata.empty.items()}
        if differences := self._differences(types, metadata.keys):
            raise OtherModelError(f"{folder} holds the state of another model: {_join(differences)}")
        args = [_restore_args(self._types[path]) for path in paths]
        values: Sequence[Any] = [None] * len(args)
        if any(args):
            item = treedef.unflatten([0 if arg else ocp.PLACEHOLDER for arg in args])  # placeholders are not read
            restore_args = treedef.unflatten([arg or ocp.RestoreArgs() for arg in args])
            found = handler.restore(state, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
            values = jax.tree_util.tree_leaves(found)
        by_path = dict(zip(paths, values, strict=True))
        requested = zip(self._leaves.values, self._types.items(), strict=True)
        return self._leaves.rebuild([_convert(by_path.get(path), like, kind) for like, (path, kind) in requested])

    def _differences(self, stored: Mapping[str, LeafType], stored_keys: Mapping[str, str]) -> list[str]:
        """The leaves that differ from those of a checkpoint, in words."""
        out = []
        for path, like in zip(self._leaves.paths, self._leaves.values, strict=True):
            key, own_key = stored_keys.get(path), key_kind(like)
            if path not in stored:
                out.append(f"{path} is not in it")
            elif not _match(stored[path], self._types[path]):
                out.append(f"{path} is {_describe(stored[path])} there and {_describe(self._types[path])} here")
            elif key not in (None, own_key):
                out.append(f"{path} is random keys of {key} there and {own_key or 'integers'} here")
        return out + [f"{path} is in it alone" for path in stored if path not in self._types]


def _requested_type(leaf: Any, sharding: Any) -> LeafType:
    """The type of a leaf of a template in the store, with its sharding if it is a `jax.Array`."""
    if isinstance(leaf, str):
        return None
    if isinstance(leaf, SCALARS):
        return jax.ShapeDtypeStruct((), np.asarray(leaf).dtype, weak_type=True)
    if isinstance(leaf, np.ndarray | np.number | np.bool_):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    found = sharding if sharding is not None else getattr(leaf, "sharding", None)
    sharding = found if isinstance(found, Sharding) else _default_sharding()
    shape, dtype = leaf.shape, leaf.dtype
    if key_kind(leaf):
        shape, dtype = (*shape, *_jax.key_kind(dtype)[1]), np.uint32
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _default_sharding() -> Sharding:
    """The sharding of leaves without one: the first device, or in a multi-process run all devices."""
    if jax.process_count() == 1:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(jax.sharding.Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec())


def _stored_type(entry: Any) -> LeafType:
    """The type of a stored leaf, by Orbax's metadata of it."""
    if isinstance(entry, ocp.metadata.StringMetadata):
        return None
    return jax.ShapeDtypeStruct(entry.shape, entry.dtype, weak_type=isinstance(entry, ocp.metadata.ScalarMetadata))


def _match(stored: LeafType, requested: LeafType) -> bool:
    """Whether a leaf can be restored as one of another type."""
    if stored is None or requested is None or stored.shape != requested.shape:
        return stored is requested
    is_number = stored.shape == () and (stored.weak_type or requested.weak_type)
    return stored.dtype.kind == requested.dtype.kind if is_number else stored.dtype == requested.dtype


def _describe(leaf_type: LeafType) -> str:
    """A type in words."""
    return "a string" if leaf_type is None else f"{leaf_type.dtype.name}[{','.join(map(str, leaf_type.shape))}]"


def _restore_args(leaf_type: LeafType) -> ocp.RestoreArgs | None:
    """Orbax's arguments for a leaf; None if it is non-addressable."""
    if leaf_type is None or leaf_type.sharding is None:
        return ocp.RestoreArgs(restore_type=None if leaf_type is None else np.ndarray)
    if not global_array.is_addressable(leaf_type.sharding):
        return None
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=leaf_type.sharding, global_shape=leaf_type.shape, dtype=leaf_type.dtype
    )


def _convert(value: Any, like: Any, leaf_type: LeafType) -> Any:
    """A value of the store, or None of an array without elements, as a leaf of the template."""
    if leaf_type is None:
        return value
    sharding, shape, dtype = leaf_type.sharding, leaf_type.shape, leaf_type.dtype
    if sharding is not None and not global_array.is_addressable(sharding):
        return global_array.non_addressable(like.shape, like.dtype, sharding)
    if not isinstance(value, jax.Array):
        host = np.zeros(shape, dtype) if value is None else np.asarray(value, dtype)
        if sharding is None:
            return host if isinstance(like, np.ndarray) else type(like)(host.item())
        value = jax.make_array_from_callback(shape, sharding, lambda index: host[index])
    return _jax.keys_of_data(value, like.dtype) if key_kind(like) and not key_kind(value) else value


def _join(lines: Sequence[str]) -> str:
    """Lines of an error, the first of them if there are many."""
    more = len(lines) - MAX_LISTED_LEAVES
    return "; ".join(lines[:MAX_LISTED_LEAVES]) + (f"; and {more} more" if more > 0 else "")
