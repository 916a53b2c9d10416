"""Values that are stacked over the iterations of scans, in pieces: a walk over the operations of a block.

Where scans are cut between iterations (`scans`), everything stacked over them is held in pieces:

    scanned inputs     sliced on dim 0; a stacked parameter thus at the step's argument
    stacked results    stay in pieces: the backward scan that reads the residuals is cut at the same points, the
                       accumulators of its stacked gradients become one a piece, and so on through the update
    operations         whose dim 0 is a parallel factor of its own (elementwise, casts, reductions of other dims) are
                       done piece by piece; a reduction of dim 0 is the combination of the pieces' reductions
    everything else    reads the concatenation of the pieces
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from jax import lax

from alpa_lite.ir.graph import Atom, Block, Bounds, Op
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.blockwise.functions import COMBINED, params_for, rows_of
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.loops import ScanResults, ScanView
from alpa_lite.passes.ir.rewriting import Rewriter

StackPieces = tuple[Bounds, tuple[Any, ...]]
"""Where the pieces of a stacked value begin, with the end of the last, and the pieces."""


class StackWalk:
    """A walk over the ops of one block, in order; stacks over cut layers are held in pieces.

    Attributes:
      rules: by `Op.key`; an op without one is done whole.
      cuts: scans that are cut, by index, and where; those that read stacks of a cut scan are cut there too. None where
        no scan is.
      divisible: inputs of the block that can come in as pieces.
      asked_for: those that are read in pieces.
      pieces: values that are made in pieces, or read in pieces. joined: those of them that exist whole too.
      concatenated: those of these that are made of their pieces.
      ranges: index of a piece of an op -> (index of the op, first iteration, end).
    """

    def __init__(
        self,
        rewriter: Rewriter,
        rules: Mapping[object, Rule],
        block: Block,
        cuts: Mapping[int, Bounds] | None = None,
        divisible: Set[int] = frozenset(),
    ) -> None:
        self.rewriter, self.rules, self.block, self.cuts, self.divisible = rewriter, rules, block, cuts, divisible
        self.defined = producers(block.ops)
        self.out: list[Op] = []
        self.pieces: dict[int, StackPieces] = {}
        self.asked_for: dict[int, StackPieces] = {}
        self.concatenated: dict[int, StackPieces] = {}
        self.joined: set[int] = set()
        self.ranges: dict[int, tuple[int, int, int]] = {}

    # -- operations -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walks all ops of the block."""
        for op in self.block.ops:
            self.walk(op)

    def walk(self, op: Op) -> None:
        """Appends an op, in pieces if it reads pieces and can be split."""
        if op.name == "scan" and (bounds := self.bounds_of(op)):
            self.cut(op, bounds)
            return
        bounds = next((self.pieces[v][0] for v in op.reads if v in self.pieces and v not in self.joined), None)
        if bounds is not None and (self.split(op, bounds) or self.reduce_pieces(op, bounds)):
            return
        for value in op.reads:
            self.join_pieces(value, op.source)
        self.out.append(op)

    def bounds_of(self, op: Op) -> Bounds | None:
        """Returns where a scan is cut, if it is."""
        if self.cuts is None:
            return None
        linked = (self.pieces[v][0] for v in values_in(ScanView(op).operands.xs) if v in self.pieces)
        return self.cuts.get(op.index) or next(linked, None)

    def join_pieces(self, atom: Atom, source: Any) -> Atom:
        """Makes sure that a value exists whole."""
        if isinstance(atom, int) and atom in self.pieces and atom not in self.joined:
            self.joined.add(atom)
            _, parts = self.concatenated[atom] = self.pieces[atom]
            self.concatenate(parts, atom, source)
        return atom

    def parts(self, value: int, bounds: Bounds, source: Any) -> tuple[Any, ...]:
        """A value in pieces: as made, by the operation that makes it done in pieces, as they come in, or by slices."""
        if value in self.pieces and self.pieces[value][0] == bounds:
            return self.pieces[value][1]
        if value in self.pieces:
            self.join_pieces(value, source)
        op = self.defined.get(value)
        if op is not None and len(op.results) == 1 and not op.bodies and self.split(op, bounds):
            self.joined.add(value)  # it was made whole before
            return self.pieces[value][1]
        spans = itertools.pairwise(bounds)
        if value in self.divisible and value not in self.asked_for:
            parts = tuple(self.new_value(value, high - low) for low, high in spans)
            self.asked_for[value] = bounds, parts
        else:
            parts = tuple([self.take(value, low, high, source) for low, high in spans])
        self.pieces[value] = bounds, parts
        self.joined.add(value)
        return parts

    def new_value(self, value: int, size: int) -> int:
        """Returns a new value like another, but for the size of dim 0."""
        return self.rewriter.new_value_of_shape(value, (size, *self.rewriter.values[value].shape[1:]))

    def take(self, value: int, low: int, high: int, source: Any) -> Any:
        """Returns the piece of a whole stack that some iterations have."""
        self.out.append(rows_of(self.rewriter, value, low, high, source))
        return self.out[-1].results[0]

    def concatenate(self, parts: Sequence[Any], stack: int, source: Any) -> None:
        """Makes a stack of its pieces."""
        self.out.append(self.rewriter.op(lax.concatenate_p, {"dimension": 0}, parts, [stack], source))

    # -- splitting ------------------------------------------------------------------------------------------------

    def split(self, op: Op, bounds: Bounds) -> bool:
        """Does an op in pieces where its dim 0 is parallel; whether it could."""
        if not self.is_parallel(op, bounds[-1]):
            return False
        operands: list[Sequence[Atom]] = []
        for atom, dims in zip(op.operands, self.rules[op.key].operands, strict=True):
            if isinstance(atom, int) and dims and dims[0] == self.rules[op.key].results[0][0]:
                operands.append(self.parts(atom, bounds, op.source))
            else:
                operands.append([self.join_pieces(atom, op.source)] * (len(bounds) - 1))
        results: list[list[int]] = []
        for span, some in zip(itertools.pairwise(bounds), zip(*operands, strict=True), strict=True):
            results.append([self.new_value(value, span[1] - span[0]) for value in op.results])
            self._write_piece(op, span, some, results[-1])
        self.pieces.update((v, (bounds, c)) for v, c in zip(op.results, zip(*results, strict=True), strict=True))
        return True

    def is_parallel(self, op: Op, length: int) -> bool:
        """Whether dim 0 of every result is one parallel factor, which is dim 0 of operands or in none of them."""
        rule = self.rules.get(op.key)
        if rule is None or op.bodies or op.has_effects or op.name in primitives.SIZED or rule.source == "opaque":
            return False
        heads = {dims[0] if dims else () for dims in rule.results}
        if len(heads) != 1 or len(head := heads.pop()) != 1:
            return False
        if rule.factors[head[0]].kind != "parallel" or rule.factors[head[0]].size != length:
            return False
        inner = [d for dims in (*rule.operands, *rule.results) for d in dims[1:]]
        return not any(head[0] in d for d in inner) and not any(
            dims and head[0] in dims[0] and dims[0] != head for dims in rule.operands
        )

    def reduce_pieces(self, op: Op, bounds: Bounds) -> bool:
        """Does a reduction of dim 0 in pieces, and combines them; whether it could."""
        if op.name not in COMBINED or op.key not in self.rules or 0 not in op.params["axes"]:
            return False
        (value,), (result,) = op.reads, op.results
        total: int | None = None
        for part, span in zip(self.parts(value, bounds, op.source), itertools.pairwise(bounds), strict=True):
            is_last = span[1] == bounds[-1]
            made = result if is_last and total is None else self.rewriter.new_value(result)
            self._write_piece(op, span, [part], [made])
            if total is not None:
                summed = result if is_last else self.rewriter.new_value(result)
                self.out.append(self.rewriter.op(COMBINED[op.name], {}, [total, made], [summed], op.source))
                made = summed
            total = made
        return True

    def _write_piece(self, op: Op, span: tuple[int, int], operands: Sequence[Atom], results: Sequence[int]) -> None:
        """Writes an op on pieces of its operands."""
        params = params_for(op, operands, results, self.rewriter.values)
        self.out.append(self.rewriter.op(op.primitive, params, operands, results, op.source, op.index, op.ctx))
        self.ranges[self.out[-1].index] = op.index, *span

    # -- scans ----------------------------------------------------------------------------------------------------

    def cut(self, op: Op, bounds: Bounds) -> Sequence[Atom]:
        """Writes one scan as several, whose carry goes from one to the next; returns that of the last."""
        view, spans = ScanView(op), list(itertools.pairwise(bounds))
        consts, carry, xs = view.operands
        scanned = [
            self.parts(atom, bounds, op.source) if isinstance(atom, int) else (atom,) * len(spans) for atom in xs
        ]
        for atom in (*consts, *carry):
            self.join_pieces(atom, op.source)
        stacked: dict[int, Sequence[Any]] = {}
        order = sorted(range(len(spans)), reverse=op.params["reverse"])
        for number in order:
            operands = [*consts, *carry, *(parts[number] for parts in scanned)]
            carry, stacked[number] = self.iterate(op, *spans[number], operands)
        columns = zip(*(stacked[number] for number in range(len(spans))), strict=True)
        self.pieces.update((v, (bounds, column)) for v, column in zip(view.results.ys, columns, strict=True))
        return carry

    def iterate(self, op: Op, low: int, high: int, operands: Sequence[Atom]) -> ScanResults[Any]:
        """Writes some iterations of a scan; returns the carry behind them, and their pieces of the stacked results."""
        view, ends = ScanView(op), [low == 0, high == ScanView(op).length]
        is_first, is_last = reversed(ends) if op.params["reverse"] else ends
        carry = view.results.carry if is_last else tuple(map(self.rewriter.new_value, view.results.carry))
        stacked = tuple(self.new_value(v, high - low) for v in view.results.ys)
        piece = replace(
            op,
            index=self.rewriter.index(op.index),
            params=dict(op.params, length=high - low, unroll=min(op.params["unroll"], high - low)),
            operands=tuple(operands),
            results=(*carry, *stacked),
            bodies=op.bodies if is_first else (self.rewriter.copy_block(view.body),),
            key=None,
        )
        self.ranges[piece.index] = op.index, low, high
        self.out.append(piece)
        return ScanResults(carry, stacked)
