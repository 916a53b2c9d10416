"""Ranges of operands for each piece of an operation: rows of its own slice, and columns as far as they count.

Rows follow from the lengths of the slices. Columns are found backwards, from the readers of a matrix of attention: a
sum, or a product that sums over keys, needs them up to the last that is not known to add nothing (`beyond`), a maximum
up to the last that is not as good as minus infinity; the makers of the matrix need to make no more. Where one number is
known to be behind, nothing needs to make it, whoever reads it (`find_beyond`).

While a step is written (`Pieces`), an operation belongs to the phase and the operation that are set (`_now`, `_owner`),
or to the latest phase of its operands. A cut or a join is made once for each phase: values that one phase makes and
another one reads would have to be kept between them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.ir.graph import Atom, Lit, Op
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.rewriting import shape_of
from alpa_lite.passes.tokens.beyond import ConstantTail
from alpa_lite.passes.tokens.states import Body, Role, State, States, row_factor
from alpa_lite.passes.tokens.windows import Range

Ranges = Mapping[int | None, Range]
"""By factor; a dim without one has no range."""


class Extents:
    """The ranges of all pieces.

    Args:
      found: the states of the body.
      lengths: of the slices, in tokens.
    """

    def __init__(self, body: Body, found: States, lengths: Sequence[int]) -> None:
        self.rules, self.values, self.known, self.found = body.rules, body.values, body.known, found
        self.bounds = (0, *itertools.accumulate(lengths))
        self.slices = len(lengths)
        self.need: dict[int, list[int]] = {}  # value -> for each piece the columns that are read
        for value in values_in(body.block.outputs):
            self._want(value, None, None)
        for op in reversed(body.block.ops):
            self._demand(op)

    def rows_of(self, state: State, piece: int) -> Range:
        """Returns the rows of a piece. The first and the last also take what lies before and behind all tokens."""
        first = 0 if piece == 0 else self._row(state, self.bounds[piece])
        stop = state.size if piece == self.slices - 1 else self._row(state, self.bounds[piece + 1])
        return first, max(first, stop)

    def _row(self, state: State, token: int) -> int:
        """Returns the first row of a token or of a later one."""
        return min(max(-((state.offset - token) // state.stride), 0), state.size)

    def pieces_of(self, state: State, rows: Range) -> Iterator[tuple[int, Range]]:
        """Yields the pieces that some rows are in, and which of each piece's own rows these are."""
        for piece in range(self.slices):
            first, stop = self.rows_of(state, piece)
            a, b = max(first, rows[0]), min(stop, rows[1])
            if a < b:
                yield piece, (a - first, b - first)

    def ranges(self, op: Op, role: Role) -> dict[int, Ranges]:
        """Returns the range of each factor that every piece of an operation takes; those without rows are left out."""
        found: dict[int, Ranges] = {}
        for piece in range(self.slices):
            rows = self.rows_of(self._leading(op, role), piece)
            if rows[0] == rows[1]:
                continue
            seen: dict[int | None, Range] = {factor: (0, self._seen(op, factor, rows)) for factor in role.columns}
            if role.column is not None and role.kind == "pieces":
                seen[role.column] = (0, self.need[op.results[0]][piece])
            found[piece] = {} if role.rows is None else {**seen, role.rows: rows}  # a single row has no factor
        return found

    def _operands(self, op: Op) -> Iterator[tuple[int, Sequence[Sequence[int]], State]]:
        """Yields the operands that have the sequence, with the factors of their dims."""
        for atom, dims in zip(op.operands, self.rules[op.key].operands, strict=True):
            if isinstance(atom, int) and atom in self.found.by_atom:
                yield atom, dims, self.found.by_atom[atom]

    def reach(
        self, op: Op, dims: Sequence[Sequence[int]], state: State, extents: Ranges
    ) -> tuple[Range | None, int | None]:
        """Returns the rows of an operand that a piece takes, and up to which column; None for all."""
        column = None if state.column is None else next(iter(dims[state.column]), None)
        return extents.get(row_factor(self.rules[op.key], dims, state)), extents.get(column, (0, None))[1]

    def _leading(self, op: Op, role: Role) -> State:
        """Returns the state that says which rows a piece has."""
        if role.kind == "pieces":
            return self.found.by_atom[op.results[0]]
        rule = self.rules[op.key]
        return next(state for _, dims, state in self._operands(op) if row_factor(rule, dims, state) == role.rows)

    def _seen(self, op: Op, factor: int, rows: Range) -> int:
        """Returns how many columns of a factor these rows need: those behind add nothing."""
        least = self.rules[op.key].factors[factor].size
        for atom, dims, state in self._operands(op):
            for b in self.known.get(atom, ()):
                if (b.row, b.column) != (state.dim, state.column) or dims[b.column] != (factor,):
                    continue
                is_nothing = b.is_exact and b.value == 0 and op.name in ("dot_general", "reduce_sum")
                if b.is_negative_infinity if op.name == "reduce_max" else is_nothing:
                    least = min(least, int(b.first[rows[0] : rows[1]].max()))
        return max(least, 1)

    # -- what is needed of columns --------------------------------------------------------------------------------

    def _want(self, value: int, rows: Range | None = None, columns: int | None = None) -> None:
        """Notes that some rows of a value are read as far as a column; None stands for all."""
        state = self.found.by_atom.get(value)
        if state is None or state.is_free or state.column is None:
            return
        needs = self.need.setdefault(value, [0] * self.slices)
        width = self.values[value].shape[state.column] if columns is None else columns
        holds = self.find_beyond(value)
        for piece, _ in self.pieces_of(state, (0, state.size) if rows is None else rows):
            known = width if holds is None else int(holds.first[slice(*self.rows_of(state, piece))].max())
            needs[piece] = max(needs[piece], min(width, max(known, 1)))

    def find_beyond(self, value: int) -> ConstantTail | None:
        """Returns the number that a matrix of attention is known to hold behind some column of each row."""
        state = self.found.by_atom[value]
        of = (b for b in self.known.get(value, ()) if (b.row, b.column) == (state.dim, state.column) and b.is_exact)
        return next(of, None)

    def _demand(self, op: Op) -> None:
        """Notes the columns of its operands that an operation needs."""
        role = self.found.roles[op.index]
        for value in op.results:
            state = self.found.by_atom.get(value)
            if state is not None and state.column is not None:
                self.need.setdefault(value, [0] * self.slices)
        if role.kind in ("pieces", "sum", "spread"):
            pieces = self.ranges(op, role).values()
            for atom, dims, state in self._operands(op):
                for extents in pieces if state.column is not None else ():
                    self._want(atom, *self.reach(op, dims, state, extents))
        else:
            columns = max(self.need.get(op.results[0], [0])) or None if role.kind == "shift" else None
            for atom in op.reads:
                self._want(atom, columns=columns)


