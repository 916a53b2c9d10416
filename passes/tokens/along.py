"""Operations along the sequence, one slice after another: shifts, convolutions, running sums and loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.graph import Atom, Block, Lit, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tokens.extents import Extents, Range
from alpa_lite.passes.tokens.pieces import Pieces
from alpa_lite.passes.tokens.states import Move, State, States, computed_again, shift_of
from alpa_lite.passes.tokens.windows import window


class Along(Pieces):
    """Operations along the sequence, with the pieces of their values.

    Attributes:
      forward: indices of the forward operations. again: those that the backward pass does again.
    """

    def __init__(
        self, rewriter: Rewriter, found: States, extents: Extents, block: Block, forward: frozenset[int]
    ) -> None:
        super().__init__(rewriter, found, extents, block.inputs)
        self.forward, self.again = forward, computed_again(block, forward)

    def _begin(self, op: Op, piece: int) -> None:
        """Sets the phase of a piece of an operation for all operations that are written from here on."""
        if op.index in self.again:  # as soon as the backward pass begins: it waits for its readers in the end
            self._now = self.slices
        else:
            self._now = piece if op.index in self.forward else 2 * self.slices - 1 - piece

    def _combined(self, op: Op, left: Atom, right: Atom) -> Atom:
        join = {"reduce_max": lax.max, "reduce_min": lax.min}.get(op.name, lax.add)
        return self._made(join, [left, right], ("combine", join.__name__))

    def _zeros(self, value: int, state: State, piece: int) -> Atom | None:
        first, stop = self.extents.held(state, piece)
        if first == stop:
            return None
        shape = list(self.rw.values[value].shape)
        shape[state.dim] = stop - first
        dtype = self.rw.values[value].dtype
        return self._made(lambda: jnp.zeros(shape, dtype), [], ("zeros", *shape, str(dtype)))

    def _emit_shift(self, op: Op) -> None:
        start = 0
        for value in op.results:  # of "split" several
            state = self.found.of[value]
            sizes = [self._extent(a, state.dim) for a in op.operands]
            moves = shift_of(op, state.dim, sizes)
            self.pieces[value] = [None] * self.slices
            for piece in range(self.slices):
                first, stop = self.extents.held(state, piece)
                if first < stop:
                    self._begin(op, piece)
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
        if op.name == "slice":
            return self._slice(op, state, parts[0])
        return parts[0] if len(parts) == 1 else self._join(parts, state)

    def _extent(self, atom: Atom, dim: int) -> int:
        shape = tuple(atom.aval.shape) if isinstance(atom, Lit) else self.rw.values[atom].shape
        return shape[dim] if dim < len(shape) else 1

    def _rows(self, atom: Atom, state: State, rows: Range) -> Atom:
        if isinstance(atom, Lit) or atom in self.whole or atom not in self.pieces:
            return self._cut(self._fetch(atom), state.dim, rows)
        return self._fetch(atom, rows)

    def _slice(self, op: Op, state: State, part: Atom) -> Atom:
        """The cuts of other dims than the rows."""
        starts, limits = list(op.params["start_indices"]), list(op.params["limit_indices"])
        strides = op.params["strides"]
        starts[state.dim], limits[state.dim] = 0, self._shape(part)[state.dim]
        if tuple(limits) == self._shape(part) and not any(starts) and strides is None:
            return part
        steps = None if strides is None else tuple(strides)
        return self._made(lambda x: lax.slice(x, starts, limits, strides), [part], ("slice", *starts, *limits, steps))

    def _pad(self, op: Op, state: State, rows: Range, before: int, parts: Sequence[Atom]) -> Atom:
        """Padding around one part, or alone. `before`: rows of the piece before those of the part."""
        config = [tuple(c) for c in op.params["padding_config"]]
        interior = config[state.dim][2]
        given_rows = (1 + interior) * (self._shape(parts[0])[state.dim] - 1) + 1 if parts else 0
        config[state.dim] = (before, rows[1] - rows[0] - before - given_rows, interior)
        filler = op.operands[1] if isinstance(op.operands[1], Lit) else self._fetch(op.operands[1])
        given = isinstance(filler, Lit)
        number: Any = filler.value if isinstance(filler, Lit) else None
        if not parts:  # nothing but padding
            (value,) = op.results
            shape = list(self.rw.values[value].shape)
            shape[state.dim] = rows[1] - rows[0]
            if given:
                dtype = self.rw.values[value].dtype
                return self._made(lambda: jnp.full(shape, number, dtype), [], ("full", *shape, repr(number)))
            return self._made(lambda y: jnp.broadcast_to(y, shape), [filler], ("full", *shape))
        key = ("padding", tuple(config), repr(number))
        if given:
            return self._made(lambda x: lax.pad(x, jnp.asarray(number, x.dtype), config), [parts[0]], key)
        return self._made(lambda x, y: lax.pad(x, y, config), [parts[0], filler], key)

    def _emit_window(self, op: Op) -> None:
        (value,), (image, kernel) = op.results, op.operands
        made = self.found.of.get(value)
        leading = self.found.of[values_in([kernel])[0]] if made is None else made
        (image_state,) = [self.found.of[a] for a in values_in([image])]
        form = window(op, image_state.dim, self._shape(kernel), self._shape(value), summed=made is None)
        assert form is not None
        parts: list[Atom | None] = [None] * self.slices
        for piece in range(self.slices) if op.index in self.forward else reversed(range(self.slices)):
            rows = self.extents.held(leading, piece)
            taken, around = form.taken(rows, image_state.size)
            if rows[0] == rows[1]:
                continue
            self._begin(op, piece)
            if taken[0] == taken[1]:
                parts[piece] = None if made is None else self._zeros(value, made, piece)
                continue
            operands = [self._rows(image, image_state, taken)]
            operands += [self._rows(kernel, leading, rows) if made is None else self._fetch(kernel)]
            shape = list(self._shape(value))
            if made is not None:
                shape[form.out_dim] = rows[1] - rows[0]
            padding = [around if n == form.spatial else p for n, p in enumerate(op.params["padding"])]
            params = {**op.params, "padding": tuple(padding)}
            parts[piece] = self._again(op, operands, self.rw.shaped(value, tuple(shape)), params)
        if made is None:
            order = [p for p in (parts if op.index in self.forward else parts[::-1]) if p is not None]
            self.whole[value] = functools.reduce(functools.partial(self._combined, op), order)
        else:
            self.pieces[value] = parts

    def _again(self, op: Op, operands: Sequence[Atom], result: int, params: Mapping[str, Any]) -> int:
        """The operation on other operands; its result."""
        described = [a if isinstance(a, Lit) else self.rw.values[a] for a in operands]
        key = self.rw.keys.key(self.rw.keys.head(op.primitive, params), described)
        self._add(replace(self.rw.moved(op, operands, [result], params), key=key))
        return result

    def _emit_running(self, op: Op) -> None:
        (value,) = op.results
        state = self.found.of[value]
        reverse, dim = op.params["reverse"], state.dim
        joins = {"cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min}
        join = joins.get(op.name, jnp.logaddexp)
        self.pieces[value] = [None] * self.slices
        before: Atom | None = None
        for piece in reversed(range(self.slices)) if reverse else range(self.slices):
            rows = self.extents.held(state, piece)
            if rows[0] == rows[1]:
                continue
            self._begin(op, piece)
            held = self._fetch(op.operands[0], rows)
            assert isinstance(held, int)
            made = self.rw.shaped(value, self._shape(held))
            key = self.rw.keys.key(self.rw.keys.head(op.primitive, op.params), [self.rw.values[held]])
            self._add(replace(self.rw.moved(op, [held], [made]), key=key))
            result: Atom = made
            if before is not None:
                size = self._shape(before)[dim]
                edge = self._cut(before, dim, (0, 1) if reverse else (size - 1, size))
                result = self._made(functools.partial(_going_on, join), [made, edge], ("run", op.name))
            self.pieces[value][piece] = before = result

    def _emit_loop(self, op: Op) -> None:
        view = ScanView(op)
        parts, given = view.taken(op.operands), view.given(op.results)
        reverse = op.params["reverse"]
        consts = [a if isinstance(a, Lit) else self._fetch(a) for a in parts.consts]
        carry: list[Atom] = [a if isinstance(a, Lit) else self._fetch(a) for a in parts.carry]
        for value in given.ys:
            self.pieces[value] = [None] * self.slices
        offset = next((self.found.of[v].offset for v in given.ys), None)
        if offset is None:
            live = [self.found.of[a] for a in values_in(parts.xs) if a in self.found.of]
            offset = next((s.offset for s in live if not s.free), 0)
        state = State(0, view.length, offset)
        for piece in reversed(range(self.slices)) if reverse else range(self.slices):
            rows = self.extents.held(state, piece)
            if rows[0] == rows[1]:
                continue
            self._begin(op, piece)
            xs = [self._rows(a, state, rows) for a in parts.xs]
            ends = [self.rw.fresh(v) for v in given.carry]
            ys = [self.rw.shaped(v, (rows[1] - rows[0], *self.rw.values[v].shape[1:])) for v in given.ys]
            params = {**op.params, "length": rows[1] - rows[0]}
            made = self.rw.moved(op, [*consts, *carry, *xs], [*ends, *ys], params)
            self._add(made)
            carry = list(ends)
            for value, y in zip(given.ys, ys, strict=True):
                self.pieces[value][piece] = y
        self.whole.update(zip(given.carry, carry, strict=True))


def _going_on(join: Callable[[Any, Any], Any], x: jax.Array, edge: jax.Array) -> jax.Array:
    """Running values of a slice that goes on where another one ended."""
    return join(x, jnp.broadcast_to(edge, x.shape))
