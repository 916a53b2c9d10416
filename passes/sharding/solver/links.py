"""Which strategies and pairs of layouts a sharding problem has: its structure, without any cost.

Problems that differ in costs alone share one of these, and the tables that are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from alpa_lite.passes.sharding.solver import kernels
from alpa_lite.passes.sharding.solver.ragged import entries, offsets

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Links:
    """The nodes and edges of a problem, and the ends of the edges.

    End e is at the source of edge e; the ends behind these are at the consumers, by edge. An end puts each strategy of
    its node in a class: a row of the edge's cost at the source, a column at a consumer.

    Attributes:
      first: [nodes + 1] where the strategies of each node begin.
      shape: [edges, 2] rows and columns of the cost.
      edge, node: [ends].
      classes: that of each strategy of each end's node, end by end.
    """

    first: np.ndarray
    shape: np.ndarray
    edge: np.ndarray
    node: np.ndarray
    classes: np.ndarray
    _prepared: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.first) - 1

    @property
    def edges(self) -> int:
        """How many edges there are."""
        return len(self.shape)

    @cached_property
    def sizes(self) -> np.ndarray:
        """[nodes] how many strategies each has."""
        return np.diff(self.first)

    @cached_property
    def cell(self) -> np.ndarray:
        """[edges + 1] where the cells of each edge begin."""
        return offsets(self.shape.prod(1))

    @cached_property
    def begin(self) -> np.ndarray:
        """[nodes + edges + 1] where the entries of each begin: strategies, then cells."""
        return np.concatenate([self.first[:-1], self.first[-1] + self.cell])

    @cached_property
    def at(self) -> np.ndarray:
        """[ends + 1] where each end begins in `classes`."""
        return offsets(self.sizes[self.node])

    @cached_property
    def strategy(self) -> np.ndarray:
        """The strategy of each number in `classes`."""
        return entries(self.first, self.node)

    @cached_property
    def side(self) -> np.ndarray:
        """[ends] the side of the cost that the classes are on: 2 e for the rows of edge e, 2 e + 1 for its columns."""
        return 2 * self.edge + (np.arange(len(self.edge)) >= self.edges)

    @cached_property
    def line(self) -> np.ndarray:
        """[2 edges + 1] where the lines of each side begin among all rows and columns."""
        return offsets(self.shape.ravel())

    @cached_property
    def class_line(self) -> np.ndarray:
        """`classes` numbered among all rows and columns."""
        return self.classes + np.repeat(self.line[self.side], self.sizes[self.node])

    @cached_property
    def own(self) -> np.ndarray:
        """[consumers] whether the consumer is the edge's source itself."""
        return self.node[self.edges :] == self.node[self.edge[self.edges :]]

    @cached_property
    def counts(self) -> np.ndarray:
        """[edges] how many consumers each has."""
        return np.bincount(self.edge, minlength=self.edges) - 1

    def cells_of(self, choice: np.ndarray) -> np.ndarray:
        """The cells that a choice pays, each once, ascending."""
        lines, edge = self.classes[self.at[:-1] + choice[self.node]], self.edge[self.edges :]
        return np.unique(self.cell[edge] + lines[edge] * self.shape[edge, 1] + lines[self.edges :])

    def distinct(self) -> tuple[Links, np.ndarray]:
        """The links without consumers that equal one before them at their edge, and a mask of the ends left."""
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
            touching=touching,
            edge=np.stack(columns, axis=1),
            consumer=np.stack([self.node[self.edges :], consumers], axis=1),
            classes=self.classes,
        )

    def prepared(self, kind: Callable[[Links], T]) -> T:
        """Returns the structure that `kind` derives from these links, computed once."""
        if kind not in self._prepared:
            self._prepared[kind] = kind(self)
        return self._prepared[kind]
