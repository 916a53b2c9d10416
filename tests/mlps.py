"""A multilayer perceptron in plain JAX, and two machines to plan it for."""

from typing import Any

from alpa_lite.cluster import Cluster, Link
from tests.gallery import f32, sgd, square_layers


def two_machines(memory: int, network: float) -> Cluster:
    """Two machines of four devices; `memory` in bytes of each, `network` in bytes per second."""
    return Cluster(
        device="two machines", platform="cuda", nodes=2, devices_per_node=4, memory=memory, peak_flops=(("f32", 1e13),),
        memory_bandwidth=1e12, node_link=Link(1e11, 1e-6), network_link=Link(network, 1e-5),
    )  # fmt: skip


def mlp(width: int, batch: int, layers: int) -> tuple[Any, Any]:
    """A step of gradient descent, and shapes of its arguments."""

    return sgd(square_layers), ([f32(width, width) for _ in range(layers)], f32(batch, width))
