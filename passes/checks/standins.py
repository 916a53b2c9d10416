"""Operations that JAX lowers for devices that are present only: what stands in for them in the partitioner's check.

The check lowers a step for the platform of its plan, which need not be here. Callbacks, operations that have a lowering
for other platforms only, Pallas kernels that are compiled, and what JAX partitions itself, do not lower then. In the
check an opaque operation with the same operands and results stands in for each: where it is in the step, and what is
communicated around it, is checked; what is within, is not, and the plan says so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.ir import kernels, registration
from alpa_lite.ir.kernels import KERNEL, Kernel, Types

_PRINTS = frozenset({"debug_callback", "debug_print"})
"""Callbacks without results, which have nothing inside that could be checked."""


class StandIns:
    """A predicate for the equations that a stand-in replaces, which records their names."""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self.names: set[str] = set()

    def __call__(self, primitive: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> bool:
        """Returns whether something stands in for an equation."""
        if primitive is KERNEL:
            found = _is_held_within(params["kernel"], kernels.types_of(operands), self._platform)
        else:
            found = _is_held(primitive, params, self._platform)
        if found and primitive.name not in _PRINTS:
            self.names.add(registration.label(primitive, params))
        return found

    def line(self) -> tuple[str, ...]:
        """Returns the plan's line about the replaced operations; () without any."""
        if not self.names:
            return ()
        return (
            f"not checked: the inside of {', '.join(sorted(self.names))}; JAX lowers them where their devices are, "
            "and opaque operations with the same operands and results stood in for them",
        )


@functools.lru_cache(maxsize=256)
def _is_held_within(kernel: Kernel, types: Types, platform: str) -> bool:
    """Returns whether a kernel has an operation that does not lower, or cannot be traced here."""
    specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    try:
        jaxpr = jax.make_jaxpr(lambda *xs: list(kernel.fun(*xs)))(*specs)
    except Exception:  # whatever a user's function raises
        return True
    return any(_is_held(e.primitive, e.params, platform) for e in _jax.open_jaxpr(jaxpr)[0].eqns)


def _is_held(primitive: Any, params: Mapping[str, Any], platform: str) -> bool:
    if primitive.name in _jax.CALLBACKS | _PRINTS:
        return True
    if primitive.name == "pallas_call":  # its body is a program of its own
        return not params.get("interpret")
    if not _jax.lowers_for(primitive, platform):
        return True
    return any(_is_held(e.primitive, e.params, platform) for x in _jax.inner_jaxprs(params) for e in x.eqns)
