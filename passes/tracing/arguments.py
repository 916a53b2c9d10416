"""The flat leaves of a step's arguments and result: the pytrees that they are parts of, and those that options name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.errors import OptionError, SignatureError
from alpa_lite.ir.calling import Calling
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.paths import tokens
from alpa_lite.passes.tracing.calls import as_tuple, position_of

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
        """Returns the parts of a tree that are directly below its root; those without leaves are left out."""
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
        """Yields a tree and all its parts, a tree before its parts."""
        yield tree
        for child in self.children(tree):
            yield from self.subtrees(child)


def is_key(kind: LeafKind) -> bool:
    """Returns whether a leaf is a random key: typed, or one raw `uint32[2]`."""
    shape, dtype = kind
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and shape == (2,))


def is_batch_like(kind: LeafKind) -> bool:
    """Returns whether a leaf may be a batch: an array with a leading dim that is not a random key."""
    return len(kind[0]) > 0 and not is_key(kind)


def common_path(flat: Flat, tree: Tree) -> str:
    """Returns the name of an argument, or the path of a part: the keys that the paths of its leaves have in common."""
    if tree.key and not tree.depth:
        return tree.key
    columns = zip(*(tokens(flat.paths[number]) for number in tree.leaves), strict=False)
    return "".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


Argnums = str | int | Sequence[int]
"""An option that names arguments by number: "auto", one, or several."""


def find_named_leaves(
    calling: Calling, inputs: Flat, kind: str, argnums: Argnums, argnames: str | Sequence[str]
) -> frozenset[int] | None:
    """Returns the leaves of the arguments that the user named as the state or as the batch, or None for "auto".

    Args:
      kind: "state" or "batch".
      argnums, argnames: the options `state_argnums` and `state_argnames`, or those of the batch.

    Raises:
      SignatureError: a name or a number that is not an argument of this call, or a static one.
    """
    names = set(as_tuple(argnames))
    automatic = isinstance(argnums, str)
    if automatic and argnums != "auto":
        raise SignatureError(f'{kind}_argnums is {argnums!r}; give "auto", an int or a tuple of ints')
    if automatic and not names:
        return None
    numbers = () if automatic else as_tuple(argnums)
    names |= {calling.names[position_of(i, len(calling.names), f"{kind}_argnums")] for i in numbers}
    trees = {tree.key: tree for tree in inputs.trees}
    unknown = sorted(names - set(trees))
    if unknown:
        raise SignatureError(
            f"{kind}_argnums or {kind}_argnames name {', '.join(unknown)}, but the traced arguments are "
            f"{', '.join(trees)}; name some of these"
        )
    return frozenset(i for name in names for i in trees[name].leaves)


def donated_leaves(traced: Traced, donate: int | str | Sequence[int | str]) -> list[int]:
    """Returns the numbers of the leaves of the arguments that `donate_argnums` and `donate_argnames` name.

    A name that is not passed, as that of a default, donates nothing.

    Raises:
      OptionError: there is no such argument, or it is static.
    """
    assert not isinstance(donate, str), "callers know what is donated automatically"
    calling = traced.calling
    assert calling is not None
    trees = [tree for group in traced.in_tree.children() for tree in group.children()]
    ends = list(itertools.accumulate((tree.num_leaves for tree in trees), initial=0))
    leaves = list(map(range, ends, ends[1:]))
    positions = dict(zip(calling.dynamic, leaves, strict=False))
    roots: dict[int | str, range] = dict(zip(calling.roots(), leaves, strict=True))
    count = len(calling.names)
    chosen: set[int] = set()
    for one in as_tuple(donate):
        if isinstance(one, str):
            chosen.update(roots.get(one, ()))
        elif -count <= one < count and one % count in positions:
            chosen.update(positions[one % count])
        else:
            raise OptionError(
                f"donate_argnums names argument {one}, which is static or does not exist: the step was called "
                f"with {count} positional arguments; count those that are not static from 0"
            )
    return sorted(chosen - {argument for _, argument in traced.returned_arguments})  # the caller gets these back
