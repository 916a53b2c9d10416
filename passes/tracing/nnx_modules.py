"""Flax NNX objects among a step's arguments: split into arrays before the call, updated in place after it.

An NNX module is a graph of Python objects that hold arrays, possibly shared (a model inside its optimizer). `jax.jit`
flattens such an object like any pytree and loses what the step writes into it. NNX's own transformations split it into
a static structure and a list of arrays, rebuild it inside, split it again, and merge the result into the caller's
objects: four steps that one *update context* ties together, so that references shared between arguments, and objects
that the step replaces, come out right:

    outside  (1) arrays = split(arguments)          (4) merge(arrays') into the arguments
    inside   (2) copies = merge(arrays)             (3) arrays' = split(copies)

An `nnx.State` is a value, not an object: its variables are leaves of a pytree, as in `jax.jit`, and new ones come back
among the results. It has no part in the protocol.

This module is that protocol with the jitted function left out, for tracing (1 to 3) and for running (1 and 4). Flax is
imported only if an argument is an NNX object.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

from alpa_lite.passes.tracing import static_leaves
from alpa_lite.passes.tracing.static_leaves import is_nnx_object, is_nnx_state


def present(tree: Any) -> bool:
    """Whether a pytree holds an NNX object. Does not import Flax: who holds such an object has imported it."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(is_nnx_object, jax.tree_util.tree_leaves(tree, is_leaf=_is_object_or_state)))


def updating(tag: Any) -> AbstractContextManager[Any]:
    """The context that ties the four steps together; `tag` is any hashable object, the same in all four."""
    from flax import nnx

    return nnx.update_context(tag)


def split_arguments(tree: Any, tag: Any) -> Any:
    """Step 1: the pytree with every NNX object replaced by its structure (static) and its arrays. Changes nothing."""
    return static_leaves.hide(_split(tree, tag))


def merge_arguments(pure: Any, tag: Any) -> Any:
    """Step 2: the pytree with NNX objects again, copies of the caller's."""
    return _merge(pure, tag, is_inner=True)


def split_results(arguments: Any, out: Any, tag: Any) -> tuple[Any, Any]:
    """Step 3: the NNX objects among the arguments as the step left them (all else None), and its result, both split."""
    kept = jax.tree_util.tree_map(lambda x: x if is_nnx_object(x) else None, arguments, is_leaf=_is_object_or_state)
    return static_leaves.hide(_split((kept, out), tag))


def merge_results(pure: tuple[Any, Any], tag: Any) -> Any:
    """Step 4: writes what the step left into the caller's objects, and returns its result."""
    return _merge(pure, tag, is_inner=False)[1]


