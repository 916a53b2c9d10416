"""Ranges of operands for each piece of an operation: rows of its own slice, and columns as far as they count.

Rows follow from the lengths of the slices. Columns are found backwards, from the readers of a matrix of attention: a
sum, or a product that sums over keys, needs them up to the last that is not known to add nothing (`beyond`), a maximum
up to the last that is not as good as minus infinity; the makers of the matrix need to make no more. Where one number is
known to be behind, nothing needs to make it, whoever reads it (`behind`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from alpa_lite.ir.graph import Block, Op, Value
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.tokens.beyond import Beyond, Known
from alpa_lite.passes.tokens.states import State, States, Way, row_factor

Range = tuple[int, int]
"""Indices from the first to before the second."""

Ranges = Mapping[int | None, Range]
"""By factor; a dim without one has no range."""


class Extents:
    """The ranges of all pieces.

    Args:
      rules, known: as for `states.states`. found: its answer.
      lengths: of the slices, in tokens.
    """

    def __init__(
        self,
        block: Block,
        rules: Mapping[object, Rule],
        values: Sequence[Value],
        known: Known,
        found: States,
        lengths: Sequence[int],
    ) -> None:
        self.rules, self.values, self.known, self.found = rules, values, known, found
        self.bounds = (0, *itertools.accumulate(lengths))
        self.slices = len(lengths)
        self.need: dict[int, list[int]] = {}  # value -> for each piece the columns that are read
        for value in values_in(block.outputs):
            self._want(value, None, None)
        for op in reversed(block.ops):
            self._demand(op)

    def held(self, state: State, piece: int) -> Range:
        """The rows of a piece. The first and the last also take what lies before and behind all tokens."""
        first = 0 if piece == 0 else self._row(state, self.bounds[piece])
        stop = state.size if piece == self.slices - 1 else self._row(state, self.bounds[piece + 1])
        return first, max(first, stop)

    def _row(self, state: State, token: int) -> int:
        """The first row of a token or of a later one."""
        return min(max(-((state.offset - token) // state.stride), 0), state.size)

    def over(self, state: State, rows: Range) -> Iterator[tuple[int, Range]]:
        """The pieces that some rows are in, and which of each piece's own rows these are."""
        for piece in range(self.slices):
            first, stop = self.held(state, piece)
            a, b = max(first, rows[0]), min(stop, rows[1])
            if a < b:
                yield piece, (a - first, b - first)

    def of(self, op: Op, way: Way, piece: int) -> Ranges | None:
        """Returns the range of each factor that one piece of an operation takes; None where it has no rows."""
        rule = self.rules[op.key]
        rows = self.held(self._leading(op, way), piece)
        if rows[0] == rows[1]:
            return None
        if way.rows is None:  # a single row
            return {}
        out: dict[int | None, Range] = {way.rows: rows}
        for number, factor in enumerate(rule.factors):
            if number == way.rows:
                continue
            if number == way.column and way.kind == "pieces":
                out[number] = (0, self.need[op.results[0]][piece])
            elif any(s.column is not None and dims[s.column] == (number,) for _, dims, s in self._operands(op)):
                out[number] = (0, self._seen(op, number, rows, factor.size))
        return out

    def _operands(self, op: Op) -> Iterator[tuple[int, Sequence[Sequence[int]], State]]:
        """The operands that have the sequence, with the factors of their dims."""
        for atom, dims in zip(op.operands, self.rules[op.key].operands, strict=True):
            if isinstance(atom, int) and atom in self.found.of:
                yield atom, dims, self.found.of[atom]

    def _leading(self, op: Op, way: Way) -> State:
        """The state that says which rows a piece has."""
        if way.kind == "pieces":
            return self.found.of[op.results[0]]
        rule = self.rules[op.key]
        return next(state for _, dims, state in self._operands(op) if row_factor(rule, dims, state) == way.rows)

    def _seen(self, op: Op, factor: int, rows: Range, size: int) -> int:
        """How many columns of a factor these rows need: those behind add nothing."""
        least = size
        for atom, dims, state in self._operands(op):
            for b in self.known.get(atom, ()):
                if (b.row, b.column) != (state.dim, state.column) or dims[b.column] != (factor,):
                    continue
                is_nothing = b.exact and b.value == 0 and op.name in ("dot_general", "reduce_sum")
                if b.negative if op.name == "reduce_max" else is_nothing:
                    least = min(least, int(b.first[rows[0] : rows[1]].max()))
        return max(least, 1)

    # -- what is needed of columns --------------------------------------------------------------------------------

    def _want(self, value: int, rows: Range | None = None, columns: int | None = None) -> None:
        """Notes that some rows of a value are read as far as a column; None stands for all."""
        state = self.found.of.get(value)
        if state is None or state.free or state.column is None:
            return
        needs = self.need.setdefault(value, [0] * self.slices)
        width = self.values[value].shape[state.column] if columns is None else columns
        holds = self.behind(value)
        for piece, _ in self.over(state, (0, state.size) if rows is None else rows):
            known = width if holds is None else int(holds.first[slice(*self.held(state, piece))].max())
            needs[piece] = max(needs[piece], min(width, max(known, 1)))

    def behind(self, value: int) -> Beyond | None:
        """The number that a matrix of attention is known to hold behind some column of each row."""
        state = self.found.of[value]
        of = (b for b in self.known.get(value, ()) if (b.row, b.column) == (state.dim, state.column) and b.exact)
        return next(of, None)

    def _demand(self, op: Op) -> None:
        """Notes the columns of its operands that an operation needs."""
        way = self.found.ways[op.index]
        for value in op.results:
            state = self.found.of.get(value)
            if state is not None and state.column is not None:
                self.need.setdefault(value, [0] * self.slices)
        if way.kind in ("pieces", "sum", "spread"):
            rule = self.rules[op.key]
            pieces = [extents for piece in range(self.slices) if (extents := self.of(op, way, piece)) is not None]
            for atom, dims, state in self._operands(op):
                if state.column is None:
                    continue
                factor, column = row_factor(rule, dims, state), next(iter(dims[state.column]), None)
                for extents in pieces:
                    reach = extents.get(column)
                    self._want(atom, extents.get(factor), None if reach is None else reach[1])
        else:
            columns = max(self.need.get(op.results[0], [0])) or None if way.kind == "shift" else None
            for atom in op.reads:
                self._want(atom, columns=columns)
