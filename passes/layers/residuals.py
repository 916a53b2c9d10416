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

Constants. JAX moves out of a differentiated scan whatever does not depend on its carry, such as a mask of the shape of
the attention scores, broadcast from [length, length], and the fill value in the same shape. Every iteration then reads
bytes(v) for each constant v, where outside of loops XLA would compute it within the kernels that use it. Constants of
at most `CACHED_BYTES` stay in a cache and as they are; the same cut, over the operations of the enclosing block, says
which values replace the others.

Values that do not depend on the carry (casts of weights) stay as they are: whether a weight is gathered again is a
decision of its sharding. Stacks that something other than one backward scan reads are there in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from alpa_lite.ir.graph import Atom, Block, Op, Traced, Value, walk
from alpa_lite.passes.ir import flow
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, rename_parts
from alpa_lite.passes.layers import recomputation

KEEPING_WEIGHT = 1 / 16
"""Memory traffic that keeping a stacked byte until the backward pass is worth."""

CACHED_BYTES = 2**20
"""Constants of a loop up to this size are read from a cache."""


def reduce_residuals(traced: Traced) -> Traced:
    """Stacks less in forward scans, and computes the rest again in backward scans, where that moves fewer bytes.

    Scans also compute large constants themselves.

    Returns:
      The step; itself if nothing changes.
    """
    rewriter = Rewriter(traced.graph)
    block = _reduce_block(rewriter, traced.graph.block)
    return traced if block is traced.graph.block else replace(traced, graph=rewriter.finish(block))


def _reduce_block(rewriter: Rewriter, block: Block) -> Block:
    """Returns a block whose scans, and those within its loops, stack and read less; itself if nothing changes."""
    makers = flow.producers(filter(recomputation.is_repeatable, block.ops))
    ops = []
    for op in block.ops:
        bodies = tuple([_reduce_block(rewriter, body) for body in op.bodies])
        same = all(new is old for new, old in zip(bodies, op.bodies, strict=True))
        ops.append(_sink_constants(rewriter, op if same else replace(op, bodies=bodies, key=None), makers))
    readers, places = flow.users(ops), {id(op): place for place, op in enumerate(ops)}
    for forward, op in enumerate(ops):
        if op.name == "scan" and not any(inner.has_effects for inner in walk(op.bodies[0])):
            for reader, read in _pairs(op, readers, block.outputs):
                backward = places[id(reader)]
                views = ScanView(ops[forward]), ScanView(ops[backward])
                gone, again = _choose(rewriter.values, *views, read)
                if gone:
                    ops[forward], ops[backward] = recomputation.repeat_in_backward(rewriter, *views, gone, again)
    same = all(new is old for new, old in zip(ops, block.ops, strict=True))
    return block if same else Block(block.inputs, tuple(ops), block.outputs)


def _pairs(
    scan: Op, readers: Mapping[int, Sequence[Op]], outputs: Iterable[Atom]
) -> list[tuple[Op, Mapping[int, int]]]:
    """Returns the scans that alone read some stacks of another, each with stack -> value of the forward body."""
    view = ScanView(scan)
    read = recomputation.read_by_scans(view, readers, outputs)
    found: dict[Op, dict[int, int]] = {}
    for atom, stack in view.ys:
        if isinstance(atom, int) and len(users := read.get(stack, ())) == 1:
            found.setdefault(users[0], {})[stack] = atom
    return list(found.items())


def _choose(
    values: Sequence[Value], forward: ScanView, backward: ScanView, read: Mapping[int, int]
) -> tuple[dict[int, int], list[Op]]:
    """Returns the cheapest choice for a pair of scans, of which one alone reads some stacks of the other.

    Returns:
      Stack -> value of the forward body that the backward body computes again in its place; and the ops of the forward
      body that the backward body repeats, in program order. Both are empty if nothing pays.
    """
    body = forward.body
    varying = flow.find_dependents(body.ops, forward.inputs.carry)
    required = {atom: stack for stack, atom in read.items() if atom in varying}
    makers = flow.producers(filter(recomputation.is_repeatable, body.ops))
    if makers.keys().isdisjoint(required):
        return {}, []
    scanned = set(backward.operands.xs)
    present = {atom for atom, stack in forward.ys if isinstance(atom, int) and stack in scanned} - varying
    present.update(forward.inputs.consts, [value for atom, value in forward.xs if atom in scanned])
    stacked = {*forward.inputs.xs, *(atom for atom, stack in forward.ys if stack not in read)}

    def keeping_bytes(value: int) -> float:
        if value in makers and value not in varying:
            return math.inf  # made of what is scanned over: better read that again
        return (1 if value in stacked else 2 + KEEPING_WEIGHT) * values[value].nbytes

    repeated, again = recomputation.choose_repeated(values, required, makers, present, keeping_bytes)
    gone = {stack: atom for atom, stack in required.items() if atom in repeated}
    return gone, again


def _sink_constants(rewriter: Rewriter, op: Op, makers: Mapping[int, Op]) -> Op:
    """Makes a scan compute large constants in its body.

    Args:
      op: an operation; all but scans are left as they are.
      makers: value -> the operation of the enclosing block that makes it, of those that can be repeated.

    Returns:
      The operation with other operands; itself if no constant costs less to compute than to read.
    """
    values = rewriter.values
    if op.name != "scan":
        return op
    view = ScanView(op)
    required = {
        atom: own for atom, own in view.consts
        if isinstance(atom, int) and atom in makers and values[atom].nbytes > CACHED_BYTES
    }  # fmt: skip
    if not required:
        return op
    present = {atom for atom in view.operands.consts if isinstance(atom, int)} - required.keys()
    repeated, again = recomputation.choose_repeated(values, required, makers, present, lambda v: values[v].nbytes)
    if repeated.isdisjoint(required):
        return op
    consts = [pair for pair in view.consts if pair[0] not in repeated]
    names: dict[int, Atom] = {atom: own for atom, own in consts if isinstance(atom, int)}

    def enter(value: int) -> int:
        consts.append((value, rewriter.new_value(value)))
        return consts[-1][1]

    copies = recomputation.copy_ops(rewriter, again, names, enter, is_remat=False)
    ops, carries, ys = rename_parts(view, {own: names[atom] for atom, own in required.items() if atom in repeated})
    return view.rebuild(recomputation.place_at_first_use(copies, ops), consts, carries, view.xs, ys)
