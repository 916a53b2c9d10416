"""A transfer with several consumers, divided between them.

Any non-negative parts that sum to the cost of a cell give a lower bound. Each consumer gets what its messages have
taken away, one that is the source itself what its best strategies pay, and all of them an equal part of the rest.
"""

from __future__ import annotations

import numpy as np

from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.ragged import offsets, ranges, summed
from alpa_lite.passes.sharding.solver.wiring import Wiring


class Sharing:
    """The shared cells of a problem's structure.

    A *group* is a shared cell as one consumer that is the source itself sees it, for all strategies that pay it.
    """

    def __init__(self, links: Links) -> None:
        self._wiring = wiring = links.prepared(Wiring)
        several = links.counts > 1
        area = np.where(several, np.diff(links.cell), 0)
        number = offsets(area)  # of shared cells
        self.cells = ranges(links.cell[:-1][several], area[several])
        parts = np.flatnonzero(several[links.edge[wiring.part]])
        consumer = wiring.part[parts]
        edge = links.edge[consumer]
        high, wide = wiring.high[parts], wiring.high[parts + len(wiring.part)]
        width = np.repeat(wide, high)
        row = ranges(np.zeros(len(parts), dtype=np.int64), high)
        inside = ranges(np.zeros(len(width), dtype=np.int64), width)
        own = np.repeat(wiring.message_at[parts], high) + row
        other = np.repeat(np.repeat(wiring.message_at[parts + len(wiring.part)], high), width) + inside
        column = wiring.used_column[np.repeat(np.repeat(wiring.used_at[consumer], high), width) + inside]
        base = np.repeat(number[edge], high) + row * np.repeat(links.columns[edge], high)
        self.pair = np.repeat(base, width) + column  # the shared cell of each cell of a part
        self.ends = np.repeat(own, width), other
        first = np.repeat(wiring.cell_at[parts], high) + row * np.repeat(wide, high)
        here = np.repeat(first, width) + inside
        large = wiring.large[parts]
        second = np.repeat(np.repeat(wiring.cell_at[parts + len(wiring.part)], high), width)
        there = second + inside * np.repeat(np.repeat(high, high), width) + np.repeat(row, width)
        there = np.where(np.repeat(np.repeat(large, high), width), here, there)
        self.kept = np.concatenate([here, there])  # where it is kept: by row, and by column
        self._loops(several, number)
        wants = np.bincount(self.pair, minlength=len(self.cells))
        self.wants = np.maximum(wants + np.bincount(self.group_cell, minlength=len(self.cells)), 1)

    def _loops(self, several: np.ndarray, number: np.ndarray) -> None:
        links, wiring = self._wiring.links, self._wiring
        loops = np.flatnonzero(links.own & several[links.edge])
        size = links.sizes[links.node[loops]]
        edge = np.repeat(links.edge[loops], size)
        row = links.source[ranges(links.source_at[links.edge[loops]], size)]
        entry = ranges(links.klass_at[loops], size)
        cell = number[edge] + row * links.columns[edge] + links.klass[entry]
        key = np.repeat(np.arange(len(loops)), size) * (len(self.cells) + 1) + cell
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        self.loop_order = np.argsort(group, kind="stable")
        self.loop_group = group[self.loop_order]
        self.group_at = np.searchsorted(self.loop_group, np.arange(len(first) + 1))
        self.group_cell = cell[first]
        self.loop_strategy = wiring.place[links.klass_strategy[entry]][self.loop_order]
        times = np.bincount(links.edge[loops], minlength=len(links.src))
        self.loop_times = times[edge][self.loop_order]

    def divide(
        self, cost: np.ndarray, messages: np.ndarray, spare: np.ndarray, paid: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """New costs of the parts' cells, and of each loop's strategies.

        Args:
          cost: [shared cells]. messages: all of them.
          spare: [strategies] how far each is above the best of its node.
          paid: what each loop's strategy pays now.
        """
        need = np.maximum(messages[self.ends[0]] + messages[self.ends[1]], 0.0)
        total = summed(self.pair, need, len(cost))
        grouped = np.zeros(0)
        if len(self.loop_group):
            pays = np.maximum(paid - spare[self.loop_strategy] / self.loop_times, 0.0)
            grouped = np.maximum.reduceat(pays, self.group_at[:-1])
            total += summed(self.group_cell, grouped, len(cost))
        fit = np.ones(len(cost))
        np.divide(cost, total, out=fit, where=total > cost)
        more = (cost - fit * total) / self.wants
        mine = (grouped * fit[self.group_cell] + more[self.group_cell])[self.loop_group]
        return need * fit[self.pair] + more[self.pair], mine
