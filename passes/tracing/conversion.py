"""From a jaxpr to a `Graph`: calls inlined, control flow kept as bodies, dead operations removed.

A jaxpr is a tree: equations such as `jit` and `custom_vjp_call` carry jaxprs of their own. Inlining walks the tree
once and gives every value an integer, so it costs one dictionary look-up per operand, however deep the calls are
nested. Nothing is traced again.

What a call means for its body:

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

What says where a value lies becomes one `_jax.CONSTRAINT` for each operand, which later passes read.

Name stacks of the calls are put in front of those of the body, as JAX's own lowering does, so that named scopes
survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from alpa_lite import _jax
from alpa_lite.errors import TracingError
from alpa_lite.graph import Atom, Block, Graph, KeyWriter, Lit, Op, Value
from alpa_lite.passes.ir import primitives, pruning
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.tracing import indices, manual_regions
from alpa_lite.passes.tracing.rows import with_batched_rows
from alpa_lite.passes.tracing.trip_counts import with_counted_loops

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
    jaxpr: Any, keys: KeyWriter | None = None, platform: str = "", annotations: bool = True, *, fold_empty: bool = True
) -> Graph:  # fmt: skip
    """The graph of a closed jaxpr. Linear in the number of equations, those of inlined calls counted once per call.

    Args:
      jaxpr: a closed jaxpr. Its constants become the last inputs of the graph's block, scalars excepted, which become
      literals.
      keys: writes the keys; a new one by default. For a part of another graph, that graph's.
      platform: "cpu", "cuda", "rocm" or "tpu", whose branches are taken; all are kept if it is not known.
      annotations: whether what says where a value lies is heeded.
      fold_empty: whether arrays without elements become constants; else the operations that make them stay.

    Returns:
      The graph: values and ops numbered densely, in program order, dead ops removed.
    """
    builder = _Builder(keys or Keys(), platform, annotations, fold_empty)
    opened, consts = _jax.open_jaxpr(jaxpr)
    inputs = [builder.value(var.aval) for var in opened.invars]
    ops: list[Op] = []
    outputs = builder.inline(opened, [builder.constant(const) for const in consts], inputs, _jax.empty_stack(), ops)
    graph = Graph(
        values=tuple(builder.values),
        block=Block((*inputs, *builder.constant_numbers), tuple(ops), tuple(outputs)),
        constants=tuple(builder.constants),
        keys=builder.keys,
    )
    return pruning.prune(with_batched_rows(with_counted_loops(graph)), keep_inputs=len(inputs))


class _Builder:
    """The tables that one conversion fills."""

    def __init__(self, keys: KeyWriter, platform: str, annotations: bool, fold_empty: bool) -> None:
        self.values: list[Value] = []
        self.constants: list[Any] = []
        self.constant_numbers: list[int] = []
        self.keys = keys
        self._platform, self._fold_empty = platform, fold_empty
        self._ignored = _jax.is_empty_constraint if annotations else _jax.is_constraint
        self._constant_atoms: dict[int, Atom] = {}
        self._by_aval: dict[int, Value] = {}
        self._heads: dict[int, tuple[str, bool]] = {}
        self._scopes: list[dict[int, int]] = []  # for each body being built, the constants that it uses
        self._expansions: list[Any] = []  # kept: what is known of an equation is known by its id
        self._tokens: list[Atom] = [Lit(np.int32(0), TOKEN)]  # of each block being built, that of its last callback
        self._ops = 0

    def value(self, aval: Any) -> int:
        """A new value number."""
        value = self._by_aval.get(id(aval))
        if value is None:
            value = Value(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(bool)), aval)
            self._by_aval[id(aval)] = value  # the Value keeps the aval alive, so its id stays its own
        self.values.append(value)
        return len(self.values) - 1

    def constant(self, const: Any) -> Atom:
        """The atom of a closed-over array, as seen from the block being built: a literal for a scalar."""
        atom = self._constant_atoms.get(id(const))
        if atom is None:
            aval = jax.typeof(const)
            if _is_plain_scalar(const, aval):
                atom = Lit(np.asarray(const), aval)
            else:
                atom = self.value(aval)
                self.constant_numbers.append(atom)
                self.constants.append(const)
            self._constant_atoms[id(const)] = atom
        return self._seen_from_here(atom) if isinstance(atom, int) else atom

    def _seen_from_here(self, constant: int) -> int:
        """The number of one of the graph's constants in the innermost body, which takes it in as an input."""
        if not self._scopes:
            return constant
        scope = self._scopes[-1]
        if constant not in scope:
            scope[constant] = self.value(self.values[constant].aval)
        return scope[constant]

    def inline(
        self, jaxpr: Any, consts: Sequence[Atom], inputs: Sequence[Atom], stack: Any, ops: list[Op]
    ) -> list[Atom]:
        """Appends the jaxpr's ops to `ops`, with `stack` in front of their name stacks, and returns its outputs."""
        env: dict[Any, Atom] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))
        sources: dict[int, Any] = {}
        for eqn in jaxpr.eqns:
            operands = [self._literal(atom) if _jax.is_literal(atom) else env[atom] for atom in eqn.invars]
            name = eqn.primitive.name
            for i in indices.unread(eqn):
                (operands[i],) = self.inline(indices.zeros(eqn.invars[i].aval), (), (), stack, ops)
            expansion = _expansion(eqn)
            if expansion is not None:
                self._expansions.append(expansion)
                results = self._inlined(expansion, eqn, operands, stack, ops)
                if name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
                    assert ops[-1].name == "while"
                    ops[-1] = replace(ops[-1], params={**ops[-1].params, ELEMENTWISE: True})
            elif name in CALL_BODY and CALL_BODY[name] in eqn.params:
                results = self._call(eqn, operands, stack, ops)
            elif name == "cond" and (branch := self._branch(eqn.params)) is not None:
                results = self._inlined(branch, eqn, operands[1:], stack, ops)
            elif name in primitives.PLACEMENT and self._ignored(eqn):
                results = operands
            elif name in primitives.PLACEMENT and any(said := _jax.constraints_of(eqn)):
                results = self._constraints(eqn, operands, said, stack, ops)
            elif self._fold_empty and _is_empty(eqn):
                results = self._empty(eqn.outvars)
            elif (same := _operand(eqn, operands)) is not None:
                results = [same]
            elif _is_zero(eqn, operands):
                results = self.inline(indices.zeros(eqn.outvars[0].aval), (), (), stack, ops)
            elif name == "scan" and eqn.params["length"] == 0 and _are_arrays(eqn.outvars):
                results = self._no_iterations(eqn, operands)
            else:
                results = [self.value(var.aval) for var in eqn.outvars]
                self._append(eqn, operands, results, stack, sources, ops)
            env.update(zip(eqn.outvars, results, strict=True))
        return [self._literal(atom) if _jax.is_literal(atom) else env[atom] for atom in jaxpr.outvars]

    def _branch(self, params: Any) -> Any:
        """The branch of a condition that the platform decides; None if another does, or if it holds a kernel."""
        platforms = params.get("branches_platforms")
        if platforms is None or not self._platform:
            return None
        for names, branch in zip(platforms, params["branches"], strict=True):
            if names is None or self._platform in names:
                return None if _holds_kernel(branch) else branch
        return None

    def _no_iterations(self, eqn: Any, operands: list[Atom]) -> list[Atom]:
        """The results of a loop that never runs, which no compiler keeps: what it starts with, and empty stacks."""
        consts, carry = _jax.scan_counts(eqn.params)
        return [*operands[consts : consts + carry], *self._empty(eqn.outvars[carry:])]

    def _empty(self, variables: Sequence[Any]) -> list[Atom]:
        """Arrays without elements."""
        return [self.constant(np.zeros(var.aval.shape, var.aval.dtype)) for var in variables]

    def _literal(self, literal: Any) -> Atom:
        if np.size(literal.val) > _SMALL_LITERAL:
            return self.constant(literal.val)
        return Lit(literal.val, literal.aval)

    def _call(self, eqn: Any, operands: list[Atom], stack: Any, ops: list[Op]) -> Sequence[Atom]:
        name, params = eqn.primitive.name, eqn.params
        if name in primitives.CHECKPOINT and params["differentiated"]:
            operands = self._barrier(eqn, operands, stack, ops)
        scope = "checkpoint" if name in primitives.CHECKPOINT else f"jit({params['name']})" if name == "jit" else None
        return self._inlined(params[CALL_BODY[name]], eqn, operands, stack, ops, scope)

    def _inlined(
        self, jaxpr: Any, eqn: Any, operands: list[Atom], stack: Any, ops: list[Op], scope: str | None = None
    ) -> list[Atom]:
        """The results of an equation for which a jaxpr with constants stands, under its name and a scope."""
        body, consts = _jax.open_jaxpr(jaxpr)
        inner = _jax.joined_stack(stack, eqn.source_info.name_stack, scope)
        return self.inline(body, [self.constant(const) for const in consts], operands, inner, ops)

    def _constraints(
        self, eqn: Any, operands: list[Atom], said: Sequence[dict[str, Any] | None], stack: Any, ops: list[Op]
    ) -> list[Atom]:
        """The operands, each behind what the equation says of it."""
        source = eqn.source_info.replace(name_stack=_jax.joined_stack(stack, eqn.source_info.name_stack))
        out = list(operands)
        for i, params in enumerate(said):
            if params is not None and isinstance(operands[i], int):
                out[i] = result = self.value(eqn.outvars[i].aval)
                key = self.keys.key(self.keys.head(_jax.CONSTRAINT, params), [self._described(operands[i])])
                index = self._index()
                ops.append(Op(index, _jax.CONSTRAINT, params, (operands[i],), (result,), (), source, key, eqn.ctx))
        return out

    def _barrier(self, eqn: Any, operands: list[Atom], stack: Any, ops: list[Op]) -> list[Atom]:
        """The operands of a rematerialised body behind a barrier."""
        prevent = eqn.params["prevent_cse"]
        prevent = (prevent,) * len(operands) if isinstance(prevent, bool) else prevent
        held = [i for i, operand in enumerate(operands) if prevent[i] and isinstance(operand, int)]
        if not held:
            return operands
        out = list(operands)
        for i in held:
            out[i] = self.value(eqn.invars[i].aval)
        primitive = _jax.optimization_barrier_primitive()
        before = [operands[i] for i in held]
        key = self.keys.key(self.keys.head(primitive, {}), [self._described(atom) for atom in before])
        source = eqn.source_info.replace(name_stack=_jax.joined_stack(stack, eqn.source_info.name_stack))
        results = tuple(atom for i in held if isinstance(atom := out[i], int))
        ops.append(Op(self._index(), primitive, {}, tuple(before), results, (), source, key, eqn.ctx))
        return out

    def _append(
        self, eqn: Any, operands: list[Atom], results: list[int], stack: Any, sources: dict[int, Any], ops: list[Op]
    ) -> None:
        """Appends the op of one equation that is not a call."""
        primitive, params, name = eqn.primitive, eqn.params, eqn.primitive.name
        bodies: tuple[Block, ...] = ()
        is_ordered = _jax.has_ordered_effects(eqn)
        if name == "scan":
            params, operands, bodies = self._scan(params, operands, is_ordered)
        elif name == "while":
            params, operands, bodies = self._while(params, operands, is_ordered)
        elif name == "cond":
            operands, bodies = self._cond(params, operands, is_ordered)
        elif is_ordered:
            primitive, params = self._ordered(eqn)
            operands = [self._tokens[-1], *operands]
        elif name == "concatenate":  # with nothing, such as the part of a head that is not rotated
            dim = params["dimension"]
            operands = [a for a, var in zip(operands, eqn.invars, strict=True) if var.aval.shape[dim]]
        if is_ordered:
            self._tokens[-1] = token = self.value(TOKEN)
            results = [token, *results]
        head, effects = self._heads.get(id(eqn), (None, False))
        if head is None:
            head = self.keys.head(primitive, params, structured=bool(bodies))
            effects = _jax.observable_effects(eqn)
            self._heads[id(eqn)] = head, effects
        key = head if bodies else self.keys.key(head, [self._described(atom) for atom in operands])
        source = eqn.source_info
        if stack.stack:
            inner = source.name_stack
            if id(inner) not in sources:
                sources[id(inner)] = _jax.joined_stack(stack, inner)
            source = source.replace(name_stack=sources[id(inner)])
        ops.append(
            Op(
                self._index(),
                primitive,
                params,
                tuple(operands),
                tuple(results),
                bodies,
                source,
                key,
                eqn.ctx,
                effects,
            )
        )

    def _ordered(self, eqn: Any) -> tuple[Any, dict[str, Any]]:
        """Primitive and parameters of an ordered callback with a token."""
        found = _jax.in_order(eqn.primitive, eqn.params, TOKEN)
        if found is None:
            line = _jax.source_line(eqn.source_info)
            raise TracingError(
                f"an ordered callback within {eqn.primitive.name}{f' at {line}' if line else ''} cannot keep its order "
                "on several devices; use ordered=False, or call it outside"
            )
        return found

    def _scan(
        self, params: Any, operands: list[Atom], is_ordered: bool
    ) -> tuple[dict[str, Any], list[Atom], tuple[Block, ...]]:
        num_consts, num_carry = _jax.scan_counts(params)
        tokens = [self._tokens[-1]] * is_ordered
        bodies, hoisted = self._bodies([(params["jaxpr"], num_consts)], is_ordered)
        kept = {
            "jaxpr": params["jaxpr"],
            "length": params["length"],
            "reverse": params["reverse"],
            "unroll": params["unroll"],
            "num_consts": num_consts + len(hoisted),
            "num_carry": num_carry + len(tokens),
        }
        return kept, [*hoisted, *operands[:num_consts], *tokens, *operands[num_consts:]], bodies

    def _while(
        self, params: Any, operands: list[Atom], is_ordered: bool
    ) -> tuple[dict[str, Any], list[Atom], tuple[Block, ...]]:
        conds, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        tokens = [self._tokens[-1]] * is_ordered
        cond, cond_hoisted = self._bodies([(params["cond_jaxpr"], conds)], is_ordered, is_condition=True)
        body, body_hoisted = self._bodies([(params["body_jaxpr"], params["body_nconsts"])], is_ordered)
        kept = dict(
            params,
            cond_nconsts=conds + len(cond_hoisted),
            body_nconsts=params["body_nconsts"] + len(body_hoisted),
        )
        given = [*cond_hoisted, *operands[:conds], *body_hoisted, *operands[conds:consts], *tokens, *operands[consts:]]
        return kept, given, (*cond, *body)

    def _cond(self, params: Any, operands: list[Atom], is_ordered: bool) -> tuple[list[Atom], tuple[Block, ...]]:
        tokens = [self._tokens[-1]] * is_ordered
        bodies, hoisted = self._bodies([(branch, 0) for branch in params["branches"]], is_ordered)
        return [operands[0], *hoisted, *tokens, *operands[1:]], bodies

    def _bodies(
        self, jaxprs: Sequence[tuple[Any, int]], is_ordered: bool, *, is_condition: bool = False
    ) -> tuple[tuple[Block, ...], list[int]]:
        """The blocks of an op, all with the same inputs: the constants that any of them uses, then the jaxpr's own.

        Args:
          jaxprs: each with the number of its inputs that a token comes behind.
          is_ordered: whether the blocks take a token, and give one as their first output.
          is_condition: whether they give none, since a condition has no effects (`_jax.expansion`).

        Returns:
          The blocks, and those constants as seen from the block that holds the op.
        """
        parts = []
        for closed, before in jaxprs:
            jaxpr, consts = _jax.open_jaxpr(closed)
            self._scopes.append({})
            inputs = [self.value(var.aval) for var in jaxpr.invars]
            token = self.value(TOKEN)
            self._tokens.append(token)
            ops: list[Op] = []
            outputs = self.inline(jaxpr, [self.constant(const) for const in consts], inputs, _jax.empty_stack(), ops)
            last = self._tokens.pop()
            if is_ordered:
                inputs = [*inputs[:before], token, *inputs[before:]]
                outputs = outputs if is_condition else [last, *outputs]
            parts.append((self._scopes.pop(), inputs, ops, outputs))
        used = list(dict.fromkeys(constant for scope, *_ in parts for constant in scope))
        blocks = []
        for scope, inputs, ops, outputs in parts:
            taken = [scope[c] if c in scope else self.value(self.values[c].aval) for c in used]
            blocks.append(Block((*taken, *inputs), tuple(ops), tuple(outputs)))
        return tuple(blocks), [self._seen_from_here(constant) for constant in used]

    def _described(self, atom: Atom) -> Value | Lit:
        return atom if isinstance(atom, Lit) else self.values[atom]

    def _index(self) -> int:
        self._ops += 1
        return self._ops - 1


