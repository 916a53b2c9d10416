"""Cuts a step without micro-batches into one graph for each submesh, as an `Ownership` says.

Each graph is an update without a loop (`staging`): ops have rounds, and what one submesh makes and another reads is
late, exchanged between rounds. An op is in the first round in which what it reads is there. Ops that are held, and
shared ones, are in the first round in which something reads what they make, so that it does not wait in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa_lite.ir.graph import Atom, Traced
from alpa_lite.passes.ir.flow import needed, producers, values_in
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.stages.owners import Ownership, first_readers, rounds_of
from alpa_lite.passes.stages.staging import Port, StageGraph, part_of


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
    return part_of(step.traced, Rewriter(step.traced.graph), ops, inputs, constants, finals, rounds, step.made_in)[0]


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
