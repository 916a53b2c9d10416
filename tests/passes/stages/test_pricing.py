"""Costs of layers for other numbers of micro-batches than they were planned at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.stages.choosing import best
from alpa_lite.passes.stages.pricing import Priced, link_seconds


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
