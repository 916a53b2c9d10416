"""Good choices without an optimiser: coordinate descent on a sharding problem.

One node at a time takes the strategy that is best while its neighbours stay, until no node wants to move. It gives
upper bounds, which scale the linear program and let reduced costs forbid most of it. With one node fixed, it gives the
plan that answers to that node's strategy. Memory is not looked at: price it first.

Only the neighbours of what has changed are asked, so that a descent from a good choice costs some dozens of array
operations. Descent must be able to leave what is forbidden, so a large cost stands for an infinite one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpa_lite.passes.sharding.solver.problem import Edge, Problem

_SWEEPS = 20  # visits of each node, on average, after which a descent ends


def descend(problem: Problem, choice: np.ndarray | None = None) -> np.ndarray:
    """A choice that no change of one node improves, from `choice` or from each node's cheapest strategy."""
    start = [int(node.cost.argmin()) for node in problem.nodes] if choice is None else choice
    return Descent(problem).run(start, range(len(problem.nodes)), _SWEEPS * len(problem.nodes))


class Descent:
    """Coordinate descent on one problem, prepared once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        finite = [np.max(x.cost, initial=0.0, where=np.isfinite(x.cost)) for x in (*problem.nodes, *problem.edges)]
        large = 1e3 * float(sum(finite)) or 1.0
        self._nodes = [np.minimum(node.cost, large) for node in problem.nodes]
        self._edges = [np.minimum(edge.cost, large) for edge in problem.edges]
        self._near: list[dict[int, None] | None] = [None] * len(problem.nodes)

    def run(
        self, choice: Sequence[int] | np.ndarray, waiting: Iterable[int], visits: int, fixed: int = -1
    ) -> np.ndarray:
        """[nodes] the choice after descent.

        Args:
          choice: where it begins.
          waiting: the nodes that are asked first.
          visits: of nodes, after which the descent ends.
          fixed: a node that keeps its strategy.
        """
        choice, queue = np.array(choice, dtype=int), dict.fromkeys(waiting)
        queue.pop(fixed, None)
        for _ in range(visits):
            if not queue:
                break
            i = next(iter(queue))
            del queue[i]
            if len(self._nodes[i]) == 1:
                continue
            total = self._nodes[i].copy()
            for e in self._problem.touching[i]:
                _add_replies(total, self._problem.edges[e], self._edges[e], choice, i)
            best = int(total.argmin())
            if total[best] < total[choice[i]]:
                choice[i] = best
                queue.update(self.neighbours(i))
                queue.pop(fixed, None)
        return choice

    def neighbours(self, i: int) -> dict[int, None]:
        """The nodes that share an edge with node i, in a fixed order."""
        near = self._near[i]
        if near is None:
            edges = (self._problem.edges[e] for e in self._problem.touching[i])
            near = self._near[i] = dict.fromkeys(n for edge in edges for n in edge.nodes if n != i)
        return near


def _add_replies(total: np.ndarray, edge: Edge, cost: np.ndarray, choice: np.ndarray, i: int) -> None:
    """Add to `total`, [S], what an edge of the given cost pays under each strategy of node i."""
    others = {int(klass[choice[node]]) for node, klass in edge.consumers if node != i}
    if edge.src == i:
        rows = cost[edge.src_class]
        for q in others:
            total += rows[:, q]
    else:
        rows = cost[edge.src_class[choice[edge.src]]]
        total += sum(rows[q] for q in others)
    own: list[np.ndarray] = []
    for node, klass in edge.consumers:
        if node == i:
            paid = rows[np.arange(len(klass)), klass] if edge.src == i else rows[klass]
            for taken in (*others, *own):
                paid = np.where(klass == taken, 0.0, paid)
            own.append(klass)
            total += paid
