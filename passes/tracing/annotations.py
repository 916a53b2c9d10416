"""What a step's arguments say of where they lie: arrays that arrive sharded, and the annotations of Flax.

array        a `jax.Array`, or a `jax.ShapeDtypeStruct` with a sharding, that a `NamedSharding` cuts into blocks. One
             that every device holds whole says nothing.
linen        a box of `nn.with_partitioning` (mesh axes) or of `nn.with_logical_partitioning` (logical names, which
             the rules of the box or of the context turn into mesh axes).
NNX          the metadata of a Variable: `out_sharding`, or what Flax called it before: `sharding_names`, `sharding`.

An annotation comes before the sharding that its array arrives with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.graph import Traced
from alpa_lite.layout import Axes, LogicalMesh
from alpa_lite.passes.tracing import nnx_modules


@dataclass(frozen=True)
class Annotation:
    """What one flat argument says of itself.

    Attributes:
      number: of the flat argument.
      dims: for each dim the axes that shard it; None if they are not known, which `why` says.
      mesh: the mesh that it names; None if it only names axes.
      array: whether the mesh is that of an array that arrives sharded.
      why: in words.
    """

    number: int
    dims: tuple[Axes | None, ...] | None
    mesh: LogicalMesh | None
    array: bool
    why: str


def annotated(traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Annotation, ...]:
    """What the flat arguments of a call say, in their order; of several on one argument the one that counts."""
    assert traced.calling is not None
    out = []
    for number, (leaf, said) in enumerate(_leaves(traced.calling.traced(args, kwargs))):
        rank = len(getattr(leaf, "shape", ()))
        own = _array(number, rank, getattr(leaf, "sharding", None))
        found = own if said is None else _said(number, rank, *said) or own
        if found is not None and found.mesh is None and own is not None:
            found = replace(found, mesh=own.mesh, array=True)
        if found is not None:
            out.append(found)
    return tuple(out)


def logical(mesh: Any) -> LogicalMesh:
    """The shape and the names of a JAX mesh."""
    return LogicalMesh(tuple(mesh.axis_sizes), tuple(map(str, mesh.axis_names)))


Said = tuple[str, Any, Any]
"""In words who says something, the spec, and the mesh or None."""


def _leaves(tree: Any) -> Iterator[tuple[Any, Said | None]]:
    """The flat leaves of the traced arguments, each with its annotation."""
    meta = sys.modules.get("flax.core.meta")
    is_node = nnx_modules.is_node()

    def is_leaf(value: Any) -> bool:
        return is_node(value) or (meta is not None and isinstance(value, meta.Partitioned))

    for item in jax.tree_util.tree_leaves(tree, is_leaf=is_leaf):
        if is_node(item):
            yield from _variables(item)
        elif meta is not None and isinstance(item, meta.Partitioned):
            said = _box(item)
            yield from ((leaf, said) for leaf in jax.tree_util.tree_leaves(item))
        else:
            yield item, None


def _box(box: Any) -> Said:
    """What a box of linen says; names that are logical become mesh axes."""
    why = f"nn.{type(box).__name__}{tuple(box.names)}"
    if type(box).__name__ != "LogicallyPartitioned":
        return why, PartitionSpec(*box.names), box.mesh
    from flax.core.spmd import get_logical_axis_rules
    from flax.linen import spmd

    if not box.rules and not get_logical_axis_rules():
        return f"{why} without nn.logical_axis_rules", None, None
    return why, spmd.logical_to_mesh_axes(box.names, box.rules), box.mesh


def _variables(node: Any) -> Iterator[tuple[Any, Said | None]]:
    """The flat leaves of an NNX object, in the order of its split."""
    from flax import nnx

    with nnx.split_context() as context:
        _, state = context.flatten(node)
        for value in state.leaves:
            variable = isinstance(value, nnx.Variable)
            said = _metadata(value.get_metadata()) if variable else None
            raw = value.get_raw_value() if variable else value
            yield from ((leaf, said) for leaf in jax.tree_util.tree_leaves(raw))


def _metadata(metadata: Mapping[str, Any]) -> Said | None:
    for name in ("out_sharding", "sharding_names", "sharding"):
        said = metadata.get(name)
        if said is None:
            continue
        if isinstance(said, NamedSharding):
            return f"nnx.Variable {name}={said.spec}", said.spec, said.mesh
        if isinstance(said, PartitionSpec | tuple | list):
            rules = _rules(metadata.get("sharding_rules"))
            entries = [_renamed(entry, rules) for entry in said]
            return f"nnx.Variable {name}={tuple(said)}", PartitionSpec(*entries), metadata.get("mesh")
    return None


def _rules(own: Any) -> dict[Any, Any]:
    """Logical name -> mesh axes: the rules of the context, and of a Variable."""
    spmd = sys.modules.get("flax.core.spmd")
    context = spmd.get_logical_axis_rules() if spmd is not None else ()
    return {**dict(context or ()), **dict(own or ())}


def _renamed(entry: Any, rules: Mapping[Any, Any]) -> Any:
    if isinstance(entry, tuple | list):
        return tuple(rules.get(name, name) for name in entry)
    return rules.get(entry, entry)


def _said(number: int, rank: int, why: str, spec: Any, mesh: Any) -> Annotation | None:
    """An annotation as dims, if it shards anything."""
    if spec is None or len(spec) > rank:
        return Annotation(number, None, None, False, why)
    dims = _jax.spec_dims(spec, rank)
    named = None if mesh is None or mesh.empty else logical(mesh)
    return Annotation(number, dims, named, False, why) if any(dims) else None


def _array(number: int, rank: int, sharding: Any) -> Annotation | None:
    """How an array is cut into blocks."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    mesh = logical(sharding.mesh)
    dims = tuple(tuple(a for a in axes or () if mesh.axis_size(a) > 1) for axes in _jax.spec_dims(sharding.spec, rank))
    return Annotation(number, dims, mesh, True, f"an array that arrives as {sharding.spec}") if any(dims) else None
