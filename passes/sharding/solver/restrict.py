"""A sharding problem restricted to strategies that its constraints allow.

A strategy is out if its cost is infinite, or if a neighbour has none left that may be paired with it. The rest is a
smaller problem over the same nodes: classes that no strategy is in are dropped, and so are consumers that are equal;
the bytes that every strategy of a node has move to the base. Message passing needs problems so restricted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.passes.sharding.solver import kernels
from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.problem import Items, Problem, timeline
from alpa_lite.passes.sharding.solver.ragged import entries, offsets, ranges, reduced, split


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

    @property
    def kept(self) -> tuple[np.ndarray, ...]:
        """For each node, the numbers of its strategies in the original problem."""
        numbers = self.strategies - np.repeat(self.original[:-1], self.problem.links.sizes)
        return tuple(split(numbers, self.problem.links.first))

    def lift(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """A choice of the restricted problem as one of the original."""
        links = self.problem.links
        return self.strategies[links.first[:-1] + np.asarray(choice, dtype=np.int64)] - self.original[:-1]

    def lower(self, choice: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """A choice of the original problem as one of the restricted; None if it is not there."""
        links, wanted = self.problem.links, self.original[:-1] + np.asarray(choice, dtype=np.int64)
        place = np.minimum(np.searchsorted(self.strategies, wanted), len(self.strategies) - 1)
        return place - links.first[:-1] if (self.strategies[place] == wanted).all() else None

    def further(self, problem: Problem) -> Restriction:
        """The consistent part of `problem`, which is this restriction's with more of it forbidden.

        Raises:
          Contradiction: no choice is allowed.
        """
        part = consistent(problem)
        return Restriction(part.problem, self.strategies[part.strategies], self.original, part.messages)


def consistent(problem: Problem) -> Restriction:
    """The problem without strategies of infinite cost, and without those that a neighbour cannot meet.

    Raises:
      Contradiction: no choice is allowed.
    """
    keep = _allowed(problem)
    left = problem.links.prepared(_Last).of(keep)
    items, base = _remaining(problem, keep, left.cells, left.links.sizes)
    cost, cells = problem.cost[left.strategies], problem.cells[left.cells]
    part = Problem(left.links, cost, cells, items, base, problem.budget)
    return Restriction(part, left.strategies, problem.links.first, left.messages)


@dataclass(frozen=True, eq=False)
class _Left:
    """The links that are left, the strategies and cells that they have of the original ones, and `messages`, too."""

    links: Links
    strategies: np.ndarray
    cells: np.ndarray
    messages: np.ndarray


class _Last:
    """The latest restriction of some links.

    A program is solved without its budget, within it and at prices of memory; the same strategies are mostly allowed in
    each. The tables that message passing prepares for the links that are left then serve all of them.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._last: tuple[np.ndarray, _Left] | None = None

    def of(self, keep: np.ndarray) -> _Left:
        """Returns the restriction of the links to a mask of the strategies."""
        if self._last is None or not np.array_equal(self._last[0], keep):
            self._last = keep, _left(self._links, keep)
        return self._last[1]


