"""Clusters and meshes, steps as passes take them, and records of calls, for tests of several modules."""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import alpa_lite
from alpa_lite.cluster import Cluster, Link
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.tracing import tracing


def local(devices: int) -> Cluster:
    """The first devices of this machine."""
    return Cluster.local(jax.devices()[:devices])


def two_machines(memory: int, network: float) -> Cluster:
    """Two machines of four devices; `memory` in bytes of each, `network` in bytes per second."""
    return Cluster(
        device="two machines", platform="cuda", nodes=2, devices_per_node=4, memory=memory, peak_flops=(("f32", 1e13),),
        memory_bandwidth=1e12, node_link=Link(1e11, 1e-6), network_link=Link(network, 1e-5),
    )  # fmt: skip


FREE_LINKS = Cluster(
    device="cpu", platform="cpu", devices_per_node=8, memory=1 << 30, peak_flops={"f32": 1e4}, memory_bandwidth=1e4,
    node_link=Link(1e15), tile=1,
)  # fmt: skip
"""Eight devices whose communication costs nothing, so that plans shard what they can."""


def mesh_of(*sizes: int, names: str = "data model", kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of the first devices of this machine, with the first of some axes."""
    axes, devices = tuple(names.split())[: len(sizes)], jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, axes, axis_types=(kind,) * len(sizes), devices=devices)


def grouped_step(step: Any, *args: Any) -> GroupedStep:
    """A step traced, with the rules of its operations and its groups."""
    traced = tracing.trace(step, args, {})
    rules = dict(factors.rules_of(traced.graph.ops(), traced.graph.values))
    return GroupedStep(traced, grouping.group(traced, rules), rules)


def piped(step: Any, on: int | Cluster, microbatches: Any = 2, **method: Any) -> Any:
    """The step as a pipeline on a cluster, or on this many devices of this machine."""
    cluster = local(on) if isinstance(on, int) else on
    return alpa_lite.parallelize(
        step, method=alpa_lite.Pipeline(**method), cluster=cluster, num_microbatches=microbatches
    )


def record_calls(monkeypatch: Any, module: Any, name: str) -> list[Any]:
    """A list that grows by the result of each call of a module's function."""
    made: list[Any] = []
    original = getattr(module, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(module, name, recording)
    return made
