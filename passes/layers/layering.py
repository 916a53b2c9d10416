"""The forward pass of a micro-batch as layers, and layers as stages.

`cut_into_layers` finds the forward pass in the body of the scan over micro-batches , orders it so that what
needs no activation stands before its first user, and cuts it into layers (`layers.cuts`): contiguous groups of
forward operations that balance seconds and cut few bytes, identical where the model repeats itself. `assign` gives
every operation of the step a stage, once layers have been grouped into stages (`layers.assignment`).

Nothing here depends on a device: seconds are those of a nominal accelerator and serve only to compare layers.

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

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Op, Traced, Value
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import append_behind_makers, find_needed, producers, reach, values_in
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.layers import cuts
from alpa_lite.passes.layers.types import Layer, Layering

PARAM, INPUT, ACTIVE = 1, 2, 3


def cut_into_layers(traced: Traced, scan: int, rules: Mapping[object, Rule], *, max_layers: int = 16) -> Layering:
    """Cuts the forward pass of a micro-batch into layers.

    Args:
      traced: a step whose micro-batches run in a scan of the top block.
      rules: of all ops, as `factors.rules_of` gives them.

    Raises:
      ValueError: `scan` is not a scan of the top block.
      OptionError: `max_layers` is less than one; the scan has no forward operation.
    """
    if max_layers < 1:
        raise OptionError(f"max_layers={max_layers} leaves no layer; pass 1 or more")
    parts = split(traced, scan, rules)
    values = traced.graph.values
    if not parts.forward:
        raise OptionError(f"scan={scan} has no forward operation to cut into layers; pass the scan over micro-batches")
    order = _ordered(scan_op(traced, scan).bodies[0].ops, parts)
    crossing = [*cuts.crossing_activation_bytes(order, parts.free_ops, values).tolist(), 0]
    prices = [cuts.price(op, rules, values) for op in order]
    made = cuts.free_values(order, parts.free_ops, values)

    def layers(starts: Sequence[int]) -> list[Layer]:
        """Returns the order cut at some places."""
        found = []
        for start, stop in itertools.pairwise([*starts, len(order)]):
            some = order[start:stop]
            seconds = sum(prices[start:stop])
            mark = cuts.fingerprint(some, values, made)
            found.append(Layer(tuple(op.index for op in some), seconds, mark, crossing[stop - 1]))
        return found

    atoms = layers([0, *_candidates(order, parts.free_ops, crossing)])
    ends = itertools.accumulate(cuts.cut(atoms, max_layers), initial=0)
    sizes = [0, *itertools.accumulate(len(atom.ops) for atom in atoms)]
    found = layers([sizes[end] for end in ends][:-1])
    return Layering(traced, scan, parts.forward, tuple(found), parts.free_ops)


def _ordered(ops: Sequence[Op], parts: Split) -> list[Op]:
    """Returns the forward ops: program order, each free op right before its first user that is not free.

    Reductions of parameters (a regulariser) stand before the first other user of these parameters. A free op that only
    the backward pass reads keeps its place.
    """
    forward = [op for op in ops if op.index in parts.forward]
    defined = producers(forward)
    reduces = {
        op.index: parts.param_of[op.results[0]]
        for op in forward
        if op.index not in parts.free_ops and op.results and op.results[0] in parts.param_of
    }
    used = {v for op in forward for v in op.reads}
    out: dict[Op, None] = {}
    early: dict[int, list[Op]] = {}
    for op in forward:
        for root in reduces.get(op.index, ()):
            early.setdefault(root, []).append(op)
    for op in forward:
        if op.index in parts.free_ops and not used.isdisjoint(op.results):
            continue
        if early and op.index not in reduces and op.index not in parts.free_ops:
            roots = {root for v in op.reads for root in parts.param_of.get(v, ())}
            for follower in [f for root in sorted(roots) for f in early.pop(root, [])]:
                if all(
                    v not in defined or defined[v].index in parts.free_ops for v in follower.reads
                ):  # may be anywhere
                    append_behind_makers(out, follower, defined)
        append_behind_makers(out, op, defined)
    for op in forward:
        append_behind_makers(out, op, defined)
    return list(out)


def _candidates(order: Sequence[Op], free: frozenset[int], crossing: Sequence[int]) -> list[int]:
    """Ends of atoms: after ops that are not free, where the next such op raises the bytes cut, or is expensive."""
    places = [i for i in range(len(order) - 1) if order[i].index not in free]
    if places and all(op.index in free for op in order[places[-1] + 1 :]):
        places.pop()  # what follows would be no layer
    out = []
    for i, following in itertools.pairwise([*places, len(order) - 1]):
        rise = crossing[following] - crossing[i] if following < len(order) - 1 else 1
        if rise > 0 or (rise == 0 and is_expensive(order[following])):
            out.append(i + 1)
    return out


# -- forward and backward ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Split:
    """The outcome for one micro-batch scan.

    Attributes:
      forward: indices of the body's forward ops.
      free_ops: indices of the free ops of the body and of the top block.
      param_of: value of the body that is made of parameters alone -> the body's inputs that it is made of.
    """

    forward: frozenset[int]
    free_ops: frozenset[int]
    param_of: Mapping[int, frozenset[int]]


def split(traced: Traced, scan: int, rules: Mapping[object, Rule]) -> Split:
    """Classifies the operations of a step whose micro-batches run in the scan with index `scan`."""
    op, values, top = scan_op(traced, scan), traced.graph.values, traced.graph.block.ops
    view, forward = ScanView(op), forward_ops(op, values)
    backward = {o.index for o in view.body.ops} - forward  # those on parameters are never free: they follow them
    opaque = {key for key, rule in rules.items() if rule.source == "opaque"}
    kinds: dict[int, int] = {}
    free: set[int] = set()
    param_of: dict[int, frozenset[int]] = {}

    def shrinks(o: Op) -> bool:
        """Whether an operation reduces its parameters (by elements: a cast is not a reduction, nor is a selection)."""
        size = max((math.prod(values[v].shape) for v in o.reads if kinds.get(v) == PARAM), default=0)
        return o.name not in primitives.SELECTIONS and sum(math.prod(values[v].shape) for v in o.results) < size

    def walk(ops: Iterable[Op]) -> None:
        for o in ops:
            kind = 0
            for value in o.reads:
                kind |= kinds.get(value, 0)
            is_free = kind != ACTIVE and not (o.has_effects or is_expensive(o) or o.key in opaque)
            if is_free and kind == PARAM:
                is_free = o.index not in backward and not shrinks(o)
            if is_free:
                free.add(o.index)
            if kind == PARAM:
                roots = frozenset().union(*[param_of.get(v, frozenset()) for v in o.reads])
                param_of.update(dict.fromkeys(o.results, roots))
            kinds.update(dict.fromkeys(o.results, kind if is_free else ACTIVE))

    for number, value in enumerate(traced.graph.block.inputs):
        stays, dtype = number < len(traced.arguments) and traced.arguments[number].is_resident, values[value].dtype
        is_number = jnp.issubdtype(dtype, jnp.inexact) and not jnp.issubdtype(dtype, jax.dtypes.extended)
        kinds[value] = PARAM if stays and is_number else INPUT
    walk(top[: top.index(op)])
    for number, value in enumerate(view.inputs.carry):
        kinds[value] = 0 if number in view.accumulators else ACTIVE
    for operand, value in (*view.consts, *view.xs):
        kinds[value] = kinds.get(operand, 0) if isinstance(operand, int) else 0
        if kinds[value] == PARAM:
            param_of[value] = frozenset({value})
    walk(view.body.ops)
    kinds.update((result, ACTIVE) for result in op.results)
    walk(top[top.index(op) + 1 :])
    return Split(forward, frozenset(free), param_of)


def is_expensive(op: Op) -> bool:
    """Returns whether an operation is worth cutting before, and not worth running twice."""
    return bool(op.bodies) or op.name in primitives.EXPENSIVE_TO_REPEAT


def forward_ops(op: Op, values: Sequence[Value]) -> frozenset[int]:
    """Returns the forward ops of a scan over micro-batches, by index."""
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
    """Returns the split of a body without marks: up to the last op that a scalar or a stacked result needs."""
    view = ScanView(op)
    carry, ys = map(values_in, view.outputs)
    returned = [*ys, *(v for v in carry if not values[v].shape)]
    if not returned:
        return frozenset(o.index for o in view.body.ops)
    makers = producers(view.body.ops)
    last = max((makers[v].index for v in find_needed(returned, makers) if v in makers), default=-1)
    return frozenset(o.index for o in view.body.ops if o.index <= last)
