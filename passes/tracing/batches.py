"""The batch of a step, and the role of each of its arguments.

A step without state is a function like any other: evaluation, prediction, gradients. Keys and scalars are never the
batch, nor, where anything else could be, is an argument that comes back as it went in or that products read as a weight
(`evidence`): these are *frozen*, and so are pytrees whose arrays share no leading dim. An argument with indices, or a
bare array next to state, is data however it is read: the nodes of a graph are looked up, and an adjacency matrix is
multiplied. All else is data. The batch is the data whose leading dim most arguments share (in a step without state
first: that a result has); where none is shared, each is a batch of its own size (nodes, edges and graphs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing.arguments import Flat, Tree, common_path, is_batch_like


@dataclass(frozen=True)
class Batch:
    """The batch as far as the step determines it.

    Attributes:
      leaves: the numbers of its leaves.
      note: which arguments it is, and why.
      data: other leaves that are neither state nor frozen.
    """

    leaves: frozenset[int]
    note: str
    data: frozenset[int] = frozenset()

    def role(self, inputs: Flat, number: int) -> str:
        """Returns the role of a flat argument that is not state, as `Argument.role` names it."""
        if number in self.leaves:
            return "batch"
        return "frozen" if is_batch_like(inputs.types[number]) and number not in self.data else "other"


def find_batch(
    inputs: Flat,
    named: frozenset[int] | None,
    state: frozenset[int],
    known: frozenset[int],
    handed: frozenset[int],
    weights: frozenset[int],
    results: Collection[int],
) -> Batch:
    """Finds the batch of a step.

    Args:
      inputs: the leaves of the arguments.
      named: the leaves that the user named, or None.
      state: the leaves that are state.
      known: others that are no batch.
      handed, weights: those that the step returns as they are, and those that it reads as weights: an argument of
        nothing but the former, or with one of the latter, is not the batch if any other could be.
      results: the leading dims of results that are no gradients, which tell the batch of a step without state.
    """
    if named is not None:
        units = [tree for tree in inputs.trees if tree.leaves and tree.start in named and _leading(inputs, tree)]
        why = "named by batch_argnums or batch_argnames"
    else:
        trees = (part for tree in inputs.trees for part in _parts_without(inputs, tree, state | known))
        units = [tree for tree in trees if _leading(inputs, tree)]
        units = [unit for unit in units if not handed.issuperset(unit.leaves)] or units
        units = [unit for unit in units if not _is_frozen(inputs, unit, weights, bool(state))] or units
        uniform = [unit for unit in units if len(_leading(inputs, unit)) == 1 or _has_indices(inputs, unit)]
        units = uniform or (units if state else [])
        why = "the step neither returns nor updates {}"
    if not units:
        note = "no argument was taken as the batch; batch_argnums=(i,) or batch_argnames=(name,) name it"
        return Batch(frozenset(), note)
    data = frozenset(i for unit in units for i in unit.leaves)
    if named is None:
        units = _most_shared(inputs, units, () if state else results)
    leading = [_leading(inputs, unit) for unit in units]
    common = set(leading[0]).intersection(*leading[1:])
    total = [sum(leading, Counter[int]())] * len(units) if common else leading  # else each has a size of its own
    sizes = [max(sorted(common or counter), key=counter.__getitem__) for counter in total]
    leaves = frozenset(
        i
        for unit, size in zip(units, sizes, strict=True)
        for i in unit.leaves
        if is_batch_like(inputs.types[i]) and inputs.types[i][0][0] == size
    )
    dims = f"leading dim {sizes[0]}" if common else f"leading dims {', '.join(map(str, sizes))}"
    names = ", ".join(f"`{format_path(common_path(inputs, unit))}`" for unit in units)
    one = len(units) == 1
    why = why.format("it" if one else "them")
    note = f"{names} {'was' if one else 'were'} taken as the batch ({dims}): {why}"
    return Batch(leaves, note, data - leaves)


def _is_frozen(inputs: Flat, unit: Tree, weights: frozenset[int], has_state: bool) -> bool:
    """Returns whether an argument that products read as a weight is one."""
    if weights.isdisjoint(unit.leaves) or (unit.is_bare and has_state):
        return False
    return not _has_indices(inputs, unit)


def _has_indices(inputs: Flat, unit: Tree) -> bool:
    """Returns whether an argument holds arrays of integers, wider than those of quantised weights."""
    return any(shape and dtype in (np.int32, np.int64) for shape, dtype in (inputs.types[i] for i in unit.leaves))


def _leading(inputs: Flat, unit: Tree) -> Counter[int]:
    """Returns the leading dims of an argument, with the number of its arrays that have each."""
    return Counter(inputs.types[i][0][0] for i in unit.leaves if is_batch_like(inputs.types[i]))


def _most_shared(inputs: Flat, units: Sequence[Tree], results: Collection[int]) -> list[Tree]:
    """Returns the arguments that have a leading dim of `results`, else that which most share; all if none is."""
    leading = [(unit, _leading(inputs, unit).keys()) for unit in units]
    led = [unit for unit, dims in leading if not dims.isdisjoint(results)]
    if led:
        return led
    (dim, most), *others = Counter(dim for _, dims in leading for dim in dims).most_common(2)
    alone = most == 1 or (others and others[0][1] == most)
    return [unit for unit, dims in leading if alone or dim in dims]


def _parts_without(inputs: Flat, tree: Tree, taken: frozenset[int]) -> Iterator[Tree]:
    """Yields the largest parts of a tree without any leaf that is taken."""
    if taken.isdisjoint(tree.leaves):
        yield tree
    else:
        for child in inputs.children(tree):
            yield from _parts_without(inputs, child, taken)
