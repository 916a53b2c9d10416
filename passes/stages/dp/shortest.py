"""Shortest paths of one problem: the least sum of latencies within thresholds on excess and update, and least bytes.

F of `dp.paths` is a shortest path over (cut, devices left), and over (stages left) as well where the memory of a
position matters:

    F_r(node, d) = min over g from node, v:  latency[g, v] + F_{r-1}(head of g, d - size of g),     F_0(last, 0) = 0.

Exact reductions. (1) Shortest paths without positions, every stage with the least count that any position has, are
a relaxation, and are the answer where the true memory allows them. (2) A choice goes for good when the
shortest path through it plus the least possible max excess and max update reaches the best path found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

Path = tuple[tuple[int, int], ...]
"""The (group, variant) of each stage, first to last."""


@dataclass(frozen=True, eq=False)
class PathProblem:
    """See the module. Seconds and bytes are floats; inf seconds forbid a choice.

    Attributes:
      tail, head, size, kind: int [G]: the nodes that a group joins (tail < head; sorted by tail), its devices, and the
        number of its kind of submesh.
      latency, excess, update, fixed, each: float [G, V].
      num_nodes: the last node is the end.
      sources: the nodes where a path may start.
      devices: D; where `allows_fewer` is true, paths may use fewer.
      budget: bytes per device.
      count: of (stages left, least number of stages): the micro-batches in flight. Does not fall as the second
        rises.
      stages: the least and the largest S.
      exact_count: whether `count` ignores its second argument.
      kinds: the kind of each stage; None for any.
    """

    tail: np.ndarray
    head: np.ndarray
    size: np.ndarray
    kind: np.ndarray
    latency: np.ndarray
    excess: np.ndarray
    update: np.ndarray
    fixed: np.ndarray
    each: np.ndarray
    num_nodes: int
    sources: tuple[int, ...]
    devices: int
    allows_fewer: bool
    budget: float
    count: Callable[[int, int], int]
    stages: tuple[int, int]
    exact_count: bool = True
    kinds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Box:
    """Paths with `low` <= (max excess, max update) <= `high` and stages[0] <= S <= stages[1]."""

    low: tuple[float, float]
    high: tuple[float, float]
    stages: tuple[int, int]


class ShortestPaths:
    """Shortest paths of one problem, and the choices that are still of use.

    Tables of (node, devices) are padded with D infinite columns on the left, so that d - size needs no test.
    """

    def __init__(self, problem: PathProblem, limit: float = math.inf, memory: bool = True) -> None:
        """`limit`: of the value at infinite thresholds; `memory`: whether the budget binds."""
        self.problem = p = problem
        self.width = 2 * p.devices + 1
        self.columns = np.arange(p.devices + 1)
        self.base = p.head * self.width + p.devices - p.size
        self.terminal = p.num_nodes - 1
        usable = np.isfinite(p.latency) & np.isfinite(p.excess) & np.isfinite(p.update)
        usable &= np.isfinite(p.fixed) & np.isfinite(p.each)
        if p.kinds is not None:
            usable &= np.isin(p.kind, p.kinds)[:, None]
        self.everything = usable.copy()
        self.root = math.inf
        if memory:
            last = (p.head == self.terminal)[:, None]
            others = [p.count(left, p.stages[0]) for left in range(2, p.stages[1] + 1)]
            least = np.where(last, p.count(1, p.stages[0]), min(others, default=0))
            usable &= p.fixed + np.where(usable, p.each, 0.0) * least <= p.budget
            self.alive = usable
            self._bound(limit)

    def _bound(self, limit: float) -> None:
        """The relaxation at infinite thresholds: its value; if that is below `limit`, what else the search needs."""
        p = self.problem
        weights = [_over_variants(np.where(self.alive, x, np.inf)) for x in (p.latency, p.excess, p.update)]
        latency = weights[0]
        after, *others = self._backward(weights, (np.add, np.maximum, np.maximum))
        peaks = [self._at_sources(table) for table in others]
        self.root = self._at_sources(after) + peaks[0] + peaks[1]
        if not self.root < limit:
            return
        before = self._forward(latency)[:, ::-1][:, : p.devices + 1]  # [node, devices left]
        groups = np.flatnonzero(np.isfinite(latency))
        through = np.full(len(p.tail), np.inf)  # the least sum of the other stages' latencies
        rows = before[p.tail[groups]]
        rows += after.ravel()[self.base[groups][:, None] + self.columns]
        through[groups] = rows.min(1)
        self.least = through[:, None] + p.latency
        self.least += np.maximum(p.excess, peaks[0])
        self.least += np.maximum(p.update, peaks[1])
        self.fix(limit)
        self.values = [np.unique(x[self.alive]) for x in (p.excess, p.update)]
        if self.alive.any():
            self.corner = (peaks[0], peaks[1]), (float(self.values[0][-1]), float(self.values[1][-1]))
        else:
            self.root = limit

    def fix(self, limit: float) -> None:
        """Drops the choices through which every path takes `limit` seconds or more."""
        self.alive = self.alive & (self.least < limit)

    def largest_below(self, which: int, value: float) -> float:
        """Returns the largest excess (0) or update (1) below `value`; -inf if there is none."""
        at = int(np.searchsorted(self.values[which], value, "left")) - 1
        return float(self.values[which][at]) if at >= 0 else -math.inf

    def largest_at_most(self, which: int, value: float) -> float:
        """Returns the largest excess (0) or update (1) that is not above `value`; -inf if there is none."""
        at = int(np.searchsorted(self.values[which], value, "right")) - 1
        return float(self.values[which][at]) if at >= 0 else -math.inf

    def least_above(self, which: int, value: float) -> float:
        """Returns the least excess (0) or update (1) above `value`; inf if there is none."""
        at = int(np.searchsorted(self.values[which], value, "right"))
        return float(self.values[which][at]) if at < len(self.values[which]) else math.inf

    def peaks(self, path: Path) -> tuple[float, float]:
        """Max excess and max update."""
        p = self.problem
        return max(float(p.excess[c]) for c in path), max(float(p.update[c]) for c in path)

    def find_shortest(self, box: Box, limit: float) -> tuple[float, Path | None, bool]:
        """Least sum of latencies in a box, its path, whether memory allows it; (inf, None, True) if it is of no use."""
        p = self.problem
        allowed = self.alive & (p.excess <= box.high[0]) & (p.update <= box.high[1])
        latency = np.where(allowed, p.latency, np.inf)
        weights = _over_variants(latency)
        (table,) = self._backward([weights], [np.add])
        total = self._at_sources(table)
        if not total + box.low[0] + box.low[1] < limit:
            return math.inf, None, True
        steps = itertools.repeat((table, weights, latency))
        path = self._walk(self._first(table), steps, np.arange(len(weights)), np.add)
        if self._fits(path, box.stages):
            return total, path, True
        total, found = self.by_position(box.stages, allowed, np.add)
        if found is None or not total + box.low[0] + box.low[1] < limit:
            return math.inf, None, True
        return total, found, p.exact_count or box.stages[0] == box.stages[1] or self._fits(found, box.stages)

    def _fits(self, path: Path, stages: tuple[int, int]) -> bool:
        """Returns whether a path meets the constraints that shortest paths without positions ignore."""
        p, length = self.problem, len(path)
        if not stages[0] <= length <= stages[1]:
            return False
        if p.kinds is not None and tuple(int(p.kind[g]) for g, _ in path) != p.kinds:
            return False
        counts = [p.count(length - at, length) for at in range(length)]
        return all(p.fixed[c] + p.each[c] * n <= p.budget for c, n in zip(path, counts, strict=True))

    def _at_sources(self, table: np.ndarray) -> float:
        return float(table[list(self.problem.sources), -1].min())

    def _backward(self, weights: Sequence[np.ndarray], combine: Sequence[np.ufunc]) -> np.ndarray:
        """[weights, node, D + d]: the least combined weight from a node to the end with d devices left.

        All weights are finite for the same groups.
        """
        p, number = self.problem, len(weights)
        tables = np.full((number, p.num_nodes, self.width), np.inf)
        for table, ufunc in zip(tables, combine, strict=True):
            table[self.terminal, p.devices :] = self._end(ufunc)
        flat, least = tables.reshape(number, -1), tables[:, :, p.devices :]
        active = np.flatnonzero(np.isfinite(weights[0]))
        if not len(active):
            return tables
        base, each = self.base[active][:, None], [weight[active][:, None] for weight in weights]
        for run in reversed(_runs(p.tail[active])):
            rows = flat.take(base[run] + self.columns, axis=1)
            for row, ufunc, weight in zip(rows, combine, each, strict=True):
                ufunc(row, weight[run], out=row)
            np.minimum.reduce(rows, axis=1, out=least[:, p.tail[active[run.start]]])
        return tables

    def _end(self, combine: np.ufunc) -> np.ndarray:
        """Returns the cost of reaching the end with d devices left."""
        done = 0.0 if combine is np.add else -np.inf
        return np.where((self.columns == 0) | self.problem.allows_fewer, done, np.inf)

    def _forward(self, weights: np.ndarray) -> np.ndarray:
        """[node, D + d]: the least sum of weights from a source to a node with d devices used."""
        p = self.problem
        table = np.full((p.num_nodes, self.width), np.inf)
        table[list(p.sources), p.devices] = 0.0
        flat = table.ravel()
        active = np.flatnonzero(np.isfinite(weights))
        active = active[np.argsort(p.head[active], kind="stable")]
        base = p.tail * self.width + p.devices - p.size
        for run in _runs(p.head[active]) if len(active) else ():
            groups = active[run]
            rows = flat[base[groups][:, None] + self.columns] + weights[groups][:, None]
            np.minimum.reduce(rows, out=table[p.head[groups[0]], p.devices :])
        return table

    def _walk(
        self,
        node: int,
        steps: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
        groups: np.ndarray,
        combine: np.ufunc,
    ) -> Path:
        """Returns the best path from a source, in tables of the least combined weight to the end.

        Args:
          steps: for each stage the table of what follows, and the weights of some groups and of their variants.
        """
        p, path = self.problem, list[tuple[int, int]]()
        left, tails = p.devices, p.tail[groups]
        for table, weights, costs in steps:
            if node == self.terminal:
                break
            a, b = np.searchsorted(tails, (node, node + 1))
            own = groups[a:b]
            at = int(combine(weights[a:b], table[p.head[own], p.devices + left - p.size[own]]).argmin())
            path.append((int(own[at]), int(costs[a + at].argmin())))
            node, left = int(p.head[own[at]]), left - int(p.size[own[at]])
        return tuple(path)

    def _first(self, table: np.ndarray) -> int:
        """Returns the source of the best path."""
        sources = self.problem.sources
        return sources[int(table[list(sources), -1].argmin())]

    @property
    def min_in_flight(self) -> int:
        """The micro-batches that any stage has in flight at least."""
        p = self.problem
        return min(p.count(left, p.stages[0]) for left in range(1, p.stages[1] + 1))

    def least_of(self, count: float, combine: np.ufunc) -> float:
        """Returns the least of the combined bytes of a path's stages, each with `count` micro-batches in flight."""
        p = self.problem
        need = np.where(self.everything, p.fixed + np.where(self.everything, p.each, 0.0) * count, np.inf)
        return self._at_sources(self._backward([_over_variants(need)], [combine])[0])

    def by_position(
        self, stages: tuple[int, int], allowed: np.ndarray, combine: np.ufunc, limit: float = math.inf
    ) -> tuple[float, Path | None]:
        """Returns the least combined cost of paths with S in `stages`, by stages left.

        With `np.add` the cost is latency under the budget, for the count of the least S; with `np.maximum` it is bytes,
        below a limit.
        """
        p = self.problem
        table = np.full((p.num_nodes, self.width), np.inf)
        table[self.terminal, p.devices :] = self._end(combine)
        tables, steps = [table], list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
        groups = np.flatnonzero(allowed.any(1))
        fixed, each, base = p.fixed[groups], p.each[groups], self.base[groups]
        allowed, heads, tails = allowed[groups], p.head[groups], p.tail[groups]
        latency = np.where(allowed, p.latency[groups], np.inf)
        count, cost, least = -1, latency, np.zeros(0)
        for left in range(1, stages[1] + 1):
            if p.count(left, stages[0]) != count:
                count = p.count(left, stages[0])
                need = fixed + each * count
                if combine is np.add:
                    cost = np.where(need <= p.budget, latency, np.inf)
                else:
                    cost = np.where(allowed & (need < limit), need, np.inf)
                least = _over_variants(cost)
            weights = least if p.kinds is None else np.where(p.kind[groups] == p.kinds[-left], least, np.inf)
            steps.append((tables[-1], weights, cost))
            reached = (tables[-1].min(1) < np.inf)[heads]
            active = np.flatnonzero(np.isfinite(weights) & reached)
            if not len(active):
                break
            rows = tables[-1].ravel().take(base[active][:, None] + self.columns)
            combine(rows, weights[active][:, None], out=rows)
            tail = tails[active]
            starts = _starts(tail)
            tables.append(np.full((p.num_nodes, self.width), np.inf))
            tables[-1][tail[starts], p.devices :] = np.minimum.reduceat(rows, starts, axis=0)
        values = [self._at_sources(table) for table in tables[stages[0] :]]
        best = min(values, default=math.inf)
        if math.isinf(best):
            return best, None
        length = stages[0] + values.index(best)
        return best, self._walk(self._first(tables[length]), reversed(steps[:length]), groups, combine)


def _over_variants(values: np.ndarray) -> np.ndarray:
    """values.min(1), several times faster where there are few columns."""
    out = values[:, 0].copy()
    for column in values.T[1:]:
        np.minimum(out, column, out=out)
    return out


def _starts(values: np.ndarray) -> np.ndarray:
    """Returns where runs of equal values begin. There must be values."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1]))


def _runs(values: np.ndarray) -> list[slice]:
    """Returns the runs of equal values. There must be values."""
    return [slice(a, b) for a, b in itertools.pairwise([*_starts(values).tolist(), len(values)])]
