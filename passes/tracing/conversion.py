"""From a jaxpr to a `Graph`: calls inlined, control flow kept as bodies, dead operations removed.

A jaxpr is a tree: equations such as `jit` and `custom_vjp_call` carry jaxprs of their own. Inlining walks the tree
once and gives every value an integer, so it costs one dictionary look-up per operand, however deep the calls are
nested. Nothing is traced again.

Calls, and what becomes of their bodies:

    jit, closed_call, custom_vjp_call and their like (`CALL_BODY`)    the body itself
    remat               the body; if it was differentiated, its inputs go through one `optimization_barrier`, without
                        which XLA would merge it with the forward pass
    scan, while, cond   an op with bodies; of one that the platform decides, the branch for the platform that is planned
                        for, unless that holds a kernel, which other devices could not run; a while of known trip count
                        is a scan
    every other         one opaque op

An ordered callback takes a token from the one before it as one more operand, and gives its own as one more result;
loops and branches with such callbacks carry a token. The order of effects is then that of values, whichever devices
and programs later passes give them to.

An operation that places its operands becomes one `_jax.CONSTRAINT` for each, which later passes read.

Name stacks of the calls are put in front of those of the body, as JAX's own lowering does, so that named scopes
survive.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import TracingError
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir import flow, primitives, pruning
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.tracing import equations
from alpa_lite.passes.tracing.rows import batch_rows
from alpa_lite.passes.tracing.trip_counts import count_loops

CALL_BODY = {
    "jit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "linear_call": "callee",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
    "remat_opt": "fwd_jaxpr",
    "xla_metadata_call": "jaxpr",
}
"""Calls, and the parameter that holds their body: a jaxpr of the equation's own operands and results."""
_SMALL_LITERAL = 16  # elements; larger literal arrays become constants

TOKEN = jax.core.ShapedArray((), np.dtype(np.int32))
"""The type of the values that order callbacks."""

ELEMENTWISE = "elementwise"
"""A parameter of loops that leave each element alone, along the first dims, from when its own condition is false."""


def graph_of(
    jaxpr: Any, keys: Keys | None = None, platform: str = "", annotations: bool = True, *, fold_empty: bool = True
) -> Graph:  # fmt: skip
    """The graph of a closed jaxpr. Linear in the number of equations, those of inlined calls counted once per call.

    Args:
      jaxpr: a closed jaxpr. Its constants become the last inputs of the graph's block, scalars excepted, which become
      literals.
      keys: writes the keys; a new one by default. For a part of another graph, that graph's.
      platform: "cpu", "cuda", "rocm" or "tpu", whose branches are taken; all are kept if it is not known.
      annotations: whether constraints on placements are applied.
      fold_empty: whether arrays without elements become constants; else the operations that make them stay.

    Returns:
      The graph: values and ops numbered densely, in program order, dead ops removed.
    """
    builder = _Builder(keys or Keys(), platform, annotations, fold_empty)
    opened, consts = _jax.open_jaxpr(jaxpr)
    inputs = [builder.value(var.aval) for var in opened.invars]
    outputs = builder.inline(opened, consts, inputs)
    block = Block((*inputs, *builder.constant_numbers), tuple(builder.frames[0].ops), tuple(outputs))
    graph = Graph(tuple(builder.values), block, tuple(builder.constants), builder.keys)
    return pruning.prune(batch_rows(count_loops(graph)), keep_inputs=len(inputs))


@dataclass(eq=False)
class _Frame:
    """A block that is being built.

    Attributes:
      token: that of its last callback.
      ops: so far.
      constants: the constants of the graph that it uses -> its inputs for them.
      stack: the name stack of the calls that are being inlined.
    """

    token: Atom
    ops: list[Op] = field(default_factory=list)
    constants: dict[int, int] = field(default_factory=dict)
    stack: Any = field(default_factory=_jax.empty_stack)


