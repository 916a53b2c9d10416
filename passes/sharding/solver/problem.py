"""The strategy graph in the form that the solver works on: a few long vectors, with memory beside each cost.

A `StrategyGraph` lists arrays by node, by transfer and by buffer. Here all costs are one vector of *entries*: the
strategies of every node, node by node, then the *cells* of every edge, the flat [P, Q] of its cost. Bytes are *items*:
those that one entry takes over a closed interval of program points. So whatever restricts or prices a problem treats
bytes as it treats seconds, and a problem of any number of nodes takes the same number of array operations.

    seconds(choice)  = sum_i node_i.cost[s_i] + sum_e sum_{q in Q_e} edge_e.cost[p_e, q]
    bytes(choice)[t] = base[t] + the sizes of the items of these entries whose interval contains t

with p_e = src_class[s_src] and Q_e = {klass[s_node] for (node, klass) in consumers}, a set: a layout is paid once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from alpa_lite.ir.strategy import Buffers, StrategyGraph, Transfer
from alpa_lite.passes.sharding.solver import kernels
from alpa_lite.passes.sharding.solver.links import Links, concatenate_flat, offsets, ranges, reduce_rows


class Items(NamedTuple):
    """The bytes that entries take: columns of equal length.

    The items of one node, or one edge, over one interval are next to each other, in the order of entries; nodes come by
    number, then edges.

    entry: its number. start, end: first and last program point. size: bytes, more than zero.
    """

    entry: np.ndarray
    start: np.ndarray
    end: np.ndarray
    size: np.ndarray

    def select(self, which: np.ndarray) -> Items:
        """Returns some of the items, by number or by a mask."""
        return Items(*(column[which] for column in self))


_NONE = np.zeros(0, dtype=np.int64)
NO_ITEMS = Items(_NONE, _NONE, _NONE, np.zeros(0))
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
        """Returns the objective of a choice; `inf` if it uses something forbidden."""
        choice = np.asarray(choice, dtype=np.int64)
        cells = self.links.cells_of(choice)
        # Rounded once: a replayed plan, whose program has fewer links, costs the same to the last bit.
        return math.fsum([*self.cost[self.links.first[:-1] + choice].tolist(), *self.cells[cells].tolist()])

    def bytes(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """[points] bytes live at each program point under a choice."""
        links, choice = self.links, np.asarray(choice, dtype=np.int64)
        chosen = np.zeros(links.begin[-1], dtype=bool)
        chosen[links.first[:-1] + choice] = chosen[len(self.cost) + links.cells_of(choice)] = True
        _, *live = self.items.select(np.flatnonzero(chosen[self.items.entry]))
        return self.base + timeline(len(self.base), *live)

    def peak(self, choice: Sequence[int] | np.ndarray) -> float:
        """Returns bytes at the fullest program point; zero without program points."""
        return float(self.bytes(choice).max(initial=0.0))

    def fits(self, choice: Sequence[int] | np.ndarray) -> bool:
        """Returns whether a choice stays within the budget, but for rounding of sums of fractional bytes."""
        return self.budget is None or self.peak(choice) <= allowance(self.budget)

    @property
    def lower_bound(self) -> float:
        """Seconds that no choice can undercut: each node at its cheapest, each transfer free."""
        return float(reduce_rows(np.minimum, self.cost, self.links.first).sum())

    @cached_property
    def forbidden_seconds(self) -> float:
        """Seconds that stand for infinite ones in descent from a forbidden choice: more than any allowed one takes."""
        most = sum(len(x) * float(x.max(initial=0.0, where=x < np.inf)) for x in (self.cost, self.cells))
        return 1e3 * most or 1.0

    @property
    def size(self) -> int:
        """How many numbers decide the problem: a measure of what a restriction has gained."""
        return len(self.cost) + int((np.diff(self.links.cell) * self.links.counts).sum())

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to choose."""
        return len(self.cost) == self.links.nodes


def forget_memory(problem: Problem) -> Problem:
    """Returns the same problem without bytes and budget: a relaxation."""
    return replace(problem, items=NO_ITEMS, base=np.zeros(0), budget=None)


def forget_seconds(problem: Problem) -> Problem:
    """Returns the same problem with every allowed cost zero: what remains is memory."""
    cost, cells = (np.where(np.isinf(seconds), np.inf, 0.0) for seconds in (problem.cost, problem.cells))
    return replace(problem, cost=cost, cells=cells, budget=None)


def price_memory(problem: Problem, price: np.ndarray) -> Problem:
    """Returns the Lagrangian: a byte at program point t costs `price[t]` seconds; no budget."""
    entry, start, end, size = problem.items
    total = np.concatenate([[0.0], np.cumsum(price)])
    seconds, cut = np.concatenate([problem.cost, problem.cells]), len(problem.cost)
    np.add.at(seconds, entry, (total[end + 1] - total[start]) * size)
    return forget_memory(replace(problem, cost=seconds[:cut], cells=seconds[cut:]))