def _left(links: Links, keep: np.ndarray) -> _Left:
    """The links of a mask of the strategies: the rows and columns that these are in, and distinct consumers."""
    row, column = np.zeros(links.row_at[-1], dtype=bool), np.zeros(links.column_at[-1], dtype=bool)
    source_row = links.source_row[keep[links.source_strategy]]
    klass_column = links.klass_column[keep[links.klass_strategy]]
    row[source_row] = column[klass_column] = True
    first, row_at, column_at = (
        offsets(reduced(np.add, mask.astype(np.int64), at))
        for mask, at in ((keep, links.first), (row, links.row_at), (column, links.column_at))
    )
    source = (np.cumsum(row) - 1 - np.repeat(row_at[:-1], links.rows))[source_row]
    klass = (np.cumsum(column) - 1 - np.repeat(column_at[:-1], links.columns))[klass_column]
    rows, columns = np.diff(row_at), np.diff(column_at)
    which = np.flatnonzero(row)
    edge_of = np.repeat(np.arange(len(rows)), rows)
    begin = links.cell[edge_of] + (which - links.row_at[edge_of]) * links.columns[edge_of]
    taken = np.flatnonzero(column) - np.repeat(links.column_at[:-1], columns)
    wide = columns[edge_of]
    cells = np.repeat(begin, wide) + taken[entries(column_at, edge_of)]
    dropped = np.zeros(len(links.edge), dtype=bool)
    at = offsets(np.diff(first)[links.node])
    key = links.edge * (links.nodes + 1) + links.node
    _, pair, times = np.unique(key, return_inverse=True, return_counts=True)
    seen: set[tuple[int, bytes]] = set()
    for c in np.flatnonzero(times[pair] > 1).tolist():
        same = int(key[c]), klass[at[c] : at[c + 1]].tobytes()
        dropped[c] = same in seen
        seen.add(same)
    edge, node = links.edge, links.node
    if dropped.any():
        stay = np.flatnonzero(~dropped)
        klass, edge, node = klass[entries(at, stay)], edge[stay], node[stay]
    smaller = Links(first, links.src, rows, columns, source, edge, node, klass)
    return _Left(smaller, np.flatnonzero(keep), cells, _places(links, row, column, dropped))


def _remaining(problem: Problem, keep: np.ndarray, cells: np.ndarray, sizes: np.ndarray) -> tuple[Items, np.ndarray]:
    """The bytes that are left, and those that every choice has."""
    items, links, base = problem.items, problem.links, problem.base
    if not len(items.owner):
        return items, base
    entry = np.concatenate([keep, np.zeros(len(problem.cells), dtype=bool)])
    entry[len(keep) + cells] = True
    entry_of = ranges(links.begin[items.owner], np.diff(items.at))
    mask = entry[entry_of]
    at = offsets(reduced(np.add, mask.astype(np.int64), items.at))
    size = items.size[mask]
    banned = np.isinf(problem.cells)
    if banned.any():
        banned = np.concatenate([np.zeros(len(keep), dtype=bool), banned])
        size[banned[entry_of][mask]] = 0.0
    of_node = items.owner < links.nodes
    least = np.where(of_node, reduced(np.minimum, size, at), 0.0)
    base = base + timeline(len(base), items.start, items.end, least)
    size -= np.repeat(least, np.diff(at))
    left = Items(items.owner, items.start, items.end, at, size)
    return left.of(np.flatnonzero(reduced(np.maximum, size, at) > 0)), base


def _places(links: Links, row: np.ndarray, column: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """The places of the messages that are left, as of `Ascent.messages`."""
    at = offsets(np.where(links.own, 0, (links.rows + links.columns)[links.edge]))
    rows, columns = np.flatnonzero(row), np.flatnonzero(column)
    row_at, column_at = np.searchsorted(rows, links.row_at), np.searchsorted(columns, links.column_at)
    stay = np.flatnonzero(~dropped & ~links.own)
    edge = links.edge[stay]
    high, wide = np.diff(row_at)[edge], np.diff(column_at)[edge]
    begin = at[stay] - links.row_at[edge]
    mine = np.repeat(begin, high) + rows[entries(row_at, edge)]
    begin = at[stay] + links.rows[edge] - links.column_at[edge]
    theirs = np.repeat(begin, wide) + columns[entries(column_at, edge)]
    out = np.zeros(len(mine) + len(theirs), dtype=np.int64)
    new = offsets(high + wide)
    out[ranges(new[:-1], high)] = mine
    out[ranges(new[:-1] + high, wide)] = theirs
    return out


def _allowed(problem: Problem) -> np.ndarray:
    """[strategies] a mask of those that are allowed and that every neighbour can meet."""
    keep = np.isfinite(problem.cost)
    kernels.prune(problem.links.tables, problem.cells, keep)
    if not reduced(np.logical_or, keep, problem.links.first).all():
        raise Contradiction
    return keep
