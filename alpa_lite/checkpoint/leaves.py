"""Leaves of a user's pytree: as Orbax stores them, and restored into a template of the same leaves by any plan.

Orbax stores ordinary pytrees as they are. An NNX object is stored as the nested dict of its arrays, as
`nnx.to_pure_dict(nnx.state(object))` names them; an array that several objects share belongs to the first. Typed random
keys are stored as their integers. Arrays without elements, which Orbax does not store, are None there. The metadata has
the types of both.

A leaf is identified by its path, "opt_state/0/mu/dense/kernel", whatever its containers. The types of all leaves are
compared before anything is read. A Python number and a scalar array of the same kind match: train states begin with
`step=0` and have an array of it after the first step. Each process reads the blocks of its own devices alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from alpa_lite import _jax
from alpa_lite.checkpoint import files
from alpa_lite.errors import CheckpointError
from alpa_lite.ir import units
from alpa_lite.ir.paths import keys as keys_of_path
from alpa_lite.ir.paths import tokens
from alpa_lite.passes.tracing import calls, pytrees
from alpa_lite.passes.tracing.pytrees import LeafPath
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.multihost import global_array

SCALARS = (bool, int, float)
"""Types that are stored as numbers and restored as Python ones."""

SEPARATOR = "/"
"""Separator of the keys of a path."""

MAX_LISTED_LEAVES = 12
"""Maximum number of leaves in an error."""

LeafType = jax.ShapeDtypeStruct | None
"""Type of a leaf in the store: None of strings, weakly typed of numbers, and that of the integers of random keys."""


@dataclass(frozen=True, eq=False)
class Leaves:
    """Leaves of a user's pytree: their paths and values in one order, and what `pytrees.unflatten_nnx` needs."""

    tree: Any
    paths: tuple[str, ...]
    values: tuple[Any, ...]
    treedef: Any

    def orbax_tree(self) -> Any:
        """Returns the pytree for Orbax: the same containers, with NNX objects as nested dicts."""
        groups: dict[tuple[Any, ...], dict[tuple[str, ...], Any]] = {}
        for path, value in zip(pytrees.leaf_paths(self.tree, with_constants=True), self.values, strict=True):
            groups.setdefault(path.keys, {})[_inner_keys(path)] = value

        def nest(path: tuple[Any, ...], _: Any) -> Any:
            return ocp.utils.from_flat_dict(groups.get(tuple(path), {}))

        return jax.tree_util.tree_map_with_path(nest, self.tree, is_leaf=pytrees.is_nnx_object)


def flatten(tree: Any) -> Leaves:
    """Returns the leaves of a pytree; raises CheckpointError if two have the same path, or name in the store."""
    values, treedef = pytrees.flatten_nnx(tree, with_constants=True)
    paths = pytrees.leaf_paths(tree, with_constants=True)
    keys = [(*map(calls.key_text, path.keys), *_inner_keys(path)) for path in paths]
    for separator in SEPARATOR, ".":  # Orbax joins them by dots
        for name, count in Counter(map(separator.join, keys)).items():
            if count > 1:
                raise CheckpointError(f"several leaves of the state would be stored as {name!r}; rename a key")
    return Leaves(tree, tuple(map(SEPARATOR.join, keys)), tuple(values), treedef)


def _inner_keys(path: LeafPath) -> tuple[str, ...]:
    """Returns the keys within an NNX object, without the `value` that leads from a Variable to its array."""
    parts = tokens(path.inner)
    return keys_of_path("".join(part for i, part in enumerate(parts) if part != ".value" or parts.index(part) != i))


def key_kind(leaf: Any) -> str | None:
    """Returns the name of the implementation of typed random keys, or of their type; None of other leaves."""
    dtype = getattr(leaf, "dtype", None)
    return _jax.key_kind(dtype)[0] if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) else None


