"""The transfer function of the analysis: the role of one operation in the loop, given the states of its operands.

An operation whose operands are sliced along factor f of its rule shards f over the axis of time: its local form is
the operation of one micro-batch, unless the form communicates, since no micro-batch sees another. Results that lose f
by a sum are partial, and stay so as long as their readers are linear in them.

Control flow is analysed through its bodies; the states of carried values are the least fixed point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from alpa_lite.ir.graph import Block, Lit, Op
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.loops import ScanView, WhileView
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.passes.microbatches.lattice import (
    AXIS,
    INNER,
    LOCAL,
    PARTIAL,
    WHOLE,
    State,
    fixed_point,
    join,
    sliced_state,
    state_of,
)
from alpa_lite.passes.microbatches.segments import segmented_role
from alpa_lite.passes.microbatches.states import Failure, Role, StepStates, linear_operands
from alpa_lite.passes.tracing.conversion import ELEMENTWISE

ONCE = "its effect happens once, for the whole batch"

_OWN_FORMS = primitives.SCATTERS | primitives.DRAWS | {"gather"}
"""Operations whose form depends on more than their key, such as on how JAX draws."""


@dataclass(eq=False)
class Transfer(StepStates):
    """The states of one graph, with their transfer functions.

    Attributes:
      local_reductions: those (op indices) that are taken within the micro-batch.
    """

    local_reductions: frozenset[int] = field(default=frozenset(), init=False)
    _segments: dict[int, tuple[int, ...]] = field(
        default_factory=dict, init=False
    )  # size of a dim -> those it had last
    _known: dict[tuple[Any, tuple[State, ...]], Role] = field(default_factory=dict, init=False)

    def classify(self, op: Op, states: tuple[State, ...]) -> Role:
        """Returns the role of an operation on operands in these states, none of them `after`.

        Operations with one key have one role, where that depends on nothing but the states.

        Raises:
          Failure: it has no exact form.
        """
        key = op.key, states
        if op.index not in self.local_reductions and key in self._known:
            return self._known[key]
        found = self._classify(op, states)
        is_common = found.kind in ("whole", "copy")
        if found.kind == "form" and found.form is not None:
            is_common = found.form.own is None and found.operands == states and not found.scale
            is_common = is_common and op.name not in _OWN_FORMS
        if is_common:
            self._known[key] = found
        return found

    def _classify(self, op: Op, states: tuple[State, ...]) -> Role:
        kinds = {s.kind for s in states}
        if kinds <= {"whole"}:
            return Role.for_whole_batch(op)
        if op.has_effects and self.parts > 1 and not (op.bodies and kinds & {"sliced", "partial"}):
            raise Failure(find_effect(op), ONCE)
        if kinds <= {"whole", "inner", "local"}:
            result = LOCAL if "local" in kinds else INNER
            return Role("copy", states, (result,) * len(op.results))
        if op.bodies:
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[op.name](op, states)
        if "partial" in kinds:
            wanted = None
            if "sliced" not in kinds:
                wanted = linear_operands(op, [s == PARTIAL for s in states], self.values)
            if wanted is None:
                raise Failure(op, "it needs the sum over the whole batch", op.reads)
            operands = tuple(PARTIAL if w else s for w, s in zip(wanted, states, strict=True))
            return Role("copy", operands, (PARTIAL,) * len(op.results))
        return self._cut(op, states)

    # -- sliced operands ------------------------------------------------------------------------------------------

    def _cut(self, op: Op, states: Sequence[State]) -> Role:
        """Returns the local form of an operation that reads sliced operands."""
        number, state = next((i, s) for i, s in enumerate(states) if s.kind == "sliced")
        rule = self.rules[op.key]
        factors = rule.operands[number][state.dim]
        form = self.form(op, factors[0]) if factors else None
        found = None if form is None else self._fit(op, states, form)
        if found is None and self.parts > 1:
            found = segmented_role(op, states, self.values, self.parts, self._segments)
            for value, one in zip(op.results, () if found is None else found.results, strict=False):
                if one.segments:
                    size = self.values[value].shape[one.dim]
                    self._segments[size] = one.segment_sizes(size)
        if found is None:
            raise Failure(op, rule.reason or "it works across the examples of the batch")
        return found

    def _fit(self, op: Op, states: Sequence[State], form: LocalForm) -> Role | None:
        """Returns the role for a form, if the operands can be had as it wants them."""
        wanted = self.states_for(op, form, states)
        if wanted is None:
            return None
        results = tuple(state_of(layout) for layout in form.results)
        if any(state.segments for state in states):
            found = self._in_segments(op, states, form, wanted, results)
            if found is None:
                return None
            wanted, results = found
        if WHOLE in results:
            return None
        scale = op.index in self.local_reductions and PARTIAL in results
        if scale:
            results = tuple(LOCAL if s == PARTIAL else s for s in results)
        return Role("form", tuple(wanted), results, form, scale=scale)

    def _in_segments(
        self, op: Op, states: Sequence[State], form: LocalForm, wanted: Sequence[State], results: Sequence[State]
    ) -> tuple[list[State], tuple[State, ...]] | None:
        """The states of operands and results if the factor that is cut consists of segments; None if they cannot be."""
        rule = self.rules[op.key]
        segments, sizes = set[tuple[int, ...]](), set[int]()
        for dims, want, given in zip(rule.operands, wanted, states, strict=True):
            if want.kind == "sliced" and given.kind not in ("whole", "inner"):
                segments.add(given.segments)
                sizes.add(rule.factors[dims[want.dim][0]].size)
        kept, *others = segments
        if others or any(size * n % (sum(kept) * self.parts) for size in sizes for n in kept):
            return None
        if form.own is not None and self._is_positional(op, form):
            return None

        def cut(state: State) -> State:
            return state._replace(segments=kept) if state.kind == "sliced" else state

        return list(map(cut, wanted)), tuple(map(cut, results))

    def _is_positional(self, op: Op, form: LocalForm) -> bool:
        """Returns whether a form computes with the number of its block."""
        if op.name in primitives.DRAWS:
            return True
        specs = []
        for atom, layout in zip(op.operands, form.operands, strict=True):
            aval = atom.aval if isinstance(atom, Lit) else self.values[atom].aval
            shape = tuple(n // self.parts if axes else n for n, axes in zip(aval.shape, layout.dims, strict=True))
            specs.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        return "axis_index" in str(jax.make_jaxpr(form.run, axis_env=[(AXIS, self.parts)])(*specs))

    # -- control flow ---------------------------------------------------------------------------------------------

    def _body(self, block: Block, given: Sequence[State]) -> list[State]:
        """Analyses a nested body, whose inputs are in the given states."""
        self.state.update(zip(block.inputs, given, strict=True))
        for op in block.ops:
            inner, free = self.read(op), self.is_free(op)
            if op.name == "optimization_barrier":
                self.decide(op, Role("barrier", inner, inner))
                continue
            try:
                found = self.classify(op, inner)
            except Failure:
                if not free:
                    raise
                found = Role.for_whole_batch(op)
            if free and PARTIAL in found.results:
                found = Role.for_whole_batch(op)
            if found.kind == "whole" and op.has_effects and self.parts > 1:
                raise Failure(find_effect(op), ONCE)
            self.decide(op, found)
        return [self.state_of(a) for a in block.outputs]

    def _fixed_point(
        self, op: Op, start: Sequence[State], run: Callable[[list[State]], list[State]]
    ) -> tuple[list[State], list[State]]:
        """Runs a body until the states of carried values are stable. Returns those, and those of its other outputs."""

        def joined(before: State, out: State) -> State:
            both = join(before, out)
            if both is None:
                raise Failure(op, f"its carry is {_describe(before)} at first and {_describe(out)} later")
            return both

        return fixed_point(start, run, joined)

    def _scan(self, op: Op, states: Sequence[State]) -> Role:
        view = ScanView(op)
        consts, start, stacked = view.split_operands(states)
        if any(s.kind == "sliced" and s.dim == 0 for s in stacked):
            return self._map(view, states)
        xs = [s.shift(-1) for s in stacked]
        carry, ys = self._fixed_point(op, start, lambda carry: self._body(view.body, [*consts, *carry, *xs]))
        results, operands = (*carry, *(s.shift(1) for s in ys)), (*consts, *carry, *stacked)
        return Role("control", operands, results, inner=(*carry, *ys))

    def _map(self, view: ScanView, states: Sequence[State]) -> Role:
        """A scan over the examples: a micro-batch scans over its own, if all carried values are sums over examples."""
        op, (consts, start, xs) = view.op, view.split_operands(states)
        failure = Failure(op, "it loops over the examples of the batch, and each needs those before it")
        if view.length % self.parts or any(s != WHOLE and s != sliced_state(0) for s in xs):
            raise failure
        if any(s.kind in ("sliced", "partial") for s in consts):
            raise Failure(op, "it loops over the examples of the batch, and each needs all of them", op.reads)
        uses = flow.uses(view.body)
        carried = []
        for number, (carry, state) in enumerate(zip(view.carries, start, strict=True)):
            added = number in view.additions and isinstance(carry.output, int) and uses[carry.output] == 1
            if carry.output == carry.input and uses[carry.input] == 1 and state.kind in ("whole", "inner"):
                carried.append(state)
            elif added and state.kind != "sliced":
                carried.append(PARTIAL)
            else:
                raise failure
        results = (*carried, *[sliced_state(0)] * len(view.results.ys))
        operands = (*consts, *carried, *[sliced_state(0)] * len(xs))
        others = {name: value for name, value in op.params.items() if name != "jaxpr"}
        params = {**others, "length": view.length // self.parts}
        return Role("map", operands, results, params=params)

    def _while(self, op: Op, states: Sequence[State]) -> Role:
        cond, body = op.bodies
        cond_consts, body_consts, start = WhileView(op).split_operands(states)
        last = (o for o in cond.ops if o.name == "reduce_or" and o.results == cond.outputs)
        any_of = next(last, None) if op.params.get(ELEMENTWISE) else None  # it goes on while any example does
        if any_of is not None:
            cond = Block(cond.inputs, tuple(o for o in cond.ops if o is not any_of), any_of.operands)

        def run(carry: list[State]) -> list[State]:
            (predicate,) = self._body(cond, [*cond_consts, *carry])
            if any_of is not None:  # examples do not see how long others run: a micro-batch ends with its own
                one = LOCAL if predicate.kind == "sliced" else predicate
                self.decide(any_of, Role("copy", (predicate,), (one,)))
                predicate = one
            if predicate.kind in ("sliced", "partial"):
                raise Failure(op, "its length depends on the examples of the batch", op.reads)
            outputs = self._body(body, [*body_consts, *carry])
            return outputs if any_of is not None else _decided_by(predicate, outputs)

        carry = tuple(self._fixed_point(op, start, run)[0])
        operands = (*cond_consts, *body_consts, *carry)
        return Role("control", operands, carry, inner=carry)

    def _cond(self, op: Op, states: Sequence[State]) -> Role:
        if states[0].kind in ("sliced", "partial"):
            raise Failure(op, "its predicate depends on the examples of the batch", op.reads[:1])
        results: list[State] | None = None
        for branch in op.bodies:
            outputs = self._body(branch, states[1:])
            joined = [join(a, b) for a, b in zip(results or outputs, outputs, strict=True)]
            if None in joined:
                raise Failure(op, "its branches differ in how their results depend on the batch")
            results = _decided_by(states[0], [s for s in joined if s is not None])
        assert results is not None
        return Role("control", tuple(states), tuple(results), inner=tuple(results))


def find_effect(op: Op) -> Op:
    """Returns the operation with effects among those of control flow."""
    return next((find_effect(inner) for body in op.bodies for inner in body.ops if inner.has_effects), op)


def _decided_by(predicate: State, outputs: list[State]) -> list[State]:
    """The states of values that a predicate chooses: under a local one none is the same in all micro-batches."""
    return [LOCAL if predicate == LOCAL and s.kind in ("whole", "inner") else s for s in outputs]


def _describe(state: State) -> str:
    if state.kind == "sliced":
        return f"one value for each example along dim {state.dim}"
    return "a sum over the batch" if state.kind == "partial" else "the same for all examples"
