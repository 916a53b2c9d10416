"""Mutable references (`jax.new_ref`) of a step, replaced by values.

A reference that the step creates becomes a value that its reads and writes thread through the program, loops and
branches included, as `jax.jit` does when it lowers: no later pass sees one. One that comes from outside of the step is
refused: what a sharded step writes could not be in the caller's buffer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import TracingError

REMEDY = "pass its value, ref[...], as an argument, return the new value, and write it back after the call"


def discharge(fun: Callable[..., Any], jaxpr: Any) -> Any:
    """The closed jaxpr of a step without references.

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
    return _jax.without_references(jaxpr) if _jax.creates_references(jaxpr) else jaxpr


def _refusal(fun: Callable[..., Any], ref: Any, reader: Any) -> str:
    line = _jax.source_line(reader.source_info) if reader is not None else ""
    where = f" at {line}" if line else ""
    return (
        f"the step uses the mutable reference {_name(fun, ref)} ({ref.dtype}{list(ref.shape)}){where}, which was "
        f"created outside of it; {REMEDY}"
    )


def _name(fun: Callable[..., Any], ref: Any) -> str:
    """The variable of a function that holds a reference."""
    try:
        found = inspect.getclosurevars(inspect.unwrap(fun))
    except TypeError:  # a callable object
        return "of type jax.Ref"
    names = (name for scope in (found.nonlocals, found.globals) for name, value in scope.items() if value is ref)
    return next(names, "of type jax.Ref")