def _expansion(eqn: Any) -> Any:
    """The jaxpr of simpler operations that an equation stands for, or None."""
    if manual_regions.has_global_form(eqn):
        return _jax.traced(eqn, manual_regions.global_form(eqn))
    summed = manual_regions.summed(eqn)
    return _jax.expansion(eqn) if summed is None else _jax.traced(eqn, summed)


def _holds_kernel(jaxpr: Any) -> bool:
    """Whether a jaxpr or one within it calls a function that is one operation."""
    return any(
        eqn.primitive.name in primitives.KERNELS or any(map(_holds_kernel, _jax.inner_jaxprs(eqn.params)))
        for eqn in _jax.open_jaxpr(jaxpr)[0].eqns
    )


def _is_plain_scalar(const: Any, aval: Any) -> bool:
    if np.ndim(const) != 0 or getattr(aval, "weak_type", False) or isinstance(const, Tracer):
        return False
    if not isinstance(const, np.ndarray | np.generic | jax.Array):
        return False
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _operand(eqn: Any, operands: Sequence[Atom]) -> Atom | None:
    """The operand that an operation returns as it is, whatever the others are; None of any other operation.

    No compiler keeps it, nor what nothing else reads: such as which of its branches a `switch` under `vmap` takes for
    each element, by which JAX chooses between an operand of the branches and the same again. JAX writes a conversion of
    a dtype to itself where a value stops being weak.
    """
    name = eqn.primitive.name
    if name == "stop_gradient":
        return operands[0]
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
        return None if _jax.places_result(eqn) else operands[0]
    if name == "select_n" and len(set(operands[1:])) == 1:
        return operands[1]
    return None


def _is_zero(eqn: Any, operands: Sequence[Atom]) -> bool:
    """Whether an equation multiplies integers by zero: no compiler keeps what makes the other factor."""
    if eqn.primitive.name != "mul" or not np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        return False
    return any(isinstance(atom, Lit) and not np.any(atom.value) for atom in operands)


def _is_empty(eqn: Any) -> bool:
    """Whether an equation computes no element and does nothing else: its operands need not be brought anywhere."""
    shaped = bool(eqn.outvars) and _are_arrays(eqn.outvars) and not eqn.effects
    return shaped and all(0 in var.aval.shape for var in eqn.outvars)


def _are_arrays(variables: Sequence[Any]) -> bool:
    """Whether all are arrays of plain dtypes, not random keys or references."""
    return all(isinstance(getattr(var.aval, "dtype", None), np.dtype) for var in variables)
