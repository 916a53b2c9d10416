"""The result of the analysis: the state of each value of a step, and the role of each operation.

Local forms over the axis of time are looked up here as well: an operation whose operands are sliced along factor f of
its rule shards f over that axis.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from alpa_lite.ir.graph import Atom, Graph, Lit, Op
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir.inlining import shape_of
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.passes.microbatches.states import AFTER, AXIS, LOCAL, PARTIAL, WHOLE, Role, State, sliced, state_of


class StepStates:
    """The states and roles of one graph, as far as they are known.

    Attributes:
      graph, values, rules: of the step.
      parts: the number of micro-batches.
      state: value -> state.
      roles: op index -> role; operations that come after the loop have none.
      free: the values that no floating-point state reaches.
      roots: value -> the reductions (op indices) whose sums it is made of.
      producers: value -> (its op, result number).
    """

    def __init__(
        self, graph: Graph, rules: Mapping[Any, Rule], parts: int, batch: Mapping[int, int], bound: Collection[int]
    ) -> None:
        """`batch`: input -> the dim that is cut; `bound`: inputs that are floating-point state, or weights."""
        self.graph, self.values, self.rules, self.parts = graph, graph.values, rules, parts
        inputs = graph.block.inputs
        self.state: dict[int, State] = {
            v: sliced(batch[v], self.values[v].shape[batch[v]]) if v in batch else WHOLE for v in inputs
        }
        self.roles: dict[int, Role] = {}
        self.free: set[int] = set(inputs).difference(bound)
        self.roots: dict[int, frozenset[int]] = {}
        self.producers = {value: (op, i) for op in graph.ops() for i, value in enumerate(op.results)}
        self._mesh = LogicalMesh((parts,), (AXIS,))
        self._forms: dict[tuple[int, int], LocalForm | None] = {}

    def of(self, atom: Atom) -> State:
        """The state of an operand; literals are whole."""
        return WHOLE if isinstance(atom, Lit) else self.state[atom]

    def read(self, op: Op) -> tuple[State, ...]:
        """The states of an operation's operands."""
        state = self.state
        return tuple([WHOLE if isinstance(a, Lit) else state[a] for a in op.operands])

    def shape(self, atom: Atom) -> tuple[int, ...]:
        """The shape of an operand."""
        return shape_of(atom, self.values)

    def is_free(self, op: Op) -> bool:
        """Whether nothing that an operation reads depends on floating-point state."""
        return self.free.issuperset(op.reads)

    def is_outside(self, value: int) -> bool:
        """Whether a value is computed before the loop, or is an argument."""
        if value not in self.producers:
            return True
        role = self.roles.get(self.producers[value][0].index)
        return role is not None and role.kind == "whole"

    def decide(self, op: Op, role: Role) -> None:
        """Notes the role of an operation, and the states of its results."""
        self.roles[op.index] = role
        self.state.update(zip(op.results, role.results, strict=True))
        if not op.bodies and PARTIAL in role.results:
            found = frozenset({op.index}) if role.kind == "form" else self.roots_of(op)
            self.roots.update(dict.fromkeys(op.results, found))

    def forget(self, op: Op) -> None:
        """Removes the notes of an earlier visit of an operation."""
        self.roles.pop(op.index, None)
        self.free.difference_update(op.results)
        for value in op.results:
            self.roots.pop(value, None)

    def roots_of(self, op: Op) -> frozenset[int]:
        """The reductions whose sums an operation reads."""
        found: frozenset[int] = frozenset()
        for value in op.reads:
            more = self.roots.get(value)
            if more and more is not found:  # behind a norm of all gradients, nearly every value has all roots
                found = more if found <= more else found if more <= found else found | more
        return found

    def whole(self, op: Op) -> Role:
        """The role of an operation that stays outside of the loop."""
        return Role("whole", (WHOLE,) * len(op.operands), (WHOLE,) * len(op.results))

    def barrier(self, op: Op, states: tuple[State, ...]) -> None:
        """Notes an `optimization_barrier`: each result is another name of its operand."""
        self.roles[op.index] = Role("barrier", states, states)
        for atom, result, state in zip(op.operands, op.results, states, strict=True):
            self.state[result] = state
            if isinstance(atom, int) and atom in self.roots:
                self.roots[result] = self.roots[atom]
            if isinstance(atom, int) and atom in self.free:
                self.free.add(result)

    def is_update(self, op: Op) -> bool:
        """Whether an operation comes after the loop."""
        return op.index not in self.roles or any(self.state[v] == AFTER for v in op.results)

    # -- local forms ----------------------------------------------------------------------------------------------

    def form(self, op: Op, factor: int) -> LocalForm | None:
        """The local form of an operation with one factor over time, if it has one that does not communicate."""
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
        """The local form of a value's op that makes one block along `dim` from the same kind of operands."""
        if value not in self.producers:
            return None
        op, result = self.producers[value]
        rule = self.rules.get(op.key)
        if op.bodies or op.has_effects or rule is None or not rule.results[result][dim]:
            return None
        form = self.form(op, rule.results[result][dim][0])
        if form is None or any(layout.partial for layout in form.results):
            return None
        return form if state_of(form.results[result]) == sliced(dim) else None

    def can_block(self, atom: Atom, dim: int) -> bool:
        """Whether a micro-batch can make its own block of a value that has the size of the whole batch."""
        state = self.of(atom)
        if isinstance(atom, Lit) or state != LOCAL:
            return state.kind in ("whole", "inner")
        form = self.block_form(atom, dim)
        if form is None:
            return False
        wanted = map(state_of, form.operands)
        operands = self.producers[atom][0].operands
        return all(w == WHOLE or self.can_block(a, w.dim) for a, w in zip(operands, wanted, strict=True))
