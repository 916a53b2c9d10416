"""What becomes of one operation in the loop over micro-batches, given the states of what it reads.

An operation whose operands are sliced along factor f of its rule shards f over the axis of time: its local form is what
one micro-batch does, unless the form communicates, since no micro-batch sees another. Results that lose f by a sum are
partial, and stay so as long as what reads them is linear in them.

Control flow is analysed through its bodies; the states of what loops carry are the least fixed point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax

from alpa_lite.graph import Atom, Block, Graph, Lit, Op
from alpa_lite.layout import Axes, LogicalMesh
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.loops import ScanView, WhileView
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.types import LocalForm, rebinding
from alpa_lite.passes.microbatches.journal import Journal
from alpa_lite.passes.microbatches.segments import segmented_role
from alpa_lite.passes.microbatches.states import (
    AXIS,
    INNER,
    LOCAL,
    PARTIAL,
    WHOLE,
    Failure,
    Role,
    State,
    join,
    linear,
    shifted,
    sliced,
    state_of,
)
from alpa_lite.passes.tracing.conversion import ELEMENTWISE
from alpa_lite.strategy import Rule

ONCE = "its effect happens once, for the whole batch"

_OWN_FORMS = primitives.SCATTERS | primitives.DRAWS | {"gather"}
"""Operations whose form depends on more than their key, such as on how JAX draws."""


class Classifier:
    """The states and roles of one graph, as far as they are known.

    Attributes:
      state: value -> state.
      roles: op index -> role.
      free: the values that no floating-point state reaches.
      roots: value -> the reductions (op indices) whose sums it is made of.
      local: the reductions (op indices) that are taken within the micro-batch.
      producers: value -> (its op, result number).
      sources: index -> op.
      journal: of what is written into these.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[Any, Rule],
        parts: int,
        batch: Mapping[int, int],
        bound: Set[int],
        journal: Journal,
    ):
        """`batch`: input -> the dim that is cut; `bound`: inputs that are floating-point state, or weights."""
        self.graph, self.values, self.rules = graph, graph.values, rules
        self.parts = parts
        self.local = frozenset[int]()
        self.segments: dict[int, tuple[int, ...]] = {}  # size of a dim -> the segments that it had last
        self.mesh = LogicalMesh((parts,), (AXIS,))
        self.journal = journal
        self.state: dict[int, State] = journal.table()
        self.roles: dict[int, Role] = journal.table()
        self.free: set[int] = journal.members()
        self.roots: dict[int, frozenset[int]] = journal.table()
        self.producers: dict[int, tuple[Op, int]] = {}
        self.sources: dict[int, Op] = {op.index: op for op in graph.ops()}
        self._forms: dict[Any, LocalForm | None] = {}
        self._alike: dict[tuple[Any, tuple[State, ...]], Role] = {}
        for op in self.sources.values():
            for i, value in enumerate(op.results):
                self.producers[value] = op, i
        for value in graph.block.inputs:
            self.state[value] = sliced(batch[value]) if value in batch else WHOLE
            if value not in bound:
                self.free.add(value)

    def of(self, atom: Atom) -> State:
        """The state of an operand; literals are whole."""
        return WHOLE if isinstance(atom, Lit) else self.state[atom]

    def read(self, op: Op) -> tuple[State, ...]:
        """The states of an operation's operands."""
        state = self.state
        return tuple([WHOLE if isinstance(a, Lit) else state[a] for a in op.operands])

    def is_free(self, op: Op) -> bool:
        """Whether nothing that an operation reads depends on floating-point state."""
        return self.free.issuperset(op.reads)

    def decide(self, op: Op, role: Role) -> None:
        """Notes the role of an operation, and the states of its results."""
        self.roles[op.index] = role
        self.state.update(zip(op.results, role.results, strict=True))
        if not op.bodies and PARTIAL in role.results:
            found = frozenset({op.index}) if role.kind == "form" else self.roots_of(op)
            self.roots.update(dict.fromkeys(op.results, found))

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
        """Each result is in the state of its operand."""
        self.roles[op.index] = Role("barrier", states, states)
        for atom, result, state in zip(op.operands, op.results, states, strict=True):
            self.state[result] = state
            if not isinstance(atom, Lit):
                self.like(result, atom)

    def like(self, value: int, atom: int) -> None:
        """`value` is another name of `atom`."""
        if atom in self.roots:
            self.roots[value] = self.roots[atom]
        if atom in self.free:
            self.free.add(value)

    # -- one operation --------------------------------------------------------------------------------------------

    def classify(self, op: Op, states: tuple[State, ...]) -> Role | Failure:
        """What becomes of an operation on operands in these states, none of them `after`.

        Operations with one key have one role, where that depends on nothing but the states.
        """
        alike = op.key, states
        found = None if op.index in self.local else self._alike.get(alike)
        if found is None:
            found = self._classified(op, states)
            if isinstance(found, Role) and self._is_common(op, states, found):
                self._alike[alike] = found
        return found

    def _is_common(self, op: Op, states: tuple[State, ...], role: Role) -> bool:
        """Whether a role is that of every operation with the key of this one on operands in these states."""
        if role.kind == "form":
            bound = role.form is not None and rebinding(role.form) is not None
            is_common = role.operands == states and not role.scale and not role.segmented
            return bound and is_common and op.name not in _OWN_FORMS
        return role.kind in ("whole", "copy")

    def _classified(self, op: Op, states: tuple[State, ...]) -> Role | Failure:
        kinds = {s.kind for s in states}
        if kinds <= {"whole"}:
            return self.whole(op)
        if op.has_effects and self.parts > 1 and not (op.bodies and kinds & {"sliced", "partial"}):
            return Failure(_calling(op), ONCE)
        if kinds <= {"whole", "inner", "local"}:
            result = LOCAL if "local" in kinds else INNER
            return Role("copy", states, (result,) * len(op.results))
        if op.bodies:
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[op.name](op, states)
        if "partial" in kinds:
            wanted = None
            if "sliced" not in kinds:
                wanted = linear(op, [s == PARTIAL for s in states], self.values)
            if wanted is None:
                roots = self.roots_of(op)
                return Failure(op, "it needs the sum over the whole batch", roots)
            operands = tuple(PARTIAL if w else s for w, s in zip(wanted, states, strict=True))
            return Role("copy", operands, (PARTIAL,) * len(op.results))
        return self._cut(op, states)

    def _cut(self, op: Op, states: Sequence[State]) -> Role | Failure:
        """The local form of an operation that reads sliced operands."""
        number, state = next((i, s) for i, s in enumerate(states) if s.kind == "sliced")
        rule = self.rules[op.key]
        factors = rule.operands[number][state.dim]
        failure = Failure(op, rule.reason or "it works across the examples of the batch")
        form = self.form(op, factors[0]) if factors else None
        found = None if form is None else self._fits(op, states, form)
        if found is None and self.parts > 1:
            found = segmented_role(op, states, self.values, self.parts, self.segments)
            for value, one in zip(op.results, () if found is None else found.results, strict=False):
                if one.segments:
                    self.segments[self.values[value].shape[one.dim]] = one.segments
        return failure if found is None else found

    def _fits(self, op: Op, states: Sequence[State], form: LocalForm) -> Role | None:
        """The role for a form, if the operands can be had as it wants them."""
        wanted = []
        for layout, given in zip(form.operands, states, strict=True):
            want = state_of(layout)
            if given.kind in ("inner", "local") and want == WHOLE:
                want = given
            single = self.parts == 1 and given == LOCAL
            plain = given._replace(segments=())
            if want != plain and not single and not self.can_block(op.operands[len(wanted)], want.dim):
                return None
            wanted.append(want)
        results = tuple(state_of(layout) for layout in form.results)
        if any(state.segments for state in states):
            found = self._in_segments(op, states, form, wanted, results)
            if found is None:
                return None
            wanted, results = found
        if WHOLE in results:
            return None
        scale = op.index in self.local and PARTIAL in results
        if scale:
            results = tuple(LOCAL if s == PARTIAL else s for s in results)
        return Role("form", tuple(wanted), results, form, scale=scale)

    def _in_segments(
        self, op: Op, states: Sequence[State], form: LocalForm, wanted: Sequence[State], results: Sequence[State]
    ) -> tuple[list[State], tuple[State, ...]] | None:
        """The states of operands and results if the factor that is cut consists of segments; None if they cannot be."""
        rule = self.rules[op.key]
        kept: set[tuple[int, ...]] = set()

        def sizes(dims: Sequence[Sequence[int]], state: State) -> tuple[int, int]:
            """Of the factor that is cut, and of the dim that holds it."""
            factors = dims[state.dim]
            return rule.factors[factors[0]].size, math.prod(rule.factors[f].size for f in factors)

        for dims, want, given in zip(rule.operands, wanted, states, strict=True):
            if want.kind != "sliced" or given.kind in ("whole", "inner"):
                continue
            size, whole = sizes(dims, want)
            if given.kind != "sliced" or any(n * size % whole for n in given.segments):
                return None
            kept.add(tuple(n * size // whole for n in given.segments))
        if len(kept) != 1 or () in kept or any(n % self.parts for one in kept for n in one):
            return None
        (segments,) = kept
        if rebinding(form) is None and self._is_positional(op, form):
            return None

        def cut(dims: Sequence[Sequence[int]], state: State) -> State:
            if state.kind != "sliced":
                return state
            size, whole = sizes(dims, state)
            return state._replace(segments=tuple(n * whole // size for n in segments))

        return list(map(cut, rule.operands, wanted)), tuple(map(cut, rule.results, results))

    def _is_positional(self, op: Op, form: LocalForm) -> bool:
        """Whether a form computes with the number of its block."""
        if op.name in primitives.DRAWS:
            return True
        specs = []
        for atom, layout in zip(op.operands, form.operands, strict=True):
            aval = atom.aval if isinstance(atom, Lit) else self.values[atom].aval
            shape = tuple(n // self.parts if axes else n for n, axes in zip(aval.shape, layout.dims, strict=True))
            specs.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        return "axis_index" in str(jax.make_jaxpr(form.run, axis_env=[(AXIS, self.parts)])(*specs))

    def can_block(self, atom: Atom, dim: int) -> bool:
        """Whether a micro-batch can make its own block of a value that has the size of the whole batch."""
        if self.of(atom).kind in ("whole", "inner"):
            return True
        if self.of(atom) != LOCAL or isinstance(atom, Lit) or atom not in self.producers:
            return False
        found = self.block_form(atom, dim)
        if found is None:
            return False
        op, form = found
        wanted = [state_of(layout) for layout in form.operands]
        return all(w == WHOLE or self.can_block(a, w.dim) for a, w in zip(op.operands, wanted, strict=True))

    def block_form(self, value: int, dim: int) -> tuple[Op, LocalForm] | None:
        """What makes a value, and its local form that makes one block along `dim` from the same kind of operands."""
        if value not in self.producers:
            return None
        op, result = self.producers[value]
        rule = self.rules.get(op.key)
        if op.bodies or op.has_effects or rule is None or not rule.results[result][dim]:
            return None
        form = self.form(op, rule.results[result][dim][0])
        if form is None or any(layout.partial for layout in form.results):
            return None
        return (op, form) if state_of(form.results[result]) == sliced(dim) else None

    def form(self, op: Op, factor: int) -> LocalForm | None:
        """The local form of an operation with one factor over time, if it has one that does not communicate."""
        rule = self.rules.get(op.key)
        if rule is None:
            return None
        key = (op.index, factor)
        if key not in self._forms:
            assignment: tuple[Axes, ...] = tuple((AXIS,) if f == factor else () for f in range(len(rule.factors)))
            form = local_form(op, rule, assignment, self.values, self.mesh)
            self._forms[key] = None if form is not None and form.collectives else form
        return self._forms[key]

    # -- control flow ---------------------------------------------------------------------------------------------

    def _body(self, block: Block, states: Sequence[State], atoms: Sequence[Atom | None]) -> Failure | list[State]:
        """Analyses a nested body; `atoms` are what its inputs are outside, None for what loops carry."""
        for value, state, atom in zip(block.inputs, states, atoms, strict=True):
            self.state[value] = state
            self.free.discard(value)
            if atom is not None and (isinstance(atom, Lit) or atom in self.free):
                self.free.add(value)
            self.roots[value] = self.roots.get(atom, frozenset()) if isinstance(atom, int) else frozenset()
        for op in block.ops:
            inner = self.read(op)
            free = self.is_free(op)
            self.free.difference_update(op.results)
            if op.name == "optimization_barrier":
                self.barrier(op, inner)
                continue
            found = self.classify(op, inner)
            if free:
                self.free.update(op.results)
                if isinstance(found, Failure) or PARTIAL in found.results:
                    found = self.whole(op)
            if isinstance(found, Role) and found.kind == "whole" and op.has_effects and self.parts > 1:
                found = Failure(_calling(op), ONCE)
            if isinstance(found, Failure):
                return found
            self.decide(op, found)
        return [self.of(a) for a in block.outputs]

    def _fixed_point(self, op: Op, start: Sequence[State], run: Any) -> Failure | tuple[list[State], list[State]]:
        """Runs a body until the states of what it carries are stable. Returns those, and those of its other outputs."""
        carry, count = list(start), len(start)
        while True:
            outputs = run(carry)
            if isinstance(outputs, Failure):
                return outputs
            joined = [join(a, b) for a, b in zip(carry, outputs[:count], strict=True)]
            for before, out, both in zip(carry, outputs[:count], joined, strict=True):
                if both is None:
                    return Failure(op, f"its carry is {_words(before)} at first and {_words(out)} later")
            found = [s for s in joined if s is not None]
            if found == carry:
                return carry, outputs[count:]
            carry = found

    def _scan(self, op: Op, states: Sequence[State]) -> Role | Failure:
        view = ScanView(op)
        consts, start, stacked = view.taken(states)
        if any(s.kind == "sliced" and s.dim == 0 for s in stacked):
            return self._map(view, states)
        xs = [shifted(s, -1) for s in stacked]
        atoms = [*view.operands.consts, *[None] * view.num_carry, *view.operands.xs]

        def run(carry: list[State]) -> Failure | list[State]:
            return self._body(view.body, [*consts, *carry, *xs], atoms)

        found = self._fixed_point(op, start, run)
        if isinstance(found, Failure):
            return found
        carry, ys = found
        results = (*carry, *(shifted(s, 1) for s in ys))
        self._pass_roots(op, view.body.outputs)
        operands = (*consts, *carry, *stacked)
        return Role("scan", operands, results, inner=(*carry, *ys), length=op.params["length"])

    def _map(self, view: ScanView, states: Sequence[State]) -> Role | Failure:
        """A scan over the examples: a micro-batch scans over its own, if all that it carries are sums over examples."""
        op, (consts, start, xs) = view.op, view.taken(states)
        failure = Failure(op, "it loops over the examples of the batch, and each needs those before it")
        if view.length % self.parts or not {WHOLE, sliced(0)}.issuperset(xs):
            return failure
        if any(s.kind in ("sliced", "partial") for s in consts):
            return Failure(op, "it loops over the examples of the batch, and each needs all of them", self.roots_of(op))
        uses = flow.uses(view.body)
        carried = []
        for number, (carry, state) in enumerate(zip(view.carries, start, strict=True)):
            added = number in view.additions and isinstance(carry.output, int) and uses[carry.output] == 1
            if carry.output == carry.input and uses[carry.input] == 1 and state.kind in ("whole", "inner"):
                carried.append(state)
            elif added and state.kind != "sliced":
                carried.append(PARTIAL)
            else:
                return failure
        operands = (*consts, *carried, *[sliced(0)] * len(xs))
        results = (*carried, *[sliced(0)] * len(view.results.ys))
        self.roots.update(dict.fromkeys(op.results, frozenset({op.index})))
        return Role("map", operands, results, length=view.length // self.parts)

    def _pass_roots(self, op: Op, outputs: Sequence[Atom]) -> None:
        for value, atom in zip(op.results, outputs, strict=True):
            found = self.roots.get(atom, frozenset()) if isinstance(atom, int) else frozenset()
            self.roots[value] = self.roots.get(value, frozenset()) | found

    def _while(self, op: Op, states: Sequence[State]) -> Role | Failure:
        cond, body = op.bodies
        view = WhileView(op)
        cond_consts, body_consts, start = view.taken(states)
        cond_atoms, body_atoms, _ = view.taken(op.operands)
        nothing: list[Atom | None] = [None] * len(start)

        whether = _any_of(cond) if op.params.get(ELEMENTWISE) else None  # any example goes on
        each = cond if whether is None else _without(cond, whether)

        def run(carry: list[State]) -> Failure | list[State]:
            asked = self._body(each, [*cond_consts, *carry], [*cond_atoms, *nothing])
            if isinstance(asked, Failure):
                return asked
            if whether is not None:  # examples do not see how long others run: a micro-batch ends with its own
                one = LOCAL if asked[0].kind == "sliced" else asked[0]
                self.decide(whether, Role("copy", (asked[0],), (one,)))
                asked = [one]
            if asked[0].kind in ("sliced", "partial"):
                return Failure(op, "its length depends on the examples of the batch", self.roots_of(op))
            outputs = self._body(body, [*body_consts, *carry], [*body_atoms, *nothing])
            return outputs if isinstance(outputs, Failure) or whether is not None else _decided_by(asked[0], outputs)

        found = self._fixed_point(op, start, run)
        if isinstance(found, Failure):
            return found
        carry, _ = found
        self._pass_roots(op, body.outputs)
        return Role("while", (*cond_consts, *body_consts, *carry), tuple(carry), inner=tuple(carry))

    def _cond(self, op: Op, states: Sequence[State]) -> Role | Failure:
        if states[0].kind in ("sliced", "partial"):
            roots = self.roots.get(op.operands[0], frozenset()) if isinstance(op.operands[0], int) else frozenset()
            return Failure(op, "its predicate depends on the examples of the batch", roots)
        results: list[State] | None = None
        for branch in op.bodies:
            outputs = self._body(branch, states[1:], op.operands[1:])
            if isinstance(outputs, Failure):
                return outputs
            before = results or outputs
            joined = [join(a, b) for a, b in zip(before, outputs, strict=True)]
            if any(s is None for s in joined):
                return Failure(op, "its branches differ in how their results depend on the batch")
            results = _decided_by(states[0], [s for s in joined if s is not None])
            self._pass_roots(op, branch.outputs)
        assert results is not None
        return Role("cond", tuple(states), tuple(results), inner=tuple(results))


def _decided_by(predicate: State, outputs: list[State]) -> list[State]:
    """The states of values that a predicate chooses: under a local one none is the same in all micro-batches."""
    return [LOCAL if predicate == LOCAL and s.kind in ("whole", "inner") else s for s in outputs]


def _calling(op: Op) -> Op:
    """The operation with effects among those of control flow."""
    return next((_calling(inner) for body in op.bodies for inner in body.ops if inner.has_effects), op)


def _any_of(cond: Block) -> Op | None:
    """The last op of a condition, where it is true if any of many are."""
    return next((op for op in cond.ops if op.name == "reduce_or" and op.results == cond.outputs), None)


def _without(cond: Block, last: Op) -> Block:
    """The many conditions."""
    return Block(cond.inputs, tuple(op for op in cond.ops if op is not last), last.operands)


def _words(state: State) -> str:
    return {"sliced": f"one value for each example along dim {state.dim}", "partial": "a sum over the batch"}.get(
        state.kind, "the same for all examples"
    )
