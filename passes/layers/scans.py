"""Cutting a scan over layers between iterations, forward and backward, without unrolling it.

A model whose layers are a `lax.scan` over stacked parameters is one operation forward and one backward, so no stage
boundary could fall inside. With cut points p_1 < .. < p_k in its length n, the scan over [0, n) becomes consecutive
scans over [0, p_1), [p_1, p_2), .., [p_k, n) of the same body (for a reversed scan, the last first), whose carry goes
from one to the next. Then everything stacked over layers is held in pieces (`blockwise.stacks`), so that only slices at
the arguments, and concatenations at the new state, mention a whole stacked leaf.

As one argument, such a leaf would be owned by one stage and sent to the others whole. So an argument that is read in
slices of dim 0 alone, which cover it, and whose new value is the concatenation of as many parts (or itself), becomes
one argument a slice, and its new value one result a part: each stage owns its slice, as any other leaf. The user still
passes and receives whole leaves: `StackedArguments` records which arguments and results make up which leaf, and the
runtime takes leaves apart and puts them together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Argument, Atom, Block, Bounds, Op, Pieces, StackedArguments, Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.blockwise.functions import rows_of
from alpa_lite.passes.blockwise.stacks import StackPieces, StackWalk
from alpa_lite.passes.ir import pruning
from alpa_lite.passes.ir.flow import uses
from alpa_lite.passes.ir.loops import Carry, ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, RewrittenStep


@dataclass(frozen=True, eq=False)
class Cut(RewrittenStep):
    """A step whose scans over layers are cut.

    Attributes:
      pieces: index of a piece of a scan -> (index of its scan before, first iteration, end).
      ranges: of these, and of operations on what is stacked, which are done in pieces too.
    """

    pieces: Mapping[int, tuple[int, int, int]]
    ranges: Mapping[int, tuple[int, int, int]]

    def part(self, index: int) -> tuple[int, int]:
        """(index before the cutting, first iteration) of an op; -1 for the index of a new op."""
        before, start, _ = self.ranges.get(index, (self.origin.get(index, -1), 0, 0))
        return before, start


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
        result of its own.

    Raises:
      OptionError: a key of `points` is not a scan of the body, or its points do not rise strictly within its length.
    """
    outer = scan_op(traced, scan)
    inside = {op.index: op for op in outer.bodies[0].ops if op.name == "scan"}
    bounds: dict[int, Bounds] = {}
    for index, some in points.items():
        if index not in inside:
            raise OptionError(
                f"points name op {index}, which is not a scan of the micro-batch; there are {sorted(inside)}"
            )
        bounds[index] = (0, *some, inside[index].params["length"])
        if any(low >= high for low, high in itertools.pairwise(bounds[index])):
            raise OptionError(
                f"points of op {index} are {tuple(some)}: they must rise strictly, from 1 to {bounds[index][-1] - 1}"
            )
    rewriter, view = Rewriter(traced.graph), ScanView(outer)
    sums = {value for number, value in enumerate(view.inputs.carry) if number in view.accumulators}
    arguments = traced.graph.block.inputs[: len(traced.arguments)] if split_arguments else ()
    top = StackWalk(rewriter, rules, traced.graph.block, divisible=set(arguments))
    body = StackWalk(rewriter, rules, view.body, bounds, sums.union(view.inputs.consts))
    for op in traced.graph.block.ops:
        if op is outer:
            body.run()
            _micro_batches(top, body, view)
        else:
            top.walk(op)
    outputs = [top.join_pieces(atom, outer.source) for atom in traced.graph.block.outputs]
    block = Block(traced.graph.block.inputs, tuple(top.out), tuple(outputs))
    if split_arguments:
        traced, block = _split_arguments(traced, top, block)
    done = rewriter.step(traced, block, scan)
    place = rewriter.place
    ranges = {place[i]: span for i, span in (top.ranges | body.ranges).items() if i in place}
    pieces = {i: span for i, span in ranges.items() if span[0] in inside}
    return Cut(done.traced, done.scan, done.origin, done.copies, pieces, ranges)


def cut_stacked_arguments(traced: Traced, bounds: Mapping[int, Bounds], rules: Mapping[object, Rule]) -> Traced:
    """Returns a step without micro-batches whose stacked arguments come in pieces, as do the results that replace them.

    Scans over these arguments, and over what is stacked with them, are cut at the same bounds.

    Args:
      traced: the step.
      bounds: flat argument -> where its pieces begin, and the end of the last.
      rules: of all ops, as `factors.rules_of` gives them.
    """
    rewriter, block = Rewriter(traced.graph), traced.graph.block
    walk = StackWalk(rewriter, rules, block, {})
    source = next((op.source for op in block.ops), None)
    whole = {block.inputs[number]: rewriter.new_value(block.inputs[number]) for number in sorted(bounds)}
    for number, some in sorted(bounds.items()):
        value = block.inputs[number]
        parts = tuple(walk.new_value(value, high - low) for low, high in itertools.pairwise(some))
        walk.pieces[value] = walk.asked_for[whole[value]] = some, parts
    walk.run()
    outputs = tuple(walk.join_pieces(atom, source) for atom in block.outputs)
    inputs = tuple(whole.get(value, value) for value in block.inputs)
    traced, block = _split_arguments(traced, walk, Block(inputs, tuple(walk.out), outputs))
    return replace(traced, graph=rewriter.finish(block))


