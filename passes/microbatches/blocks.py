"""Blocks inside of the loop over micro-batches: its body, and the bodies of control flow in it.

A block is made by demand: every operation that the analysis put inside of the loop is emitted in program order, and its
operands are fetched in the states of its role. A value from outside becomes a constant of the loop, or, cut,
one of its scanned inputs; where a value that is the same for all micro-batches is wanted cut and something computes it
(positions, masks, random bits), its local form makes the block instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite.ir.graph import Atom, Block, Lit, Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import reach, values_in
from alpa_lite.passes.ir.keys import CONTROL_FLOW_JAXPRS
from alpa_lite.passes.ir.loops import Carried, ScanView, WhileView
from alpa_lite.passes.ir.rewriting import renamed_block
from alpa_lite.passes.local.types import rebinding
from alpa_lite.passes.microbatches.builder import Builder, PositionDependent, selected, with_number
from alpa_lite.passes.microbatches.states import (
    AFTER,
    INNER,
    LOCAL,
    PARTIAL,
    WHOLE,
    Role,
    State,
    is_zero,
    outer_operands,
    state_of,
)


class Scope:
    """A block that is being built: the body of the loop, or a body of control flow in it, within its parent.

    Attributes:
      ops: of the block. prepared: new ones before the loop.
      consts, xs: (value of the enclosing block, input of this one).
    """

    def __init__(self, builder: Builder, parent: Scope | None = None):
        self.builder, self.states, self.parent = builder, builder.states, parent
        self.ops: list[Op] = []
        self.prepared: list[Op] = []
        self.env: dict[tuple[int, State], Atom] = {}
        self.consts: list[tuple[Atom, int]] = []
        self.xs: list[tuple[Atom, int]] = []
        self._constants: dict[int, int] = {}

    def port(self, value: int, want: State) -> Atom | None:
        """An input of the block in a wanted state; None if `value` is not one, or is carried by a loop."""
        raise NotImplementedError

    # -- inputs ---------------------------------------------------------------------------------------------------

    def const_input(self, outer: int) -> int:
        """A new input that is the same in every iteration."""
        inner = self.builder.fresh(outer)
        self.consts.append((outer, inner))
        return inner

    def scanned_input(self, outer: int) -> int:
        """A new input that is an iteration's part of a stacked value."""
        inner = self.builder.shaped(outer, self.builder.values[outer].shape[1:])
        self.xs.append((outer, inner))
        return inner

    @functools.cached_property
    def counter(self) -> int:
        """The number of the micro-batch, an int32 scalar."""
        if self.parent is None:
            return self.scanned_input(
                self.trace(lax.iota, [], None, np.int32, self.builder.parts, outside=self.prepared)
            )
        return self.const_input(self.parent.counter)

    def constant(self, value: int) -> int:
        """One of the new graph's constants."""
        if value not in self._constants:
            outer = value if self.parent is None else self.parent.constant(value)
            self._constants[value] = self.const_input(outer)
        return self._constants[value]

    # -- fetching -------------------------------------------------------------------------------------------------

    def fetch(self, atom: Atom, want: State) -> Atom:
        """A value in a wanted state."""
        if isinstance(atom, Lit):
            return self._only_in(0, atom) if want == PARTIAL and not is_zero(atom, {}) else atom
        want = self.builder.cuts.normalise(want)
        key = (atom, want)
        if key not in self.env:
            self.env[key] = self._make(atom, want)
        return self.env[key]

    def fetch_all(self, atoms: Sequence[Atom], states: Sequence[State]) -> list[Atom]:
        """Several values, each in its wanted state."""
        return list(map(self.fetch, atoms, states))

    def define(self, value: int, state: State, atom: Atom) -> None:
        """Notes that a value is available in a state."""
        self.env[value, self.builder.cuts.normalise(state)] = atom

    def _make(self, value: int, want: State) -> Atom:
        base = self.builder.cuts.normalise(self.states.state[value])
        if want == PARTIAL and base != PARTIAL:
            return self._as_partial(value, base)
        if want == LOCAL and base.kind in ("whole", "inner"):
            return self.fetch(value, base)
        if self.builder.parts == 1 and {base.kind, want.kind} == {"sliced", "local"}:
            return self.fetch(value, base)
        found = self.port(value, want)
        if found is not None:
            return found
        if want.kind in ("whole", "inner"):
            return self._whole(value, want)
        assert want.kind == "sliced" and base.kind in ("whole", "inner", "local"), (base, want)
        return self._block(value, want, base)

    def _as_partial(self, value: int, base: State) -> Atom:
        """A value as a sum of summands: in one micro-batch alone, or, of a local one, the terms of a mean."""
        parts, found = self.builder.parts, self.fetch(value, base)
        if base != LOCAL:
            return found if is_zero(value, self.states.producers) else self._only_in(0, found, self.source(value))
        if parts == 1:
            return found
        if not jnp.issubdtype(self.builder.values[value].dtype, jnp.inexact):
            return self._only_in(parts - 1, found, self.source(value))
        return self.trace(with_number, [found], self.source(value), lax.div, parts)

    def _only_in(self, number: int, atom: Atom, source: Any = None) -> Atom:
        """The value in one micro-batch, zeros in the others."""
        return self.trace(selected, [self.counter, atom], source, number)

    def _whole(self, value: int, want: State) -> Atom:
        """A value that this block computes from values that are the same in all micro-batches."""
        op, result = self.states.producers[value]
        if op.name == "optimization_barrier":
            return self.fetch(op.operands[result], want)
        self._emit_copy(op, self.states.whole(op))
        return self.env[value, WHOLE]

    def _block(self, value: int, want: State, base: State) -> Atom:
        """This micro-batch's block of a value that is the same in all of them."""
        found = self._local_block(value, want)
        if found is not None:
            return found
        assert base != LOCAL
        return self.trace(self.builder.cuts.one, [self.counter, self.fetch(value, base)], self.source(value), want)

    def _local_block(self, value: int, want: State) -> Atom | None:
        """The same by the local form of the operation that makes the value; None if it has none."""
        if value not in self.states.producers:
            return None
        op, result = self.states.producers[value]
        if op.name == "optimization_barrier":
            return self.fetch(op.operands[result], want)
        form = None if want.segments else self.states.block_form(value, want.dim)
        if form is None or (self.builder.strided and not self._is_everywhere(op, want.dim)):
            return None
        wanted = []
        for atom, layout in zip(op.operands, form.operands, strict=True):
            state, given = state_of(layout, want.examples), self.states.of(atom)
            if state == WHOLE and given in (INNER, LOCAL):
                state = given
            if state.kind == "sliced" and given[:3] != state[:3] and not self.states.can_block(atom, state.dim):
                return None
            wanted.append(state)
        results = tuple(state_of(layout, want.examples) for layout in form.results)
        self._emit_form(op, Role("form", tuple(wanted), results, form))
        return self.env[value, want]

    def _is_everywhere(self, op: Op, dim: int) -> bool:
        """Whether an operation computes each example by itself, wherever that is in the batch.

        Raises PositionDependent for random draws: whole, they would be held for all micro-batches.
        """
        if op.name == "broadcast_in_dim":
            return dim not in op.params["broadcast_dimensions"]
        if op.name in primitives.ELEMENTWISE:
            return True
        makers = self.states.producers
        made_of = reach([op], lambda o: [makers[v][0] for v in o.reads if v in makers])
        if any(o.name in primitives.DRAWS for o in made_of):
            raise PositionDependent
        return False

    def append(
        self,
        run: Callable[..., Any],
        operands: Sequence[Atom],
        *,
        kind: Hashable = None,
        source: Any = None,
        once: bool = False,
        outside: list[Op] | None = None,
    ) -> list[Atom]:
        """Appends the operations that `run` does on arrays like `operands`, and returns its results.

        Args:
          kind: as for `Builder.traced`.
          source: of the operations, in place of their own.
          once: `run` reads the number of its block to do something in one micro-batch, whichever that is.
          outside: operations outside of the loop, to which they are appended.

        Raises:
          PositionDependent: `run` reads the number of its block, and the examples of a micro-batch are not a block.
        """
        atoms, graph = values_in(operands), self.builder.traced(run, operands, kind)
        names: dict[int, Atom] = dict(zip(graph.block.inputs, atoms, strict=False))
        for value, array in zip(graph.block.inputs[len(atoms) :], graph.constants, strict=True):
            constant = self.builder.constant(graph.values[value], array)
            names[value] = constant if outside is not None else self.constant(constant)
        for op in graph.block.ops:
            if op.name == "axis_index":
                if self.builder.strided and not once:
                    raise PositionDependent
                names[op.results[0]] = self.counter
        made, results = self.builder.inline(graph.block, names, graph.values, source)
        (self.ops if outside is None else outside).extend(made)
        return results

    def trace(
        self,
        function: Callable[..., Any],
        operands: Sequence[Atom],
        source: Any,
        *static: Hashable,
        outside: list[Op] | None = None,
    ) -> Any:
        """The one result of `function(*static, *operands)`, in operations under a source line."""
        run = functools.partial(function, *static)
        return self.append(run, operands, kind=(function, static), source=source, outside=outside)[0]

    def source(self, value: int) -> Any:
        """The source line of a value; None of an argument."""
        return self.states.producers[value][0].source if value in self.states.producers else None

    # -- operations -----------------------------------------------------------------------------------------------

    def emit(self, op: Op) -> None:
        """Emits one operation as it was decided."""
        role = self.states.roles.get(op.index)
        if role is None:
            return
        match role.kind:
            case "whole":
                if op.has_effects and self.parent is not None:  # it must run even if it is not read
                    self._emit_copy(op, self.states.whole(op))
            case "form":
                self._emit_form(op, role)
            case "copy":
                self._emit_copy(op, role)
            case "map":
                params = {k: v for k, v in op.params.items() if k != "jaxpr"}
                self._emit_copy(op, role, {**params, "length": role.length})
            case "barrier":
                self._emit_barrier(op, role)
            case _:
                self._emit_control(op, role)

    def _emit_barrier(self, op: Op, role: Role) -> None:
        """Emits the part of a barrier whose values are in the loop."""
        outside = (AFTER,) if self.parent is not None else (AFTER, WHOLE)
        kept = [i for i, s in enumerate(role.results) if s not in outside and not isinstance(op.operands[i], Lit)]
        if not kept:
            return
        operands = [self.fetch(op.operands[i], role.operands[i]) for i in kept]
        results = [self.builder.new_part(op.results[i], role.results[i]) for i in kept]
        self.ops.append(self.builder.copy(op, operands, results))
        for i, result in zip(kept, results, strict=True):
            self.define(op.results[i], role.results[i], result)

    def _define(self, op: Op, role: Role) -> list[int]:
        results = [self.builder.new_part(value, state) for value, state in zip(op.results, role.results, strict=True)]
        for value, state, result in zip(op.results, role.results, results, strict=True):
            self.define(value, state, result)
        return results

    def _emit_copy(self, op: Op, role: Role, params: Any = None) -> None:
        """Emits the operation itself on the operands of its role, with other parameters perhaps."""
        operands = self.fetch_all(op.operands, role.operands)
        self.ops.append(self.builder.copy(op, operands, self._define(op, role), params=params))

    def _emit_form(self, op: Op, role: Role) -> None:
        form = role.form
        assert form is not None
        params = rebinding(form)
        if params is not None and not role.scale:
            self._emit_copy(op, role, params)
            return
        operands = self.fetch_all(op.operands, role.operands)
        # The operand that a scatter adds to is taken in one micro-batch alone, whatever examples that has.
        once = op.name in primitives.SCATTER_ADDITIONS and role.operands[0].kind != "sliced"
        kind = source = None
        if op.name in primitives.DRAWS:  # many operations, the same in every layer, perhaps under another source
            kind, source = ("draw", op.key, op.ctx, form.operands, form.results), op.source
        found = self.append(form.run, operands, kind=kind, source=source, once=once)
        for value, state, atom in zip(op.results, role.results, found, strict=True):
            if role.scale and state == LOCAL and self.builder.parts > 1:
                atom = self.trace(with_number, [atom], op.source, lax.mul, self.builder.parts)
            self.define(value, state, atom)

    def _emit_control(self, op: Op, role: Role) -> None:
        """Emits control flow on one micro-batch of the values that its bodies read."""
        results = self._define(op, role)
        start: list[Atom] = []
        if op.name != "cond":
            taken = ScanView(op).taken if op.name == "scan" else WhileView(op).taken
            start = self.fetch_all(taken(op.operands).carry, taken(role.operands).carry)
        inner = [Nested(self, op, number, role) for number in range(len(op.bodies))]
        if op.name == "scan":
            made = self._scan(ScanView(op), inner[0], start, results, role.length)
        elif op.name == "while":
            consts, body_consts = ([atom for atom, _ in one.consts] for one in inner)
            params = dict(op.params, cond_nconsts=len(consts), body_nconsts=len(body_consts))
            blocks = tuple([one.block((*(v for _, v in one.consts), *one.carried)) for one in inner])
            made = replace(op, params=params, operands=(*consts, *body_consts, *start), bodies=blocks)
        else:
            made = self._cond(op, inner, role)
        params = {name: value for name, value in made.params.items() if name not in CONTROL_FLOW_JAXPRS}
        self.ops.append(
            replace(made, index=self.builder.index(op.index), params=params, results=tuple(results), key=None)
        )

    def _scan(self, view: ScanView, inner: Nested, start: Sequence[Atom], results: Sequence[int], length: int) -> Op:
        outputs, ends = view.given(inner.outputs), view.given(results)
        carries = list(map(Carried, start, inner.carried, outputs.carry, ends.carry))
        ys = list(zip(outputs.ys, ends.ys, strict=True))
        return view.rebuilt(inner.ops, inner.consts, carries, inner.xs, ys, length=length)

    def _cond(self, op: Op, inner: Sequence[Nested], role: Role) -> Op:
        """The branches on the values that any of them reads."""
        taken = list(dict.fromkeys(values_in(a for one in inner for a, _ in one.consts)))
        blocks = []
        for one in inner:
            own: dict[Atom, int] = {}
            names: dict[int, int] = {}
            for atom, value in one.consts:
                names[value] = own.setdefault(atom, value)
            inputs = tuple(own[a] if a in own else self.builder.fresh(a) for a in taken)
            blocks.append(renamed_block(one.block(inputs), names))
        predicate = self.fetch(op.operands[0], role.operands[0])
        return replace(op, operands=(predicate, *taken), bodies=tuple(blocks))


