"""A block in slices of the sequence: every operation once for each slice, with its inputs from the slices before.

Problem. Given a micro-batch's block, the lengths of the slices, and where the sequence is (`states`), write a block
that computes the same, in which each operation belongs to a *phase*: forward of slice 0, 1, ..., S - 1, then backward
of slice S - 1, ..., 1, 0. A pipeline runs the phases of a stage as tasks of their own.

Answer. Piece i of a value has the rows of slice i. An operation's piece takes of each operand the ranges of its
factors: the same rows; of keys and values those of all slices up to i, joined; of values from the start, a cut. Its
phase is that of the last piece that it takes, and its own at least, so the block is correct for every model. Where a
forward piece has to wait for a later slice, `late` names the operation: the model is not causal there.

Sums over the rows (gradients of parameters, the loss) add up in the order of the phases. The contributions of slices to
the cotangents of the keys before them add up likewise; those of a slice are complete when all slices behind it are
done.

Source: the schedule of TeraPipe (Li et al., ICML 2021), here found in the step's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from alpa_lite.ir.graph import Atom, Block, Lit, Op
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.blockwise.functions import COMBINED, params_for
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.tokens.pieces import Pieces, Ranges, pad_rows
from alpa_lite.passes.tokens.states import Body, Role, State, States
from alpa_lite.passes.tokens.windows import Range


@dataclass(frozen=True, eq=False)
class LateOperation:
    """A forward operation whose piece waits for slices behind it, and why."""

    op: Op
    reason: str


@dataclass(frozen=True, eq=False)
class SlicedBlock:
    """A block in slices.

    Attributes:
      block: the same inputs and outputs as before.
      phase: op index -> its phase, 0 to 2 S - 1.
      owner: op index -> the operation of the block that it is a part of; -1 for joins of its inputs.
      late: the forward operations that stand between slices, in program order.
    """

    block: Block
    phase: Mapping[int, int]
    owner: Mapping[int, int]
    late: tuple[LateOperation, ...]


def expand(rewriter: FunctionWriter, body: Body, found: States, lengths: Sequence[int]) -> SlicedBlock:
    """Returns the block in slices.

    Args:
      rewriter: of the graph that the block is in; helper functions must have no constants, so it keeps empty arrays.
      found: the states of the body.
      lengths: of the slices, in tokens; the last takes what is left.
    """
    return _Expansion(rewriter, body, found, lengths).run()


class _Expansion(Pieces):
    """The expansion of one block."""

    def run(self) -> SlicedBlock:
        late, block = [], self.body.block
        for op in block.ops:
            self._source, self._owner = op.source, op.index
            self._now = 0 if op.index in self.forward else self.slices
            role = self.found.roles[op.index]
            self._emit(op, role)
            reason = self._late_reason(op, role)
            if reason:
                late.append(LateOperation(op, reason))
        makers = producers(block.ops)
        outputs: list[Atom] = []
        for atom in block.outputs:  # joins belong to the operation that makes an output, and run where that does
            maker = makers.get(atom) if isinstance(atom, int) else None
            self._owner, self._now = -1 if maker is None else maker.index, 0
            outputs.append(self._fetch(atom))
        phase = self._sink(outputs)
        ordered = sorted((op for _, op in self.ops), key=lambda op: phase[op.index])
        return SlicedBlock(Block(block.inputs, tuple(ordered), tuple(outputs)), phase, self.owner, tuple(late))

    def _late_reason(self, op: Op, role: Role) -> str:
        """Returns why a piece of a forward operation waits for a later slice, if one does."""
        if op.index not in self.forward or role.kind in ("free", "sum"):
            return ""
        for value in op.results:
            held = enumerate(self.pieces.get(value, ()))
            if any(isinstance(a, int) and self.phase.get(a, 0) > piece for piece, a in held):
                return "its operands are of later tokens"
        return role.reason

    def _sink(self, outputs: Sequence[Atom]) -> dict[int, int]:
        """Returns the phases, where recomputed operations wait for the first phase that reads them."""
        last = 2 * self.slices - 1
        until: dict[int, int] = dict.fromkeys(values_in(outputs), last)
        phase: dict[int, int] = {}
        for own, op in reversed(self.ops):
            due = min((until[v] for v in op.results if v in until), default=own)
            phase[op.index] = max(own, due) if self.owner[op.index] in self.body.recomputed_ops else own
            for value in values_in(op.operands):
                until[value] = min(until.get(value, last), phase[op.index])
        return phase

    def _emit(self, op: Op, role: Role) -> None:
        match role.kind:
            case "whole" | "free":
                operands = list(map(self._fetch, op.operands))
                results = self._again(op, operands, list(map(self.rw.new_value, op.results)))
                self.whole.update(zip(op.results, results, strict=True))
            case "pieces":
                for piece, extents in self.ranges(op, role).items():
                    for value, part in zip(op.results, self._emit_piece(op, piece, extents), strict=True):
                        self.pieces[value][piece] = part
            case "sum" | "spread":
                self._emit_sum(op, role)
            case "shift":
                self._emit_shift(op, role)
            case "window":
                self._emit_window(op, role)
            case "running":
                self._emit_running(op)
            case "loop":
                self._emit_loop(op)

    # -- by factors -----------------------------------------------------------------------------------------------

    def _emit_piece(self, op: Op, piece: int, extents: Ranges, first: Atom | None = None) -> list[int]:
        """Writes an operation on the ranges of its factors that a piece takes; `first` replaces its first operand."""
        self._begin(op, piece)
        rule = self.rules[op.key]
        pairs = zip(op.operands, rule.operands, strict=True)
        operands = [self._operand(op, atom, dims, extents) for atom, dims in pairs]
        if first is not None:
            operands[0] = first
        results = []
        for value, dims in zip(op.results, rule.results, strict=True):
            shape = list(self._shape(value))
            for dim, factors in enumerate(dims):
                for factor in factors:
                    a, b = extents.get(factor, (0, rule.factors[factor].size))
                    shape[dim] = shape[dim] // rule.factors[factor].size * (b - a)
            results.append(self.rw.new_value_of_shape(value, tuple(shape)))
        return self._again(op, operands, results, params_for(op, operands, results, self.rw.values))

    def _operand(self, op: Op, atom: Atom, dims: Sequence[Sequence[int]], extents: Ranges) -> Atom:
        """Returns the part of an operand that one piece of an operation takes."""
        rule, state, others = self.rules[op.key], self.found.by_atom.get(atom), set(range(len(dims)))
        if state is None or atom in self.whole:
            got = self._fetch(atom)
        else:
            got = self._fetch(atom, *self.reach(op, dims, state, extents))
            others -= {state.dim, state.column}
        for dim in sorted(others):
            outer = 1
            for place, factor in enumerate(dims[dim]):
                if factor in extents:
                    inner = math.prod(rule.factors[f].size for f in dims[dim][place + 1 :])
                    got = self._cut(got, dim, extents[factor], outer, inner)
                outer *= rule.factors[factor].size
        return got

    def _emit_sum(self, op: Op, role: Role) -> None:
        """Writes the sum over slices, in the order of the phases; of "spread", a sum for each slice on its own."""
        (value,), is_scatter = op.results, op.name == "scatter-add"
        for piece, extents in sorted(self.ranges(op, role).items(), reverse=op.index not in self.forward):
            total = self.whole.get(value)
            (part,) = self._emit_piece(op, piece, extents, total if is_scatter else None)
            if role.kind == "spread":
                self._spread(op, value, part)
            else:
                self.whole[value] = part if is_scatter else self._combined(op, total, part)
        for piece, held in enumerate(self.pieces[value]) if role.kind == "spread" else ():
            if held is None:
                self.pieces[value][piece] = self._zeros(value, self.found.by_atom[value], piece)

    def _spread(self, op: Op, value: int, part: Atom) -> None:
        """Adds the first rows of a value to its pieces."""
        state, held = self.found.by_atom[value], self.pieces[value]
        for piece, own in self.pieces_of(state, (0, self._shape(part)[state.dim] // state.inner)):
            first, stop = self.rows_of(state, piece)
            given = self._cut(part, state.dim, (own[0] + first, own[1] + first))
            missing = stop - first - own[1]  # to some rows of this piece, and zeros to the rest
            if missing or own[0]:
                given = self._made(pad_rows, [given], state.dim, own[0], missing, 0)
            held[piece] = self._combined(op, held[piece], given)

    # -- along the sequence ---------------------------------------------------------------------------------------

    def _begin(self, op: Op, piece: int) -> None:
        """Sets the phase of a piece of an operation for all operations that are written from here on."""
        self._now = piece if op.index in self.forward else 2 * self.slices - 1 - piece
        if op.index in self.body.recomputed_ops:  # when the backward pass begins: it waits for its readers in the end
            self._now = self.slices

    def _turns(self, op: Op, state: State, *, reverse: bool = False) -> Iterator[tuple[int, Range]]:
        """Yields the pieces of an operation that have rows, with these, in the order in which they are written."""
        for piece in sorted(range(self.slices), reverse=reverse):
            rows = self.rows_of(state, piece)
            if rows[0] < rows[1]:
                self._begin(op, piece)
                yield piece, rows

    def _combined(self, op: Op, left: Atom | None, right: Atom) -> Atom:
        """Returns the sum of two parts, or the operation's own reduction of them; of one part, that."""
        return right if left is None else self._made(COMBINED.get(op.name, lax.add_p).bind, [left, right])

    def _zeros(self, value: int, state: State, piece: int) -> Atom | None:
        first, stop = self.rows_of(state, piece)
        shape = _with(self._shape(value), state.dim, stop - first)
        return self._made(jnp.zeros, [], shape, self.rw.values[value].dtype) if first < stop else None

    def _rows(self, atom: Atom, state: State, rows: Range) -> Atom:
        if isinstance(atom, Lit) or atom in self.whole or atom not in self.pieces:
            return self._cut(self._fetch(atom), state.dim, rows)
        return self._fetch(atom, rows)

    def _emit_shift(self, op: Op, role: Role) -> None:
        start = 0
        for value in op.results:  # of "split" several
            state = self.found.by_atom[value]
            for piece, rows in self._turns(op, state):
                moved = start + rows[0], start + rows[1]
                self.pieces[value][piece] = self._shifted(op, role, state, moved)
            start += state.size

    def _shifted(self, op: Op, role: Role, state: State, rows: Range) -> Atom:
        """Returns one piece: the rows that it takes of each operand, with padding around them or other dims cut."""
        parts, around, dim = list[Atom](), (0, 0), state.dim
        for atom, move in zip(op.operands, role.moves, strict=False):
            taken, padding = move.take_rows(rows, self._shape(atom)[dim])
            if taken[0] < taken[1]:
                parts.append(self._rows(atom, state, taken))
                around = padding
        if op.name == "pad" and not parts:  # nothing but padding
            filler, shape = self._fetch(op.operands[1]), _with(self._shape(op.results[0]), dim, rows[1] - rows[0])
            return self._made(jnp.broadcast_to, [filler], shape=shape)
        if op.name == "pad":
            config = tuple(map(tuple, op.params["padding_config"]))
            config = _with(config, dim, (*around, config[dim][2]))
            return self._made(lax.pad, [parts[0], self._fetch(op.operands[1])], padding_config=config)
        if op.name != "slice":
            return self._join(parts, state)
        limits = _with(op.params["limit_indices"], dim, self._shape(parts[0])[dim])
        starts, strides = _with(op.params["start_indices"], dim, 0), op.params["strides"]
        if limits == self._shape(parts[0]) and not any(starts) and strides is None:
            return parts[0]
        strides = strides and tuple(strides)
        return self._made(lax.slice, parts, start_indices=starts, limit_indices=limits, strides=strides)

    def _emit_window(self, op: Op, role: Role) -> None:
        """Writes a convolution along the rows, or the gradient of its kernel, a sum over slices."""
        (value,), (image, kernel), form = op.results, op.operands, role.window
        assert form is not None
        made = self.found.by_atom.get(value)
        image_state, leading = self.found.by_atom[image], self.found.by_atom[kernel] if made is None else made
        total: Atom | None = None
        for piece, rows in self._turns(op, leading, reverse=op.index not in self.forward):
            taken, around = form.move.take_rows(rows, image_state.size)
            if taken[0] >= taken[1]:
                if made is not None:
                    self.pieces[value][piece] = self._zeros(value, made, piece)
                continue
            operands = [self._rows(image, image_state, taken)]
            operands += [self._rows(kernel, leading, rows) if made is None else self._fetch(kernel)]
            shape = self._shape(value) if made is None else _with(self._shape(value), form.out_dim, rows[1] - rows[0])
            params = {**op.params, "padding": _with(op.params["padding"], form.spatial, around)}
            (part,) = self._again(op, operands, [self.rw.new_value_of_shape(value, shape)], params)
            if made is None:
                self.whole[value] = total = self._combined(op, total, part)
            else:
                self.pieces[value][piece] = part

    def _emit_running(self, op: Op) -> None:
        """Writes a cumulative operation: a slice goes on from the last row of the one before it, which it reads too."""
        (value,), reverse = op.results, op.params["reverse"]
        state, before = self.found.by_atom[value], None
        for piece, rows in self._turns(op, state, reverse=reverse):
            held, count = self._fetch(op.operands[0], rows), rows[1] - rows[0]
            own = (0, count)
            if before is not None:
                size = self._shape(before)[state.dim]
                edge = self._cut(before, state.dim, (0, 1) if reverse else (size - 1, size))
                held = self._join([held, edge] if reverse else [edge, held], state)
                own = own if reverse else (1, count + 1)
            (result,) = self._again(op, [held], [self.rw.new_value_of_shape(value, self._shape(held))])
            self.pieces[value][piece] = before = self._cut(result, state.dim, own)

    def _emit_loop(self, op: Op) -> None:
        view = ScanView(op)
        parts, given = view.split_operands(op.operands), view.split_results(op.results)
        consts, carry = list(map(self._fetch, parts.consts)), list(map(self._fetch, parts.carry))
        states = [self.found.by_atom[v] for v in given.ys]
        states += [s for a in parts.xs if (s := self.found.by_atom.get(a)) is not None and not s.is_free]
        state = State(0, view.length, states[0].offset if states else 0)
        for piece, rows in self._turns(op, state, reverse=op.params["reverse"]):
            count = rows[1] - rows[0]
            xs = [self._rows(a, state, rows) for a in parts.xs]
            results = [*map(self.rw.new_value, given.carry)]
            results += [self.rw.new_value_of_shape(v, (count, *self._shape(v)[1:])) for v in given.ys]
            self._again(op, [*consts, *carry, *xs], results, {**op.params, "length": count})
            carry, ys = map(list, view.split_results(results))
            for value, y in zip(given.ys, ys, strict=True):
                self.pieces[value][piece] = y
        self.whole.update(zip(given.carry, carry, strict=True))


def _with(items: Sequence[Any], number: int, item: Any) -> tuple[Any, ...]:
    """Returns some items, one of which is replaced."""
    return (*items[:number], item, *items[number + 1 :])
