"""Enumerates the strategies of every group on a mesh, prices them, and builds the integer program.

A strategy assigns mesh axes to the factors of a group. For a heavy operation the assignments are those that have a
local form (`passes.local_forms`): a sharded sum factor leaves a partial sum. For a linear group an axis may also carry
a partial sum through. Leaves, ports and light groups may shard any of their dims.

Seconds of a strategy: the roofline of its local work, max(FLOPs / peak, bytes / bandwidth), times the trip count and
the number of alike groups; light operations fuse, so they pay the bytes that enter and leave their group. Seconds of a
transfer: those of the steps of `layout.reshard_steps`, each alpha + payload * beta, where payload is the tensor's bytes
over the shards that the layout leaves, so every pair of layouts has one pair of coefficients whatever the tensor.
Gradient reductions and the gathers of updated state are combined by the compiler, so all of them together pay latency
once.

Memory: every value that leaves its group lives from its definition to its last use, with the bytes of its block; state
lives throughout; a resharded copy lives from its first use to its last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alpa_lite.cost import MeshCost
from alpa_lite.graph import Lit, Traced, Value
from alpa_lite.layout import Axes, Layout, LogicalMesh
from alpa_lite.passes.grouping import Demand, Dims, Group, Grouping
from alpa_lite.passes.local_forms import LocalForm, local_form
from alpa_lite.passes.strategy_prices import combinable, divides, pairs, work
from alpa_lite.passes.strategy_space import Move, Node, Space, Strategy, assignments, layout_of
from alpa_lite.strategy import Buffers, Rule, StrategyGraph, Transfer

__all__ = [
    "Move",
    "Node",
    "Space",
    "Strategy",
    "assignments",
    "build",
    "combinable",
    "fullest_point",
    "layout_of",
    "state_kinds",
    "work",
]


def build(
    traced: Traced,
    grouping: Grouping,
    rules: Mapping[object, Rule],
    cost: MeshCost,
    *,
    budget: float | None = None,
    allowed: Mapping[int, Sequence[Layout]] | None = None,
    regather: bool = False,
) -> Space:
    """Builds the integer program of a grouped step on the mesh of `cost`.

    Args:
      budget: bytes per device, or None.
      allowed: group -> the layouts that it may have, for leaves that a method fixes.
      regather: state that is used before and after the fullest point of the program is resharded twice instead of being
        kept, so that its whole copy does not live between.
    """
    builder = _Builder(traced, grouping, rules, cost, allowed or {}, regather)
    return builder.space(budget)


def state_kinds(traced: Traced, grouping: Grouping) -> dict[int, str]:
    """Argument number -> "params" or "optimizer", for state arguments.

    State that influences an output which is not state (the loss) is a parameter; what only influences the next state
    (moments, counters) belongs to the optimizer.
    """
    block = traced.graph.block
    updated = {out for out, _ in traced.state}
    needed = {a for i, a in enumerate(block.outputs) if i not in updated and not isinstance(a, Lit)}
    for op in reversed(block.ops):
        if any(v in needed for v in op.results):
            needed.update(a for a in op.operands if not isinstance(a, Lit))
    arguments = {argument for _, argument in traced.state}
    return {i: "params" if block.inputs[i] in needed else "optimizer" for i in arguments}


def fullest_point(traced: Traced, grouping: Grouping) -> int:
    """The program point at which most bytes of intermediate values live, were nothing sharded."""
    values = traced.graph.values
    change = np.zeros(grouping.points + 2)
    last: dict[int, int] = {}
    for demand in grouping.demands:
        last[demand.value] = max(last.get(demand.value, 0), demand.position)
    inputs = set(traced.graph.block.inputs)
    for value, end in last.items():
        if value not in inputs and value in grouping.defined:
            change[grouping.defined[value]] += values[value].nbytes
            change[end + 1] -= values[value].nbytes
    return int(np.argmax(np.cumsum(change)))


def _busiest(found: list[Strategy]) -> list[Strategy]:
    """The strategies that leave the fewest axes idle."""
    used = [sum(len(a) for a in s.axes) for s in found]
    return [s for s, n in zip(found, used, strict=True) if n == max(used)]


class _Builder:
    """Collects strategies, costs, transfers and buffers, class by class."""

    def __init__(self, traced, grouping: Grouping, rules, cost: MeshCost, allowed, regather: bool):
        self.traced = traced
        self.values: tuple[Value, ...] = traced.graph.values
        self.grouping = grouping
        self.rules = rules
        self.cost = cost
        self.mesh: LogicalMesh = cost.mesh
        self.allowed = allowed
        self.forms: dict[object, LocalForm | None] = {}
        self.part_counts: dict[Layout, int] = {}
        self.escaping: dict[int, bool] = {}
        self.late_from = fullest_point(traced, grouping) if regather else None
        self.leaf_groups = set(grouping.leaves)
        self.arriving: dict[int, list[Demand]] = {}
        self.uses: dict[int, list[Demand]] = {}
        for demand in grouping.demands:
            self.arriving.setdefault(demand.group, []).append(demand)
            self.uses.setdefault(demand.value, []).append(demand)
        self.inputs = set(traced.graph.block.inputs)
        self.homes_of: dict[int, list[int]] = {}
        for value, home in grouping.homes.items():
            self.homes_of.setdefault(home.group, []).append(value)

    def space(self, budget: float | None) -> Space:
        nodes: list[Node] = []
        node_of = [0] * len(self.grouping.groups)
        for members in self.classes():
            node = self.node(members)
            for member in members:
                node_of[member] = len(nodes)
            nodes.append(node)
        moves, transfers = self.transfers(nodes, node_of)
        buffers, held = self.buffers(nodes, node_of, moves)
        program = StrategyGraph(
            node_cost=tuple((n.compute + n.communication) * len(n.members) for n in nodes),
            transfers=tuple(transfers),
            buffers=buffers,
            budget=budget,
            names=tuple(self.grouping.groups[n.group].name for n in nodes),
        )
        return Space(self.mesh, program, tuple(nodes), tuple(node_of), tuple(moves), self.late_from, held, self.shares)

    def classes(self) -> Iterator[tuple[int, ...]]:
        """Tied groups; those that a method constrains differently are told apart."""
        for members in self.grouping.classes.values():
            parts: dict[object, list[int]] = {}
            for member in members:
                limit = self.allowed.get(member)
                parts.setdefault(None if limit is None else tuple(limit), []).append(member)
            yield from (tuple(part) for part in parts.values())

    # -- nodes ----------------------------------------------------------------------------------------------------

    def node(self, members: tuple[int, ...]) -> Node:
        group = self.grouping.groups[members[0]]
        strategies = self.strategies(group)
        compute, communication = np.zeros(len(strategies)), np.zeros(len(strategies))
        if group.kind != "fixed":
            for i, strategy in enumerate(strategies):
                seconds, sent = self.price(group, strategy)
                compute[i], communication[i] = seconds * group.trips, sent * group.trips
        return Node(group.index, members, tuple(strategies), compute, communication)

    def strategies(self, group: Group) -> list[Strategy]:
        if group.kind == "fixed":
            return [Strategy(())]
        if any(not isinstance(self.values[v].dtype, np.dtype) for v in self.homes_of.get(group.index, ())):
            return [Strategy(((),) * len(group.factors))]  # collectives do not take random keys
        if group.kind == "heavy":
            found = [
                Strategy(axes) for axes in assignments(group.factors, self.mesh) if self.form(group, axes) is not None
            ]
            return self.without_waste(group, found)
        if group.kind == "linear":
            return list(self.linear_strategies(group))
        cube = sum(size > 1 for size in self.mesh.shape) > 2
        orders = cube and len(group.factors) <= 2
        found = [Strategy(axes) for axes in assignments(group.factors, self.mesh, orders=orders)]
        if cube and group.kind == "light" and len(group.factors) > 2:
            found = _busiest(found)
        limit = self.allowed.get(group.index)
        if limit is not None:
            value = self.homes_of[group.index][0]
            dims = self.grouping.homes[value].dims
            found = [s for s in found if layout_of(dims, s) in limit]
        return found

    def linear_strategies(self, group: Group) -> Iterator[Strategy]:
        axes = [a for a in self.mesh.axis_names if self.mesh.axis_size(a) > 1]
        for size in range(len(axes) + 1):
            for partial in itertools.combinations(axes, size):
                for assigned in assignments(group.factors, self.mesh):
                    if not any(a in partial for axes_ in assigned for a in axes_):
                        yield Strategy(assigned, partial)

    def without_waste(self, group: Group, found: list[Strategy]) -> list[Strategy]:
        """Drops strategies of products that leave axes idle, where others use every axis: they repeat the same work."""
        (number,) = group.ops
        if self.grouping.ops[number].name not in ("dot_general", "conv_general_dilated"):
            return found
        return _busiest(found)

    def form(self, group: Group, axes: tuple[Axes, ...]) -> LocalForm | None:
        """The local form of a heavy group's operation, if its operands are laid out as the rule says."""
        op = self.grouping.ops[group.ops[0]]
        key = (op.key, axes)
        if key not in self.forms:
            rule = self.rules[op.key]
            form = local_form(op, rule, axes, self.values, self.mesh)
            if form is not None:
                plain = Strategy(axes)
                for k, atom in enumerate(op.operands):
                    if not isinstance(atom, Lit) and form.operands[k] != layout_of(rule.operands[k], plain):
                        form = None
                        break
            self.forms[key] = form
        return self.forms[key]

    def produced(self, value: int, strategy: Strategy) -> Layout:
        """The layout in which a value is made, given its group's strategy."""
        home = self.grouping.homes[value]
        group = self.grouping.groups[home.group]
        if group.kind == "linear":
            return layout_of(home.dims, strategy, strategy.partial)
        if group.kind == "heavy":
            form = self.form(group, strategy.axes)
            assert form is not None
            op = self.grouping.ops[group.ops[0]]
            if value in op.results:
                return form.results[op.results.index(value)]
            sums = {a for f, axes in zip(group.factors, strategy.axes, strict=True) if f.kind == "sum" for a in axes}
            partial = tuple(a for a in self.mesh.axis_names if a in sums)
            return layout_of(home.dims, strategy, partial)
        return layout_of(home.dims, strategy)

    def wanted(self, demand: Demand, strategy: Strategy) -> Layout:
        """The layout in which a group wants a value."""
        return layout_of(demand.dims, strategy, strategy.partial)

    def price(self, group: Group, strategy: Strategy) -> tuple[float, float]:
        """Seconds of (compute, communication inside operations) of one group."""
        moved, flops, sent, dtype = 0.0, 0.0, 0.0, None
        for demand in self.arriving.get(group.index, ()):
            layout = self.wanted(demand, strategy)
            moved += self.block_bytes(demand.value, layout) if demand.op >= 0 else 0.0
        for value in self.homes_of.get(group.index, ()):
            if value in self.grouping.defined and group.ops and self.escapes(value, group.index):
                moved += self.block_bytes(value, self.produced(value, strategy))
            if value in self.inputs:
                # Arguments are read once, and the batch is brought in: a smaller block is the better one.
                moved += self.block_bytes(value, self.produced(value, strategy))
        parts = math.prod(self.mesh.product(a) for a in strategy.axes)
        for number in group.ops:
            op = self.grouping.ops[number]
            dtype = self.values[op.results[0]].dtype if op.results else dtype
            flops += work(op, self.rules[op.key], self.values) / parts
        if group.kind == "heavy":
            form = self.form(group, strategy.axes)
            assert form is not None
            for c in form.collectives:
                alpha, beta = self.cost.coefficients(c.kind, c.axes)
                sent += alpha + beta * c.bytes
        efficiency = self.efficiency(group, strategy) if group.kind == "heavy" else None
        return self.cost.compute(flops, moved, dtype, efficiency) if moved or flops else 0.0, sent

    def efficiency(self, group: Group, strategy: Strategy) -> float | None:
        """The share of the peak that a product reaches at its local sizes; None for what is no product."""
        op = self.grouping.ops[group.ops[0]]
        if op.name not in ("dot_general", "conv_general_dilated"):
            return None
        left, right = ({f for dim in dims for f in dim} for dims in self.rules[op.key].operands[:2])
        sizes = {"m": 1, "n": 1, "k": 1, "batch": 1}
        for f, (factor, axes) in enumerate(zip(group.factors, strategy.axes, strict=True)):
            role = "k" if factor.kind == "sum" else "batch" if f in left and f in right else "m" if f in left else "n"
            sizes[role] *= max(1, factor.size // self.mesh.product(axes))
        return self.cost.matmul_efficiency(**sizes)

    def escapes(self, value: int, group: int) -> bool:
        """Whether another group uses the value."""
        found = self.escaping.get(value)
        if found is None:
            found = self.escaping[value] = any(d.group != group for d in self.uses.get(value, ()))
        return found

    def block_bytes(self, value: int, layout: Layout) -> float:
        return self.values[value].nbytes / self.parts(layout)

    def parts(self, layout: Layout) -> int:
        """Into how many blocks a layout cuts a tensor."""
        found = self.part_counts.get(layout)
        if found is None:
            found = self.part_counts[layout] = math.prod(self.mesh.product(a) for a in layout.dims)
        return found

    # -- transfers ------------------------------------------------------------------------------------------------

    def transfers(self, nodes: list[Node], node_of: list[int]) -> tuple[list[Move], list[Transfer]]:
        table: dict[tuple[Any, ...], list[int]] = {}
        example: dict[tuple[Any, ...], list[Demand]] = {}
        homes = self.grouping.homes
        for value, demands in self.uses.items():
            home = homes[value]
            phases: dict[int, list[Demand]] = {}
            for demand in demands:
                late = self.late_from is not None and demand.position >= self.late_from
                split = late and self.is_state_leaf(value)
                phases.setdefault(int(split), []).append(demand)
            for phase, some in phases.items():
                wanting = frozenset((node_of[d.group], d.slot if d.group else 0, d.dims) for d in some)
                key = (node_of[home.group], home.slot if home.group else value, wanting, phase)
                table.setdefault(key, []).append(value)
                example.setdefault(key, some)
        self.shares = self.latency_shares(table, example)
        moves, transfers = [], []
        asked: dict[tuple[int, Dims], list[Layout]] = {}
        for key, members in table.items():
            some = example[key]
            src = node_of[homes[members[0]].group]
            made = self.classify([self.produced(members[0], s) for s in nodes[src].strategies])
            ends: dict[tuple[int, bytes], np.ndarray] = {}
            layouts: dict[Layout, int] = {}
            for demand in some:
                node = nodes[node_of[demand.group]]
                named = (node_of[demand.group], demand.dims)
                if named not in asked:
                    asked[named] = [self.wanted(demand, s) for s in node.strategies]
                klass = np.array([layouts.setdefault(layout, len(layouts)) for layout in asked[named]])
                ends.setdefault((node_of[demand.group], klass.tobytes()), klass)
            wanted = tuple(layouts)
            trips = some[0].trips
            matrix = self.matrix(self.values[members[0]], made[0], wanted, self.shares.get((members[0], key[3]), 1.0))
            if not matrix.any():
                continue
            moves.append(Move(members[0], src, made[0], wanted, len(members), trips, key[3]))
            transfers.append(
                Transfer(
                    src, made[1], tuple((n, k) for (n, _), k in ends.items()), matrix * (len(members) * trips),
                    f"value {members[0]}",
                )
            )  # fmt: skip
        self.members = table
        return moves, transfers

    def latency_shares(
        self, table: Mapping[Any, list[int]], example: Mapping[Any, list[Demand]]
    ) -> dict[tuple[int, int], float]:
        """Gradients on their way to the updates are reduced together, and new state is gathered together."""
        updates = self.update_groups()
        together: list[list[tuple[int, int]]] = [[], []]
        for key, members in table.items():
            groups = {d.group for d in example[key]}
            for kind, ends in enumerate((updates, self.leaf_groups)):
                if groups <= ends:
                    together[kind] += [(value, key[3]) for value in members]
                    break
        return {item: 1.0 / len(items) for items in together for item in items}

    def matrix(self, value: Value, produced: tuple[Layout, ...], wanted: tuple[Layout, ...], latency: float):
        joint, alpha, beta = pairs(self.cost, produced, wanted)
        out = joint * latency + alpha + beta * value.nbytes
        for j, layout in enumerate(wanted):
            if not divides(value.shape, layout, self.mesh):
                out[:, j] = math.inf
        return out

    def classify(self, layouts: list[Layout]) -> tuple[tuple[Layout, ...], np.ndarray]:
        seen: dict[Layout, int] = {}
        classes = np.array([seen.setdefault(layout, len(seen)) for layout in layouts])
        return tuple(seen), classes

    def update_groups(self) -> set[int]:
        """Groups that compute new state."""
        outputs = self.traced.graph.block.outputs
        homes = self.grouping.homes
        found = set()
        for number, _ in self.traced.state:
            atom = outputs[number]
            if not isinstance(atom, Lit) and atom in homes:
                found.add(homes[atom].group)
        return found - self.leaf_groups - {0}

    def is_state_leaf(self, value: int) -> bool:
        return self.grouping.homes[value].group in self.leaf_groups and value in self.traced.graph.block.inputs

    # -- memory ---------------------------------------------------------------------------------------------------

    def last_use(self, value: int) -> int:
        return max((d.position for d in self.uses.get(value, ())), default=self.grouping.defined.get(value, 0))

    def kept(self) -> Iterator[tuple[int, int, int]]:
        """(value, first point, last point) of everything that takes memory."""
        end = self.grouping.points - 1
        for value, home in self.grouping.homes.items():
            if value in self.inputs:
                yield value, 0, end
                continue
            start = self.grouping.defined.get(value)
            if start is None:
                continue
            last = self.last_use(value)
            group = self.grouping.groups[home.group]
            elsewhere = any(d.group != home.group for d in self.uses.get(value, ()))
            if (elsewhere or last - start > _FUSED) and (group.ops or group.kind == "leaf" or home.group == 0):
                yield value, start, last

    def buffers(self, nodes: list[Node], node_of: list[int], moves: list[Move]) -> tuple[Buffers, tuple[int, ...]]:
        held: list[int] = []
        starts, ends, owners, transfer, copy, klass, size = [], [], [], [], [], [], []
        tables: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        small = _SMALL * sum(self.values[v].nbytes for v in self.traced.graph.block.inputs)
        for value, start, end in self.kept():
            if self.values[value].nbytes < small:
                continue
            home = self.grouping.homes[value]
            node = node_of[home.group]
            key = (node, home.dims, self.values[value].nbytes)
            if key not in tables:
                layouts, classes = self.classify([self.produced(value, s) for s in nodes[node].strategies])
                tables[key] = classes, np.array([self.block_bytes(value, la) for la in layouts])
            held.append(value)
            starts.append(start)
            ends.append(end)
            owners.append(node)
            transfer.append(-1)
            copy.append(-1)
            klass.append(tables[key][0])
            size.append(tables[key][1])
        for number, (move, members) in enumerate(zip(moves, self.moved(moves), strict=True)):
            if self.values[move.value].nbytes < small:
                continue
            costly = np.add.reduce(pairs(self.cost, move.produced, move.wanted)) > 0
            spans = [self.span(value, move.phase) for value in members]
            for q, wanted in enumerate(move.wanted):
                bytes_ = self.block_bytes(move.value, wanted)
                if bytes_ < small:
                    continue
                sizes = np.where(costly[:, q], bytes_, 0.0)
                if not sizes.any():
                    continue
                held += members
                starts += [first for first, _ in spans]
                ends += [last for _, last in spans]
                owners += [move.src] * len(members)
                transfer += [number] * len(members)
                copy += [q] * len(members)
                klass += [_EMPTY] * len(members)
                size += [sizes] * len(members)
        buffers = Buffers(
            self.grouping.points, np.array(starts, int), np.array(ends, int), np.array(owners, int),
            np.array(transfer, int), np.array(copy, int), tuple(klass), tuple(size),
        )  # fmt: skip
        return buffers, tuple(held)

    def moved(self, moves: list[Move]) -> Iterator[list[int]]:
        """The values of each move, in the order of `moves`."""
        by_first = {(members[0], key[3]): members for key, members in self.members.items()}
        for move in moves:
            yield by_first[move.value, move.phase]

    def span(self, value: int, phase: int) -> tuple[int, int]:
        """The first and the last use of a value in a phase."""
        points = [d.position for d in self.uses[value] if self.phase(d, value) == phase]
        return min(points), max(points)

    def phase(self, demand: Demand, value: int) -> int:
        late = self.late_from is not None and demand.position >= self.late_from
        return int(late and self.is_state_leaf(value))


# A value used again by its own group within so many operations is fused away rather than kept.
_FUSED = 48
# Values below this share of the arguments' bytes are left out of the memory constraint.
_SMALL = 2e-6
_EMPTY = np.zeros(0, int)