class Nested(Scope):
    """A body of control flow inside of the loop. Values that it reads from outside become inputs on request.

    Attributes:
      carried: new inputs for the values that the loop carries.
      outputs: of the body, in the states that the role wants.
    """

    def __init__(self, parent: Scope, op: Op, number: int, role: Role) -> None:
        super().__init__(parent.builder, parent)
        body, atoms = op.bodies[number], outer_operands(op)[number]
        scanned = ScanView(op).inputs.xs if op.name == "scan" else ()
        self._ports = {v: (a, v in scanned) for v, a in zip(body.inputs, atoms, strict=True) if a is not None}
        wanted: Sequence[State] = role.inner
        held = [v for v in body.inputs if v not in self._ports]
        if op.name == "while" and number == 0:
            wanted = [self.states.of(body.outputs[0])]
        self.carried = [self.builder.new_part(v, state) for v, state in zip(held, role.inner, strict=False)]
        for value, state, part in zip(held, role.inner, self.carried, strict=False):
            self.define(value, state, part)
        for inner in body.ops:
            self.emit(inner)
        self.outputs = tuple(self.fetch_all(body.outputs, wanted))

    def block(self, inputs: Sequence[int]) -> Block:
        """The body, given the inputs of all that it reads."""
        return Block(tuple(inputs), tuple(self.ops), self.outputs)

    def port(self, value: int, want: State) -> Atom | None:
        """An input that the enclosing block gives."""
        if value not in self._ports:
            return None
        atom, is_scanned = self._ports[value]
        assert self.parent is not None
        outer = self.parent.fetch(atom, want.shift(1) if is_scanned else want)
        if isinstance(outer, Lit):
            return outer
        return self.scanned_input(outer) if is_scanned else self.const_input(outer)
