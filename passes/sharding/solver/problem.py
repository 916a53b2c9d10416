"""The strategy graph in the form that the solver works on: dense arrays, with memory beside each cost.

A `StrategyGraph` lists buffers by owner. Here every node and every edge carries its own bytes: for some closed
intervals of program points, an array of the shape of its cost. So whatever
restricts or prices a problem treats bytes as it treats seconds.

    seconds(choice)  = sum_i node_i.cost[s_i] + sum_e sum_{q in Q_e} edge_e.cost[p_e, q]
    bytes(choice)[t] = base[t] + the same sum over the memory of the intervals that contain t

with p_e = src_class[s_src] and Q_e = {klass[s_node] for (node, klass) in consumers}, a set: a layout is paid once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from alpa_lite.strategy import Buffers, StrategyGraph, Transfer

Consumer = tuple[int, np.ndarray]


@dataclass(frozen=True, eq=False)
class Bytes:
    """Bytes that live over closed intervals of program points: span [n, 2], size [n, *shape]."""

    span: np.ndarray
    size: np.ndarray

    def __bool__(self) -> bool:
        return len(self.span) > 0

    def at(self, *index: np.ndarray | int) -> Bytes:
        """The bytes of some entries, as one would index the cost."""
        every: tuple[Any, ...] = (slice(None), *index)
        return Bytes(self.span, self.size[every]) if self else nothing()

    def where(self, mask: np.ndarray) -> Bytes:
        """The bytes of the entries of a mask, zero elsewhere."""
        return Bytes(self.span, np.where(mask, self.size, 0.0)) if self else self

    def plus(self, other: Bytes) -> Bytes:
        """Both together."""
        if not (self and other):
            return self or other
        return Bytes(np.concatenate([self.span, other.span]), np.concatenate([self.size, other.size]))

    def tidy(self) -> Bytes:
        """The same bytes with equal intervals added up and empty ones left out."""
        if not self:
            return self
        span, size = self.span, self.size
        if len(span) > 1:
            key = span[:, 0] * (span[:, 1].max() + 1) + span[:, 1]
            unique, first, group = np.unique(key, return_index=True, return_inverse=True)
            if len(unique) < len(key):
                size = np.zeros((len(unique), *size.shape[1:]))
                np.add.at(size, group, self.size)
                span = span[first]
        full = size.reshape(len(size), -1).any(1)
        return Bytes(span, size) if full.all() else Bytes(span[full], size[full])


def nothing() -> Bytes:
    """No bytes at all."""
    return Bytes(np.zeros((0, 2), dtype=np.int64), np.zeros(0))


@dataclass(frozen=True, eq=False)
class Vertex:
    """One decision. cost: [S] seconds. memory: [n, S] bytes."""

    cost: np.ndarray
    memory: Bytes = field(default_factory=nothing)


@dataclass(frozen=True, eq=False)
class Edge:
    """One transfer. cost: [P, Q] seconds, `inf` forbids. memory: [n, P, Q] bytes of the copy in layout q.

    src_class: [S of src] -> p. consumers: (node, [S of node] -> q); no two of them equal.
    """

    src: int
    src_class: np.ndarray
    consumers: tuple[Consumer, ...]
    cost: np.ndarray
    memory: Bytes = field(default_factory=nothing)

    @property
    def nodes(self) -> set[int]:
        """The nodes whose choice decides the cost."""
        return {self.src, *(node for node, _ in self.consumers)}

    def wanted(self, choice: Sequence[int] | np.ndarray) -> list[int]:
        """The layouts that some consumer wants, each once."""
        return sorted({int(klass[choice[node]]) for node, klass in self.consumers})

    def seconds(self, choice: Sequence[int] | np.ndarray) -> float:
        """What a choice pays for the transfer."""
        paid = self.cost[self.src_class[choice[self.src]]]
        if len(self.consumers) == 1:  # the usual case, quickly
            node, klass = self.consumers[0]
            return float(paid[klass[choice[node]]])
        return float(paid[self.wanted(choice)].sum())


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one strategy per node. base: [points] bytes that every choice has. budget: bytes, or None."""

    nodes: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    base: np.ndarray
    budget: float | None = None

    def seconds(self, choice: Sequence[int] | np.ndarray) -> float:
        """The objective of a choice; `inf` if it uses something forbidden."""
        total = sum(float(node.cost[s]) for node, s in zip(self.nodes, choice, strict=True))
        return total + sum(edge.seconds(choice) for edge in self.edges)

    def bytes(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """[points] bytes live at each program point under a choice."""
        return self.base + self.bytes_of(range(len(self.nodes)), range(len(self.edges)), choice)

    def bytes_of(self, nodes: Iterable[int], edges: Iterable[int], choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """[points] the bytes of some nodes and edges alone under a choice."""
        spans, sizes = [np.zeros((0, 2), dtype=np.int64)], [np.zeros(0)]
        for i in nodes:
            memory = self.nodes[i].memory
            if memory:
                spans.append(memory.span)
                sizes.append(memory.size[:, choice[i]])
        for edge in (self.edges[e] for e in edges):
            if edge.memory:
                spans.append(edge.memory.span)
                sizes.append(edge.memory.size[:, edge.src_class[choice[edge.src]], edge.wanted(choice)].sum(1))
        start, end = np.concatenate(spans).T
        return timeline(len(self.base), start, end, np.concatenate(sizes))

    def peak(self, choice: Sequence[int] | np.ndarray) -> float:
        """Bytes at the fullest program point; zero without program points."""
        return float(self.bytes(choice).max(initial=0.0))

    def fits(self, choice: Sequence[int] | np.ndarray) -> bool:
        """Whether a choice stays within the budget, but for rounding of sums of fractional bytes."""
        return self.budget is None or self.peak(choice) <= allowance(self.budget)

    @cached_property
    def touching(self) -> list[list[int]]:
        """For each node the edges that it is part of."""
        touching: list[list[int]] = [[] for _ in self.nodes]
        for e, edge in enumerate(self.edges):
            for node in edge.nodes:
                touching[node].append(e)
        return touching

    @property
    def lower_bound(self) -> float:
        """Seconds that no choice can undercut: each node at its cheapest, each transfer free."""
        return float(sum(node.cost.min() for node in self.nodes))

    @property
    def size(self) -> int:
        """How many numbers decide the problem: a measure of what a restriction has gained."""
        return sum(n.cost.size for n in self.nodes) + sum(e.cost.size * len(e.consumers) for e in self.edges)


def used(classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of `count` classes that occur, ascending, and each entry as its position among them.

    As `np.unique` with its inverse, without sorting: classes are small numbers.
    """
    mask = np.zeros(count, dtype=bool)
    mask[classes] = True
    return np.flatnonzero(mask), (np.cumsum(mask) - 1)[classes]


def from_graph(graph: StrategyGraph) -> Problem:
    """The problem of a strategy graph.

    Raises:
      ValueError: a node without strategies, or a cost, class or buffer that cannot be (negative, NaN, out of range).
    """
    names = graph.names or tuple(f"node {i}" for i in range(len(graph.node_cost)))
    costs = [_cost(cost, names[i]) for i, cost in enumerate(graph.node_cost)]
    edges = [_edge(transfer, [len(cost) for cost in costs]) for transfer in graph.transfers]
    nodes = [Vertex(cost) for cost in costs]
    points = 0
    if graph.buffers is not None:
        points = graph.buffers.points
        _check_buffers(graph.buffers)
        nodes = _node_buffers(graph.buffers, nodes)
        edges = _edge_buffers(graph.buffers, edges)
    return Problem(tuple(nodes), tuple(edge for edge in edges if edge.consumers), np.zeros(points), graph.budget)


def forget_memory(problem: Problem) -> Problem:
    """The same problem without bytes and budget: a relaxation."""
    nodes = tuple(Vertex(node.cost) for node in problem.nodes)
    edges = tuple(Edge(e.src, e.src_class, e.consumers, e.cost) for e in problem.edges)
    return Problem(nodes, edges, np.zeros(0))


def forget_seconds(problem: Problem) -> Problem:
    """The same problem with every allowed cost zero: what remains is memory."""
    nodes = tuple(Vertex(np.where(np.isinf(n.cost), np.inf, 0.0), n.memory) for n in problem.nodes)
    edges = tuple(
        Edge(e.src, e.src_class, e.consumers, np.where(np.isinf(e.cost), np.inf, 0.0), e.memory) for e in problem.edges
    )
    return Problem(nodes, edges, problem.base)


def price_memory(problem: Problem, price: np.ndarray) -> Problem:
    """The Lagrangian: a byte at program point t costs `price[t]` seconds; no budget."""
    total = np.concatenate([[0.0], np.cumsum(price)])

    def priced(cost: np.ndarray, memory: Bytes) -> np.ndarray:
        each = total[memory.span[:, 1] + 1] - total[memory.span[:, 0]]
        return cost + np.tensordot(each, memory.size, 1) if each.any() else cost

    nodes = tuple(Vertex(priced(n.cost, n.memory)) for n in problem.nodes)
    edges = tuple(Edge(e.src, e.src_class, e.consumers, priced(e.cost, e.memory)) for e in problem.edges)
    return Problem(nodes, edges, np.zeros(0))


def timeline(points: int, start: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[points] sums of the sizes that are live over the closed intervals [start, end]."""
    if not points:
        return np.zeros(0)
    grow = np.bincount(start, size, minlength=points + 1)
    return np.cumsum(grow - np.bincount(end + 1, size, minlength=points + 1))[:points]


def allowance(budget: float) -> float:
    """The budget, with room for the rounding of float sums; whole bytes below 2**53 are summed exactly."""
    return budget + 1e-9 * min(abs(budget), 1e8)


def _cost(cost: np.ndarray, name: str) -> np.ndarray:
    cost = np.asarray(cost, dtype=np.float64)
    if cost.ndim != 1 or not cost.size:
        raise ValueError(f"node_cost of {name} has shape {cost.shape}: a node needs a vector of at least one strategy")
    if not (cost >= 0).all():
        raise ValueError(f"node_cost of {name} holds {cost[~(cost >= 0)][0]}: seconds are at least zero, or inf")
    return cost


def _edge(transfer: Transfer, strategies: list[int]) -> Edge:
    name = transfer.name or f"the transfer from node {transfer.src}"
    cost = np.asarray(transfer.cost, dtype=np.float64)
    if cost.ndim != 2 or not (cost >= 0).all():
        raise ValueError(f"cost of {name}: [P, Q] seconds of at least zero are needed, or inf; got {cost}")
    consumers: list[Consumer] = []
    seen = set()
    for axis, (node, klass) in enumerate([(transfer.src, transfer.src_class), *transfer.consumers]):
        klass = np.asarray(klass, dtype=np.int64)
        classes = cost.shape[min(axis, 1)]
        if klass.shape != (strategies[node],) or klass.min() < 0 or klass.max() >= classes:
            raise ValueError(
                f"classes of node {node} in {name}: {strategies[node]} numbers below {classes} are needed, got {klass}"
            )
        if axis and (key := (node, klass.tobytes())) not in seen:
            seen.add(key)
            consumers.append((node, klass))
    src_class = np.asarray(transfer.src_class, dtype=np.int64)
    return Edge(transfer.src, src_class, tuple(consumers), cost)


def _check_buffers(buffers: Buffers) -> None:
    start, end = np.asarray(buffers.start), np.asarray(buffers.end)
    sizes = np.concatenate([np.zeros(0), *buffers.size])
    wrong = np.flatnonzero((start < 0) | (start > end) | (end >= buffers.points))
    if len(wrong):
        b = wrong[0]
        raise ValueError(f"buffer {b} lives over [{start[b]}, {end[b]}], but there are {buffers.points} program points")
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        bad = sizes[~(np.isfinite(sizes) & (sizes >= 0))][0]
        raise ValueError(f"a buffer has a size of {bad} bytes: finite sizes of at least zero are needed")


def _by(owner: np.ndarray, these: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """The buffers among `these`, grouped by owner."""
    if not len(these):
        return []
    these = these[np.argsort(owner[these], kind="stable")]
    owners, first = np.unique(owner[these], return_index=True)
    return [(int(o), group) for o, group in zip(owners, np.split(these, first[1:]), strict=True)]


def _node_buffers(buffers: Buffers, nodes: list[Vertex]) -> list[Vertex]:
    """The nodes with the bytes of their buffers."""
    result = list(nodes)
    for i, mine in _by(np.asarray(buffers.owner), np.flatnonzero(np.asarray(buffers.transfer) < 0)):
        span = np.stack([buffers.start[mine], buffers.end[mine]], axis=1)
        size = np.stack([np.asarray(buffers.size[b], dtype=np.float64)[buffers.klass[b]] for b in mine])
        result[i] = Vertex(nodes[i].cost, Bytes(span, size).tidy())
    return result


def _edge_buffers(buffers: Buffers, edges: list[Edge]) -> list[Edge]:
    """The edges with the bytes of their copies."""
    result = list(edges)
    for t, mine in _by(np.asarray(buffers.transfer), np.flatnonzero(np.asarray(buffers.transfer) >= 0)):
        edge = edges[t]
        key = np.asarray(buffers.start)[mine] * buffers.points + np.asarray(buffers.end)[mine]
        unique, group = np.unique(key, return_inverse=True)
        size = np.zeros((len(unique), *edge.cost.shape[::-1]))
        np.add.at(size, (group, np.asarray(buffers.copy)[mine]), np.stack([buffers.size[b] for b in mine]))
        span = np.stack([unique // buffers.points, unique % buffers.points], axis=1)
        result[t] = replace(edge, memory=Bytes(span, size.swapaxes(1, 2)).tidy())
    return result
