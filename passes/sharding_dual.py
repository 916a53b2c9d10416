"""Lower bounds of a sharding problem without an optimiser: ascent of the dual of its linear relaxation.

Costs may be moved between an edge and its two ends without changing any choice's seconds: with messages u[p], v[q],

    node[s] += sum_e u_e[class of s],      edge_e[p, q] -= u_e[p] + v_e[q].

However they are moved, sum_i min node_i + sum_e min edge_e is a lower bound, and the best such bound is the linear
relaxation. One node at a time collects all that its edges hold and hands it on along an order of the nodes, forward,
then backward; the bound never falls (sequential reweighted message passing: Kolmogorov, 2015). A sweep costs a few
passes over the matrices, so that problems far too large for a simplex method take seconds, and whatever then lies
further above the bound than a known choice can be forbidden.

A transfer with several consumers is split between them: any non-negative parts that sum to its cost give a lower bound.
What a consumer's part has left over after a sweep is divided anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from alpa_lite.passes.sharding_problem import Problem


@dataclass(eq=False)
class _Part:
    """An edge between two nodes: cost [P, Q], and its transpose in its own memory; messages to either end."""

    nodes: tuple[int, int]
    classes: tuple[_Classes, _Classes]
    costs: tuple[np.ndarray, np.ndarray]
    messages: list[np.ndarray]
    edge: int
    columns: np.ndarray

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

    def least(self, values: np.ndarray) -> np.ndarray:
        """The minimum over each class."""
        return values[self.order] if self.plain else np.minimum.reduceat(values[self.order], self.starts)


class Ascent:
    """Messages that make a lower bound of a problem, improved by `sweep`.

    Every class of the problem must be in use and every strategy have an allowed partner, as `prune` leaves it.

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
        self.shared = [group for group in self._groups() if len(group) > 1]
        self.reprice(problem)

    def reprice(self, problem: Problem) -> None:
        """Begin the bound anew for a problem that differs in costs alone, with the messages as they are."""
        self.problem, self.bound = problem, -np.inf
        self.cost = [node.cost for node in problem.nodes]
        shares = {}
        for e, edge in enumerate(problem.edges):
            if len(edge.consumers) == 1:
                shares[e] = edge.cost
                continue
            wants = np.zeros(edge.cost.shape[1])
            for _, klass in edge.consumers:
                wants[np.unique(klass)] += 1
            shares[e] = edge.cost / np.maximum(wants, 1)
            for node, klass in edge.consumers:
                if node == edge.src:
                    self.cost[node] = self.cost[node] + shares[e][edge.src_class, klass]
        for part in self.parts:
            cost = np.ascontiguousarray(shares[part.edge][:, part.columns])
            part.costs = (cost, np.ascontiguousarray(cost.T))

    def _groups(self) -> list[list[_Part]]:
        groups: dict[int, list[_Part]] = {}
        for part in self.parts:
            groups.setdefault(part.edge, []).append(part)
        return list(groups.values())

    def sweep(self, times: int) -> None:
        """Pass the messages forward and backward so many times."""
        order = range(len(self.cost))
        for _ in range(times):
            for i in order:
                self._visit(i, forward=True)
            for i in reversed(order):
                self._visit(i, forward=False)
            for group in self.shared:
                self._share(group)
        total = sum(float(self._potential(i).min()) for i in order)
        self.bound = max(self.bound, total + sum(float(part.rest().min()) for part in self.parts))

    def _visit(self, i: int, forward: bool) -> None:
        """Collect what the edges of node i hold, and hand it on to those that lead on."""
        potential = self.cost[i].copy()
        ahead = []
        for part, side in self.at[i]:
            message = (part.costs[side] - part.messages[1 - side]).min(1)
            part.messages[side] = message
            potential += message[part.classes[side].klass]
            if (part.nodes[1 - side] > i) == forward:
                ahead.append((part, side))
        weight = 1.0 / max(len(ahead), len(self.at[i]) - len(ahead), 1)
        for part, side in ahead:
            part.messages[side] = part.messages[side] - weight * part.classes[side].least(potential)

    def _potential(self, i: int) -> np.ndarray:
        potential = self.cost[i].copy()
        for part, side in self.at[i]:
            potential += part.messages[side][part.classes[side].klass]
        return potential

    def _share(self, group: list[_Part]) -> None:
        """Divide what is left of a shared transfer among its consumers anew."""
        edge = self.problem.edges[group[0].edge]
        left, wants = edge.cost.copy(), np.zeros(edge.cost.shape[1])
        kept = []
        for part in group:
            needed = np.maximum(part.messages[0][:, None] + part.messages[1][None, :], 0.0)
            needed = np.minimum(needed, part.costs[0])
            kept.append(needed)
            left[:, part.columns] -= needed
            wants[part.columns] += 1
        if edge.src in [node for node, _ in edge.consumers]:  # that part is in the node's cost, and stays there
            return
        left = np.maximum(left, 0.0) / np.maximum(wants, 1)
        for part, needed in zip(group, kept, strict=True):
            cost = needed + left[:, part.columns]
            part.costs = (cost, np.ascontiguousarray(cost.T))

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
            columns, column = np.unique(klass, return_inverse=True)
            ends = (_Classes(edge.src_class), _Classes(column))
            messages = [np.zeros(len(edge.cost)), np.zeros(len(columns))]
            yield _Part((edge.src, node), ends, (edge.cost, edge.cost.T), messages, e, columns)
