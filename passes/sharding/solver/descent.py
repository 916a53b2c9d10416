"""Good choices without an optimiser: coordinate descent on a sharding problem.

One node at a time takes the strategy that is best while its neighbours stay, until no node wants to move. It gives
upper bounds, which scale the linear program and let reduced costs forbid most of it. With one node fixed, it gives the
plan that answers to that node's strategy. Memory is not looked at: price it first.

Nodes of one colour share no edge, so that they move together (`descend`). From a good choice of which one node has
changed, only the neighbours of what has changed are asked (`Descent`): some dozens of array operations.

Descent must be able to leave what is forbidden, so a large cost stands for an infinite one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpa_lite.passes.sharding.solver.problem import Edge, Problem
from alpa_lite.passes.sharding.solver.ragged import lowest, reduced
from alpa_lite.passes.sharding.solver.replies import replies_by_color

_SWEEPS = 20  # visits of each colour after which a descent ends
_GAIN = 1e-12  # relative: what moves less is rounding, and would move back


def descend(problem: Problem, choice: np.ndarray | None = None) -> np.ndarray:
    """A choice that no change of one node improves, from `choice` or from each node's cheapest strategy."""
    links = problem.links
    if not links.nodes:
        return np.zeros(0, dtype=np.int64)
    replies = links.prepared(replies_by_color)
    choice = lowest(problem.cost, links.first[:-1]) if choice is None else np.array(choice, dtype=np.int64)
    large = _large(problem)
    cost, cells = np.minimum(problem.cost, large), np.minimum(problem.cells, large)
    row = links.source[links.source_at[:-1] + choice[links.src]]
    column = links.klass[links.klass_at[:-1] + choice[links.node]]
    quiet = 0
    for turn in range(_SWEEPS * len(replies)):
        one = replies[turn % len(replies)]
        total = one.total(cost, cells, row, column)
        now = choice[one.nodes]
        before, best = total[one.starts + now], np.minimum.reduceat(total, one.starts)
        moves = best < before - _GAIN * np.abs(before)
        quiet = 0 if moves.any() else quiet + 1
        if quiet == len(replies):
            break
        if not quiet:
            choice[one.nodes] = np.where(moves, lowest(total, one.starts), now)
            row = links.source[links.source_at[:-1] + choice[links.src]]
            column = links.klass[links.klass_at[:-1] + choice[links.node]]
    return choice


def _large(problem: Problem) -> float:
    """Seconds that stand for infinite ones."""
    cost = np.where(np.isfinite(problem.cost), problem.cost, 0.0)
    cells = np.where(np.isfinite(problem.cells), problem.cells, 0.0)
    most = reduced(np.maximum, cost, problem.links.first).sum() + reduced(np.maximum, cells, problem.links.cell).sum()
    return 1e3 * float(most) or 1.0


class Descent:
    """Coordinate descent on one problem, prepared once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        large = _large(problem)
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
