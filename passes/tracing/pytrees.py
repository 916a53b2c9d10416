"""Pytrees of a step's arguments and results: NNX objects in them, and leaves that are no arrays.

An NNX module is a graph of Python objects that hold arrays, possibly shared (a model inside its optimizer). `jax.jit`
flattens such an object like any pytree and loses what the step writes into it. NNX's own transformations split it into
a static structure and a list of arrays, rebuild it inside, split it again, and merge the result into the caller's
objects: four steps that one *update context* ties together, so that references shared between arguments, and objects
that the step replaces, come out right:

    outside  (1) arrays = split(arguments)          (4) merge(arrays') into the arguments
    inside   (2) copies = merge(arrays)             (3) arrays' = split(copies)

This is that protocol with the jitted function left out, for tracing (1 to 3) and for running (1 and 4). An `nnx.State`
is a value, not an object: its variables are leaves of a pytree, as in `jax.jit`, and new ones come back among the
results. It has no part in the protocol. Flax is imported only if an argument is an NNX object.

Leaves that are no arrays (functions, texts, dtypes, meshes) are constants of the program. `hide` puts each in a node
without children, so that flattening a pytree leaves it in the structure, by which calls are compared, and unflattening
gives it back. Python numbers are arrays, as in `jax.jit`, but for those that a module of Equinox holds, which are
constants, as in `equinox.filter_jit`: the rate of a dropout, whether it is off. Of a step that is made by
`equinox.filter_jit` all are.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.ir.calling import is_same

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBERS = (bool, int, float, complex)


class _Constant:
    """A leaf that is not an array, as a pytree's node without children and as its data; compared by type, value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and is_same(self.value, other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __repr__(self) -> str:
        return repr(self.value)


jax.tree_util.register_pytree_node(_Constant, lambda node: ((), node), lambda node, _: node.value)


def has_static_numbers(fun: Any) -> bool:
    """Whether a step was made by `equinox.filter_jit`, for which Python numbers are constants wherever they are."""
    return "equinox" in sys.modules and type(fun).__module__.split(".")[0] == "equinox" and hasattr(fun, "__wrapped__")


def hide(tree: Any, numbers: bool = False) -> Any:
    """Returns the pytree with a node in place of each leaf that is not an array; as it is if it has none.

    Args:
      tree: a pytree; NNX objects in it, which are split later, are left alone.
      numbers: whether Python numbers are constants, too.
    """
    if all(map(_is_array, jax.tree_util.tree_leaves(tree))):
        return tree

    def hide_within(part: Any, numbers: bool, stops: Callable[[Any], bool]) -> Any:
        leaves, treedef = jax.tree_util.tree_flatten(part, is_leaf=stops)
        new = [hidden(leaf, numbers) for leaf in leaves]
        return part if all(map(operator.is_, new, leaves)) else treedef.unflatten(new)

    def hidden(value: Any, numbers: bool) -> Any:
        if _is_module(value) or _is_nnx_state(value):
            return hide_within(value, numbers or _is_module(value), _is_hidden)
        if _is_hidden(value) or is_nnx_object(value) or not is_constant(value, numbers):
            return value
        return _Constant(value)

    return hide_within(tree, numbers, lambda x: _is_object_or_state(x) or _is_module(x) or _is_hidden(x))


def _is_hidden(value: Any) -> bool:
    return isinstance(value, _Constant)  # to rebuild one would bring its leaf back


def _is_array(leaf: Any) -> bool:
    return type(leaf) is _jax.PlainArray or isinstance(leaf, _ARRAYS)


def is_constant(leaf: Any, numbers: bool) -> bool:
    """Returns whether a leaf is not an array."""
    if _is_array(leaf) or isinstance(leaf, _NUMBERS):
        return numbers and not _is_array(leaf)
    try:
        jax.typeof(leaf)
    except TypeError:
        return True
    except OverflowError:  # an integer with more bits than its dtype
        pass
    return False


def is_nnx_object(value: Any) -> bool:
    """Returns whether a value is an NNX object (module, optimizer, metric, variable, random streams)."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and nnx.graphlib.is_graph_node(value)


def _is_nnx_state(value: Any) -> bool:
    """Returns whether a value is an `nnx.State`, whose variables are values, as in `jax.jit`: not updated in place."""
    return isinstance(value, getattr(sys.modules.get("flax.nnx"), "State", ()))


def _is_object_or_state(value: Any) -> bool:
    return is_nnx_object(value) or _is_nnx_state(value)


def _is_module(value: Any) -> bool:
    """Returns whether a value is a module of Equinox."""
    return isinstance(value, getattr(sys.modules.get("equinox"), "Module", ()))


def has_nnx_object(tree: Any) -> bool:
    """Returns whether a pytree holds an NNX object. Does not import Flax: who holds such an object has imported it."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(is_nnx_object, jax.tree_util.tree_leaves(tree, is_leaf=_is_object_or_state)))


