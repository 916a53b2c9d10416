"""The strategy graph in the form that the solver works on: dense arrays, with memory beside each cost.

A `StrategyGraph` lists buffers by owner. Here every node and every edge carries its own bytes: `memory[(start, end)]`
is an array of the shape of the cost, the bytes that live over that closed interval of program points. So a reduction
moves bytes as it moves seconds, and one that may not ignore memory has only to look beside the cost.

    seconds(choice)  = sum_i node_i.cost[s_i] + sum_e sum_{q in Q_e} edge_e.cost[p_e, q]
    bytes(choice)[t] = base[t] + the same sum over the memory of the intervals that contain t

with p_e = src_class[s_src] and Q_e = {klass[s_node] for (node, klass) in consumers}, a set: a layout is paid once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from alpa_lite.strategy import Buffers, StrategyGraph, Transfer

Span = tuple[int, int]
Consumer = tuple[int, np.ndarray]


@dataclass(frozen=True, eq=False)
class Node:
    """One decision. cost: [S] seconds. memory: span -> [S] bytes."""

    cost: np.ndarray
    memory: dict[Span, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Edge:
    """One transfer. cost: [P, Q] seconds, `inf` forbids. memory: span -> [P, Q] bytes of the copy in layout q.

    src_class: [S of src] -> p. consumers: (node, [S of node] -> q); no two of them alike.
    """

    src: int
    src_class: np.ndarray
    consumers: tuple[Consumer, ...]
    cost: np.ndarray
    memory: dict[Span, np.ndarray] = field(default_factory=dict)

    @property
    def nodes(self) -> set[int]:
        """The nodes whose choice decides the cost."""
        return {self.src, *(node for node, _ in self.consumers)}

    def wanted(self, choice: Sequence[int] | np.ndarray) -> list[int]:
        """The layouts that some consumer wants, each once."""
        return sorted({int(klass[choice[node]]) for node, klass in self.consumers})


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one strategy per node. base: [points] bytes that every choice has. budget: bytes, or None."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    base: np.ndarray
    budget: float | None = None

    def seconds(self, choice: Sequence[int] | np.ndarray) -> float:
        """The objective of a choice; `inf` if it uses something forbidden."""
        total = sum(float(node.cost[s]) for node, s in zip(self.nodes, choice, strict=True))
        return total + sum(float(e.cost[e.src_class[choice[e.src]], e.wanted(choice)].sum()) for e in self.edges)

    def bytes(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """[points] bytes live at each program point under a choice."""
        spans: list[Span] = []
        sizes: list[float] = []
        for node, s in zip(self.nodes, choice, strict=True):
            for span, size in node.memory.items():
                spans.append(span)
                sizes.append(float(size[s]))
        for edge in self.edges:
            if edge.memory:
                p, wanted = edge.src_class[choice[edge.src]], edge.wanted(choice)
                for span, size in edge.memory.items():
                    spans.append(span)
                    sizes.append(float(size[p, wanted].sum()))
        start, end = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        return self.base + timeline(len(self.base), start, end, np.array(sizes))

    def peak(self, choice: Sequence[int] | np.ndarray) -> float:
        """Bytes at the fullest program point; zero without program points."""
        return float(self.bytes(choice).max(initial=0.0))

    def fits(self, choice: Sequence[int] | np.ndarray) -> bool:
        """Whether a choice stays within the budget, but for rounding of sums of fractional bytes."""
        return self.budget is None or self.peak(choice) <= allowance(self.budget)

    @property
    def lower_bound(self) -> float:
        """Seconds that no choice can undercut: each node at its cheapest, each transfer free."""
        return float(sum(node.cost.min() for node in self.nodes))

    @property
    def size(self) -> int:
        """How many numbers decide the problem: a measure of what a reduction has gained."""
        return sum(n.cost.size for n in self.nodes) + sum(e.cost.size * len(e.consumers) for e in self.edges)


def from_graph(graph: StrategyGraph) -> Problem:
    """The problem of a strategy graph.

    Raises:
      ValueError: a node without strategies, or a cost, class or buffer that cannot be (negative, NaN, out of range).
    """
    names = graph.names or tuple(f"node {i}" for i in range(len(graph.node_cost)))
    costs = [_cost(cost, names[i]) for i, cost in enumerate(graph.node_cost)]
    edges = [_edge(transfer, [len(cost) for cost in costs]) for transfer in graph.transfers]
    node_memory: list[dict[Span, np.ndarray]] = [{} for _ in costs]
    points = 0
    if graph.buffers is not None:
        points = graph.buffers.points
        _add_buffers(graph.buffers, [len(cost) for cost in costs], edges, node_memory)
    nodes = tuple(Node(cost, memory) for cost, memory in zip(costs, node_memory, strict=True))
    return Problem(nodes, tuple(edge for edge in edges if edge.consumers), np.zeros(points), graph.budget)


def forget_memory(problem: Problem) -> Problem:
    """The same problem without bytes and budget: a relaxation."""
    nodes = tuple(Node(node.cost) for node in problem.nodes)
    edges = tuple(Edge(e.src, e.src_class, e.consumers, e.cost) for e in problem.edges)
    return Problem(nodes, edges, np.zeros(0))


def forget_seconds(problem: Problem) -> Problem:
    """The same problem with every allowed cost zero: what remains is memory."""
    nodes = tuple(Node(np.where(np.isinf(n.cost), np.inf, 0.0), n.memory) for n in problem.nodes)
    edges = tuple(
        Edge(e.src, e.src_class, e.consumers, np.where(np.isinf(e.cost), np.inf, 0.0), e.memory) for e in problem.edges
    )
    return Problem(nodes, edges, problem.base)


def price_memory(problem: Problem, price: np.ndarray) -> Problem:
    """The Lagrangian: a byte at program point t costs `price[t]` seconds; no budget."""
    total = np.concatenate([[0.0], np.cumsum(price)])

    def priced(cost: np.ndarray, memory: dict[Span, np.ndarray]) -> np.ndarray:
        return cost + sum((total[end + 1] - total[start]) * size for (start, end), size in memory.items())

    nodes = tuple(Node(priced(n.cost, n.memory)) for n in problem.nodes)
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


def _add_buffers(
    buffers: Buffers, strategies: list[int], edges: list[Edge], nodes: list[dict[Span, np.ndarray]]
) -> None:
    """Put the bytes of each buffer beside the cost of its owner, node or edge."""
    for b in range(len(buffers.size)):
        span = (int(buffers.start[b]), int(buffers.end[b]))
        size = np.asarray(buffers.size[b], dtype=np.float64)
        if not 0 <= span[0] <= span[1] < buffers.points or not (np.isfinite(size) & (size >= 0)).all():
            raise ValueError(
                f"buffer {b} lives over {span} of {buffers.points} program points with sizes {size}: "
                "an interval within the points and finite sizes of at least zero are needed"
            )
        if (t := int(buffers.transfer[b])) < 0:
            owner = int(buffers.owner[b])
            memory = nodes[owner]
            memory[span] = memory.get(span, np.zeros(strategies[owner])) + size[buffers.klass[b]]
        else:
            copies = np.zeros(edges[t].cost.shape)
            copies[:, int(buffers.copy[b])] = size
            memory = edges[t].memory
            memory[span] = memory.get(span, 0.0) + copies
