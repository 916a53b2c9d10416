"""Nodes, edges and lifetimes of buffers that the integer programs of all meshes share.

Only the layouts and their costs depend on the mesh. A search over mesh shapes makes these tables once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.graph import Traced
from alpa_lite.passes.ir import moving
from alpa_lite.passes.sharding import kinds
from alpa_lite.passes.sharding.facts import Facts
from alpa_lite.passes.sharding.groups import Demand, Dims, Grouping
from alpa_lite.passes.sharding.mesh_tables import MeshTables
from alpa_lite.passes.sharding.points import compressed, needed_points, tally
from alpa_lite.passes.sharding.repeats import NO_REPEATS, Repeats
from alpa_lite.passes.sharding.solver.problem import timeline
from alpa_lite.passes.sharding.space import Space


@dataclass(frozen=True, eq=False)
class Passage:
    """Alike values on their way from one node to the same consumers: a transfer, before any mesh is known.

    Attributes:
      src: the node that makes them. values: all of them.
      phase: the part that lays them out for itself (`sharding.repeats`), or 1 for late uses of state that are served
        again; else 0.
      demands: those on the first of the values.
      spans: [n, 4] a value, its first and its last point, and the number of values of equal span.
      share: the share of the latency that it pays, since the compiler combines it with others.
    """

    src: int
    values: tuple[int, ...]
    phase: int
    demands: tuple[Demand, ...]
    spans: np.ndarray
    share: float


@dataclass(frozen=True, eq=False)
class Kept:
    """Alike values that take memory where they are made: `count` of them live from `start` to `end`."""

    value: int
    node: int
    start: int
    end: int
    count: int


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one tying of groups to nodes.

    Attributes:
      members: the groups of each node. node_of: group -> node.
      late_from: program point from which state is served again; None if it is not.
      passages: every transfer. kept: every buffer of what stays where it is made.
      points: how many program points are left; intervals are in their numbers.
    """

    members: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]
    late_from: int | None
    passages: tuple[Passage, ...]
    kept: tuple[Kept, ...]
    points: int


