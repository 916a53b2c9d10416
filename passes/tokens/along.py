"""Operations along the sequence, one slice after another: shifts, convolutions, running sums and loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.ir.graph import Atom, Lit, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.tokens.pieces import Pieces, Range
from alpa_lite.passes.tokens.states import State
from alpa_lite.passes.tokens.windows import Move, shift_of, size_along, window


class Along(Pieces):
    """Operations along the sequence, with the pieces of their values."""

    def _begin(self, op: Op, piece: int) -> None:
        """Sets the phase of a piece of an operation for all operations that are written from here on."""
        if (
            op.index in self.body.computed_again
        ):  # as soon as the backward pass begins: it waits for its readers in the end
            self._now = self.slices
        else:
            self._now = piece if op.index in self.forward else 2 * self.slices - 1 - piece

    def _turns(self, op: Op, state: State, *, reverse: bool = False) -> Iterator[tuple[int, Range]]:
        """The pieces of an operation that have rows, with these, in the order in which they are written."""
        for piece in sorted(range(self.slices), reverse=reverse):
            rows = self.extents.held(state, piece)
            if rows[0] < rows[1]:
                self._begin(op, piece)
                yield piece, rows

    def _combined(self, op: Op, left: Atom | None, right: Atom) -> Atom:
        """The sum of two parts, or the operation's own reduction of them; of one part, that."""
        join = {"reduce_max": lax.max, "reduce_min": lax.min}.get(op.name, lax.add)
        return right if left is None else self._made(join, [left, right])

    def _zeros(self, value: int, state: State, piece: int) -> Atom | None:
        first, stop = self.extents.held(state, piece)
        shape = _with(self._shape(value), state.dim, stop - first)
        return self._made(jnp.zeros, [], shape, self.rw.values[value].dtype) if first < stop else None

    def _rows(self, atom: Atom, state: State, rows: Range) -> Atom:
        if isinstance(atom, Lit) or atom in self.whole or atom not in self.pieces:
            return self._cut(self._fetch(atom), state.dim, rows)
        return self._fetch(atom, rows)

    # -- shifts ---------------------------------------------------------------------------------------------------

    def _emit_shift(self, op: Op) -> None:
        start = 0
        for value in op.results:  # of "split" several
            state = self.found.of[value]
            sizes = [size_along(self._shape(a), state.dim) for a in op.operands]
            moves = shift_of(op, state.dim, sizes)
            for piece, (first, stop) in self._turns(op, state):
                self.pieces[value][piece] = self._shifted(op, state, (start + first, start + stop), moves, sizes)
            start += state.size

    def _shifted(self, op: Op, state: State, rows: Range, moves: Sequence[Move], sizes: Sequence[int]) -> Atom:
        """One piece: the rows that it takes of each operand, moved."""
        parts: list[Atom] = []
        before = 0
        for atom, move, size in zip(op.operands, moves, sizes, strict=False):
            a = max(-((move.to - rows[0]) // move.apart), -(move.start // move.every), 0)
            b = min(-((move.to - rows[1]) // move.apart), -((move.start - size) // move.every))
            if a < b:
                before = move.to + move.apart * a - rows[0]
                first = move.start + move.every * a
                parts.append(self._rows(atom, state, (first, first + move.every * (b - a - 1) + 1)))
        if op.name == "pad":
            return self._pad(op, state, rows, before, parts)
        return self._slice(op, state, parts[0]) if op.name == "slice" else self._join(parts, state)

    def _slice(self, op: Op, state: State, part: Atom) -> Atom:
        """The cuts of other dims than the rows."""
        starts, strides = _with(op.params["start_indices"], state.dim, 0), op.params["strides"]
        limits = _with(op.params["limit_indices"], state.dim, self._shape(part)[state.dim])
        if limits == self._shape(part) and not any(starts) and strides is None:
            return part
        strides = strides and tuple(strides)
        return self._made(lax.slice, [part], start_indices=starts, limit_indices=limits, strides=strides)

    def _pad(self, op: Op, state: State, rows: Range, before: int, parts: Sequence[Atom]) -> Atom:
        """Padding around one part, or alone. `before`: rows of the piece before those of the part."""
        filler, count = self._fetch(op.operands[1]), rows[1] - rows[0]
        if not parts:  # nothing but padding
            return self._made(jnp.broadcast_to, [filler], shape=_with(self._shape(op.results[0]), state.dim, count))
        config = tuple(map(tuple, op.params["padding_config"]))
        interior = config[state.dim][2]
        given = (1 + interior) * (self._shape(parts[0])[state.dim] - 1) + 1
        config = _with(config, state.dim, (before, count - before - given, interior))
        return self._made(lax.pad, [parts[0], filler], padding_config=config)

    # -- convolutions, running sums, loops ------------------------------------------------------------------------

    def _emit_window(self, op: Op) -> None:
        (value,), (image, kernel) = op.results, op.operands
        made = self.found.of.get(value)
        leading = self.found.of[values_in([kernel])[0]] if made is None else made
        (image_state,) = [self.found.of[a] for a in values_in([image])]
        form = window(op, image_state.dim, self._shape(kernel), self._shape(value), summed=made is None)
        assert form is not None
        parts: list[Atom] = []
        for piece, rows in self._turns(op, leading, reverse=op.index not in self.forward):
            taken, around = form.taken(rows, image_state.size)
            if taken[0] == taken[1]:
                if made is not None:
                    self.pieces[value][piece] = self._zeros(value, made, piece)
                continue
            operands = [self._rows(image, image_state, taken)]
            operands += [self._rows(kernel, leading, rows) if made is None else self._fetch(kernel)]
            shape = self._shape(value) if made is None else _with(self._shape(value), form.out_dim, rows[1] - rows[0])
            params = {**op.params, "padding": _with(op.params["padding"], form.spatial, around)}
            (part,) = self._again(op, operands, [self.rw.shaped(value, shape)], params)
            if made is None:
                parts.append(part)
            else:
                self.pieces[value][piece] = part
        if made is None:
            self.whole[value] = functools.reduce(functools.partial(self._combined, op), parts)

    def _emit_running(self, op: Op) -> None:
        (value,) = op.results
        reverse, dim = op.params["reverse"], self.found.of[value].dim
        joins = {"cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min}
        before: Atom | None = None
        for piece, rows in self._turns(op, self.found.of[value], reverse=reverse):
            held = self._fetch(op.operands[0], rows)
            result: Atom = self._again(op, [held], [self.rw.shaped(value, self._shape(held))])[0]
            if before is not None:
                size = self._shape(before)[dim]
                edge = self._cut(before, dim, (0, 1) if reverse else (size - 1, size))
                result = self._made(_going_on, [result, edge], joins.get(op.name, jnp.logaddexp))
            self.pieces[value][piece] = before = result

    def _emit_loop(self, op: Op) -> None:
        view = ScanView(op)
        parts, given = view.taken(op.operands), view.given(op.results)
        consts, carry = list(map(self._fetch, parts.consts)), list(map(self._fetch, parts.carry))
        states = [self.found.of[v] for v in given.ys]
        states += [s for a in parts.xs if (s := self.found.of.get(a)) is not None and not s.free]
        state = State(0, view.length, states[0].offset if states else 0)
        for piece, rows in self._turns(op, state, reverse=op.params["reverse"]):
            count = rows[1] - rows[0]
            xs = [self._rows(a, state, rows) for a in parts.xs]
            results = [*map(self.rw.fresh, given.carry)]
            results += [self.rw.shaped(v, (count, *self._shape(v)[1:])) for v in given.ys]
            self._again(op, [*consts, *carry, *xs], results, {**op.params, "length": count})
            carry, ys = map(list, view.given(results))
            for value, y in zip(given.ys, ys, strict=True):
                self.pieces[value][piece] = y
        self.whole.update(zip(given.carry, carry, strict=True))


def _with(items: Sequence[Any], number: int, item: Any) -> tuple[Any, ...]:
    """Some items, one of which is replaced."""
    return (*items[:number], item, *items[number + 1 :])


def _going_on(join: Callable[[Any, Any], Any], x: jax.Array, edge: jax.Array) -> jax.Array:
    """Running values of a slice that goes on where another one ended."""
    return join(x, jnp.broadcast_to(edge, x.shape))
