"""A user's pytree as what Orbax stores, and back.

Orbax stores ordinary pytrees as they are: dicts, lists, tuples, NamedTuples, dataclasses, empty nodes and None. An NNX
object is stored as the nested dict of the arrays that it holds, as `nnx.to_pure_dict(nnx.state(object))` names them; an
array that several objects share belongs to the first. Typed random keys are stored as the integers behind them.

Arrays without elements, which Orbax does not store, are None there, and remembered beside the state.

A leaf is known by its path, "opt_state/0/mu/dense/kernel", whatever containers it leads through, so that a checkpoint
may be restored into other containers with the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import CheckpointError
from alpa_lite.passes.tracing import calls, nnx_modules
from alpa_lite.passes.tracing.nnx_modules import LeafPath
from alpa_lite.paths import keys as keys_of_path
from alpa_lite.paths import tokens
from alpa_lite.runtime import global_array

SCALARS = (bool, int, float)
"""What is stored as a number and restored as a Python one."""

SEPARATOR = "/"
"""Between the keys of a path."""


@dataclass(frozen=True, eq=False)
class Flat:
    """The leaves of a user's pytree.

    Attributes:
      tree: the pytree itself.
      paths, leaves: of each leaf, in the same order.
      treedef: what `nnx_modules.unflattened` makes the pytree of.
    """

    tree: Any
    paths: tuple[str, ...]
    leaves: tuple[Any, ...]
    treedef: Any

    def with_leaves(self, leaves: Sequence[Any]) -> Any:
        """The pytree with other leaves; NNX objects are new ones."""
        return nnx_modules.unflattened(self.treedef, leaves)


def flat(tree: Any) -> Flat:
    """The leaves of a pytree.

    Raises:
      CheckpointError: two leaves would have the same path, or the same name in the store.
    """
    leaves, treedef = nnx_modules.flattened(tree, with_constants=True)
    paths = nnx_modules.leaf_paths(tree, with_constants=True)
    keys = [(*map(calls.key_text, path.keys), *_inner_keys(path)) for path in paths]
    for join in SEPARATOR, ".":  # Orbax joins them by dots
        names = Counter(map(join.join, keys))
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise CheckpointError(f"several leaves of the state would be stored as {twice[0]!r}; rename a key")
    return Flat(tree, tuple(map(SEPARATOR.join, keys)), tuple(leaves), treedef)


def _inner_keys(path: LeafPath) -> tuple[str, ...]:
    """Within an NNX object, without the `value` that leads from a Variable to its array."""
    parts = tokens(path.inner)
    return keys_of_path("".join(part for i, part in enumerate(parts) if part != ".value" or parts.index(part) != i))


def stored(tree: Any, leaves: Sequence[Any]) -> Any:
    """The pytree that Orbax is given: the same containers, NNX objects as nested dicts, with these leaves."""
    is_node = nnx_modules.is_node()
    outer, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_node)
    held: dict[tuple[Any, ...], list[tuple[LeafPath, Any]]] = {}
    for path, leaf in zip(nnx_modules.leaf_paths(tree, with_constants=True), leaves, strict=True):
        held.setdefault(path.keys, []).append((path, leaf))
    out = []
    for path, leaf in outer:
        own = held.get(tuple(path), [])
        out.append(_nested(own) if is_node(leaf) else own[0][1])
    return jax.tree_util.tree_unflatten(treedef, out)


def _nested(leaves: Sequence[tuple[LeafPath, Any]]) -> Any:
    """The leaves of an NNX object as nested dicts; a Variable by itself is its array."""
    out: dict[str, Any] = {}
    for path, leaf in leaves:
        keys = _inner_keys(path)
        if not keys:
            return leaf
        here = out
        for key in keys[:-1]:
            here = here.setdefault(key, {})
        here[keys[-1]] = leaf
    return out


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys, or stands for one."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def kind_of_keys(leaf: Any) -> str | None:
    """The name of the implementation of typed random keys; None of other leaves."""
    return _jax.key_kind(leaf.dtype)[0] if is_key(leaf) else None


def _data_of(keys: Any) -> jax.Array:
    """The integers behind typed random keys, which may be absent here."""
    if global_array.is_addressable(keys.sharding):
        return _jax.data_of_keys(keys)
    return global_array.non_addressable((*keys.shape, *_jax.key_kind(keys.dtype)[1]), np.dtype("uint32"), keys.sharding)


@dataclass(frozen=True, eq=False)
class Plain:
    """Leaves as Orbax takes them.

    Attributes:
      leaves: arrays, numbers, strings, and None for arrays without elements.
      keys: path of each leaf that was one of typed random keys -> the name of their implementation.
      empty: path of each array without elements -> its shape, and the name of its dtype.
    """

    leaves: tuple[Any, ...]
    keys: Mapping[str, str]
    empty: Mapping[str, tuple[tuple[int, ...], str]]


def plain(flat: Flat) -> Plain:
    """The leaves of a pytree as Orbax takes them.

    Raises:
      CheckpointError: a leaf is neither an array nor a number nor a string, or was donated.
    """
    out, keys, empty = [], {}, {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise CheckpointError(f"{path} was donated to an earlier call, or deleted; save what the call returned")
            if (kind := kind_of_keys(leaf)) is not None:
                keys[path] = kind
                leaf = _data_of(leaf)
        elif isinstance(leaf, np.bool_):
            leaf = np.asarray(leaf)
        elif not isinstance(leaf, (np.ndarray, np.number, str, *SCALARS)):
            raise CheckpointError(f"{path} is a {type(leaf).__name__}; a checkpoint holds arrays, numbers and strings")
        if isinstance(leaf, jax.Array | np.ndarray) and not leaf.size:
            empty[path] = leaf.shape, np.dtype(leaf.dtype).name
            leaf = None
        out.append(leaf)
    return Plain(tuple(out), keys, empty)