class Pieces(Extents):
    """The operations that are written, and the pieces of their values.

    Attributes:
      body, forward: what is expanded.
      pieces: value -> the atom of each of its pieces; None where a slice has none of its rows.
      whole: value -> the atom of all of it.
      phase: value -> the phase that makes it.
      ops: with their phases, in an order in which they can run. owner: op index -> `_owner` when it was written.
    """

    def __init__(self, rewriter: FunctionWriter, body: Body, found: States, lengths: Sequence[int]) -> None:
        super().__init__(body, found, lengths)
        self.rw, self.body, self.forward = rewriter, body, body.forward
        self.pieces: dict[int, list[Atom | None]] = defaultdict(lambda: [None] * len(lengths))
        self.whole: dict[int, Atom] = {value: value for value in body.block.inputs}
        self.phase: dict[int, int] = {}
        self.ops: list[tuple[int, Op]] = []
        self.owner: dict[int, int] = {}
        self._memo: dict[Hashable, Atom] = {}
        self._source: Any = None
        self._now = 0
        self._owner = -1

    def _add(self, op: Op) -> None:
        phase = max([self._now, *(self.phase.get(v, 0) for v in values_in(op.operands))])
        self.ops.append((phase, op))
        self.owner[op.index] = self._owner
        self.phase.update(dict.fromkeys(op.results, phase))

    def _again(
        self, op: Op, operands: Sequence[Atom], results: Sequence[int], params: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Writes an operation on other operands, with other parameters perhaps; its results."""
        self._add(self.rw.copy(op, operands, results, params=params))
        return list(results)

    def _made(self, function: Callable[..., Any], operands: Sequence[Atom], *static: Hashable, **named: Any) -> Atom:
        """Returns the result of `function(*static, *operands, **named)`, in operations of its own."""
        ops = list[Op]()
        result = self.rw.call(function, operands, *static, into=ops, source=self._source, **named)
        for op in ops:
            self._add(op)
        return result

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return shape_of(atom, self.rw.values)

    # -- fetching -------------------------------------------------------------------------------------------------

    def _cut(self, atom: Atom, dim: int, rows: Range, outer: int = 1, inner: int = 1) -> Atom:
        """Returns some rows of an array along a dim of outer times rows times inner."""
        if isinstance(atom, Lit) or rows == (0, self._shape(atom)[dim] // (outer * inner)):
            return atom
        key = ("cut", self._now, atom, dim, rows, outer, inner)
        if key not in self._memo:
            self._memo[key] = self._made(_rows_of, [atom], dim, rows, outer, inner)
        return self._memo[key]

    def _fetch(self, atom: Atom, rows: Range | None = None, columns: int | None = None) -> Atom:
        """Returns some rows and the first columns of a value in pieces, joined; of another one, all of it."""
        state = self.found.by_atom.get(atom)
        if isinstance(atom, Lit) or atom in self.whole or state is None:
            return atom if isinstance(atom, Lit) else self.whole[atom]
        rows = (0, state.size) if rows is None else rows
        key = ("fetch", self._now, atom, rows, columns)
        if key not in self._memo:
            parts: list[Atom] = []
            for piece, own in self.pieces_of(state, rows):
                held = self.pieces[atom][piece]
                assert held is not None
                part = self._cut(held, state.dim, own, state.outer, state.inner)
                if state.column is not None:
                    width = self.rw.values[atom].shape[state.column] if columns is None else columns
                    part = self._of_width(atom, part, state.column, width)
                parts.append(part)
            self._memo[key] = self._join(parts, state)
        return self._memo[key]

    def _of_width(self, value: int, part: Atom, column: int, width: int) -> Atom:
        """Returns the first columns of some rows, with the number that is known to be behind those that were made."""
        made = self._shape(part)[column]
        if width <= made:
            return self._cut(part, column, (0, width))
        holds = self.find_beyond(value)
        assert holds is not None, "columns that somebody reads are made, or known"
        return self._made(pad_rows, [part], column, 0, width - made, holds.value)

    def _join(self, parts: Sequence[Atom], state: State) -> Atom:
        return parts[0] if len(parts) == 1 else self._made(_joined, parts, state.dim, state.outer)


def _rows_of(dim: int, rows: Range, outer: int, inner: int, x: jax.Array) -> jax.Array:
    if outer == 1:
        return lax.slice_in_dim(x, rows[0] * inner, rows[1] * inner, axis=dim)
    before, behind = x.shape[:dim], x.shape[dim + 1 :]
    apart = lax.slice_in_dim(x.reshape(*before, outer, -1, inner, *behind), *rows, axis=dim + 1)
    return apart.reshape(*before, -1, *behind)


def pad_rows(dim: int, low: int, high: int, number: float, x: jax.Array) -> jax.Array:
    """Returns an array with a number before and behind its rows."""
    config = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.asarray(number, x.dtype), config)


def _joined(dim: int, outer: int, *arrays: jax.Array) -> jax.Array:
    if outer == 1:
        return jnp.concatenate(arrays, dim)
    apart = [x.reshape(*x.shape[:dim], outer, -1, *x.shape[dim + 1 :]) for x in arrays]
    joined = jnp.concatenate(apart, dim + 1)
    return joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 2 :])
