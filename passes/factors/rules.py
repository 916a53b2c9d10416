"""The factor rules of all operations: their dims as products of factors.

The problem: to shard an operation one must know which dims of its operands and results go together, and what becomes of
the result when one of them is split. An operation is described by a `Rule`: its dims are products of *factors* (the
indices of an einsum), and each factor has a kind. Sharding is then an assignment of mesh axes to factors.

The source: a table by primitive (`factors.tables`). XLA's partitioner Shardy carries such a rule for most StableHLO
operations; the table also has those without one (`top_k`, `argmax`, random bits, batched linear algebra), distinguishes
kinds that are one to Shardy (`sum` and `max`; a window and a reversal), and does not depend on the versions in which
Shardy's rules differ (reshape, convolution). `tests/passes/factors` holds the table to Shardy's rules wherever there is
one, and to the operations themselves.

A primitive that is not listed here is opaque: a rule read off its lowering would not be sound, since a lowering may
hold constants that come from the shape (a mean divides by it) while the primitive is bound again on the local shape.

Conventions. "Factor" below means one that operands and results share, unless stated otherwise. A dim of size one (or
zero) and every dim of a literal have no factor. A `special` factor may have a size that is smaller than the dims it
is in: then it is the greatest common divisor of their sizes, so that a number of devices that divides it divides the
dims. `sum` becomes `replicate` where the result is not a number (bool products), `max`/`min` where it is complex.

 operation                        dims                                           kind
 -------------------------------  ---------------------------------------------  ------------------------
 elementwise, select_n, clamp,    each dim of the result; a size-one or scalar   parallel
   convert, copy, constraint        operand broadcasts: its dim is ()
 optimization_barrier, pairs      each dim of operand k and of result k          parallel, separate for each k
 dot_general                      batch, lhs free, rhs free                      parallel
                                  contracting (operands only)                    sum
 ragged_dot_general               as dot_general; ragged and group dims          replicate
 reduce_sum                       reduced dim (operand only)                     sum
 reduce_max, reduce_min           reduced dim (operand only)                     max, min
 reduce_prod, and, or, xor,       reduced dim (operand only)                     special
   argmax, argmin
 reduce (any function)            reduced dim                                    replicate
 cumsum, cumprod, cummax,         the cumulative dim                             special
   cummin, cumlogsumexp
 sort                             the sorted dim                                 replicate
 top_k                            the selected dim of the operand; the result's  special; ()
 approx_top_k                     the selected dim                               replicate
 reshape, squeeze                 compound dims, major to minor; what does not   parallel; replicate
                                    divide
 transpose                        every dim                                      parallel
 broadcast_in_dim                 kept dims; new dims (result only)              parallel
 rev                              reversed dims                                  special
 concatenate, split, stack,       the joined or split dim (one factor a dim)     replicate
   unstack, tile
 pad, slice                       untouched dims; touched dims (gcd)             parallel; special
 dynamic_slice                    dims taken whole; others                       parallel; replicate
 dynamic_update_slice             dims updated whole (operand, update, result);  parallel; replicate
                                    others
 iota                             every dim                                      special
 gather                           batch dims of indices and result               parallel
                                  operand dims taken whole (operand, result)     parallel
                                  batching dims (operand, indices, result)       parallel
                                  indexed, collapsed operand dim (operand only)  sum (numbers), replicate (bool, keys)
                                  other indexed dims of operand and result       replicate
                                  the index vector                               ()
 scatter_add, scatter_sub         window dims taken whole, batching dims         parallel
                                  inserted, indexed dim (operand, result)        special
                                  batch dims of indices and updates (only)       sum
 scatter, scatter_mul, min, max   the same, batch dims of indices and updates    replicate
 conv_general_dilated             batch, output feature; input feature           parallel; sum
                                  spatial dims, windows apart (see below)        parallel, sum
                                  spatial dims else (gcd); the kernel's          special; replicate
                                  grouped: group (major factor of the features   parallel; the rest replicate
                                    or of the batch)
 reduce_window*, select_and_*     untouched dims, windows apart                  parallel
                                  other windowed dims (gcd)                      special
 random_bits                      dims of the key; drawn dims (result only)      parallel; special
 random_split                     dims of the key; new dims                      parallel; replicate
   these and fold_in, of keys whose generator draws for all keys together        replicate
 random_wrap, random_unwrap       dims of the key; the key's words               parallel; replicate
 random_seed, fold_in, clone,     as elementwise                                 parallel
   threefry2x32
 rng_bit_generator, rng_uniform,  every dim                                      replicate
   random_gamma
 fft, linear algebra              leading batch dims; the transform's own dims   parallel; replicate
 bitcast_convert_type             common dims; the dim that appears or goes      parallel; replicate
 custom_partitioning              as its user's sharding_rule says               parallel; replicate
 attention of cuDNN               batch, heads; lengths, widths (see below)      parallel; replicate

Windows apart: where windows do not overlap, a windowed dim is a product of plain factors, and the same parameters
hold on the blocks: stride = window w, no padding: operand (o, w), result (o), o parallel, w replicate; the gradients
of that with respect to the kernel (operand (i, j), kernel (i), result (j): i is a sum) and the operand ((i) to (i,
j)).

Attention: a factor that an operand broadcasts over is a sum in the gradient of that operand (`factors.attention`).

Parameters that hold sizes are those of the whole operation; whoever runs the operation on blocks must write the local
sizes: broadcast_in_dim, reshape, slice, gather, dynamic_slice, split, iota, random_bits, and the group counts of a
convolution.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.strategy import Factor, Rule
from alpa_lite.passes.factors.base import Call, is_complex, is_number, make_opaque_rule
from alpa_lite.passes.factors.registered import registered_rule
from alpa_lite.passes.factors.tables import TABLE
from alpa_lite.passes.ir import primitives

_REMEDIES = {
    "ffi_call": "; alpa_lite.register_rule on the name of its target says which dims may be sharded",
}
"""Hints, by primitive, on how to give a rule to operations that only their user knows."""

TABLES_MUST_HOLD = contextvars.ContextVar("tables_must_hold", default=False)
"""Whether an error in a table of rules is raised, as tests want it, instead of leaving the operation opaque."""


def rules_of(ops: Iterable[Op], values: Sequence[Value]) -> Mapping[Any, Rule]:
    """Returns one rule for each distinct `Op.key`. Never raises for an operation that it does not know.

    Args:
      ops: of one graph, in any order; `scan`, `while` and `cond` are left out, their bodies' ops count.
      values: the graph's values.

    Returns:
      Rule by key. Operands and results are in the op's order, literals included.
    """
    calls: dict[Any, Call] = {}
    for op in ops:
        if op.key not in calls and op.name not in primitives.CONTROL:
            operands = tuple(a.aval if isinstance(a, Lit) else values[a].aval for a in op.operands)
            literals = tuple(isinstance(a, Lit) for a in op.operands)
            calls[op.key] = Call(op.primitive, op.params, operands, tuple(values[r].aval for r in op.results), literals)
    return {key: finish(describe(call), call) for key, call in calls.items()}


def describe(call: Call) -> Rule:
    """Returns the user's rule, that of the hand table, or an opaque one.

    Raises:
      RuleError: the user's rule does not fit.
    """
    given = registered_rule(call)
    if given is not None:
        return given
    entry = TABLE.get(call.name)
    if entry is None:
        return make_opaque_rule(call, f"no rule for the primitive {call.name}{_REMEDIES.get(call.name, '')}")
    try:
        return entry(call)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, AssertionError) as error:
        # A JAX version whose parameters differ from the table's must cost a sharding, not the whole plan.
        if TABLES_MUST_HOLD.get():
            raise
        return make_opaque_rule(call, f"{call.name} has parameters that its table does not know: {error!r}")


def finish(rule: Rule, call: Call) -> Rule:
    """Applies the conditions common to all operations to a rule: literals are whole, and sums are sums of numbers."""
    used = {f for dims, literal in zip(rule.operands, call.literals, strict=True) if literal for d in dims for f in d}
    factors = []
    for number, factor in enumerate(rule.factors):
        without = [
            aval for aval, dims in zip(call.results, rule.results, strict=True) if all(number not in d for d in dims)
        ]
        numbers = all(is_number(aval) for aval in without)
        ordered = numbers and not any(is_complex(aval) for aval in without)
        unfit = not (numbers if factor.kind == "sum" else ordered or factor.kind not in ("max", "min"))
        factors.append(Factor(factor.size, "replicate") if number in used or unfit else factor)
    operands = tuple(
        ((),) * len(dims) if literal else dims for dims, literal in zip(rule.operands, call.literals, strict=True)
    )
    return replace(rule, factors=tuple(factors), operands=operands)
