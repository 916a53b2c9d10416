"""The strategy graph in the form that the solver works on: a few long vectors, with memory beside each cost.

A `StrategyGraph` lists arrays by node, by transfer and by buffer. Here all costs are one vector of *entries*: the
strategies of every node, node by node, then the *cells* of every edge, the flat [P, Q] of its cost. Bytes are *items*:
over a closed interval of program points, an array of the shape of one node's or one edge's costs. So whatever restricts
or prices a problem treats bytes as it treats seconds, and a problem of any number of nodes takes the same number of
array operations.

    seconds(choice)  = sum_i node_i.cost[s_i] + sum_e sum_{q in Q_e} edge_e.cost[p_e, q]
    bytes(choice)[t] = base[t] + the same sum over the sizes of the items whose interval contains t

with p_e = src_class[s_src] and Q_e = {klass[s_node] for (node, klass) in consumers}, a set: a layout is paid once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.passes.sharding.solver import kernels
from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.ragged import entries, offsets, reduced


@dataclass(frozen=True, eq=False)
class Items:
    """Bytes by owner: nodes by number, then edges.

    owner: [n]. start, end: [n] first and last program point. at: [n + 1] where the sizes of each begin in `size`.
    """

    owner: np.ndarray
    start: np.ndarray
    end: np.ndarray
    at: np.ndarray
    size: np.ndarray

    def of(self, which: np.ndarray) -> Items:
        """Some of the items."""
        at, size = offsets(np.diff(self.at)[which]), self.size[entries(self.at, which)]
        return Items(self.owner[which], self.start[which], self.end[which], at, size)


_NONE = np.zeros(0, dtype=np.int64)
NO_ITEMS = Items(_NONE, _NONE, _NONE, np.zeros(1, dtype=np.int64), np.zeros(0))
"""No bytes at all."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one strategy per node.

    Attributes:
      links: which strategies and cells there are.
      cost: [strategies] seconds. cells: [cells] seconds; `inf` forbids.
      items: bytes.
      base: [points] bytes that every choice has. budget: bytes, or None.
    """

    links: Links
    cost: np.ndarray
    cells: np.ndarray
    items: Items
    base: np.ndarray
    budget: float | None = None

    def seconds(self, choice: Sequence[int] | np.ndarray) -> float:
        """The objective of a choice; `inf` if it uses something forbidden."""
        choice = np.asarray(choice, dtype=np.int64)
        cells = self.links.cells_of(choice)
        # Rounded once: a replayed plan, whose program has fewer links, costs the same to the last bit.
        return math.fsum([*self.cost[self.links.first[:-1] + choice].tolist(), *self.cells[cells].tolist()])

    def bytes(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """[points] bytes live at each program point under a choice."""
        items, links, choice = self.items, self.links, np.asarray(choice, dtype=np.int64)
        if not len(items.owner):
            return self.base
        cells = links.cells_of(choice)
        edge = np.searchsorted(links.cell, cells, side="right") - 1
        counts = np.concatenate([np.ones(links.nodes, dtype=np.int64), np.bincount(edge, minlength=links.edges)])
        taken = np.concatenate([choice, cells - links.cell[edge]])
        times = counts[items.owner]
        where = np.repeat(items.at[:-1], times) + taken[entries(offsets(counts), items.owner)]
        start, end = np.repeat(items.start, times), np.repeat(items.end, times)
        return self.base + timeline(len(self.base), start, end, items.size[where])

    def peak(self, choice: Sequence[int] | np.ndarray) -> float:
        """Bytes at the fullest program point; zero without program points."""
        return float(self.bytes(choice).max(initial=0.0))

    def fits(self, choice: Sequence[int] | np.ndarray) -> bool:
        """Whether a choice stays within the budget, but for rounding of sums of fractional bytes."""
        return self.budget is None or self.peak(choice) <= allowance(self.budget)

    @property
    def lower_bound(self) -> float:
        """Seconds that no choice can undercut: each node at its cheapest, each transfer free."""
        return float(reduced(np.minimum, self.cost, self.links.first).sum())

    @property
    def size(self) -> int:
        """How many numbers decide the problem: a measure of what a restriction has gained."""
        return len(self.cost) + int((np.diff(self.links.cell) * self.links.counts).sum())

    @property
    def settled(self) -> bool:
        """Whether nothing is left to choose."""
        return len(self.cost) == self.links.nodes


def forget_memory(problem: Problem) -> Problem:
    """The same problem without bytes and budget: a relaxation."""
    return replace(problem, items=NO_ITEMS, base=np.zeros(0), budget=None)


def forget_seconds(problem: Problem) -> Problem:
    """The same problem with every allowed cost zero: what remains is memory."""
    cost, cells = (np.where(np.isinf(seconds), np.inf, 0.0) for seconds in (problem.cost, problem.cells))
    return replace(problem, cost=cost, cells=cells, budget=None)


def price_memory(problem: Problem, price: np.ndarray) -> Problem:
    """The Lagrangian: a byte at program point t costs `price[t]` seconds; no budget."""
    items, links = problem.items, problem.links
    total = np.concatenate([[0.0], np.cumsum(price)])
    each = total[items.end + 1] - total[items.start]
    entries = np.concatenate([problem.cost, problem.cells])
    kernels.add_items(links.begin[items.owner], items.at, items.size, each, entries)
    cut = len(problem.cost)
    return forget_memory(replace(problem, cost=entries[:cut], cells=entries[cut:]))


def timeline(points: int, start: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[points] sums of the sizes that are live over the closed intervals [start, end]."""
    if not points:
        return np.zeros(0)
    grow = np.bincount(start, size, minlength=points + 1)
    return np.cumsum(grow - np.bincount(end + 1, size, minlength=points + 1))[:points]


def allowance(budget: float) -> float:
    """The budget, with room for the rounding of float sums; whole bytes below 2**53 are summed exactly."""
    return budget + 1e-9 * min(abs(budget), 1e8)