def timeline(points: int, start: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[points] sums of the sizes that are live over the closed intervals [start, end]."""
    if not points:
        return np.zeros(0)
    grow = np.bincount(start, size, minlength=points + 1)
    return np.cumsum(grow - np.bincount(end + 1, size, minlength=points + 1))[:points]


def allowance(budget: float) -> float:
    """Returns the budget, with room for the rounding of float sums; whole bytes below 2**53 are summed exactly."""
    return budget + 1e-9 * min(abs(budget), 1e8)


_VISITS = 20  # of each node after which a descent ends
_GAIN = 1e-12  # relative: what moves less is rounding, and would move back


def descend(
    problem: Problem, choice: Sequence[int] | np.ndarray, waiting: np.ndarray | None = None, visits: int | None = None,
    fixed: int = -1,
) -> np.ndarray:  # fmt: skip
    """Coordinate descent: [nodes] a choice that, by default, no change of one node improves.

    One node at a time takes the strategy that is best while its neighbours stay, until no node wants to move. That
    gives upper bounds, which scale the linear program and let reduced costs forbid most of it; with one node fixed, the
    plan that answers to that node's strategy. Memory is not looked at: price it first. Descent must be able to leave
    what is forbidden, so a large cost stands for an infinite one.

    Args:
      choice: where it begins.
      waiting: the nodes that are visited first, each once; by default all.
      visits: of nodes, after which the descent ends.
      fixed: a node that keeps its strategy.
    """
    nodes, choice = problem.links.nodes, np.array(choice, dtype=np.int64)
    waiting, visits = np.arange(nodes) if waiting is None else waiting, visits or _VISITS * nodes
    costs = problem.cost, problem.cells, problem.forbidden_seconds
    kernels.descend(problem.links.tables, *costs, choice, waiting, visits, fixed, _GAIN)
    return choice


def problem_from_graph(graph: StrategyGraph) -> Problem:
    """Returns the problem of a strategy graph."""
    costs = [np.asarray(cost, dtype=np.float64) for cost in graph.node_cost]
    cost = concatenate_flat(costs, np.float64)
    assert all(one.size for one in costs) and (cost >= 0).all(), "a node has no strategy, or one of no seconds"
    links, cells, number = _links(graph.transfers, offsets([len(one) for one in costs]))
    points, items = 0, NO_ITEMS
    if graph.buffers is not None:
        points, items = graph.buffers.points, _items(graph.buffers, links, number)
    return Problem(links, cost, cells, items, np.zeros(points), graph.budget)


def _links(transfers: Sequence[Transfer], first: np.ndarray) -> tuple[Links, np.ndarray, np.ndarray]:
    """Returns the edges with consumers, their costs, and the edge of each transfer, -1 for those without consumers."""
    is_edge = np.array([bool(transfer.consumers) for transfer in transfers], dtype=bool)
    edges = list(itertools.compress(transfers, is_edge))
    ends = [(e, transfer.src, transfer.src_class) for e, transfer in enumerate(edges)]
    ends += [(e, node, klass) for e, transfer in enumerate(edges) for node, klass in transfer.consumers]
    edge, node = np.array([end[:2] for end in ends], dtype=np.int64).reshape(-1, 2).T.copy()
    shape = np.array([t.cost.shape for t in edges], dtype=np.int64).reshape(-1, 2)
    cells, classes = (
        concatenate_flat([t.cost for t in edges], np.float64),
        concatenate_flat([klass for *_, klass in ends]),
    )
    sizes, side = np.diff(first)[node], (np.arange(len(node)) >= len(edges)).astype(np.int64)
    assert [len(klass) for *_, klass in ends] == sizes.tolist() and (cells >= 0).all(), "classes or costs of a transfer"
    assert ((classes >= 0) & (classes < np.repeat(shape[edge, side], sizes))).all(), (
        "a class that a transfer does not have"
    )
    links, _ = Links(first, shape, edge, node, classes).merge_equal()
    return links, cells, np.where(is_edge, np.cumsum(is_edge, dtype=np.int64) - 1, -1)


def _items(buffers: Buffers, links: Links, number: np.ndarray) -> Items:
    """Returns the buffers by entry and interval; those of one entry that live equally long are one."""
    transfer = np.asarray(buffers.transfer, dtype=np.int64)
    edge = np.append(number, -1)[transfer]
    live = np.concatenate([np.flatnonzero(transfer < 0), np.flatnonzero((transfer >= 0) & (edge >= 0))])
    edge, is_node = edge[live], transfer[live] < 0
    owner = np.where(is_node, np.asarray(buffers.owner, dtype=np.int64)[live], links.nodes + edge)
    start, end, copy = (np.asarray(one, dtype=np.int64)[live] for one in (buffers.start, buffers.end, buffers.copy))
    # One size for each strategy of a node, and for each cell of a column of an edge.
    wide = np.append(links.shape[:, 1], 0)[edge]
    size = concatenate_flat([buffers.size[b] for b in live], np.float64)
    count = np.array([len(buffers.size[b]) for b in live], dtype=np.int64)
    part, row = ranges(np.zeros(len(live), dtype=np.int64), count), np.repeat(np.arange(len(live)), count)
    _, example, item = np.unique(
        (owner * buffers.points + start) * buffers.points + end, return_index=True, return_inverse=True
    )
    owner, start, end = owner[example], start[example], end[example]
    at = offsets(np.diff(links.begin)[owner])
    place = (at[item] + np.where(is_node, 0, copy))[row] + part * np.where(is_node, 1, wide)[row]
    dense = np.bincount(place, size, int(at[-1]))
    some = np.flatnonzero(dense > 0)
    which = np.searchsorted(at, some, side="right") - 1
    return Items(links.begin[owner[which]] + some - at[which], start[which], end[which], dense[some])
