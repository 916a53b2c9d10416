"""Lower bounds of a sharding problem without an optimiser: ascent of the dual of its linear relaxation.

Costs may be moved between an edge and its two ends without changing any choice's seconds: with messages u[p], v[q],

    node[s] += sum_e u_e[class of s],      edge_e[p, q] -= u_e[p] + v_e[q].

However they are moved, sum_i min node_i + sum_e min edge_e is a lower bound, and the best such bound is the linear
relaxation. Each node collects all that its edges hold and hands it on along the order of the program, forward, then
backward; the bound never falls (sequential reweighted message passing: Kolmogorov, 2015).

A transfer with several consumers is divided between them (`kernels.share`) after each sweep.
"""

from __future__ import annotations

import numpy as np

from alpa_lite.passes.sharding.solver import kernels
from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.problem import Problem
from alpa_lite.passes.sharding.solver.ragged import entries, offsets, ranges, reduced


class Ascent:
    """Messages that make a lower bound of a problem, improved by `sweep`.

    Every class of the problem must be in use, and every strategy have an allowed partner: see `restrict.consistent`.

    Attributes:
      bound: seconds, valid for every choice.
    """

    def __init__(self, problem: Problem, messages: np.ndarray | None = None) -> None:
        """Args: messages: where to begin, as of `messages` for a problem of the same structure."""
        self._plan = problem.links.prepared(_Plan)
        self._messages = np.zeros(len(self._plan.used)) if messages is None else messages.copy()
        self._messages[np.isneginf(self._messages)] = 0.0
        self._messages[~self._plan.used] = -np.inf
        self._room = np.empty((6, self._plan.room))
        self.reprice(problem)

    @property
    def messages(self) -> np.ndarray:
        """For each consumer other than its edge's source the messages of the edge's rows, then of its columns."""
        return self._messages.copy()

    def reprice(self, problem: Problem) -> None:
        """Begin the bound again for a problem that differs in costs alone, with the messages as they are."""
        self.problem, self.bound = problem, -np.inf
        self._cost, self._cells = problem.cost.copy(), problem.cells[self._plan.cells]
        self._paid = self._plan.paid.copy()
        self._pass(self._messages, 0)

    def sweep(self, times: int) -> None:
        """Pass the messages forward and backward some number of times."""
        self._pass(self._messages, times)
        least = reduced(np.minimum, self._totals(self._cost, self._messages), self.problem.links.first)
        self.bound = max(self.bound, float(least.sum() + self._rest().sum()))

    def choice(self, backward: bool = False) -> np.ndarray:
        """A choice that the messages suggest: node by node in the order of the program, or from its end.

        Meshes have axes that may be exchanged, so that optima come in equal variants that the messages do not tell
        apart. A choice made node by node settles on one of them. So that the nodes behind say what they want, one pass
        over them, in the opposite order, comes first.
        """
        messages, chosen = self._messages.copy(), np.zeros(self.problem.links.nodes, dtype=np.int64)
        self._pass(messages, 1, 0 if backward else 1)
        kernels.choose(self._plan.parts, self._cost, self._cells, messages, self._room[2], backward, chosen)
        return chosen

    def slack(self) -> tuple[np.ndarray, np.ndarray]:
        """How far above the bound a choice must be that takes a strategy, or a cell of an edge with one consumer.

        Returns:
          [strategies] and [cells], zero for other edges. The seconds of a choice are at least `bound` plus each of its
          slacks.
        """
        plan, links = self._plan, self.problem.links
        spare = self._totals(self._cost, self._messages)
        floor = reduced(np.minimum, spare, links.first)
        spare -= np.repeat(floor, links.sizes)
        least, cells, rest = np.zeros(len(self._messages)), np.zeros(len(self.problem.cells)), self._rest()
        # A sweep that divides cells anew may lower the sum.
        lost = max(self.bound - float(floor.sum() + rest.sum()), 0.0)
        kernels.least(plan.parts, spare, least)
        kernels.excess(plan.parts, self._cells, self._messages - least, rest, cells)
        # A neighbour's own slack counts once, however many parts lead to it.
        above = self._collected(self._messages - least / np.repeat(plan.times, plan.length)) - self._messages
        strategies = self._totals(spare, above - np.repeat(rest, plan.length))
        return np.maximum(strategies - lost, 0.0), np.maximum(cells - lost, 0.0)

    def _pass(self, messages: np.ndarray, times: int, direction: int = -1) -> None:
        state = self.problem.cells, self._cost, self._cells, messages, self._paid, self._room
        kernels.ascend(self._plan.parts, *state, times, direction)

    def _totals(self, cost: np.ndarray, messages: np.ndarray) -> np.ndarray:
        """[strategies] each cost with the messages of its classes."""
        totals = np.empty(len(cost))
        kernels.add(self._plan.parts, cost, messages, totals)
        return totals

    def _collected(self, given: np.ndarray) -> np.ndarray:
        """Returns for each message ([messages]) the least of its cells, less the amounts given to the other end."""
        found = np.zeros(len(given))
        kernels.collect(self._plan.parts, self._cells, given, found)
        return found

    def _rest(self) -> np.ndarray:
        """[parts] the least that each still holds."""
        rest = self._collected(self._messages) - self._messages
        if not len(self._plan.ends):
            return np.zeros(0)
        # Without gaps in memory: kernels would be compiled again for an array with them.
        return np.ascontiguousarray(np.minimum.reduceat(rest, self._plan.ends.ravel())[::2])


