"""Leaves of a user's pytree, as Orbax stores them.

Orbax stores ordinary pytrees as they are: dicts, lists, tuples, NamedTuples, dataclasses, empty nodes and None. An NNX
object is stored as the nested dict of its arrays, as `nnx.to_pure_dict(nnx.state(object))` names them; an array that
several objects share belongs to the first. Typed random keys are stored as their integers. Arrays without elements,
which Orbax does not store, are None there. The metadata has the types of both.

A leaf is identified by its path, "opt_state/0/mu/dense/kernel", whatever its containers, so that a checkpoint may be
restored into other containers with the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from alpa_lite import _jax
from alpa_lite.errors import CheckpointError
from alpa_lite.passes.tracing import calls, nnx_modules
from alpa_lite.passes.tracing.nnx_modules import LeafPath
from alpa_lite.paths import keys as keys_of_path
from alpa_lite.paths import tokens

SCALARS = (bool, int, float)
"""Types that are stored as numbers and restored as Python ones."""

SEPARATOR = "/"
"""Separator of the keys of a path."""


@dataclass(frozen=True, eq=False)
class Leaves:
    """Leaves of a user's pytree.

    Attributes:
      tree: the pytree.
      paths, values: of each leaf, in the same order.
      treedef: the structure for `nnx_modules.unflattened`.
    """

    tree: Any
    paths: tuple[str, ...]
    values: tuple[Any, ...]
    treedef: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The pytree with other leaves; NNX objects are new ones."""
        return nnx_modules.unflattened(self.treedef, values)

    def orbax_tree(self) -> Any:
        """The pytree for Orbax: the same containers, with NNX objects as nested dicts."""
        groups: dict[tuple[Any, ...], dict[tuple[str, ...], Any]] = {}
        for path, value in zip(nnx_modules.leaf_paths(self.tree, with_constants=True), self.values, strict=True):
            groups.setdefault(path.keys, {})[_inner_keys(path)] = value

        def nest(path: tuple[Any, ...], _: Any) -> Any:
            return ocp.utils.from_flat_dict(groups.get(tuple(path), {}))

        return jax.tree_util.tree_map_with_path(nest, self.tree, is_leaf=nnx_modules.is_node())


def flatten(tree: Any) -> Leaves:
    """The leaves of a pytree.

    Raises:
      CheckpointError: two leaves have the same path, or the same name in the store.
    """
    values, treedef = nnx_modules.flattened(tree, with_constants=True)
    paths = nnx_modules.leaf_paths(tree, with_constants=True)
    keys = [(*map(calls.key_text, path.keys), *_inner_keys(path)) for path in paths]
    for separator in SEPARATOR, ".":  # Orbax joins them by dots
        for name, count in Counter(map(separator.join, keys)).items():
            if count > 1:
                raise CheckpointError(f"several leaves of the state would be stored as {name!r}; rename a key")
    return Leaves(tree, tuple(map(SEPARATOR.join, keys)), tuple(values), treedef)


def _inner_keys(path: LeafPath) -> tuple[str, ...]:
    """The keys within an NNX object, without the `value` that leads from a Variable to its array."""
    parts = tokens(path.inner)
    return keys_of_path("".join(part for i, part in enumerate(parts) if part != ".value" or parts.index(part) != i))


def key_kind(leaf: Any) -> str | None:
    """The name of the implementation of typed random keys, or of their type; None of other leaves."""
    dtype = getattr(leaf, "dtype", None)
    return _jax.key_kind(dtype)[0] if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) else None


def to_storable(leaves: Leaves) -> tuple[Leaves, dict[str, Any]]:
    """The leaves that Orbax can store, and the types of others: `keys` and `empty` of the metadata.

    Raises:
      CheckpointError: a leaf is not an array, a number or a string, or was donated.
    """
    values, keys, empty = [], {}, {}
    for path, value in zip(leaves.paths, leaves.values, strict=True):
        if not isinstance(value, (jax.Array, np.ndarray, np.number, np.bool_, str, *SCALARS)):
            raise CheckpointError(f"{path} is a {type(value).__name__}; a checkpoint holds arrays, numbers and strings")
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
