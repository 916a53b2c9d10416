"""Shardings as one writes them by hand: plain `jax.jit` with a `NamedSharding` for every argument, without alpa_lite.

The optimizer's moments are sharded as their parameter. The step is that of one device; XLA's partitioner adds the rest.

    data parallel   batch over every device, state replicated
    FSDP            batch over every device, each parameter sharded by its largest dim that divides
    Megatron        attention by heads, feed-forward by columns, then rows, embedding by vocabulary; the batch
                    replicated, or over a second axis of the mesh
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8
MEGATRON = (
    (r"'(query|key|value)'\]\['kernel'", P(None, "m", None)),
    (r"'(query|key|value)'\]\['bias'", P("m", None)),
    (r"'output'\]\['kernel'", P("m", None, None)),
    (r"'up'\]\['kernel'|'layers'\]\[\d*[02468]\]\['kernel'", P(None, "m")),
    (r"'up'\]\['bias'|'layers'\]\[\d*[02468]\]\['bias'", P("m")),
    (r"'down'\]\['kernel'|'tokens'\]\['embedding'|'layers'\]\[\d*[13579]\]\['kernel'", P("m", None)),
)
"""Specs of leaves by a pattern of their path, in a GPT and in an MLP, whose even layers are cut by columns."""


def replicated(path: str, shape: tuple[int, ...]) -> P:
    """The whole leaf on every device."""
    return P()


def largest_dim(path: str, shape: tuple[int, ...]) -> P:
    """FSDP's rule: the largest dim that divides; small or odd leaves are replicated."""
    dims = [i for i, size in enumerate(shape) if size % DEVICES == 0]
    return P(*[None] * max(dims, key=shape.__getitem__), "d") if dims else P()


def megatron(path: str, shape: tuple[int, ...]) -> P:
    """The spec of the first pattern that fits."""
    return next((spec for pattern, spec in MEGATRON if re.search(pattern, path)), P())


PLANS: dict[str, tuple[dict[str, int], P, Callable[[str, tuple[int, ...]], P]]] = {
    "data parallel": ({"d": DEVICES}, P("d"), replicated),
    "FSDP": ({"d": DEVICES}, P("d"), largest_dim),
    "Megatron": ({"m": DEVICES}, P(), megatron),
    "Megatron x data": ({"d": 2, "m": DEVICES // 2}, P("d"), megatron),
}
"""Of each plan the mesh, the spec of every array of the batch, and that of a leaf of the state by path and shape."""


def shard(step: Callable[..., Any], name: str, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """The step under a plan, jitted with donated state, and the placed state and batch."""
    axes, spec_of_batch, spec_of = PLANS[name]
    devices = np.array(jax.devices()[:DEVICES]).reshape(*axes.values())
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    states = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(jax.tree_util.keystr(path), np.shape(leaf))), state
    )
    batches = jax.tree.map(lambda _: NamedSharding(mesh, spec_of_batch), batch)
    jitted = jax.jit(
        step, in_shardings=(states, batches), out_shardings=(states, NamedSharding(mesh, P())), donate_argnums=0
    )
    # Copies: the step may then write over what it is given, and the caller's arrays stay.
    state, batch = jax.tree.map(lambda leaf: np.array(leaf), (state, batch))
    return jitted, jax.device_put(state, states), jax.device_put(batch, batches)
