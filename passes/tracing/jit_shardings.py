"""`in_shardings` and `out_shardings`, as `jax.jit` takes them: pytree prefixes of arguments and results.

Those of arguments, and of results that are new state, say where the arguments are placed, as an entry of `Manual` does.
Those of other results are constraints in the graph.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Graph, Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.paths import shown
from alpa_lite.passes.tracing import nnx_modules
from alpa_lite.passes.tracing.annotations import logical_mesh
from alpa_lite.passes.tracing.constraints import constrain_outputs
from alpa_lite.plan.pins import Wish

Given = NamedSharding | PartitionSpec | None


def spread(option: str, prefix: Any, tree: Any) -> list[Given]:
    """The sharding of each flat leaf of a pytree, of which `prefix` is a prefix.

    Raises:
      OptionError: it is none.
    """
    found: list[Given] = []

    def add(sharding: Given, part: Any) -> None:
        found.extend([sharding] * len(nnx_modules.flattened(part)[0]))

    try:
        jax.tree_util.tree_map(add, prefix, tree, is_leaf=is_sharding)
    except ValueError as error:
        reason = textwrap.shorten(str(error).splitlines()[0], 120, placeholder=" ...")
        raise OptionError(
            f"{option} is not a prefix of the pytree that it is for ({reason}); give one sharding for all, or one for "
            "each part, None where it is free"
        ) from error
    return found


def is_sharding(value: Any) -> bool:
    """Whether a value is a leaf of `in_shardings` or `out_shardings`."""
    return value is None or isinstance(value, jax.sharding.Sharding | PartitionSpec)


def placed_arguments(
    traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], in_shardings: Any, num_devices: int
) -> tuple[dict[str, Wish], LogicalMesh | None]:
    """Stored path of an argument -> where it is to be, and the mesh of these shardings.

    Raises:
      OptionError: a sharding does not fit, its mesh is not one of all devices, or two contradict one another.
    """
    calling = traced.calling
    assert calling is not None
    given: dict[int, tuple[Any, str]] = {i: (one, "out_shardings") for i, one in traced.placed}
    if in_shardings is not None:
        positional, _ = calling.traced(args, kwargs)
        for number, one in enumerate(spread("in_shardings", in_shardings, positional)):
            if one is None:
                continue
            other, _ = given.get(number, (one, ""))
            if one != other:
                raise OptionError(
                    f"in_shardings and out_shardings place {shown(traced.arguments[number].path)} and its new value "
                    f"differently ({_text(one)}, {_text(other)}); state stays where it is: give one of the two"
                )
            given[number] = one, "in_shardings"
    wishes, mesh = {}, None
    for number, (one, option) in given.items():
        path = traced.arguments[number].path
        rank = len(traced.graph.values[traced.graph.block.inputs[number]].shape)
        wishes[path] = Wish(_dims(option, one, rank, path), f"{option}={_text(one)}")
        mesh = _one_mesh(option, one, mesh, num_devices)
    return wishes, mesh


def constrain_results(graph: Graph, given: Mapping[int, Given], paths: Sequence[str]) -> Graph:
    """The graph with a constraint on each output for which a sharding is given, by its number."""
    constraints = {}
    for number, one in given.items():
        atom = graph.block.outputs[number]
        if one is None or not isinstance(atom, int):
            continue
        dims = _dims("out_shardings", one, len(graph.values[atom].shape), paths[number])
        mesh = (tuple(one.mesh.axis_sizes), tuple(one.mesh.axis_names)) if isinstance(one, NamedSharding) else None
        constraints[number] = {"dims": dims, "mesh": mesh, "why": f"out_shardings={_text(one)}"}
    return constrain_outputs(graph, constraints) if constraints else graph


def _one_mesh(option: str, one: Given, known: LogicalMesh | None, num_devices: int) -> LogicalMesh | None:
    if not isinstance(one, NamedSharding):
        return known
    mesh = logical_mesh(one.mesh)
    if mesh.size != num_devices:
        raise OptionError(
            f"{option}={_text(one)} is on a mesh of {mesh.size} devices, and the plan is for {num_devices}; give a "
            "mesh of all devices, or cluster="
        )
    if known not in (None, mesh):
        raise OptionError(f"{option}={_text(one)} is on another mesh than the shardings before it; give one mesh")
    return mesh


def _dims(option: str, one: NamedSharding | PartitionSpec, rank: int, path: str) -> Any:
    spec = one.spec if isinstance(one, NamedSharding) else one
    if len(spec) > rank:
        raise OptionError(f"{option}={spec} has {len(spec)} entries for {shown(path)} of {rank} dims; give fewer")
    return _jax.spec_dims(spec, rank)


def _text(one: Given) -> str:
    return str(one.spec if isinstance(one, NamedSharding) else one)