def nnx_update_context(tag: Any) -> AbstractContextManager[Any]:
    """Returns the context that ties the four steps together; `tag` is any hashable object, the same in all four."""
    from flax import nnx

    return nnx.update_context(tag)


def split(tree: Any, tag: Any = None) -> Any:
    """Step 1: the pytree with every NNX object replaced by its structure (static) and its arrays. Changes nothing."""
    return hide(_split(tree, tag))


def split_results(arguments: Any, out: Any, tag: Any) -> tuple[Any, Any]:
    """Step 3: the NNX objects among the arguments as the step left them (all else None), and its result, both split."""
    kept = jax.tree_util.tree_map(lambda x: x if is_nnx_object(x) else None, arguments, is_leaf=_is_object_or_state)
    return split((kept, out), tag)


def merge(pure: Any, tag: Any = None, *, is_inner: bool | None = None) -> Any:
    """Steps 2 (inner) and 4: the pytree with NNX objects again: copies of the caller's, or these, updated."""
    from flax import nnx

    def merged(context: Any, path: Any, prefix: Any, leaf: Any) -> Any:
        return context.unflatten(leaf.graphdef, *leaf.states)

    return nnx.extract.from_tree(pure, merge_fn=merged, ctxtag=tag, is_inner=is_inner)


def replace_arrays(tree: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
    """New objects of the same structure, shared references kept, with other arrays.

    Args:
      tree: a pytree that may hold NNX objects.
      function: from the flat leaves, those of NNX objects included, to as many others.
    """
    leaves, treedef = flatten_nnx(tree)
    return unflatten_nnx(treedef, function(leaves))


def flatten_nnx(tree: Any, with_constants: bool = False) -> tuple[list[Any], Any]:
    """Returns the flat leaves of a pytree that may hold NNX objects, and the structure for `unflatten_nnx`.

    Args:
      tree: the pytree.
      with_constants: whether values that are not arrays (texts, functions, shardings) are leaves, too.
    """
    pure = _split(tree) if has_nnx_object(tree) else tree
    return jax.tree_util.tree_flatten(pure if with_constants else hide(pure))


def unflatten_nnx(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Returns the pytree of some leaves, with new NNX objects where `flatten_nnx` met some."""
    tree = jax.tree_util.tree_unflatten(treedef, leaves)
    return merge(tree) if "flax.nnx" in sys.modules else tree


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
    """Returns the paths of the leaves of `flatten_nnx(tree, with_constants)`, in their order."""
    return [path for path, _, _ in walk_leaves(tree if with_constants else hide(tree))]


def walk_leaves(tree: Any, is_box: Callable[[Any], bool] = lambda _: False) -> Iterator[tuple[LeafPath, Any, Any]]:
    """The path of each leaf of `flatten_nnx`, the leaf, and the box or the NNX variable that holds it, if any does.

    Args:
      tree: a pytree that may hold NNX objects.
      is_box: whether a part of the pytree is a box.
    """
    nnx = sys.modules.get("flax.nnx")
    manager: Any = contextlib.nullcontext() if nnx is None else nnx.split_context()
    with manager as context:
        for path, item in _flat_with_paths(tree, lambda value: _is_object_or_state(value) or is_box(value)):
            if nnx is not None and is_nnx_object(item):
                _, state = context.flatten(item)
                for keys, value in zip(state.paths, state.leaves, strict=True):
                    is_variable = isinstance(value, nnx.Variable)
                    inner = "".join(f"[{key!r}]" for key in keys) + ".value" * is_variable
                    for deeper, leaf in _flat_with_paths(value.get_raw_value() if is_variable else value):
                        yield LeafPath(path, inner + jax.tree_util.keystr(deeper), True), leaf, value
            elif _is_nnx_state(item):
                for keys, value in _flat_with_paths(item, is_nnx_object):
                    for inner, leaf in _flat_with_paths(value):
                        yield LeafPath((*path, *keys), jax.tree_util.keystr(inner)), leaf, value
            else:
                for keys, leaf in _flat_with_paths(item):
                    yield LeafPath((*path, *keys)), leaf, item


def _flat_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]


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
    if any(map(_is_nnx_state, leaves)):
        tree = treedef.unflatten([_State(leaf) if _is_nnx_state(leaf) else leaf for leaf in leaves])
    return nnx.extract.to_tree(tree, split_fn=split, ctxtag=tag)