def replace_arrays(tree: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
    """New objects of the same structure, shared references kept, with other arrays.

    Args:
      tree: a pytree that may hold NNX objects.
      function: from the flat leaves, those of NNX objects included, to as many others.
    """
    leaves, treedef = flattened(tree)
    return unflattened(treedef, function(leaves))


def flattened(tree: Any, with_constants: bool = False) -> tuple[list[Any], Any]:
    """The flat leaves of a pytree that may hold NNX objects, and the structure for `unflattened`.

    Args:
      tree: the pytree.
      with_constants: whether values that are not arrays (texts, functions, shardings) are leaves, too.
    """
    hide = (lambda tree: tree) if with_constants else static_leaves.hide
    tree = hide(tree)
    return jax.tree_util.tree_flatten(hide(_split(tree)) if present(tree) else tree)


def unflattened(treedef: Any, leaves: Sequence[Any]) -> Any:
    """The pytree of some leaves, with new NNX objects where `flattened` met some."""
    tree = jax.tree_util.tree_unflatten(treedef, leaves)
    return _merge(tree) if "flax.nnx" in sys.modules else tree


@dataclass(frozen=True)
class LeafPath:
    """Where one flat leaf of a split pytree comes from.

    Attributes:
      keys: JAX's key path to the leaf, or to the NNX object that holds it.
      inner: within an NNX object, the `keystr` of `nnx.state(object)`; else "".
      module: whether an NNX object holds it.
    """

    keys: tuple[Any, ...]
    inner: str = ""
    module: bool = False


def leaf_paths(tree: Any, with_constants: bool = False) -> list[LeafPath]:
    """The paths of the leaves of `flattened(tree, with_constants)`, in their order."""
    return [path for path, _, _ in walk_leaves(tree if with_constants else static_leaves.hide(tree))]


def walk_leaves(tree: Any, is_box: Callable[[Any], bool] = lambda _: False) -> Iterator[tuple[LeafPath, Any, Any]]:
    """The path of each leaf of `flattened`, the leaf, and the box or the NNX variable that holds it, if any does.

    Args:
      tree: a pytree that may hold NNX objects.
      is_box: whether a part of the pytree is a box.
    """
    nnx = sys.modules.get("flax.nnx")
    with contextlib.nullcontext() if nnx is None else nnx.split_context() as context:
        for path, item in _flat_with_paths(tree, lambda value: _is_object_or_state(value) or is_box(value)):
            if nnx is not None and is_nnx_object(item):
                for inner, value, raw in _variables(nnx, context, item):
                    for deeper, leaf in _flat_with_paths(raw):
                        yield LeafPath(path, inner + jax.tree_util.keystr(deeper), True), leaf, value
            elif is_nnx_state(item):
                for keys, value in _flat_with_paths(item, is_nnx_object):
                    for inner, leaf in _flat_with_paths(value):
                        yield LeafPath((*path, *keys), jax.tree_util.keystr(inner)), leaf, value
            else:
                for keys, leaf in _flat_with_paths(item):
                    yield LeafPath((*path, *keys)), leaf, item


def _variables(nnx: Any, context: Any, node: Any) -> Iterator[tuple[str, Any, Any]]:
    """The path of each variable or array of an NNX object, itself, and the pytree that it holds."""
    _, state = context.flatten(node)
    for keys, value in zip(state.paths, state.leaves, strict=True):
        path = "".join(f"[{key!r}]" for key in keys)
        if isinstance(value, nnx.Variable):
            yield f"{path}.value", value, value.get_raw_value()
        else:
            yield path, value, value


def _flat_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]


def _is_object_or_state(value: Any) -> bool:
    return is_nnx_object(value) or is_nnx_state(value)


class _State:
    """Placeholder of an `nnx.State` while NNX splits objects, which would split its variables, too."""

    __slots__ = ("leaves", "treedef")

    def __init__(self, state: Any) -> None:
        self.leaves, self.treedef = jax.tree_util.tree_flatten(state)


jax.tree_util.register_pytree_node(
    _State, lambda state: (state.leaves, state.treedef), lambda treedef, leaves: treedef.unflatten(leaves)
)


def _split(tree: Any, tag: Any = None) -> Any:
    """The pytree with NNX objects split, and with a `_State` for each `nnx.State`, which flattening dissolves."""
    from flax import nnx

    def split(context: Any, path: Any, prefix: Any, node: Any) -> Any:
        return nnx.extract.NodeStates.from_split(*context.flatten(node, with_paths=False))

    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_is_object_or_state)
    if any(map(is_nnx_state, leaves)):
        tree = treedef.unflatten([_State(leaf) if is_nnx_state(leaf) else leaf for leaf in leaves])
    return nnx.extract.to_tree(tree, split_fn=split, ctxtag=tag)


def _merge(pure: Any, tag: Any = None, is_inner: bool | None = None) -> Any:
    from flax import nnx

    def merge(context: Any, path: Any, prefix: Any, leaf: Any) -> Any:
        return context.unflatten(leaf.graphdef, *leaf.states)

    return nnx.extract.from_tree(pure, merge_fn=merge, ctxtag=tag, is_inner=is_inner)
