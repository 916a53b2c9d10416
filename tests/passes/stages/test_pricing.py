"""Costs of layers for other numbers of micro-batches than they were planned at."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors
from alpa_lite.passes.layers import division
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.stages import pricing
from alpa_lite.passes.stages.choosing import best
from alpa_lite.passes.stages.pricing import Priced, link_seconds
from alpa_lite.passes.tracing import tracing
from tests.mlps import mlp, two_machines


@pytest.mark.parametrize(
    ("microbatches", "devices"),
    [(50, 1.0), (100, 1.0), (200, 1.0), (400, 2.0), (1600, 8.0)],
)
def test_devices_that_micro_batches_are_too_small_for_do_the_same(microbatches: int, devices: float) -> None:
    """16 examples in 8 parts at 100 micro-batches: 4 examples have 4 parts, each on two devices."""
    tables = {"leading": np.full((1, 1, 1), 16.0), "parts": np.full((1, 1, 1), 8.0)}
    nothing: Any = None
    priced = Priced(nothing, nothing, (8,), (), (), {}, tables)
    assert priced.repeated(100 / microbatches).tolist() == [[[devices]]]
    rescaled = Priced(nothing, nothing, (8,), (), (), {}, tables, scale=100 / microbatches)
    assert rescaled.repeated(1.0).tolist() == [[[devices]]]


@pytest.mark.parametrize(
    ("counts", "priced"),
    [((1, 2, 4, 8, 16), 4), ((1, 2, 4, 8, 16, 32, 64, 100, 200, 400), 100)],
)
def test_layers_are_priced_with_micro_batches_that_devices_can_share(counts: tuple[int, ...], priced: int) -> None:
    """Of 1600 examples, 100 micro-batches have 16 each, 32 in the middle of the numbers have 50."""
    asked: list[int] = []

    def price(count: int, kinds: Any) -> Any:
        asked.append(count)
        return SimpleNamespace(layers=())

    def choose(costs: Any, some: Any, limit: float) -> Any:
        return SimpleNamespace(slices=SimpleNamespace(num_microbatches=priced), seconds=1.0, priced=costs, weighed=())

    best(counts, (1,), price, choose, lambda count: None, Deadline())  # type: ignore[arg-type,return-value]
    assert asked == [priced]


@pytest.mark.parametrize(("nodes", "devices", "share"), [(1, 4, 0.0), (2, 4, 0.5), (8, 2, 0.25), (8, 8, 1.0)])
def test_of_the_cuts_between_submeshes_of_a_node_one_crosses_the_network(
    nodes: int, devices: int, share: float
) -> None:
    """A node has 8 devices and 25 Gb/s: of its two submeshes of 4, one sends to the next node."""
    cluster = Cluster.preset("p3.16xlarge", nodes=nodes)
    crossing = np.array([67e6])
    mean, slowest = link_seconds(cluster, crossing, devices, devices)
    within, _ = link_seconds(Cluster.preset("p3.16xlarge", nodes=1), crossing, devices, devices)
    across = 30e-6 + 67e6 / 3.125e9
    assert mean[0] == pytest.approx(share * across + (1 - share) * within[0])
    assert slowest[0] == pytest.approx(across if share else within[0])


def priced(microbatches: int) -> Priced:
    """Layers of a step of 8,192 examples on one device, whose memory is slow."""
    step, args = mlp(1024, 8192, 4)
    traced = tracing.trace(step, args, {})
    loops = loop.accumulate(traced, factors.rules_of(traced.graph.ops(), traced.graph.values), microbatches)
    cluster = replace(two_machines(2**34, 1e11), memory_bandwidth=1e11)
    return pricing.priced(division.divisible(loops, max_layers=16), cluster, Pipeline(), (1,), made={})


def test_adding_gradients_takes_as_long_whatever_the_size_of_a_micro_batch() -> None:
    """Priced with micro-batches of 4,096 examples, or of 1,024, where it is a sixth of the backward pass."""
    few, many = priced(2), priced(8)
    assert len(few.layers) == len(many.layers)
    scaled, exact = few.costs(8), many.costs(8)
    for name in ("forward", "backward"):
        one, other = ([getattr(costs, name)[n, n + 1, 0, 0] for n in range(4)] for costs in (scaled, exact))
        assert one == pytest.approx(other, rel=0.06)
    assert few.costs(2).backward[0, 4, 0, 0] < 0.9 * 4 * exact.backward[0, 4, 0, 0]
    assert few.rescaled(many.step).costs(8).backward[0, 4, 0, 0] == pytest.approx(scaled.backward[0, 4, 0, 0])
    assert few.least_seconds == pytest.approx(many.least_seconds, rel=0.03)
