"""The flat leaves of a step's arguments and of its result, and the pytrees that they are parts of."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.calling import Calling
from alpa_lite.passes.tracing import calls
from alpa_lite.paths import tokens


@dataclass(frozen=True, eq=False)
class Tree:
    """A pytree of leaves that are known by number: an argument, the result, or a part of either.

    Attributes:
      treedef: its structure.
      start, stop: its leaves.
      key: the last part of its path, such as `params`; the parameter's name for a whole argument.
    """

    treedef: Any
    start: int
    stop: int
    key: str

    @property
    def leaves(self) -> range:
        """The numbers of its leaves."""
        return range(self.start, self.stop)

    @property
    def is_bare(self) -> bool:
        """Whether it is one leaf without a container."""
        return jax.tree_util.treedef_is_leaf(self.treedef)


@dataclass(frozen=True, eq=False)
class Flat:
    """All leaves of the arguments, or of the result.

    Attributes:
      trees: the whole arguments, or the result as one tree.
      paths: for each leaf its path.
      types: for each leaf (shape, dtype).
      modules: for each leaf, whether it belongs to an NNX object.
      keys: for each leaf the keys on the way to it from the root of its tree.
    """

    trees: tuple[Tree, ...]
    paths: tuple[str, ...]
    types: tuple[tuple[tuple[int, ...], Any], ...]
    modules: tuple[bool, ...]
    keys: tuple[tuple[str, ...], ...]

    def children(self, tree: Tree, depth: int) -> list[Tree]:
        """The parts of a tree that stands `depth` keys below its root."""
        out, start = [], tree.start
        for child in jax.tree_util.treedef_children(tree.treedef):
            stop = start + child.num_leaves
            if stop > start:
                keys = self.keys[start]
                out.append(Tree(child, start, stop, keys[depth] if depth < len(keys) else ""))
            start = stop
        return out


def parts(flat: Flat, tree: Tree, depth: int) -> list[Tree]:
    """The parts of a tree, larger ones first, without itself."""
    out: list[Tree] = []
    level = [tree]
    while level:
        level = [child for parent in level if not parent.is_bare for child in flat.children(parent, depth)]
        out.extend(level)
        depth += 1
    return out


def is_key(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a leaf is a random key: typed, or one raw `uint32[2]`."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == np.uint32 and shape == (2,)


def is_batch_like(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a leaf may be a batch: an array with a leading dim that is no random key."""
    return len(shape) > 0 and not is_key(shape, dtype)


def flat_arguments(calling: Calling, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The stored path and the leaf of each flat argument of a call, NNX objects split."""
    leaves, _ = calls.flattened(calling, args, kwargs)
    return list(zip(calls.paths(calling, args, kwargs), leaves, strict=True))


def common_path(flat: Flat, tree: Tree) -> str:
    """The name of an argument, or the path of a part: what the paths of its leaves have in common."""
    if tree.key and any(tree is whole for whole in flat.trees):
        return tree.key
    shared = tokens(flat.paths[tree.start])
    for number in tree.leaves:
        other = tokens(flat.paths[number])
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(shared, other, strict=False))
        shared = tuple(one for one, _ in equal)
    return "".join(shared)
