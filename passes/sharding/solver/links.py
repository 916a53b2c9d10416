"""Which strategies and pairs of layouts a sharding problem has: its structure, without any cost.

Problems that differ in costs alone share one of these, and the tables that are derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from alpa_lite.passes.sharding.solver import kernels


class Links:
    """The nodes and edges of a problem, and the ends of the edges.

    End e is at the source of edge e; the ends behind these are at the consumers, by edge. An end puts each strategy of
    its node in a class: a row of the edge's cost at the source, a column at a consumer.

    Attributes:
      nodes, edges: how many there are. sizes: [nodes] how many strategies each has. counts: [edges] consumers of each.
      first: [nodes + 1] where the strategies of each node begin.
      shape: [edges, 2] rows and columns of the cost. cell: [edges + 1] where the cells of each edge begin.
      begin: [nodes + edges + 1] where the entries of each begin: strategies, then cells.
      edge, node: [ends]. own: [consumers] whether the consumer is the edge's source itself.
      at: [ends + 1] where each end begins among those of all ends: `classes`, that of each strategy of the end's node,
        `strategy`, its number, and `class_line`, the class numbered among all rows and columns.
      side: [ends] that of the cost that the classes are on: 2 e for the rows of edge e, 2 e + 1 for its columns.
      line: [2 edges + 1] where the lines of each side begin among all rows and columns.
      restrictions: a cache of `restrict`: the mask of the latest restriction -> what it leaves.
    """

    def __init__(
        self, first: np.ndarray, shape: np.ndarray, edge: np.ndarray, node: np.ndarray, classes: np.ndarray
    ) -> None:  # fmt: skip
        self.first, self.shape, self.edge, self.node, self.classes = first, shape, edge, node, classes
        self.nodes, self.edges, self.sizes = len(first) - 1, len(shape), np.diff(first)
        self.counts = np.bincount(edge, minlength=self.edges) - 1
        self.cell = offsets(shape.prod(1))
        self.begin = np.concatenate([first[:-1], first[-1] + self.cell])
        self.own = node[self.edges :] == node[edge[self.edges :]]
        self.at, self.strategy = offsets(self.sizes[node]), entries(first, node)
        self.side, self.line = 2 * edge + (np.arange(len(edge)) >= self.edges), offsets(shape.ravel())
        self.class_line = classes + np.repeat(self.line[self.side], self.sizes[node])
        self.restrictions: dict[bytes, Any] = {}

    def cells_of(self, choice: np.ndarray) -> np.ndarray:
        """Returns the cells that a choice pays, each once, ascending."""
        lines, edge = self.classes[self.at[:-1] + choice[self.node]], self.edge[self.edges :]
        return np.unique(self.cell[edge] + lines[edge] * self.shape[edge, 1] + lines[self.edges :])

    def merge_equal(self) -> tuple[Links, np.ndarray]:
        """Returns the links without consumers that equal one before them at their edge, and a mask of the ends left."""
        stay, seen = np.ones(len(self.edge), dtype=bool), set[tuple[int, bytes]]()
        key = self.edge * (self.nodes + 1) + self.node
        _, pair, times = np.unique(key[self.edges :], return_inverse=True, return_counts=True)
        for end in (self.edges + np.flatnonzero(times[pair] > 1)).tolist():
            same = int(key[end]), self.classes[self.at[end] : self.at[end + 1]].tobytes()
            stay[end] = same not in seen
            seen.add(same)
        if stay.all():
            return self, stay
        classes = self.classes[entries(self.at, np.flatnonzero(stay))]
        return Links(self.first, self.shape, self.edge[stay], self.node[stay], classes), stay

    @cached_property
    def tables(self) -> kernels.Edges:
        """The same in the tables of the loops."""
        pairs = np.unique(self.node * (self.edges + 1) + self.edge)
        node, touching = np.divmod(pairs, self.edges + 1)
        consumers = self.at[self.edges : -1]
        columns = (
            np.append(self.node[: self.edges], -1), self.cell, np.append(self.shape[:, 1], 0),
            self.at[: self.edges + 1], offsets(self.counts),
        )  # fmt: skip
        return kernels.Edges(
            node=np.stack([self.first, np.searchsorted(node, np.arange(self.nodes + 1))], axis=1),
            node_edges=touching,
            edge=np.stack(columns, axis=1),
            consumer=np.stack([self.node[self.edges :], consumers], axis=1),
            classes=self.classes,
        )

    @cached_property
    def message_layout(self) -> MessageLayout:
        """The tables of message passing."""
        of_part, of_loop = (self.edges + np.flatnonzero(mask) for mask in (~self.own, self.own))
        edge, own_edge = self.edge[of_part], self.edge[of_loop]
        pair = np.stack([edge, of_part], axis=1)  # the end at the source, and that at the consumer
        nodes, klass, shape = self.node[pair], self.at[pair], self.shape[edge]
        at = offsets(shape.sum(1))
        ends = np.stack([at[:-1], at[:-1] + shape[:, 0]], axis=1)  # where the messages of each end begin
        size, used = self.sizes[nodes].ravel(), np.zeros(int(at[-1]), dtype=bool)
        used[np.repeat(ends.ravel(), size) + self.classes[ranges(klass.ravel(), size)]] = True
        _, same, times = np.unique(nodes.min(1) * self.nodes + nodes.max(1), return_inverse=True, return_counts=True)
        divided = (self.counts > 1) | np.isin(np.arange(self.edges), own_edge)
        e, end = np.flatnonzero(divided), np.argsort(nodes.ravel(), kind="stable")
        bounds = [np.searchsorted(edges, e + one) for edges in (edge, own_edge) for one in (0, 1)]
        origin, paid = np.where(divided[edge], -1, self.cell[edge]), offsets(self.sizes[self.node[of_loop]])
        parts = kernels.Parts(
            node=np.stack([self.first, np.searchsorted(nodes.ravel()[end], np.arange(self.nodes + 1))], axis=1),
            end=end,
            part=np.column_stack([nodes, shape, ends, klass, offsets(shape.prod(1))[:-1], origin]),
            divided_edges=np.column_stack([self.cell[e], self.shape[e], *bounds]),
            loop=np.column_stack([self.node[of_loop], self.at[own_edge], self.at[of_loop], paid[:-1]]),
            classes=self.classes,
        )
        room = max(int(at[-1]), int(self.sizes.max(initial=1)), int(np.diff(self.cell)[e].max(initial=1)))
        return MessageLayout(parts, entries(self.cell, edge), shape.sum(1), used, times[same], int(paid[-1]), room)

    def neighbours(self, i: int) -> np.ndarray:
        """Returns the nodes that share an edge with node i, by edge."""
        near = np.isin(self.edge, self.edge[self.node == i])
        _, nodes = np.unique(np.stack([self.edge[near], self.node[near]]), axis=1)
        return np.array([*dict.fromkeys(nodes[nodes != i])], dtype=np.int64)


class MessageLayout(NamedTuple):
    """The tables of message passing (`solver.messages`) on a structure.

    Attributes:
      parts: see there. cells: [parts' cells] the cell of the problem. length: [parts] how many messages there are.
      is_used: [messages] whether a strategy is in the class. times: [parts] how many parts join the same nodes.
      num_loop_costs: how many strategies the loops have. room: how many numbers message passing needs to work in.
    """

    parts: kernels.Parts
    cells: np.ndarray
    length: np.ndarray
    is_used: np.ndarray
    times: np.ndarray
    num_loop_costs: int
    room: int


# Rows of unequal length, kept end to end in one vector: what NumPy lacks, in a few operations each.


def offsets(lengths: np.ndarray | Sequence[int]) -> np.ndarray:
    """[n + 1] where each row begins, and the end of the last."""
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def split(values: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
    """Returns the rows, which begin at `at` [n + 1]."""
    return np.split(values, at[1:-1]) if len(at) > 1 else []


def ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns the numbers of the ranges [begin, begin + length), end to end."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begin - (ends - length), length) + np.arange(total)


def entries(at: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the numbers of the entries of some rows, end to end, where rows begin at `at` [n + 1]."""
    return ranges(at[rows], np.diff(at)[rows])


def concatenate_flat(parts: Sequence[np.ndarray], dtype: type = np.int64) -> np.ndarray:
    """Returns the arrays end to end, flat; empty without any."""
    return np.concatenate(parts, axis=None, dtype=dtype) if len(parts) else np.zeros(0, dtype=dtype)


def reduce_rows(ufunc: np.ufunc, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns the reduction of each row of `values`, whose rows begin at `at` [n + 1]; none of them is empty."""
    return ufunc.reduceat(values, at[:-1]) if len(at) > 1 else np.zeros(0, dtype=values.dtype)
