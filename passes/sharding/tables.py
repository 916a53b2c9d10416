"""A step in its groups, and the tables that programs of all meshes share: nodes, edges, and lifetimes of buffers.

Only the layouts and their costs depend on the mesh. A search over mesh shapes makes these tables once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite.ir.graph import Op, Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.costs import traffic
from alpa_lite.passes.ir.primitives import CONSTRAINT
from alpa_lite.passes.ir.remembered import Memo
from alpa_lite.passes.sharding import connected, kinds
from alpa_lite.passes.sharding.groups import Demand, Dims, Grouping
from alpa_lite.passes.sharding.points import Life, Lifetimes, compress_intervals, needed_points
from alpa_lite.passes.sharding.solver.problem import timeline
from alpa_lite.passes.sharding.space import Space


@dataclass(frozen=True, eq=False)
class Repeats:
    """The parts in which one planned program runs, each of which reshards its inputs anew.

    One integer program plans a stage, but a schedule runs the stage in parts: forward and backward, or both once for
    each slice of the sequence. A part keeps no other layout of a parameter, of the batch, or of values made cheaply of
    these: a later part that needs that layout communicates again (`stages.cutting`). The program pays such a transfer
    once for each part.

    Attributes:
      parts: op index -> the numbers of the parts that do it; several for what each part makes for itself.
      values: that each part lays out anew.
    """

    parts: Mapping[int, frozenset[int]] = field(default_factory=dict)
    values: frozenset[int] = frozenset()


NO_REPEATS = Repeats()
"""Of a program that runs in one part."""


@dataclass(frozen=True, eq=False)
class Passage:
    """Alike values on their way from one node to the same consumers: a transfer, before any mesh is known.

    Attributes:
      src: the node that makes them. values: all of them. count: how many of the whole step these stand for.
      phase: the part that lays them out for itself (`Repeats`), or 1 for late uses of state that are served
        again; else 0.
      demands: those on the first of the values.
      spans: [n, 4] a value, its first and its last point, and the number of values of equal span.
    """

    src: int
    values: tuple[int, ...]
    count: int
    phase: int
    demands: tuple[Demand, ...]
    spans: np.ndarray


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one tying of groups to nodes.

    Attributes:
      members: the groups of each node. node_of: group -> node.
      late_from: program point from which state is served again; None if it is not.
      passages: every transfer.
      live_values: [n, 5] alike values that take memory where they are made: one of them, its node, its first and its
        last point, and the number of values of equal span.
      points: how many program points are left; intervals are in their numbers.
      shares: (value, phase) of each transfer that the compiler combines with others -> its share of their latency.
    """

    members: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]
    late_from: int | None
    passages: tuple[Passage, ...]
    live_values: np.ndarray
    points: int
    shares: Mapping[tuple[int, int], float]


