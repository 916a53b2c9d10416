"""The exact minimum of a pipeline's step seconds for one number of micro-batches and one schedule.

A *choice* (group g, variant v) makes layers [i, j) one stage on one kind of submesh. Groups are the edges of an acyclic
graph whose nodes are cuts between layers, so that pipelines are paths from a source to the last node. Minimise

    T = sum latency + max excess + max update     over the choices of a path,

with exactly (or at most) D devices in all, S stages, and for the stage with r stages left, itself included,

    fixed + each * count(r, S) <= budget.

For thresholds a on excess and b on update, F(a, b) = the least sum of latencies of paths that stay within both is a
shortest path (`dp.shortest`).

Search. A box holds the paths whose max excess, max update and S lie in given intervals. F at a box's upper corner plus
its lower corner is a lower bound for all its paths. The path that attains F, with excess a' and update b', is
the best one of the box but for those with excess < a' or with update < b': these are the new boxes, the first one
halved. Boxes are taken in the order of their bounds until none is below the best path found: the optimum, proven.
This is Alpa's enumeration of t_max in ascending order (Zheng et al., OSDI 2022, section 5), whose stop when t_max alone
exceeds the best is the same bound with F = 0, but with far fewer thresholds visited.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from alpa_lite.passes.stages.dp.shortest import Box, Path, PathProblem, ShortestPaths

MAX_THRESHOLDS = 2_000
"""Thresholds that one search evaluates at most, each a shortest path."""

_ROUNDING = 1e-12  # relative: below it two sums differ by the order of their terms only


@dataclass(frozen=True)
class Minimum:
    """The result of `minimise`.

    Attributes:
      seconds, path: the best path below the cutoff; inf and None if there is none.
      bound: no path is faster.
      by_stages: the fastest path that was met with each number of stages, with its seconds.
      is_finished: whether the search came to its end.
    """

    seconds: float
    path: Path | None
    bound: float
    by_stages: dict[int, tuple[float, Path]] = field(default_factory=dict)
    is_finished: bool = True


def minimise(problem: PathProblem, cutoff: float = math.inf, gap: float = 0.0) -> Minimum:
    """Returns the fastest path, if it takes less than `cutoff` seconds.

    After `MAX_THRESHOLDS` it is the best path so far, and none if there is a cutoff.

    Args:
      cutoff: paths of at least this many seconds are not wanted.
      gap: stop when the best path is proven to be within this fraction of the fastest.
    """
    best, path, evaluated = cutoff, None, 0
    search = ShortestPaths(problem, _below(best, gap))
    if not search.root < _below(best, gap):
        return Minimum(math.inf, None, search.root)
    by_stages: dict[int, tuple[float, Path]] = {}
    order = itertools.count()
    low, high = search.corner
    heap: list[tuple[float, int, Box]] = [(search.root, next(order), Box(low, high, problem.stages))]
    while heap and heap[0][0] < _below(best, gap) and not (math.isfinite(best) and evaluated >= MAX_THRESHOLDS):
        _, _, box = heapq.heappop(heap)
        evaluated += 1
        total, found, feasible = search.find_shortest(box, _below(best, gap))
        if found is None:
            continue
        excess, update = search.peaks(found)
        if feasible:
            seconds = total + excess + update
            if seconds < by_stages.get(len(found), (math.inf, found))[0]:
                by_stages[len(found)] = seconds, found
            if seconds < _below(best, 0.0):
                best, path = seconds, found
                search.fix(_below(best, gap))
        for child in _split(box, search, excess, update, len(found), feasible):
            bound = total + child.low[0] + child.low[1]
            if bound < _below(best, gap):
                heapq.heappush(heap, (bound, next(order), child))
    bound = min([best, *(bound for bound, _, _ in heap[:1])])
    finished = not heap or heap[0][0] >= _below(best, gap)
    return Minimum(math.inf if path is None else best, path, bound, by_stages, finished)


def least_bytes(problem: PathProblem, limit: float = math.inf) -> tuple[float, Path | None]:
    """The smallest budget under which there is a path, and that path; inf and None if there is none below `limit`.

    Where the count depends on S, every S is tried.
    """
    search = ShortestPaths(problem, memory=False)
    if not search.least_of(search.min_in_flight, np.maximum) < limit:
        return math.inf, None
    lowest, highest = problem.stages
    ranges = [(lowest, highest)] if problem.exact_count else [(s, s) for s in range(lowest, highest + 1)]
    best, path = math.inf, None
    for stages in ranges:
        value, found = search.by_position(stages, search.everything, np.maximum, min(best, limit))
        if value < best:
            best, path = value, found
    return best, path


def least_bytes_together(problem: PathProblem, meshes: int, virtual: int) -> float:
    """Returns bytes that the fullest of this many submeshes takes at least, each with `virtual` stages of a path.

    That is no less than what all take on average; and of what its stages keep of a micro-batch in flight, a submesh
    holds the most of any, which is no less than their mean.
    """
    search = ShortestPaths(problem, memory=False)
    return search.least_of(search.min_in_flight / virtual, np.add) / meshes


def _below(best: float, gap: float) -> float:
    """Returns the limit below which a value is better than `best` by more than `gap`, and than rounding."""
    return best if math.isinf(best) else best - abs(best) * max(gap, _ROUNDING)


def _split(box: Box, search: ShortestPaths, excess: float, update: float, stages: int, feasible: bool) -> list[Box]:
    """Boxes that hold every path of a box that may be better than one of the given peaks and stages."""
    (low_a, low_b), (high_a, high_b), (first, last) = box.low, box.high, box.stages
    if not feasible:  # the memory of a path with this many stages was taken too low
        parts = [(first, stages - 1), (stages, last)] if first < stages else [(first, first), (first + 1, last)]
        return [Box(box.low, box.high, part) for part in parts if part[0] <= part[1]]
    boxes = []
    below_a, below_b = search.largest_below(0, excess), search.largest_below(1, update)
    if below_a >= low_a:
        middle = search.largest_at_most(0, (low_a + below_a) / 2)
        if low_a <= middle < below_a:
            boxes.append(Box((low_a, low_b), (middle, high_b), box.stages))
            low_a = search.least_above(0, middle)
        boxes.append(Box((low_a, low_b), (below_a, high_b), box.stages))
    if below_b >= low_b:
        boxes.append(Box((max(excess, box.low[0]), low_b), (high_a, below_b), box.stages))
    return boxes
