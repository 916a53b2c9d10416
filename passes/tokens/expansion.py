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
from dataclasses import dataclass
from typing import Any

from alpa_lite.ir.graph import Atom, Block, Op
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tokens.along import Along
from alpa_lite.passes.tokens.pieces import Range, Ranges, padded
from alpa_lite.passes.tokens.states import Body, State, States, Way, row_factor


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


def expand(rewriter: Rewriter, body: Body, found: States, lengths: Sequence[int]) -> Expanded:
    """The block in slices.

    Args:
      rewriter: of the graph that the block is in.
      found: the states of the body.
      lengths: of the slices, in tokens; the last takes what is left.
    """
    return _Expansion(rewriter, body, found, lengths).run()


class _Expansion(Along):
    """The expansion of one block."""

    def run(self) -> Expanded:
        late, block = [], self.body.block
        for op in block.ops:
            self._source, self._owner = op.source, op.index
            self._now = 0 if op.index in self.forward else self.slices
            way = self.found.ways[op.index]
            self._emit(op, way)
            reason = self._late_reason(op, way)
            if reason:
                late.append(Late(op, reason))
        makers = producers(block.ops)
        outputs: list[Atom] = []
        for atom in block.outputs:  # joins belong to the operation that makes an output, and run where that does
            maker = makers.get(atom) if isinstance(atom, int) else None
            self._owner, self._now = -1 if maker is None else maker.index, 0
            outputs.append(self._fetch(atom))
        phase = self._sink(outputs)
        ordered = sorted((op for _, op in self.ops), key=lambda op: phase[op.index])
        return Expanded(Block(block.inputs, tuple(ordered), tuple(outputs)), phase, self.owner, tuple(late))

    def _late_reason(self, op: Op, way: Way) -> str:
        """Why a piece of a forward operation waits for a later slice, if one does."""
        if op.index not in self.forward or way.kind in ("free", "sum"):
            return ""
        for value in op.results:
            held = enumerate(self.pieces.get(value, ()))
            if any(isinstance(a, int) and self.phase.get(a, 0) > piece for piece, a in held):
                return "its operands are of later tokens"
        return way.reason

    def _sink(self, outputs: Sequence[Atom]) -> dict[int, int]:
        """Returns the phases, where recomputed operations wait for the first phase that reads them."""
        last = 2 * self.slices - 1
        until: dict[int, int] = dict.fromkeys(values_in(outputs), last)
        phase: dict[int, int] = {}
        for own, op in reversed(self.ops):
            due = min((until[v] for v in op.results if v in until), default=own)
            phase[op.index] = max(own, due) if self.owner[op.index] in self.body.computed_again else own
            for value in values_in(op.operands):
                until[value] = min(until.get(value, last), phase[op.index])
        return phase

    def _emit(self, op: Op, way: Way) -> None:
        match way.kind:
            case "whole" | "free":
                self._emit_whole(op)
            case "pieces":
                for piece in range(self.slices):
                    extents = self.extents.of(op, way, piece)
                    if extents is not None:
                        for value, part in zip(op.results, self._emit_piece(op, piece, extents), strict=True):
                            self.pieces[value][piece] = part
            case "sum" | "spread":
                self._emit_sum(op, way)
            case "shift":
                self._emit_shift(op)
            case "window":
                self._emit_window(op)
            case "running":
                self._emit_running(op)
            case "loop":
                self._emit_loop(op)

    def _emit_whole(self, op: Op) -> None:
        operands = [self._fetch(a) for a in op.operands]
        if all(a == b for a, b in zip(operands, op.operands, strict=True)):
            self._add(op)
            self.whole.update((v, v) for v in op.results)
        else:
            results = self._again(op, operands, list(map(self.rw.fresh, op.results)))
            self.whole.update(zip(op.results, results, strict=True))

    # -- by factors -----------------------------------------------------------------------------------------------

    def _emit_piece(self, op: Op, piece: int, extents: Ranges, first: Atom | None = None) -> list[int]:
        """Writes an operation on the ranges of its factors that a piece takes; `first` replaces its first operand."""
        self._begin(op, piece)
        rule = self.rules[op.key]
        pairs = zip(op.operands, rule.operands, strict=True)
        operands = [self._operand(atom, rule, dims, extents) for atom, dims in pairs]
        if first is not None:
            operands[0] = first
        results = []
        for value, dims in zip(op.results, rule.results, strict=True):
            shape = list(self._shape(value))
            for dim, factors in enumerate(dims):
                for factor in factors:
                    a, b = extents.get(factor, (0, rule.factors[factor].size))
                    shape[dim] = shape[dim] // rule.factors[factor].size * (b - a)
            results.append(self.rw.shaped(value, tuple(shape)))
        return self._again(op, operands, results, self._params(op, operands, self._shape(results[0])))

    def _operand(self, atom: Atom, rule: Rule, dims: Sequence[Sequence[int]], extents: Ranges) -> Atom:
        """Returns the part of an operand that one piece of an operation takes."""
        state, others = self.found.of.get(atom), set(range(len(dims)))
        if state is None or atom in self.whole:
            got = self._fetch(atom)
        else:
            factor = row_factor(rule, dims, state)
            column = None if state.column is None else next(iter(dims[state.column]), None)
            reach = extents.get(column)
            got = self._fetch(atom, extents.get(factor), None if reach is None else reach[1])
            others -= {state.dim, state.column}
        for dim in sorted(others):
            outer = 1
            for place, factor in enumerate(dims[dim]):
                if factor in extents:
                    inner = math.prod(rule.factors[f].size for f in dims[dim][place + 1 :])
                    got = self._cut(got, dim, extents[factor], outer, inner)
                outer *= rule.factors[factor].size
        return got

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
            return {**params, "slice_sizes": tuple(m if size == n else size for size, n, m in cut)}
        return params

    def _emit_sum(self, op: Op, way: Way) -> None:
        """Writes the sum over slices, in the order of the phases; of "spread", a sum for each slice on its own."""
        (value,) = op.results
        state, total = self.found.of.get(value), None
        for piece in sorted(range(self.slices), reverse=op.index not in self.forward):
            extents = self.extents.of(op, way, piece)
            if extents is None:
                continue
            is_scatter = op.name == "scatter-add"
            (part,) = self._emit_piece(op, piece, extents, total if is_scatter else None)
            if way.kind == "sum":
                total = part if is_scatter else self._combined(op, total, part)
                continue
            assert state is not None
            reach = extents[way.column][1] if way.column in extents else state.size
            for target, own in self.extents.over(state, (0, reach)):
                first, _ = self.extents.held(state, target)
                given = self._cut(part, state.dim, (own[0] + first, own[1] + first))
                given = self._padded(given, state, target, own)
                self.pieces[value][target] = self._combined(op, self.pieces[value][target], given)
        if way.kind == "sum":
            assert total is not None
            self.whole[value] = total
            return
        assert state is not None
        for piece, held in enumerate(self.pieces[value]):
            self.pieces[value][piece] = self._zeros(value, state, piece) if held is None else held

    def _padded(self, atom: Atom, state: State, piece: int, own: Range) -> Atom:
        """Returns a slice's contribution to some rows of a piece, with zeros for the rest."""
        first, stop = self.extents.held(state, piece)
        missing = stop - first - own[1]
        return self._made(padded, [atom], state.dim, own[0], missing, 0) if missing or own[0] else atom
