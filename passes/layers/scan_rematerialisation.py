"""Rematerialisation within a scan over layers: each iteration's carry is saved, and the iteration computed again.

The backward scan reads what the forward scan stacked for it, one slice an iteration. Instead, the forward scan stacks
the carry that each iteration began with, and the body of the backward scan first computes the forward body again, from
that carry and from the same scanned inputs, and then goes on as before:

    forward   (c, x) -> c', r              becomes   (c, x) -> c', c
    backward  (g, r, ..) -> g', ..         becomes   (g, c, x, ..) -> r = forward(c, x); g', ..

So a layer is computed again right before its own backward pass, and no more than one layer's intermediates exist at a
time. The selective choice keeps stacking what products, convolutions and draws make; nothing that only they need is
computed again. (`rematerialisation` does the same for operations outside of scans.)
"""

from __future__ import annotations

from collections.abc import Mapping

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Op, Traced, walk
from alpa_lite.passes.ir.flow import producers, reach, values_in
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, Rewritten, renamed_atom, renamed_parts, substituted, with_body
from alpa_lite.passes.layers.recomputation import entering
from alpa_lite.passes.layers.rematerialisation import Choice, is_kept


def rematerialise_scans(traced: Traced, scan: int, choices: Mapping[int, Choice]) -> Rewritten:
    """Makes backward scans recompute the values that forward scans stacked for them.

    Args:
      choices: index of a forward scan in its body -> "layer" or "selective".

    Returns:
      The step; scans are the same operations as before (`Rewritten.origin`), with other operands and results.
    """
    outer = scan_op(traced, scan)
    body = outer.bodies[0]
    rewriter = Rewriter(traced.graph)
    gone = {
        value: op
        for op in body.ops
        if op.index in choices
        for value in dropped(op, body, choices[op.index])
    }  # fmt: skip
    stacks: dict[int, dict[int, int]] = {}  # forward scan -> value of its body -> its stack
    ops: list[Op] = []
    for op in body.ops:
        if any(op is made for made in gone.values()):
            op, stacks[op.index] = _forward(rewriter, op, gone, choices[op.index])
        elif op.name == "scan":
            for maker in {id(gone[v]): gone[v] for v in op.reads if v in gone}.values():
                op = _backward(rewriter, op, maker, gone, stacks[maker.index])
        ops.append(op)
    made = with_body(outer, Block(body.inputs, tuple(ops), body.outputs))
    return rewriter.step(traced, substituted(traced.graph.block, outer, [made]), scan)


def dropped(op: Op, body: Block, choice: Choice) -> frozenset[int]:
    """The stacked results of a forward scan that backward scans alone read, and that a choice computes again."""
    if op.name != "scan" or choice == "none" or any(o.has_effects for o in walk(op.bodies[0])):
        return frozenset()
    view = ScanView(op)
    makers = producers(view.body.ops)
    found = set()
    for atom, value in view.ys:
        users = [o for o in body.ops if value in o.reads]
        if not users or value in body.outputs or not all(_scans(o, value) for o in users):
            continue
        maker = makers.get(atom) if isinstance(atom, int) else None
        if choice == "selective" and maker is not None and is_kept(maker):
            continue
        found.add(value)
    return frozenset(found)


def _scans(op: Op, value: int) -> bool:
    """Whether an op that reads a value is a scan, and reads it as a scanned input only."""
    if op.name != "scan":
        return False
    consts, carry, _ = ScanView(op).operands
    return value not in (*consts, *carry)


def _forward(rewriter: Rewriter, op: Op, gone: Mapping[int, Op], choice: Choice) -> tuple[Op, dict[int, int]]:
    """Returns the forward scan without the dropped results, with its carries and other saved values stacked."""
    view = ScanView(op)
    ys = [(atom, value) for atom, value in view.ys if value not in gone]
    stacks = {atom: value for atom, value in ys if isinstance(atom, int)}
    for value in (*view.inputs.carry, *_needed(view, gone, choice)):
        if value not in stacks:
            stacks[value] = rewriter.shaped(value, (view.length, *rewriter.values[value].shape))
            ys.append((value, stacks[value]))
    return view.rebuilt(view.body.ops, view.consts, view.carries, view.xs, ys), stacks


def _needed(view: ScanView, gone: Mapping[int, Op], choice: Choice) -> list[int]:
    """The values of the body that the selective choice keeps, and that computing again begins with."""
    makers = producers(view.body.ops)

    def begins(value: int) -> bool:
        return value in makers and choice == "selective" and is_kept(makers[value])

    wanted = values_in(atom for atom, value in view.ys if value in gone)
    reached = reach(wanted, lambda value: () if begins(value) or value not in makers else makers[value].reads)
    return [value for value in reached if begins(value)]


def _backward(rewriter: Rewriter, op: Op, maker: Op, gone: Mapping[int, Op], stacks: Mapping[int, int]) -> Op:
    """A backward scan that computes the body of `maker` again."""
    view, again = ScanView(op), ScanView(maker)
    consts, xs = view.consts, view.xs
    renamed: dict[int, Atom] = {}  # of the forward body
    scanned = [*((stacks[value], value) for value in again.inputs.carry), *again.xs]
    for group, pairs in ((consts, again.consts), (xs, scanned)):
        renamed |= {value: entering(rewriter, group, atom, value) for atom, value in pairs}
    source = _jax.mark_rematerialised(op.source)
    ops: list[Op] = []
    begun = values_in(renamed[value] for value in again.inputs.carry)
    if begun:  # a scan of one iteration is no loop: XLA would find both bodies to be the same
        barrier, after = rewriter.barrier(begun, source)
        ops.append(barrier)
        renamed = {v: after.get(a, a) if isinstance(a, int) else a for v, a in renamed.items()}
    for value, stack in stacks.items():
        if value not in again.body.inputs:  # saved: not computed again
            renamed[value] = entering(rewriter, xs, stack, value)
    for inner_op in again.body.ops:
        copy = rewriter.copy(inner_op, renamed, _jax.mark_rematerialised(inner_op.source))
        ops.append(copy)
        renamed = dict(zip(inner_op.results, copy.results, strict=True)) | renamed
    made = {result: renamed_atom(output, renamed) for output, result in again.ys if gone.get(result) is maker}
    names = {value: made[atom] for atom, value in xs if isinstance(atom, int) and atom in made}
    own, carries, ys = renamed_parts(view, names)
    return view.rebuilt([*ops, *own], consts, carries, [pair for pair in xs if pair[1] not in names], ys)
