"""Placements that the arguments of a step come with: arrays that arrive sharded, and the annotations of Flax.

array        a `jax.Array`, or a `jax.ShapeDtypeStruct` with a sharding, that a `NamedSharding` cuts into blocks. One
             that is replicated is no annotation.
linen        a box of `nn.with_partitioning` (mesh axes) or of `nn.with_logical_partitioning` (logical names, which
             the rules of the box or of the context turn into mesh axes).
NNX          the metadata of a Variable: `out_sharding`, or what Flax called it before: `sharding_names`, `sharding`.

An annotation comes before the sharding that its array arrives with.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.tracing import nnx_modules


@dataclass(frozen=True)
class Annotation:
    """The placement that one flat argument asks for.

    Attributes:
      number: of the flat argument.
      dims: for each dim the axes that shard it; None if they are not known.
      mesh: the mesh that it names; None if it only names axes.
      array: whether the mesh is that of an array that arrives sharded.
      why: its source in words, or why its dims are not known.
    """

    number: int
    dims: tuple[Axes | None, ...] | None
    mesh: LogicalMesh | None
    array: bool
    why: str


def read_annotations(traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Annotation, ...]:
    """The annotations of the flat arguments of a call, in their order; of two on one argument the one that counts."""
    assert traced.calling is not None
    meta = sys.modules.get("flax.core.meta")
    boxes = () if meta is None else meta.Partitioned
    leaves = nnx_modules.walk_leaves(traced.calling.traced(args, kwargs), lambda value: isinstance(value, boxes))
    out = []
    for number, (_, leaf, holder) in enumerate(leaves):
        rank = len(getattr(leaf, "shape", ()))
        spec = _box(holder) if isinstance(holder, boxes) else _variable(holder)
        own = _array(number, rank, getattr(leaf, "sharding", None))
        found = own if spec is None else _annotation(number, rank, *spec) or own
        if found is not None and found.mesh is None and own is not None:
            found = replace(found, mesh=own.mesh, array=True)
        if found is not None:
            out.append(found)
    return tuple(out)


def logical_mesh(mesh: Any) -> LogicalMesh:
    """The shape and the names of a JAX mesh."""
    return LogicalMesh(tuple(mesh.axis_sizes), tuple(map(str, mesh.axis_names)))


Spec = tuple[str, Any, Any]
"""An annotation in words, its spec, and its mesh or None."""


def _box(box: Any) -> Spec:
    """The spec of a box of linen; logical names become mesh axes."""
    why = f"nn.{type(box).__name__}{tuple(box.names)}"
    if type(box).__name__ != "LogicallyPartitioned":
        return why, PartitionSpec(*box.names), box.mesh
    from flax.core.spmd import get_logical_axis_rules
    from flax.linen import spmd

    if not box.rules and not get_logical_axis_rules():
        return f"{why} without nn.logical_axis_rules", None, None
    return why, spmd.logical_to_mesh_axes(box.names, box.rules), box.mesh


def _variable(value: Any) -> Spec | None:
    """The spec in the metadata of an NNX variable."""
    nnx = sys.modules.get("flax.nnx")
    metadata = value.get_metadata() if nnx is not None and isinstance(value, nnx.Variable) else {}
    for name in ("out_sharding", "sharding_names", "sharding"):
        spec = metadata.get(name)
        if isinstance(spec, NamedSharding):
            return f"nnx.Variable {name}={spec.spec}", spec.spec, spec.mesh
        if isinstance(spec, PartitionSpec | tuple | list):
            rules = _rules(metadata.get("sharding_rules"))
            entries = [
                tuple(rules.get(name, name) for name in entry)
                if isinstance(entry, tuple | list)
                else rules.get(entry, entry)
                for entry in spec
            ]
            return f"nnx.Variable {name}={tuple(spec)}", PartitionSpec(*entries), metadata.get("mesh")
    return None


def _rules(own: Any) -> dict[Any, Any]:
    """Logical name -> mesh axes: the rules of the context, and of a Variable."""
    spmd = sys.modules.get("flax.core.spmd")
    context = spmd.get_logical_axis_rules() if spmd is not None else ()
    return {**dict(context or ()), **dict(own or ())}


def _annotation(number: int, rank: int, why: str, spec: Any, mesh: Any) -> Annotation | None:
    """An annotation as dims, if it shards anything."""
    if spec is None or len(spec) > rank:
        return Annotation(number, None, None, False, why)
    dims = _jax.spec_dims(spec, rank)
    named = None if mesh is None or mesh.empty else logical_mesh(mesh)
    return Annotation(number, dims, named, False, why) if any(dims) else None


def _array(number: int, rank: int, sharding: Any) -> Annotation | None:
    """How an array is cut into blocks."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    mesh = logical_mesh(sharding.mesh)
    dims = tuple(tuple(a for a in axes or () if mesh.axis_size(a) > 1) for axes in _jax.spec_dims(sharding.spec, rank))
    return Annotation(number, dims, mesh, True, f"an array that arrives as {sharding.spec}") if any(dims) else None
