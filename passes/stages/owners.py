"""Assignment of operations to submeshes, where arguments are already placed on submeshes and stay there.

Problem. After a pipelined train step the state is placed on submeshes. Any other function of it (an evaluation, a norm,
a step that generates with a cache, another optimizer) must be divided such that no leaf leaves its submesh, and as few
as possible of the computed values do.

Mathematics. An operation that reads a leaf, or is computed from leaves alone and has as many elements (a cast, a
transpose, a decayed average), runs where the leaf is placed; of leaves on several submeshes, where most of their bytes
are. So does the operation that makes the new value of a leaf. All others are free, as are those that read no more of
the leaves than scalars and random keys. With l(i) the submesh of operation i, and p(v) the operation that makes value
v, minimise

    sum over values v  bytes(v) * |{ l(r) : r reads v } - { l(p(v)) }|:

each value is sent once to every other submesh that reads it. This is a labelling with costs on hyperedges. It starts
where values flow forward (the highest submesh of an operation's operands), and takes the best *expansion* of one
submesh after the other: the cheapest of all labellings in which any operations move to that submesh and no others move.
An expansion is a minimum cut, since each term pays for a reader apart from its producer (it is submodular): with two
submeshes the first cut is the optimum. Transfers may go in both directions: operations have rounds (`staging`), so a
norm of all leaves is summed where these are placed, and a clipped update happens there too.

Cheap operations that need no leaf (masks, positions, of the batch alone) are *shared*: every submesh that reads them
repeats them. Arguments without a placement yet cost nothing to read: they are put where they are read. Of these, state
has one owner, where its new value is made.

Micro-batches take turns on the submeshes (`turns_of`). The body of the loop and what is around it are one straight line
for the labelling. Within a micro-batch values may go back and forth, so a submesh has a stage for each round in which
it runs something:

    round of an op  =  max over what it reads  (round of its maker + 1 if that is on another submesh)

and then, from the last op to the first, the first round of its readers if these are all on its own submesh: what is
made early would wait. Stages in order of rounds read from earlier ones alone.

Source: Boykov, Veksler, Zabih, "Fast approximate energy minimization via graph cuts", PAMI 2001 (expansions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from alpa_lite.ir.graph import Atom, Block, Op, Traced, Value
from alpa_lite.passes.ir import min_cut, primitives
from alpa_lite.passes.ir.flow import label_by_operands, label_by_readers, producers, users
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.rewriting import rename_atom, rename_op
from alpa_lite.passes.layers.types import Assignment

SWEEPS = 4
"""The most expansions of each submesh. The second sweep rarely finds anything."""

_CAPACITY = 1 << 29  # of all edges together


def ownership(traced: Traced, pinned: Mapping[int, int], count: int) -> Assignment:
    """Assigns the operations of a step to submeshes.

    Args:
      pinned: flat argument -> the submesh that it lies on.
      count: the number of submeshes.
    """
    anchors = _Anchors(traced, pinned)
    labels = {index: label for index, label in _Labels(traced, anchors, count).solve().items() if index >= 0}
    new_state = {argument: anchors.source.get(traced.graph.block.inputs[argument], -1) for _, argument in traced.state}
    owner = {argument: labels.get(index, 0) for argument, index in new_state.items()} | dict(pinned)
    return Assignment(count, labels, frozenset(anchors.shared), owner=owner, delayed_ops=frozenset(anchors.held))


def rounds_of(
    ops: Iterable[Op],
    label: Mapping[int, int],
    can_wait: Callable[[Op], bool],
    given: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """Returns the round of every op that has a label: the first in which what it reads is there.

    Ops that can wait, and whose readers are all on their own submesh, are in the first round of these.

    Args:
      given: values that are there in round 0, with their submeshes.
    """
    own = [op for op in ops if op.index in label]

    def earliest(op: Op, known: list[tuple[int, int]]) -> tuple[int, int]:
        here = label[op.index]
        return max((number + (place != here) for number, place in known), default=0), here

    found = label_by_operands(own, earliest, {value: (0, place) for value, place in given.items()})
    rounds = {op.index: number for op, (number, _) in zip(own, found, strict=True)}

    def latest(op: Op, readers: Set[tuple[int, int]]) -> Set[tuple[int, int]]:
        here = label[op.index]
        waits = can_wait(op) and {place for _, place in readers} == {here}
        return {min(readers) if waits else (rounds[op.index], here)}

    late, _ = label_by_readers(own, latest)
    return {op.index: number for op, ((number, _),) in zip(own, late, strict=True)}


def first_readers(ops: Sequence[Op], shared: Container[int], number: Mapping[int, int]) -> dict[int, int]:
    """Returns the lowest stage that reads each shared op, directly or through other shared ops; 0 for none."""
    found, _ = label_by_readers(
        ops,
        lambda op, readers: {min(readers, default=0) if op.index in shared else number.get(op.index, 0)},
    )
    return {op.index: lowest for op, (lowest,) in zip(ops, found, strict=True) if op.index in shared}


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
    """Returns the stages of an accumulated step by where its arguments lie.

    Args:
      traced, scan: as in `microbatches.loop.Accumulated`.
      pinned: flat argument -> the submesh that it lies on.
      count: the number of submeshes.
    """
    found = ownership(inline_loop(traced, scan), pinned, count)
    body = scan_op(traced, scan).bodies[0]
    rounds = rounds_of(body.ops, found.stage, lambda op: True)
    places = {(number, found.stage[index]) for index, number in rounds.items()}
    places |= {(0, submesh) for submesh in range(count) if all(where != submesh for _, where in places)}
    order = sorted(places)
    stage_of = {place: number for number, place in enumerate(order)}
    last = {submesh: number for number, (_, submesh) in enumerate(order)}
    stage = {index: stage_of[number, found.stage[index]] for index, number in rounds.items()}
    shared = first_readers(body.ops, found.shared_ops, stage)
    top = {op.index: last[found.stage.get(op.index, 0)] for op in traced.graph.block.ops if op.index != scan}
    assignment = Assignment(
        num_stages=len(order),
        stage={**top, **stage, **shared},
        shared_ops=frozenset(shared),
        home={traced.graph.block.inputs[number]: last[submesh] for number, submesh in found.owner.items()},
    )
    return Turns(assignment, tuple(submesh for _, submesh in order))


def inline_loop(traced: Traced, scan: int) -> Traced:
    """Returns the step with the loop's body in place of the loop: what one micro-batch does, once."""
    block, op = traced.graph.block, scan_op(traced, scan)
    view = ScanView(op)
    names: dict[int, Atom] = {inner: outer for outer, inner in view.consts}
    body = [rename_op(inner, names) for inner in view.body.ops]
    names |= {result: rename_atom(atom, names) for atom, result in zip(view.body.outputs, op.results, strict=True)}
    ops: list[Op] = []
    for one in block.ops:
        ops += body if one is op else [rename_op(one, names)]
    inputs = (*block.inputs, *view.inputs.carry, *view.inputs.xs)
    outputs = tuple(rename_atom(atom, names) for atom in block.outputs)
    return replace(traced, graph=replace(traced.graph, block=Block(inputs, tuple(ops), outputs)))


