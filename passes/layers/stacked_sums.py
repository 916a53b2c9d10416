"""Sums of stacks: additions to carries of an outer scan move into the scan that stacks the summands.

Problem. A loop over micro-batches adds the gradients of a step to those of the steps before. Where layers are scanned,
the backward scan writes a stack of gradients, which is then read, with the sum, to write the new sum: four passes over
memory in place of the two in which a product adds to its output.

Rewriting. For a carry c of a scan with c' = c + s, where s is a stack of an inner scan that nothing else reads, the
inner scan also scans over c and stacks c_i + s_i. The values are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.ir.graph import Block, Op, Traced
from alpa_lite.passes.ir import flow
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, replace_body


def add_within_scans(traced: Traced, scan: int) -> tuple[Traced, int]:
    """Moves additions to carries of outer scans into the inner scans that stack the summands.

    Args:
      scan: the index of the loop over micro-batches, or -1 without one.

    Returns:
      The step and the index of that loop in it; themselves if nothing changes.
    """
    rewriter = Rewriter(traced.graph)
    block = _rewrite_block(rewriter, traced.graph.block)
    if block is traced.graph.block:
        return traced, scan
    graph = rewriter.finish(block)
    return replace(traced, graph=graph), rewriter.place.get(scan, -1)


def _rewrite_block(rewriter: Rewriter, block: Block) -> Block:
    ops = tuple([_rewrite_loop(rewriter, op) for op in block.ops])
    same = all(new is old for new, old in zip(ops, block.ops, strict=True))
    return block if same else replace(block, ops=ops)


def _rewrite_loop(rewriter: Rewriter, op: Op) -> Op:
    """Returns a scan whose inner scans add to its carries; other operations as they are."""
    if op.name != "scan":
        return op
    body = _rewrite_block(rewriter, op.bodies[0])
    op = op if body is op.bodies[0] else replace_body(op, body)
    view, makers, uses = ScanView(op), flow.producers(body.ops), flow.uses(body)
    inner: dict[int, Op] = {}  # by index
    gone: set[int] = set()
    for number, (adds, added) in view.accumulators.items():
        maker = makers.get(added)
        if maker is None or maker.name != "scan" or uses[added] != 1:
            continue
        stacking = ScanView(inner.get(maker.index, maker))
        (summand,) = [atom for atom, result in stacking.ys if result == added] or [None]
        if isinstance(summand, int) and summand in flow.producers(stacking.body.ops):
            inner[maker.index] = _add_in(rewriter, stacking, summand, adds, added, view.inputs.carry[number])
            gone.add(adds.index)
    if not gone:
        return op
    ops = tuple([inner.get(one.index, one) for one in body.ops if one.index not in gone])
    return replace_body(op, replace(body, ops=ops))


def _add_in(rewriter: Rewriter, view: ScanView, summand: int, adds: Op, added: int, carry: int) -> Op:
    """Returns a scan that also scans over a carry, and stacks its sum with a summand in the place of the summand."""
    own, total = rewriter.new_value(summand), rewriter.new_value(summand)
    add = rewriter.op(adds.primitive, adds.params, (own, summand), (total,), adds.source, adds.index, adds.ctx)
    ops: list[Op] = []
    for op in view.body.ops:
        ops.append(op)
        if summand in op.results:
            ops.append(add)
    ys = [(total, adds.results[0]) if result == added else (atom, result) for atom, result in view.ys]
    return view.rebuild(ops, view.consts, view.carries, [*view.xs, (carry, own)], ys)
