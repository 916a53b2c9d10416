"""Tracing under the mesh of the caller's context (`jax.set_mesh`), which the rest of the compiler must not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import AxisType

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Traced


def trace_under(context: Any, trace: Callable[..., Traced]) -> Callable[..., Traced]:
    """The same tracing under the mesh of a context, its axes `Auto`, so that specs in the step find their axes.

    Args:
      context: the mesh of the context; None without one.
      trace: traces the step.
    """
    explicit = context is not None and AxisType.Auto not in context.axis_types

    def traced(**shapes: Any) -> Traced:
        try:
            with _jax.tracing_under(context):
                return trace(**shapes)
        except (ValueError, TypeError) as error:
            if not explicit or not any(word in str(error) for word in ("Auto", "Explicit", "explicit")):
                raise
            raise OptionError(
                f"the step is written for the explicit axes of {context}, which are planned as AxisType.Auto: {error} "
                "Use jax.lax.with_sharding_constraint in place of jax.sharding.reshard and out_sharding=, and "
                "jax.make_mesh(..., axis_types=(AxisType.Auto, ...))"
            ) from error

    return traced
