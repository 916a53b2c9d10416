"""The floating-point operations of a function, counted in its jaxpr without running it.

Products count two for each multiply-add, every other operation one for each element of its largest result. A loop
counts as often as it runs where that is known, else once; of branches the largest counts; a Pallas kernel counts what
it says of itself, else its body once for each point of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from alpa_lite import _jax


def jaxpr_flops(jaxpr: Any, products_only: bool = False) -> float:
    """Returns FLOPs of a jaxpr, or those of its products alone. Operations that no output needs do not count."""
    opened, _ = _jax.open_jaxpr(jaxpr)
    needed = {id(v) for v in opened.outvars}
    writes = {id(v) for v in (*opened.invars, *opened.constvars) if type(v.aval).__name__ == "AbstractRef"}
    total = 0.0
    for eqn in reversed(opened.eqns):
        if eqn.effects or writes or not needed.isdisjoint(id(v) for v in eqn.outvars):
            needed.update(id(v) for v in eqn.invars)
            total += _of_equation(eqn, products_only)
    return total


def _of_equation(eqn: Any, products_only: bool) -> float:
    name, params = eqn.primitive.name, eqn.params
    made = float(max((math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars), default=1))
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * made * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2.0 * made * math.prod(kernel) / max(1, kernel[params["dimension_numbers"].rhs_spec[0]])
    if name == "pallas_call":
        return pallas_flops(params)
    inner = [jaxpr_flops(x, products_only) for x in _jax.inner_jaxprs(params)]
    if not inner:
        return 0.0 if products_only else made
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def bytes_between_products(jaxpr: Any, outside: frozenset[int] | None = None) -> float:
    """Returns bytes that are moved for arrays which products take or make and which do not leave a function.

    An array that a product writes is read by what comes after it, and one that it reads was written before. Pallas
    kernels are left out.

    Args:
      outside: the `id`s of variables that are counted elsewhere; None for the function's own operands and results.
    """
    opened, _ = _jax.open_jaxpr(jaxpr)
    ends = frozenset(map(id, (*opened.invars, *opened.outvars))) if outside is None else outside
    total = 0.0
    for eqn in opened.eqns:
        if eqn.primitive.name == "dot_general":
            inner = [v.aval for v in (*eqn.invars, *eqn.outvars) if id(v) not in ends]
            total += 2.0 * sum(aval.size * aval.dtype.itemsize for aval in inner)
        elif eqn.primitive.name != "pallas_call":
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for found in _jax.inner_jaxprs(eqn.params):
                pairs = [*zip(found.invars, eqn.invars, strict=False), *zip(found.outvars, eqn.outvars, strict=False)]
                total += times * bytes_between_products(found, frozenset(id(v) for v, w in pairs if id(w) in ends))
    return total


def pallas_flops(params: Mapping[str, Any]) -> float:
    """Returns FLOPs of a Pallas kernel: those that it states, or its body's once for each point of the grid.

    Dynamic bounds of the grid count as one.
    """
    if (estimate := params.get("cost_estimate")) is not None:
        return float(estimate.flops)
    return jaxpr_flops(params["jaxpr"]) * math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int))