@dataclass(eq=False)
class GroupedStep:
    """A traced step, the rules of its operations and its groups, with all that is derived from these once.

    Attributes:
      repeats: the parts that the program runs in.
      cache: a cache of tables that are the same on all meshes, and of those of each mesh. A search builds several
        programs on a mesh: of each textbook method, of all strategies, and with state gathered again. They differ in
        which strategies the groups have, and in which consumers are served when.
    """

    traced: Traced
    grouping: Grouping
    rules: Mapping[Any, Rule]
    repeats: Repeats = NO_REPEATS
    cache: Memo = field(default_factory=Memo, init=False)

    def __post_init__(self) -> None:
        if self.grouping.traced.copies is not None:
            self.traced = self.grouping.traced

    def tables(self, members: Sequence[tuple[int, ...]], regather: bool) -> Tables:
        """Returns the tables where these groups are tied."""
        node_of = [0] * len(self.grouping.groups)
        for node, groups in enumerate(members):
            for group in groups:
                node_of[group] = node
        tying = tuple(node_of), regather
        return self.cache.get_or_make(("tables", *tying), lambda: _tables(self, tuple(members), *tying))

    @cached_property
    def roles(self) -> dict[int, str]:
        """Input of the step, by value -> the role of the argument, or "constant"."""
        inputs, arguments = self.traced.graph.block.inputs, self.traced.arguments
        return dict.fromkeys(inputs, "constant") | {v: a.role for v, a in zip(inputs, arguments, strict=False)}

    @cached_property
    def uses(self) -> dict[int, list[Demand]]:
        """Value -> the demands on it."""
        found: dict[int, list[Demand]] = {}
        for demand in self.grouping.demands:
            found.setdefault(demand.value, []).append(demand)
        return found

    @cached_property
    def homes_of(self) -> dict[int, list[int]]:
        """Group -> the values that it makes."""
        found: dict[int, list[int]] = {}
        for value, home in self.grouping.homes.items():
            found.setdefault(home.group, []).append(value)
        return found

    @cached_property
    def examples(self) -> Mapping[int, Mapping[int, int]]:
        """As of `connected.examples`."""
        return connected.examples(self.traced, self.grouping)

    @cached_property
    def kinds(self) -> Mapping[int, str]:
        """As of `kinds.value_kinds`."""
        return kinds.value_kinds(self.traced, self.grouping)

    @cached_property
    def constraints(self) -> tuple[Op, ...]:
        """Operations of `ir.primitives.CONSTRAINT`, by which the user says where a value is placed."""
        return tuple([op for op in self.traced.graph.ops() if op.primitive.name == CONSTRAINT])

    @cached_property
    def traffic(self) -> dict[int, traffic.MemoryTraffic]:
        """Reads and writes of operations on one device, by op index, without those that compilers fuse away."""
        return traffic.memory_traffic(self.traced.graph.block, self.traced.graph.values, self.repeats.parts)

    @cached_property
    def min_bytes(self) -> float:
        """Bytes below which a value is left out of the memory constraint."""
        values = self.traced.graph.values
        return _SMALL * sum(self.count(v) * values[v].nbytes for v in self.traced.graph.block.inputs)

    def count(self, value: int) -> int:
        """Returns how many values of the whole step a value stands for."""
        return 1 if self.traced.copies is None else self.traced.copies.count_values(value)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """The lifetimes of values."""
        return Lifetimes(self.traced, self.grouping)

    @cached_property
    def live_ranges(self) -> tuple[Life, ...]:
        """Everything that takes memory worth counting."""
        found: list[Life] = []
        values, defined = self.traced.graph.values, self.grouping.definition_points
        inputs, end, small = set(self.traced.graph.block.inputs), self.grouping.points - 1, self.min_bytes
        for value, home in self.grouping.homes.items():
            group = self.grouping.groups[home.group]
            if values[value].nbytes < small:
                continue
            if value in inputs:
                found += self.lifetimes.find(value, 0, end, (), ())
            elif value in defined and (group.ops or group.kind in ("fixed", "leaf", "linear")):
                start, uses = defined[value], self.uses.get(value, ())
                last = max([d.position for d in uses], default=start)
                if group.kind == "linear" and not group.ops and uses and last > start:
                    last -= 1  # what is added to it is added in place
                if last - start > _FUSED or any(d.group != home.group for d in uses):
                    found += self.lifetimes.of_result(value, start, last, uses)
        return tuple(found)

    @cached_property
    def peak(self) -> float:
        """Bytes of all that lives at once at most, were nothing sharded: layouts leave an equal part on each device."""
        values, living = self.traced.graph.values, np.array(self.live_ranges, dtype=int).reshape(-1, 4)
        whole = np.array([float(values[value].nbytes * count) for value, count in living[:, [0, 3]].tolist()])
        return float(timeline(self.grouping.points + 1, living[:, 1], living[:, 2], whole).max(initial=0.0))

    @cached_property
    def fullest_point(self) -> int:
        """The program point of the derivative at which most bytes of intermediate values live, were nothing sharded.

        Of all points where no operation is marked as the derivative's.
        """
        values, inputs, defined = (
            self.traced.graph.values,
            set(self.traced.graph.block.inputs),
            self.grouping.definition_points,
        )
        made = [(v, uses) for v, uses in self.uses.items() if v in defined and v not in inputs]
        lives = [
            life
            for v, uses in made
            for life in self.lifetimes.of_result(v, defined[v], max(d.position for d in uses), uses)
        ]
        start, last = np.array([life[1:3] for life in lives], dtype=int).reshape(-1, 2).T
        sizes = np.array([float(values[life.value].nbytes * life.count) for life in lives])
        live = timeline(self.grouping.points + 1, start, last, sizes)
        marked = [self.grouping.positions[op.index] for op in self.traced.graph.ops() if _jax.derivative(op.source)]
        if marked:
            live[: min(marked)] = live[max(marked) + 1 :] = -1
        return int(np.argmax(live))


def live_bytes(traced: Traced, grouping: Grouping, space: Space, choice: Sequence[int]) -> dict[str, np.ndarray]:
    """Kind (`kinds.KINDS`) -> [points] the bytes per device that live at each program point of a solved program."""
    buffers, transfers = space.program.buffers, space.program.transfers
    assert buffers is not None
    own = kinds.value_kinds(traced, grouping)
    copies = kinds.copy_kinds(traced, own)
    of_buffer, sizes = [], np.zeros(len(buffers.size))
    for b, value in enumerate(space.buffer_values):
        if buffers.transfer[b] < 0:
            of_buffer.append(own.get(value, "activations"))
            sizes[b] = buffers.size[b][choice[buffers.owner[b]]]
        else:
            of_buffer.append(copies.get(value, "activations"))
            transfer = transfers[buffers.transfer[b]]
            if any(klass[choice[node]] == buffers.copy[b] for node, klass in transfer.consumers):
                sizes[b] = buffers.size[b][transfer.src_class[choice[transfer.src]]]
    named = np.array(of_buffer)

    def of(kind: str) -> np.ndarray:
        mine = np.flatnonzero(named == kind)
        return timeline(buffers.points, buffers.start[mine], buffers.end[mine], sizes[mine])

    return {kind: of(kind) for kind in kinds.KINDS}


