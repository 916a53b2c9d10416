"""A multilayer perceptron in plain JAX, and two machines to plan it for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.cluster import Cluster, Link


def two_machines(memory: int, network: float) -> Cluster:
    """Two machines of four devices; `memory` in bytes of each, `network` in bytes per second."""
    return Cluster(
        device="two machines", platform="cuda", nodes=2, devices_per_node=4, memory=memory, peak_flops=(("f32", 1e13),),
        memory_bandwidth=1e12, node_link=Link(1e11, 1e-6), network_link=Link(network, 1e-5),
    )  # fmt: skip


def mlp(width: int, batch: int, layers: int) -> tuple[Any, Any]:
    """A step of gradient descent, and shapes of its arguments."""

    def step(state: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            x = batch
            for w in weights:
                x = jnp.tanh(x @ w)
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    f32 = jnp.dtype("float32")
    weights = [jax.ShapeDtypeStruct((width, width), f32) for _ in range(layers)]
    return step, (weights, jax.ShapeDtypeStruct((batch, width), f32))
