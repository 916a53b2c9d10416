"""Local forms of operations that users gave rules for: the same operation, on blocks.

A kernel is the function, called on what a device has. Parameters of a registered primitive hold no sizes, so it is
bound as it is; those of an FFI call hold the types of its results, which become those of the blocks. A result that
lacks a factor is, as the rule says, a partial sum, or the extremum of those of all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from alpa_lite.ir import kernels, registration
from alpa_lite.ir.graph import Op
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.ir.layout import Axes
from alpa_lite.passes.local.types import LocalCollective, LocalForm, Setting, bind

_JOINS = {"max": lax.pmax, "min": lax.pmin}


def maker(op: Op) -> Callable[[Setting], LocalForm | None] | None:
    """Returns the maker of the form of an operation that its user gave a rule for; None for any other."""
    return _form if registration.find_registered_rule(op.primitive, op.params) is not None else None


def _form(s: Setting) -> LocalForm | None:
    if s.op.primitive is KERNEL and not _runs(s):
        return None
    changes: dict[str, Any] = {}
    if s.op.name == "ffi_call":
        changes["result_avals"] = tuple(
            aval.update(shape=s.local_result(i)) for i, aval in enumerate(s.op.params["result_avals"])
        )
    joins = [_joins(s, i) for i in range(len(s.results))]
    if not any(joins):
        return s.bind(**changes)
    params = s.params(**changes)

    def run(*operands: Any) -> list:
        outs = bind(s.op, operands, params)
        for i, found in enumerate(joins):
            for how, axes in found:
                outs[i] = _JOINS[how](outs[i], axes)
        return outs

    reduced = [LocalCollective("all_reduce", axes, s.result_bytes(i)) for i, j in enumerate(joins) for _, axes in j]
    return s.form(run, *reduced)


def _joins(s: Setting, result: int) -> list[tuple[str, Axes]]:
    """Returns how, and over which axes, the blocks of a result make up the result."""
    own = {f for dim in s.rule.results[result] for f in dim}
    return [
        (factor.kind, s.assignment[f])
        for f, factor in enumerate(s.rule.factors)
        if factor.kind in _JOINS and s.assignment[f] and f not in own
    ]


def _runs(s: Setting) -> bool:
    """Returns whether a kernel can be traced on these blocks: Pallas may want a block to be a multiple of something."""
    kernel = s.op.params["kernel"]
    if kernel.trusted:
        return True
    try:
        made = kernels.results_of(
            kernel, tuple((s.local_operand(i), s.operand_dtype(i)) for i in range(len(s.operands)))
        )
    except Exception:  # whatever a user's function raises; `factors.registered` names what never works
        return False
    return [tuple(x.shape) for x in made] == [s.local_result(i) for i in range(len(s.results))]
