"""Leaves of pytrees that are no arrays: functions, texts, dtypes, meshes. They are constants of the program.

`hide` puts each in a node without children, so that flattening a pytree leaves it in the structure, by which calls are
compared, and unflattening gives it back. Python numbers are arrays, as in `jax.jit`, but for those that a module of
Equinox holds, which are constants, as in `equinox.filter_jit`: the rate of a dropout, whether it is off. Of a step that
is made by `equinox.filter_jit` all are.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.ir.calling import is_same

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBERS = (bool, int, float, complex)


class _Constant:
    """A leaf that is no array, as a pytree's node without children and as the data of that; compared by type, value."""

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
    """The pytree with a node in place of each leaf that is no array; as it is if it has none.

    Args:
      tree: a pytree; NNX objects in it, which are split later, are left alone.
      numbers: whether Python numbers are constants, too.
    """
    if all(map(_is_array, jax.tree_util.tree_leaves(tree))):
        return tree

    def stops(value: Any) -> bool:
        return is_nnx_object(value) or _is_module(value) or is_nnx_state(value) or _is_hidden(value)

    def hidden(value: Any) -> Any:
        if _is_module(value) or is_nnx_state(value):
            static = numbers or _is_module(value)
            return _replaced(value, lambda leaf: _hidden_leaf(leaf, static), _is_hidden)
        return value if is_nnx_object(value) else _hidden_leaf(value, numbers)

    return _replaced(tree, hidden, stops)


def _replaced(tree: Any, function: Callable[[Any], Any], stops: Callable[[Any], bool]) -> Any:
    """The pytree with other leaves, `stops` saying which of its nodes are some; as it is if none changes."""
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=stops)
    new = list(map(function, leaves))
    return tree if all(map(operator.is_, new, leaves)) else treedef.unflatten(new)


def _is_hidden(value: Any) -> bool:
    return isinstance(value, _Constant)  # to rebuild one would bring its leaf back


def _hidden_leaf(leaf: Any, numbers: bool) -> Any:
    return leaf if _is_hidden(leaf) or not is_constant(leaf, numbers) else _Constant(leaf)


def _is_array(leaf: Any) -> bool:
    return type(leaf) is _jax.PlainArray or isinstance(leaf, _ARRAYS)


def is_constant(leaf: Any, numbers: bool) -> bool:
    """Whether a leaf is no array."""
    if _is_array(leaf):
        return False
    if isinstance(leaf, _NUMBERS):
        return numbers
    try:
        jax.typeof(leaf)
    except TypeError:
        return True
    except OverflowError:  # an integer with more bits than its dtype
        return False
    return False


def is_nnx_object(value: Any) -> bool:
    """Whether a value is an NNX object (module, optimizer, metric, variable, random streams)."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and nnx.graphlib.is_graph_node(value)


def is_nnx_state(value: Any) -> bool:
    """Whether a value is an `nnx.State`, whose variables are values, as in `jax.jit`: not updated in place."""
    return isinstance(value, getattr(sys.modules.get("flax.nnx"), "State", ()))


def _is_module(value: Any) -> bool:
    """Whether a value is a module of Equinox."""
    return isinstance(value, getattr(sys.modules.get("equinox"), "Module", ()))