@dataclass(eq=False)
class Shared:
    """Tables by tying, kept for the other meshes of a search, and which values are used by whom.

    Attributes:
      repeats: the parts that the program runs in.
      works: a cache of `sharding.computing` for properties of groups that are the same on all meshes.
    """

    traced: Traced
    grouping: Grouping
    repeats: Repeats = NO_REPEATS
    tables: dict[tuple[tuple[int, ...], bool], Tables] = field(default_factory=dict)
    uses: dict[int, list[Demand]] = field(default_factory=dict)
    homes_of: dict[int, list[int]] = field(default_factory=dict)
    meshes: dict[MeshCost, MeshTables] = field(default_factory=dict)
    works: dict[tuple[int, int], Any] = field(default_factory=dict)

    @functools.cached_property
    def facts(self) -> Facts:
        """The facts of the step that methods use."""
        return Facts(self.traced, self.grouping)

    @functools.cached_property
    def moved(self) -> dict[int, moving.Moved]:
        """Reads and writes of operations on one device, by op index, without those that compilers fuse away."""
        return moving.moved(self.traced.graph.block, self.traced.graph.values)

    @functools.cached_property
    def living(self) -> tuple[tuple[int, int, int], ...]:
        """(value, first point, last point) of everything that takes memory worth counting."""
        found: list[tuple[int, int, int]] = []
        values, defined = self.traced.graph.values, self.grouping.defined
        inputs, end, small = set(self.traced.graph.block.inputs), self.grouping.points - 1, smallest(self.traced)
        for value, home in self.grouping.homes.items():
            group = self.grouping.groups[home.group]
            if values[value].nbytes < small:
                continue
            if value in inputs:
                found.append((value, 0, end))
            elif value in defined and (group.ops or group.kind in ("fixed", "leaf", "linear")):
                start, uses = defined[value], self.uses.get(value, ())
                last = max([d.position for d in uses], default=start)
                if group.kind == "linear" and not group.ops and uses and last > start:
                    last -= 1  # what is added to it is added in place
                if last - start > _FUSED or any(d.group != home.group for d in uses):
                    found.append((value, start, last))
        return tuple(found)

    @functools.cached_property
    def peak(self) -> float:
        """Bytes of all that lives at once at most, were nothing sharded."""
        values, living = self.traced.graph.values, np.array(self.living, dtype=int).reshape(-1, 3)
        whole = np.array([float(values[value].nbytes) for value in living[:, 0]])
        return float(timeline(self.grouping.points + 1, living[:, 1], living[:, 2], whole).max(initial=0.0))

    @functools.cached_property
    def fullest(self) -> int:
        """The program point of the derivative at which most bytes of intermediate values live, were nothing sharded.

        Of all points where no operation is marked as the derivative's.
        """
        values, inputs, defined = self.traced.graph.values, set(self.traced.graph.block.inputs), self.grouping.defined
        made = [v for v in self.uses if v in defined and v not in inputs]
        last = np.array([max(demand.position for demand in self.uses[v]) for v in made], dtype=int)
        sizes = np.array([float(values[v].nbytes) for v in made])
        live = timeline(self.grouping.points + 1, np.array([defined[v] for v in made], dtype=int), last, sizes)
        marked = [self.grouping.positions[op.index] for op in self.traced.graph.ops() if _jax.derivative(op.source)]
        if marked:
            live[: min(marked)] = live[max(marked) + 1 :] = -1
        return int(np.argmax(live))

    def __post_init__(self) -> None:
        for demand in self.grouping.demands:
            self.uses.setdefault(demand.value, []).append(demand)
        for value, home in self.grouping.homes.items():
            self.homes_of.setdefault(home.group, []).append(value)

    def on(self, cost: MeshCost) -> MeshTables:
        """Returns the tables that the programs on one mesh share."""
        if cost not in self.meshes:
            self.meshes[cost] = MeshTables(cost)
        return self.meshes[cost]

    def of(self, members: Sequence[tuple[int, ...]], regather: bool) -> Tables:
        """The tables where these groups are tied."""
        node_of = [0] * len(self.grouping.groups)
        for node, groups in enumerate(members):
            for group in groups:
                node_of[group] = node
        key = tuple(node_of), regather
        if key not in self.tables:
            self.tables[key] = _Maker(self, tuple(members), key[0], regather).tables()
        return self.tables[key]


def live_bytes(traced: Traced, grouping: Grouping, space: Space, choice: Sequence[int]) -> dict[str, np.ndarray]:
    """Kind (`kinds.KINDS`) -> [points] the bytes per device that live at each program point of a solved program."""
    buffers, transfers = space.program.buffers, space.program.transfers
    assert buffers is not None
    own, copies = kinds.value_kinds(traced, grouping)
    of_buffer, sizes = [], np.zeros(len(buffers.size))
    for b, value in enumerate(space.buffer_values):
        if buffers.transfer[b] < 0:
            of_buffer.append(own.get(value, "activations"))
            sizes[b] = buffers.size[b][buffers.klass[b][choice[buffers.owner[b]]]]
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


def in_equal_parts(shared: Shared, devices: int) -> float:
    """Bytes per device that no layouts on any mesh of so many devices have less of: an equal part of all that lives."""
    return shared.peak / devices


def smallest(traced: Traced) -> float:
    """Bytes below which a value is left out of the memory constraint."""
    return _SMALL * sum(traced.graph.values[v].nbytes for v in traced.graph.block.inputs)


