"""A sharding problem without the strategies that nothing allows.

A strategy is out if its cost is infinite, or if a neighbour has none left that may be paired with it. What is left is a
smaller problem over the same nodes: classes that no strategy is in are dropped, and so are consumers that are equal;
the bytes that every strategy of a node has move to the base. Message passing needs problems so restricted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.passes.sharding.solver.problem import Bytes, Consumer, Edge, Problem, Vertex, timeline, used


class Contradiction(Exception):
    """A node has no strategy left: the problem has no solution."""


@dataclass(frozen=True, eq=False)
class Restriction:
    """Part of an original problem.

    Attributes:
      problem: with fewer strategies.
      kept: for each node, the numbers of its strategies in the original problem.
    """

    problem: Problem
    kept: tuple[np.ndarray, ...]

    def lift(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """A choice of the restricted problem as one of the original."""
        return np.array([k[s] for k, s in zip(self.kept, choice, strict=True)], dtype=int)

    def further(self, problem: Problem) -> Restriction:
        """The consistent part of `problem`, which is this restriction's with more of it forbidden.

        Raises:
          Contradiction: no choice is allowed.
        """
        part = consistent(problem)
        kept = tuple(before[now] for before, now in zip(self.kept, part.kept, strict=True))
        return Restriction(part.problem, kept)


def consistent(problem: Problem) -> Restriction:
    """The problem without strategies of infinite cost, and without those that a neighbour cannot meet.

    Raises:
      Contradiction: no choice is allowed.
    """
    kept = tuple(np.flatnonzero(mask) for mask in _allowed(problem))
    edges = tuple(_without(edge, kept) for edge in problem.edges)
    base, nodes = problem.base, []
    for node, mine in zip(problem.nodes, kept, strict=True):
        memory = node.memory.at(mine)
        if memory:
            least = memory.size.min(1)
            start, end = memory.span.T
            base = base + timeline(len(base), start, end, least)
            memory = Bytes(memory.span, memory.size - least[:, None]).tidy()
        nodes.append(Vertex(node.cost[mine], memory))
    return Restriction(Problem(tuple(nodes), edges, base, problem.budget), kept)


def _allowed(problem: Problem) -> list[np.ndarray]:
    """[S] for each node: a mask of the strategies that are allowed and that every neighbour can meet."""
    keep = [np.isfinite(node.cost) for node in problem.nodes]
    constrained = [edge for edge in problem.edges if np.isinf(edge.cost).any()]
    changed = True
    while changed:
        changed = False
        for edge in constrained:
            allowed = np.isfinite(edge.cost)
            for node, klass in edge.consumers:
                before = keep[edge.src].sum() + keep[node].sum()
                if node == edge.src:
                    keep[node] = keep[node] & allowed[edge.src_class, klass]
                else:
                    met = allowed & _live(edge.src_class, keep[edge.src], len(allowed))[:, None]
                    keep[node] = keep[node] & np.asarray(met.any(0))[klass]
                    met = met & _live(klass, keep[node], allowed.shape[1])
                    keep[edge.src] = keep[edge.src] & np.asarray(met.any(1))[edge.src_class]
                changed |= bool(keep[edge.src].sum() + keep[node].sum() < before)
    if not all(mask.any() for mask in keep):
        raise Contradiction
    return keep


def _live(klass: np.ndarray, keep: np.ndarray, count: int) -> np.ndarray:
    """Mask of those of `count` classes that a kept strategy has."""
    live = np.zeros(count, dtype=bool)
    live[klass[keep]] = True
    return live


def _without(edge: Edge, kept: Sequence[np.ndarray]) -> Edge:
    """The edge for the strategies that are kept, without rows and columns that none of them has."""
    rows, src_class = used(edge.src_class[kept[edge.src]], len(edge.cost))
    wanted = [klass[kept[node]] for node, klass in edge.consumers]
    columns, column = used(np.concatenate(wanted), edge.cost.shape[1])
    consumers: dict[tuple[int, bytes], Consumer] = {}
    start = 0
    for (node, _), klass in zip(edge.consumers, wanted, strict=True):
        mine, start = column[start : start + len(klass)], start + len(klass)
        consumers[node, mine.tobytes()] = (node, mine)
    pick = np.ix_(rows, columns)
    cost, memory = edge.cost[pick], edge.memory.at(*pick)
    return Edge(edge.src, src_class, tuple(consumers.values()), cost, memory.where(np.isfinite(cost)).tidy())
