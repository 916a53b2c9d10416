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
from alpa_lite.passes.blockwise.parts import COMBINED, params_for, rows_of
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter

InPieces = tuple[Bounds, tuple[int, ...]]
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
      spans, ranges: as `Cut.pieces` and `Cut.ranges`.
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
        self.pieces: dict[int, InPieces] = {}
        self.asked_for: dict[int, InPieces] = {}
        self.concatenated: dict[int, InPieces] = {}
        self.joined: set[int] = set()
        self.spans: dict[int, tuple[int, int, int]] = {}
        self.ranges: dict[int, tuple[int, int, int]] = {}

    # -- operations -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walks all ops of the block."""
        for op in self.block.ops:
            self.walk(op)

    def walk(self, op: Op) -> None:
        """Appends an op, in pieces if it reads pieces and can be split."""
        if op.name == "scan" and (bounds := self.bounds_of(op)):
            return self.cut(op, bounds)
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
            self.out.append(self.rewriter.op(lax.concatenate_p, {"dimension": 0}, parts, [atom], source))
        return atom

    def parts(self, value: int, bounds: Bounds, source: Any) -> tuple[int, ...]:
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
            self.out += (rows := [rows_of(self.rewriter, value, low, high, source) for low, high in spans])
            parts = tuple(op.results[0] for op in rows)
        self.pieces[value] = bounds, parts
        self.joined.add(value)
        return parts

    def new_value(self, value: int, size: int) -> int:
        """Returns a new value like another, but for the size of dim 0."""
        return self.rewriter.new_value_of_shape(value, (size, *self.rewriter.values[value].shape[1:]))

    # -- splitting ------------------------------------------------------------------------------------------------

    def split(self, op: Op, bounds: Bounds) -> bool:
        """Does an op in pieces where its dim 0 is parallel; whether it could."""
        if not self.is_parallel(op, bounds[-1]):
            return False
        operands: list[list[Atom]] = []
        for atom, dims in zip(op.operands, self.rules[op.key].operands, strict=True):
            if isinstance(atom, int) and dims and dims[0] == self.rules[op.key].results[0][0]:
                operands.append(list(self.parts(atom, bounds, op.source)))
            else:
                operands.append([self.join_pieces(atom, op.source)] * (len(bounds) - 1))
        results: list[list[int]] = [[] for _ in op.results]
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            made = [self.new_value(value, high - low) for value in op.results]
            some = [column[number] for column in operands]
            params = params_for(op, some, made, self.rewriter.values)
            self.out.append(self.rewriter.op(op.primitive, params, some, made, op.source, op.index, op.ctx))
            self.ranges[self.out[-1].index] = op.index, low, high
            for column, value in zip(results, made, strict=True):
                column.append(value)
        self.pieces.update((v, (bounds, tuple(c))) for v, c in zip(op.results, results, strict=True))
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
        (value,) = op.reads
        total: int | None = None
        parts = self.parts(value, bounds, op.source)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            made = op.results[0] if is_last and total is None else self.rewriter.new_value(op.results[0])
            self.out.append(self.rewriter.op(op.primitive, op.params, [part], [made], op.source, op.index))
            self.ranges[self.out[-1].index] = op.index, bounds[number], bounds[number + 1]
            if total is None:
                total = made
                continue
            summed = op.results[0] if is_last else self.rewriter.new_value(op.results[0])
            self.out.append(self.rewriter.op(COMBINED[op.name], {}, [total, made], [summed], op.source))
            total = summed
        return True

    def cut(self, op: Op, bounds: Bounds) -> None:
        """One scan as several: the carry goes from one to the next."""
        consts, carry, xs = ScanView(op).operands
        finals, ys = ScanView(op).results
        scanned: list[Sequence[Atom]] = []
        for atom in xs:
            is_value = isinstance(atom, int)
            scanned.append(self.parts(atom, bounds, op.source) if is_value else (atom,) * (len(bounds) - 1))
        for atom in (*consts, *carry):
            self.join_pieces(atom, op.source)
        spans = list(enumerate(itertools.pairwise(bounds)))
        stacked: list[tuple[int, ...]] = []
        for place, (number, (low, high)) in enumerate(reversed(spans) if op.params["reverse"] else spans):
            carried = finals if place == len(spans) - 1 else tuple(map(self.rewriter.new_value, finals))
            stacked.append(tuple(self.new_value(v, high - low) for v in ys))
            piece = replace(
                op,
                index=self.rewriter.index(op.index),
                params=dict(op.params, length=high - low, unroll=min(op.params["unroll"], high - low)),
                operands=(*consts, *carry, *(parts[number] for parts in scanned)),
                results=(*carried, *stacked[-1]),
                bodies=op.bodies if place == 0 else (self.rewriter.copy_block(op.bodies[0]),),
                key=None,
            )
            self.spans[piece.index] = op.index, low, high
            self.out.append(piece)
            carry = carried
        if op.params["reverse"]:
            stacked.reverse()
        self.pieces.update((v, (bounds, column)) for v, column in zip(ys, zip(*stacked, strict=True), strict=True))
