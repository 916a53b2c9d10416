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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from alpa_lite.errors import OptionError
from alpa_lite.graph import Atom, Block, Op, Traced
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import producers, values_in
from alpa_lite.passes.ir.loops import Carried, ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, Rewritten
from alpa_lite.passes.layers import stacked_arguments
from alpa_lite.passes.layers.forward import forward_ops
from alpa_lite.passes.layers.types import Layering
from alpa_lite.strategy import Rule

Bounds = tuple[int, ...]
"""0, the cut points, and the length."""

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


def layer_scans(traced: Traced, scan: int) -> tuple[Op, ...]:
    """The forward scans of a micro-batch that could be cut: in more than one step, over something made of parameters.

    A stacked parameter may be cast, or otherwise changed, before it is scanned.
    """
    op = scan_op(traced, scan)
    view = ScanView(op)
    forward = forward_ops(op, traced.graph.values)
    constant = set(view.inputs.consts)
    found = []
    for inner in view.body.ops:
        if inner.name == "scan" and inner.index in forward and inner.params["length"] > 1:
            if not constant.isdisjoint(ScanView(inner).operands.xs):
                found.append(inner)
        elif inner.reads and constant.issuperset(inner.reads):
            constant.update(inner.results)
    return tuple(found)


def even_points(length: int, most: int) -> tuple[int, ...]:
    """Cut points of equal pieces: as many pieces as divide the length, at most `most`."""
    count = max(n for n in range(1, max(1, most) + 1) if length % n == 0)
    return tuple(range(length // count, length, length // count))


def kept_points(cut: Cut, layering: Layering, cuts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each scan that was cut, the points that are stage boundaries: cutting there alone makes one scan a stage.

    Args:
      cut: a fine cutting.
      layering: the layers of `cut.traced`.
      cuts: the first layer of each stage after the first.
    """
    stage = {
        index: sum(number >= first for first in cuts)
        for number, layer in enumerate(layering.layers)
        for index in layer.ops
    }
    found: dict[int, dict[int, int]] = {}
    for index, (scan, start, _) in cut.pieces.items():
        if index in stage:
            found.setdefault(scan, {})[start] = stage[index]
    out = {}
    for scan, stages in found.items():
        starts = sorted(stages)
        out[scan] = tuple(b for a, b in itertools.pairwise(starts) if stages[a] != stages[b])
    return {scan: points for scan, points in out.items() if points}


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
    rewriter = Rewriter(traced.graph)
    top = _Top(rewriter, rules, traced.graph.block, outer, bounds)
    block = top.block()
    leaves = None
    if split_arguments:
        block, leaves = stacked_arguments.split(traced, block, rewriter.values)
    done = rewriter.step(traced, block, scan)
    place = rewriter.place
    pieces, ranges = ({place[i]: span for i, span in d.items() if i in place} for d in (top.spans, top.ranges))
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
    rewriter = Rewriter(traced.graph)
    walk = _Step(rewriter, rules, traced.graph.block, bounds)
    block, leaves = stacked_arguments.split(traced, walk.block(), rewriter.values)
    return stacked_arguments.applied(leaves, replace(traced, graph=rewriter.finish(block)))


class _Walk:
    """A walk over the ops of one block, in order; stacks over cut layers are held in pieces."""

    def __init__(self, rewriter: Rewriter, rules: Mapping[object, Rule], block: Block) -> None:
        self.rewriter, self.rules, self.source_block = rewriter, rules, block
        self.defined = producers(block.ops)
        self.out: list[Op] = []
        self.pieces: dict[int, tuple[Bounds, tuple[int, ...]]] = {}  # made in pieces, or asked for in pieces
        self.joined: set[int] = set()  # values in pieces that exist whole too
        self.spans: dict[int, tuple[int, int, int]] = {}
        self.ranges: dict[int, tuple[int, int, int]] = {}

    # -- operations -----------------------------------------------------------------------------------------------

    def walk(self, op: Op) -> None:
        """Appends an op, in pieces if it reads pieces and can be split."""
        bounds = next((self.pieces[v][0] for v in op.reads if v in self.pieces and v not in self.joined), None)
        if bounds is not None and self.split(op, bounds):
            return
        if bounds is not None and self.combined(op, bounds):
            return
        for value in op.reads:
            self.whole(value, op.source)
        self.out.append(op)

    def whole(self, value: int, source: Any) -> int:
        """Makes sure that a value exists whole."""
        if value in self.pieces and value not in self.joined:
            self.joined.add(value)
            parts = self.pieces[value][1]
            self.out.append(self.rewriter.op(lax.concatenate_p, {"dimension": 0}, parts, [value], source))
        return value

    def parts(self, value: int, bounds: Bounds, source: Any) -> tuple[int, ...]:
        """A value in pieces: as it was made, by the operation that makes it done in pieces, or by slices."""
        if value in self.pieces and self.pieces[value][0] == bounds:
            return self.pieces[value][1]
        if value in self.pieces:
            self.whole(value, source)
        op = self.defined.get(value)
        if op is not None and len(op.results) == 1 and not op.bodies and self.split(op, bounds):
            self.joined.add(value)  # it was made whole before
            return self.pieces[value][1]
        parts = self.asked(value, bounds)
        if parts is None:
            parts = tuple(self.slice(value, low, high, source) for low, high in itertools.pairwise(bounds))
        self.pieces[value] = bounds, parts
        self.joined.add(value)
        return parts

    def asked(self, value: int, bounds: Bounds) -> tuple[int, ...] | None:
        """The pieces of a block input that can come in as pieces."""
        del value, bounds
        return None

    def slice(self, value: int, low: int, high: int, source: Any) -> int:
        """Iterations `low` to `high` of a stacked value."""
        before = self.rewriter.values[value]
        rest = len(before.shape) - 1
        out = self.fresh(value, high - low)
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
            is_split = isinstance(atom, int) and bool(dims) and dims[0] == self.rules[op.key].results[0][0]
            if is_split and isinstance(atom, int):
                operands.append(list(self.parts(atom, bounds, op.source)))
            else:
                if isinstance(atom, int):
                    self.whole(atom, op.source)
                operands.append([atom] * (len(bounds) - 1))
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


class _Body(_Walk):
    """The body of a micro-batch: its inputs may come in as pieces, and its sums go out as pieces."""

    def __init__(
        self, rewriter: Rewriter, rules: Mapping[object, Rule], scan: Op, bounds: Mapping[int, Bounds]
    ) -> None:
        super().__init__(rewriter, rules, scan.bodies[0])
        self.scan, self.bounds = scan, bounds
        view = ScanView(scan)
        sums = [value for number, value in enumerate(view.inputs.carry) if number in view.accumulators]
        self.divisible = frozenset((*view.inputs.consts, *sums))
        self.asked_for: dict[int, tuple[Bounds, tuple[int, ...]]] = {}

    def run(self) -> None:
        """Walks the ops of the body."""
        for op in self.source_block.ops:
            bounds = self.bounds.get(op.index) or self.linked(op)
            if bounds is not None:
                self.cut(op, bounds)
            else:
                self.walk(op)

    def linked(self, op: Op) -> Bounds | None:
        """The bounds of a scan that reads stacks of a cut scan; None for any other op."""
        if op.name != "scan":
            return None
        scanned = values_in(ScanView(op).operands.xs)
        return next((self.pieces[v][0] for v in scanned if v in self.pieces), None)

    def asked(self, value: int, bounds: Bounds) -> tuple[int, ...] | None:
        """Constants come in as pieces, and so do sums (their addition, which asks, is done in pieces)."""
        if value not in self.divisible:
            return None
        parts = tuple(self.fresh(value, high - low) for low, high in itertools.pairwise(bounds))
        self.asked_for[value] = bounds, parts
        return parts

    def cut(self, op: Op, bounds: Bounds) -> None:
        """One scan as several: the carry goes from one to the next."""
        view = ScanView(op)
        consts, carry, xs = view.operands
        finals, ys = view.results
        scanned: list[tuple[Atom, ...]] = []
        for atom in xs:
            is_value = isinstance(atom, int)
            scanned.append(self.parts(atom, bounds, op.source) if is_value else (atom,) * (len(bounds) - 1))
        for value in values_in((*consts, *carry)):
            self.whole(value, op.source)
        spans = list(enumerate(itertools.pairwise(bounds)))
        stacked: list[dict[int, int]] = [{} for _ in ys]
        if op.params["reverse"]:
            spans.reverse()
        for place, (number, (low, high)) in enumerate(spans):
            is_last = place == len(spans) - 1
            carried = finals if is_last else tuple(map(self.rewriter.fresh, finals))
            some = [self.fresh(v, high - low) for v in ys]
            unroll = op.params["unroll"]
            piece = replace(
                op,
                index=self.rewriter.index(op.index),
                params=dict(op.params, length=high - low, unroll=min(unroll, high - low)),
                operands=(*consts, *carry, *(parts[number] for parts in scanned)),
                results=(*carried, *some),
                bodies=op.bodies if place == 0 else (self.rewriter.copy_block(op.bodies[0]),),
                key=None,
            )
            self.spans[piece.index] = op.index, low, high
            self.out.append(piece)
            carry = carried
            for column, value in zip(stacked, some, strict=True):
                column[number] = value
        for value, column in zip(ys, stacked, strict=True):
            self.pieces[value] = bounds, tuple(column[number] for number in sorted(column))


class _Step(_Body):
    """The top block of a step without micro-batches: some of its arguments come in as pieces."""

    def __init__(
        self, rewriter: Rewriter, rules: Mapping[object, Rule], block: Block, arguments: Mapping[int, Bounds]
    ) -> None:
        _Walk.__init__(self, rewriter, rules, block)
        self.bounds, self.divisible, self.asked_for = {}, frozenset(), {}
        self.arguments = {block.inputs[number]: some for number, some in arguments.items()}

    def block(self) -> Block:
        """The new block: whole arguments have new names, the old ones are what is joined of their pieces."""
        source = next((op.source for op in self.source_block.ops), None)
        inputs = [self.rewriter.fresh(v) if v in self.arguments else v for v in self.source_block.inputs]
        for value, whole in zip(self.source_block.inputs, inputs, strict=True):
            if value in self.arguments:
                spans = itertools.pairwise(self.arguments[value])
                parts = tuple(self.slice(whole, low, high, source) for low, high in spans)
                self.pieces[value] = self.arguments[value], parts
        self.run()
        outputs = tuple(self.whole(a, source) if isinstance(a, int) else a for a in self.source_block.outputs)
        return Block(tuple(inputs), tuple(self.out), outputs)


class _Top(_Walk):
    """The top block, with the scan over micro-batches in it."""

    def __init__(
        self,
        rewriter: Rewriter,
        rules: Mapping[object, Rule],
        block: Block,
        scan: Op,
        bounds: Mapping[int, Bounds],
    ) -> None:
        super().__init__(rewriter, rules, block)
        self.scan = scan
        self.body = _Body(rewriter, rules, scan, bounds)

    def block(self) -> Block:
        """The new top block."""
        for op in self.source_block.ops:
            if op is self.scan:
                self.micro_batches()
            else:
                self.walk(op)
        source = self.scan.source
        outputs = [self.whole(a, source) if isinstance(a, int) else a for a in self.source_block.outputs]
        self.spans = self.body.spans
        self.ranges.update(self.body.ranges)
        return Block(self.source_block.inputs, tuple(self.out), tuple(outputs))

    def micro_batches(self) -> None:
        """The scan over micro-batches, with constants and sums in pieces where its body asks for them."""
        body, scan, view = self.body, self.scan, ScanView(self.scan)
        body.run()
        source = scan.source

        def outside(atom: Atom) -> Atom:
            return self.whole(atom, source) if isinstance(atom, int) else atom

        def inside(atom: Atom) -> Atom:
            return body.whole(atom, source) if isinstance(atom, int) else atom

        def in_pieces(atom: Atom, bounds: Bounds) -> tuple[int, ...]:
            assert isinstance(atom, int), "a stacked value is no literal"
            return self.parts(atom, bounds, source)

        consts: list[tuple[Atom, int]] = []
        for atom, value in view.consts:
            if value in body.asked_for:
                bounds, parts = body.asked_for[value]
                consts += zip(in_pieces(atom, bounds), parts, strict=True)
            consts.append((outside(atom), value))  # pruned where nothing reads it whole
        carries: list[Carried] = []
        for one in view.carries:
            if one.input not in body.asked_for or not isinstance(one.output, int):
                carries.append(Carried(outside(one.start), one.input, inside(one.output), one.end))
                continue
            bounds, parts = body.asked_for[one.input]
            made = body.parts(one.output, bounds, source)
            ends = tuple(map(self.rewriter.fresh, made))
            self.pieces[one.end] = bounds, ends
            carries += map(Carried, in_pieces(one.start, bounds), parts, made, ends)
        xs = [(outside(atom), value) for atom, value in view.xs]
        ys = [(inside(atom), result) for atom, result in view.ys]
        self.out.append(view.rebuilt(body.out, consts, carries, xs, ys))


def _sized(op: Op, size: int) -> Mapping[str, Any]:
    """The parameters of an op on a piece of dim 0."""
    if op.name == "broadcast_in_dim":
        return dict(op.params, shape=(size, *op.params["shape"][1:]))
    if op.name == "reshape":
        return dict(op.params, new_sizes=(size, *op.params["new_sizes"][1:]))
    return op.params
