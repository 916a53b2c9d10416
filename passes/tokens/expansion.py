"""A block in slices of the sequence: every operation once for each slice, with what it takes of the slices before.

Problem. Given a micro-batch's block, the lengths of the slices, and where the sequence is (`states`), write a block
that computes the same, in which each operation belongs to a *phase*: forward of slice 0, 1, ..., S - 1, then backward
of slice S - 1, ..., 1, 0. A pipeline runs the phases of a stage as tasks of their own.

Answer. Piece i of a value has the rows of slice i. An operation's piece takes of each operand what its factors say: the
same rows; of keys and values those of all slices up to i, joined; of what is there from the start, a cut. Its phase is
that of the last piece that it takes, and its own at least, so what is written is right whatever the model does. Where a
forward piece has to wait for a later slice, `late` names the operation: the model is not causal there.

Sums over the rows (gradients of parameters, the loss) add up in the order of the phases. What a slice gives to the
cotangents of the keys before it adds up likewise; that of a slice is complete when all slices behind it are done.

Source: the schedule of TeraPipe (Li et al., ICML 2021), here found in the step's own operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite import _jax
from alpa_lite.graph import Atom, Block, Lit, Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tokens.beyond import Known
from alpa_lite.passes.tokens.extents import Extents, Range
from alpa_lite.passes.tokens.pieces import Pieces
from alpa_lite.passes.tokens.states import SHIFTS, State, States, Way, row_factor, shift_of
from alpa_lite.strategy import Rule


@dataclass(frozen=True, eq=False)
class Late:
    """A forward operation whose piece waits for slices behind it, and why."""

    op: Op
    reason: str


@dataclass(frozen=True, eq=False)
class Expanded:
    """A block in slices.

    Attributes:
      block: the same inputs and outputs as before.
      phase: op index -> its phase, 0 to 2 S - 1.
      owner: op index -> the operation of the block that it is a part of; -1 for what joins the outputs.
      late: the forward operations that stand between slices, in program order.
    """

    block: Block
    phase: Mapping[int, int]
    owner: Mapping[int, int]
    late: tuple[Late, ...]


def expand(
    rewriter: Rewriter,
    block: Block,
    rules: Mapping[object, Rule],
    known: Known,
    found: States,
    forward: frozenset[int],
    lengths: Sequence[int],
) -> Expanded:
    """The block in slices.

    Args:
      rewriter: of the graph that the block is in.
      rules, known, forward: as for `states.states`. found: its answer.
      lengths: of the slices, in tokens; the last takes what is left.
    """
    extents = Extents(block, rules, rewriter.values, known, found, lengths)
    return _Expansion(rewriter, block, rules, found, extents, forward).run()


class _Expansion(Pieces):
    """The tables of one expansion."""

    def __init__(
        self,
        rewriter: Rewriter,
        block: Block,
        rules: Mapping[object, Rule],
        found: States,
        extents: Extents,
        forward: frozenset[int],
    ) -> None:
        super().__init__(rewriter, found, extents, block.inputs)
        self.block, self.rules, self.forward = block, rules, forward
        self.late: list[Late] = []
        self.again = _computed_again(block, forward)

    def run(self) -> Expanded:
        for op in self.block.ops:
            self._source, self._owner = op.source, op.index
            self._now = 0 if op.index in self.forward else self.slices
            self._emit(op)
        self._owner, self._now = -1, 0
        outputs = tuple(self._fetch(a) if isinstance(a, int) else a for a in self.block.outputs)
        phase = self._sunk(outputs)
        ordered = sorted((op for _, op in self.ops), key=lambda op: phase[op.index])
        block = Block(self.block.inputs, tuple(ordered), outputs)
        return Expanded(block, phase, self.owner, tuple(self.late))

    def _sunk(self, outputs: Sequence[Atom]) -> dict[int, int]:
        """The phases, where what is computed again waits for the first that reads it."""
        last = 2 * self.slices - 1
        until: dict[int, int] = dict.fromkeys(values_in(outputs), last)
        phase: dict[int, int] = {}
        for own, op in reversed(self.ops):
            due = min((until[v] for v in op.results if v in until), default=own)
            phase[op.index] = max(own, due) if self.owner[op.index] in self.again else own
            for value in values_in(op.operands):
                until[value] = min(until.get(value, last), phase[op.index])
        return phase

    # -- operations -----------------------------------------------------------------------------------------------

    def _begin(self, op: Op, piece: int) -> None:
        """What is written from here on belongs to a piece of an operation."""
        if op.index in self.again:  # as soon as the backward pass begins: it waits for its readers in the end
            self._now = self.slices
        else:
            self._now = piece if op.index in self.forward else 2 * self.slices - 1 - piece

    def _operand(self, op: Op, number: int, extents: Mapping[int, Range]) -> Atom:
        """What one piece of an operation takes of an operand."""
        atom, rule = op.operands[number], self.rules[op.key]
        dims = rule.operands[number]
        if isinstance(atom, Lit):
            return atom
        state, rows = self.found.of.get(atom), None
        if state is not None and atom not in self.whole:
            factor = row_factor(rule, dims, state)
            rows = extents.get(factor) if factor is not None else None
            reach = None
            if state.column is not None and dims[state.column]:
                reach = extents.get(dims[state.column][0])
            got = self._fetch(atom, rows, None if reach is None else reach[1])
            others = [d for d in range(len(dims)) if d not in (state.dim, state.column)]
        else:
            got, others = self._fetch(atom), list(range(len(dims)))
        for dim in others:
            outer = 1
            for place, factor in enumerate(dims[dim]):
                if factor in extents:
                    inner = math.prod(rule.factors[f].size for f in dims[dim][place + 1 :])
                    got = self._cut(got, dim, extents[factor], outer, inner)
                outer *= rule.factors[factor].size
        return got

    def _emit(self, op: Op) -> None:
        way = self.found.ways[op.index]
        if way.kind in ("whole", "free"):
            self._emit_whole(op)
        elif way.kind == "pieces" and op.name in primitives.PAIRWISE:
            for atom, value in zip(op.operands, op.results, strict=True):
                if value in self.found.of and isinstance(atom, int) and atom not in self.whole:
                    self.pieces[value] = list(self.pieces[atom])
                else:
                    self.whole[value] = self._fetch(atom)
        elif way.kind == "pieces":
            for value in op.results:
                self.pieces[value] = [None] * self.slices
            for piece in range(self.slices):
                self._emit_piece(op, way, piece)
        elif way.kind in ("sum", "spread"):
            self._emit_sum(op, way)
        else:
            {"shift": self._emit_shift, "running": self._emit_running, "loop": self._emit_loop}[way.kind](op)
        self._note(op, way)

    def _note(self, op: Op, way: Way) -> None:
        """Remembers forward operations of which a piece waits for a later slice."""
        if op.index not in self.forward or way.kind in ("free", "sum"):
            return
        for value in op.results:
            held = self.pieces.get(value, [])
            if any(a is not None and self.phase.get(a, 0) > i for i, a in enumerate(held) if isinstance(a, int)):
                self.late.append(Late(op, "its operands are of later tokens"))
                return
        if way.kind == "whole" and way.reason:
            self.late.append(Late(op, way.reason))

    def _emit_whole(self, op: Op) -> None:
        operands = [a if isinstance(a, Lit) else self._fetch(a) for a in op.operands]
        if all(a == b for a, b in zip(operands, op.operands, strict=True)):
            self._add(op)
            self.whole.update((v, v) for v in op.results)
            return
        results = [self.rw.fresh(v) for v in op.results]
        self._add(replace(self.rw.moved(op, operands, results), key=op.key))
        self.whole.update(zip(op.results, results, strict=True))

    def _emit_piece(self, op: Op, way: Way, piece: int) -> None:
        extents = self.extents.of(op, way, piece)
        if extents is None:
            return
        self._begin(op, piece)
        operands = [self._operand(op, k, extents) for k in range(len(op.operands))]
        results = self._sized(op, extents, operands)
        for value, result in zip(op.results, results, strict=True):
            self.pieces[value][piece] = result

    def _sized(self, op: Op, extents: Mapping[int, Range], operands: Sequence[Atom]) -> list[int]:
        """The operation on smaller operands: its results."""
        rule = self.rules[op.key]
        results = []
        for value, dims in zip(op.results, rule.results, strict=True):
            shape = list(self.rw.values[value].shape)
            for dim, factors in enumerate(dims):
                for factor in factors:
                    if factor in extents:
                        a, b = extents[factor]
                        shape[dim] = shape[dim] // rule.factors[factor].size * (b - a)
            results.append(self.rw.shaped(value, tuple(shape)))
        params = self._params(op, operands, self._shape(results[0]))
        described = [a if isinstance(a, Lit) else self.rw.values[a] for a in operands]
        made = self.rw.moved(op, operands, results, params)
        key = self.rw.keys.key(self.rw.keys.head(op.primitive, params), described)
        self._add(replace(made, key=key))
        return results

    def _params(self, op: Op, operands: Sequence[Atom], made: tuple[int, ...]) -> Mapping[str, Any]:
        """The parameters of an operation on smaller operands."""
        params = op.params
        if op.name == "broadcast_in_dim":
            return {**params, "shape": made}
        if op.name == "reshape":
            return {**params, "new_sizes": made}
        before, after = self._shape(op.operands[0]), self._shape(operands[0])
        if op.name == "slice":
            cut = zip(params["limit_indices"], before, after, strict=True)
            return {**params, "limit_indices": tuple(limit if n == m else m for limit, n, m in cut)}
        if op.name in ("gather", "dynamic_slice"):
            cut = zip(params["slice_sizes"], before, after, strict=True)
            return {**params, "slice_sizes": tuple(size if n == m or size != n else m for size, n, m in cut)}
        return params

    def _emit_sum(self, op: Op, way: Way) -> None:
        """What each slice gives, added up in the order of the phases; of "spread", for each slice on its own."""
        (value,) = op.results
        state = self.found.of.get(value)
        total: Atom | None = None
        spread: list[Atom | None] = [None] * self.slices
        order = range(self.slices) if op.index in self.forward else reversed(range(self.slices))
        for piece in order:
            extents = self.extents.of(op, way, piece)
            if extents is None:
                continue
            self._begin(op, piece)
            operands = [self._operand(op, k, extents) for k in range(len(op.operands))]
            if op.name == "scatter-add" and total is not None:
                operands[0] = total
            (part,) = self._sized(op, extents, operands)
            if way.kind == "sum":
                both = total is not None and op.name != "scatter-add"
                total = self._combined(op, total, part) if both else part  # type: ignore[arg-type]
                continue
            assert state is not None and way.column is not None
            reach = extents[way.column][1] if way.column in extents else state.size
            for target, own in self.extents.over(state, (0, reach)):
                first, _ = self.extents.held(state, target)
                given = self._cut(part, state.dim, (own[0] + first, own[1] + first))
                given = self._padded(given, state, target, own)
                before = spread[target]
                spread[target] = given if before is None else self._combined(op, before, given)
        if way.kind == "sum":
            assert total is not None
            self.whole[value] = total
            return
        self.pieces[value] = [
            self._zeros(value, state, piece) if held is None else held  # type: ignore[arg-type]
            for piece, held in enumerate(spread)
        ]

    def _padded(self, atom: Atom, state: State, piece: int, own: Range) -> Atom:
        """What a slice gives to the first rows of a piece, with zeros for the rest."""
        first, stop = self.extents.held(state, piece)
        missing = stop - first - own[1]
        if not missing and not own[0]:
            return atom
        dim = state.dim

        def run(x: jax.Array) -> jax.Array:
            config = [(0, 0, 0)] * x.ndim
            config[dim] = (own[0], missing, 0)
            return lax.pad(x, jnp.zeros((), x.dtype), config)

        return self._made(run, [atom], ("pad", dim, own[0], missing))

    def _zeros(self, value: int, state: State, piece: int) -> Atom | None:
        first, stop = self.extents.held(state, piece)
        if first == stop:
            return None
        shape = list(self.rw.values[value].shape)
        shape[state.dim] = stop - first
        dtype = self.rw.values[value].dtype
        return self._made(lambda: jnp.zeros(shape, dtype), [], ("zeros", *shape, str(dtype)))

    def _combined(self, op: Op, left: Atom, right: Atom) -> Atom:
        join = {"reduce_max": lax.max, "reduce_min": lax.min}.get(op.name, lax.add)
        return self._made(join, [left, right], ("combine", join.__name__))

    # -- along the rows -------------------------------------------------------------------------------------------

    def _emit_shift(self, op: Op) -> None:
        start = 0
        for value in op.results:  # of "split" several
            state = self.found.of[value]
            sizes = [self._extent(a, state.dim) for a in op.operands]
            moved = shift_of(op, state.dim, sizes)
            assert moved is not None and op.name in SHIFTS
            self.pieces[value] = [None] * self.slices
            for piece in range(self.slices):
                rows = self.extents.held(state, piece)
                if rows[0] < rows[1]:
                    self._begin(op, piece)
                    by = [n - start for n in moved]
                    self.pieces[value][piece] = self._shifted(op, state, rows, by, sizes)
            start += state.size

    def _shifted(self, op: Op, state: State, rows: Range, moved: Sequence[int], sizes: Sequence[int]) -> Atom:
        """One piece. `moved`: by how much an index of the result is greater than each operand's."""
        parts: list[Atom] = []
        for atom, by, size in zip(op.operands, moved, sizes, strict=False):
            a, b = max(rows[0] - by, 0), min(rows[1] - by, size)
            if a < b:
                parts.append(self._rows(atom, state, (a, b)))
        if op.name == "pad":
            return self._pad(op, state, rows, moved[0], sizes[0], parts)
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

    def _pad(self, op: Op, state: State, rows: Range, low: int, size: int, parts: Sequence[Atom]) -> Atom:
        config = [tuple(c) for c in op.params["padding_config"]]
        before = max(0, min(low, rows[1]) - rows[0])
        after = max(0, rows[1] - max(low + size, rows[0]))
        config[state.dim] = (before, after, 0)
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


def _computed_again(block: Block, forward: frozenset[int]) -> frozenset[int]:
    """The backward operations that compute the forward pass again: they read no cotangent."""
    of_cotangents: set[int] = set()
    again = set()
    for op in block.ops:
        if op.index in forward:
            continue
        if op.name in primitives.PAIRWISE:  # what JAX puts between the passes holds cotangents and other values
            pairs = zip(op.operands, op.results, strict=True)
            of_cotangents.update(result for operand, result in pairs if operand in of_cotangents)
        elif _jax.is_computed_again(op.source) and of_cotangents.isdisjoint(op.operands):
            again.add(op.index)
        else:
            of_cotangents.update(op.results)
    return frozenset(again)
