"""Cutting a scan over layers between iterations, forward and backward, without unrolling it.

A model whose layers are a `lax.scan` over stacked parameters is one operation forward and one backward, so no stage
boundary could fall inside. With cut points p_1 < .. < p_k in its length n, the scan over [0, n) becomes consecutive
scans over [0, p_1), [p_1, p_2), .., [p_k, n) of the same body (for a reversed scan, the last first), whose carry goes
from one to the next. Then everything stacked over layers is held in pieces:

    scanned inputs     sliced on dim 0; a stacked parameter thus at the step's argument
    stacked results    stay in pieces: the backward scan that reads the residuals is cut at the same points, the
                       accumulators of its stacked gradients become one a piece, and so on through the update
    operations         whose dim 0 is a parallel factor of its own (elementwise, casts, reductions of other dims) are
                       done piece by piece; a reduction of dim 0 is the combination of the pieces' reductions
    everything else    reads the concatenation of the pieces

so that only slices at the arguments, and concatenations at the new state, mention a whole stacked leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Atom, Block, Bounds, Op, Stacked, Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.loops import Carried, ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, Rewritten
from alpa_lite.passes.layers import stacked_arguments
from alpa_lite.passes.layers.stacked_arguments import InPieces

_COMBINED: Mapping[str, Any] = {
    "reduce_sum": lax.add_p,
    "reduce_max": lax.max_p,
    "reduce_min": lax.min_p,
    "reduce_and": lax.and_p,
    "reduce_or": lax.or_p,
}


@dataclass(frozen=True, eq=False)
class Cut(Rewritten):
    """A step whose scans over layers are cut.

    Attributes:
      pieces: index of a piece of a scan -> (index of its scan before, first iteration, end).
      ranges: the same for operations on what is stacked, which are done in pieces too.
    """

    pieces: Mapping[int, tuple[int, int, int]]
    ranges: Mapping[int, tuple[int, int, int]]

    def part(self, index: int) -> tuple[int, int]:
        """(index before the cutting, first iteration) of an op; -1 for the index of a new op."""
        if index in self.pieces or index in self.ranges:
            before, start, _ = self.pieces.get(index) or self.ranges[index]
            return before, start
        return self.origin.get(index, -1), 0


def cut_scans(
    traced: Traced,
    scan: int,
    points: Mapping[int, Sequence[int]],
    rules: Mapping[object, Rule],
    *,
    split_arguments: bool = False,
) -> Cut:
    """Cuts forward scans of the micro-batch, and whatever is stacked over the same layers.

    Args:
      traced: the step.
      scan: the index of the scan over micro-batches.
      points: index of a scan in its body -> the iterations before which it is cut, rising, within 1 .. length - 1.
      rules: of all ops, as `factors.rules_of` gives them.
      split_arguments: make each piece of a stacked argument, and of the result that replaces it, an argument and a
        result of its own (`layers.stacked_arguments`).

    Raises:
      OptionError: a key of `points` is no scan of the body, or its points do not rise strictly within its length.
    """
    outer = scan_op(traced, scan)
    inside = {op.index: op for op in outer.bodies[0].ops if op.name == "scan"}
    bounds: dict[int, Bounds] = {}
    for index, some in points.items():
        if index not in inside:
            raise OptionError(
                f"points name op {index}, which is no scan of the micro-batch; there are {sorted(inside)}"
            )
        bounds[index] = (0, *some, inside[index].params["length"])
        if any(low >= high for low, high in itertools.pairwise(bounds[index])):
            raise OptionError(
                f"points of op {index} are {tuple(some)}: they must rise strictly, from 1 to {bounds[index][-1] - 1}"
            )
    rewriter, view = Rewriter(traced.graph), ScanView(outer)
    sums = {value for number, value in enumerate(view.inputs.carry) if number in view.accumulators}
    arguments = traced.graph.block.inputs[: len(traced.arguments)] if split_arguments else ()
    top = _Walk(rewriter, rules, traced.graph.block, divisible=set(arguments))
    body = _Walk(rewriter, rules, view.body, bounds, sums.union(view.inputs.consts))
    for op in traced.graph.block.ops:
        if op is outer:
            body.run()
            _micro_batches(top, body, view)
        else:
            top.walk(op)
    outputs = [top.whole(atom, outer.source) for atom in traced.graph.block.outputs]
    block = Block(traced.graph.block.inputs, tuple(top.out), tuple(outputs))
    leaves = None
    if split_arguments:
        block, leaves = _with_pieces(traced, top, block)
    done = rewriter.step(traced, block, scan)
    place = rewriter.place
    pieces, ranges = (
        {place[i]: span for i, span in spans.items() if i in place} for spans in (body.spans, top.ranges | body.ranges)
    )
    step = done.traced if leaves is None else stacked_arguments.applied(leaves, done.traced)
    return Cut(step, done.scan, done.origin, done.copies, pieces, ranges)


def cut_by_arguments(traced: Traced, bounds: Mapping[int, Bounds], rules: Mapping[object, Rule]) -> Traced:
    """A step without micro-batches whose stacked arguments come in pieces, as do the results that replace them.

    Scans over these arguments, and over what is stacked with them, are cut at the same bounds.

    Args:
      traced: the step.
      bounds: flat argument -> where its pieces begin, and the end of the last.
      rules: of all ops, as `factors.rules_of` gives them.
    """
    rewriter, block = Rewriter(traced.graph), traced.graph.block
    walk = _Walk(rewriter, rules, block, {})
    source = next((op.source for op in block.ops), None)
    whole = {block.inputs[number]: rewriter.fresh(block.inputs[number]) for number in sorted(bounds)}
    for number, some in sorted(bounds.items()):
        value = block.inputs[number]
        parts = tuple(walk.fresh(value, high - low) for low, high in itertools.pairwise(some))
        walk.pieces[value] = walk.asked_for[whole[value]] = some, parts
    walk.run()
    outputs = tuple(walk.whole(atom, source) for atom in block.outputs)
    inputs = tuple(whole.get(value, value) for value in block.inputs)
    block, leaves = _with_pieces(traced, walk, Block(inputs, tuple(walk.out), outputs))
    return stacked_arguments.applied(leaves, replace(traced, graph=rewriter.finish(block)))


def _with_pieces(traced: Traced, walk: _Walk, block: Block) -> tuple[Block, Stacked]:
    """The new top block with arguments and results in pieces; those that stay whole are sliced first."""
    block, leaves, whole = stacked_arguments.split(traced, block, walk.asked_for, walk.concatenated)
    walk.out = []
    for value in whole:
        bounds, parts = walk.asked_for[value]
        for part, (low, high) in zip(parts, itertools.pairwise(bounds), strict=True):
            walk.slice(value, low, high, block.ops[0].source, part)
    return replace(block, ops=(*walk.out, *block.ops)), leaves


class _Walk:
    """A walk over the ops of one block, in order; stacks over cut layers are held in pieces.

    Attributes:
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
        if self.cuts is not None and op.name == "scan":
            linked = (self.pieces[v][0] for v in values_in(ScanView(op).operands.xs) if v in self.pieces)
            if bounds := self.cuts.get(op.index) or next(linked, None):
                return self.cut(op, bounds)
        bounds = next((self.pieces[v][0] for v in op.reads if v in self.pieces and v not in self.joined), None)
        if bounds is not None and (self.split(op, bounds) or self.combined(op, bounds)):
            return
        for value in op.reads:
            self.whole(value, op.source)
        self.out.append(op)

    def whole(self, atom: Atom, source: Any) -> Atom:
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
            self.whole(value, source)
        op = self.defined.get(value)
        if op is not None and len(op.results) == 1 and not op.bodies and self.split(op, bounds):
            self.joined.add(value)  # it was made whole before
            return self.pieces[value][1]
        spans = itertools.pairwise(bounds)
        if value in self.divisible and value not in self.asked_for:
            parts = tuple(self.fresh(value, high - low) for low, high in spans)
            self.asked_for[value] = bounds, parts
        else:
            parts = tuple(self.slice(value, low, high, source) for low, high in spans)
        self.pieces[value] = bounds, parts
        self.joined.add(value)
        return parts

    def slice(self, value: int, low: int, high: int, source: Any, part: int | None = None) -> int:
        """Iterations `low` to `high` of a stacked value, as a new value or a given one."""
        before = self.rewriter.values[value]
        rest = len(before.shape) - 1
        out = self.fresh(value, high - low) if part is None else part
        params = {
            "start_indices": (low, *(0,) * rest),
            "limit_indices": (high, *before.shape[1:]),
            "strides": None,
        }
        self.out.append(self.rewriter.op(lax.slice_p, params, [value], [out], source))
        return out

    def fresh(self, value: int, size: int) -> int:
        """A new value like another, but for the size of dim 0."""
        return self.rewriter.shaped(value, (size, *self.rewriter.values[value].shape[1:]))

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
                operands.append([self.whole(atom, op.source)] * (len(bounds) - 1))
        results: list[list[int]] = [[] for _ in op.results]
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            made = [self.fresh(value, high - low) for value in op.results]
            params = _sized(op, high - low)
            some = [column[number] for column in operands]
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

    def combined(self, op: Op, bounds: Bounds) -> bool:
        """Does a reduction of dim 0 in pieces, and combines them; whether it could."""
        if op.name not in _COMBINED or 0 not in op.params["axes"]:
            return False
        (value,) = op.reads
        total: int | None = None
        parts = self.parts(value, bounds, op.source)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            made = op.results[0] if is_last and total is None else self.rewriter.fresh(op.results[0])
            self.out.append(self.rewriter.op(op.primitive, op.params, [part], [made], op.source, op.index))
            self.ranges[self.out[-1].index] = op.index, bounds[number], bounds[number + 1]
            if total is None:
                total = made
                continue
            summed = op.results[0] if is_last else self.rewriter.fresh(op.results[0])
            self.out.append(self.rewriter.op(_COMBINED[op.name], {}, [total, made], [summed], op.source))
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
            self.whole(atom, op.source)
        spans = list(enumerate(itertools.pairwise(bounds)))
        stacked: list[tuple[int, ...]] = []
        for place, (number, (low, high)) in enumerate(reversed(spans) if op.params["reverse"] else spans):
            carried = finals if place == len(spans) - 1 else tuple(map(self.rewriter.fresh, finals))
            stacked.append(tuple(self.fresh(v, high - low) for v in ys))
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


