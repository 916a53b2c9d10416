"""Lower bounds of a sharding problem without an optimiser: ascent of the dual of its linear relaxation.

Costs may be moved between an edge and its two ends without changing any choice's seconds: with messages u[p], v[q],

    node[s] += sum_e u_e[class of s],      edge_e[p, q] -= u_e[p] + v_e[q].

However they are moved, sum_i min node_i + sum_e min edge_e is a lower bound, and the best such bound is the linear
relaxation. One node at a time collects all that its edges hold and hands it on along an order of the nodes, forward,
then backward; the bound never falls (sequential reweighted message passing: Kolmogorov, 2015). A sweep costs a few
passes over the matrices, so that problems far too large for a simplex method take seconds, and whatever then lies
further above the bound than a known choice can be forbidden.

A transfer with several consumers is split between them: any non-negative parts that sum to its cost give a lower bound.
What a consumer's part has left over after a sweep is divided again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from alpa_lite.passes.sharding.solver.problem import Problem, used


@dataclass(eq=False)
class _Part:
    """An edge between two nodes: cost [P, Q], and its transpose in its own memory; messages to either end."""

    nodes: tuple[int, int]
    classes: tuple[_Classes, _Classes]
    costs: tuple[np.ndarray, np.ndarray]
    messages: list[np.ndarray]
    edge: int
    columns: np.ndarray

    def set_cost(self, cost: np.ndarray) -> None:
        """Replace the cost."""
        self.costs = (np.ascontiguousarray(cost), np.ascontiguousarray(cost.T))

    def rest(self) -> np.ndarray:
        """[P, Q] what the edge holds still."""
        return self.costs[0] - self.messages[0][:, None] - self.messages[1][None, :]


class _Classes:
    """The classes of a node's strategies, all of them in use: spreads a vector over strategies, or takes minima."""

    def __init__(self, klass: np.ndarray) -> None:
        self.klass = klass
        self.order = np.argsort(klass, kind="stable")
        self.starts = np.searchsorted(klass[self.order], np.arange(klass.max() + 1))
        self.plain = len(self.starts) == len(klass)
        self.same = self.plain and bool((klass == np.arange(len(klass))).all())  # every strategy is a class of its own

    def spread(self, values: np.ndarray) -> np.ndarray:
        """The value of each strategy's class."""
        return values if self.same else values[self.klass]

    def least(self, values: np.ndarray) -> np.ndarray:
        """The minimum over each class."""
        if self.same:
            return values
        return values[self.order] if self.plain else np.minimum.reduceat(values[self.order], self.starts)


