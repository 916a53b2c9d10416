"""Repeated sequences of a program, and the layers that they belong to (`folding` uses both, `lowering.runs` the first).

A *stretch* is a sequence of operations that repeats itself a number of times, its *pieces*. The pieces of the largest
stretch number the layers. A piece of another one is of the layer whose results or arguments it reads, or whose piece
reads its results, all pieces at one operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite.ir.graph import Block, Lit, Op, Value
from alpa_lite.passes.ir import keys
from alpa_lite.passes.ir.primitives import CONSTRAINT

SHORTEST = 8
"""The least number of operations or instructions that count as a repeated sequence."""

_PERIODS = 64  # the commonest distances between equal operations that are tried as periods
OUTSIDE = -(1 << 40)
"""The layer of values that belong to none."""


def find_periods(tokens: np.ndarray, least: int | None = None) -> list[int]:
    """The commonest distances between a token and the next that equals it, the longest first.

    Args:
      least: how often a distance occurs at least; by default as often as it is long.
    """
    order = np.argsort(tokens, kind="stable")
    gaps = np.diff(order)[np.diff(tokens[order]) == 0]
    periods, counts = np.unique(gaps[gaps >= SHORTEST], return_counts=True)
    commonest = np.argsort(-counts, kind="stable")[:_PERIODS]
    enough = counts >= (periods if least is None else least)
    return sorted([int(periods[i]) for i in commonest if enough[i]], reverse=True)


def find_stretches(tokens: np.ndarray, period: int, free: np.ndarray) -> list[list[int]]:
    """Where every token equals that `period` places on, both of them free: beginnings and ends."""
    same = (tokens[:-period] == tokens[period:]) & free[:-period] & free[period:]
    return np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]]))).reshape(-1, 2).tolist()


def find_repeats(tokens: np.ndarray, least: int) -> Iterator[tuple[int, int, int]]:
    """Yields sequences that repeat at least so often, the longest first: where they begin, their period and extent.

    Negative tokens are in none.
    """
    free = tokens >= 0
    for period in find_periods(tokens, least - 1):
        for start, end in find_stretches(tokens, period, free):
            extent = end - start + period
            if extent // period >= least:
                part = tokens[start : start + extent]
                free[start : start + extent] = False
                periods = (p for p in range(SHORTEST, period + 1) if period % p == 0)
                yield start, next(p for p in periods if (part[p:] == part[:-p]).all()), extent


def tokens_of(ops: Sequence[Op], values: Sequence[Value]) -> np.ndarray:
    """Returns a number for each operation, equal for those that compute alike in the same pass; -1: no copy.

    It does not matter which row a slice takes, or which number a random key is folded with.
    """
    numbers: dict[Any, int] = {}
    marks: dict[int, Any] = {}  # by `id` of the name stack, which operations of a scope share
    out = np.full(len(ops), -1)
    for n, op in enumerate(ops):
        if op.bodies or op.has_effects or op.name == CONSTRAINT:
            continue
        source = op.source
        mark = marks.get(id(source.name_stack))
        if mark is None:
            found = (_jax.derivative(source), _jax.is_reverse(source), _jax.is_computed_again(source))
            mark = marks[id(source.name_stack)] = found
        key = keys.key_without_position(op, values.__getitem__)
        if op.name == "random_fold_in":
            key = "random_fold_in", *[isinstance(a, Lit) or values[a].shape for a in op.operands]
        out[n] = numbers.setdefault((key, mark, op.ctx), len(numbers))
    return out


class Stretch:
    """A sequence of operations that repeats itself.

    Attributes:
      start, period: where its pieces begin, and how long each is.
      reads, makes: [pieces, ...] the values of the operands of each piece (-1: a literal), and of its results.
      layer: [pieces] the layer of each; None until it is known.
    """

    def __init__(self, ops: Sequence[Op], start: int, period: int, extent: int) -> None:
        """Args:
        extent: the number of operations that equal those a period on, or a period back.
        """
        self.start, self.period, self.layer = start, period, np.empty(0, dtype=int)
        self._ops, self._first, self.slack = ops, start, extent % period
        self._cut(start, extent // period)

    def _cut(self, start: int, times: int) -> None:
        """Makes pieces that begin there."""
        self.start, every = start, self._ops[start : start + self.period * times]
        self.reads = np.array([a if isinstance(a, int) else -1 for op in every for a in op.operands]).reshape(times, -1)
        self.makes = np.array([value for op in every for value in op.results]).reshape(times, -1)

    def move(self, layer: np.ndarray) -> None:
        """Moves where pieces begin: most of their operands are of layers, and then fewest of the piece before.

        A stretch may begin with operations that equal the last ones of a piece, and belong to no layer.

        Args:
          layer: that of each value.
        """
        start, period, times = self._first, self.period, len(self.makes)
        first, count = start + period, period + self.slack  # of the second piece
        makers = {value: n for n in range(start, first + count) for value in self._ops[n].results}
        known, crossing = np.zeros((2, self.slack + 1), dtype=int)
        for place in range(count):
            low = max(0, place - period + 1)
            rows = zip(*[self._ops[start + place + row * period].operands for row in range(times)], strict=True)
            known[low : place + 1] += sum(all(isinstance(a, int) and layer[a] != OUTSIDE for a in row) for row in rows)
            for value in self._ops[first + place].reads:
                crossing[max(low, makers.get(value, first + place) - first + 1) : place + 1] += 1
        self._cut(start + int(np.lexsort((crossing, -known))[0]), times)


class Layers:
    """The layers of a block.

    Attributes:
      stretches: those of which each piece is of a layer, or outside of them.
      layer, code: [values + 1] the layer of each, and a number that is the same for what is alike in each layer; its
        own number outside of layers. The last is that of literals.
    """

    def __init__(self, block: Block, values: Sequence[Value], least: int) -> None:
        """Finds the layers of a block, whose sequences repeat at least so often."""
        every = [Stretch(block.ops, *one) for one in find_repeats(tokens_of(block.ops, values), least)]
        every.sort(key=lambda one: one.makes.size, reverse=True)
        self.layer, self.code = np.full(len(values) + 1, OUTSIDE), np.arange(len(values) + 1)
        self.code[-1] = -1
        self._codes = len(values)
        self._is_input = np.zeros(len(values) + 1, dtype=bool)
        self._is_input[list(block.inputs)] = True
        self.stretches = self._number_layers(every) if every else []

    def _number_layers(self, every: list[Stretch]) -> list[Stretch]:
        """Gives the pieces of stretches the numbers of layers, as far as they are linked with the largest."""
        done = [every.pop(0)]
        self._enter(done[0], np.arange(len(done[0].makes)))
        waiting = True
        while waiting:
            waiting = False
            for one in list(every):
                if one.slack:
                    one.move(self.layer)
                layer = self._link(one, done)
                if layer is not None:
                    self._enter(one, layer)
                    every.remove(one)
                    done.append(one)
                    waiting = True
        return done

    def _enter(self, one: Stretch, layer: np.ndarray) -> None:
        """Numbers the layers of a stretch: of its pieces, their results, and the arguments that it reads by layer."""
        one.layer, known = layer, layer != OUTSIDE
        for values in one.reads.T:
            mine = values[known]
            if (
                self._is_input[mine].all()
                and (self.layer[mine] == OUTSIDE).all()
                and len(set(mine.tolist())) == len(mine) > 1
            ):
                self.layer[mine] = layer[known]  # before the next column
                self.code[mine] = self._codes
                self._codes += 1
        for values in one.makes.T:
            self.layer[values[known]] = layer[known]
            self.code[values[known]] = self._codes
            self._codes += 1

    def _link(self, one: Stretch, done: Sequence[Stretch]) -> np.ndarray | None:
        """Returns the layers of pieces by a value that all but two of them read, or that others read of them."""
        columns = one.reads.T
        for values in columns[np.argsort(-(self.layer[columns] != OUTSIDE).sum(1), kind="stable")]:
            layers = self.layer[values]
            known = layers != OUTSIDE
            if known.sum() >= len(layers) - 2 and len(np.unique(self.code[values[known]])) == 1:
                found = _completed(np.arange(len(layers))[known], layers[known], len(layers))
                if found is not None:
                    return found
        piece, place = np.full(len(self.layer), -1), np.full(len(self.layer), -1)
        piece[one.makes] = np.arange(len(one.makes))[:, None]
        place[one.makes] = np.arange(one.makes.shape[1])[None, :]
        for other in done:
            for values in other.reads.T:
                mine = (piece[values] >= 0) & (values >= 0) & (other.layer != OUTSIDE)
                if mine.sum() >= len(one.makes) - 2 and len(np.unique(place[values[mine]])) == 1:
                    found = _completed(piece[values[mine]], other.layer[mine], len(one.makes))
                    if found is not None:
                        return found
        return None


def _completed(pieces: np.ndarray, layers: np.ndarray, count: int) -> np.ndarray | None:
    """The layers of all pieces, given those of some: they continue at the ends if they rise or fall by one. None if two
    pieces have one layer."""
    if len(set(layers.tolist())) != len(layers) or len(set(pieces.tolist())) != len(pieces) or len(pieces) < 2:
        return None
    out = np.full(count, OUTSIDE)
    out[pieces] = layers
    order = np.argsort(pieces)
    steps = np.diff(layers[order])
    if (np.diff(pieces[order]) == 1).all() and (steps == steps[0]).all() and abs(steps[0]) == 1:
        known, start = pieces[order], layers[order][0]
        out = start + steps[0] * (np.arange(count) - known[0])
    return out
