"""What no pipeline undercuts, and when one is hoped for, against pipelines that are planned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster, Link
from alpa_lite.compiler import compile_step
from alpa_lite.passes.stages import promise
from alpa_lite.passes.stages.planning import DecidedStage

LAYERS, WIDTH, BATCH = 8, 1024, 1024


def machines(network: float) -> Cluster:
    """Two machines of four devices; `network` in bytes per second."""
    return Cluster(
        device="two machines", platform="cuda", nodes=2, devices_per_node=4, memory=2**34, peak_flops=(("f32", 1e13),),
        memory_bandwidth=1e12, node_link=Link(1e11, 1e-6), network_link=Link(network, 1e-5),
    )  # fmt: skip


def step(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def whole(cluster: Cluster, method: Any, **options: Any) -> tuple[DecidedStage, float]:
    """A plan of one mesh, and its seconds."""
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(LAYERS)]
    given = weights, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    made = compile_step(step, given, {}, make_options({"method": method, "verify": "off"} | options), cluster)
    (stage,) = made.staged.stages
    return stage, made.plan.step_seconds


def fastest(cluster: Cluster) -> float:
    """Seconds of the best pipeline that is found."""
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(LAYERS)]
    given = weights, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return alpa_lite.make_plan(
        step, *given, cluster=cluster, method=alpa_lite.Pipeline(), verify="off"
    ).step_seconds  # fmt: skip


@pytest.mark.parametrize("method", [alpa_lite.DataParallel(), alpa_lite.Zero(stage=3)], ids=["data", "zero"])
@pytest.mark.parametrize("network", [1e9, 1e11])
def test_no_pipeline_undercuts_the_bound(method, network) -> None:
    """The products of a step count in full, though the strategies of a textbook method divide them all."""
    cluster = machines(network)
    stage, _ = whole(cluster, method)
    flops = 2 * BATCH * WIDTH * WIDTH * (3 * LAYERS - 1)  # no gradient of the batch
    products = flops / (1e13 * cluster.matmul_efficiency) / 8
    values = stage.graph.traced.graph.values
    assert promise.products_seconds(stage.grouping, stage.rules, values, cluster) == pytest.approx(products)
    assert products <= promise.least_seconds(stage) <= fastest(cluster)


def test_what_is_computed_again_or_in_micro_batches_counts_once() -> None:
    cluster = machines(1e11)
    least = []
    ways: list[tuple[Any, dict[str, int]]] = [
        (alpa_lite.Sharded(), {}), (alpa_lite.Sharded(remat="layer"), {}),
        (alpa_lite.Sharded(), {"num_microbatches": 4}),
    ]  # fmt: skip
    for method, options in ways:
        stage, _ = whole(cluster, method, **options)
        least.append(
            promise.products_seconds(stage.grouping, stage.rules, stage.graph.traced.graph.values, cluster)
        )  # fmt: skip
    assert least == pytest.approx(least[:1] * 3)


def test_a_pipeline_is_hoped_for_where_one_mesh_communicates_for_most_of_its_time() -> None:
    for network, hoped in ((1e8, True), (1e12, False)):
        stage, seconds = whole(machines(network), alpa_lite.DataParallel())
        assert promise.is_hoped_for(stage, seconds) is hoped
        assert promise.is_hoped_for(stage, math.inf)
        assert not promise.is_hoped_for(stage, stage.found.compute_seconds)
    slow = replace(stage, cluster=replace(stage.cluster, peak_flops=(("f32", 1e10),)))
    assert not promise.is_hoped_for(slow, seconds)  # what the devices compute for at least counts, too
