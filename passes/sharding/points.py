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
from collections.abc import Iterator

import numpy as np

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