def to_storable(leaves: Leaves) -> tuple[Leaves, dict[str, Any]]:
    """Returns the leaves that Orbax can store, and the types of others: `keys` and `empty` of the metadata.

    Raises:
      CheckpointError: a leaf is not an array, a number or a string, or was donated.
    """
    values, keys, empty = [], {}, {}
    for path, value in zip(leaves.paths, leaves.values, strict=True):
        if not isinstance(value, (jax.Array, np.ndarray, np.number, np.bool_, str, *SCALARS)):
            raise CheckpointError(
                f"{path} is a {type(value).__name__}; a checkpoint holds arrays, numbers and strings: leave it out"
            )
        if isinstance(value, jax.Array) and value.is_deleted():
            raise CheckpointError(f"{path} was donated to an earlier call, or deleted; save what the call returned")
        if kind := key_kind(value):
            keys[path], value = kind, _jax.data_of_keys(value)
        if isinstance(value, np.bool_):
            value = np.asarray(value)
        if isinstance(value, jax.Array | np.ndarray) and not value.size:
            empty[path] = value.shape, np.dtype(value.dtype).name
            value = None
        values.append(value)
    return replace(leaves, values=tuple(values)), {"keys": keys, "empty": empty}


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
                listed = "; ".join(units.first(odd, MAX_LISTED_LEAVES))
                raise CheckpointError(
                    f"shardings= has other leaves than like=: {listed}; give one for each leaf of like="
                )
            given = own.values
        self._types = dict(zip(leaves.paths, map(_requested_type, leaves.values, given), strict=True))

    def restore(self, folder: epath.Path) -> Any:
        """Returns the state in a checkpoint.

        Raises:
          OtherModelError: it has other leaves.
          Exception: it cannot be read.
        """
        state = folder / files.STATE if (folder / files.STATE).is_dir() else folder
        handler, metadata = ocp.PyTreeCheckpointHandler(), files.read_metadata(folder)
        entries, treedef = jax.tree_util.tree_flatten_with_path(handler.metadata(state).tree)
        stored = {SEPARATOR.join(map(calls.key_text, path)): _stored_type(entry) for path, entry in entries}
        empty = {path: jax.ShapeDtypeStruct(shape, dtype) for path, (shape, dtype) in metadata.empty.items()}
        if differences := self._differences({**stored, **empty}, metadata.keys):
            listed = "; ".join(units.first(differences, MAX_LISTED_LEAVES))
            raise OtherModelError(
                f"{folder} holds the state of another model: {listed}; give the state, or shapes, of the saved model"
            )
        args = [_restore_args(self._types[path]) for path in stored]
        values: Sequence[Any] = [None] * len(args)
        if any(args):
            item = treedef.unflatten([0 if arg else ocp.PLACEHOLDER for arg in args])  # placeholders are not read
            restore_args = treedef.unflatten([arg or ocp.RestoreArgs() for arg in args])
            found = handler.restore(state, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
            values = jax.tree_util.tree_leaves(found)
        by_path = dict(zip(stored, values, strict=True))
        requested = zip(self._leaves.values, self._types.items(), strict=True)
        leaves = [_convert(by_path.get(path), like, kind) for like, (path, kind) in requested]
        return pytrees.unflatten_nnx(self._leaves.treedef, leaves)  # NNX objects are new ones

    def _differences(self, stored: Mapping[str, LeafType], stored_keys: Mapping[str, str]) -> list[str]:
        """Returns descriptions of the leaves that differ from those of a checkpoint."""
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
    """Returns the type of a leaf of a template in the store, with its sharding if it is a `jax.Array`.

    Arrays without a sharding are put on the first device, or in a multi-process run on all devices.
    """
    if isinstance(leaf, str):
        return None
    if isinstance(leaf, SCALARS):
        return jax.ShapeDtypeStruct((), np.asarray(leaf).dtype, weak_type=True)
    if isinstance(leaf, np.ndarray | np.number | np.bool_):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    found = sharding if sharding is not None else getattr(leaf, "sharding", None)
    if not isinstance(found, Sharding):
        found = SingleDeviceSharding(jax.devices()[0])
        if jax.process_count() > 1:
            found = NamedSharding(jax.sharding.Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec())
    shape, dtype = leaf.shape, leaf.dtype
    if key_kind(leaf):
        shape, dtype = (*shape, *_jax.key_kind(dtype)[1]), np.uint32
    return jax.ShapeDtypeStruct(shape, dtype, sharding=found)


def _stored_type(entry: Any) -> LeafType:
    """Returns the type of a stored leaf, by Orbax's metadata of it."""
    if isinstance(entry, ocp.metadata.StringMetadata):
        return None
    return jax.ShapeDtypeStruct(entry.shape, entry.dtype, weak_type=isinstance(entry, ocp.metadata.ScalarMetadata))


def _match(stored: LeafType, requested: LeafType) -> bool:
    """Returns whether a leaf can be restored as one of another type."""
    if stored is None or requested is None or stored.shape != requested.shape:
        return stored is requested
    is_number = stored.shape == () and (stored.weak_type or requested.weak_type)
    return stored.dtype.kind == requested.dtype.kind if is_number else stored.dtype == requested.dtype


def _describe(leaf_type: LeafType) -> str:
    return "a string" if leaf_type is None else f"{leaf_type.dtype.name}[{','.join(map(str, leaf_type.shape))}]"


def _restore_args(leaf_type: LeafType) -> ocp.RestoreArgs | None:
    """Returns Orbax's arguments for a leaf; None if it is non-addressable."""
    if leaf_type is None or leaf_type.sharding is None:
        return ocp.RestoreArgs(restore_type=None if leaf_type is None else np.ndarray)
    if not global_array.is_addressable(leaf_type.sharding):
        return None
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=leaf_type.sharding, global_shape=leaf_type.shape, dtype=leaf_type.dtype
    )


def _convert(value: Any, like: Any, leaf_type: LeafType) -> Any:
    """Returns a value of the store, or None of an array without elements, as a leaf of the template."""
    if leaf_type is None:
        return value
    sharding, shape, dtype = leaf_type.sharding, leaf_type.shape, leaf_type.dtype
    if sharding is not None and not global_array.is_addressable(sharding):
        return global_array.make_non_addressable(like.shape, like.dtype, sharding)
    if not isinstance(value, jax.Array):
        host = np.zeros(shape, dtype) if value is None else np.asarray(value, dtype)
        if sharding is None:
            return host if isinstance(like, np.ndarray) else type(like)(host.item())
        value = jax.make_array_from_callback(shape, sharding, lambda index: host[index])
    return _jax.keys_of_data(value, like.dtype) if key_kind(like) and not key_kind(value) else value
