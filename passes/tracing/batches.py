"""Which of a step's arguments are the batch; the docstring of `arguments` gives the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from alpa_lite.errors import SignatureError
from alpa_lite.passes.tracing.leaves import Flat, Tree, common_path, is_batch_like
from alpa_lite.paths import shown


@dataclass(frozen=True)
class Batch:
    """The batch as far as it can be told.

    Attributes:
      leaves: the numbers of its leaves.
      note: which arguments it is, and why.
      beside: the other leaves of these arguments.
    """

    leaves: frozenset[int]
    note: str
    beside: frozenset[int] = frozenset()


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
      results: the leading dims of results that are no gradients.

    Raises:
      SignatureError: several arguments of a step with state could be the batch.
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
        units = [unit for unit in units if weights.isdisjoint(unit.leaves)] or units
    if not units:
        return Batch(frozenset(), "no argument was taken as the batch")
    leading = [Counter(inputs.types[i][0][0] for i in u.leaves if is_batch_like(*inputs.types[i])) for u in units]
    if named is None:
        kept = _uniform(units, leading, results, bool(state))
        if kept is None:
            listed = "; ".join(
                f"{shown(common_path(inputs, unit))} with leading dims {sorted(c)}"
                for unit, c in zip(units, leading, strict=True)
            )
            settle = "Name it with batch_argnums=(i,) or batch_argnames=(name,)"
            if state:
                raise SignatureError(
                    f"cannot tell which argument is the batch: {listed}. {settle}, or return the arguments that are "
                    "state; with batch_argnums=() the step is planned without a batch"
                )
            return Batch(frozenset(), f"no argument was taken as the batch: {listed}. {settle}")
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
    return Batch(leaves, note, frozenset(i for unit in units for i in unit.leaves) - leaves)


def _uniform(
    units: Sequence[Tree], leading: Sequence[Counter[int]], results: Collection[int], has_state: bool
) -> list[int] | None:
    """Which units are the batch, by number; None if that cannot be told.

    A single unit of a step with state is the batch. Of several, or without state, those are whose arrays share one
    leading dim: if they differ among themselves and there is no state, those whose dim leads some result.
    """
    if len(units) == 1 and has_state:
        return [0]
    uniform = [k for k, counter in enumerate(leading) if len(counter) == 1]
    if len({dim for k in uniform for dim in leading[k]}) > 1 and not has_state:
        uniform = [k for k in uniform if any(dim in results for dim in leading[k])]
    return uniform if len({dim for k in uniform for dim in leading[k]}) == 1 else None


def _free_units(inputs: Flat, tree: Tree, depth: int, state: frozenset[int]) -> list[Tree]:
    """The largest parts of a tree without any state."""
    if not any(i in state for i in tree.leaves):
        return [tree]
    if tree.is_bare:
        return []
    return [unit for child in inputs.children(tree, depth) for unit in _free_units(inputs, child, depth + 1, state)]
