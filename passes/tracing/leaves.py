"""The flat leaves of a step's arguments and of its result, and the pytrees that they are parts of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.ir.calling import Calling
from alpa_lite.ir.paths import tokens
from alpa_lite.passes.tracing import calls

LeafKind = tuple[tuple[int, ...], Any]
"""(shape, dtype) of a leaf."""


@dataclass(frozen=True, eq=False)
class Tree:
    """A pytree of leaves that are known by number: an argument, the result, or a part of either.

    Attributes:
      treedef: its structure.
      start: the number of its first leaf.
      key: the last part of its path, such as `params`; the parameter's name for a whole argument.
      depth: the number of keys from the root to it.
    """

    treedef: Any
    start: int
    key: str = ""
    depth: int = 0

    @property
    def leaves(self) -> range:
        """The numbers of its leaves."""
        return range(self.start, self.start + self.treedef.num_leaves)

    @property
    def is_bare(self) -> bool:
        """Whether it is one leaf without a container."""
        return self.treedef.num_nodes == self.treedef.num_leaves


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
    types: tuple[LeafKind, ...]
    modules: tuple[bool, ...]
    keys: tuple[tuple[str, ...], ...]

    def children(self, tree: Tree) -> list[Tree]:
        """The parts of a tree that are directly below its root; those without leaves are left out."""
        if tree.is_bare:
            return []
        treedefs = jax.tree_util.treedef_children(tree.treedef)
        starts = itertools.accumulate((child.num_leaves for child in treedefs), initial=tree.start)
        return [
            Tree(child, start, "".join(self.keys[start][tree.depth : tree.depth + 1]), tree.depth + 1)
            for child, start in zip(treedefs, starts, strict=False)
            if child.num_leaves
        ]

    def subtrees(self, tree: Tree) -> Iterator[Tree]:
        """A tree and all its parts, a tree before its parts."""
        yield tree
        for child in self.children(tree):
            yield from self.subtrees(child)


def is_key(kind: LeafKind) -> bool:
    """Whether a leaf is a random key: typed, or one raw `uint32[2]`."""
    shape, dtype = kind
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and shape == (2,))


def is_batch_like(kind: LeafKind) -> bool:
    """Whether a leaf may be a batch: an array with a leading dim that is not a random key."""
    return len(kind[0]) > 0 and not is_key(kind)


def flat_arguments(calling: Calling, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The stored path and the leaf of each flat argument of a call, NNX objects split."""
    leaves, _ = calls.flattened(calling, args, kwargs)
    return list(zip(calls.paths(calling, args, kwargs), leaves, strict=True))


def common_path(flat: Flat, tree: Tree) -> str:
    """The name of an argument, or the path of a part: the keys that the paths of its leaves have in common."""
    if tree.key and not tree.depth:
        return tree.key
    columns = zip(*(tokens(flat.paths[number]) for number in tree.leaves), strict=False)
    return "".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
