"""Which program points the memory constraint needs: few, however deep the model.

A buffer is of a type; buffers of one type have equal bytes under every choice. So the bytes at point t are

    bytes(choice)[t] = sum_k n[t, k] size_k(choice),       size_k >= 0,

with n[t, k] the number of live buffers of type k. A point is implied, whatever is chosen, if its counts are at most
those of another point, or of a convex combination of others:

    n[t] <= (1 - w) n[a] + w n[b]  for some 0 <= w <= 1   implies   bytes[t] <= max(bytes[a], bytes[b]).

Where layers repeat, the counts at corresponding points change by the same amount from layer to layer: going forward
activations pile up, going backward they make room for gradients. Such a run is implied by its two ends. Of the rest
only points matter where something has started since anything ended. The largest bytes of every choice, and of every
type, are those over all points.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alpa_lite.ir.graph import Traced
from alpa_lite.passes.sharding.groups import Demand, Grouping
from alpa_lite.passes.sharding.solver.kernels import compile_lazily

_RUNS = 64  # runs that are tried among corresponding points, which then stay as they are
_STRIDES = 4
_NEAR = 8  # rows before and after one that may dominate it


def needed_points(start: np.ndarray, end: np.ndarray, kind: np.ndarray, alike: np.ndarray) -> np.ndarray:
    """Returns the program points that imply all others, in order.

    Args:
      start, end: [buffers] the closed interval of program points over which each buffer lives.
      kind: [buffers] its type, from 0.
      alike: [points] a number for each program point; corresponding points of repeated layers should share one. Any
        numbers are safe: they say only where to look.
    """
    if not len(start):
        return np.zeros(1, dtype=np.int64)
    starts = np.unique(start)
    points = starts[np.unique(np.searchsorted(starts, np.unique(end), side="right") - 1)]
    counts = _counts(start, end, kind, points)
    kept: list[np.ndarray] = []
    known: dict[tuple[int, bytes], list[int]] = {}  # the same changes from layer to layer are those of many points
    labels = alike[points]
    order = np.argsort(labels, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        change = counts[rows] - counts[rows[:1]]
        change = change[:, change.any(0)]  # constant columns never decide
        key = len(rows), change.tobytes()
        if key not in known:
            known[key] = _implying(change)
        kept.append(rows[known[key]])
    rows = np.sort(np.concatenate(kept))
    return points[rows[_undominated(counts[rows])]]


def _counts(start: np.ndarray, end: np.ndarray, kind: np.ndarray, points: np.ndarray) -> np.ndarray:
    """[points, types] how many buffers of each type are live."""
    change = np.zeros((len(points) + 1, int(kind.max()) + 1), dtype=np.int32)
    first, last = np.searchsorted(points, start), np.searchsorted(points, end, side="right")
    np.add.at(change, (first, kind), 1)
    np.add.at(change, (last, kind), -1)
    for before, row in itertools.pairwise(change):  # row by row, as they lie in memory
        row += before
    return change[:-1]


def _implying(counts: np.ndarray) -> list[int]:
    """Rows whose convex combinations are at least all rows: the ends of linear runs of every row, second row, ..."""
    best = list(range(len(counts)))
    for stride in range(1, _STRIDES + 1):  # a layer may hold several identical operations
        if len(best) <= 4 * stride:
            break
        ends = (first + stride * i for first in range(stride) for i in _ends(counts[first::stride]))
        found = list(itertools.islice(ends, len(best)))  # no more are looked for than are known
        best = min(best, found, key=len)
    return best


def _ends(counts: np.ndarray) -> Iterator[int]:
    """Yields the ends of linear runs of rows."""
    yield 0
    if 2 * int(np.abs(counts).max(initial=0)) * len(counts) >= 2**31:  # what follows would not fit
        counts = counts.astype(np.int64)
    todo = [(0, len(counts) - 1)]
    for _ in range(_RUNS):
        if not todo:
            return
        a, b = todo.pop()
        if a == b:
            continue
        if b == a + 1:  # nothing between
            yield b
            continue
        weight = np.arange(1, b - a)[:, None]
        inner = counts[a + 1 : b]
        line = counts[a] * (b - a - weight) + counts[b] * weight
        over = np.maximum(inner * (b - a) - line, 0).sum(1)
        above = np.flatnonzero(over)
        if not len(above):
            yield b
            continue
        # The first and the last layer often differ; else the line breaks where most is above it.
        breaks = sorted({a, *(a + 1 + int(i) for i in (above[0], over.argmax(), above[-1])), b})
        todo += list(itertools.pairwise(breaks))[::-1]
    for a, b in todo:
        yield from range(a + 1, b + 1)


def _undominated(counts: np.ndarray) -> np.ndarray:
    """Returns a mask of the rows that no nearby row dominates by being at least as large in every column."""
    keep = np.ones(len(counts), dtype=bool)
    for step in [s for k in range(1, _NEAR + 1) for s in (k, -k)]:
        alive = np.flatnonzero(keep)
        other = np.arange(len(alive)) + step
        inside = (other >= 0) & (other < len(alive))
        mine, theirs = alive[inside], alive[other[inside]]
        # A row that is dropped leads, in this one direction, to one that stays.
        _exceeding(counts, mine, theirs, keep)
    return keep


@compile_lazily
def _exceeding(counts: np.ndarray, mine: np.ndarray, theirs: np.ndarray, keep: np.ndarray) -> None:
    """Keeps the rows of `mine` that exceed that of `theirs` in any column: mostly one of the first decides."""
    for n in range(len(mine)):
        exceeds = False
        for column in range(counts.shape[1]):
            if counts[mine[n], column] > counts[theirs[n], column]:
                exceeds = True
                break
        keep[mine[n]] = exceeds


def compress_intervals(
    points: np.ndarray, start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns intervals in numbers of the needed points: (start, end, mask of the intervals that contain any)."""
    first, last = np.searchsorted(points, start), np.searchsorted(points, end, side="right") - 1
    return first, last, first <= last


