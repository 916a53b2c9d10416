"""A sharding problem restricted to strategies that its constraints allow.

A strategy is out if its cost is infinite, or if a neighbour has none left that may be paired with it. The rest is a
smaller problem over the same nodes: classes that no strategy is in are dropped, and so are consumers that are equal;
the bytes that every strategy of a node has move to the base. Message passing needs problems so restricted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alpa_lite.passes.sharding.solver.kernels import INF, Edges, compile_lazily
from alpa_lite.passes.sharding.solver.links import Links, entries, offsets, reduce_rows
from alpa_lite.passes.sharding.solver.problem import Items, Problem, timeline


class Contradiction(Exception):
    """A node has no strategy left: the problem has no solution."""


@dataclass(frozen=True, eq=False)
class Restriction:
    """Part of an original problem.

    Attributes:
      problem: with fewer strategies.
      strategies: the number of each of its strategies among those of the original problem.
      original: where the strategies of each node begin there.
      messages: for each place of `Ascent.messages` of this problem, its place in those of the problem before.
    """

    problem: Problem
    strategies: np.ndarray
    original: np.ndarray
    messages: np.ndarray

    def lift(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns a choice of the restricted problem as one of the original."""
        links = self.problem.links
        return self.strategies[links.first[:-1] + np.asarray(choice, dtype=np.int64)] - self.original[:-1]

    def lower(self, choice: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """Returns a choice of the original problem as one of the restricted; None if it is not there."""
        links, wanted = self.problem.links, self.original[:-1] + np.asarray(choice, dtype=np.int64)
        place = np.minimum(np.searchsorted(self.strategies, wanted), len(self.strategies) - 1)
        return place - links.first[:-1] if (self.strategies[place] == wanted).all() else None

    def restrict_further(self, problem: Problem) -> Restriction:
        """Returns the consistent part of `problem`, which is this restriction's with more of it forbidden.

        Raises:
          Contradiction: no choice is allowed.
        """
        part = make_consistent(problem)
        return Restriction(part.problem, self.strategies[part.strategies], self.original, part.messages)


def make_consistent(problem: Problem) -> Restriction:
    """Returns the problem without strategies of infinite cost, and without those that a neighbour cannot meet.

    Raises:
      Contradiction: no choice is allowed.
    """
    keep = np.isfinite(problem.cost)
    prune(problem.links.tables, problem.cells, keep)
    if not reduce_rows(np.logical_or, keep, problem.links.first).all():
        raise Contradiction
    # A program is solved without its budget, within it and at prices of memory; the same strategies are mostly allowed
    # in each. The tables that message passing prepares for the links that are left then serve all of them.
    known, key = problem.links.restrictions, keep.tobytes()
    if key not in known:
        known.clear()
        known[key] = _left(problem.links, keep)
    left: _Left = known[key]
    items, base = _remaining(problem, left)
    cost, cells = problem.cost[left.strategies], problem.cells[left.cells]
    part = Problem(left.links, cost, cells, items, base, problem.budget)
    return Restriction(part, left.strategies, problem.links.first, left.messages)


class _Left(NamedTuple):
    """The links that a mask of the strategies leaves, the strategies and cells that they have, and `messages`."""

    links: Links
    strategies: np.ndarray
    cells: np.ndarray
    messages: np.ndarray


def _left(links: Links, keep: np.ndarray) -> _Left:
    """Returns the links of a mask of the strategies: the lines that these are in, and distinct consumers."""
    kept = keep[links.strategy]
    used = np.zeros(links.line[-1], dtype=bool)
    used[links.class_line[kept]] = True
    masks = (keep, links.first), (used, links.line)
    first, line = (offsets(reduce_rows(np.add, mask.astype(np.int64), at)) for mask, at in masks)
    number = np.cumsum(used) - 1
    classes = number[links.class_line[kept]] - np.repeat(line[links.side], np.diff(first)[links.node])
    shape, lines = np.diff(line).reshape(-1, 2), np.flatnonzero(used)
    smaller, stay = Links(first, shape, links.edge, links.node, classes).merge_equal()

    each = np.arange(links.edges)
    before = lines - np.repeat(links.line[:-1], np.diff(line))  # the row or column of its edge that each line was
    rows, edge = before[entries(line, 2 * each)], np.repeat(each, shape[:, 0])
    cells = np.repeat(links.cell[edge] + rows * links.shape[edge, 1], shape[edge, 1])
    cells += before[entries(line, 2 * edge + 1)]

    edge, part = links.edge[links.edges :], ~links.own
    at = offsets(np.where(part, links.shape.sum(1)[edge], 0))[:-1]  # where the messages of each consumer begin
    part &= stay[links.edges :]
    begin = np.repeat(at[part] - links.line[2 * edge[part]], shape.sum(1)[edge[part]])
    messages = begin + lines[entries(line[::2], edge[part])]
    return _Left(smaller, np.flatnonzero(keep), cells, messages)


def _remaining(problem: Problem, left: _Left) -> tuple[Items, np.ndarray]:
    """Returns the bytes that are left, and those that every choice has."""
    if not len(problem.items.entry):
        return problem.items, problem.base
    links, cut, nodes = left.links, len(problem.cost), problem.links.nodes
    number = np.full(cut + len(problem.cells), -1)
    number[np.concatenate([left.strategies, cut + left.cells])] = np.arange(len(left.strategies) + len(left.cells))
    number[cut:][np.isinf(problem.cells)] = -1
    entry, start, end, size = problem.items.select(number[problem.items.entry] >= 0)
    entry = number[entry]
    # Bytes that all strategies of a node take over an interval.
    owner = np.repeat(np.arange(nodes), links.sizes)[entry[entry < len(left.strategies)]]
    mine = slice(len(owner))
    run = np.flatnonzero(np.diff(np.stack([owner, start[mine], end[mine]]), axis=1, prepend=-1).any(0))
    count = np.diff(run, append=len(owner))
    least = np.where(count == links.sizes[owner[run]], reduce_rows(np.minimum, size[mine], np.append(run, 0)), 0.0)
    base = problem.base + timeline(len(problem.base), start[run], end[run], least)
    size[mine] -= np.repeat(least, count)
    return Items(entry, start, end, size).select(size > 0), base


@compile_lazily
def prune(edges: Edges, cells: np.ndarray, keep: np.ndarray) -> None:
    """Drop from the mask of strategies those that a neighbour cannot meet, until all that are left can be met."""
    longest = 1
    for e in range(len(edges.edge) - 1):
        longest = max(longest, edges.edge[e + 1, 1] - edges.edge[e, 1])
    live, met = np.empty((2, longest), dtype=np.bool_), np.empty((2, longest), dtype=np.bool_)
    forbids = np.zeros(len(edges.edge), dtype=np.bool_)
    changed, first = True, True
    while changed:
        changed = False
        for e in range(len(edges.edge) - 1):
            src, at, wide, rows, begin = edges.edge[e]
            area = edges.edge[e + 1, 1] - at
            for c in range(at, at + area if first else at):
                forbids[e] |= cells[c] == INF
            for c in range(begin, edges.edge[e + 1, 4] if forbids[e] else begin):
                node, columns = edges.consumer[c]
                for end in range(2):
                    i, klass = (node, columns) if end else (src, rows)
                    for p in range(area):
                        live[end, p] = met[end, p] = False
                    for s in range(edges.node[i + 1, 0] - edges.node[i, 0]):
                        live[end, edges.classes[klass + s]] |= keep[edges.node[i, 0] + s]
                for p in range(area // wide):
                    for q in range(wide):
                        if live[0, p] and live[1, q] and cells[at + p * wide + q] < INF:
                            met[0, p] = met[1, q] = True
                for end in range(2):
                    i, klass = (node, columns) if end else (src, rows)
                    for s in range(edges.node[i + 1, 0] - edges.node[i, 0]):
                        fine = met[end, edges.classes[klass + s]]
                        if node == src:  # both are one strategy
                            fine = cells[at + edges.classes[rows + s] * wide + edges.classes[columns + s]] < INF
                        if keep[edges.node[i, 0] + s] and not fine:
                            keep[edges.node[i, 0] + s] = False
                            changed = True
        first = False
