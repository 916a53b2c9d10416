"""Cuts a step without micro-batches into one graph for each submesh, as an `Ownership` says.

Each graph is an update without a loop (`staging`): ops have rounds, and what one submesh makes and another reads is
late, exchanged between rounds. An op is in the first round in which what it reads is there. Ops that are held, and
shared ones, are in the first round in which something reads what they make, so that it does not wait in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa_lite.graph import Atom, Block, Graph, Op, Traced
from alpa_lite.passes.ir.flow import needed, producers, users, values_in
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.pruning import indexed
from alpa_lite.passes.stages.owners import Ownership
from alpa_lite.passes.stages.staging import Port, StageGraph, traced_of


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
        self.constant = {value: i for i, value in enumerate(self.block.inputs[count:])}
        self.makers = producers(self.block.ops)
        self.shared = {value: op for value, op in self.makers.items() if op.index in ownership.shared}
        self.label = {v: ownership.label[op.index] for v, op in self.makers.items() if v not in self.shared}
        self.rounds = self.rounds_of()
        self.made_in = {v: self.rounds[op.index] for v, op in self.makers.items() if v not in self.shared}
        state = dict(traced.state)
        self.output_label = [self.label_of(atom, state.get(n)) for n, atom in enumerate(self.block.outputs)]

    def rounds_of(self) -> dict[int, int]:
        """The round of every op that is not shared."""
        rounds: dict[int, int] = {}
        own = [op for op in self.block.ops if op.index in self.ownership.label]
        for op in own:
            here, first = self.ownership.label[op.index], 0
            for value in op.reads:
                if value in self.label:
                    made = rounds[self.makers[value].index]
                    first = max(first, made + (self.label[value] != here))
            rounds[op.index] = first
        readers = users(own)
        outputs = set(values_in(self.block.outputs))
        for op in reversed(own):
            if op.index in self.ownership.held and outputs.isdisjoint(op.results):
                here = self.ownership.label[op.index]
                found = [user for value in op.results for user in readers.get(value, ())]
                if found and all(self.ownership.label[user.index] == here for user in found):
                    rounds[op.index] = min(rounds[user.index] for user in found)
        return rounds

    def label_of(self, atom: Atom, argument: int | None) -> int:
        """The submesh that returns a result: where its argument is if it is new state, else where it is made."""
        if argument is not None:
            return self.ownership.owner[argument]
        if not isinstance(atom, int):
            return 0
        if atom in self.label:
            return self.label[atom]
        owners = self.ownership.owner
        return owners.get(self.argument[atom], 0) if atom in self.argument else 0


def _part(step: _Step, number: int) -> StageGraph:
    """The part of one submesh."""
    traced, block, label = step.traced, step.block, step.ownership.label
    outputs = [n for n, where in enumerate(step.output_label) if where == number]
    finals = [block.outputs[n] for n in outputs]
    own = [op for op in block.ops if label.get(op.index) == number]
    wanted = {value for op in own for value in op.reads} | set(values_in(finals))
    reached = needed(wanted, step.shared)
    copies = {step.shared[v].index for v in reached if v in step.shared}
    mine = {op.index for op in own} | copies
    ops = [op for op in block.ops if op.index in mine]
    late_in = [v for v in dict.fromkeys(reached) if step.label.get(v, number) != number]
    late_out = _read_elsewhere(step, number)
    owner = step.ownership.owner
    arguments = [v for v, n in step.argument.items() if v in reached or owner.get(n) == number]
    numbers = [step.argument[value] for value in arguments]
    ports = [Port("argument" if owner.get(n, number) == number else "copy", n) for n in numbers]
    constants = [v for v in step.constant if v in reached]
    inputs = (*ports, *(Port("late", v) for v in late_in))
    results = (*(Port("argument", n) for n in outputs), *(Port("late", v) for v in late_out))
    body, place = indexed(Block((*arguments, *late_in, *constants), tuple(ops), (*finals, *late_out)))
    kept = tuple(traced.graph.constants[step.constant[v]] for v in constants)
    graph = Graph(traced.graph.values, body, kept, traced.graph.keys or Keys())
    rounds = {**step.rounds, **_rounds_of_copies(ops, step.rounds, copies)}
    return StageGraph(
        traced=traced_of(traced, graph, inputs, results),
        scan=-1,
        inputs=inputs,
        outputs=results,
        backward=frozenset(),
        weight=frozenset(),
        rounds={place[op.index]: rounds[op.index] for op in ops},
        late_rounds={v: step.made_in[v] for v in late_out},
        arrivals={v: step.made_in[v] for v in late_in},
        constants=tuple(step.constant[v] for v in constants),
    )


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


def _rounds_of_copies(ops: Sequence[Op], rounds: Mapping[int, int], copies: set[int]) -> dict[int, int]:
    """The round of each shared op in one part: that of its first reader there."""
    found: dict[int, int] = {}
    readers = users(ops)
    for op in reversed(ops):
        if op.index in copies:
            some = [user.index for value in op.results for user in readers.get(value, ())]
            found[op.index] = min((found.get(i, rounds.get(i, 0)) for i in some), default=0)
    return found
