"""Stages of a step over micro-batches whose arguments lie on submeshes, so that micro-batches take turns on them.

The body of the loop and what is around it are one straight line for `owners`, which gives every operation its submesh.
Within a micro-batch values may go back and forth, so a submesh has a stage for each round in which it runs something:

    round of an op  =  max over what it reads  (round of its maker + 1 if that is on another submesh)

and then, from the last op to the first, the first round of its readers if these are all on its own submesh: what is
made early would wait. Stages in order of rounds read from earlier ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alpa_lite.ir.graph import Atom, Block, Op, Traced
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.rewriting import renamed_atom, renamed_op
from alpa_lite.passes.layers.types import Assignment
from alpa_lite.passes.stages.owners import first_readers, ownership, rounds_of


@dataclass(frozen=True)
class Turns:
    """The stages of a micro-batch.

    Attributes:
      assignment: of the step's operations to stages.
      submeshes: of each stage.
    """

    assignment: Assignment
    submeshes: tuple[int, ...]


def turns_of(traced: Traced, scan: int, pinned: Mapping[int, int], count: int) -> Turns:
    """The stages of an accumulated step by where its arguments lie.

    Args:
      traced, scan: as in `microbatches.loop.Accumulated`.
      pinned: flat argument -> the submesh that it lies on.
      count: the number of submeshes.
    """
    found = ownership(flat(traced, scan), pinned, count)
    body = scan_op(traced, scan).bodies[0]
    rounds = rounds_of(body.ops, found.label, lambda op: True)
    places = {(number, found.label[index]) for index, number in rounds.items()}
    places |= {(0, submesh) for submesh in range(count) if all(where != submesh for _, where in places)}
    order = sorted(places)
    stage_of = {place: number for number, place in enumerate(order)}
    last = {submesh: number for number, (_, submesh) in enumerate(order)}
    stage = {index: stage_of[number, found.label[index]] for index, number in rounds.items()}
    shared = first_readers(body.ops, found.shared, stage)
    top = {op.index: last[found.label.get(op.index, 0)] for op in traced.graph.block.ops if op.index != scan}
    inputs = traced.graph.block.inputs
    assignment = Assignment(
        num_stages=len(order),
        stage={**top, **stage, **shared},
        shared=frozenset(shared),
        home={inputs[number]: last[submesh] for number, submesh in found.owner.items()},
    )
    return Turns(assignment, tuple(submesh for _, submesh in order))


def flat(traced: Traced, scan: int) -> Traced:
    """The step with the loop's body in place of the loop: what one micro-batch does, once."""
    block, op = traced.graph.block, scan_op(traced, scan)
    view = ScanView(op)
    names: dict[int, Atom] = {inner: outer for outer, inner in view.consts}
    body = [renamed_op(inner, names) for inner in view.body.ops]
    names |= {result: renamed_atom(atom, names) for atom, result in zip(view.body.outputs, op.results, strict=True)}
    ops: list[Op] = []
    for one in block.ops:
        ops += body if one is op else [renamed_op(one, names)]
    inputs = (*block.inputs, *view.inputs.carry, *view.inputs.xs)
    outputs = tuple(renamed_atom(atom, names) for atom in block.outputs)
    return replace(traced, graph=replace(traced.graph, block=Block(inputs, tuple(ops), outputs)))