class Life(NamedTuple):
    """A value that takes memory from one program point to another, and the number of values that do so."""

    value: int
    start: int
    end: int
    count: int


class Lifetimes:
    """The lifetimes of the values of a step, and of those that they stand for in a folded one."""

    def __init__(self, traced: Traced, grouping: Grouping) -> None:
        self._copies, self._positions, self._points = traced.copies, grouping.positions, grouping.points
        self._makers = {value: (op.index,) for op in traced.graph.block.ops for value in op.results}
        if (copies := traced.copies) is not None:
            points = np.array([self._positions[op.index] for op in traced.graph.block.ops])
            every = np.arange(len(copies.whole_step.graph.block.ops))
            before = np.searchsorted(copies.kept_places, every, side="right") - 1
            # Of each operation of the whole step the program point of the last that is kept up to it, and from it on.
            self._before = points[np.maximum(before, 0)]
            self._after = points[np.minimum(np.searchsorted(copies.kept_places, every), len(points) - 1)]

    def of_result(self, value: int, start: int, end: int, users: Sequence[Demand]) -> list[Life]:
        """As `find`, of the result of an operation."""
        first = [(op, start) for op in self._makers.get(value, ())]
        return self.find(value, start, end, first, _uses(users))

    def of_copy(self, value: int, users: Sequence[Demand]) -> list[Life]:
        """As `find`, of a value in another layout: from its first use to its last."""
        places, uses = [demand.position for demand in users], _uses(users)
        return self.find(value, min(places), max(places), uses, uses)

    def find(self, value: int, start: int, end: int, first: Sequence[_Use], last: Sequence[_Use]) -> list[Life]:
        """The lifetimes of a value and of those that it stands for, which differ in the layer.

        Args:
          start, end: its own.
          first: operations with the first of which it begins; an input of the step begins with the step.
          last: operations with the last of which it ends.
        """
        found, copies = [Life(value, start, end, 1)], self._copies
        if copies is None or value not in copies.values:
            return found
        if not first:
            return [Life(value, start, end, 1 + copies.count)]
        start_of, end_of = (
            [
                np.full(copies.count, position) if places is None else points[places]
                for op, position in ops
                for places in (copies.places(op),)
            ]
            for points, ops in ((self._after, first), (self._before, last))
        )
        begins = np.min(start_of, axis=0)
        ends = np.max(end_of, axis=0) if end_of else begins
        size, is_kept = self._points + 1, begins <= ends
        spans, counts = np.unique(begins[is_kept] * size + ends[is_kept], return_counts=True)
        triples = zip((spans // size).tolist(), (spans % size).tolist(), counts.tolist(), strict=True)
        return found + [Life(value, *triple) for triple in triples]


_Use = tuple[int, int]
"""An operation (-1: the end of a block), and the program point of it."""


def _uses(demands: Sequence[Demand]) -> list[_Use]:
    return [(demand.op, demand.position) for demand in demands]
