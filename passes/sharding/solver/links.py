"""Which strategies and pairs of layouts a sharding problem has: its structure, without any cost.

Problems that differ in costs alone share one of these, and what is worked out from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from alpa_lite.passes.sharding.solver import kernels
from alpa_lite.passes.sharding.solver.ragged import entries, offsets, split

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Links:
    """The nodes, edges and consumers of a problem, each numbered; consumers by their edge.

    Attributes:
      first: [nodes + 1] where the strategies of each node begin.
      src, rows, columns: [edges] the source, and the shape [P, Q] of the cost.
      source: the row of each strategy of each edge's source, edge by edge.
      edge, node: [consumers]. klass: the column of each strategy of each consumer's node, consumer by consumer.
    """

    first: np.ndarray
    src: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    source: np.ndarray
    edge: np.ndarray
    node: np.ndarray
    klass: np.ndarray
    _prepared: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.first) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """[nodes] how many strategies each has."""
        return np.diff(self.first)

    @cached_property
    def cell(self) -> np.ndarray:
        """[edges + 1] where the cells of each edge begin."""
        return offsets(self.rows * self.columns)

    @cached_property
    def begin(self) -> np.ndarray:
        """[nodes + edges + 1] where the entries of each begin: strategies, then cells."""
        return np.concatenate([self.first[:-1], self.first[-1] + self.cell])

    @cached_property
    def source_at(self) -> np.ndarray:
        """[edges + 1] where each edge begins in `source`."""
        return offsets(self.sizes[self.src])

    @cached_property
    def klass_at(self) -> np.ndarray:
        """[consumers + 1] where each consumer begins in `klass`."""
        return offsets(self.sizes[self.node])

    @cached_property
    def source_strategy(self) -> np.ndarray:
        """The strategy of each number in `source`."""
        return entries(self.first, self.src)

    @cached_property
    def klass_strategy(self) -> np.ndarray:
        """The strategy of each number in `klass`."""
        return entries(self.first, self.node)

    @cached_property
    def row_at(self) -> np.ndarray:
        """[edges + 1] where the rows of each edge begin among all rows."""
        return offsets(self.rows)

    @cached_property
    def column_at(self) -> np.ndarray:
        """[edges + 1] where the columns of each edge begin among all columns."""
        return offsets(self.columns)

    @cached_property
    def source_row(self) -> np.ndarray:
        """`source` numbered among all rows."""
        return self.source + np.repeat(self.row_at[:-1], self.sizes[self.src])

    @cached_property
    def klass_column(self) -> np.ndarray:
        """`klass` numbered among all columns."""
        return self.klass + np.repeat(self.column_at[self.edge], self.sizes[self.node])

    @cached_property
    def own(self) -> np.ndarray:
        """[consumers] whether the consumer is the edge's source itself."""
        return self.node == self.src[self.edge]

    @cached_property
    def counts(self) -> np.ndarray:
        """[edges] how many consumers each has."""
        return np.bincount(self.edge, minlength=len(self.src))

    def cells_of(self, choice: np.ndarray) -> np.ndarray:
        """The cells that a choice pays, each once, ascending."""
        row = self.source[self.source_at[:-1] + choice[self.src]]
        column = self.klass[self.klass_at[:-1] + choice[self.node]]
        cells = self.cell[self.edge] + row[self.edge] * self.columns[self.edge] + column
        return np.unique(cells)

    @cached_property
    def touching(self) -> list[list[int]]:
        """For each node the edges that it is part of."""
        return [edges.tolist() for edges in split(self.tables.touching, self.tables.node[:, 1])]

    @cached_property
    def tables(self) -> kernels.Edges:
        """The same in the tables of the loops."""
        nodes, edges = np.append(self.src, self.node), np.append(np.arange(len(self.src)), self.edge)
        pairs = np.unique(nodes * (len(self.src) + 1) + edges)
        node, touching = np.divmod(pairs, len(self.src) + 1)
        columns = np.append(self.src, -1), self.cell, np.append(self.columns, 0), self.source_at, offsets(self.counts)
        return kernels.Edges(
            node=np.stack([self.first, np.searchsorted(node, np.arange(self.nodes + 1))], axis=1),
            touching=touching,
            edge=np.stack(columns, axis=1),
            consumer=np.stack([self.node, len(self.source) + self.klass_at[:-1]], axis=1),
            classes=self.classes,
        )

    @cached_property
    def classes(self) -> np.ndarray:
        """`source`, then `klass`."""
        return np.concatenate([self.source, self.klass])

    def prepared(self, kind: Callable[[Links], T]) -> T:
        """Returns the structure that `kind` derives from these links, computed once."""
        if kind not in self._prepared:
            self._prepared[kind] = kind(self)
        return self._prepared[kind]
