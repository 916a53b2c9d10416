"""Choices that messages suggest: node by node in the order of the program, given the nodes before.

Meshes have axes that may be exchanged, so that optima come in equal variants that the messages do not tell apart. A
choice made node by node settles on one of them: what follows is consistent with what was chosen before. So that the
nodes behind say what they want, one pass over them, in the opposite order, comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa_lite.passes.sharding.solver.links import Links
from alpa_lite.passes.sharding.solver.ragged import offsets, ranges
from alpa_lite.passes.sharding.solver.wiring import Ends, Wiring


@dataclass(frozen=True, eq=False, kw_only=True)
class _Node(Ends):
    """What one node needs, as `wiring.Step` of a colour.

    Attributes:
      messages: the place of each of its messages: those of small halves, then those of large ones.
      classes, entries: [halves, S] the class of each strategy, and the place of its message among the node's.
      order: of the flat entries, by message. strategies: the strategy of each. entry_at: where each message begins.
      forward, backward: for each of its messages the share that it hands on.
      theirs, half: the messages of the other ends, and the half of each; cell, apart: see `Wiring.decoding`.
    """

    messages: np.ndarray
    classes: np.ndarray
    entries: np.ndarray
    strategies: np.ndarray
    entry_at: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    theirs: np.ndarray
    half: np.ndarray
    cell: np.ndarray
    apart: np.ndarray


class Decoder:
    """Choices for one problem's structure, prepared once."""

    def __init__(self, links: Links) -> None:
        self._wiring = wiring = links.prepared(Wiring)
        halves = wiring.halves[np.argsort(wiring.node[wiring.halves], kind="stable")]  # by node, small first
        self._at = np.searchsorted(wiring.node[halves], np.arange(links.nodes + 1))
        ends = wiring.partner[halves]
        ahead = wiring.node[ends] > wiring.node[halves]
        leading = np.bincount(wiring.node[halves], ahead, minlength=links.nodes)
        every = np.diff(self._at)
        weight = (1.0 / np.maximum(np.maximum(leading, every - leading), 1))[wiring.node[halves]]
        first, apart, classes, class_at = wiring.decoding
        self._first, self._apart = first, apart
        size, high = links.sizes[wiring.node[halves]], wiring.high[halves]
        self._halves, self._high, self._ends = halves, high, wiring.high[ends]
        inside = offsets(high)[:-1] - np.repeat(offsets(high)[self._at[:-1]], every)  # among its node's messages
        self._classes = classes[ranges(class_at[halves], size)]
        self._entries = self._classes + np.repeat(inside, size)
        self._messages = ranges(wiring.message_at[halves], high)
        self._theirs = ranges(wiring.message_at[ends], self._ends)
        self._half = np.repeat(np.arange(len(halves)) - self._at[wiring.node[halves]], self._ends)
        self._forward = np.repeat(np.where(ahead, weight, 0.0), high)
        self._backward = np.repeat(np.where(ahead, 0.0, weight), high)
        self._entry_cut, self._row_cut = offsets(size)[self._at], offsets(high)[self._at]
        self._their_cut = offsets(self._ends)[self._at]
        self._nodes = [self._node(i) for i in range(links.nodes)]

    def _node(self, i: int) -> _Node:
        wiring, size = self._wiring, int(self._wiring.links.sizes[i])
        a, b = self._at[i], self._at[i + 1]
        entry, row = slice(*self._entry_cut[i : i + 2]), slice(*self._row_cut[i : i + 2])
        their = slice(*self._their_cut[i : i + 2])
        halves = self._halves[a:b]
        few = int((~wiring.large[halves]).sum())
        small = int(self._high[a : a + few].sum())
        cell = int(wiring.cell_at[halves[0]]) if few else 0
        area = int((wiring.high[halves[:few]] * wiring.wide[halves[:few]]).sum())
        rows = np.searchsorted(wiring.row_at, cell) if few else 0
        large, begin = [], small
        for h in halves[few:].tolist():
            o = int(wiring.partner[h])
            own = slice(begin, begin + int(wiring.high[h]))
            begin = own.stop
            other = slice(int(wiring.message_at[o]), int(wiring.message_at[o] + wiring.high[o]))
            large.append((wiring.matrix_of(h), h < len(wiring.part), own, other))
        entries = self._entries[entry]
        order = np.argsort(entries, kind="stable")
        theirs = self._theirs[their]
        return _Node(
            messages=self._messages[row],
            small=small,
            cells=slice(cell, cell + area),
            other=wiring.other[cell : cell + area],
            rows=wiring.row_at[rows : rows + small] - cell,
            large=tuple(large),
            classes=self._classes[entry].reshape(-1, size),
            entries=entries.reshape(-1, size),
            strategies=order % size,
            entry_at=np.searchsorted(entries[order], np.arange(row.stop - row.start)),
            forward=self._forward[row],
            backward=self._backward[row],
            theirs=theirs,
            half=self._half[their],
            cell=self._first[theirs],
            apart=self._apart[theirs],
        )

    def choice(self, cost: np.ndarray, cells: np.ndarray, messages: np.ndarray, backward: bool) -> np.ndarray:
        """[nodes] a strategy each.

        Args:
          cost, cells: in the order of `wiring.Wiring`. messages: of `messages.Ascent`; they are changed.
          backward: whether to begin at the end of the program.
        """
        wiring = self._wiring
        chosen = np.zeros(wiring.links.nodes, dtype=np.int64)
        seconds = np.empty(len(cost))
        seconds[wiring.strategy] = cost
        own = np.split(seconds, wiring.links.first[1:-1]) if len(chosen) else []
        order = range(len(chosen))
        for i in order if backward else reversed(order):
            node = self._nodes[i]
            if len(node.messages):
                found = wiring.collected(node, len(node.messages), cells, messages)
                potential = own[i] + found[node.entries].sum(0)
                least = np.minimum.reduceat(potential[node.strategies], node.entry_at)
                messages[node.messages] = found - (node.forward if backward else node.backward) * least
        for i in reversed(order) if backward else order:
            node = self._nodes[i]
            if not len(node.messages):
                chosen[i] = own[i].argmin()
                continue
            s = chosen[i] = (own[i] + messages[node.messages[node.entries]].sum(0)).argmin()
            messages[node.theirs] = cells[node.cell + node.apart * node.classes[:, s][node.half]]
        return chosen
