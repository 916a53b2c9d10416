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

from alpa_lite.ir.graph import Atom, Block, Op, Traced, walk
from alpa_lite.passes.ir.flow import producers, reach, values_in
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, Rewritten, substituted, with_body
from alpa_lite.passes.layers.recomputation import repeat_in_backward
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
    rewriter, ops = Rewriter(traced.graph), list(body.ops)
    for n, op in enumerate(body.ops):
        choice = choices.get(op.index, "none")
        stacks = dropped(op, body, choice)
        gone = {stack: atom for atom, stack in ScanView(ops[n]).ys if stack in stacks} if stacks else {}
        for m, reader in enumerate(body.ops):
            if not stacks.isdisjoint(reader.reads):
                view = ScanView(ops[n])
                first = _needed(view, gone, choice)
                ops[n], ops[m] = repeat_in_backward(rewriter, view, ScanView(ops[m]), gone, view.body.ops, first)
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


def _needed(view: ScanView, gone: Mapping[int, Atom], choice: Choice) -> list[int]:
    """The values of the body that the selective choice keeps, and that computing again begins with."""
    makers = producers(view.body.ops)

    def begins(value: int) -> bool:
        return value in makers and choice == "selective" and is_kept(makers[value])

    wanted = values_in(gone.values())
    reached = reach(wanted, lambda value: () if begins(value) or value not in makers else makers[value].reads)
    return [value for value in reached if begins(value)]