def _tables(
    step: GroupedStep, members: tuple[tuple[int, ...], ...], node_of: tuple[int, ...], regather: bool
) -> Tables:
    """Returns the tables of one tying."""
    values, homes, copies = step.traced.graph.values, step.grouping.homes, kinds.copy_kinds(step.traced, step.kinds)
    late_from = step.fullest_point if regather else None
    found = _edges(step, node_of, late_from)
    rows: list[tuple[int, ...]] = []  # transfer or -1, type, start, end, value, how many of them
    types: dict[object, int] = {}
    for value, start, end, count in step.live_ranges:
        key = (node_of[homes[value].group], homes[value].dims, values[value].nbytes, step.kinds.get(value))
        rows.append((-1, types.setdefault(key, len(types)), start, end, value, count))
    for number, same in enumerate(found.values()):
        for value, demands in same if values[same[0][0]].nbytes >= step.min_bytes else ():
            kind = types.setdefault((number, copies.get(value)), len(types))
            for life in step.lifetimes.of_copy(value, demands):
                rows.append((number, kind, life.start, life.end, value, life.count))
    every = np.array(rows, dtype=np.int64).reshape(-1, 6)
    number, kind, start, end, value = np.repeat(every[:, :5], every[:, 5], axis=0).T
    points = needed_points(start, end, kind, _alike(step.grouping, node_of))
    start, end, live = compress_intervals(points, start, end)
    number, kind, start, end, value = (column[live] for column in (number, kind, start, end, value))
    alike = (kind * len(points) + start) * len(points) + end  # types are numbered transfer by transfer
    _, first, count = np.unique(alike, return_index=True, return_counts=True)
    spans = np.stack([value[first], start[first], end[first], count], axis=1)
    own, *moved = np.split(spans, np.searchsorted(number[first], np.arange(len(found))))
    kept = np.insert(own, 1, [node_of[homes[v].group] for v in own[:, 0].tolist()], axis=1)
    passages = [
        Passage(
            src=key[0],
            values=tuple([v for v, _ in same]),
            count=sum([step.count(v) for v, _ in same]),
            phase=key[3],
            demands=tuple(same[0][1]),
            spans=some,
        )
        for (key, same), some in zip(found.items(), moved, strict=True)
    ]
    return Tables(members, node_of, late_from, tuple(passages), kept, len(points), _latency_shares(step, found))


_Key = tuple[int, str | int, frozenset[tuple[int, str, Dims]], int]
_Edges = dict[_Key, list[tuple[int, Sequence[Demand]]]]


def _edges(step: GroupedStep, node_of: Sequence[int], late_from: int | None) -> _Edges:
    """Returns the values of each transfer, and the demands on each of them."""
    again = frozenset() if late_from is None else kinds.find_regathered(step.traced, step.grouping)
    positions, repeats = step.grouping.positions, step.repeats
    parts = {positions[i]: some for i, some in repeats.parts.items() if i in positions}

    def served(value: int, demands: Sequence[Demand]) -> Mapping[int, Sequence[Demand]]:
        """By phase, as `Passage.phase`, the uses of a value."""
        if value not in repeats.values and value not in again:
            return {0: demands}
        phases: dict[int, list[Demand]] = {}
        for demand in demands:
            once = int(late_from is not None and demand.position >= late_from)
            for phase in parts.get(demand.position, (0,)) if value in repeats.values else (once,):
                phases.setdefault(phase, []).append(demand)
        return phases

    found: _Edges = {}
    for value, demands in step.uses.items():
        home = step.grouping.homes[value]
        for phase, some in served(value, demands).items():
            wanting = frozenset([(node_of[d.group], d.likeness if d.group else "", d.dims) for d in some])
            key = (node_of[home.group], home.likeness if home.group else value, wanting, phase)
            found.setdefault(key, []).append((value, some))
    return found


def _latency_shares(step: GroupedStep, found: _Edges) -> dict[tuple[int, int], float]:
    """Gradients on their way to the updates are reduced together, and new state is gathered together."""
    leaves = set(step.grouping.leaves)
    updates = kinds.update_groups(step.traced, step.grouping) - leaves
    together: list[list[tuple[int, int]]] = [[], []]
    for key, same in found.items():
        groups = {d.group for d in same[0][1]}
        for kind, ends in enumerate((updates, leaves)):
            if groups <= ends:
                together[kind] += [(value, key[3]) for value, _ in same]
                break
    counts = [sum([step.count(value) for value, _ in items]) for items in together]
    return {item: 1.0 / count for items, count in zip(together, counts, strict=True) for item in items}


def _alike(grouping: Grouping, node_of: Sequence[int]) -> np.ndarray:
    """[points] a number for each program point, the same for identical operations."""
    out, names = [-1] * (grouping.points + 1), dict[tuple[int, int], int]()
    for group in grouping.groups[1:]:
        for place, op in enumerate(group.ops):
            out[grouping.positions[op]] = names.setdefault((node_of[group.index], place), len(names))
    return np.array(out, dtype=np.int64)


# A value used again by its own group within this many operations is fused away rather than kept.
_FUSED = 48
# Values below this share of the arguments' bytes are left out of the memory constraint.
_SMALL = 2e-6
