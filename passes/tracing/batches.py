"""Which of a step's arguments are the batch; the docstring of `arguments` gives the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.passes.tracing.leaves import Flat, Tree, common_path, is_batch_like
from alpa_lite.paths import shown


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


def find_batch(
    inputs: Flat,
    named: frozenset[int] | None,
    state: frozenset[int],
    known: frozenset[int],
    handed: frozenset[int],
    weights: frozenset[int],
    results: Collection[int],
) -> Batch:
    """The batch of a step.

    Args:
      inputs: the leaves of the arguments.
      named: the leaves that the user named, or None.
      state: the leaves that are state.
      known: others that are no batch.
      handed, weights: those that the step returns as they are, and those that it reads as weights: an argument of
        nothing but the former, or with one of the latter, is no batch if any other could be.
      results: the leading dims of results that are no gradients, which tell the batch of a step without state.
    """
    if named is not None:
        units = [tree for tree in inputs.trees if tree.start in named and tree.leaves]
        why = "named by batch_argnums or batch_argnames"
    else:
        units = [unit for tree in inputs.trees for unit in _free_units(inputs, tree, 0, state | known)]
        why = "the step neither returns nor updates {}"
    units = [unit for unit in units if any(is_batch_like(*inputs.types[i]) for i in unit.leaves)]
    if named is None:
        units = [unit for unit in units if not handed.issuperset(unit.leaves)] or units
        units = [unit for unit in units if not _is_frozen(inputs, unit, weights, bool(state))] or units
        uniform = [unit for unit in units if len(_leading(inputs, unit)) == 1 or _has_indices(inputs, unit)]
        units = uniform or (units if state else [])
    data = frozenset(i for unit in units for i in unit.leaves)
    if not units:
        return Batch(
            frozenset(), "no argument was taken as the batch; batch_argnums=(i,) or batch_argnames=(name,) name it"
        )
    leading = [_leading(inputs, unit) for unit in units]
    if named is None:
        kept = _most_shared(leading, () if state else results)
        units, leading = [units[k] for k in kept], [leading[k] for k in kept]
    common = set(leading[0]).intersection(*leading[1:])
    total = sum(leading, Counter())
    if common:
        sizes = [max(sorted(common), key=lambda dim: total[dim])] * len(units)
    else:  # several batches, each of a size of its own
        sizes = [max(sorted(counter), key=lambda dim: counter[dim]) for counter in leading]
    leaves = frozenset(
        i
        for unit, size in zip(units, sizes, strict=True)
        for i in unit.leaves
        if is_batch_like(*inputs.types[i]) and inputs.types[i][0][0] == size
    )
    dims = f"leading dim {sizes[0]}" if common else f"leading dims {', '.join(map(str, sizes))}"
    names = ", ".join(f"`{shown(common_path(inputs, unit))}`" for unit in units)
    one = len(units) == 1
    why = why.format("it" if one else "them")
    note = f"{names} {'was' if one else 'were'} taken as the batch ({dims}): {why}"
    return Batch(leaves, note, data - leaves)


def _is_frozen(inputs: Flat, unit: Tree, weights: frozenset[int], has_state: bool) -> bool:
    """Whether an argument that products read as a weight is one."""
    if weights.isdisjoint(unit.leaves) or (unit.is_bare and has_state):
        return False
    return not _has_indices(inputs, unit)


def _has_indices(inputs: Flat, unit: Tree) -> bool:
    """Whether an argument holds arrays of integers, wider than those of quantised weights."""
    return any(shape and dtype in (np.int32, np.int64) for shape, dtype in (inputs.types[i] for i in unit.leaves))


def _leading(inputs: Flat, unit: Tree) -> Counter[int]:
    """How many arrays of an argument have each leading dim."""
    return Counter(inputs.types[i][0][0] for i in unit.leaves if is_batch_like(*inputs.types[i]))


def _most_shared(leading: Sequence[Counter[int]], results: Collection[int]) -> list[int]:
    """Which arguments, by number, have a leading dim of `results`, else that which most share; all if none is."""
    led = [k for k, counter in enumerate(leading) if not counter.keys().isdisjoint(results)]
    if led:
        return led
    count = Counter(dim for counter in leading for dim in counter)
    (dim, most), *others = count.most_common(2)
    alone = most == 1 or (others and others[0][1] == most)
    return [k for k, counter in enumerate(leading) if alone or dim in counter]


def _free_units(inputs: Flat, tree: Tree, depth: int, state: frozenset[int]) -> list[Tree]:
    """The largest parts of a tree without any state."""
    if not any(i in state for i in tree.leaves):
        return [tree]
    if tree.is_bare:
        return []
    return [unit for child in inputs.children(tree, depth) for unit in _free_units(inputs, child, depth + 1, state)]