class _Builder:
    """The tables that one conversion fills."""

    def __init__(self, keys: Keys, platform: str, annotations: bool, fold_empty: bool) -> None:
        self.values: list[Value] = []
        self.constants: list[Any] = []
        self.constant_numbers: list[int] = []
        self.keys = keys
        self.frames = [_Frame(Lit(np.int32(0), TOKEN))]  # the top block, and the bodies being built within it
        self._platform, self._fold_empty = platform, fold_empty
        self._ignored = _jax.is_empty_constraint if annotations else _jax.is_constraint
        self._constant_atoms: dict[int, Atom] = {}
        self._by_aval: dict[int, Value] = {}
        self._zeros: set[int] = set()
        self._heads: dict[int, tuple[str, bool]] = {}  # (start of its key, whether it has effects) of an equation
        self._expansions: list[Any] = []  # kept: what is known of an equation is known by its id
        self._stacks: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # joined; by the `id`s of what follows it
        self._indices = itertools.count()

    def value(self, aval: Any) -> int:
        """Returns a new value number."""
        value = self._by_aval.get(id(aval))
        if value is None:
            value = Value(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(bool)), aval)
            self._by_aval[id(aval)] = value  # the Value keeps the aval alive, so its id stays its own
        self.values.append(value)
        return len(self.values) - 1

    def constant(self, const: Any) -> Atom:
        """Returns the atom of a closed-over array, as seen from the block being built: a literal for a scalar."""
        atom = self._constant_atoms.get(id(const))
        if atom is None:
            aval = jax.typeof(const)
            if equations.is_plain_scalar(const, aval):
                atom = Lit(np.asarray(const), aval)
            else:
                atom = self.value(aval)
                self.constant_numbers.append(atom)
                self.constants.append(const)
            self._constant_atoms[id(const)] = atom
        return self._seen_from_here(atom) if isinstance(atom, int) else atom

    def _seen_from_here(self, constant: int) -> int:
        """Returns the number of one of the graph's constants in the innermost body, which takes it in as an input."""
        if len(self.frames) == 1:
            return constant
        inputs = self.frames[-1].constants
        if constant not in inputs:
            inputs[constant] = self.value(self.values[constant].aval)
        return inputs[constant]

    def inline(self, jaxpr: Any, consts: Sequence[Any] = (), inputs: Sequence[Atom] = ()) -> list[Atom]:
        """Appends the ops of a jaxpr with some constants to the block being built, and returns its outputs."""
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = [self._literal(atom) if _jax.is_literal(atom) else env[atom] for atom in eqn.invars]
            for i in equations.unread_indices(eqn):
                (operands[i],) = self._zeros_like(eqn.invars[i])
            results = self._replacement(eqn, operands)
            if results is None:
                results = self._append(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [self._literal(atom) if _jax.is_literal(atom) else env[atom] for atom in jaxpr.outvars]

    def _replacement(self, eqn: Any, operands: list[Atom]) -> Sequence[Atom] | None:
        """The results of an equation for which other operations, or its operands, stand; None if it becomes one op."""
        name, params = eqn.primitive.name, eqn.params
        expansion = equations.expansion(eqn, graph_of)
        if expansion is not None:
            self._expansions.append(expansion)
            results = self._inlined(expansion, eqn, operands)
            if name == "while" and params["cond_jaxpr"].out_avals[0].shape:
                ops = self.frames[-1].ops
                assert ops[-1].name == "while"
                ops[-1] = replace(ops[-1], params={**ops[-1].params, ELEMENTWISE: True})
            return results
        if name in CALL_BODY and CALL_BODY[name] in params:
            return self._call(eqn, operands)
        if name == "cond" and (branch := self._branch(params)) is not None:
            return self._inlined(branch, eqn, operands[1:])
        if name in primitives.PLACEMENT and self._ignored(eqn):
            return operands
        if name in primitives.PLACEMENT and any(constraints := _jax.constraints_of(eqn)):
            return self._constraints(eqn, operands, constraints)
        if self._fold_empty and equations.is_empty(eqn):
            return self._empty(eqn.outvars)
        if (same := equations.find_same_operand(eqn, operands)) is not None:
            return [same]
        if (addend := equations.nonzero_addend(eqn, operands, self._zeros)) is not None:
            return [addend]
        if equations.is_zero(eqn, operands):
            return self._zeros_like(eqn.outvars[0])
        if name == "scan" and params["length"] == 0 and equations.are_arrays(eqn.outvars):
            consts, carry = _jax.scan_counts(params)  # no compiler keeps a loop that never runs
            return [*operands[consts : consts + carry], *self._empty(eqn.outvars[carry:])]
        return None

    def _branch(self, params: Any) -> Any:
        """The branch of a condition that the platform decides; None if another does, or if it holds a kernel."""
        platforms = params.get("branches_platforms")
        if platforms is None or not self._platform:
            return None
        for names, branch in zip(platforms, params["branches"], strict=True):
            if names is None or self._platform in names:
                return None if equations.holds_kernel(branch) else branch
        return None

    def _empty(self, variables: Sequence[Any]) -> list[Atom]:
        """Arrays without elements."""
        return [self.constant(np.zeros(var.aval.shape, var.aval.dtype)) for var in variables]

    def _zeros_like(self, variable: Any) -> list[Atom]:
        return self.inline(equations.zeros(tuple(variable.aval.shape), variable.aval.dtype))

    def _literal(self, literal: Any) -> Atom:
        if np.size(literal.val) > _SMALL_LITERAL:
            return self.constant(literal.val)
        return Lit(literal.val, literal.aval)

    def _call(self, eqn: Any, operands: list[Atom]) -> Sequence[Atom]:
        name, params = eqn.primitive.name, eqn.params
        if name in primitives.CHECKPOINT and params["differentiated"]:
            operands = self._barrier(eqn, operands)
        scope = "checkpoint" if name in primitives.CHECKPOINT else f"jit({params['name']})" if name == "jit" else None
        return self._inlined(params[CALL_BODY[name]], eqn, operands, scope)

    def _inlined(self, jaxpr: Any, eqn: Any, operands: list[Atom], scope: str | None = None) -> list[Atom]:
        """Returns the results of an equation for which a jaxpr with constants stands, under its name and a scope."""
        frame = self.frames[-1]
        outer, frame.stack = frame.stack, _jax.join_name_stacks(frame.stack, eqn.source_info.name_stack, scope)
        results = self.inline(*_jax.open_jaxpr(jaxpr), operands)
        frame.stack = outer
        return results

    def _constraints(self, eqn: Any, operands: list[Atom], constraints: Sequence[dict[str, Any] | None]) -> list[Atom]:
        """Returns the operands, each behind its constraint of the equation, if it has one."""
        out = list(operands)
        for i, params in enumerate(constraints):
            if params is not None and isinstance(operands[i], int):
                (out[i],) = self._emit(eqn, _jax.CONSTRAINT, params, [operands[i]], [eqn.outvars[i]])
        return out

    def _barrier(self, eqn: Any, operands: list[Atom]) -> list[Atom]:
        """Returns the operands of a rematerialised body behind a barrier."""
        prevent = eqn.params["prevent_cse"]
        prevent = (prevent,) * len(operands) if isinstance(prevent, bool) else prevent
        held = [i for i, operand in enumerate(operands) if prevent[i] and isinstance(operand, int)]
        if not held:
            return operands
        variables, before = [eqn.invars[i] for i in held], [operands[i] for i in held]
        after = self._emit(eqn, _jax.optimization_barrier_primitive(), {}, before, variables)
        behind = dict(zip(held, after, strict=True))
        return [behind.get(i, operand) for i, operand in enumerate(operands)]

    def _append(self, eqn: Any, operands: list[Atom]) -> list[int]:
        """Appends the op of one equation that is not a call, and returns its results."""
        primitive, params, name = eqn.primitive, eqn.params, eqn.primitive.name
        bodies: tuple[Block, ...] = ()
        is_ordered = _jax.has_ordered_effects(eqn)
        results = [self.value(var.aval) for var in eqn.outvars]
        if name in primitives.CONTROL:
            params, operands, bodies = self._control(name, params, operands, is_ordered)
        elif is_ordered:
            primitive, params = self._ordered(eqn)
            operands = [self.frames[-1].token, *operands]
        elif name == "concatenate":  # with nothing, such as the part of a head that is not rotated
            dim = params["dimension"]
            operands = [a for a, var in zip(operands, eqn.invars, strict=True) if var.aval.shape[dim]]
        if is_ordered:
            self.frames[-1].token = token = self.value(TOKEN)
            results = [token, *results]
        if id(eqn) not in self._heads:
            head = self.keys.head(primitive, params, structured=bool(bodies))
            self._heads[id(eqn)] = head, _jax.observable_effects(eqn)
        self._add(eqn, primitive, params, operands, results, bodies, self._heads[id(eqn)])
        if flow.makes_zeros(self.frames[-1].ops[-1]):
            self._zeros.update(results)
        return results[is_ordered:]

    def _emit(
        self, eqn: Any, primitive: Any, params: dict[str, Any], operands: Sequence[Atom], variables: Sequence[Any]
    ) -> list[int]:
        """Appends an op with results like some variables, in the place of an equation, and returns the results."""
        results = [self.value(var.aval) for var in variables]
        self._add(eqn, primitive, params, operands, results, (), (self.keys.head(primitive, params), False))
        return results

    def _add(
        self, eqn: Any, primitive: Any, params: Any, operands: Sequence[Atom], results: Sequence[int],
        bodies: tuple[Block, ...], head: tuple[str, bool],
    ) -> None:  # fmt: skip
        """Appends an op to the block being built, in the place of an equation; `head` is as in `_heads`."""
        frame, source = self.frames[-1], eqn.source_info
        key, has_effects = head
        if not bodies:
            key = self.keys.key(key, [atom if isinstance(atom, Lit) else self.values[atom] for atom in operands])
        if frame.stack.stack:
            ids = id(frame.stack), id(source.name_stack)
            if ids not in self._stacks:
                joined = _jax.join_name_stacks(frame.stack, source.name_stack)
                self._stacks[ids] = joined, frame.stack, source.name_stack
            source = source.replace(name_stack=self._stacks[ids][0])
        values = tuple(operands), tuple(results)
        frame.ops.append(Op(next(self._indices), primitive, params, *values, bodies, source, key, eqn.ctx, has_effects))

    def _ordered(self, eqn: Any) -> tuple[Any, dict[str, Any]]:
        """Primitive and parameters of an ordered callback with a token."""
        found = _jax.order_callback(eqn.primitive, eqn.params, TOKEN)
        if found is None:
            line = _jax.source_line(eqn.source_info)
            raise TracingError(
                f"an ordered callback within {eqn.primitive.name}{f' at {line}' if line else ''} cannot keep its order "
                "on several devices; use ordered=False, or call it outside"
            )
        return found

    def _control(
        self, name: str, params: Any, operands: list[Atom], is_ordered: bool
    ) -> tuple[dict[str, Any], list[Atom], tuple[Block, ...]]:
        """Returns the parameters, operands and bodies of a loop or a condition; an ordered one carries a token."""
        tokens = [self.frames[-1].token] * is_ordered
        if name == "scan":
            consts, carry = _jax.scan_counts(params)
            bodies, hoisted = self._bodies([params["jaxpr"]], consts, is_ordered)
            kept = {key: params[key] for key in ("jaxpr", "length", "reverse", "unroll")}
            kept |= {"num_consts": consts + len(hoisted), "num_carry": carry + len(tokens)}
            return kept, [*hoisted, *operands[:consts], *tokens, *operands[consts:]], bodies
        if name == "cond":
            bodies, hoisted = self._bodies(params["branches"], 0, is_ordered)
            return params, [operands[0], *hoisted, *tokens, *operands[1:]], bodies
        conds, consts = params["cond_nconsts"], params["body_nconsts"]
        cond, cond_hoisted = self._bodies([params["cond_jaxpr"]], conds, is_ordered, is_condition=True)
        body, body_hoisted = self._bodies([params["body_jaxpr"]], consts, is_ordered)
        counts = {"cond_nconsts": conds + len(cond_hoisted), "body_nconsts": consts + len(body_hoisted)}
        first, second, carry = operands[:conds], operands[conds : conds + consts], operands[conds + consts :]
        return params | counts, [*cond_hoisted, *first, *body_hoisted, *second, *tokens, *carry], (*cond, *body)

    def _bodies(
        self, jaxprs: Sequence[Any], before: int, is_ordered: bool, *, is_condition: bool = False
    ) -> tuple[tuple[Block, ...], list[int]]:
        """The blocks of an op, all with the same inputs: the constants that any of them uses, then the jaxpr's own.

        Args:
          jaxprs: one for each block.
          before: the number of their inputs that a token comes behind.
          is_ordered: whether the blocks take a token, and give one as their first output.
          is_condition: whether they give none, since a condition has no effects (`_jax.expansion`).

        Returns:
          The blocks, and those constants as seen from the block that holds the op.
        """
        parts = []
        for closed in jaxprs:
            jaxpr, consts = _jax.open_jaxpr(closed)
            inputs = [self.value(var.aval) for var in jaxpr.invars]
            token = self.value(TOKEN)
            self.frames.append(_Frame(token))
            outputs = self.inline(jaxpr, consts, inputs)
            frame = self.frames.pop()
            if is_ordered:
                inputs = [*inputs[:before], token, *inputs[before:]]
                outputs = outputs if is_condition else [frame.token, *outputs]
            parts.append((frame, inputs, outputs))
        used = list(dict.fromkeys(constant for frame, *_ in parts for constant in frame.constants))
        blocks = []
        for frame, inputs, outputs in parts:
            taken = [frame.constants[c] if c in frame.constants else self.value(self.values[c].aval) for c in used]
            blocks.append(Block((*taken, *inputs), tuple(frame.ops), tuple(outputs)))
        return tuple(blocks), [self._seen_from_here(constant) for constant in used]
