"""The places of messages, cells and classes that message passing needs: worked out once for a problem's structure.

A *part* is an edge to one consumer other than its source; a *half* is one end of a part. Nodes of one colour share no
part, so all halves of a colour are dealt with at once: whatever they need lies side by side. Cells are kept by half, a
row for each class of its own node and a column for each class of the other; large parts are kept once, as matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.ragged import offsets, ranges

LARGE = 2048
"""Cells from which a part is a matrix of its own: a call for each is then no slower than the gathering of its cells."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ends:
    """Halves whose messages are collected together: those of a colour, or of a node.

    Attributes:
      small: how many messages belong to halves that are not large; they come first.
      cells: of the small halves. other: the other end's message of each. rows: where each row of cells begins.
      large: for each half of a large part its matrix's place, whether it is the source's end, its own messages, counted
        from the first that is collected, and the other end's.
    """

    small: int
    cells: slice
    other: np.ndarray
    rows: np.ndarray
    large: tuple[tuple[int, bool, slice, slice], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(Ends):
    """What one colour needs. Slices are into the vectors of a `Wiring`; numbers of rows count from the colour's first.

    Attributes:
      strategies: of its nodes, in the order of colours.
      halves: small ones first. half_at: where the messages of each begin.
      messages: its halves' messages.
      entries: the strategy of each pair of a message and a strategy of its class, from the colour's first strategy.
      entry_message: its message. entry_at: where the entries of each message begin.
      forward, backward: for each message the share that it hands on.
    """

    strategies: slice
    halves: np.ndarray
    half_at: np.ndarray
    messages: slice
    entries: np.ndarray
    entry_message: np.ndarray
    entry_at: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


class Wiring:
    """See the module's docstring.

    Attributes:
      order: the nodes by colour; strategy: the number of each strategy in that order; first: [nodes + 1] in that order.
      part: the consumer of each part. canonical: the place of each message among `Messages` (see `messages`).
      cell_from: the edge's cell of each cell that is kept; matrices: the part, place and shape of each large part.
      steps: one for each colour.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._nodes()
        self._halves()
        self._messages()
        self._cells()
        self.steps = tuple(self._step(color) for color in range(len(self.color_at) - 1))

    def _nodes(self) -> None:
        links, colors = self.links, self.links.colors
        self.order = np.argsort(colors, kind="stable")
        self.rank = np.empty(links.nodes, dtype=np.int64)
        self.rank[self.order] = np.arange(links.nodes)
        self.first = offsets(links.sizes[self.order])
        self.strategy = ranges(links.first[self.order], links.sizes[self.order])
        self.place = np.empty(len(self.strategy), dtype=np.int64)  # of a strategy of the problem, in this order
        self.place[self.strategy] = np.arange(len(self.strategy))
        self.color_at = np.searchsorted(colors[self.order], np.arange(int(colors.max(initial=-1)) + 2))

    def _halves(self) -> None:
        """Halves 0 .. parts - 1 are the source's ends, the others the consumers'."""
        links, colors = self.links, self.links.colors
        self.part = np.flatnonzero(~links.own)
        edge = links.edge[self.part]
        used = np.zeros(int(links.columns[links.edge].sum()), dtype=bool)
        at = offsets(links.columns[links.edge])
        used[links.klass + np.repeat(at[:-1], np.diff(links.klass_at))] = True
        number = np.cumsum(used) - 1
        begin = np.searchsorted(np.flatnonzero(used), at)
        self.local = number[links.klass + np.repeat(at[:-1], np.diff(links.klass_at))]  # of `klass`: the used column
        self.local -= np.repeat(begin[:-1], np.diff(links.klass_at))
        self.used_column = np.flatnonzero(used) - np.repeat(at[:-1], np.diff(begin))
        self.used_at = begin
        high, wide = links.rows[edge], np.diff(begin)[self.part]
        self.node = np.concatenate([links.src[edge], links.node[self.part]])
        self.high, self.wide = np.concatenate([high, wide]), np.concatenate([wide, high])
        self.large = np.concatenate([high * wide] * 2) >= LARGE
        self.halves = np.lexsort((self.rank[self.node], self.large, colors[self.node]))  # by colour, small ones first
        self.partner = np.concatenate([np.arange(len(edge)) + len(edge), np.arange(len(edge))])

    def _messages(self) -> None:
        """Where the messages of each half begin, and each message's place among those of all consumers."""
        links, parts = self.links, len(self.part)
        at = offsets(self.high[self.halves])
        self.message_at = np.empty(2 * parts, dtype=np.int64)
        self.message_at[self.halves] = at[:-1]
        self.count = int(at[-1])
        edge = links.edge[self.part]
        base = offsets((links.rows + links.columns)[links.edge])[self.part]
        self.canonical = np.empty(self.count, dtype=np.int64)
        rows, columns = self.high[:parts], self.high[parts:]
        self.canonical[ranges(self.message_at[:parts], rows)] = ranges(base, rows)
        used = self.used_column[ranges(self.used_at[self.part], columns)]
        self.canonical[ranges(self.message_at[parts:], columns)] = used + np.repeat(base + links.rows[edge], columns)

    def _cells(self) -> None:
        """Cells of the small halves in their order, then the matrices."""
        links, parts = self.links, len(self.part)
        small = self.halves[~self.large[self.halves]]
        high, wide = self.high[small], self.wide[small]
        self.cell_at = np.zeros(2 * parts, dtype=np.int64)
        at = offsets(high * wide)
        self.cell_at[small] = at[:-1]
        width = np.repeat(wide, high)  # of each row
        self.row_at = offsets(width)
        self.other = np.repeat(np.repeat(self.message_at[self.partner[small]], high), width)
        inside = ranges(np.zeros(len(width), dtype=np.int64), width)
        self.other += inside
        consumer = np.concatenate([self.part, self.part])[small]
        edge, is_source = links.edge[consumer], small < parts
        row = ranges(np.zeros(len(small), dtype=np.int64), high)
        stride = links.columns[edge]
        column = self.used_column[np.minimum(np.repeat(self.used_at[consumer], high) + row, len(self.used_column) - 1)]
        begin = np.repeat(links.cell[edge], high) + np.where(
            np.repeat(is_source, high), row * np.repeat(stride, high), column
        )
        step = np.repeat(np.repeat(np.where(is_source, 0, stride), high), width)
        which = np.repeat(np.repeat(np.where(is_source, self.used_at[consumer], 0), high), width) + inside
        along = np.where(step > 0, inside * step, self.used_column[np.minimum(which, len(self.used_column) - 1)])
        cells = [np.repeat(begin, width) + along]
        self.matrices: list[tuple[int, int, int, int]] = []
        end = int(at[-1])
        for p in np.flatnonzero(self.large[:parts]).tolist():
            c = self.part[p]
            e, columns = links.edge[c], self.used_column[self.used_at[c] : self.used_at[c + 1]]
            base = links.cell[e] + np.arange(int(links.rows[e]))[:, None] * links.columns[e]
            cells.append((base + columns[None, :]).ravel())
            self.cell_at[[p, p + parts]] = end
            self.matrices.append((p, end, int(self.high[p]), int(self.wide[p])))
            end += int(self.high[p] * self.wide[p])
        self.cell_from = np.concatenate(cells)

    def matrix(self, m: int, cells: np.ndarray) -> np.ndarray:
        """The cells of a large part, a row for each class of the source."""
        _, at, high, wide = self.matrices[m]
        return cells[at : at + high * wide].reshape(high, wide)

    def collected(
        self, ends: Ends, count: int, cells: np.ndarray, taken: np.ndarray, room: np.ndarray | None = None
    ) -> np.ndarray:
        """[count] the least of each row of the cells of some halves, less what is taken from the other ends.

        Args:
          room: to work in, for at least as many as the cells: memory that is new each time costs more than the work.
        """
        out = np.empty(count)
        if ends.small:
            if room is None:
                held = taken[ends.other]
            else:  # none is out of range, but "raise" goes through a copy
                held = taken.take(ends.other, out=room[: len(ends.other)], mode="clip")
            np.subtract(cells[ends.cells], held, out=held)
            np.minimum.reduceat(held, ends.rows, out=out[: ends.small])
        for m, is_source, own, other in ends.large:
            rest = self.matrix(m, cells) - (taken[other] if is_source else taken[other][:, None])
            rest.min(1 if is_source else 0, out=out[own])
        return out

    def matrix_of(self, half: int) -> int:
        """The number of a large half's matrix."""
        return int(self._of_part[half % len(self.part)])

    @cached_property
    def _of_part(self) -> np.ndarray:
        """Part -> its number among the matrices."""
        out = np.full(len(self.part), -1)
        for m, (p, _, _, _) in enumerate(self.matrices):
            out[p] = m
        return out

    @cached_property
    def decoding(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What finds the cell that a message's class pays once the other end is decided.

        Returns:
          cell, step: [messages] the first cell of its row, and how far apart the row's cells are.
          classes, class_at: the class of each strategy of each half's node, and [halves] where those of a half begin.
        """
        links, parts = self.links, len(self.part)
        apart = np.ones(2 * parts, dtype=np.int64)
        consumer = np.arange(2 * parts) >= parts
        apart[self.large & consumer] = self.high[self.large & consumer]
        between = np.where(self.large & consumer, 1, self.wide)
        order, high = self.halves, self.high[self.halves]
        inside = ranges(np.zeros(len(order), dtype=np.int64), high)
        cell = np.repeat(self.cell_at[order], high) + inside * np.repeat(between[order], high)
        at = np.concatenate([links.source_at[links.edge[self.part]], len(links.source) + links.klass_at[self.part]])
        return cell, np.repeat(apart[order], high), np.concatenate([links.source, self.local]), at

    @cached_property
    def _entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Message and strategy (in this order) of each strategy of each half, by message."""
        links, parts = self.links, len(self.part)
        edge = links.edge[self.part]
        size = links.sizes[links.src[edge]]
        begin, klass = links.source_at[edge], links.source
        message = [klass[ranges(begin, size)] + np.repeat(self.message_at[:parts], size)]
        strategy = [links.source_strategy[ranges(begin, size)]]
        size, begin = links.sizes[links.node[self.part]], links.klass_at[self.part]
        message.append(self.local[ranges(begin, size)] + np.repeat(self.message_at[parts:], size))
        strategy.append(links.klass_strategy[ranges(begin, size)])
        messages, strategies = np.concatenate(message), self.place[np.concatenate(strategy)]
        order = np.argsort(messages, kind="stable")
        return messages[order], strategies[order]

    @cached_property
    def _shares(self) -> tuple[np.ndarray, np.ndarray]:
        """For each message what it hands on, forward and backward."""
        colors = self.links.colors
        ahead = colors[self.node[self.partner]] > colors[self.node]
        leading = np.bincount(self.node, ahead, minlength=self.links.nodes)
        every = np.bincount(self.node, minlength=self.links.nodes)
        weight = (1.0 / np.maximum(np.maximum(leading, every - leading), 1))[self.node]
        forward, backward = np.where(ahead, weight, 0.0), np.where(ahead, 0.0, weight)
        high = self.high[self.halves]
        return np.repeat(forward[self.halves], high), np.repeat(backward[self.halves], high)

    def _step(self, color: int) -> Step:
        a, b = self.color_at[color], self.color_at[color + 1]
        halves = self.halves[slice(*np.searchsorted(self.links.colors[self.node[self.halves]], [color, color + 1]))]
        small = halves[~self.large[halves]]
        start = int(self.message_at[halves[0]]) if len(halves) else 0
        stop = start + int(self.high[halves].sum())
        rows = int(self.high[small].sum())
        cell = int(self.cell_at[small[0]]) if len(small) else 0
        cells = slice(cell, cell + int((self.high[small] * self.wide[small]).sum()))
        row = int(np.searchsorted(self.row_at, cell)) if len(small) else 0
        messages, strategies = self._entries
        e, f = np.searchsorted(messages, [start, stop])
        forward, backward = self._shares
        large = []
        for h in halves[self.large[halves]].tolist():
            o = int(self.partner[h])
            own = slice(int(self.message_at[h]) - start, int(self.message_at[h] + self.high[h]) - start)
            other = slice(int(self.message_at[o]), int(self.message_at[o] + self.high[o]))
            large.append((self.matrix_of(h), h < len(self.part), own, other))
        return Step(
            strategies=slice(int(self.first[a]), int(self.first[b])),
            halves=halves,
            half_at=self.message_at[halves] - start,
            messages=slice(start, stop),
            small=rows,
            cells=cells,
            other=self.other[cells],
            rows=self.row_at[row : row + rows] - cell,
            large=tuple(large),
            entries=strategies[e:f] - self.first[a],
            entry_message=messages[e:f],
            entry_at=np.searchsorted(messages[e:f], np.arange(start, stop)),
            forward=forward[start:stop],
            backward=backward[start:stop],
        )
