"""Constraints on shardings that programs contain."""

from __future__ import annotations

from typing import Any

import jax.extend.core as _extend_core
from jax.interpreters import mlir as _mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

CONSTRAINT = _extend_core.Primitive("user_constraint")
"""The identity, where the user fixes the sharding of a value. Parameters: `dims` (axes of each dim, None where it is
free), `mesh` ((shape, names) of the user's mesh, or None), and `why` (in words)."""
CONSTRAINT.def_impl(lambda x, **_: x)
CONSTRAINT.def_abstract_eval(lambda x, **_: x)
_mlir.register_lowering(CONSTRAINT, lambda _, x, **__: [x])


def is_empty_constraint(eqn: Any) -> bool:
    """Whether an equation that places its operands constrains none: it does not request replication.

    These are constraints over a mesh of one device, which libraries with logical axes write on one device, and the
    `reshard` over `Auto` axes that JAX inserts where a value with the mesh of the context meets one without. (A user's
    `reshard` can name no `Auto` axis.)
    """
    shardings = _shardings_of(eqn)
    inserted = eqn.primitive.name == "reshard"
    return bool(shardings) and all(
        _is_constraint(one) and (one.mesh.size == 1 or (inserted and set(one.mesh.axis_types) == {AxisType.Auto}))
        for one in shardings
    )


def is_constraint(eqn: Any) -> bool:
    """Whether an equation places all its operands on the mesh of a sharding, and does nothing else."""
    shardings = _shardings_of(eqn)
    return bool(shardings) and all(map(_is_constraint, shardings))


def constraints_of(eqn: Any) -> list[dict[str, Any] | None]:
    """For each operand of an equation the parameters of the `CONSTRAINT` that it means; None where it means none.

    These are `with_sharding_constraint`, and `device_put` and `reshard` to a sharding of named axes. An address of
    memory other than the device's own is no matter of sharding.
    """
    found: list[dict[str, Any] | None] = []
    for sharding, var in zip(_shardings_of(eqn), eqn.invars, strict=False):
        if not _is_constraint(sharding):
            found.append(None)
            continue
        mesh = sharding.mesh
        dims = spec_dims(sharding.spec, len(var.aval.shape))
        mesh = tuple(mesh.axis_sizes), tuple(mesh.axis_names)
        found.append({"dims": dims, "mesh": mesh, "why": eqn.primitive.name})
    return found


def _shardings_of(eqn: Any) -> list[Any]:
    """The shardings that an equation gives its operands."""
    match eqn.primitive.name:
        case "sharding_constraint":
            return [eqn.params["sharding"]]
        case "device_put":
            return list(eqn.params["devices"])
        case "reshard":
            return [eqn.params["dst_sharding"]]
    return []


def _is_constraint(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.memory_kind in (None, "device")


def spec_dims(spec: Any, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    """The axes of each of `rank` dims under a spec; None where it leaves the dim unconstrained."""
    entries = (
        None if e is PartitionSpec.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in spec
    )
    dims = tuple(entries)
    return (*dims, *((),) * (rank - len(dims)))
