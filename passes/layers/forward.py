"""Classification of the operations of a micro-batch: forward or backward, and whether they need an activation.

Forward and backward. JAX marks every equation of a differentiated function in its name stack: `jvp(...)` for the
function and what its derivative needs of it, `transpose(jvp(...))` for the reverse pass. The outermost mark counts.
Data flow corrects the marks: what a marked forward operation reads is forward (a gradient taken inside the loss, or
before it, for a penalty or an adversarial example); an unmarked operation is backward if it reads something backward
(accumulation, clipping). Where nothing is marked, everything after the last operation that a scalar or stacked result
needs is backward, which holds for every trace of reverse mode: the transposed equations come after the loss.

Kinds of values. Every value depends on parameters (state), on inputs (the batch, keys, counters), on both, or on
neither. Those of both are activations. An operation without activations is *free*: it stands wherever its users are,
and may run once on each stage, unless it is expensive, has effects, or reduces parameters (their norm): its result is
then cheaper to move than its operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.ir.graph import Op, Traced, Value
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import needed, producers, reach, values_in
from alpa_lite.passes.ir.loops import ScanView, scan_op

PARAM, INPUT, ACTIVE = 1, 2, 3


@dataclass(frozen=True, eq=False)
class Split:
    """The outcome for one micro-batch scan.

    Attributes:
      forward: indices of the body's forward ops.
      free: indices of the free ops of the body and of the top block.
      param_of: value of the body that is made of parameters alone -> the body's inputs that it is made of.
    """

    forward: frozenset[int]
    free: frozenset[int]
    param_of: Mapping[int, frozenset[int]]


def split(traced: Traced, scan: int, rules: Mapping[object, Rule]) -> Split:
    """Classifies the operations of a step whose micro-batches run in the scan with index `scan`."""
    op = scan_op(traced, scan)
    forward = forward_ops(op, traced.graph.values)
    opaque = {key for key, rule in rules.items() if rule.source == "opaque"}
    kinds: dict[int, int] = {}
    for number, value in enumerate(traced.graph.block.inputs):
        stays = number < len(traced.arguments) and traced.arguments[number].stays
        is_number = jnp.issubdtype(traced.graph.values[value].dtype, jnp.inexact)
        is_key = jnp.issubdtype(traced.graph.values[value].dtype, jax.dtypes.extended)
        kinds[value] = PARAM if stays and is_number and not is_key else INPUT
    walk = _Walk(traced, kinds, opaque)
    top = traced.graph.block.ops
    walk.run(top[: top.index(op)], frozenset())
    view = ScanView(op)
    for number, value in enumerate(view.inputs.carry):
        kinds[value] = 0 if number in view.accumulators else ACTIVE
    for operand, value in (*view.consts, *view.xs):
        kinds[value] = kinds.get(operand, 0) if isinstance(operand, int) else 0
        if kinds[value] == PARAM:
            walk.param_of[value] = frozenset({value})
    walk.run(view.body.ops, frozenset(o.index for o in view.body.ops) - forward)
    kinds.update((result, ACTIVE) for result in op.results)
    walk.run(top[top.index(op) + 1 :], frozenset())
    return Split(forward, frozenset(walk.free), walk.param_of)


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
            operands = op.reads
            kind = 0
            for value in operands:
                kind |= self.kinds.get(value, 0)
            is_free = kind != ACTIVE and not (op.has_effects or is_expensive(op) or op.key in self.opaque)
            if is_free and kind == PARAM:
                is_free = op.index not in backward and not self._shrinks(op)
            if is_free:
                self.free.add(op.index)
            if kind == PARAM:
                roots = frozenset().union(*[self.param_of.get(v, frozenset()) for v in operands])
                self.param_of.update(dict.fromkeys(op.results, roots))
            self.kinds.update(dict.fromkeys(op.results, kind if is_free else ACTIVE))

    def _shrinks(self, op: Op) -> bool:
        """Whether an operation reduces its parameters (by elements: a cast is no reduction, nor is a selection)."""
        if op.name in primitives.SELECTIONS:
            return False
        size = max((math.prod(self.values[v].shape) for v in op.reads if self.kinds.get(v) == PARAM), default=0)
        return sum(math.prod(self.values[v].shape) for v in op.results) < size


def is_expensive(op: Op) -> bool:
    """Whether an operation is worth cutting before, and not worth running twice."""
    return bool(op.bodies) or op.name in primitives.EXPENSIVE_TO_REPEAT


def forward_ops(op: Op, values: Sequence[Value]) -> frozenset[int]:
    """The forward ops of a scan over micro-batches, by index."""
    body = op.bodies[0]
    marks = {o.index: _jax.derivative(o.source) for o in body.ops}
    if "transpose" not in marks.values():
        return _by_order(op, values)
    makers = producers(body.ops)

    def read(o: Op) -> list[Op]:
        return [makers[value] for value in o.reads if value in makers]

    forward = reach([o for o in body.ops if marks[o.index] == "jvp"], read)
    backward: set[Op] = set()
    for o in body.ops:
        if o not in forward and (marks[o.index] == "transpose" or not backward.isdisjoint(read(o))):
            backward.add(o)
    return frozenset(o.index for o in body.ops if o not in backward)


def _by_order(op: Op, values: Sequence[Value]) -> frozenset[int]:
    """The split of a body without marks: up to the last op that a scalar or a stacked result needs."""
    view = ScanView(op)
    carry, ys = map(values_in, view.outputs)
    returned = [*ys, *(v for v in carry if not values[v].shape)]
    if not returned:
        return frozenset(o.index for o in view.body.ops)
    makers = producers(view.body.ops)
    last = max((makers[v].index for v in needed(returned, makers) if v in makers), default=-1)
    return frozenset(o.index for o in view.body.ops if o.index <= last)
