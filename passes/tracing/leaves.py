"""The flat leaves of a step's arguments, or of its result, as one table, from which roles, names and options are read.

A row says where a leaf stands, and its type. An argument, a part of one, or a part of the result is the rows whose keys
begin alike; its structure is how their keys go on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.errors import OptionError, SignatureError
from alpa_lite.ir.calling import CallingForm
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing.calls import as_tuple, position_of


@dataclass(frozen=True)
class Leaf:
    """One leaf.

    Attributes:
      path: its stored path (`alpa_lite.ir.paths`).
      keys: the keys on the way to it: the parameter's name or `result`, then those of JAX.
      shape, dtype, weak: its type.
      in_object: whether an NNX object holds it.
    """

    path: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    weak: bool = False
    in_object: bool = False

    @property
    def kind(self) -> tuple[tuple[int, ...], Any]:
        """The type that state must have in common with its new value."""
        return self.shape, self.dtype

    @property
    def is_key(self) -> bool:
        """Whether it is a random key: typed, or one raw `uint32[2]`."""
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key) or (self.dtype == np.uint32 and self.shape == (2,))

    @property
    def is_batch_like(self) -> bool:
        """Whether it may be a batch: an array with a leading dim that is not a random key."""
        return len(self.shape) > 0 and not self.is_key

    def to_spec(self) -> jax.ShapeDtypeStruct:
        """Returns its type, to trace with."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Part:
    """The leaves whose keys begin alike: an argument, the result, or a part of either; without keys, the whole table.

    Attributes:
      keys: the keys that they begin with.
      leaves: number -> leaf.
    """

    keys: tuple[str, ...]
    leaves: Mapping[int, Leaf]

    @cached_property
    def parts(self) -> list[Part]:
        """The parts below this one, each before its own."""
        found: dict[tuple[str, ...], dict[int, Leaf]] = {}
        for number, leaf in self.leaves.items():
            for end in range(len(self.keys) + 1, len(leaf.keys) + 1):
                found.setdefault(leaf.keys[:end], {})[number] = leaf
        return list(itertools.starmap(Part, found.items()))

    @cached_property
    def children(self) -> list[Part]:
        """The parts right below this one; of the table the arguments."""
        return [part for part in self.parts if len(part.keys) == len(self.keys) + 1]

    def largest_without(self, taken: Collection[int]) -> Iterator[Part]:
        """Yields the largest parts without any leaf that is taken."""
        done = set(taken)
        for part in self.parts:
            if done.isdisjoint(part.leaves):
                done.update(part.leaves)
                yield part

    @property
    def first(self) -> int:
        """The number of its first leaf."""
        return next(iter(self.leaves))

    @property
    def key(self) -> str:
        """The last part of its path, such as `params`; the parameter's name for a whole argument."""
        return self.keys[-1]

    @property
    def name(self) -> str:
        """Its path, as it is printed."""
        return "/".join((format_path(self.keys[0]), *self.keys[1:]))

    @property
    def is_bare(self) -> bool:
        """Whether it is one leaf without a container."""
        return len(self.leaves) == 1 and self.leaves[self.first].keys == self.keys

    @cached_property
    def structure(self) -> Hashable:
        """Its containers; of one leaf without any, the type."""
        if self.is_bare:
            return self.leaves[self.first].kind
        return tuple(leaf.keys[len(self.keys) :] for leaf in self.leaves.values())

    @property
    def size(self) -> tuple[int, int]:
        """The number of its leaves, and of the keys to them from here."""
        return len(self.leaves), sum(len(leaf.keys) - len(self.keys) for leaf in self.leaves.values())

    @cached_property
    def leading_dims(self) -> Counter[int]:
        """The leading dims of its arrays, with the number of arrays that have each."""
        return Counter(leaf.shape[0] for leaf in self.leaves.values() if leaf.is_batch_like)

    @property
    def has_indices(self) -> bool:
        """Whether it holds arrays of integers, wider than those of quantised weights."""
        return any(leaf.shape and leaf.dtype in (np.int32, np.int64) for leaf in self.leaves.values())


Argnums = str | int | Sequence[int]
"""An option that names arguments by number: "auto", one, or several."""


def find_named_leaves(
    calling: CallingForm, inputs: Part, kind: str, argnums: Argnums, argnames: str | Sequence[str]
) -> frozenset[int] | None:
    """Returns the leaves of the arguments that the user named as the state or as the batch, or None for "auto".

    Args:
      kind: "state" or "batch".
      argnums, argnames: the options `state_argnums` and `state_argnames`, or those of the batch.

    Raises:
      SignatureError: a name or a number that is not an argument of this call, or a static one.
    """
    names = set(as_tuple(argnames))
    if isinstance(argnums, str):
        if argnums != "auto":
            raise SignatureError(f'{kind}_argnums is {argnums!r}; give "auto", an int or a tuple of ints')
        if not names:
            return None
    else:
        names |= {calling.names[position_of(i, len(calling.names), f"{kind}_argnums")] for i in as_tuple(argnums)}
    if unknown := sorted(names - set(calling.roots())):
        raise SignatureError(
            f"{kind}_argnums or {kind}_argnames name {', '.join(unknown)}, but the traced arguments are "
            f"{', '.join(calling.roots())}; name some of these"
        )
    return frozenset(number for number, leaf in inputs.leaves.items() if leaf.keys[0] in names)


def donated_leaves(traced: Traced, donate: int | str | Sequence[int | str]) -> list[int]:
    """Returns the numbers of the leaves of the arguments that `donate_argnums` and `donate_argnames` name.

    A name that is not passed, as that of a default, donates nothing.

    Raises:
      OptionError: there is no such argument, or it is static.
    """
    assert not isinstance(donate, str), "callers know what is donated automatically"
    calling = traced.calling
    assert calling is not None
    sizes = [tree.num_leaves for group in traced.in_tree.children() for tree in group.children()]
    leaves = dict(zip(calling.roots(), itertools.pairwise(itertools.accumulate(sizes, initial=0)), strict=True))
    count, chosen = len(calling.names), set[int]()
    for one in as_tuple(donate):
        if not isinstance(one, str) and not (-count <= one < count and one % count in calling.dynamic):
            raise OptionError(
                f"donate_argnums names argument {one}, which is static or does not exist: the step was called "
                f"with {count} positional arguments; count those that are not static from 0"
            )
        chosen.update(range(*leaves.get(one if isinstance(one, str) else calling.names[one], (0, 0))))
    return sorted(chosen - {argument for _, argument in traced.returned_arguments})  # the caller gets these back
