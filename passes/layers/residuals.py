"""Residuals of scans over layers: which values the forward scan stacks, and which the backward scan computes again.

Problem. `jax.grad` of a scan makes two scans: the forward one stacks every value that the derivative rules name, the
backward one reads a slice of each stack an iteration. For GELU these are the argument, tanh, 1 - tanh^2 and two
products, five tensors of which the argument determines the rest. Outside of loops XLA computes such values again within
the kernels that read them; across loops no compiler can, so they are written to memory, kept from the forward to the
backward pass, and read.

Mathematics. The cut of `recomputation` over the forward body, where the values that the backward body reads are
required. A value is available to the backward body if it is scanned over or constant in the forward scan, or stacked;
stacking v moves 2 bytes(v), since it is written and read. A stacked byte also takes memory until the backward pass,
which counts little (`KEEPING_WEIGHT`), so that of choices that move equally many bytes the smallest is made.

Values that do not depend on the carry (casts of weights) stay as they are: whether a weight is gathered again is a
decision of its sharding. Stacks that something other than one backward scan reads are there in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite import _jax
from alpa_lite.graph import Atom, Block, Op, Traced, Value, walk
from alpa_lite.passes.ir import flow
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom, renamed_op, with_body
from alpa_lite.passes.layers import recomputation
from alpa_lite.passes.layers.loop_constants import sink_constants

KEEPING_WEIGHT = 1 / 16
"""Memory traffic that keeping a stacked byte until the backward pass is worth."""


def reduce_residuals(traced: Traced) -> Traced:
    """Stacks less in forward scans, and computes the rest again in backward scans, where that moves fewer bytes.

    Scans also compute large constants themselves (`loop_constants`).

    Returns:
      The step; itself if nothing changes.
    """
    rewriter = Rewriter(traced.graph)
    block = _reduce_block(rewriter, traced.graph.block)
    return traced if block is traced.graph.block else replace(traced, graph=rewriter.finish(block))


def _reduce_block(rewriter: Rewriter, block: Block) -> Block:
    """A block whose scans, and those within its loops, stack and read less; itself if nothing changes."""
    makers = flow.producers(filter(recomputation.is_repeatable, block.ops))
    ops = [sink_constants(rewriter, _reduce_bodies(rewriter, op), makers) for op in block.ops]
    for forward, op in enumerate(ops):
        if op.name == "scan" and not any(inner.has_effects for inner in walk(op.bodies[0])):
            for backward, read in _pairs(op, ops, block.outputs):
                choice = _choose(rewriter.values, ScanView(ops[forward]), ScanView(ops[backward]), read)
                if choice is not None:
                    ops[forward], ops[backward] = _rewrite(rewriter, ops[forward], ops[backward], choice)
    same = all(new is old for new, old in zip(ops, block.ops, strict=True))
    return block if same else Block(block.inputs, tuple(ops), block.outputs)


def _reduce_bodies(rewriter: Rewriter, op: Op) -> Op:
    """An op whose bodies stack and read less; itself if they do not change."""
    bodies = tuple([_reduce_block(rewriter, body) for body in op.bodies])
    if all(new is old for new, old in zip(bodies, op.bodies, strict=True)):
        return op
    return with_body(op, bodies[0]) if len(bodies) == 1 else replace(op, bodies=bodies, key=None)


def _pairs(scan: Op, ops: Sequence[Op], outputs: Iterable[Atom]) -> list[tuple[int, Mapping[int, int]]]:
    """The places of scans that alone read stacks of another, each with stack -> value of the forward body."""
    view, out = ScanView(scan), set(flow.values_in(outputs))
    readers: dict[int, list[int]] = {}
    for place, op in enumerate(ops):
        for value in dict.fromkeys(op.reads):
            readers.setdefault(value, []).append(place)
    found: dict[int, dict[int, int]] = {}
    for atom, stack in view.ys:
        places = readers.get(stack, [])
        if not isinstance(atom, int) or stack in out or len(places) != 1 or ops[places[0]].name != "scan":
            continue
        consts, carry, _ = ScanView(ops[places[0]]).operands
        if stack not in (*consts, *carry):
            found.setdefault(places[0], {})[stack] = atom
    return sorted(found.items())


@dataclass(frozen=True)
class _Choice:
    """The change of a pair of scans.

    Attributes:
      gone: stack -> value of the forward body that the backward body computes again in its place.
      again: the ops of the forward body that the backward body repeats, in program order.
    """

    gone: Mapping[int, int]
    again: tuple[Op, ...]


def _choose(values: Sequence[Value], forward: ScanView, backward: ScanView, read: Mapping[int, int]) -> _Choice | None:
    """The cheapest choice for a pair of scans, of which one alone reads some stacks of the other; None if none pays."""
    body = forward.body
    varying = flow.made_of(body.ops, forward.inputs.carry)
    required = {atom: stack for stack, atom in read.items() if atom in varying}
    repeatable = list(filter(recomputation.is_repeatable, body.ops))
    makers = flow.producers(repeatable)
    if makers.keys().isdisjoint(required):
        return None
    scanned = set(backward.operands.xs)
    present = {atom for atom, stack in forward.ys if stack in scanned and atom not in varying}
    present.update(forward.inputs.consts, [value for atom, value in forward.xs if atom in scanned])
    stacked = {*forward.inputs.xs, *(atom for atom, stack in forward.ys if stack not in read)}
    cut = recomputation.RecomputationCut()
    for value in flow.needed(required, makers):
        size = values[value].nbytes
        keeping: float = 0 if value in present else size if value in stacked else (2 + KEEPING_WEIGHT) * size
        if value in makers and value not in varying and value not in present:
            keeping = math.inf  # made of what is scanned over: better read that again
        if value in makers and value not in present:
            op = makers[value]
            cut.add(value, keeping, recomputation.repetition_bytes(values[value], op), op.reads, value in required)
        else:
            cut.add(value, keeping, math.inf, (), value in required)
    repeated = cut.repeated()
    gone = {stack: atom for atom, stack in required.items() if atom in repeated}
    again = tuple([op for op in repeatable if not repeated.isdisjoint(op.results)])
    return _Choice(gone, again) if gone else None


def _rewrite(rewriter: Rewriter, forward: Op, backward: Op, choice: _Choice) -> tuple[Op, Op]:
    """A pair of scans after a choice: the forward scan may stack other values, the backward scan repeats ops."""
    before, after = ScanView(forward), ScanView(backward)
    ys = [pair for pair in before.ys if pair[1] not in choice.gone]
    stacks = {atom: stack for atom, stack in ys if isinstance(atom, int)}
    consts = list(after.consts)
    xs = [pair for pair in after.xs if pair[0] not in choice.gone]
    operands = {value: atom for atom, value in before.xs}
    invariants = {value: atom for atom, value in before.consts}
    repeated = flow.producers(choice.again)

    def enter(value: int) -> int:
        """What the backward body calls a value of the forward body that is not computed again."""
        if value in invariants:
            group, atom = consts, invariants[value]
        elif value in operands and value not in stacks:
            group, atom = xs, operands[value]
        else:
            if value not in stacks:
                stacks[value] = rewriter.shaped(value, (before.length, *rewriter.values[value].shape))
                ys.append((value, stacks[value]))
            group, atom = xs, stacks[value]
        known = next((own for other, own in group if other is atom or other == atom), None)
        if known is None:
            known = rewriter.fresh(value)
            group.append((atom, known))
        return known

    names: dict[int, Atom] = {}  # of the forward body
    copies: list[Op] = []
    for op in choice.again:
        names.update((v, enter(v)) for v in op.reads if v not in names and v not in repeated)
        copy = rewriter.copy(op, names, _jax.rematted(op.source))
        names.update(zip(op.results, copy.results, strict=True))
        copies.append(copy)
    here = {own: names[choice.gone[atom]] for atom, own in after.xs if atom in choice.gone}
    ops = recomputation.place_at_first_use(copies, [renamed_op(op, here) for op in after.body.ops])
    carries = [one._replace(output=renamed_atom(one.output, here)) for one in after.carries]
    outputs = [(renamed_atom(atom, here), stack) for atom, stack in after.ys]
    return (
        before.rebuilt(before.body.ops, before.consts, before.carries, before.xs, ys),
        after.rebuilt(ops, consts, carries, xs, outputs),
    )