class _Plan:
    """The tables of a problem's structure.

    Attributes:
      parts: see there. cells: [parts' cells] the cell of the problem.
      ends: [parts, 2] where the messages of each end begin. length: [parts] how many messages there are.
      used: [messages] whether a strategy is in the class. times: [parts] how many parts join the same nodes.
      paid: zero for each strategy of each loop. room: how many numbers the loops need to work in.
    """

    def __init__(self, links: Links) -> None:
        of_part, of_loop = (links.edges + np.flatnonzero(mask) for mask in (~links.own, links.own))
        edge, own_edge = links.edge[of_part], links.edge[of_loop]
        pair = np.stack([edge, of_part], axis=1)  # the end at the source, and that at the consumer
        nodes, klass, shape = links.node[pair], links.at[pair], links.shape[edge]
        self.length = shape.sum(1)
        at = offsets(self.length)
        self.ends = np.stack([at[:-1], at[:-1] + shape[:, 0]], axis=1)
        size = links.sizes[nodes].ravel()
        self.used = np.zeros(int(at[-1]), dtype=bool)
        self.used[np.repeat(self.ends.ravel(), size) + links.classes[ranges(klass.ravel(), size)]] = True
        _, same, times = np.unique(nodes.min(1) * links.nodes + nodes.max(1), return_inverse=True, return_counts=True)
        self.times = times[same]
        self.cells = entries(links.cell, edge)
        divided = (links.counts > 1) | np.isin(np.arange(links.edges), own_edge)
        origin = np.where(divided[edge], -1, links.cell[edge])
        e = np.flatnonzero(divided)
        bounds = [np.searchsorted(edges, e + one) for edges in (edge, own_edge) for one in (0, 1)]
        paid = offsets(links.sizes[links.node[of_loop]])
        self.paid = np.zeros(int(paid[-1]))
        self.room = max(int(at[-1]), int(links.sizes.max(initial=1)), int(np.diff(links.cell)[e].max(initial=1)))
        end = np.argsort(nodes.ravel(), kind="stable")
        self.parts = kernels.Parts(
            node=np.stack([links.first, np.searchsorted(nodes.ravel()[end], np.arange(links.nodes + 1))], axis=1),
            end=end,
            part=np.column_stack([nodes, shape, self.ends, klass, offsets(shape.prod(1))[:-1], origin]),
            divided=np.column_stack([links.cell[e], links.shape[e], *bounds]),
            loop=np.column_stack([links.node[of_loop], links.at[own_edge], links.at[of_loop], paid[:-1]]),
            classes=links.classes,
        )
