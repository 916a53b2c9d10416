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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.graph import Atom, Block, Lit, Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tokens.along import Along
from alpa_lite.passes.tokens.beyond import Known
from alpa_lite.passes.tokens.extents import Extents, Range
from alpa_lite.passes.tokens.states import State, States, Way, row_factor
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
      owner: op index -> the operation of the block that it is a part of; -1 for joins of its inputs.
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


class _Expansion(Along):
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
        super().__init__(rewriter, found, extents, block, forward)
        self.block, self.rules = block, rules
        self.late: list[Late] = []
        self._makers = producers(block.ops)

    def run(self) -> Expanded:
        for op in self.block.ops:
            self._source, self._owner = op.source, op.index
            self._now = 0 if op.index in self.forward else self.slices
            self._emit(op)
        outputs = tuple(self._output(a) if isinstance(a, int) else a for a in self.block.outputs)
        phase = self._sunk(outputs)
        ordered = sorted((op for _, op in self.ops), key=lambda op: phase[op.index])
        block = Block(self.block.inputs, tuple(ordered), outputs)
        return Expanded(block, phase, self.owner, tuple(self.late))

    def _output(self, value: int) -> Atom:
        """Returns an output in one piece; its joins belong to the operation that makes it, and run where that does."""
        maker = self._makers.get(value)
        self._owner, self._now = -1 if maker is None else maker.index, 0
        return self._fetch(value)

    def _sunk(self, outputs: Sequence[Atom]) -> dict[int, int]:
        """Returns the phases, where recomputed operations wait for the first phase that reads them."""
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

    def _operand(self, op: Op, number: int, extents: Mapping[int, Range]) -> Atom:
        """Returns the part of an operand that one piece of an operation takes."""
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
            {
                "shift": self._emit_shift, "window": self._emit_window, "running": self._emit_running,
                "loop": self._emit_loop,
            }[way.kind](op)  # fmt: skip
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
        """Writes the sum over slices, in the order of the phases; of "spread", a sum for each slice on its own."""
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
        """Returns a slice's contribution to some rows of a piece, with zeros for the rest."""
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
