"""The devices of a plan's mesh as a mesh of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from alpa_lite.errors import PlanError
from alpa_lite.layout import LogicalMesh


def mesh_of(logical: LogicalMesh, devices: Sequence[Any] | None = None) -> Mesh:
    """The devices as a JAX mesh with axes that the compiler may use as it likes (`AxisType.Auto`)."""
    available = list(jax.devices() if devices is None else devices)
    if len(available) < logical.size:
        raise PlanError(
            f"the plan is for {logical.size} devices (mesh {logical.shape}), but there are {len(available)}; plan for "
            f"a cluster of {len(available)}, or start JAX with more devices"
        )
    grid = np.array(available[: logical.size]).reshape(logical.shape)
    return Mesh(grid, logical.axis_names, axis_types=(AxisType.Auto,) * len(logical.shape))
