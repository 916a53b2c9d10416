"""What no pipeline undercuts, and when one is hoped for, against pipelines that are planned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import alpa_lite
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.passes.sharding import computing
from alpa_lite.passes.stages import promise
from alpa_lite.passes.stages.planning import DecidedStage
from tests.mlps import mlp, two_machines

LAYERS, WIDTH, BATCH = 8, 1024, 1024
MEMORY = 2**34


def whole(cluster: Cluster, method: Any, **options: Any) -> tuple[DecidedStage, float]:
    """A plan of one mesh, and its seconds."""
    step, args = mlp(WIDTH, BATCH, LAYERS)
    made = compile_step(step, args, {}, make_options({"method": method, "verify": "off"} | options), cluster)
    (stage,) = made.staged.stages
    return stage, made.plan.step_seconds


def fastest(cluster: Cluster) -> float:
    """Seconds of the best pipeline that is found."""
    step, args = mlp(WIDTH, BATCH, LAYERS)
    method = alpa_lite.Pipeline()
    return alpa_lite.make_plan(step, *args, cluster=cluster, method=method, verify="off").step_seconds


@pytest.mark.parametrize(
    ("method", "network"),
    [
        pytest.param(alpa_lite.DataParallel(), 1e9, id="data-1 GB/s"),
        pytest.param(alpa_lite.Zero(stage=3), 1e9, id="zero-1 GB/s"),
        pytest.param(alpa_lite.DataParallel(), 1e11, id="data-100 GB/s", marks=pytest.mark.slow),
        pytest.param(alpa_lite.Zero(stage=3), 1e11, id="zero-100 GB/s", marks=pytest.mark.slow),
    ],
)
def test_no_pipeline_undercuts_the_bound(method, network) -> None:
    """The products of a step count in full, though the strategies of a textbook method divide them all."""
    cluster = two_machines(MEMORY, network)
    stage, _ = whole(cluster, method)
    flops = 2 * BATCH * WIDTH * WIDTH * (3 * LAYERS - 1)  # no gradient of the batch
    products = flops / (1e13 * cluster.matmul_efficiency) / 8
    values = stage.graph.traced.graph.values
    assert computing.products_seconds(stage.grouping, stage.rules, values, cluster) == pytest.approx(products)
    assert products <= promise.least_seconds(stage) <= fastest(cluster)


def test_what_is_computed_again_or_in_micro_batches_counts_once() -> None:
    cluster = two_machines(MEMORY, 1e11)
    least = []
    ways: list[tuple[Any, dict[str, int]]] = [
        (alpa_lite.Sharded(), {}), (alpa_lite.Sharded(remat="layer"), {}),
        (alpa_lite.Sharded(), {"num_microbatches": 4}),
    ]  # fmt: skip
    for method, options in ways:
        stage, _ = whole(cluster, method, **options)
        least.append(
            computing.products_seconds(stage.grouping, stage.rules, stage.graph.traced.graph.values, cluster)
        )  # fmt: skip
    assert least == pytest.approx(least[:1] * 3)


def test_a_pipeline_is_hoped_for_where_one_mesh_communicates_for_most_of_its_time() -> None:
    for network, hoped in ((1e8, True), (1e12, False)):
        stage, seconds = whole(two_machines(MEMORY, network), alpa_lite.DataParallel())
        assert promise.is_hoped_for(stage, seconds) is hoped
        assert promise.is_hoped_for(stage, math.inf)
        assert not promise.is_hoped_for(stage, stage.found.compute_seconds)
    slow = replace(stage, cluster=replace(stage.cluster, peak_flops=(("f32", 1e10),)))
    assert not promise.is_hoped_for(slow, seconds)  # what the devices compute for at least counts, too
