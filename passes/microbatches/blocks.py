"""Blocks inside of the loop over micro-batches: its body, and the bodies of control flow in it.

A block is made by demand: every operation that the analysis put inside of the loop is emitted in program order, and its
operands are fetched in the states of its role. A value from outside becomes a constant of the loop, or, cut,
one of its scanned inputs; where a value that is the same for all micro-batches is wanted cut and something computes it
(positions, masks, random bits), its local form makes the block instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from alpa_lite.ir.graph import Atom, Block, Lit, Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import reach, values_in
from alpa_lite.passes.ir.keys import CONTROL_FLOW_JAXPRS
from alpa_lite.passes.ir.loops import ScanView, WhileView, ports
from alpa_lite.passes.ir.rewriting import rename_block
from alpa_lite.passes.microbatches.builder import Builder, PositionDependent, pair_with_number, select_microbatch
from alpa_lite.passes.microbatches.lattice import AFTER, LOCAL, PARTIAL, WHOLE, State, state_of
from alpa_lite.passes.microbatches.states import Role, is_zero


class Scope:
    """A block that is being built: the body of the loop, or a body of control flow in it, within its parent.

    It reads values of its parents as they are; when it is finished (`block`), they become its constants.

    Attributes:
      ops: of the block.
      carried: its inputs for what a loop carries.
      xs: (stacked value of the parent, input for an iteration's part of it).
      outputs: of the block.
    """

    def __init__(self, builder: Builder, parent: Scope | None = None):
        self.builder, self.states, self.parent = builder, builder.states, parent
        self.ops: list[Op] = []
        self.env: dict[tuple[int, State], Atom] = {}
        self.carried: list[int] = []
        self.xs: list[tuple[Atom, int]] = []
        self.outputs: Sequence[Atom] = ()

    def port(self, value: int, want: State) -> Atom | None:
        """Returns a value of a parent in a wanted state; None if `value` is made here, or is carried by a loop."""
        raise NotImplementedError

    @property
    def counter(self) -> int:
        """The number of the micro-batch, an int32 scalar."""
        assert self.parent is not None
        return self.parent.counter

    # -- inputs ---------------------------------------------------------------------------------------------------

    def scanned_input(self, outer: int) -> int:
        """Returns a new input that is an iteration's part of a stacked value."""
        inner = self.builder.new_value_of_shape(outer, self.builder.values[outer].shape[1:])
        self.xs.append((outer, inner))
        return inner

    def free_values(self) -> list[int]:
        """Returns the values of parents that the block reads, in order."""
        made = {*self.carried, *(value for _, value in self.xs), *(value for op in self.ops for value in op.results)}
        reads = (*(value for op in self.ops for value in op.reads), *values_in(self.outputs))
        return [value for value in dict.fromkeys(reads) if value not in made]

    def block(self, consts: Sequence[int]) -> Block:
        """Returns the block, with values of parents as its first inputs, under names of its own."""
        names: dict[int, Atom] = {value: self.builder.new_value(value) for value in consts}
        inputs = (*values_in(names.values()), *self.carried, *(value for _, value in self.xs))
        return rename_block(Block(inputs, tuple(self.ops), tuple(self.outputs)), names)

    # -- fetching -------------------------------------------------------------------------------------------------

    def fetch(self, atom: Atom, want: State) -> Atom:
        """Returns a value in a wanted state."""
        if isinstance(atom, Lit):
            return self._only_in(0, atom) if want == PARTIAL and not is_zero(atom, {}) else atom
        key = (atom, want)
        if key not in self.env:
            self.env[key] = self._make(atom, want)
        return self.env[key]

    def fetch_all(self, atoms: Sequence[Atom], states: Sequence[State]) -> list[Atom]:
        """Returns several values, each in its wanted state."""
        return list(map(self.fetch, atoms, states))

    def define(self, value: int, state: State, atom: Atom) -> None:
        """Notes that a value is available in a state."""
        self.env[value, state] = atom

    def _make(self, value: int, want: State) -> Atom:
        base = self.states.state[value]
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
        """Returns a value as a sum of summands: in one micro-batch alone, or, of a local one, the terms of a mean."""
        parts, found, source = self.builder.parts, self.fetch(value, base), self.source(value)
        if base != LOCAL:
            return found if is_zero(value, self.states.producers) else self._only_in(0, found, source)
        if parts == 1:
            return found
        if not jnp.issubdtype(self.builder.values[value].dtype, jnp.inexact):
            return self._only_in(parts - 1, found, source)
        return self.trace(pair_with_number, [found], source, lax.div, parts)

    def _only_in(self, number: int, atom: Atom, source: Any = None) -> Atom:
        """Returns the value in one micro-batch, zeros in the others."""
        return self.trace(select_microbatch, [self.counter, atom], source, number)

    def _whole(self, value: int, want: State) -> Atom:
        """Returns a value that this block computes from values that are the same in all micro-batches."""
        op, result = self.states.producers[value]
        if op.name == "optimization_barrier":
            return self.fetch(op.operands[result], want)
        self._emit_copy(op, Role.for_whole_batch(op))
        return self.env[value, WHOLE]

    def _block(self, value: int, want: State, base: State) -> Atom:
        """This micro-batch's block of a value that is the same in all of them."""
        found = self._local_block(value, want)
        if found is not None:
            return found
        assert base != LOCAL
        return self.trace(self.builder.cuts.take, [self.counter, self.fetch(value, base)], self.source(value), want)

    def _local_block(self, value: int, want: State) -> Atom | None:
        """Returns the same by the local form of the operation that makes the value; None if it has none."""
        if value not in self.states.producers:
            return None
        op, result = self.states.producers[value]
        if op.name == "optimization_barrier":
            return self.fetch(op.operands[result], want)
        form = None if want.segments else self.states.block_form(value, want.dim)
        if form is None or (self.builder.strided and not self._is_everywhere(op, want.dim)):
            return None
        wanted = self.states.states_for(op, form, self.states.read(op))
        if wanted is None:
            return None
        results = tuple(map(state_of, form.results))
        self._emit_form(op, Role("form", tuple(wanted), results, form))
        return self.env[value, want]

    def _is_everywhere(self, op: Op, dim: int) -> bool:
        """Returns whether an operation computes each example by itself, wherever that is in the batch.

        Raises PositionDependent for random draws: whole, they would be held for all micro-batches.
        """
        if op.name == "broadcast_in_dim":
            return dim not in op.params["broadcast_dimensions"]
        if op.name in primitives.ELEMENTWISE:
            return True
        producers = self.states.producers
        made_of = reach(op.reads, self.states.made_of)
        if any(o.name in primitives.DRAWS for o in (op, *(producers[v][0] for v in made_of if v in producers))):
            raise PositionDependent
        return False

    def trace(
        self, function: Callable[..., Any], operands: Sequence[Atom], source: Any, *static: Hashable, **named: Any
    ) -> Atom:
        """Returns the one result of `function(*static, *operands, **named)`, in operations under a source line."""
        return self.builder.call(function, operands, *static, into=self.ops, source=source, **named)

    def source(self, value: int) -> Any:
        """Returns the source line of a value; None of an argument."""
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
                    self._emit_copy(op, Role.for_whole_batch(op))
            case "form":
                self._emit_form(op, role)
            case "copy" | "map":
                self._emit_copy(op, role, role.params)
            case "barrier":
                self._emit_barrier(op, role)
            case _:
                self._emit_control(op, role)

    def _emit_barrier(self, op: Op, role: Role) -> None:
        """Emits the part of a barrier whose values are in the loop."""
        outside = (AFTER,) if self.parent is not None else (AFTER, WHOLE)
        kept = [i for i, s in enumerate(role.results) if s not in outside and not isinstance(op.operands[i], Lit)]
        if kept:
            states = tuple(role.results[i] for i in kept)
            self._emit_copy(part_of_barrier(op, kept), Role("barrier", states, states))

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
        params = role.params if form is None else None if form.own is not None else form.params
        if params is not None and not role.scale:
            self._emit_copy(op, role, params)
            return
        assert form is not None
        operands = self.fetch_all(op.operands, role.operands)
        # The operand that a scatter adds to is taken in one micro-batch alone, whatever examples that has.
        is_anywhere = op.name in primitives.SCATTER_ADDITIONS and role.operands[0].kind != "sliced"

        def number() -> int:
            if self.builder.strided and not is_anywhere:  # the examples of a micro-batch are not a block
                raise PositionDependent
            return self.counter

        kind = source = None
        if op.name in primitives.DRAWS:  # many operations, the same in every layer, perhaps under another source
            kind, source = ("draw", op.key, op.ctx, form.operands, form.results), op.source
        made, found = self.builder.write(form.run, operands, kind=kind, source=source, number=number)
        self.ops += made
        for value, state, atom in zip(op.results, role.results, found, strict=True):
            if role.scale and state == LOCAL and self.builder.parts > 1:
                atom = self.trace(pair_with_number, [atom], op.source, lax.mul, self.builder.parts)
            self.define(value, state, atom)

    def _emit_control(self, op: Op, role: Role) -> None:
        """Emits control flow on one micro-batch of the values that its bodies read."""
        results = self._define(op, role)
        start: list[Atom] = []
        if op.name != "cond":
            taken = ScanView(op).split_operands if op.name == "scan" else WhileView(op).split_operands
            start = self.fetch_all(taken(op.operands).carry, taken(role.operands).carry)
        inner = [BodyScope(self, op, number, role) for number in range(len(op.bodies))]
        free = [one.free_values() for one in inner]
        sizes: dict[str, int] = {}
        operands: tuple[Atom, ...]
        match op.name:
            case "scan":
                sizes = {"num_consts": len(free[0]), "num_carry": len(start)}
                operands = (*free[0], *start, *(outer for outer, _ in inner[0].xs))
            case "while":
                sizes = {"cond_nconsts": len(free[0]), "body_nconsts": len(free[1])}
                operands = (*free[0], *free[1], *start)
            case _:  # every branch takes what any of them reads
                free = [list(dict.fromkeys(itertools.chain(*free)))] * len(inner)
                operands = (self.fetch(op.operands[0], role.operands[0]), *free[0])
        params = {name: value for name, value in {**op.params, **sizes}.items() if name not in CONTROL_FLOW_JAXPRS}
        self.ops.append(
            replace(
                op,
                index=self.builder.index(op.index),
                params=params,
                operands=operands,
                results=tuple(results),
                bodies=tuple(one.block(some) for one, some in zip(inner, free, strict=True)),
                key=None,
            )
        )


class BodyScope(Scope):
    """A body of control flow inside of the loop. It fetches from its parent what it reads from outside.

    Its outputs are in the states that the role wants.
    """

    def __init__(self, parent: Scope, op: Op, number: int, role: Role) -> None:
        super().__init__(parent.builder, parent)
        body = op.bodies[number]
        self._ports = {v: port for port in ports(op) if port.role != "carry" for v in port.inputs}
        wanted: Sequence[State] = role.inner
        held = [v for v in body.inputs if v not in self._ports]
        if op.name == "while" and number == 0:
            wanted = [self.states.state_of(body.outputs[0])]
        self.carried = [self.builder.new_part(v, state) for v, state in zip(held, role.inner, strict=False)]
        for value, state, part in zip(held, role.inner, self.carried, strict=False):
            self.define(value, state, part)
        for inner in body.ops:
            self.emit(inner)
        self.outputs = tuple(self.fetch_all(body.outputs, wanted))

    def port(self, value: int, want: State) -> Atom | None:
        """Returns the value of the enclosing block, or an iteration's part of it if that is scanned."""
        if value not in self._ports:
            return None
        operand, is_scanned = self._ports[value].operand, self._ports[value].role == "xs"
        assert self.parent is not None and operand is not None
        outer = self.parent.fetch(operand, want.shift(1) if is_scanned else want)
        return self.scanned_input(outer) if is_scanned and isinstance(outer, int) else outer


def part_of_barrier(op: Op, kept: Sequence[int]) -> Op:
    """Returns the part of an `optimization_barrier` that has some of its values, by their numbers."""
    if len(kept) == len(op.results):
        return op
    operands, results = (tuple(values[i] for i in kept) for values in (op.operands, op.results))
    return replace(op, operands=operands, results=results, key=None)