class _Maker:
    """Makes the tables of one tying."""

    def __init__(self, shared: Shared, members: tuple[tuple[int, ...], ...], node_of: tuple[int, ...], regather: bool):
        self.traced, self.grouping, self.uses = shared.traced, shared.grouping, shared.uses
        self.values, self.living = self.traced.graph.values, shared.living
        self.members, self.node_of = members, node_of
        self.leaf_groups = set(self.grouping.leaves)
        self.late_from = shared.fullest if regather else None
        self.served_again = kinds.served_again(self.traced, self.grouping) if regather else frozenset()
        self.repeated, positions = shared.repeats.values, self.grouping.positions
        self.parts = {positions[i]: parts for i, parts in shared.repeats.parts.items() if i in positions}
        self.kinds, self.copies = shared.facts.kinds
        self.small = smallest(self.traced)

    def tables(self) -> Tables:
        found = self.edges()
        shares = self.latency_shares(found)
        rows: list[tuple[int, int, int, int, int]] = []  # transfer or -1, type, start, end, value
        types: dict[object, int] = {}
        homes, node_of, values = self.grouping.homes, self.node_of, self.values
        for value, start, end in self.living:
            home = homes[value]
            key = (node_of[home.group], home.dims, values[value].nbytes, self.kinds.get(value))
            rows.append((-1, types.setdefault(key, len(types)), start, end, value))
        for number, members in enumerate(found.values()):
            for value, demands in members if values[members[0][0]].nbytes >= self.small else ():
                places = [d.position for d in demands]
                kind = types.setdefault((number, self.copies.get(value)), len(types))
                rows.append((number, kind, min(places), max(places), value))
        number, kind, start, end, value = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        points = needed_points(start, end, kind, self.alike())
        start, end, live = compressed(points, start, end)
        number, kind, start, end, value = (column[live] for column in (number, kind, start, end, value))
        first, count = tally(number, kind, start, end)
        spans = np.stack([value[first], start[first], end[first], count], axis=1)
        own, *copies = np.split(spans, np.searchsorted(number[first], np.arange(len(found))))
        kept = tuple([Kept(v, node_of[homes[v].group], *times) for v, *times in own.tolist()])
        passages = [
            Passage(
                src=key[0], values=tuple([v for v, _ in members]), phase=key[3], demands=tuple(members[0][1]),
                spans=some, share=shares.get((members[0][0], key[3]), 1.0),
            )
            for (key, members), some in zip(found.items(), copies, strict=True)
        ]  # fmt: skip
        return Tables(self.members, node_of, self.late_from, tuple(passages), kept, len(points))

    def edges(self) -> _Edges:
        """The values of each transfer, and the demands on each of them."""
        found: _Edges = {}
        node_of, homes = self.node_of, self.grouping.homes
        for value, demands in self.uses.items():
            home = homes[value]
            for phase, some in self.served(value, demands).items():
                wanting = frozenset([(node_of[d.group], d.likeness if d.group else "", d.dims) for d in some])
                key = (node_of[home.group], home.likeness if home.group else value, wanting, phase)
                found.setdefault(key, []).append((value, some))
        return found

    def latency_shares(self, found: _Edges) -> dict[tuple[int, int], float]:
        """Gradients on their way to the updates are reduced together, and new state is gathered together."""
        updates = kinds.update_groups(self.traced, self.grouping) - self.leaf_groups
        together: list[list[tuple[int, int]]] = [[], []]
        for key, members in found.items():
            groups = {d.group for d in members[0][1]}
            for kind, ends in enumerate((updates, self.leaf_groups)):
                if groups <= ends:
                    together[kind] += [(value, key[3]) for value, _ in members]
                    break
        return {item: 1.0 / len(items) for items in together for item in items}

    def served(self, value: int, demands: Sequence[Demand]) -> Mapping[int, Sequence[Demand]]:
        """By phase, as `Passage.phase`, the uses of a value."""
        repeated, late = value in self.repeated, self.late_from if value in self.served_again else None
        if not repeated and late is None:
            return {0: demands}
        found: dict[int, list[Demand]] = {}
        for demand in demands:
            once = int(not repeated and late is not None and demand.position >= late)
            for phase in self.parts.get(demand.position, (0,)) if repeated else (once,):
                found.setdefault(phase, []).append(demand)
        return found

    def alike(self) -> np.ndarray:
        """[points] a number for each program point, the same for identical operations."""
        out, positions = [-1] * (self.grouping.points + 1), self.grouping.positions
        names: dict[tuple[int, int], int] = {}
        for group in self.grouping.groups[1:]:
            node = self.node_of[group.index]
            for place, op in enumerate(group.ops):
                out[positions[op]] = names.setdefault((node, place), len(names))
        return np.array(out, dtype=np.int64)


_Key = tuple[int, str | int, frozenset[tuple[int, str, Dims]], int]
_Edges = dict[_Key, list[tuple[int, Sequence[Demand]]]]
# A value used again by its own group within so many operations is fused away rather than kept.
_FUSED = 48
# Values below this share of the arguments' bytes are left out of the memory constraint.
_SMALL = 2e-6
