"""Good choices without an optimiser: coordinate descent on a sharding problem.

One node at a time takes the strategy that is best while its neighbours stay, until no node wants to move. It gives
upper bounds, which scale the linear program and let reduced costs forbid most of it. With one node fixed, it gives the
plan that answers to that node's strategy. Memory is not looked at: price it first.

Descent must be able to leave what is forbidden, so a large cost stands for an infinite one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpa_lite.passes.sharding.solver import kernels
from alpa_lite.passes.sharding.solver.problem import Problem

_VISITS = 20  # of each node after which a descent ends
_GAIN = 1e-12  # relative: what moves less is rounding, and would move back


class Descent:
    """Coordinate descent on one problem, prepared once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        most = sum(len(x) * float(x.max(initial=0.0, where=x < np.inf)) for x in (problem.cost, problem.cells))
        self._costs = problem.cost, problem.cells, 1e3 * most or 1.0

    def run(
        self, choice: Sequence[int] | np.ndarray, waiting: Iterable[int], visits: int, fixed: int = -1
    ) -> np.ndarray:
        """[nodes] the choice after descent.

        Args:
          choice: where it begins.
          waiting: the nodes that are visited first.
          visits: of nodes, after which the descent ends.
          fixed: a node that keeps its strategy.
        """
        choice, queue = np.array(choice, dtype=np.int64), np.array([*dict.fromkeys(waiting)], dtype=np.int64)
        kernels.descend(self._problem.links.tables, *self._costs, choice, queue, visits, fixed, _GAIN)
        return choice

    def neighbours(self, i: int) -> np.ndarray:
        """The nodes that share an edge with node i, by edge."""
        links = self._problem.links
        near = np.isin(links.edge, links.edge[links.node == i])
        _, nodes = np.unique(np.stack([links.edge[near], links.node[near]]), axis=1)
        return nodes[nodes != i]


def descend(problem: Problem, choice: np.ndarray) -> np.ndarray:
    """A choice that no change of one node improves, from `choice`."""
    nodes = problem.links.nodes
    return Descent(problem).run(choice, range(nodes), _VISITS * nodes)
