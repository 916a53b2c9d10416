"""Enumerates the strategies of every group on a mesh, prices them, and builds the integer program.

A strategy assigns mesh axes to the factors of a group. For a heavy operation the assignments are those that have a
local form (`local.forms`): a sharded sum factor leaves a partial sum. For a linear group an axis may also carry
a partial sum through. Leaves, ports and light groups may shard any of their dims.

Seconds of a strategy: those of its local work (`sharding.computing`), times the trip count and the number of identical
groups. Seconds of a transfer: those of the steps of `layout.reshard_steps`, each alpha + payload * beta, where payload
is the tensor's bytes over the shards that the layout leaves, so every pair of layouts has one pair of coefficients
whatever the tensor. Gradient reductions and the gathers of updated state are combined by the compiler, so all of them
together pay latency once.

Memory: every value that leaves its group lives from its definition to its last use, with the bytes of its block; state
lives throughout; a resharded copy lives from its first use to its last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from alpa_lite.cost import MeshCost
from alpa_lite.graph import Lit, Traced, Value
from alpa_lite.layout import Axes, Layout, LogicalMesh
from alpa_lite.passes.ir.primitives import CONSTRAINT, PRODUCTS, working_dtype
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.passes.sharding.bans import NO_BANS, Bans
from alpa_lite.passes.sharding.choices import Choices, Reached, classify
from alpa_lite.passes.sharding.computing import Computing
from alpa_lite.passes.sharding.fulfilling import completions, fits
from alpa_lite.passes.sharding.groups import Demand, Group, Grouping
from alpa_lite.passes.sharding.limits import NO_LIMITS, Limits
from alpa_lite.passes.sharding.mesh_tables import Moves
from alpa_lite.passes.sharding.prices import divides, gathers
from alpa_lite.passes.sharding.space import Node, Resharding, Space, Strategy, assignments, layout_of, strategy_of
from alpa_lite.passes.sharding.tables import Passage, Shared, Tables, smallest
from alpa_lite.pins import Wish
from alpa_lite.strategy import Buffers, Factor, Rule, StrategyGraph, Transfer


def build(
    traced: Traced,
    grouping: Grouping,
    rules: Mapping[object, Rule],
    cost: MeshCost,
    *,
    budget: float | None = None,
    allowed: Limits = NO_LIMITS,
    bans: Bans = NO_BANS,
    unheeded: Collection[int] = (),
    regather: bool = False,
    shared: Shared | None = None,
) -> Space:
    """Builds the integer program of a grouped step on the mesh of `cost`.

    Args:
      budget: bytes per device, or None.
      allowed: what a method fixes.
      bans: what must not be cut or gathered.
      unheeded: operations of `ir.primitives.CONSTRAINT` that may be ignored.
      regather: state that is used before and after the fullest point of the program is resharded twice instead of being
        kept, so that its whole copy does not live between.
      shared: what the programs of several meshes have in common, `Shared(traced, grouping)`, to make it once.
    """
    regather = regather or (allowed.gathers_again and cost.cluster.platform not in MERGING)
    return _Builder(rules, cost, allowed, bans, unheeded, shared or Shared(traced, grouping)).space(budget, regather)


MERGING = frozenset({"cpu"})
"""Platforms whose compiler drops optimization barriers, and merges recomputed or regathered values with the first ones
(measured on CPU, JAX 0.10.2): a plan that counts on repeating either would not be true there."""


def classes(grouping: Grouping, allowed: Limits = NO_LIMITS, bans: Bans = NO_BANS) -> Iterator[tuple[int, ...]]:
    """Tied groups; those that a method constrains differently are told apart."""
    layouts, operations = allowed.layouts, allowed.operations
    if not layouts and not bans.factors and operations is None:
        yield from grouping.classes.values()
        return
    for members in grouping.classes.values():
        if len(members) == 1:
            yield members
            continue
        parts: dict[object, list[int]] = {}
        for member in members:
            limit = layouts.get(member)
            fixed = operations and operations.key(grouping.groups[member])
            key = None if limit is None else tuple(limit), bans.factors.get(member), fixed
            parts.setdefault(key, []).append(member)
        yield from (tuple(part) for part in parts.values())


def _busiest(found: Sequence[Strategy]) -> list[Strategy]:
    """The strategies that leave the fewest axes idle."""
    used = [sum(len(a) for a in s.axes) for s in found]
    return [s for s, n in zip(found, used, strict=True) if n == max(used)]


class _Builder:
    """Collects strategies, costs, transfers and buffers, class by class."""

    def __init__(
        self,
        rules: Mapping[object, Rule],
        cost: MeshCost,
        allowed: Limits,
        bans: Bans,
        unheeded: Collection[int],
        shared: Shared,
    ):
        self.traced, self.grouping, self.shared = shared.traced, shared.grouping, shared
        self.values: tuple[Value, ...] = self.traced.graph.values
        self.rules = rules
        self.cost = cost
        self.mesh: LogicalMesh = cost.mesh
        self.allowed, self.operations = allowed, allowed.operations
        self.bans = bans
        self.unheeded = frozenset(unheeded)
        self.known = shared.on(cost)
        self.computing = Computing(rules, cost, shared)

    def space(self, budget: float | None, regather: bool) -> Space:
        tables = self.shared.of(tuple(classes(self.grouping, self.allowed, self.bans)), regather)
        choices = [self.choices(self.grouping.groups[members[0]]) for members in tables.members]
        nodes = [self.node(m, c) for m, c in zip(tables.members, choices, strict=True)]
        moves, transfers, passing = self.transfers(tables, choices)
        buffers, held = self.buffers(tables, choices, moves, passing)
        program = StrategyGraph(
            node_cost=tuple(seconds for _, seconds in nodes),
            transfers=tuple(transfers),
            buffers=buffers,
            budget=budget,
            names=tuple(self.grouping.groups[n.group].name for n, _ in nodes),
        )
        shares = {(value, p.phase): p.share for p in tables.passages if p.share < 1.0 for value in p.values}
        return Space(
            self.mesh, program, tuple(node for node, _ in nodes), tables.node_of, tuple(moves), tables.late_from, held,
            shares, self.shared.moved,
        )  # fmt: skip

    # -- strategies -----------------------------------------------------------------------------------------------

    def choices(self, group: Group) -> Choices:
        """The strategies of a group. Groups of one kind and equal factors share them unless an operation decides."""
        factors = len(group.factors)
        if group.kind == "fixed":
            return self.known.choices([Strategy(())], 0)
        if any(not isinstance(self.values[v].dtype, np.dtype) for v in self.shared.homes_of.get(group.index, ())):
            # Collectives do not take random keys.
            return self.known.choices([Strategy(((),) * factors)], factors)
        if group.kind == "heavy":
            return self.known.choices(self.heavy_strategies(group), factors)
        key = (group.kind, self.factors(group))
        free = self.known.free.get(key)
        if free is None:
            free = self.known.free[key] = self.known.choices(self.free_strategies(group), factors)
        limit = self.allowed.layouts.get(group.index)
        if limit is None:
            kept = None if self.operations is None else self.operations.kept(group, free.strategies)
            return free if kept is None else self.known.choices(kept, factors)
        dims = self.grouping.homes[self.shared.homes_of[group.index][0]].dims
        found = [s for s in free.strategies if layout_of(dims, s) in limit]
        known = {layout_of(dims, s) for s in found}  # a user may also ask for axes in another order
        found += [strategy_of(dims, layout, factors) for layout in limit if layout not in known]
        return self.known.choices(found, factors)

    def factors(self, group: Group) -> tuple[Factor, ...]:
        """The factors of a group; those that must not be cut are marked so."""
        banned = self.bans.factors.get(group.index)
        if not banned:
            return group.factors
        return tuple(Factor(f.size, "replicate") if i in banned else f for i, f in enumerate(group.factors))

    def heavy_strategies(self, group: Group) -> Sequence[Strategy]:
        """The assignments that have a local form; for products, those that leave the fewest axes idle.

        The others repeat the same work. On one axis, products of the whole step that hold no examples, such as those of
        small weights, may do so, as those of textbook methods may. A user's constraint on a value leaves the strategies
        that meet it.
        """
        if self.grouping.ops[group.ops[0]].name == CONSTRAINT:
            return self.constrained_strategies(group)
        op, factors = self.grouping.ops[group.ops[0]], self.factors(group)
        found = self.known.assigned.get((op.key, factors))
        if found is None:
            every = assignments(factors, self.mesh)
            found = tuple([Strategy(a) for a in every if self.form(group, a) is not None])
            self.known.assigned[op.key, factors] = found
        if op.name not in PRODUCTS:
            return found if self.operations is None else self.operations.kept(group, found)
        if self.operations is None:
            return _busiest(found) if self.fills(group) else found
        found = self.operations.kept(group, found)
        return _busiest(found) if self.operations.fills(group) else found

    def fills(self, group: Group) -> bool:
        """Returns whether only the strategies of a product with the fewest idle axes count, where nothing is fixed."""
        if sum(size > 1 for size in self.mesh.shape) > 1:
            return True
        examples = self.shared.facts.examples
        return group.index in examples or not examples

    def constrained_strategies(self, group: Group) -> list[Strategy]:
        """Returns the strategies that meet the user's constraint on a value; all where this mesh cannot meet it."""
        op = self.grouping.ops[group.ops[0]]
        (value,) = op.results
        shape, dims = self.values[value].shape, self.grouping.homes[value].dims
        wish = Wish(op.params["dims"], op.params["why"])
        if op.index in self.unheeded or fits(wish, shape, self.mesh) is not None:
            return self.free_strategies(group)
        found = dict.fromkeys(completions(wish, shape, self.mesh))
        return [strategy_of(dims, layout, len(group.factors)) for layout in found]

    def free_strategies(self, group: Group) -> list[Strategy]:
        """The strategies of leaves, light and linear groups, which have no operation of their own to ask."""
        if group.kind == "linear":
            return list(self.linear_strategies(self.factors(group)))
        cube = sum(size > 1 for size in self.mesh.shape) > 2
        orders = cube and len(group.factors) <= 2
        found = [Strategy(axes) for axes in assignments(self.factors(group), self.mesh, orders=orders)]
        return _busiest(found) if cube and group.kind == "light" and len(group.factors) > 2 else found

    def linear_strategies(self, factors: tuple[Factor, ...]) -> Iterator[Strategy]:
        axes = [a for a in self.mesh.axis_names if self.mesh.axis_size(a) > 1]
        every = list(assignments(factors, self.mesh))
        for size in range(len(axes) + 1):
            for partial in itertools.combinations(axes, size):
                for assigned in every:
                    if not any(a in partial for axes_ in assigned for a in axes_):
                        yield Strategy(assigned, partial)

    def form(self, group: Group, axes: tuple[Axes, ...]) -> LocalForm | None:
        """The local form of a heavy group's operation, if its operands are laid out as the rule says."""
        op = self.grouping.ops[group.ops[0]]
        key = (op.key, axes)
        forms = self.known.forms
        if key not in forms:
            rule = self.rules[op.key]
            form = local_form(op, rule, axes, self.values, self.mesh)
            if form is not None:
                plain = Strategy(axes)
                for k, atom in enumerate(op.operands):
                    if not isinstance(atom, Lit) and form.operands[k] != layout_of(rule.operands[k], plain):
                        form = None
                        break
            forms[key] = form
        return forms[key]

    def produced(self, value: int, choices: Choices) -> Reached:
        """The layouts in which a value may be made, by the strategies of its group."""
        home = self.grouping.homes[value]
        group = self.grouping.groups[home.group]
        if group.kind != "heavy":
            return choices.layouts(home.dims, group.kind == "linear")
        op = self.grouping.ops[group.ops[0]]
        own = (op.key, op.results.index(value)) if value in op.results else (home.group, home.slot)
        key = own, choices
        found = self.known.made.get(key)
        if found is None:
            each = [self.made(value, group, s) for s in choices.strategies]
            found = self.known.made[key] = classify(each, self.mesh)
        return found

    def made(self, value: int, group: Group, strategy: Strategy) -> Layout:
        """The layout in which a heavy group makes a value."""
        op = self.grouping.ops[group.ops[0]]
        if value in op.results:
            form = self.form(group, strategy.axes)
            assert form is not None
            return form.results[op.results.index(value)]
        sums = {a for f, axes in zip(group.factors, strategy.axes, strict=True) if f.kind == "sum" for a in axes}
        dims = self.grouping.homes[value].dims
        used = {a for dim in dims for f in dim for a in strategy.axes[f]}
        return layout_of(dims, strategy, tuple(a for a in self.mesh.axis_names if a in sums - used))

    # -- nodes ----------------------------------------------------------------------------------------------------

    def node(self, members: tuple[int, ...], choices: Choices) -> tuple[Node, np.ndarray]:
        """A node, and [strategies] its seconds."""
        found = self.known.nodes.get((members, choices))
        if found is None:
            node = self.priced(members, choices)
            seconds = (node.compute + node.communication) * len(members)
            found = self.known.nodes[members, choices] = node, seconds
        return found

    def priced(self, members: tuple[int, ...], choices: Choices) -> Node:
        group = self.grouping.groups[members[0]]
        terms, communication = np.zeros((3, len(choices.strategies))), np.zeros(len(choices.strategies))
        if group.kind == "fixed":
            terms[:, 0], communication[0] = self.opaque(group)
        elif not self.is_constraint(group):
            terms = self.computing.terms(group, choices, members[len(members) // 2], self.produced) * group.trips
            communication = self.communication(group, choices) * group.trips
        return Node(group.index, members, choices.strategies, terms, communication)

    def opaque(self, group: Group) -> tuple[np.ndarray, float]:
        """[3] seconds as those of `Computing.terms`, and of collectives, of the operations that no rule describes."""
        trips = {demand.op: demand.trips for demand in self.grouping.demands if demand.group == group.index}
        terms, communication = np.zeros(3), 0.0
        for number in group.ops:
            op = self.grouping.ops[number]
            rule = self.rules[op.key]
            if rule.source == "opaque":
                runs, moved = trips.get(number, 1), self.shared.moved[number]
                terms[1] += runs * self.cost.compute(0.0, moved.bytes, working_dtype(op, self.values))
                terms[2] += runs * moved.starts * self.cost.cluster.kernel_start
                form = local_form(op, rule, (), self.values, self.mesh)
                for c in form.collectives if form else ():
                    alpha, beta = self.cost.coefficients(c.kind, c.axes, c.bytes)
                    communication += runs * (alpha + beta * c.bytes)
        return terms, communication

    def is_constraint(self, group: Group) -> bool:
        """Whether a group only says where a value lies, which takes no time."""
        return group.kind == "heavy" and self.grouping.ops[group.ops[0]].name == CONSTRAINT

    def communication(self, group: Group, choices: Choices) -> np.ndarray:
        """[strategies] seconds of the collectives that a heavy operation issues itself."""
        sent = np.zeros(len(choices.strategies))
        if group.kind == "heavy":
            for i, strategy in enumerate(choices.strategies):
                form = self.form(group, strategy.axes)
                assert form is not None
                for c in form.collectives:
                    alpha, beta = self.cost.coefficients(c.kind, c.axes, c.bytes)
                    sent[i] += alpha + beta * c.bytes
        return sent

    # -- transfers ------------------------------------------------------------------------------------------------

    def transfers(
        self, tables: Tables, choices: Sequence[Choices]
    ) -> tuple[list[Resharding], list[Transfer], list[tuple[Passage, Moves]]]:
        """Returns the transfers of the program that cost anything, with the resharding and the passage of each."""
        moves, transfers, passing = [], [], []
        for passage in tables.passages:
            first = passage.values[0]
            made = self.produced(first, choices[passage.src])
            nodes = [tables.node_of[demand.group] for demand in passage.demands]
            asked = [choices[n].layouts(d.dims, True) for n, d in zip(nodes, passage.demands, strict=True)]
            shape, nbytes = self.values[first].shape, self.values[first].nbytes
            still = len(made.layouts) == 1 and all(some.layouts == made.layouts for some in asked)
            if still and divides(shape, made.layouts[0], self.mesh):
                continue
            ends: dict[tuple[int, bytes], np.ndarray] = {}
            goals: dict[tuple[Layout, bool], int] = {}
            for node, demand, some in zip(nodes, passage.demands, asked, strict=True):
                before = len(goals)
                numbers = [goals.setdefault((la, self.follows(demand, la)), len(goals)) for la in some.layouts]
                klass = np.array(numbers)[some.klass] if before else some.klass
                ends.setdefault((node, klass.tobytes()), klass)
            wanted = tuple([layout for layout, _ in goals])
            trips, known = passage.demands[0].trips, self.known.moves(shape, nbytes, made.layouts, wanted)
            matrix = known.joint * passage.share + known.alpha + known.beta * nbytes
            if not self.bans.gathers.isdisjoint(passage.values):
                matrix = np.where(gathers(made.layouts, wanted), math.inf, matrix)
            refused = self.operations and self.operations.refused(passage.values, made.layouts, [*goals])
            if refused is not None:
                matrix = np.where(refused, math.inf, matrix)
            if not matrix.any():
                continue
            count = len(passage.values)
            moves.append(
                Resharding(
                    value=first, src=passage.src, produced=made.layouts, wanted=wanted, count=count, trips=trips,
                    phase=passage.phase,
                )
            )  # fmt: skip
            consumers = tuple([(n, k) for (n, _), k in ends.items()])
            transfers.append(Transfer(passage.src, made.klass, consumers, matrix * (count * trips), f"value {first}"))
            passing.append((passage, known))
        return moves, transfers, passing

    def follows(self, demand: Demand, layout: Layout) -> bool:
        return self.operations is not None and self.operations.follows(demand, layout)

    # -- memory ---------------------------------------------------------------------------------------------------

    def buffers(
        self, tables: Tables, choices: Sequence[Choices], moves: Sequence[Resharding],
        passing: Sequence[tuple[Passage, Moves]],
    ) -> tuple[Buffers, tuple[int, ...]]:  # fmt: skip
        """Alike buffers that live equally long are one, of their bytes together."""
        own, small = tables.kept, smallest(self.traced)
        start, end = [kept.start for kept in own], [kept.end for kept in own]
        owner, held = [kept.node for kept in own], [kept.value for kept in own]
        transfer, copy = [-1] * len(own), [-1] * len(own)
        klass: list[np.ndarray] = []
        size: list[np.ndarray] = []
        for kept in own:
            made = self.produced(kept.value, choices[kept.node])
            klass.append(made.klass)
            size.append(self.values[kept.value].nbytes * kept.count / made.blocks)
        for number, (move, (passage, known)) in enumerate(zip(moves, passing, strict=True)):
            if not passage.holders:
                continue
            nbytes = self.values[move.value].nbytes
            copies = [(q, nbytes / parts, costly) for q, parts, costly in known.copies if nbytes / parts >= small]
            first, last, counts = passage.spans.T.tolist()
            rows = len(copies) * len(counts)
            start += first * len(copies)
            end += last * len(copies)
            held += passage.holders * len(copies)
            owner += [move.src] * rows
            transfer += [number] * rows
            copy += [q for q, _, _ in copies for _ in counts]
            klass += [_EMPTY] * rows
            size += [costly * (block * count) for _, block, costly in copies for count in counts]
        buffers = Buffers(
            points=tables.points, start=np.array(start, dtype=int), end=np.array(end, dtype=int),
            owner=np.array(owner, dtype=int), transfer=np.array(transfer, dtype=int), copy=np.array(copy, dtype=int),
            klass=tuple(klass), size=tuple(size),
        )  # fmt: skip
        return buffers, tuple(held)


_EMPTY = np.zeros(0, int)
