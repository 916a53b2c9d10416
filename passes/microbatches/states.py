"""The result of the data-flow analysis: the states of all values of a step, and the roles of its operations.

A partial value may go through an operation that is linear in it: sum_t L(x_t) = L(sum_t x_t). `linear_operands` says
which operands have to be summands for that; the others must be equal in all micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp

from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Value
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.loops import ports
from alpa_lite.passes.ir.rewriting import shape_of
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.passes.microbatches.lattice import AFTER, AXIS, LOCAL, PARTIAL, WHOLE, State, sliced_state, state_of


@dataclass(frozen=True, eq=False)
class Role:
    """The place of one operation in the rewritten step, and its form.

    Attributes:
      kind: "whole": it stays outside of the loop; "form": its local form; "copy": the operation itself, on values that
        are not sliced or on summands that it is linear in; "barrier"; "control": loops and branches with other bodies;
        "map": a scan over the examples, itself over fewer.
      operands: the state in which each operand is wanted.
      results: the state of each result.
      form: for "form", unless it is the operation itself with other parameters.
      params: of the operation in a micro-batch, where they are others.
      inner: for control flow, the states that the outputs of its last body are wanted in.
      scale: whether partial results are multiplied by the number of micro-batches, and thereby become local.
    """

    kind: Literal["whole", "form", "copy", "barrier", "map", "control"]
    operands: tuple[State, ...]
    results: tuple[State, ...]
    form: LocalForm | None = None
    params: Mapping[str, Any] | None = None
    inner: tuple[State, ...] = ()
    scale: bool = False

    @staticmethod
    def for_whole_batch(op: Op) -> Role:
        """Returns the role of an operation that stays outside of the loop."""
        return Role("whole", (WHOLE,) * len(op.operands), (WHOLE,) * len(op.results))


class Failure(Exception):
    """The reason why an operation has no exact form in a micro-batch.

    Attributes:
      op: the operation, nested ones included.
      text: the reason.
      sums: the values whose sums over micro-batches it would need; were these local, it could go on.
    """

    def __init__(self, op: Op, text: str, sums: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.op, self.text, self.sums = op, text, sums


def is_zero(atom: Atom, producers: dict[int, tuple[Op, int]]) -> bool:
    """Returns whether a value is made of literal zeros alone."""
    while not isinstance(atom, Lit):
        if atom not in producers:
            return False
        op = producers[atom][0]
        if op.name not in primitives.RESHAPES or len(op.operands) != 1:
            return False
        atom = op.operands[0]
    return flow.is_literal_zero(atom)


_UPDATES = {"scatter": (0, 2), "scatter-add": (0, 2), "scatter-sub": (0, 2), "dynamic_update_slice": (0, 1)}


def linear_operands(op: Op, partial: Sequence[bool], values: Sequence[Value]) -> tuple[bool, ...] | None:
    """Which operands must be summands so that the operation's results are; None if it is not linear in `partial`.

    Args:
      op: an operation without bodies.
      partial: for each operand whether it is partial.
      values: of the graph.
    """
    count = len(partial)
    dtypes = [(a.aval if isinstance(a, Lit) else values[a]).dtype for a in (*op.operands, *op.results)]
    if not all(jnp.issubdtype(dtype, jnp.number) for dtype in dtypes[count:]):
        return None
    is_inexact = jnp.issubdtype(dtypes[-1], jnp.inexact)
    keeps_sums = jnp.issubdtype(dtypes[0], jnp.integer) or (is_inexact and jnp.issubdtype(dtypes[0], jnp.number))
    is_scaling = (op.name == "div" and is_inexact) or (op.name == "convert_element_type" and keeps_sums)
    if is_scaling or op.name in primitives.LINEAR_IN_FIRST:
        wanted = {0}
    elif op.name in primitives.LINEAR_IN_ALL:
        wanted = set(range(count))
    elif op.name in _UPDATES:
        wanted = set(_UPDATES[op.name])
    elif op.name == "select_n":
        wanted = set(range(1, count))
    elif op.name in primitives.LINEAR_IN_EACH:
        wanted = {partial.index(True)}
    else:
        return None
    if any(p and i not in wanted for i, p in enumerate(partial)):
        return None
    return tuple(i in wanted for i in range(count))


def is_intensive(op: Op) -> bool:
    """Whether an operation on the whole batch, outside of the loop, would defeat the purpose of micro-batches."""
    return op.name in primitives.COMPUTE_INTENSIVE or any(
        is_intensive(inner) for body in op.bodies for inner in body.ops
    )


@dataclass(eq=False)
class StepStates:
    """The states and roles of one graph, as far as they are known, and its local forms over the axis of time.

    Attributes:
      graph, rules: of the step.
      parts: the number of micro-batches.
      batch: input -> the dim that is cut.
      bound: the values that floating-point state, or something carried, reaches; the others are *free*. Given are the
        inputs that are such state, or weights.
      state: value -> state.
      roles: op index -> role; operations that come after the loop have none.
      failures: op index -> why an operation that comes before or after the loop has no exact form in it.
      producers: value -> (its op, result number).
      examples: the number of examples of the batch; of several batches, what the numbers of their examples have in
        common. Where a dim consists of whole examples, each has as many consecutive elements as any other (`builder`).
    """

    graph: Graph
    rules: Mapping[Any, Rule]
    parts: int
    batch: Mapping[int, int]
    bound: Collection[int]
    roles: dict[int, Role] = field(default_factory=dict, init=False)
    failures: dict[int, Failure] = field(default_factory=dict, init=False)
    _outer: dict[int, Atom | None] = field(default_factory=dict, init=False)  # input of a body -> operand
    _forms: dict[tuple[int, int], LocalForm | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        graph, batch = self.graph, self.batch
        self.values, self.bound = graph.values, set(self.bound)
        self.examples = math.gcd(*(self.values[v].shape[dim] for v, dim in batch.items())) or 1
        self.state = {v: sliced_state(batch[v]) if v in batch else WHOLE for v in graph.block.inputs}
        self._bind(graph.block, self.bound)
        self.producers = {value: (op, i) for op in graph.ops() for i, value in enumerate(op.results)}
        self._mesh = LogicalMesh((self.parts,), (AXIS,))

    def state_of(self, atom: Atom) -> State:
        """Returns the state of an operand; literals are whole."""
        return WHOLE if isinstance(atom, Lit) else self.state[atom]

    def read(self, op: Op) -> tuple[State, ...]:
        """Returns the states of an operation's operands."""
        state = self.state
        return tuple([WHOLE if isinstance(a, Lit) else state[a] for a in op.operands])

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """Returns the shape of an operand."""
        return shape_of(atom, self.values)

    def is_free(self, op: Op) -> bool:
        """Returns whether nothing that an operation reads depends on floating-point state."""
        return not any(value in self.bound for value in op.reads)

    def _bind(self, block: Block, bound: set[int]) -> None:
        """Adds to `bound` the values that the operations of a block make of it."""
        for op in block.ops:
            for port in ports(op) if op.bodies else ():
                outer = None if port.role == "carry" else port.operand
                self._outer.update(dict.fromkeys(port.inputs, outer))
                bound.update(port.inputs if outer is None or outer in bound else ())
            for body in op.bodies:
                self._bind(body, bound)
            if op.name == "optimization_barrier":
                bound.update(v for a, v in zip(op.operands, op.results, strict=True) if a in bound)
            elif not bound.isdisjoint(op.reads):
                bound.update(op.results)

    def is_outside(self, value: int) -> bool:
        """Returns whether a value is computed before the loop, or is an argument."""
        if value not in self.producers:
            return True
        role = self.roles.get(self.producers[value][0].index)
        return role is not None and role.kind == "whole"

    def decide(self, op: Op, role: Role) -> None:
        """Notes the role of an operation, and the states of its results."""
        self.roles[op.index] = role
        self.state.update(zip(op.results, role.results, strict=True))

    def made_of(self, value: int) -> Sequence[int]:
        """Returns the values that the operation of a value makes it of."""
        if value not in self.producers:
            return ()
        op, number = self.producers[value]
        return flow.values_in([op.operands[number]]) if op.name == "optimization_barrier" else op.reads

    def roots(self, values: Iterable[int]) -> frozenset[int]:
        """Returns the reductions (op indices) whose sums some values are made of."""
        found: set[int] = set()

        def summed(value: int) -> Sequence[int]:
            if value in self._outer:
                return flow.values_in([atom for atom in [self._outer[value]] if atom is not None])
            if value not in self.producers or self.state[value] not in (PARTIAL, AFTER):
                return ()
            op, number = self.producers[value]
            role = self.roles.get(op.index)
            if role is None:
                return (*op.reads, *(self.failures[op.index].sums if op.index in self.failures else ()))
            if role.kind in ("form", "map"):
                found.add(op.index)
                return ()
            if op.bodies:
                return flow.values_in(body.outputs[number] for body in op.bodies[op.name == "while" :])
            return self.made_of(value)

        flow.reach(values, summed)
        return frozenset(found)

    def is_update(self, op: Op) -> bool:
        """Returns whether an operation comes after the loop."""
        return op.index not in self.roles or any(self.state[v] == AFTER for v in op.results)

    # -- local forms ----------------------------------------------------------------------------------------------

    def form(self, op: Op, factor: int) -> LocalForm | None:
        """Returns the local form of an operation with one factor over time, if it has one that does not communicate."""
        rule = self.rules.get(op.key)
        if rule is None:
            return None
        key = (op.index, factor)
        if key not in self._forms:
            assignment: tuple[Axes, ...] = tuple((AXIS,) if f == factor else () for f in range(len(rule.factors)))
            form = local_form(op, rule, assignment, self.values, self._mesh)
            self._forms[key] = None if form is not None and form.collectives else form
        return self._forms[key]

    def block_form(self, value: int, dim: int) -> LocalForm | None:
        """Returns the local form of a value's op that makes one block along `dim` from the same kind of operands."""
        if value not in self.producers:
            return None
        op, result = self.producers[value]
        rule = self.rules.get(op.key)
        if op.bodies or op.has_effects or rule is None or not rule.results[result][dim]:
            return None
        form = self.form(op, rule.results[result][dim][0])
        if form is None or any(layout.partial for layout in form.results):
            return None
        return form if state_of(form.results[result]) == sliced_state(dim) else None

    def can_block(self, atom: Atom, dim: int) -> bool:
        """Returns whether a micro-batch can make its own block of a value that has the size of the whole batch."""
        state = self.state_of(atom)
        if isinstance(atom, Lit) or state != LOCAL:
            return state.kind in ("whole", "inner")
        form = self.block_form(atom, dim)
        if form is None:
            return False
        op = self.producers[atom][0]
        return self.states_for(op, form, self.read(op)) is not None

    def states_for(self, op: Op, form: LocalForm, given: Sequence[State]) -> list[State] | None:
        """Returns the states in which a form takes operands that are in given ones; None if they cannot be had so."""
        found = []
        for atom, layout, state in zip(op.operands, form.operands, given, strict=True):
            want = state_of(layout)
            if state.kind in ("inner", "local") and want == WHOLE:
                want = state
            is_had = (want.kind, want.dim) == (state.kind, state.dim) or (self.parts == 1 and state == LOCAL)
            if not is_had and not self.can_block(atom, want.dim):
                return None
            found.append(want)
        return found