def _micro_batches(top: StackWalk, body: StackWalk, view: ScanView) -> None:
    """Appends the scan over micro-batches, with constants and sums in pieces where its body asks for them."""
    source = view.op.source

    def in_pieces(atom: Atom, bounds: Bounds) -> tuple[int, ...]:
        """Returns the pieces of a value outside of the loop."""
        assert isinstance(atom, int), "a stacked value is not a literal"
        return top.parts(atom, bounds, source)

    consts: list[tuple[Atom, int]] = []
    for atom, value in view.consts:
        if value in body.asked_for:
            bounds, parts = body.asked_for[value]
            consts += zip(in_pieces(atom, bounds), parts, strict=True)
        consts.append((top.join_pieces(atom, source), value))  # pruned where nothing reads it whole
    carries: list[Carry] = []
    for one in view.carries:
        if one.input not in body.asked_for or not isinstance(one.output, int):
            start, output = top.join_pieces(one.start, source), body.join_pieces(one.output, source)
            carries.append(Carry(start, one.input, output, one.end))
            continue
        bounds, parts = body.asked_for[one.input]
        made = body.parts(one.output, bounds, source)
        ends = tuple(map(top.rewriter.new_value, made))
        top.pieces[one.end] = bounds, ends
        carries += map(Carry, in_pieces(one.start, bounds), parts, made, ends)
    xs = [(top.join_pieces(atom, source), value) for atom, value in view.xs]
    ys = [(body.join_pieces(atom, source), result) for atom, result in view.ys]
    top.out.append(view.rebuild(body.out, consts, carries, xs, ys))


def _split_arguments(traced: Traced, walk: StackWalk, block: Block) -> tuple[Traced, Block]:
    """Returns the user's step and its top block with arguments and results in pieces, where no more is needed of them.

    Arguments that stay whole although pieces of them are read are sliced first.

    Args:
      walk: over the top block.
      block: its new top block. Nothing makes the pieces of arguments that it reads.
    """
    used = uses(pruning.live_block(block))  # what is dead may still mention whole leaves
    new_value = {argument: output for output, argument in traced.state}
    inputs: list[int] = []
    outputs: list[Atom] = []
    slices: list[Op] = []
    taken: dict[int, StackPieces] = {}  # output -> its parts
    arguments = []
    for number, value in enumerate(block.inputs[: len(traced.arguments)]):
        output = new_value.get(number)
        atom = None if output is None else block.outputs[output]
        made = (walk.asked_for if atom == value else walk.concatenated).get(atom) if isinstance(atom, int) else None
        bounds, parts = walk.asked_for.get(value, ((), ()))
        fits = parts and used[value] == (atom == value) and all(used[part] for part in parts)
        if not fits or (output is not None and (made is None or made[0] != bounds)):
            for part, (low, high) in zip(parts, itertools.pairwise(bounds), strict=True):
                slices.append(rows_of(walk.rewriter, value, low, high, block.ops[0].source, part))
            bounds, parts = (), (value,)
        elif output is not None and made is not None:
            taken[output] = made
        arguments.append(_append(inputs, bounds, parts))
    results = [_append(outputs, *taken.get(number, ((), (atom,)))) for number, atom in enumerate(block.outputs)]
    pairs = [zip(results[new].numbers, arguments[old].numbers, strict=True) for old, new in new_value.items()]
    inputs += block.inputs[len(arguments) :]
    traced = replace(
        traced,
        arguments=_parts(traced.arguments, arguments),
        outputs=_parts(traced.outputs, results),
        state=tuple(sorted(itertools.chain.from_iterable(pairs))),
        stacked=StackedArguments(tuple(arguments), tuple(results)),
    )
    return traced, Block(tuple(inputs), (*slices, *block.ops), tuple(outputs))


def _append(leaves: list[Any], bounds: Bounds, parts: Sequence[Any]) -> Pieces:
    """Appends the pieces of a leaf, or the whole, to those before it; returns where they are."""
    leaves += parts
    return Pieces(tuple(range(len(leaves) - len(parts), len(leaves))), bounds)


def _parts(leaves: Sequence[Argument], pieces: Sequence[Pieces]) -> tuple[Argument, ...]:
    """Returns the records of pieces: their paths name the slice."""
    out: list[Argument] = []
    for leaf, one in zip(leaves, pieces, strict=True):
        spans = list(itertools.pairwise(one.bounds))
        out += [replace(leaf, path=f"{leaf.path}[{low}:{high}]") for low, high in spans] or [leaf]
    return tuple(out)