class _Anchors:
    """Facts known before the assignment: shared ops, and the ops that run where their leaves are placed.

    Attributes:
      place: pinned input of the block -> its submesh.
      fixed: op index -> submesh.
      source: unpinned state -> the index of the op that makes its new value, with which it is.
    """

    def __init__(self, traced: Traced, pinned: Mapping[int, int]) -> None:
        self.block, self.values = traced.graph.block, traced.graph.values
        self.place = {self.block.inputs[number]: submesh for number, submesh in pinned.items()}
        self.shared: set[int] = set()
        self.held: set[int] = set()
        self.fixed: dict[int, int] = {}
        maker, pairs = (
            producers(self.block.ops),
            [(self.block.inputs[a], self.block.outputs[o]) for o, a in traced.state],
        )
        makers = {value: maker[atom].index for value, atom in pairs if isinstance(atom, int) and atom in maker}
        self.source = {value: index for value, index in makers.items() if value not in self.place}
        self.find_shared()
        self.find_fixed()
        for value, index in makers.items():
            if value in self.place and index not in self.shared:
                self.fixed.setdefault(index, self.place[value])

    def find_shared(self) -> None:
        """Finds the cheap ops that depend on the batch and on constants alone."""
        owned = {*self.place, *self.source}
        free = {value for value in self.block.inputs if value not in owned}
        kept = set(self.source.values())
        for op in self.block.ops:
            expensive = op.bodies or op.has_effects or op.name in primitives.EXPENSIVE_TO_REPEAT or op.index in kept
            if not expensive and free.issuperset(op.reads):
                self.shared.add(op.index)
                free.update(op.results)
        self.free = free

    def find_fixed(self) -> None:
        """Finds the ops that read leaves, or values as large as those."""
        leaves = {v: where for v, where in self.place.items() if not is_small(self.values[v])}  # and what is as large
        for op in self.block.ops:
            found = [value for value in op.reads if value in leaves]
            if not found:
                continue
            weight: dict[int, int] = {}
            for value in found:
                weight[leaves[value]] = weight.get(leaves[value], 0) + max(1, self.values[value].nbytes)
            self.fixed[op.index] = max(weight, key=lambda submesh: (weight[submesh], submesh))
            only = all(v in leaves or v in self.free for v in op.reads) and not op.bodies
            size, made = ([math.prod(self.values[v].shape) for v in some] for some in (found, op.results))
            if only and max(size) == sum(made) and op.name not in primitives.EXPENSIVE_TO_REPEAT:  # as large as a leaf
                leaves.update(dict.fromkeys(op.results, self.fixed[op.index]))
                self.held.add(op.index)


