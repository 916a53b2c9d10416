"""Enumerates the strategies of every group on a mesh, prices them, and builds the integer program.

Strategies, their seconds and the bytes of buffers are those of docs/strategies.md. Of a linear group an axis may carry
a partial sum through. Every pair of layouts has one pair of coefficients, whatever the tensor (`sharding.costs`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.layout import Axes, Layout
from alpa_lite.ir.strategy import Buffers, Factor, StrategyGraph, Transfer
from alpa_lite.passes.costs.flops import working_dtype
from alpa_lite.passes.ir.folding import count_uses
from alpa_lite.passes.ir.primitives import CONSTRAINT, PRODUCTS
from alpa_lite.passes.ir.remembered import Memo
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.passes.sharding import space
from alpa_lite.passes.sharding.costs import Moves, divides, group_terms, moves, typical_group
from alpa_lite.passes.sharding.groups import Group, Grouping
from alpa_lite.passes.sharding.space import UNCONSTRAINED, Choices, Constraints, Node, Space, Strategy, layout_of
from alpa_lite.passes.sharding.tables import GroupedStep, Passage, Tables
from alpa_lite.plan.pins import Wish


def build(
    step: GroupedStep, cost: MeshCost, *, budget: float | None = None, constraints: Constraints = UNCONSTRAINED,
    regather: bool = False,
) -> Space:  # fmt: skip
    """Builds the integer program of a grouped step on the mesh of `cost`.

    Args:
      budget: bytes per device, or None.
      constraints: what a method and the user fix.
      regather: state that is used before and after the fullest point of the program is resharded twice instead of being
        kept, so that its whole copy does not live between.
    """
    regather = regather or (constraints.gathers_again and cost.cluster.platform not in MERGING)
    return _Builder(step, cost, constraints).space(budget, regather)


MERGING = frozenset({"cpu"})
"""Platforms whose compiler drops optimization barriers, and merges recomputed or regathered values with the first ones
(measured on CPU, JAX 0.10.2): a plan that counts on repeating either would not be true there."""


def classes(grouping: Grouping, constraints: Constraints = UNCONSTRAINED) -> Iterator[tuple[int, ...]]:
    """Tied groups; those that are constrained differently are told apart."""
    tables = constraints.layouts, constraints.whole_factors, constraints.limits
    for members in grouping.classes.values():
        parts: dict[object, list[int]] = {}
        for member in members:
            parts.setdefault(tuple([table.get(member) for table in tables]), []).append(member)
        yield from map(tuple, parts.values())


def _busiest(found: Sequence[Strategy]) -> list[Strategy]:
    """Returns the strategies that leave the fewest axes idle."""
    used = [sum(len(a) for a in s.axes) for s in found]
    return [s for s, n in zip(found, used, strict=True) if n == max(used)]


class _Move(NamedTuple):
    """A transfer of the program: its resharding, its passage, and the costs of its pairs."""

    resharding: space.Resharding
    transfer: Transfer
    passage: Passage
    costs: Moves


class _Builder:
    """Collects strategies, costs, transfers and buffers, class by class."""

    def __init__(self, step: GroupedStep, cost: MeshCost, constraints: Constraints) -> None:
        self.step, self.grouping, self.rules = step, step.grouping, step.rules
        self.values: tuple[Value, ...] = step.traced.graph.values
        self.cost, self.mesh = cost, cost.mesh
        self.several_axes = sum(size > 1 for size in cost.mesh.shape) > 1
        self.constraints, self.known = constraints, step.cache.get_or_make(("mesh", cost), Memo)

    def space(self, budget: float | None, regather: bool) -> Space:
        tables = self.step.tables(tuple(classes(self.grouping, self.constraints)), regather)
        choices = [self.choices(self.grouping.groups[members[0]]) for members in tables.members]
        nodes = [self.node(m, c) for m, c in zip(tables.members, choices, strict=True)]
        moves = list(self.transfers(tables, choices))
        buffers, held = self.buffers(tables, choices, moves)
        program = StrategyGraph(
            node_cost=tuple(node.seconds for node in nodes),
            transfers=tuple(move.transfer for move in moves),
            buffers=buffers,
            budget=budget,
            names=tuple(self.grouping.groups[node.group].name for node in nodes),
        )
        return Space(
            self.mesh, program, tuple(nodes), tables.node_of, tuple(move.resharding for move in moves),
            tables.late_from, held, tables.shares, self.step.traffic,
        )  # fmt: skip

    # -- strategies -----------------------------------------------------------------------------------------------

    def choices(self, group: Group) -> Choices:
        """Returns the strategies of a group that constraints leave as arrays, one for all groups that have the same.

        Products leave the fewest axes idle, since other strategies repeat the same work. On one axis, products of the
        whole step that hold no examples, such as those of small weights, may do so, as those of textbook methods may.
        """
        index, limit = group.index, self.constraints.limits.get(group.index)
        name = self.op(group).name if group.kind == "heavy" else ""
        if any(not isinstance(self.values[v].dtype, np.dtype) for v in self.step.homes_of.get(index, ())):
            found: Sequence[Strategy] = [Strategy(((),) * len(group.factors))]  # collectives do not take random keys
        elif name == CONSTRAINT:
            found = self.constrained_strategies(group)
        else:
            found = self.every_strategy(group)
            if index in self.constraints.layouts and not name:
                found = self.strategies_of_layouts(group, found, self.constraints.layouts[index])
            elif limit is not None:
                found = limit.select(group, found, self.mesh)
            fills = self.several_axes or not (examples := self.step.examples) or index in examples
            if name in PRODUCTS and (fills if limit is None else limit.fills):
                found = _busiest(found)
        some = len(group.factors), tuple(found)
        return self.known.get_or_make(("choices", *some), lambda: Choices(some[1], some[0], self.mesh))

    def factors(self, group: Group) -> tuple[Factor, ...]:
        """Returns the factors of a group; those that must not be cut are marked so."""
        whole = self.constraints.whole_factors.get(group.index, ())
        return tuple([Factor(f.size, "replicate") if i in whole else f for i, f in enumerate(group.factors)])

    def every_strategy(self, group: Group) -> Sequence[Strategy]:
        """Returns all strategies of a group: of a heavy one those that have a local form.

        Groups of one kind and equal factors share them unless an operation decides.
        """
        factors = self.factors(group)
        if group.kind != "heavy":
            return self.known.get_or_make(("free", group.kind, factors), lambda: self.free_strategies(group, factors))
        every = space.assignments(factors, self.mesh)
        return self.known.get_or_make(
            ("assigned", self.op(group).key, factors),
            lambda: tuple([Strategy(axes) for axes in every if self.form(group, axes) is not None]),
        )

    def strategies_of_layouts(
        self, group: Group, free: Sequence[Strategy], layouts: Sequence[Layout]
    ) -> Sequence[Strategy]:
        """Returns the strategies of a group that give its first value one of some layouts."""
        dims = self.grouping.homes[self.step.homes_of[group.index][0]].dims
        found = [s for s in free if layout_of(dims, s) in layouts]
        known = {layout_of(dims, s) for s in found}  # a user may also ask for axes in another order
        return found + [space.strategy_of(dims, la, len(group.factors)) for la in layouts if la not in known]

    def constrained_strategies(self, group: Group) -> list[Strategy]:
        """Returns the strategies that meet the user's constraint on a value; all where this mesh cannot meet it."""
        op = self.op(group)
        (value,) = op.results
        shape, dims = self.values[value].shape, self.grouping.homes[value].dims
        wish = Wish(op.params["dims"], op.params["why"])
        if op.index in self.constraints.ignored_constraints or space.fits(wish, shape, self.mesh) is not None:
            return self.free_strategies(group, self.factors(group))
        found = dict.fromkeys(space.completions(wish, shape, self.mesh))
        return [space.strategy_of(dims, layout, len(group.factors)) for layout in found]

    def free_strategies(self, group: Group, factors: Sequence[Factor]) -> list[Strategy]:
        """Returns the strategies of leaves, light and linear groups, which have no operation of their own to ask."""
        if group.kind == "linear":
            every = list(space.assignments(factors, self.mesh))
            axes = [a for a in self.mesh.axis_names if self.mesh.axis_size(a) > 1]
            sums = [some for size in range(len(axes) + 1) for some in itertools.combinations(axes, size)]
            return [Strategy(a, some) for some in sums for a in every if set(some).isdisjoint(itertools.chain(*a))]
        cube = sum(size > 1 for size in self.mesh.shape) > 2
        few = len(factors) <= 2
        found = [Strategy(axes) for axes in space.assignments(factors, self.mesh, orders=cube and few)]
        return _busiest(found) if cube and group.kind == "light" and not few else found

    def op(self, group: Group) -> Op:
        """Returns the operation of a heavy group."""
        return self.grouping.ops[group.ops[0]]

    def form(self, group: Group, axes: tuple[Axes, ...]) -> LocalForm | None:
        """Returns the local form of a heavy group's operation, if its operands are laid out as the rule says."""
        op = self.op(group)

        def plain_form() -> LocalForm | None:
            rule, plain = self.rules[op.key], Strategy(axes)
            form = local_form(op, rule, axes, self.values, self.mesh)
            operands = () if form is None else zip(op.operands, form.operands, rule.operands, strict=True)
            moved = any(not isinstance(a, Lit) and layout != layout_of(dims, plain) for a, layout, dims in operands)
            return None if moved else form

        return self.known.get_or_make(("form", op.key, axes), plain_form)

    def produced_layouts(self, value: int, choices: Choices) -> space.LayoutClasses:
        """Returns the layouts in which a value may be made, by the strategies of its group."""
        home = self.grouping.homes[value]
        group = self.grouping.groups[home.group]
        if group.kind != "heavy":
            return choices.layouts(home.dims, group.kind == "linear")
        op = self.op(group)
        number = op.results.index(value) if value in op.results else -1

        def made(strategy: Strategy) -> Layout:
            form = self.form(group, strategy.axes) if number >= 0 else None
            return form.results[number] if form else space.produced_layout(group, home.dims, strategy, self.mesh)

        own = (op.key, number) if number >= 0 else (home.group, home.slot)
        found = "made", own, choices
        return self.known.get_or_make(found, lambda: space.classify([*map(made, choices.strategies)], self.mesh))

    # -- nodes ----------------------------------------------------------------------------------------------------

    def node(self, members: tuple[int, ...], choices: Choices) -> Node:
        """Returns the node of some tied groups."""
        return self.known.get_or_make(("node", members, choices), lambda: self.price(members, choices))

    def price(self, members: tuple[int, ...], choices: Choices) -> Node:
        group = self.grouping.groups[members[0]]
        terms, collectives = np.zeros((2, 3, len(choices.strategies)))
        if group.kind == "fixed":
            terms[:, 0], collectives[:, 0] = self.opaque_costs(group)
        # A group that only says where a value lies takes no time.
        elif not (group.kind == "heavy" and self.op(group).name == CONSTRAINT):
            terms = group_terms(
                self.step, self.cost, group, choices, typical_group(self.grouping, members), self.produced_layouts
            )
            terms *= group.trips
            if group.kind == "heavy":
                collectives = np.array([self.collectives(self.form(group, s.axes)) for s in choices.strategies]).T
        count = self.grouping.count(members)
        return Node(group.index, group.trips, members, count, choices.strategies, terms, collectives)

    def opaque_costs(self, group: Group) -> np.ndarray:
        """[2, 3] as of `Computing.terms` and `collectives`, of the operations that no rule describes."""
        trips = {demand.op: demand.trips for demand in self.grouping.demands if demand.group == group.index}
        traced = self.step.traced
        terms, collectives = np.zeros((2, 3))
        for number in group.ops:
            op = self.grouping.ops[number]
            rule = self.rules[op.key]
            if rule.source == "opaque":
                runs, moved = trips.get(number, 1) * count_uses(traced, None, op), self.step.traffic[number]
                terms[1] += runs * self.cost.compute(0.0, moved.bytes, working_dtype(op, self.values))
                terms[2] += runs * moved.starts * self.cost.cluster.kernel_start
                collectives += runs * self.collectives(local_form(op, rule, (), self.values, self.mesh))
        return np.stack([terms, collectives])

    def collectives(self, form: LocalForm | None) -> np.ndarray:
        """[3] seconds, seconds of latency, and bytes of the collectives of a local form."""
        total = np.zeros(3)
        for c in form.collectives if form else ():
            alpha, beta = self.cost.coefficients(c.kind, c.axes, c.bytes)
            total += (alpha + beta * c.bytes, alpha, c.bytes)
        return total

    # -- transfers ------------------------------------------------------------------------------------------------

    def transfers(self, tables: Tables, choices: Sequence[Choices]) -> Iterator[_Move]:
        """Yields the transfers of the program that cost anything."""
        constraints, limits = self.constraints, self.constraints.moves
        for passage in tables.passages:
            first, count, trips = passage.values[0], passage.count, passage.demands[0].trips
            made = self.produced_layouts(first, choices[passage.src])
            nodes = [tables.node_of[demand.group] for demand in passage.demands]
            asked = [choices[n].layouts(d.dims, True) for n, d in zip(nodes, passage.demands, strict=True)]
            shape, nbytes = self.values[first].shape, self.values[first].nbytes
            still = len(made.layouts) == 1 and all(some.layouts == made.layouts for some in asked)
            if still and divides(shape, made.layouts[0], self.mesh):
                continue
            ends: dict[tuple[int, bytes], np.ndarray] = {}
            goals: dict[tuple[Layout, bool], int] = {}
            for node, demand, some in zip(nodes, passage.demands, asked, strict=True):
                uncut = limits.axes if limits and (demand.group, demand.value) in limits.whole_uses else frozenset()
                wanting = [(layout, not uncut.isdisjoint(layout.used_axes)) for layout in some.layouts]
                klass = np.array([goals.setdefault(goal, len(goals)) for goal in wanting])[some.klass]
                ends.setdefault((node, klass.tobytes()), klass)
            wanted = tuple([layout for layout, _ in goals])
            case = shape, nbytes, made.layouts, wanted
            known = self.known.get_or_make(("moves", *case), lambda case=case: moves(self.cost, *case))
            matrix = known.joint * tables.shares.get((first, passage.phase), 1.0) + known.alpha + known.beta * nbytes
            if limits or not constraints.ungathered_values.isdisjoint(passage.values):
                refused = [[constraints.refuses(passage.values, src, *goal) for goal in goals] for src in made.layouts]
                matrix = np.where(refused, math.inf, matrix)
            if matrix.any():
                move = space.Resharding(first, made.layouts, wanted, count, trips)
                consumers = tuple([(n, k) for (n, _), k in ends.items()])
                transfer = Transfer(passage.src, made.klass, consumers, matrix * (count * trips), f"value {first}")
                yield _Move(move, transfer, passage, known)

    # -- memory ---------------------------------------------------------------------------------------------------

    def buffers(
        self, tables: Tables, choices: Sequence[Choices], moves: Sequence[_Move]
    ) -> tuple[Buffers, tuple[int, ...]]:  # fmt: skip
        """Alike buffers that live equally long are one, of their bytes together."""
        rows: list[tuple[int, ...]] = []  # first point, last point, owner, transfer, copy, value
        size: list[np.ndarray] = []
        small = self.step.min_bytes
        for value, node, first, last, count in tables.live_values.tolist():
            made = self.produced_layouts(value, choices[node])
            rows.append((first, last, node, -1, -1, value))
            size.append((self.values[value].nbytes * count / made.blocks)[made.klass])
        for number, (move, _, passage, costs) in enumerate(moves):
            nbytes = self.values[move.value].nbytes
            spans = passage.spans.tolist()
            for q, parts, costly in costs.copies if spans else ():
                if nbytes / parts >= small:
                    rows += [(first, last, passage.src, number, q, value) for value, first, last, _ in spans]
                    size += [costly * (nbytes / parts * count) for *_, count in spans]
        start, end, owner, transfer, copy, held = np.array(rows, dtype=int).reshape(-1, 6).T
        buffers = Buffers(tables.points, start, end, owner, transfer, copy, tuple(size))
        return buffers, tuple(held.tolist())
