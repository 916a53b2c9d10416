"""Local forms of programs of users: operations with rules of theirs, `custom_partitioning`, and Pallas kernels.

An operation that a user gave a rule for is the same operation, on blocks. A kernel is the function, called on what a
device has. Parameters of a registered primitive hold no sizes, so it is bound as it is; those of an FFI call hold the
types of its results, which become those of the blocks. A result that lacks a factor is, as the rule says, a partial
sum, or the extremum of those of all devices.

For `custom_partitioning` the user's own partitioning function is asked as JAX asks it, with the shardings of an
assignment, what a device computes. It may want other shardings than these, or communicate: an assignment for which it
does is left out, so that the plan's collectives are all there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir import kernels, registration
from alpa_lite.ir.graph import Op
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.ir.layout import Axes, Layout
from alpa_lite.passes.ir import primitives
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


def custom_partitioning(s: Setting) -> LocalForm | None:
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


def pallas(s: Setting) -> LocalForm | None:
    """A Pallas kernel whose grid is cut (`factors.pallas`): the same kernel, with as many steps as it has blocks."""
    operands = [s.local_operand(i) for i in range(len(s.op.operands))]
    results = [s.local_result(i) for i in range(len(s.op.results))]
    return s.bind(**_jax.pallas_on_blocks(s.op.params, operands, results))
