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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.core
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import TracingError
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir import flow, primitives, pruning
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.rewriting import rename_block
from alpa_lite.passes.tracing import equations
from alpa_lite.passes.tracing.known_values import use_known_values

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
    block = Block((*inputs, *builder.constants), tuple(builder.ops), tuple(outputs))
    graph = Graph(tuple(builder.values), block, tuple(builder.constants.values()), builder.keys)
    return pruning.prune(use_known_values(graph), keep_inputs=len(inputs))


class _Builder:
    """The tables that one conversion fills.

    Attributes:
      values: of the graph.
      constants: value number -> array.
      ops: of the block that is being built.
      token: of the last callback in it.
      stack: the name stack of the calls that are being inlined.
    """

    def __init__(self, keys: Keys, platform: str, annotations: bool, fold_empty: bool) -> None:
        self.values: list[Value] = []
        self.constants: dict[int, Any] = {}
        self.ops: list[Op] = []
        self.token: Atom = Lit(np.int32(0), TOKEN)
        self.stack, self.keys = _jax.empty_stack(), keys
        self._platform, self._annotations, self._fold_empty = platform, annotations, fold_empty
        self._constant_atoms: dict[int, tuple[Atom, Any]] = {}  # by the `id` of the constant, which is kept
        self._by_aval: dict[int, Value] = {}
        self._zeros: set[int] = set()
        self._heads: dict[tuple[int, int], tuple[str, Any]] = {}  # start of a key, by `id`s; and the parameters
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
        """Returns the atom of a closed-over array: a literal for a scalar."""
        atom, _ = self._constant_atoms.get(id(const), (None, None))
        if atom is None:
            aval = jax.typeof(const)
            if equations.is_plain_scalar(const, aval):
                atom = Lit(np.asarray(const), aval)
            else:
                atom = self.value(aval)
                self.constants[atom] = const
            self._constant_atoms[id(const)] = atom, const
        return atom

    def _atom(self, var: Any, env: Mapping[Any, Atom]) -> Atom:
        """Returns the atom of a variable or a literal of a jaxpr."""
        if not _jax.is_literal(var):
            return env[var]
        return self.constant(var.val) if np.size(var.val) > _SMALL_LITERAL else Lit(var.val, var.aval)

    def inline(self, jaxpr: Any, consts: Sequence[Any] = (), inputs: Sequence[Atom] = ()) -> list[Atom]:
        """Appends the ops of a jaxpr with some constants to the block being built, and returns its outputs."""
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = [self._atom(var, env) for var in eqn.invars]
            for i in equations.unread_indices(eqn):
                (operands[i],) = self._zeros_like(eqn.invars[i])
            results = self._replacement(eqn, operands)
            env.update(zip(eqn.outvars, self._append(eqn, operands) if results is None else results, strict=True))
        return [self._atom(var, env) for var in jaxpr.outvars]

    def _replacement(self, eqn: Any, operands: list[Atom]) -> Sequence[Atom] | None:
        """The results of an equation for which other operations, or its operands, stand; None if it becomes one op."""
        name, params = eqn.primitive.name, eqn.params
        if (expansion := equations.expansion(eqn, graph_of)) is not None:
            results = self._inlined(expansion, eqn, operands)
            if name == "while" and params["cond_jaxpr"].out_avals[0].shape:
                assert self.ops[-1].name == "while"
                self.ops[-1] = replace(self.ops[-1], params={**self.ops[-1].params, ELEMENTWISE: True})
            return results
        if name in CALL_BODY and CALL_BODY[name] in params:
            return self._call(eqn, operands)
        if name == "cond" and (branch := self._branch(params)) is not None:
            return self._inlined(branch, eqn, operands[1:])
        constraints = _jax.constraints_of(eqn, self._annotations) if name in primitives.PLACEMENT else []
        if any(one is not None for one in constraints):
            return [
                self._add(eqn, _jax.CONSTRAINT, one, [atom], [var.aval])[0] if one and isinstance(atom, int) else atom
                for atom, one, var in zip(operands, constraints, eqn.outvars, strict=True)
            ]
        if self._fold_empty and equations.is_empty(eqn):
            return self._empty(eqn.outvars)
        if (same := equations.simplify(eqn, operands, self._zeros)) is not None:
            return self._zeros_like(eqn.outvars[0]) if same is equations.ZERO else [same]
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

    def _call(self, eqn: Any, operands: list[Atom]) -> Sequence[Atom]:
        name, params = eqn.primitive.name, eqn.params
        scope = "checkpoint" if name in primitives.CHECKPOINT else f"jit({params['name']})" if name == "jit" else None
        if name in primitives.CHECKPOINT and params["differentiated"]:
            prevent = params["prevent_cse"]
            prevent = (prevent,) * len(operands) if isinstance(prevent, bool) else prevent
            held = [i for i, operand in enumerate(operands) if prevent[i] and isinstance(operand, int)]
            if held:
                before, avals = [operands[i] for i in held], [eqn.invars[i].aval for i in held]
                after = self._add(eqn, _jax.optimization_barrier_primitive(), {}, before, avals)
                behind = dict(zip(held, after, strict=True))
                operands = [behind.get(i, operand) for i, operand in enumerate(operands)]
        return self._inlined(params[CALL_BODY[name]], eqn, operands, scope)

    def _inlined(self, jaxpr: Any, eqn: Any, operands: list[Atom], scope: str | None = None) -> list[Atom]:
        """Returns the results of an equation for which a jaxpr with constants stands, under its name and a scope."""
        outer, self.stack = self.stack, _jax.join_name_stacks(self.stack, eqn.source_info.name_stack, scope)
        results = self.inline(*_jax.open_jaxpr(jaxpr), operands)
        self.stack = outer
        return results

    def _append(self, eqn: Any, operands: list[Atom]) -> list[int]:
        """Appends the op of one equation that is not a call, and returns its results.

        An ordered one takes the token of the one before as its first operand, and gives its own as its first result.
        """
        primitive, params, name = eqn.primitive, eqn.params, eqn.primitive.name
        bodies: tuple[Block, ...] = ()
        is_ordered = _jax.has_ordered_effects(eqn)
        if name in primitives.CONTROL:
            params, operands, bodies = self._control(name, params, operands, is_ordered)
        elif is_ordered:
            found = _jax.order_callback(primitive, params, TOKEN)
            if found is None:
                line = _jax.source_line(eqn.source_info)
                raise TracingError(
                    f"an ordered callback within {name}{f' at {line}' if line else ''} cannot keep its order on "
                    "several devices; use ordered=False, or call it outside"
                )
            (primitive, params), operands = found, [self.token, *operands]
        elif name == "concatenate":  # with nothing, such as the part of a head that is not rotated
            dim = params["dimension"]
            operands = [a for a, var in zip(operands, eqn.invars, strict=True) if var.aval.shape[dim]]
        avals = [TOKEN] * is_ordered + [var.aval for var in eqn.outvars]
        results = self._add(eqn, primitive, params, operands, avals, bodies)
        if is_ordered:
            self.token, *results = results
        return results

    def _add(
        self, eqn: Any, primitive: Any, params: Any, operands: Sequence[Atom], avals: Sequence[Any],
        bodies: tuple[Block, ...] | None = None,
    ) -> list[int]:  # fmt: skip
        """Appends an op to the block being built, in the place of an equation, and returns its results.

        Args:
          bodies: None for an op that has none of the effects of the equation.
        """
        source, key = eqn.source_info, None
        results = [self.value(aval) for aval in avals]
        if not bodies:  # the key of an op with bodies is written when it is pruned
            parts = id(primitive), id(params)
            if parts not in self._heads:
                self._heads[parts] = self.keys.head(primitive, params), params
            described = [atom if isinstance(atom, Lit) else self.values[atom] for atom in operands]
            key = self.keys.key(self._heads[parts][0], described)
        if self.stack.stack:
            ids = id(self.stack), id(source.name_stack)
            if ids not in self._stacks:
                joined = _jax.join_name_stacks(self.stack, source.name_stack)
                self._stacks[ids] = joined, self.stack, source.name_stack
            source = source.replace(name_stack=self._stacks[ids][0])
        has_effects = bodies is not None and _jax.observable_effects(eqn)
        values, index = (tuple(operands), tuple(results)), next(self._indices)
        op = Op(index, primitive, params, *values, bodies or (), source, key, eqn.ctx, has_effects)
        self.ops.append(op)
        if flow.makes_zeros(op):
            self._zeros.update(results)
        return results

    def _control(
        self, name: str, params: Any, operands: list[Atom], is_ordered: bool
    ) -> tuple[dict[str, Any], list[Atom], tuple[Block, ...]]:
        """Returns the parameters, operands and bodies of a loop or a condition; an ordered one carries a token."""
        tokens = [self.token] * is_ordered
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
          The blocks, and those constants.
        """
        blocks: list[Block] = []
        for closed in jaxprs:
            jaxpr, consts = _jax.open_jaxpr(closed)
            inputs = [self.value(var.aval) for var in jaxpr.invars]
            outer, token = (self.ops, self.token, self.stack), self.value(TOKEN)
            self.ops, self.token, self.stack = [], token, _jax.empty_stack()
            outputs = self.inline(jaxpr, consts, inputs)
            if is_ordered:
                inputs = [*inputs[:before], token, *inputs[before:]]
                outputs = outputs if is_condition else [self.token, *outputs]
            blocks.append(Block(tuple(inputs), tuple(self.ops), tuple(outputs)))
            self.ops, self.token, self.stack = outer
        read = (atom for b in blocks for op in b.ops for atom in op.operands)
        read = flow.values_in([*read, *(atom for b in blocks for atom in b.outputs)])
        used = [value for value in dict.fromkeys(read) if value in self.constants]
        for i, block in enumerate(blocks if used else ()):
            names = {constant: self.value(self.values[constant].aval) for constant in used}
            blocks[i] = replace(rename_block(block, names), inputs=(*names.values(), *block.inputs))
        return tuple(blocks), used
