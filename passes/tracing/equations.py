"""Equations that become other operations, or none: what they expand to, and what no compiler computes.

A mutable reference (`jax.new_ref`) that the step creates becomes a value that its reads and writes thread through the
program, loops and branches included, as `jax.jit` does when it lowers: no later pass sees one. One that comes from
outside of the step is refused: what a sharded step writes could not be in the caller's buffer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from alpa_lite import _jax
from alpa_lite.errors import TracingError
from alpa_lite.ir.graph import Atom, Graph, Lit
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.tracing import manual_regions

_CLAMPING = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
_REDUCTIONS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def expansion(eqn: Any, convert: Callable[[Any], Graph]) -> Any:
    """The jaxpr of simpler operations that an equation stands for, or None; `convert` gives the graph of a jaxpr.

    A collective over dims is how `jax.vmap` writes a reduction.
    """
    name, params = eqn.primitive.name, eqn.params
    if manual_regions.has_global_form(eqn):
        return _jax.retrace(eqn, manual_regions.global_form(eqn, convert(params["jaxpr"])))
    if name in _REDUCTIONS and all(isinstance(axis, int) for axis in params["axes"]):
        return _jax.retrace(eqn, lambda *xs: [_REDUCTIONS[name](x, params["axes"]) for x in xs])
    return _jax.expansion(eqn)


def holds_kernel(jaxpr: Any) -> bool:
    """Returns whether a jaxpr or one within it calls a function that is one operation."""
    return any(eqn.primitive.name in primitives.KERNELS for eqn in _jax.walk_equations(jaxpr))


def is_plain_scalar(const: Any, aval: Any) -> bool:
    """Returns whether a closed-over constant is a scalar that may become a literal."""
    if not isinstance(const, np.ndarray | np.generic | jax.Array) or isinstance(const, Tracer) or np.ndim(const):
        return False
    return not getattr(aval, "weak_type", False) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


ZERO = Lit(0, None)
"""The result of `simplify` that stands for zeros."""


def simplify(eqn: Any, operands: Sequence[Atom], zeros: Set[int]) -> Atom | None:
    """Returns the operand that an operation returns as it is, or `ZERO`; None of any other operation.

    No compiler keeps it, nor what nothing else reads: such as which of its branches a `switch` under `vmap` takes for
    each element, by which JAX chooses between an operand of the branches and the same again; or where an update without
    elements is written; or the other factor of an integer zero. JAX writes a conversion of a dtype to itself where a
    value stops being weak.

    Sums of gradients that a Python loop accumulates begin with zeros, which XLA does not add, either. Without them such
    a sum consists of partial sums alone, and one reduction after the loop is enough.

    Args:
      zeros: the values that are known to be zero.
    """
    name, inputs, out = eqn.primitive.name, [var.aval for var in eqn.invars], eqn.outvars
    if name == "stop_gradient":
        return operands[0]
    if name == "convert_element_type" and inputs[0].dtype == out[0].aval.dtype and not _jax.places_result(eqn):
        return operands[0]
    if name == "select_n" and len(set(operands[1:])) == 1:
        return operands[1]
    if name in primitives.ADDS:
        for n, other in enumerate(operands[::-1]):
            is_zero = flow.is_literal_zero(other) or other in zeros
            if is_zero and inputs[n].strip_weak_type() == out[0].aval.strip_weak_type():
                return operands[n]
    if name == "mul" and np.issubdtype(out[0].aval.dtype, np.integer) and any(map(flow.is_literal_zero, operands)):
        return ZERO
    updates = 1 if name == "dynamic_update_slice" else 2 if name in primitives.SCATTERS else None
    return operands[0] if updates is not None and 0 in inputs[updates].shape else None


def is_empty(eqn: Any) -> bool:
    """Whether an equation computes no element and does nothing else: its operands need not be brought anywhere."""
    shaped = bool(eqn.outvars) and are_arrays(eqn.outvars) and not eqn.effects
    return shaped and all(0 in var.aval.shape for var in eqn.outvars)


def are_arrays(variables: Sequence[Any]) -> bool:
    """Returns whether all are arrays of plain dtypes, not random keys or references."""
    return all(isinstance(getattr(var.aval, "dtype", None), np.dtype) for var in variables)


def unread_indices(eqn: Any) -> list[int]:
    """Returns the positions of the operands of an equation that are indices which can only mean 0.

    A slice of all of a dim begins at 0 whatever its index says, since `dynamic_slice` and `dynamic_update_slice` clamp,
    and so does `gather` in the modes that clamp or promise: taking elements of a dim of one is the usual case.
    Compilers drop such indices with all that computes them; so a plan must not bring them anywhere.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in ("gather", "dynamic_slice", "dynamic_update_slice"):
        return []
    whole, first = eqn.invars[0].aval.shape, 2 if name == "dynamic_update_slice" else 1
    sizes = eqn.invars[1].aval.shape if name == "dynamic_update_slice" else params["slice_sizes"]
    if name != "gather":
        return [first + dim for dim, size in enumerate(whole) if size == sizes[dim]]
    taken = params["dimension_numbers"].start_index_map
    return [1] if params["mode"] in _CLAMPING and all(sizes[dim] == whole[dim] for dim in taken) else []


@functools.cache
def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the jaxpr that makes zeros, which any device has."""
    return jax.make_jaxpr(lambda: lax.full(shape, 0, dtype))().jaxpr


REFERENCE_REMEDY = "pass its value, ref[...], as an argument, return the new value, and write it back after the call"


def without_references(fun: Callable[..., Any], jaxpr: Any) -> Any:
    """Returns the closed jaxpr of a step without references.

    Args:
      fun: the step, whose variables are searched for the name of a reference.
      jaxpr: its closed jaxpr.

    Raises:
      TracingError: the step uses a reference that it does not create; names it and the line that uses it.
    """
    opened, consts = _jax.open_jaxpr(jaxpr)
    for var, const in zip(opened.constvars, consts, strict=True):
        if isinstance(const, jax.Ref):
            reader = next((eqn for eqn in opened.eqns if var in eqn.invars), None)
            line = "" if reader is None else _jax.source_line(reader.source_info)
            raise TracingError(
                f"the step uses the mutable reference {_variable_of(fun, const)} ({const.dtype}{list(const.shape)})"
                f"{f' at {line}' if line else ''}, which was created outside of it; {REFERENCE_REMEDY}"
            )
    return _jax.discharge_references(jaxpr)


def _variable_of(fun: Callable[..., Any], ref: Any) -> str:
    """Returns the variable of a function that holds a reference."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(fun))
    except TypeError:  # a callable object
        return "of type jax.Ref"
    names = (name for scope in (found.nonlocals, found.globals) for name, value in scope.items() if value is ref)
    return next(names, "of type jax.Ref")
