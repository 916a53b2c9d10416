"""Which strategies of a node no optimum needs, because another may replace them whatever the neighbours choose.

Strategy s gives way to r if going from s to r costs nothing for any choice of the others (dead-end elimination:
Goldstein, 1994):

    cost[r] - cost[s] + sum_e max_{neighbour's class} (cost_e[r, .] - cost_e[s, .]) <= 0,

and, where memory counts, no bytes grow. A layout that other consumers may want as well saves nothing when it is no
longer wanted here, and its copy may have to stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_lite.passes.sharding.solver.problem import Edge, Node

LARGE = 500_000  # comparisons beyond which replacement is looked for among strategies that the edge cannot tell apart


def undominated(node: Node, edges: Sequence[Edge], i: int, keep: Sequence[np.ndarray]) -> np.ndarray:
    """The mask `keep[i]` without the strategies that another may replace at no cost, whatever the neighbours do."""
    with np.errstate(invalid="ignore"):  # inf - inf: such a pair compares false, and is kept
        rise = node.cost[:, None] - node.cost[None, :]  # [r, s]: the most that going from s to r may cost
        for edge in edges:
            rise = rise + _rise(edge, i, keep)
        better = np.less_equal(rise, 0.0)
    size = node.memory.size
    if node.memory:
        better &= (size[:, :, None] <= size[:, None, :]).all(0)
    alive = keep[i].copy()
    for s in np.argsort(-node.cost, kind="stable"):
        if alive[s] and (better[:, s] & alive).sum() > better[s, s]:
            alive[s] = False
    return alive


def _rise(edge: Edge, i: int, keep: Sequence[np.ndarray]) -> np.ndarray:
    """[r, s]: the most that this edge's cost may rise when node i goes from s to r; inf if its memory may."""
    own = [klass for node, klass in edge.consumers if node == i]
    rows, columns = edge.cost.shape
    work = rows * columns * (rows if edge.src == i else columns) * (len(edge.memory.span) + 1)
    if work > LARGE or (edge.src == i and own):
        same = np.stack([k[:, None] == k[None, :] for k in ([edge.src_class, *own] if edge.src == i else own)]).all(0)
        return np.where(same, 0.0, np.inf)
    if edge.src == i:
        return _rise_source(edge, keep)[edge.src_class[:, None], edge.src_class[None, :]]
    live = np.unique(edge.src_class[keep[edge.src]])
    if len(own) > 1:  # what is newly wanted costs at most this; what is no longer wanted may be wanted by others
        most = edge.cost[live].max(0)
        most = np.where(copied_layouts(edge), np.inf, most)
        return sum((np.where(k[:, None] == k[None, :], 0.0, most[k][:, None]) for k in own), np.zeros(1))
    klass = own[0]
    shared = np.zeros(edge.cost.shape[1], dtype=bool)
    for node, other in edge.consumers:
        if node != i:
            shared[other[keep[node]]] = True
    cost = edge.cost[live]
    saved = np.where(shared, 0.0, cost)[:, None, :]
    rise = np.where(np.isinf(cost)[:, None, :], -np.inf, cost[:, :, None] - saved).max(0)
    if edge.memory:
        size = edge.memory.size[:, live]
        freed = np.where(shared, 0.0, size)
        rise = np.where((size[:, :, :, None] <= freed[:, :, None, :]).all((0, 1)), rise, np.inf)
    np.fill_diagonal(rise, 0.0)
    return rise[klass[:, None], klass[None, :]]


def _rise_source(edge: Edge, keep: Sequence[np.ndarray]) -> np.ndarray:
    """[p', p]: the most that the cost may rise when the source goes from class p to p'.

    The layouts wanted are unknown, at least one for each consumer. If no layout rises, the total rises by no more than
    any one of them; else by no more than the sum of each consumer's worst.
    """
    cost = edge.cost
    rise = np.where(np.isinf(cost)[None, :, :], -np.inf, cost[:, None, :] - cost[None, :, :])
    live = [np.unique(klass[keep[node]]) for node, klass in edge.consumers]
    worst = np.stack([rise[:, :, columns].max(2) for columns in live])
    total = np.where(worst.max(0) <= 0, worst.min(0), np.maximum(worst, 0).sum(0))
    columns = np.unique(np.concatenate(live))
    if edge.memory:
        size = edge.memory.size[:, :, columns]
        no_more = (size[:, :, None] <= size[:, None]) | np.isinf(cost)[None, None, :, columns]
        total = np.where(no_more.all((0, 3)), total, np.inf)
    np.fill_diagonal(total, 0.0)
    return total


def copied_layouts(edge: Edge) -> np.ndarray:
    """[Q] whether a layout has a copy with bytes."""
    return np.asarray(edge.memory.size.any((0, 1))) if edge.memory else np.zeros(edge.cost.shape[1], dtype=bool)
