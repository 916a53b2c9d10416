"""The local form of `custom_partitioning`: what the user's own partitioning function says that a device computes.

The function is asked as JAX asks it, with the shardings of an assignment. It may want other shardings than these, or
communicate: an assignment for which it does is left out, so that the plan's collectives are all there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.layout import Layout
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.local.types import LocalForm, Setting


def form(s: Setting) -> LocalForm | None:
    """Returns the form, or None where the user's function does not go along with the assignment."""
    params = s.op.params
    mesh = AbstractMesh(s.mesh.shape, s.mesh.axis_names, axis_types=(AxisType.Auto,) * len(s.mesh.shape))
    types = [s.operand_dtype(i) for i in range(len(s.operands))]
    operands = [_placed(s.operand_shape(i), t, s.operands[i], mesh) for i, t in enumerate(types)]
    results = [_placed(s.result_shape(i), s.result_dtype(i), la, mesh) for i, la in enumerate(s.results)]
    try:
        _, lower, made, taken = params["partition"](
            *params["static_args"], mesh, params["in_tree"].unflatten(operands), params["out_tree"].unflatten(results)
        )
        blocks = [jax.ShapeDtypeStruct(s.local_operand(i), t) for i, t in enumerate(types)]
        axes = list(zip(s.mesh.axis_names, s.mesh.shape, strict=True))
        jaxpr = jax.make_jaxpr(lower, axis_env=axes)(*params["in_tree"].unflatten(blocks))
    except Exception:  # whatever a user's function raises
        return None
    shapes = [tuple(getattr(aval, "shape", ())) for aval in jaxpr.out_avals]
    if shapes != [s.local_result(i) for i in range(len(results))] or _communicates(jaxpr):
        return None
    if not (_are(taken, operands) and _are(made, results)):
        return None
    return s.form(lambda *arrays: jax.tree.leaves(lower(*params["in_tree"].unflatten(arrays))))


def _placed(size: tuple[int, ...], dtype: Any, layout: Layout, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    spec = PartitionSpec(*(axes or None for axes in layout.dims))
    return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))


def _are(shardings: Any, wanted: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Returns whether the shardings that the function chose are those that it was given."""
    chosen = jax.tree.leaves(shardings, is_leaf=lambda x: x is None)
    return len(chosen) == len(wanted) and all(
        getattr(one, "spec", None) is not None
        and _jax.spec_dims(one.spec, x.ndim) == _jax.spec_dims(x.sharding.spec, x.ndim)
        for one, x in zip(chosen, wanted, strict=True)
    )


def _communicates(jaxpr: Any) -> bool:
    opened, _ = _jax.open_jaxpr(jaxpr)
    return any(
        e.primitive.name in primitives.COLLECTIVES or any(map(_communicates, _jax.inner_jaxprs(e.params)))
        for e in opened.eqns
    )