def is_small(value: Value) -> bool:
    """Returns whether a value is a scalar or one random key, which costs nothing to send."""
    return math.prod(value.shape) <= 1 or (value.shape == (2,) and value.dtype == np.uint32)


class _Edge(NamedTuple):
    """A value: what it costs to send it, its maker and its readers: ops by index, or a leaf's submesh as ~submesh."""

    cost: int
    maker: int
    readers: Sequence[int]


class _Labels:
    """The labelling of the ops that are not shared, in which the label of ~submesh is that submesh."""

    def __init__(self, traced: Traced, anchors: _Anchors, count: int) -> None:
        self.count, self.label, values = count, {~submesh: submesh for submesh in range(count)}, traced.graph.values
        ops = [op for op in traced.graph.block.ops if op.index not in anchors.shared]
        maker = {value: op.index for op in ops for value in op.results}
        maker |= {value: ~submesh for value, submesh in anchors.place.items()}
        first = label_by_operands(
            ops, lambda op, known: anchors.fixed.get(op.index, max(known, default=0)), anchors.place
        )
        self.label |= {op.index: label for op, label in zip(ops, first, strict=True)}
        self.movable = [op.index for op in ops if op.index not in anchors.fixed]
        maker |= anchors.source
        readers = users(ops)
        unit = max(1.0, 2.0 * sum(max(1, values[v].nbytes) * len(some) for v, some in readers.items()) / _CAPACITY)
        self.edges = [  # what is shared, and arguments that lie nowhere, have no maker
            _Edge(max(1, round(values[value].nbytes / unit)), maker[value], [op.index for op in some])
            for value, some in readers.items()
            if value in maker
        ]

    def energy(self, label: Mapping[int, int]) -> int:
        """Returns the cost of all values that are sent, as of `_Edge.cost`."""
        return sum(e.cost * len({label[reader] for reader in e.readers} - {label[e.maker]}) for e in self.edges)

    def solve(self) -> dict[int, int]:
        """Returns the labelling that no expansion of one submesh makes cheaper."""
        least, idle, submesh = self.energy(self.label), 0, 0
        for _ in range(SWEEPS * self.count if self.movable and self.count > 1 else 0):
            if idle == self.count or least == 0:
                break
            moved = {**self.label, **dict.fromkeys(self.expand(submesh), submesh)}
            energy = self.energy(moved)
            idle = idle + 1 if energy >= least else 0
            if energy < least:
                least, self.label = energy, moved
            submesh = (submesh + 1) % self.count
        return self.label

    def expand(self, submesh: int) -> list[int]:
        """Returns the ops that the cheapest expansion of a submesh moves there."""
        cut = _Cut(self.movable)

        def side(node: int) -> int:
            """The vertex of a node: the source where it is on the submesh, the sink where it is fixed elsewhere."""
            return cut.source if self.label[node] == submesh else cut.vertex.get(node, cut.sink)

        for cost, maker, readers in self.edges:
            here, start = self.label[maker], side(maker)
            by_label: dict[int, set[int]] = {}
            for reader in readers:
                by_label.setdefault(self.label[reader], set()).add(side(reader))
            for label, some in by_label.items():
                if label != submesh:  # paid if a reader stays and the maker is elsewhere: it leaves, or was never there
                    cut.pay([start if here == label else cut.source], some, cost)
            if here != submesh:  # paid if any reader is, or goes, there, and the maker does not
                cut.pay(set[int]().union(*by_label.values()), [start], cost)
        return cut.solve()


class _Cut:
    """A minimum cut. Ops on the side of the source move."""

    source, sink = min_cut.SOURCE, min_cut.SINK

    def __init__(self, ops: Sequence[int]) -> None:
        self.vertex = {index: n + 2 for n, index in enumerate(ops)}
        self.count = len(self.vertex) + 2
        self.capacity: dict[tuple[int, int], int] = {}

    def edge(self, start: int, end: int, capacity: int) -> None:
        """Adds to the capacity of an edge, unless that is never cut."""
        if start != end and start != self.sink and end != self.source:
            self.capacity[start, end] = min(min_cut.UNLIMITED, self.capacity.get((start, end), 0) + capacity)

    def pay(self, starts: Collection[int], ends: Collection[int], capacity: int) -> None:
        """Adds a cost, paid if any of `starts` is on the source's side and not all of `ends` are."""
        if all(start == self.sink for start in starts) or all(end == self.source for end in ends):
            return
        vertices = []
        for some in (starts, ends):
            self.count += len(some) > 1
            vertices.append(self.count - 1 if len(some) > 1 else next(iter(some)))
        start, end = vertices
        self.edge(start, end, capacity)
        for one in starts:
            self.edge(one, start, min_cut.UNLIMITED)
        for one in ends:
            self.edge(end, one, min_cut.UNLIMITED)

    def solve(self) -> list[int]:
        """Returns the ops on the side of the source."""
        reached = min_cut.smallest_side(self.capacity, self.count, min_cut.SOURCE)
        return [index for index, vertex in self.vertex.items() if vertex in reached]