class Ascent:
    """Messages that make a lower bound of a problem, improved by `sweep`.

    Every class of the problem must be in use, and every strategy have an allowed partner: see `restrict.consistent`.

    Attributes:
      bound: seconds, valid for every choice.
    """

    def __init__(self, problem: Problem) -> None:
        self.parts: list[_Part] = []
        for e in range(len(problem.edges)):
            self.parts.extend(_split(problem, e))
        self.at: list[list[tuple[_Part, int]]] = [[] for _ in problem.nodes]
        for part in self.parts:
            for side in (0, 1):
                self.at[part.nodes[side]].append((part, side))
        self.groups: dict[int, list[_Part]] = {e: [] for e in range(len(problem.edges))}
        for part in self.parts:
            self.groups[part.edge].append(part)
        self.reprice(problem)

    def reprice(self, problem: Problem) -> None:
        """Begin the bound again for a problem that differs in costs alone, with the messages as they are."""
        self.problem, self.bound = problem, -np.inf
        self.cost = [node.cost.copy() for node in problem.nodes]
        self.loops: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.shares: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}  # of `_share`: what does not change
        for e, edge in enumerate(problem.edges):
            own = [klass for node, klass in edge.consumers if node == edge.src]
            share = edge.cost / len(edge.consumers)
            self.loops[e] = [(klass, share) for klass in own]
            for klass in own:
                self.cost[edge.src] += share[edge.src_class, klass]
            for part in self.groups[e]:
                part.set_cost(share[:, part.columns])
        for e, edge in enumerate(problem.edges):
            if len(edge.consumers) > 1:
                wants = np.zeros(edge.cost.shape[1])
                for part in self.groups[e]:
                    wants[part.columns] += 1
                for klass, _ in self.loops[e]:
                    wants += np.bincount(klass, minlength=len(wants)) > 0
                finite = np.isfinite(edge.cost)
                self.shares[e] = np.maximum(wants, 1), None if finite.all() else finite
                self._share(e)

    def sweep(self, times: int) -> None:
        """Pass the messages forward and backward so many times."""
        order = range(len(self.cost))
        for _ in range(times):
            for i in order:
                self._visit(i, forward=True)
            for i in reversed(order):
                self._visit(i, forward=False)
            for e, edge in enumerate(self.problem.edges):
                if len(edge.consumers) > 1:
                    self._share(e)
        total = sum(float(self._potential(i).min()) for i in order)
        self.bound = max(self.bound, total + sum(float(part.rest().min()) for part in self.parts))

    def _visit(self, i: int, forward: bool) -> None:
        """Collect what the edges of node i hold, and hand it on to those that lead on."""
        potential = self.cost[i].copy()
        ahead = []
        for part, side in self.at[i]:
            message = (part.costs[side] - part.messages[1 - side]).min(1)
            part.messages[side] = message
            potential += part.classes[side].spread(message)
            if (part.nodes[1 - side] > i) == forward:
                ahead.append((part, side))
        weight = 1.0 / max(len(ahead), len(self.at[i]) - len(ahead), 1)
        for part, side in ahead:
            part.messages[side] = part.messages[side] - weight * part.classes[side].least(potential)

    def _potential(self, i: int) -> np.ndarray:
        potential = self.cost[i].copy()
        for part, side in self.at[i]:
            potential += part.classes[side].spread(part.messages[side])
        return potential

    def _share(self, e: int) -> None:
        """Divide a shared transfer among its consumers again: each has what it needs, and an equal part of the rest.

        A consumer needs what its messages have taken away; one that is the source, what its best strategies pay.
        """
        edge, parts, loops = self.problem.edges[e], self.groups[e], self.loops[e]
        needs = [np.maximum(part.messages[0][:, None] + part.messages[1][None, :], 0.0) for part in parts]
        if loops:
            potential = self._potential(edge.src)
            spare = (potential - potential.min()) / len(loops)
        total, (wants, finite) = np.zeros(edge.cost.shape), self.shares[e]
        for part, need in zip(parts, needs, strict=True):
            total[:, part.columns] += need
        loop_needs = []
        for klass, cost in loops:
            pays = np.maximum(cost[edge.src_class, klass] - spare, 0.0)
            self.cost[edge.src] -= cost[edge.src_class, klass]
            need = np.zeros(edge.cost.shape)
            np.maximum.at(need, (edge.src_class, klass), pays)
            loop_needs.append(need)
            total += need
        fit = np.ones(edge.cost.shape)
        np.divide(edge.cost, total, out=fit, where=total > edge.cost)
        if finite is None:
            more = (edge.cost - fit * total) / wants
        else:
            more = np.full(edge.cost.shape, np.inf)
            np.subtract(edge.cost, fit * total, out=more, where=finite)
            more /= wants
        for part, need in zip(parts, needs, strict=True):
            part.set_cost(need * fit[:, part.columns] + more[:, part.columns])
        self.loops[e] = [(klass, need * fit + more) for (klass, _), need in zip(loops, loop_needs, strict=True)]
        for klass, cost in self.loops[e]:
            self.cost[edge.src] += cost[edge.src_class, klass]

    def choice(self) -> np.ndarray:
        """A choice that the messages suggest: node by node, given the nodes before."""
        choice = np.zeros(len(self.cost), dtype=int)
        for i in range(len(self.cost)):
            potential = self.cost[i].copy()
            for part, side in self.at[i]:
                j, mine = part.nodes[1 - side], part.classes[side].klass
                if j < i:
                    potential += part.costs[side][:, part.classes[1 - side].klass[choice[j]]][mine]
                else:
                    potential += part.messages[side][mine]
            choice[i] = potential.argmin()
        return choice

    def slack(self) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
        """How far above the bound a choice must be that takes a strategy, or a pair of an edge with one consumer.

        Returns:
          [S] for each node, and [P, Q] by edge. The seconds of a choice are at least `bound` plus each of its slacks.
        """
        own = []
        for i in range(len(self.cost)):
            potential = self._potential(i)
            own.append(potential - potential.min())
        slack = [values.copy() for values in own]
        pairs = {}
        links: dict[tuple[int, int], int] = {}
        for part in self.parts:
            links[part.nodes] = links.get(part.nodes, 0) + 1
        for part in self.parts:
            rest = part.rest()
            rest = rest - rest.min()
            (i, j), (a, b) = part.nodes, part.classes
            several = links[i, j] + links.get((j, i), 0)  # a neighbour's own slack counts once, whatever its edges
            slack[i] += (rest + b.least(own[j]) / several).min(1)[a.klass]
            slack[j] += (rest + (a.least(own[i]) / several)[:, None]).min(0)[b.klass]
            if len(self.problem.edges[part.edge].consumers) == 1:
                pairs[part.edge] = rest + a.least(own[i])[:, None] + b.least(own[j])[None, :]
        return slack, pairs


def _split(problem: Problem, e: int) -> Iterator[_Part]:
    """A part for each consumer of an edge; a consumer that is the source itself is a cost of the node."""
    edge = problem.edges[e]
    for node, klass in edge.consumers:
        if node != edge.src:
            columns, column = used(klass, edge.cost.shape[1])
            ends = (_Classes(edge.src_class), _Classes(column))
            messages = [np.zeros(len(edge.cost)), np.zeros(len(columns))]
            yield _Part((edge.src, node), ends, (edge.cost, edge.cost.T), messages, e, columns)
