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
from alpa_lite.ir.graph import Atom, Graph
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.tracing import manual_regions

_CLAMPING = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def expansion(eqn: Any, convert: Callable[[Any], Graph]) -> Any:
    """The jaxpr of simpler operations that an equation stands for, or None; `convert` gives the graph of a jaxpr."""
    if manual_regions.has_global_form(eqn):
        return _jax.retrace(eqn, manual_regions.global_form(eqn, convert(eqn.params["jaxpr"])))
    summed = manual_regions.reduction_function(eqn)
    return _jax.expansion(eqn) if summed is None else _jax.retrace(eqn, summed)


def holds_kernel(jaxpr: Any) -> bool:
    """Returns whether a jaxpr or one within it calls a function that is one operation."""
    return any(
        eqn.primitive.name in primitives.KERNELS or any(map(holds_kernel, _jax.inner_jaxprs(eqn.params)))
        for eqn in _jax.open_jaxpr(jaxpr)[0].eqns
    )


def is_plain_scalar(const: Any, aval: Any) -> bool:
    """Returns whether a closed-over constant is a scalar that may become a literal."""
    if not isinstance(const, np.ndarray | np.generic | jax.Array) or isinstance(const, Tracer) or np.ndim(const):
        return False
    return not getattr(aval, "weak_type", False) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def find_same_operand(eqn: Any, operands: Sequence[Atom]) -> Atom | None:
    """Returns the operand that an operation returns as it is, whatever the others are; None of any other operation.

    No compiler keeps it, nor what nothing else reads: such as which of its branches a `switch` under `vmap` takes for
    each element, by which JAX chooses between an operand of the branches and the same again; or where an update without
    elements is written. JAX writes a conversion of a dtype to itself where a value stops being weak.
    """
    name = eqn.primitive.name
    if name == "stop_gradient":
        return operands[0]
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
        return None if _jax.places_result(eqn) else operands[0]
    if name == "select_n" and len(set(operands[1:])) == 1:
        return operands[1]
    updates = 1 if name == "dynamic_update_slice" else 2 if name in primitives.SCATTERS else None
    if updates is not None and 0 in eqn.invars[updates].aval.shape:
        return operands[0]
    return None


def nonzero_addend(eqn: Any, operands: Sequence[Atom], zeros: Set[int]) -> Atom | None:
    """Returns the operand to which an addition adds zeros, as XLA simplifies it; None if it adds something else.

    Sums of gradients that a Python loop accumulates begin with zeros. Without them such a sum consists of partial sums
    alone, and one reduction after the loop is enough.

    Args:
      zeros: the values that are known to be zero.
    """
    if eqn.primitive.name not in primitives.ADDS:
        return None
    result = eqn.outvars[0].aval.strip_weak_type()
    for atom, other, var in ((operands[0], operands[1], eqn.invars[0]), (operands[1], operands[0], eqn.invars[1])):
        if (flow.is_literal_zero(other) or other in zeros) and var.aval.strip_weak_type() == result:
            return atom
    return None


def is_zero(eqn: Any, operands: Sequence[Atom]) -> bool:
    """Returns whether an equation multiplies integers by zero: no compiler keeps what makes the other factor."""
    if eqn.primitive.name != "mul" or not np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        return False
    return any(map(flow.is_literal_zero, operands))


def is_empty(eqn: Any) -> bool:
    """Whether an equation computes no element and does nothing else: its operands need not be brought anywhere."""
    shaped = bool(eqn.outvars) and are_arrays(eqn.outvars) and not eqn.effects
    return shaped and all(0 in var.aval.shape for var in eqn.outvars)


def are_arrays(variables: Sequence[Any]) -> bool:
    """Returns whether all are arrays of plain dtypes, not random keys or references."""
    return all(isinstance(getattr(var.aval, "dtype", None), np.dtype) for var in variables)


def unread_indices(eqn: Any) -> tuple[int, ...]:
    """Returns the positions of the operands of an equation that are indices which can only mean 0.

    A slice of all of a dim begins at 0 whatever its index says, since `dynamic_slice` and `dynamic_update_slice` clamp,
    and so does `gather` in the modes that clamp or promise: taking elements of a dim of one is the usual case.
    Compilers drop such indices with all that computes them; so a plan must not bring them anywhere.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "gather":
        whole = eqn.invars[0].aval.shape
        taken = params["dimension_numbers"].start_index_map
        free = params["mode"] in _CLAMPING and all(params["slice_sizes"][d] == whole[d] for d in taken)
        return (1,) if free else ()
    if name == "dynamic_slice":
        return _whole(1, eqn.invars[0].aval.shape, params["slice_sizes"])
    if name == "dynamic_update_slice":
        return _whole(2, eqn.invars[0].aval.shape, eqn.invars[1].aval.shape)
    return ()


@functools.cache
def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the jaxpr that makes zeros, which any device has."""
    return jax.make_jaxpr(lambda: lax.full(shape, 0, dtype))().jaxpr


def _whole(first: int, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(first + i for i, (size, part) in enumerate(zip(shape, sizes, strict=True)) if size == part)


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
            raise TracingError(_refusal(fun, const, next((e for e in opened.eqns if var in e.invars), None)))
    return _jax.discharge_references(jaxpr) if _jax.creates_references(jaxpr) else jaxpr


def _refusal(fun: Callable[..., Any], ref: Any, reader: Any) -> str:
    line = _jax.source_line(reader.source_info) if reader is not None else ""
    where = f" at {line}" if line else ""
    return (
        f"the step uses the mutable reference {_name(fun, ref)} ({ref.dtype}{list(ref.shape)}){where}, which was "
        f"created outside of it; {REFERENCE_REMEDY}"
    )


def _name(fun: Callable[..., Any], ref: Any) -> str:
    """Returns the variable of a function that holds a reference."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(fun))
    except TypeError:  # a callable object
        return "of type jax.Ref"
    names = (name for scope in (found.nonlocals, found.globals) for name, value in scope.items() if value is ref)
    return next(names, "of type jax.Ref")
