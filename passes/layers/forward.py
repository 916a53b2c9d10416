"""What each operation of a micro-batch is: forward or backward, and whether it needs an activation.

Forward and backward. JAX marks every equation of a differentiated function in its name stack: `jvp(...)` for the
function and what its derivative needs of it, `transpose(jvp(...))` for the reverse pass. The outermost mark counts.
Data flow corrects the marks: what a marked forward operation reads is forward (a gradient taken inside the loss, or
before it, for a penalty or an adversarial example); an unmarked operation is backward if it reads something backward
(accumulation, clipping). Where nothing is marked, everything after the last operation that a scalar or stacked result
needs is backward, which holds for every trace of reverse mode: the transposed equations come after the loss.

Kinds of values. Every value depends on parameters (state), on inputs (the batch, keys, counters), on both, or on
neither. What depends on both is an activation. An operation without activations is *free*: it stands wherever its
users are, and may run once on each stage, unless it is expensive, has effects, or reduces parameters (their norm): its
result is then cheaper to move than its operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.graph import Block, Op, Traced, Value
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import reads, scan_op
from alpa_lite.strategy import Rule

PARAM, INPUT, ACTIVE = 1, 2, 3


@dataclass(frozen=True, eq=False)
class Split:
    """The outcome for one micro-batch scan.

    Attributes:
      forward: indices of the body's forward ops.
      free: indices of the free ops of the body and of the top block.
      kinds: of every value of the top block and of the body: 0, PARAM, INPUT or ACTIVE (both, or not free).
      param_of: value of the body that is made of parameters alone -> the body's inputs that it is made of.
    """

    forward: frozenset[int]
    free: frozenset[int]
    kinds: Mapping[int, int]
    param_of: Mapping[int, frozenset[int]]


def split(traced: Traced, scan: int, rules: Mapping[object, Rule]) -> Split:
    """Classifies the operations of a step whose micro-batches run in the scan with index `scan`."""
    op = scan_op(traced, scan)
    forward = forward_ops(op, traced.graph.values)
    opaque = {key for key, rule in rules.items() if rule.source == "opaque"}
    kinds: dict[int, int] = {}
    for number, value in enumerate(traced.graph.block.inputs):
        role = traced.arguments[number].role if number < len(traced.arguments) else "other"
        is_number = jnp.issubdtype(traced.graph.values[value].dtype, jnp.inexact)
        is_key = jnp.issubdtype(traced.graph.values[value].dtype, jax.dtypes.extended)
        kinds[value] = PARAM if role == "state" and is_number and not is_key else INPUT
    walk = _Walk(traced, kinds, opaque)
    top = traced.graph.block.ops
    walk.run(top[: top.index(op)], frozenset())
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    body = op.bodies[0]
    sums = accumulators(body, consts, carries)
    for position, value in enumerate(body.inputs):
        operand = op.operands[position]
        is_carry = consts <= position < consts + carries
        kinds[value] = ACTIVE if is_carry else kinds.get(operand, 0) if isinstance(operand, int) else 0
        if is_carry and position - consts in sums:
            kinds[value] = 0
        if kinds[value] == PARAM:
            walk.param_of[value] = frozenset({value})
    walk.run(body.ops, frozenset(o.index for o in body.ops) - forward)
    kinds.update((result, ACTIVE) for result in op.results)
    walk.run(top[top.index(op) + 1 :], frozenset())
    return Split(forward, frozenset(walk.free), kinds, walk.param_of)


class _Walk:
    """One pass over the ops in program order."""

    def __init__(self, traced: Traced, kinds: dict[int, int], opaque: set[object]) -> None:
        self.values = traced.graph.values
        self.kinds = kinds
        self.opaque = opaque
        self.free: set[int] = set()
        self.param_of: dict[int, frozenset[int]] = {}

    def run(self, ops: Iterable[Op], backward: frozenset[int]) -> None:
        """Fills in kinds, and which ops are free. Backward ops on parameters are never free: they follow them."""
        for op in ops:
            operands = reads(op)
            kind = 0
            for value in operands:
                kind |= self.kinds.get(value, 0)
            is_free = kind != ACTIVE and not (op.has_effects or is_expensive(op) or op.key in self.opaque)
            if is_free and kind == PARAM:
                is_free = op.index not in backward and not self._shrinks(op)
            if is_free:
                self.free.add(op.index)
            if kind == PARAM:
                roots = frozenset().union(*(self.param_of.get(v, frozenset()) for v in operands))
                self.param_of.update((v, roots) for v in op.results)
            self.kinds.update((v, kind if is_free else ACTIVE) for v in op.results)

    def _shrinks(self, op: Op) -> bool:
        """Whether an operation reduces its parameters (by elements: a cast is no reduction, nor is a selection)."""
        if op.name in primitives.SELECTIONS:
            return False
        size = max((_elements(self.values[v].shape) for v in reads(op) if self.kinds.get(v) == PARAM), default=0)
        return sum(_elements(self.values[v].shape) for v in op.results) < size


def is_expensive(op: Op) -> bool:
    """Whether an operation is worth cutting before, and not worth running twice."""
    return bool(op.bodies) or op.name in primitives.EXPENSIVE_TO_REPEAT


def forward_ops(op: Op, values: Sequence[Value]) -> frozenset[int]:
    """The forward ops of a scan over micro-batches, by index."""
    body = op.bodies[0]
    marks = {o.index: _jax.derivative(o.source) for o in body.ops}
    if "transpose" not in marks.values():
        return _by_order(op, values)
    defined = {value: o for o in body.ops for value in o.results}
    needed = {o.index for o in body.ops if marks[o.index] == "jvp"}
    for o in reversed(body.ops):
        if o.index in needed:
            needed.update(defined[v].index for v in reads(o) if v in defined)
    backward: set[int] = set()
    for o in body.ops:
        if o.index in needed:
            continue
        reads_backward = any(v in defined and defined[v].index in backward for v in reads(o))
        if marks[o.index] == "transpose" or reads_backward:
            backward.add(o.index)
    return frozenset(o.index for o in body.ops if o.index not in backward)


def _by_order(op: Op, values: Sequence[Value]) -> frozenset[int]:
    """The split of a body without marks: up to the last op that a scalar or a stacked result needs."""
    body, carries = op.bodies[0], op.params["num_carry"]
    outputs = [(number, value) for number, value in enumerate(body.outputs) if isinstance(value, int)]
    live = {value for number, value in outputs if number >= carries or not values[value].shape}
    if not live:
        return frozenset(o.index for o in body.ops)
    last = -1
    for o in reversed(body.ops):
        if live.intersection(o.results):
            last = max(last, o.index)
            live.update(reads(o))
    return frozenset(o.index for o in body.ops if o.index <= last)


def accumulators(body: Block, consts: int, carries: int) -> dict[int, tuple[Op, int]]:
    """Carry number -> (the op that adds to it, the contribution), for carries that are only added to."""
    uses: dict[int, int] = {}
    for op in body.ops:
        for value in reads(op):
            uses[value] = uses.get(value, 0) + 1
    for atom in body.outputs:
        if isinstance(atom, int):
            uses[atom] = uses.get(atom, 0) + 1
    defined = {value: op for op in body.ops for value in op.results}
    found: dict[int, tuple[Op, int]] = {}
    for number in range(carries):
        carry, out = body.inputs[consts + number], body.outputs[number]
        op = defined.get(out) if isinstance(out, int) else None
        if op is None or op.name not in primitives.ADDS or uses.get(carry) != 1 or carry not in op.operands:
            continue
        others = [atom for atom in op.operands if atom != carry]
        if len(others) == 1 and isinstance(others[0], int):
            found[number] = op, others[0]
    return found


def _elements(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out
