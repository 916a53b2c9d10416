"""In which order a stage has its operations, arguments and results: in one that does not depend on names.

Problem. Leaves of a pytree are in the order of their names, "layer_10" before "layer_7", and what a step does leaf by
leaf (casts, sums of gradients, updates) is in that order, as its arguments and results are. Stages of as many equal
layers then differ in nothing else, and identical ones are planned, lowered and verified once (`planning.digest`).

Answer. Everything is in the order of its use by the layers, which the order of the body gives:

    op of the body that nothing of a micro-batch goes into,
    or that other stages have, too, such as a mask              right before what reads it first
    op of the body that only one result is made of, such as
    a sum or a gradient, if it has no effects                   right behind what it reads last
    what is carried, arguments, ops that run once               as body and update first read them
    op of the update                                            by round, then by the last sum that it depends on
    result                                                      as they are made

Each is a stable order of what depends on nothing later: it says when, and not what, a stage computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from alpa_lite.ir.graph import Atom, Op
from alpa_lite.passes.ir import flow
from alpa_lite.passes.ir.flow import label_by_operands


def body(ops: Sequence[Op], copies: AbstractSet[int], lasting: Iterable[int]) -> list[Op]:
    """Returns the ops of a stage's body, those of a leaf where their layer is.

    Args:
      copies: those that other stages have, too, by `Op.index`.
      lasting: inputs of the body that are the same for every micro-batch.
    """
    same = flow.find_computable(ops, lasting)
    early = {op for op in ops if op.index in copies or (same.issuperset(op.results) and not op.has_effects)}
    return _behind(flow.before_readers(ops, early), {op.index for op in early})


def _behind(ops: Sequence[Op], early: AbstractSet[int]) -> list[Op]:
    """Returns the ops with those that serve only one result right behind the last op that they read from."""
    readers, last = flow.users(ops), set[int]()
    for op in reversed(ops):
        others = {other.index for value in op.results for other in readers.get(value, ())}
        if len(others) <= 1 and others <= last and not op.has_effects:
            last.add(op.index)
    behind, place = last - early, {op.index: n for n, op in enumerate(ops)}
    # The place of the last op that an op depends on, those of `behind` aside.
    at = label_by_operands(ops, lambda op, known: max(known, default=-1) if op.index in behind else place[op.index], {})
    keys = {op: (anchor, op.index in behind) for op, anchor in zip(ops, at, strict=True)}
    return sorted(ops, key=keys.__getitem__)


def update(ops: Sequence[Op], rounds: Mapping[int, int], sums: Sequence[int]) -> list[Op]:
    """Returns the ops of a stage's update, by round, and in it by the last sum that they depend on.

    Args:
      rounds: of each, by `Op.index`.
      sums: the results of the loop over micro-batches, in order.
    """
    number = {value: n for n, value in enumerate(sums)}
    last = label_by_operands(ops, lambda op, known: max(known, default=-1), number)
    keys = {op: (rounds[op.index], depends) for op, depends in zip(ops, last, strict=True)}
    return sorted(ops, key=keys.__getitem__)


def order_needed_ops(atoms: Iterable[Atom], makers: Mapping[int, Op]) -> tuple[list[Op], list[int]]:
    """Returns the ops that make some atoms, in the order in which they are needed, and their inputs that no op makes.

    Each op is behind the makers of its operands.
    """
    out: dict[Op, None] = {}
    inputs: dict[int, None] = {}
    for value in flow.values_in(atoms):
        if value in makers:
            added = flow.append_behind_makers(out, makers[value], makers)
            inputs |= dict.fromkeys(read for op in added for read in op.reads if read not in makers)
        else:
            inputs[value] = None
    return list(out), list(inputs)
