"""Stages of a step whose arguments lie on submeshes, by their `ownership`.

Without micro-batches (`owned_graphs`) there is one graph for each submesh.
Each is an update without a loop (`staging`): ops have rounds, and what one submesh makes and another reads is
late, exchanged between rounds. An op is in the first round in which what it reads is there. Ops that are held, and
shared ones, are in the first round in which something reads what they make, so that it does not wait in memory.

Over micro-batches (`turns_of`), these take turns on the submeshes. The body of the loop and what is around it are one
straight line for `owners`, which gives every operation its submesh. Within a micro-batch values may go back and forth,
so a submesh has a stage for each round in which it runs something:

    round of an op  =  max over what it reads  (round of its maker + 1 if that is on another submesh)

and then, from the last op to the first, the first round of its readers if these are all on its own submesh: what is
made early would wait. Stages in order of rounds read from earlier ones alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite.ir.graph import Atom, Block, Op, Traced
from alpa_lite.passes.ir.flow import needed, producers, values_in
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom, renamed_op
from alpa_lite.passes.layers.types import Assignment
from alpa_lite.passes.stages.owners import Ownership, first_readers, ownership, rounds_of
from alpa_lite.passes.stages.stage_graph import Port, StageGraph, part_of


def owned_graphs(traced: Traced, ownership: Ownership, count: int) -> tuple[StageGraph, ...]:
    """The parts of a step, one for each of `count` submeshes."""
    step = _Step(traced, ownership)
    return tuple(_part(step, number) for number in range(count))


def moved(traced: Traced, graphs: Sequence[StageGraph]) -> dict[int, tuple[int, ...]]:
    """Argument number -> the submeshes that get a copy of it in each call, for arguments that are owned elsewhere."""
    found: dict[int, list[int]] = {}
    for number, graph in enumerate(graphs):
        for port in graph.inputs:
            if port.kind == "copy":
                found.setdefault(port.number, []).append(number)
    return {number: tuple(where) for number, where in sorted(found.items())}


class _Step:
    """Facts of the whole step, collected before any part is built."""

    def __init__(self, traced: Traced, ownership: Ownership) -> None:
        self.traced, self.ownership, self.block = traced, ownership, traced.graph.block
        count = len(traced.arguments)
        self.argument = {value: i for i, value in enumerate(self.block.inputs[:count])}
        self.constants = self.block.inputs[count:]
        makers = producers(self.block.ops)
        outputs = set(values_in(self.block.outputs))
        self.shared = {value: op for value, op in makers.items() if op.index in ownership.shared}
        self.label = {v: ownership.label[op.index] for v, op in makers.items() if v not in self.shared}
        self.rounds = rounds_of(
            self.block.ops, ownership.label, lambda op: op.index in ownership.held and outputs.isdisjoint(op.results)
        )
        self.made_in = {v: self.rounds[op.index] for v, op in makers.items() if v not in self.shared}
        state = dict(traced.state)
        self.output_label = [self.label_of(atom, state.get(n)) for n, atom in enumerate(self.block.outputs)]

    def label_of(self, atom: Atom, argument: int | None) -> int:
        """The submesh that returns a result: where its argument is if it is new state, else where it is made."""
        if argument is not None:
            return self.ownership.owner[argument]
        if not isinstance(atom, int):
            return 0
        if atom in self.label:
            return self.label[atom]
        return self.ownership.owner.get(self.argument.get(atom, -1), 0)


def _part(step: _Step, number: int) -> StageGraph:
    """The part of one submesh."""
    block, label, owner = step.block, step.ownership.label, step.ownership.owner
    finals = [(block.outputs[n], Port("argument", n)) for n, where in enumerate(step.output_label) if where == number]
    own = [op for op in block.ops if label.get(op.index) == number]
    wanted = {value for op in own for value in op.reads} | set(values_in(atom for atom, _ in finals))
    reached = needed(wanted, step.shared)
    copies = {step.shared[v].index for v in reached if v in step.shared}
    mine = {op.index for op in own} | copies
    ops = [op for op in block.ops if op.index in mine]
    inputs = {
        v: Port("argument" if owner.get(n, number) == number else "copy", n)
        for v, n in step.argument.items()
        if v in reached or owner.get(n) == number
    }
    inputs |= {v: Port("late", v) for v in reached if step.label.get(v, number) != number}
    finals += [(v, Port("late", v)) for v in _read_elsewhere(step, number)]
    constants = [v for v in step.constants if v in reached]
    rounds = {**step.rounds, **first_readers(ops, copies, step.rounds)}
    rewriter = Rewriter(step.traced.graph)
    return part_of(step.traced, rewriter, ops, inputs, constants, finals, rounds=rounds, made_in=step.made_in)[0]


def _read_elsewhere(step: _Step, number: int) -> list[int]:
    """The values that a submesh makes and another one reads or returns."""
    found: dict[int, None] = {}
    label = step.ownership.label
    for op in step.block.ops:
        if label.get(op.index, number) != number:
            found.update((v, None) for v in op.reads if step.label.get(v) == number)
    for atom, where in zip(step.block.outputs, step.output_label, strict=True):
        if where != number and isinstance(atom, int) and step.label.get(atom) == number:
            found[atom] = None
    return list(found)


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
