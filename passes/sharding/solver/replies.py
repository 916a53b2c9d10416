"""What each strategy of the nodes of one colour would cost while all other nodes stay.

Nodes of one colour share no edge, so what they pay can be worked out, and changed, together.
"""

from __future__ import annotations

import numpy as np

from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.ragged import offsets, ranges, summed


class Replies:
    """The arrays of one colour.

    An edge costs a node that consumes it the cell of its own column, unless another node wants that column already; it
    costs its source all columns that other nodes want, each once.

    Attributes:
      nodes: of the colour. starts: where the strategies of each begin in what `total` returns.
    """

    def __init__(self, links: Links, color: int, colors: np.ndarray) -> None:
        self.nodes = np.flatnonzero(colors == color)
        size = links.sizes[self.nodes]
        at = offsets(size)
        self.starts = at[:-1]
        self._strategies = ranges(links.first[self.nodes], size)
        place = np.full(links.nodes, -1, dtype=np.int64)  # of a node's first strategy
        place[self.nodes] = self.starts
        several = links.counts[links.edge] > 1
        self._wanting(links, np.flatnonzero(place[links.node] >= 0), place)
        self._others = np.flatnonzero(several & (place[links.node] < 0))
        self._others_at = links.column_at[links.edge[self._others]]
        made = np.flatnonzero((place[links.src[links.edge]] >= 0) & ~links.own)
        edge = links.edge[made]
        wide = links.sizes[links.src[edge]]
        self._made, self._wide = made, wide
        self._made_shared, self._made_at = several[made], links.column_at[edge]
        row = links.source[ranges(links.source_at[edge], wide)]
        self._made_cell = np.repeat(links.cell[edge], wide) + row * np.repeat(links.columns[edge], wide)
        self._made_place = ranges(place[links.src[edge]], wide)
        self._marks = int(links.column_at[-1])

    def _wanting(self, links: Links, wanting: np.ndarray, place: np.ndarray) -> None:
        """The consumers among the colour's nodes."""
        edge, size = links.edge[wanting], links.sizes[links.node[wanting]]
        entry = ranges(links.klass_at[wanting], size)
        own = np.repeat(links.own[wanting], size)
        stride = np.repeat(links.columns[edge], size)
        # The row is the own strategy's for a consumer that is the source itself, else the source's.
        inside = ranges(np.zeros(len(wanting), dtype=np.int64), size)
        at = np.repeat(links.source_at[edge], size) + np.where(own, inside, 0)
        row = np.where(own, links.source[at], 0)
        self._wanted_cell = np.repeat(links.cell[edge], size) + row * stride + links.klass[entry]
        self._wanted_place = ranges(place[links.node[wanting]], size)
        self._wanted_column = np.repeat(links.column_at[edge], size) + links.klass[entry]
        self._wanted_size, self._wanted_edge = size, edge
        self._stride = np.where(links.own[wanting], 0, links.columns[edge])
        self._again = np.zeros(len(entry), dtype=bool)  # an earlier consumer of the same edge and node wants it
        key = edge * (links.nodes + 1) + links.node[wanting]
        if len(np.unique(key)) < len(key):
            seen: set[tuple[int, int, int]] = set()
            columns, keys = self._wanted_column.tolist(), np.repeat(key, size).tolist()
            for n, item in enumerate(zip(keys, inside.tolist(), columns, strict=True)):
                self._again[n] = item in seen
                seen.add(item)

    def total(self, cost: np.ndarray, cells: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Seconds of each strategy of the colour's nodes.

        Args:
          cost, cells: of all strategies and cells. row: [edges] the source's class now. column: [consumers] now.
        """
        total = cost[self._strategies]
        if len(self._wanted_place):
            pays = cells[self._wanted_cell + np.repeat(row[self._wanted_edge] * self._stride, self._wanted_size)]
            if len(self._others):
                mark = np.zeros(self._marks, dtype=bool)
                mark[self._others_at + column[self._others]] = True
                pays[mark[self._wanted_column] | self._again] = 0.0
            elif self._again.any():
                pays[self._again] = 0.0
            total = total + summed(self._wanted_place, pays, len(total))
        if len(self._made):
            pays = cells[self._made_cell + np.repeat(column[self._made], self._wide)]
            if self._made_shared.any():
                at = self._made_at + column[self._made]
                last = np.zeros(self._marks, dtype=np.int64)
                last[at] = np.arange(len(at))
                pays[np.repeat(last[at] != np.arange(len(at)), self._wide)] = 0.0
            total = total + summed(self._made_place, pays, len(total))
        return total


def replies_by_color(links: Links) -> tuple[Replies, ...]:
    """The replies of each colour."""
    colors = links.colors
    return tuple(Replies(links, color, colors) for color in range(int(colors.max(initial=-1)) + 1))
