"""What one writes by hand: plain `jax.jit` with a `NamedSharding` for every argument. Nothing of alpa_lite is used.

Each plan names a mesh, how the batch lies on it, and how a parameter does, by its path and shape; the optimizer's
moments lie as their parameter. The step is what the user wrote for one device; XLA's partitioner adds the rest.

    data parallel   batch over every device, state on every device
    FSDP            batch over every device, each parameter sharded by its largest dim that divides
    Megatron        attention by heads, feed-forward by columns, then rows, embedding by vocabulary; the batch whole, or
                    over a second axis of the mesh
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SpecOf = Callable[[str, tuple[int, ...]], P]


@dataclass(frozen=True)
class HandPlan:
    """A sharding written by hand.

    Attributes:
      name: for the table.
      mesh_shape, axis_names: the mesh.
      batch: the spec of every array of the batch.
      spec: the spec of a state leaf, from its path and shape.
    """

    name: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    batch: P
    spec: SpecOf


def plans(model: str, devices: int) -> tuple[HandPlan, ...]:
    """The plans for "gpt" or "mlp" on a number of devices."""
    megatron = {"gpt": megatron_gpt, "mlp": megatron_mlp}[model]
    return (
        HandPlan("data parallel", (devices,), ("d",), P("d"), lambda path, shape: P()),
        HandPlan("FSDP", (devices,), ("d",), P("d"), lambda path, shape: largest_dim(shape, "d", devices)),
        HandPlan("Megatron", (devices,), ("m",), P(), megatron),
        HandPlan("Megatron x data", (2, devices // 2), ("d", "m"), P("d"), megatron),
    )


def largest_dim(shape: tuple[int, ...], axis: str, devices: int) -> P:
    """FSDP's rule: the largest dim that divides; small or odd leaves stay whole."""
    dims = [i for i, size in enumerate(shape) if size % devices == 0]
    if not dims:
        return P()
    dim = max(dims, key=lambda i: shape[i])
    return P(*[axis if i == dim else None for i in range(len(shape))])


def megatron_gpt(path: str, shape: tuple[int, ...]) -> P:
    """Heads of attention, columns of `up`, rows of `down`, and the vocabulary."""
    rules = (
        (r"'(query|key|value)'\]\['kernel'", P(None, "m", None)),
        (r"'(query|key|value)'\]\['bias'", P("m", None)),
        (r"'output'\]\['kernel'", P("m", None, None)),
        (r"'up'\]\['kernel'", P(None, "m")),
        (r"'up'\]\['bias'", P("m")),
        (r"'down'\]\['kernel'", P("m", None)),
        (r"'tokens'\]\['embedding'", P("m", None)),
    )
    return next((spec for pattern, spec in rules if re.search(pattern, path)), P())


def megatron_mlp(path: str, shape: tuple[int, ...]) -> P:
    """Columns of even layers, rows of odd ones."""
    found = re.search(r"'layers'\]\[(\d+)\]\['(kernel|bias)'\]", path)
    if not found:
        return P()
    odd, kernel = int(found[1]) % 2, found[2] == "kernel"
    if odd:
        return P("m", None) if kernel else P()
    return P(None, "m") if kernel else P("m")


def shard(step: Callable[..., Any], plan: HandPlan, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """The jitted step with donated state, and the placed state and batch."""
    devices = np.array(jax.devices()[: int(np.prod(plan.mesh_shape))]).reshape(plan.mesh_shape)
    mesh = Mesh(devices, plan.axis_names, axis_types=(AxisType.Auto,) * len(plan.axis_names))

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, plan.spec(jax.tree_util.keystr(path), np.shape(leaf)))

    states = jax.tree_util.tree_map_with_path(sharding, state)
    batches = jax.tree.map(lambda _: NamedSharding(mesh, plan.batch), batch)
    jitted = jax.jit(
        step, in_shardings=(states, batches), out_shardings=(states, NamedSharding(mesh, P())), donate_argnums=0
    )
    # Copies: the step may then write over what it is given, and the caller's arrays stay.
    state, batch = jax.tree.map(lambda leaf: np.array(leaf), (state, batch))
    return jitted, jax.device_put(state, states), jax.device_put(batch, batches)