def _micro_batches(top: _Walk, body: _Walk, view: ScanView) -> None:
    """Appends the scan over micro-batches, with constants and sums in pieces where its body asks for them."""
    source = view.op.source

    def in_pieces(atom: Atom, bounds: Bounds) -> tuple[int, ...]:
        assert isinstance(atom, int), "a stacked value is no literal"
        return top.parts(atom, bounds, source)

    consts: list[tuple[Atom, int]] = []
    for atom, value in view.consts:
        if value in body.asked_for:
            bounds, parts = body.asked_for[value]
            consts += zip(in_pieces(atom, bounds), parts, strict=True)
        consts.append((top.whole(atom, source), value))  # pruned where nothing reads it whole
    carries: list[Carried] = []
    for one in view.carries:
        if one.input not in body.asked_for or not isinstance(one.output, int):
            start, output = top.whole(one.start, source), body.whole(one.output, source)
            carries.append(Carried(start, one.input, output, one.end))
            continue
        bounds, parts = body.asked_for[one.input]
        made = body.parts(one.output, bounds, source)
        ends = tuple(map(top.rewriter.fresh, made))
        top.pieces[one.end] = bounds, ends
        carries += map(Carried, in_pieces(one.start, bounds), parts, made, ends)
    xs = [(top.whole(atom, source), value) for atom, value in view.xs]
    ys = [(body.whole(atom, source), result) for atom, result in view.ys]
    top.out.append(view.rebuilt(body.out, consts, carries, xs, ys))


def _sized(op: Op, size: int) -> Mapping[str, Any]:
    """The parameters of an op on a piece of dim 0."""
    if op.name == "broadcast_in_dim":
        return dict(op.params, shape=(size, *op.params["shape"][1:]))
    if op.name == "reshape":
        return dict(op.params, new_sizes=(size, *op.params["new_sizes"][1:]))
    return op.params
