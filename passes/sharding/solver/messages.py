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
from alpa_lite.passes.sharding.solver.links import reduce_rows
from alpa_lite.passes.sharding.solver.problem import Problem


class Ascent:
    """Messages that make a lower bound of a problem, improved by `sweep`.

    Every class of the problem must be in use, and every strategy have an allowed partner (`restrict.make_consistent`).

    Attributes:
      bound: seconds, valid for every choice.
      messages: for each consumer other than its edge's source those of the edge's rows, then of its columns.
    """

    def __init__(self, problem: Problem, messages: np.ndarray | None = None) -> None:
        """Args: messages: where to begin, as of `messages` for a problem of the same structure."""
        self._layout = layout = problem.links.message_layout
        self.messages = np.zeros(len(layout.is_used)) if messages is None else messages.copy()
        self.messages[np.isneginf(self.messages)] = 0.0
        self.messages[~layout.is_used] = -np.inf
        self._room = np.empty((6, layout.room))
        self.reprice(problem)

    def reprice(self, problem: Problem) -> None:
        """Begin the bound again for a problem that differs in costs alone, with the messages as they are."""
        self.problem, self.bound, layout = problem, -np.inf, self._layout
        cells, paid = problem.cells[layout.cells], np.zeros(layout.num_loop_costs)
        self._state = kernels.State(problem.cells, problem.cost.copy(), cells, self.messages, paid, self._room)
        kernels.ascend(layout.parts, self._state, 0, -1)

    def sweep(self, times: int) -> None:
        """Pass the messages forward and backward some number of times."""
        kernels.ascend(self._layout.parts, self._state, times, -1)
        _, floor, rest = self._floors()
        self.bound = max(self.bound, float(floor.sum() + rest.sum()))

    def choice(self, backward: bool = False) -> np.ndarray:
        """Returns a choice that the messages suggest: node by node in the order of the program, or from its end.

        Meshes have axes that may be exchanged, so that optima come in equal variants that the messages do not tell
        apart. A choice made node by node settles on one of them. So that the nodes behind say what they want, one pass
        over them, in the opposite order, comes first.
        """
        state = self._state._replace(messages=self.messages.copy())
        kernels.ascend(self._layout.parts, state, 1, 0 if backward else 1)
        return kernels.choose(self._layout.parts, state, backward)

    def slack(self) -> tuple[np.ndarray, np.ndarray]:
        """How far above the bound a choice must be that takes a strategy, or a cell of an edge with one consumer.

        Returns:
          [strategies] and [cells], zero for other edges. The seconds of a choice are at least `bound` plus each of its
          slacks.
        """
        layout, messages, held = self._layout, self.messages, self._state.cells
        spare, floor, rest = self._floors()
        spare -= np.repeat(floor, self.problem.links.sizes)
        # A sweep that divides cells anew may lower the sum.
        lost = max(self.bound - float(floor.sum() + rest.sum()), 0.0)
        least, cells = kernels.least_of_classes(layout.parts, spare, len(messages)), np.zeros(len(self.problem.cells))
        kernels.excess(layout.parts, held, messages - least, rest, cells)
        # A neighbour's own slack counts once, however many parts lead to it.
        shared = messages - least / np.repeat(layout.times, layout.length)
        above = kernels.collect(layout.parts, held, shared) - messages
        strategies = kernels.add(layout.parts, spare, above - np.repeat(rest, layout.length))
        return np.maximum(strategies - lost, 0.0), np.maximum(cells - lost, 0.0)

    def _floors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[strategies] seconds with messages, [nodes] their least, and [parts] the least that each still holds."""
        totals = kernels.add(self._layout.parts, self._state.cost, self.messages)
        floor = reduce_rows(np.minimum, totals, self.problem.links.first)
        return totals, floor, kernels.least_remainders(self._layout.parts, self._state.cells, self.messages)
