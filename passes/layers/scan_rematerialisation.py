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
from dataclasses import replace

from alpa_lite import _jax
from alpa_lite.graph import Atom, Block, Op, Traced, walk
from alpa_lite.passes.ir.loops import reads, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, Rewritten, substituted, with_body
from alpa_lite.passes.layers.rematerialisation import Choice, is_kept


def rematerialise_scans(traced: Traced, scan: int, choices: Mapping[int, Choice]) -> Rewritten:
    """Makes backward scans compute again what forward scans stacked for them.

    Args:
      traced: the step.
      scan: the index of the scan over micro-batches.
      choices: index of a forward scan in its body -> "layer" or "selective".

    Returns:
      The step; scans are the same operations as before (`Rewritten.origin`), with other operands and results.
    """
    outer = scan_op(traced, scan)
    body = outer.bodies[0]
    rewriter = Rewriter(traced)
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
            for maker in {id(gone[v]): gone[v] for v in reads(op) if v in gone}.values():
                op = _backward(rewriter, op, maker, gone, stacks[maker.index])
        ops.append(op)
    made = with_body(outer, Block(body.inputs, tuple(ops), body.outputs))
    return rewriter.finish(substituted(traced.graph.block, outer, [made]), scan)


def dropped(op: Op, body: Block, choice: Choice) -> frozenset[int]:
    """The stacked results of a forward scan that backward scans alone read, and that a choice computes again."""
    if op.name != "scan" or choice == "none" or any(o.has_effects for o in walk(op.bodies[0])):
        return frozenset()
    carries = op.params["num_carry"]
    inner = op.bodies[0]
    makers = {v: o for o in inner.ops for v in o.results}
    found = set()
    for value, atom in zip(op.results[carries:], inner.outputs[carries:], strict=True):
        users = [o for o in body.ops if value in reads(o)]
        if not users or value in body.outputs or not all(_scans(o, value) for o in users):
            continue
        maker = makers.get(atom) if isinstance(atom, int) else None
        if choice == "selective" and maker is not None and is_kept(maker):
            continue
        found.add(value)
    return frozenset(found)


def _scans(op: Op, value: int) -> bool:
    """Whether an op reads a value as what it scans over, and in no other way."""
    if op.name != "scan":
        return False
    first = op.params["num_consts"] + op.params["num_carry"]
    return value not in op.operands[:first]


def _forward(rewriter: Rewriter, op: Op, gone: Mapping[int, Op], choice: Choice) -> tuple[Op, dict[int, int]]:
    """The forward scan without the results that are gone; it stacks its carries, and what else is saved."""
    consts, carries, length = op.params["num_consts"], op.params["num_carry"], op.params["length"]
    inner = op.bodies[0]
    kept = [(value, atom) for value, atom in zip(op.results, inner.outputs, strict=True) if value not in gone]
    stacks = {atom: value for value, atom in kept[carries:] if isinstance(atom, int)}
    for value in (*inner.inputs[consts : consts + carries], *_needed(op, gone, choice)):
        if value not in stacks:
            before = rewriter.values[value]
            shape = (length, *before.shape)
            stacks[value] = rewriter.fresh(replace(before, shape=shape, aval=before.aval.update(shape=shape)))
            kept.append((stacks[value], value))
    body = Block(inner.inputs, inner.ops, tuple(atom for _, atom in kept))
    return replace(op, results=tuple(value for value, _ in kept), bodies=(body,), key=None), stacks


def _needed(op: Op, gone: Mapping[int, Op], choice: Choice) -> list[int]:
    """The values of the body that the selective choice keeps, and that computing again begins with."""
    inner = op.bodies[0]
    makers = {v: o for o in inner.ops for v in o.results}
    pending = [a for r, a in zip(op.results, inner.outputs, strict=True) if r in gone and isinstance(a, int)]
    found: dict[int, None] = {}
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if value in seen or value not in makers:
            continue
        seen.add(value)
        if choice == "selective" and is_kept(makers[value]):
            found[value] = None
        else:
            pending += reads(makers[value])
    return list(found)


def _backward(rewriter: Rewriter, op: Op, maker: Op, gone: Mapping[int, Op], stacks: Mapping[int, int]) -> Op:
    """A backward scan that computes the body of `maker` again."""
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    inner, again = op.bodies[0], maker.bodies[0]
    first, carried = maker.params["num_consts"], maker.params["num_carry"]
    groups = [
        list(zip(inner.inputs[a:b], op.operands[a:b], strict=True))
        for a, b in ((0, consts), (consts, consts + carries), (consts + carries, len(op.operands)))
    ]
    renamed: dict[int, Atom] = {}  # of the forward body

    def entering(value: int, atom: Atom, group: list[tuple[int, Atom]]) -> int:
        known = next((v for v, a in group if isinstance(a, int) and a == atom), None)
        if known is None:
            known = rewriter.fresh(value)
            group.append((known, atom))
        renamed[value] = known
        return known

    for position, value in enumerate(again.inputs):
        if position < first:
            entering(value, maker.operands[position], groups[0])
        elif position < first + carried:
            entering(value, stacks[value], groups[2])
        else:
            entering(value, maker.operands[position], groups[2])
    source = _jax.rematted(op.source)
    ops: list[Op] = []
    begun = [v for i in range(carried) if isinstance(v := renamed[again.inputs[first + i]], int)]
    if begun:  # a scan of one iteration is no loop: XLA would find both bodies to be the same
        barrier, after = rewriter.barrier(begun, source)
        ops.append(barrier)
        renamed = {v: after.get(a, a) if isinstance(a, int) else a for v, a in renamed.items()}
    for value, stack in stacks.items():
        if value not in again.inputs:  # saved: not computed again
            entering(value, stack, groups[2])
    for inner_op in again.ops:
        copy = rewriter.copy(inner_op, renamed, _jax.rematted(inner_op.source))
        ops.append(copy)
        renamed = dict(zip(inner_op.results, copy.results, strict=True)) | renamed
    made = dict(zip(maker.results, again.outputs, strict=True))
    names: dict[int, Atom] = {}
    scanned = []
    for value, atom in groups[2]:
        if isinstance(atom, int) and gone.get(atom) is maker:
            output = made[atom]
            names[value] = renamed[output] if isinstance(output, int) else output
        else:
            scanned.append((value, atom))
    for inner_op in inner.ops:
        operands = tuple(names.get(a, a) if isinstance(a, int) else a for a in inner_op.operands)
        ops.append(replace(inner_op, operands=operands))
    outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in inner.outputs)
    pairs = [*groups[0], *groups[1], *scanned]
    return replace(
        op,
        params=dict(op.params, num_consts=len(groups[0])),
        operands=tuple(atom for _, atom in pairs),
        bodies=(Block(tuple(value for value, _ in pairs), tuple(ops), outputs),),
        key=None,
    )
