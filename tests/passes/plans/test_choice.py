"""One mesh or a pipeline: what Auto must choose where theory says what is best, on clusters that are not here."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster, Link
from alpa_lite.errors import InfeasibleError
from alpa_lite.options import Auto, DataParallel, Pipeline, Sharded, TensorParallel, Zero

FIXED = {
    "sharded": Sharded(),
    "data": DataParallel(),
    "zero-3": Zero(3),
    "tensor": TensorParallel(),
    "pipeline": Pipeline(),
}


def step_and_args(layers: int, width: int, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """Plain descent on a chain of square layers."""

    def step(weights, batch):
        def loss(weights):
            x = batch["x"]
            for i, w in enumerate(weights):
                with jax.named_scope(f"layer{i}"):
                    x = jnp.tanh(x @ w)
            return ((x - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    rows = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return step, ([jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers, {"x": rows, "y": rows})


def cluster(nodes: int, devices: int, network: float = 50e9) -> Cluster:
    """Devices of 100 teraFLOPs, 300 GB/s within a node."""
    return Cluster(
        device="test",
        devices_per_node=devices,
        nodes=nodes,
        memory=16 * 2**30,
        peak_flops={"f32": 100e12},
        memory_bandwidth=2e12,
        node_link=Link(300e9, 2e-6),
        network_link=Link(network, 5e-6),
    )


def plans(step: Any, args: tuple[Any, ...], where: Cluster, **options: Any) -> dict[str, alpa_lite.Plan]:
    """The plan of Auto and of every fixed method that fits."""
    out = {}
    for name, method in {"auto": Auto(), **FIXED}.items():
        try:
            out[name] = alpa_lite.make_plan(step, *args, cluster=where, method=method, verify="off", **options)
        except InfeasibleError:
            assert name != "auto"
    assert out["auto"].step_seconds <= min(plan.step_seconds for plan in out.values()) * (1 + 1e-9)
    return out


def test_a_model_that_fits_stays_on_one_mesh():
    step, args = step_and_args(layers=4, width=1024, batch=65536)
    found = plans(step, args, cluster(1, 4))
    assert found["auto"].num_stages == 1
    assert found["auto"].pipeline is None


def test_slow_links_between_nodes_lead_to_stages_per_node():
    step, args = step_and_args(layers=4, width=8192, batch=4096)
    where = cluster(2, 4, network=0.5e9)
    found = plans(step, args, where, num_microbatches=8)["auto"]
    assert found.pipeline is not None
    shape = found.pipeline
    firsts = [shape.first_devices[mesh] for mesh in shape.submeshes]
    spans = [
        range(first, first + math.prod(stage.mesh_shape)) for first, stage in zip(firsts, found.stages, strict=True)
    ]
    assert {device for span in spans for device in span} == set(range(8))
    assert all(span[0] // 4 == span[-1] // 4 for span in spans)


def test_memory_that_fits_no_mesh_leads_to_a_pipeline():
    """Sizes that divide into no equal parts cannot be sharded, but layers can be apart."""
    step, args = step_and_args(layers=4, width=2039, batch=32)
    where = cluster(1, 4)
    weights = 2039 * 2039 * 4
    budget = 3.5 * weights
    with pytest.raises(InfeasibleError):
        alpa_lite.make_plan(step, *args, cluster=where, method=Sharded(), memory_per_device=budget)
    found = plans(step, args, where, memory_per_device=budget)
    assert found["auto"].num_stages > 1
    assert all(stage.memory.total <= budget for stage in found["auto"].stages)
