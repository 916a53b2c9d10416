"""Placements of the arguments of a step: those that they come with, and those that options give.

Arguments come as arrays that arrive sharded, or with annotations of Flax:

array        a `jax.Array`, or a `jax.ShapeDtypeStruct` with a sharding, that a `NamedSharding` cuts into blocks. One
             that is replicated is not an annotation.
linen        a box of `nn.with_partitioning` (mesh axes) or of `nn.with_logical_partitioning` (logical names, which
             the rules of the box or of the context turn into mesh axes).
NNX          the metadata of a Variable: `out_sharding`, or what Flax called it before: `sharding_names`, `sharding`.

An annotation comes before the sharding that its array arrives with.

`in_shardings` and `out_shardings` are as `jax.jit` takes them: pytree prefixes of arguments and results. Those of
arguments, and of results that are new state, say where the arguments are placed, as an entry of `Manual` does. Those of
other results are constraints in the graph (`constraints`).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing import pytrees
from alpa_lite.plan.pins import Wish


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
    leaves = pytrees.walk_leaves(traced.calling.drop_static(args, kwargs), lambda value: isinstance(value, boxes))
    out = []
    for number, (_, leaf, holder) in enumerate(leaves):
        rank, sharding, own = len(getattr(leaf, "shape", ())), getattr(leaf, "sharding", None), None
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            why = f"an array that arrives as {sharding.spec}"
            own = _annotation(number, rank, (why, sharding.spec, sharding.mesh), array=True)
        spec = _box(holder) if isinstance(holder, boxes) else _variable(holder)
        found = (None if spec is None else _annotation(number, rank, spec)) or own
        if found is not None and found.mesh is None and own is not None:
            found = replace(found, mesh=own.mesh, array=True)
        if found is not None:
            out.append(found)
    return tuple(out)


def logical_mesh(mesh: Any) -> LogicalMesh:
    """Returns the shape and the names of a JAX mesh."""
    return LogicalMesh(tuple(mesh.axis_sizes), tuple(map(str, mesh.axis_names)))


Spec = tuple[str, Any, Any]
"""An annotation in words, its spec, and its mesh or None."""


def _box(box: Any) -> Spec:
    """Returns the spec of a box of linen; logical names become mesh axes."""
    why = f"nn.{type(box).__name__}{tuple(box.names)}"
    if type(box).__name__ != "LogicallyPartitioned":
        return why, PartitionSpec(*box.names), box.mesh
    from flax.core.spmd import get_logical_axis_rules
    from flax.linen import spmd

    if not box.rules and not get_logical_axis_rules():
        return f"{why} without nn.logical_axis_rules", None, None
    return why, spmd.logical_to_mesh_axes(box.names, box.rules), box.mesh


def _variable(value: Any) -> Spec | None:
    """Returns the spec in the metadata of an NNX variable."""
    nnx = sys.modules.get("flax.nnx")
    metadata = value.get_metadata() if nnx is not None and isinstance(value, nnx.Variable) else {}
    for name in ("out_sharding", "sharding_names", "sharding"):
        spec = metadata.get(name)
        if isinstance(spec, NamedSharding):
            return f"nnx.Variable {name}={spec.spec}", spec.spec, spec.mesh
        if isinstance(spec, PartitionSpec | tuple | list):
            spmd = sys.modules.get("flax.core.spmd")
            context = spmd.get_logical_axis_rules() if spmd is not None else ()
            rules = {**dict(context or ()), **dict(metadata.get("sharding_rules") or ())}  # logical name -> mesh axes
            entries = [
                tuple(rules.get(name, name) for name in e) if isinstance(e, tuple | list) else rules.get(e, e)
                for e in spec
            ]
            return f"nnx.Variable {name}={tuple(spec)}", PartitionSpec(*entries), metadata.get("mesh")
    return None


def _annotation(number: int, rank: int, found: Spec, *, array: bool = False) -> Annotation | None:
    """Returns an annotation as dims, if it shards anything; an array is not cut along axes of size one."""
    why, spec, mesh = found
    if spec is None or len(spec) > rank:
        return Annotation(number, None, None, False, why)
    dims, named = _jax.spec_dims(spec, rank), None if mesh is None or mesh.empty else logical_mesh(mesh)
    if array and named is not None:
        dims = tuple(tuple(axis for axis in axes or () if named.axis_size(axis) > 1) for axes in dims)
    return Annotation(number, dims, named, array, why) if any(dims) else None


GivenPlacement = NamedSharding | PartitionSpec | None


def spread(option: str, prefix: Any, tree: Any) -> list[GivenPlacement]:
    """Returns the sharding of each flat leaf of a pytree, of which `prefix` is a prefix.

    Raises:
      OptionError: it is none.
    """
    found: list[GivenPlacement] = []
    try:
        jax.tree_util.tree_map(
            lambda sharding, part: found.extend([sharding] * len(pytrees.flatten_nnx(part)[0])),
            prefix,
            tree,
            is_leaf=is_sharding,
        )
    except ValueError as error:
        reason = textwrap.shorten(str(error).splitlines()[0], 120, placeholder=" ...")
        raise OptionError(
            f"{option} is not a prefix of the pytree that it is for ({reason}); give one sharding for all, or one for "
            "each part, None where it is free"
        ) from error
    return found


def is_sharding(value: Any) -> bool:
    """Returns whether a value is a leaf of `in_shardings` or `out_shardings`."""
    return value is None or isinstance(value, jax.sharding.Sharding | PartitionSpec)


def argument_placements(
    traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], in_shardings: Any, num_devices: int
) -> tuple[dict[str, Wish], LogicalMesh | None]:
    """Stored path of an argument -> where it is to be, and the mesh of these shardings.

    Raises:
      OptionError: a sharding does not fit, its mesh is not one of all devices, or two contradict one another.
    """
    calling = traced.calling
    assert calling is not None
    given: dict[int, tuple[Any, str]] = {i: (one, "out_shardings") for i, one in traced.placements}
    if in_shardings is not None:
        positional, _ = calling.drop_static(args, kwargs)
        for number, one in enumerate(spread("in_shardings", in_shardings, positional)):
            if one is None:
                continue
            other, _ = given.get(number, (one, ""))
            if one != other:
                raise OptionError(
                    f"in_shardings and out_shardings place {format_path(traced.arguments[number].path)} and its new "
                    "value "
                    f"differently ({spec_text(one)}, {spec_text(other)}); state stays where it is: give one of the two"
                )
            given[number] = one, "in_shardings"
    wishes, mesh = {}, None
    for number, (one, option) in given.items():
        path, text = traced.arguments[number].path, f"{option}={spec_text(one)}"
        rank = len(traced.graph.values[traced.graph.block.inputs[number]].shape)
        wishes[path] = Wish(spec_dims(option, one, rank, path), text)
        own = logical_mesh(one.mesh) if isinstance(one, NamedSharding) else None
        if own is not None and own.size != num_devices:
            raise OptionError(
                f"{text} is on a mesh of {own.size} devices, and the plan is for {num_devices}; give a mesh of all "
                "devices, or cluster="
            )
        if None not in (own, mesh) and own != mesh:
            raise OptionError(f"{text} is on another mesh than the shardings before it; give one mesh")
        mesh = own or mesh
    return wishes, mesh


def spec_dims(option: str, one: NamedSharding | PartitionSpec, rank: int, path: str) -> Any:
    """Returns the axes that a sharding gives each dim of a leaf."""
    spec = one.spec if isinstance(one, NamedSharding) else one
    if len(spec) > rank:
        raise OptionError(f"{option}={spec} has {len(spec)} entries for {format_path(path)} of {rank} dims; give fewer")
    return _jax.spec_dims(spec, rank)


def spec_text(one: GivenPlacement) -> str:
    """Returns a sharding in messages."""
    return str(one.spec if isinstance(one, NamedSharding) else one)
