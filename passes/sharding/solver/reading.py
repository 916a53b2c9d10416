"""A strategy graph, checked and read into the vectors that the solver works on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from alpa_lite.ir.strategy import Buffers, StrategyGraph, Transfer
from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.problem import NO_ITEMS, Items, Problem
from alpa_lite.passes.sharding.solver.ragged import joined, offsets, ranges


def from_graph(graph: StrategyGraph) -> Problem:
    """The problem of a strategy graph.

    Raises:
      ValueError: a node without strategies, or a cost, class or buffer that cannot be (negative, NaN, out of range).
    """
    costs = [np.asarray(cost, dtype=np.float64) for cost in graph.node_cost]
    cost = joined(costs, np.float64)
    if any(one.ndim != 1 or not one.size for one in costs) or not (cost >= 0).all():
        for i, one in enumerate(costs):
            _check_node(one, i, graph)
    first = offsets([len(one) for one in costs])
    links, cells, number = _links(graph.transfers, first)
    points, items = 0, NO_ITEMS
    if graph.buffers is not None:
        points = graph.buffers.points
        _check_buffers(graph.buffers)
        items = _items(graph.buffers, links, number)
    return Problem(links, cost, cells, items, np.zeros(points), graph.budget)


def _links(transfers: Sequence[Transfer], first: np.ndarray) -> tuple[Links, np.ndarray, np.ndarray]:
    """The edges with consumers, their costs, and the edge of each transfer, -1 for those without consumers."""
    costs = [np.asarray(transfer.cost, dtype=np.float64) for transfer in transfers]
    is_edge = [cost.ndim == 2 and bool(t.consumers) for t, cost in zip(transfers, costs, strict=True)]
    for transfer, kept in zip(transfers, is_edge, strict=True):
        if not kept:
            _check_transfer(transfer, first)
    edges = list(itertools.compress(transfers, is_edge))
    ends = [(e, transfer.src, transfer.src_class) for e, transfer in enumerate(edges)]
    ends += [(e, node, klass) for e, transfer in enumerate(edges) for node, klass in transfer.consumers]
    edge, node = np.array([end[:2] for end in ends], dtype=np.int64).reshape(-1, 2).T.copy()
    shape = np.array([t.cost.shape for t in edges], dtype=np.int64).reshape(-1, 2)
    links = Links(first, shape, edge, node, joined([klass for *_, klass in ends]))
    cells = joined(list(itertools.compress(costs, is_edge)), np.float64)
    sizes = links.sizes[node]
    sound = [len(klass) for *_, klass in ends] == sizes.tolist() and (cells >= 0).all()
    if not sound or not ((links.classes >= 0) & (links.classes < np.repeat(shape.ravel()[links.side], sizes))).all():
        for transfer in edges:
            _check_transfer(transfer, first)
    return links.distinct()[0], cells, np.where(is_edge, np.cumsum(is_edge, dtype=np.int64) - 1, -1)


def _check_node(cost: np.ndarray, i: int, graph: StrategyGraph) -> None:
    name = graph.names[i] if graph.names else f"node {i}"
    if cost.ndim != 1 or not cost.size:
        raise ValueError(f"node_cost of {name} has shape {cost.shape}: a node needs a vector of at least one strategy")
    if not (cost >= 0).all():
        raise ValueError(f"node_cost of {name} holds {cost[~(cost >= 0)][0]}: seconds are at least zero, or inf")


def _check_transfer(transfer: Transfer, first: np.ndarray) -> None:
    name = transfer.name or f"the transfer from node {transfer.src}"
    cost = np.asarray(transfer.cost, dtype=np.float64)
    if cost.ndim != 2 or not (cost >= 0).all():
        raise ValueError(f"cost of {name}: [P, Q] seconds of at least zero are needed, or inf; got {cost}")
    for axis, (node, klass) in enumerate([(transfer.src, transfer.src_class), *transfer.consumers]):
        klass = np.asarray(klass, dtype=np.int64)
        classes, strategies = cost.shape[min(axis, 1)], int(first[node + 1] - first[node])
        if klass.shape != (strategies,) or klass.min() < 0 or klass.max() >= classes:
            raise ValueError(
                f"classes of node {node} in {name}: {strategies} numbers below {classes} are needed, got {klass}"
            )


def _check_buffers(buffers: Buffers) -> None:
    start, end = np.asarray(buffers.start), np.asarray(buffers.end)
    sizes = joined(buffers.size, np.float64)
    wrong = np.flatnonzero((start < 0) | (start > end) | (end >= buffers.points))
    if len(wrong):
        b = wrong[0]
        raise ValueError(f"buffer {b} lives over [{start[b]}, {end[b]}], but there are {buffers.points} program points")
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        bad = sizes[~(np.isfinite(sizes) & (sizes >= 0))][0]
        raise ValueError(f"a buffer has a size of {bad} bytes: finite sizes of at least zero are needed")


def _items(buffers: Buffers, links: Links, number: np.ndarray) -> Items:
    """The buffers by owner and interval; those of one owner that live equally long are one."""
    transfer = np.asarray(buffers.transfer, dtype=np.int64)
    kept = transfer < 0
    edge = np.where(kept, 0, number[transfer]) if len(number) else np.zeros(len(transfer), dtype=np.int64)
    owner = np.where(kept, np.asarray(buffers.owner, dtype=np.int64), links.nodes + edge)
    start, end = np.asarray(buffers.start, dtype=np.int64), np.asarray(buffers.end, dtype=np.int64)
    live = np.flatnonzero(kept | (edge >= 0))
    key = (owner[live] * buffers.points + start[live]) * buffers.points + end[live]
    _, example, group = np.unique(key, return_index=True, return_inverse=True)
    example = live[example]
    length = np.diff(np.append(links.begin, links.begin[-1]))[owner[example]]
    at = offsets(length)
    sizes, size_at = joined(buffers.size, np.float64), offsets([len(size) for size in buffers.size])
    item = np.zeros(len(transfer), dtype=np.int64)
    item[live] = group
    mine = live[kept[live]]  # of a node: by class of its strategies
    classes = [buffers.klass[b] for b in mine]
    counts = np.array([len(k) for k in classes], dtype=np.int64)
    where, what = ranges(at[item[mine]], counts), np.repeat(size_at[mine], counts) + joined(classes)
    theirs = live[~kept[live]]  # of an edge: a column
    rows, stride = links.shape[edge[theirs]].T
    cell = ranges(np.zeros(len(theirs), dtype=np.int64), rows) * np.repeat(stride, rows)
    cell += np.repeat(at[item[theirs]] + np.asarray(buffers.copy, dtype=np.int64)[theirs], rows)
    place = np.concatenate([where, cell])
    paid = np.concatenate([sizes[what], sizes[ranges(size_at[theirs], rows)]])
    items = Items(owner[example], start[example], end[example], at, np.bincount(place, paid, int(at[-1])))
    full = np.maximum.reduceat(items.size, at[:-1]) > 0 if len(example) else np.zeros(0, dtype=bool)
    return items if full.all() else items.of(np.flatnonzero(full))
