"""Data flow within a block: who makes a value, who reads it, and what can be reached from it.

Every function takes operations, or a block, in program order; none looks into bodies, which are closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from alpa_lite.ir.graph import Atom, Block, Lit, Op

T = TypeVar("T", bound=Hashable)
LabelT = TypeVar("LabelT")
ItemT = TypeVar("ItemT", bound=Any)  # has `reads` and `results`: an op, or an instruction


def values_in(atoms: Iterable[Atom]) -> tuple[int, ...]:
    """Returns the atoms that are values, in order; literals are left out."""
    return tuple([atom for atom in atoms if isinstance(atom, int)])


def producers(ops: Iterable[Op]) -> dict[int, Op]:
    """Value -> the op that makes it."""
    return {value: op for op in ops for value in op.results}


def users(ops: Iterable[Op]) -> dict[int, list[Op]]:
    """Value -> the ops that read it, each once, in program order; values that nobody reads are left out."""
    found: dict[int, list[Op]] = {}
    for op in ops:
        for value in dict.fromkeys(op.reads):
            found.setdefault(value, []).append(op)
    return found


def is_literal_zero(atom: Atom) -> bool:
    """Returns whether an atom is a literal all of whose elements are zero."""
    return isinstance(atom, Lit) and not np.any(atom.value)


def makes_zeros(op: Op) -> bool:
    """Returns whether an operation broadcasts a literal zero."""
    return op.name == "broadcast_in_dim" and is_literal_zero(op.operands[0])


def uses(block: Block) -> Counter[int]:
    """Returns how often each value of a block is read, its outputs included."""
    return Counter(values_in([*(atom for op in block.ops for atom in op.operands), *block.outputs]))


def find_dependents(ops: Iterable[Op], values: Iterable[int]) -> set[int]:
    """Returns these values and all results that depend on any of them, directly or through others."""
    found = set(values)
    for op in ops:
        if not found.isdisjoint(op.reads):
            found.update(op.results)
    return found


def find_computable(
    items: Iterable[ItemT], values: Iterable[int], allowed: Callable[[ItemT], bool] = lambda item: True
) -> set[int]:
    """Returns these values and all results of allowed items that depend on nothing else."""
    found = set(values)
    for item in items:
        if found.issuperset(item.reads) and allowed(item):
            found.update(item.results)
    return found


def append_behind_makers(items: dict[ItemT, None], last: ItemT, makers: Mapping[int, ItemT]) -> list[ItemT]:
    """Appends an item to ordered ones, behind the makers of its operands; returns the items that were appended."""
    stack, added = [last], []
    while stack:
        missing = [makers[v] for v in stack[-1].reads if v in makers and makers[v] not in items]
        if missing:
            stack += missing
            continue
        item = stack.pop()
        if item not in items:
            items[item] = None
            added.append(item)
    return added


def before_readers(items: Sequence[ItemT], early: Collection[ItemT]) -> list[ItemT]:
    """Returns the items, each of `early` right before its first reader, or at the end if no other one reads it."""
    makers = {value: item for item in items if item in early for value in item.results}
    out: dict[ItemT, None] = {}
    for item in (*(item for item in items if item not in early), *items):
        append_behind_makers(out, item, makers)
    return list(out)


def reach(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Returns the items that `following` reaches from `start`, itself included; each once, in the order of the visit.

    The visit is depth-first: it continues with the last item found, without recursion, and stores only waiting items.
    """
    found: dict[T, None] = {}
    waiting = list(start)
    while waiting:
        item = waiting.pop()
        if item not in found:
            found[item] = None
            waiting.extend(following(item))
    return found


def find_needed(values: Iterable[int], makers: Mapping[int, Op]) -> dict[int, None]:
    """Returns these values, and all that the ops of `makers` read to make them."""
    return reach(values, lambda value: makers[value].reads if value in makers else ())


def label_by_operands(
    items: Iterable[ItemT], choose: Callable[[ItemT, list[LabelT]], LabelT], given: Mapping[int, LabelT]
) -> list[LabelT]:
    """Returns a label of each item: `choose` has the item, and the labels of those of its operands that have one.

    Args:
      given: labels of values that no item makes.
    """
    known, found = dict(given), list[LabelT]()
    for item in items:
        found.append(choose(item, [known[value] for value in item.reads if value in known]))
        known |= dict.fromkeys(item.results, found[-1])
    return found


def label_by_readers(
    items: Sequence[ItemT], choose: Callable[[ItemT, Set[T]], Set[T]]
) -> tuple[list[Set[T]], dict[int, set[T]]]:
    """Returns labels of each item: `choose` has the item, and the labels of all items that read its results.

    Returns:
      The labels of each item; and value -> the labels of the items that read it.
    """
    read_by: dict[int, set[T]] = {}
    found: list[Set[T]] = []
    for item in reversed(items):
        found.append(choose(item, set[T]().union(*(read_by[value] for value in item.results if value in read_by))))
        for value in item.reads:
            read_by.setdefault(value, set()).update(found[-1])
    return found[::-1], read_by
