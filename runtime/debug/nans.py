"""`jax_debug_nans` and `jax_debug_infs` for planned steps: the source line and the operation that made the value.

JAX cannot run the user's function again for executables that it did not make from it. So the results of the step are
looked at here, and the traced step is evaluated one operation at a time (`passes.ir.invalid`), on the arguments of the
call. They must still be there: with one of these settings, a step works on copies of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.ir.invalid import origin
from alpa_lite.runtime.multihost import global_array


def check(results: Sequence[Any], kinds: Sequence[str], traced: Traced, arguments: Callable[[], Sequence[Any]]) -> None:
    """Raises FloatingPointError if a result is invalid; names the source line and the operation that made it so.

    Args:
      results: flat, of a call of the step.
      kinds: of invalid values, as `_jax.checked_values` gives them.
      arguments: gives the flat arguments of that call, as the traced step takes them.
    """
    kind = " or ".join(kinds)
    if any(map(_test(kind), results)):
        raise FloatingPointError(_describe(traced, arguments(), kind))


def _describe(traced: Traced, leaves: Sequence[Any], kind: str) -> str:
    """Returns the origin of the invalid value, in words."""
    try:
        found = origin(traced.graph, _together(leaves), _test(kind))
    except Exception as error:  # of an operation that cannot run by itself
        return f"{traced.name} made an invalid value ({kind}); evaluating it by operations failed: {error}"
    if found is None:
        return f"{traced.name} made an invalid value ({kind}), which it does not if evaluated one operation at a time"
    reached = f"It reaches {format_path(traced.outputs[found.output].path)}" if traced.outputs else ""
    if found.op is None:
        path = format_path(traced.arguments[found.argument].path) if found.argument >= 0 else "a constant"
        return f"{path} was given to {traced.name} with an invalid value ({kind}). {reached}"
    line = _jax.describe_location(found.op.source) or "an unknown line"
    numbers = ", ".join(map(str, found.iterations))
    loops = f", in iteration {numbers} of the loop{'s' * (len(found.iterations) > 1)}" if numbers else ""
    return f"invalid value ({kind}) encountered in {found.op.name} at {line}{loops}. {reached}"


def _test(kind: str) -> Callable[[Any], bool]:
    """Returns a test whether an array has values of this kind."""

    def invalid(array: Any) -> bool:
        if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.inexact):
            return False
        if isinstance(array, jax.Array) and not global_array.is_addressable(array.sharding):
            return False
        bad = jnp.isnan(array) if kind == "nan" else jnp.isinf(array) if kind == "inf" else ~jnp.isfinite(array)
        return bool(bad.any())

    return invalid


def _together(leaves: Sequence[Any]) -> list[Any]:
    """Arrays that one operation can take together: those on submeshes are spread over all of their devices."""
    sets = {frozenset(leaf.sharding.device_set) for leaf in leaves if isinstance(leaf, jax.Array)}
    if len(sets) <= 1:
        return list(leaves)
    devices = sorted(frozenset().union(*sets), key=lambda device: device.id)

    def spread(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, global_array.even_sharding(leaf.shape, devices))

    return list(map(spread, leaves))
