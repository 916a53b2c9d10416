"""The devices of a plan's mesh as a mesh of JAX, and functions of the blocks that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from alpa_lite import _jax
from alpa_lite.errors import PlanError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.program import Submesh

_planned: set[Mesh] = set()  # those that this module has made; a program has a few


def available() -> list[Any]:
    """Returns all devices, in the order in which a cluster numbers them: node by node.

    Chips of TPUs have coordinates: they are numbered along the torus, the last dim fastest, slice by slice, as
    `Cluster.topology` counts them. Other devices come process by process.
    """
    devices = jax.devices()
    if all(getattr(device, "coords", None) is not None for device in devices):
        return sorted(
            devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, *d.coords, getattr(d, "core_on_chip", 0))
        )
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def is_planned(sharding: Any) -> bool:
    """Returns whether a sharding is on a mesh of a plan."""
    return isinstance(sharding, NamedSharding) and sharding.mesh in _planned


def mesh_of(logical: LogicalMesh, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the devices as a JAX mesh with axes that the compiler may use as it likes (`AxisType.Auto`)."""
    given = available() if devices is None else list(devices)
    if len(given) < logical.size:
        raise PlanError(
            f"the plan is for {logical.size} devices (mesh {logical.shape}), but there are {len(given)}; plan for "
            f"a cluster of {len(given)}, or start JAX with more devices"
        )
    grid = np.array(given[: logical.size]).reshape(logical.shape)
    mesh = Mesh(grid, logical.axis_names, axis_types=(AxisType.Auto,) * len(logical.shape))
    _planned.add(mesh)
    return mesh


def submesh_of(submesh: Submesh, devices: Sequence[Any]) -> Mesh:
    """Returns the devices of a submesh, of all by number, as a JAX mesh."""
    return mesh_of(submesh.mesh, devices[submesh.devices.start : submesh.devices.stop])


@_jax.clear_mesh_context()
def lower_region(
    local: Callable[..., list[Any]],
    mesh: Mesh,
    inputs: Sequence[Any],
    results: Sequence[Any],
    donate: Sequence[int] = (),
) -> jax.stages.Lowered:
    """Lowers a function of the blocks of each device of a mesh.

    Args:
      inputs, results: types of the arrays, with shardings on the mesh.
      donate: the inputs whose buffers become results.
    """
    specs, wanted = tuple(one.sharding.spec for one in inputs), [one.sharding.spec for one in results]
    region = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=wanted, check_vma=False)
    jitted = jax.jit(region, donate_argnums=tuple(donate), out_shardings=[one.sharding for one in results])
    return jitted.lower(*inputs)
