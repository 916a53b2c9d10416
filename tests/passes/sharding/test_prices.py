"""Prices of resharding are derived once for equal clusters and meshes, and what is kept of them is bounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.layout import Layout, LogicalMesh
from alpa_lite.passes.sharding import prices

A100 = Cluster.preset("a100", nodes=1)
AXES = ((), ("x",), ("y",), ("x", "y"), ("y", "x"))
NBYTES = 2**20
MATRICES = tuple(Layout((a, b)) for a in AXES for b in AXES if not set(a) & set(b))


@pytest.fixture
def recent(monkeypatch):
    """A table of its own in place of the process's."""

    def of(limit: int) -> prices.Recent:
        monkeypatch.setattr(prices, "RECENT", prices.Recent(limit))
        return prices.RECENT

    return of


def test_a_second_plan_finds_the_prices_of_the_first(recent, monkeypatch):
    derived = []
    inner = prices._pairs
    monkeypatch.setattr(prices, "_pairs", lambda *args: derived.append(args) or inner(*args))
    kept = recent(2**26)

    def plan() -> None:
        fun, args = models.get("mlp").abstract("tiny", 32)
        alpa_lite.make_plan(fun, *args, cluster=Cluster.preset("a100", nodes=1), method=alpa_lite.Sharded((4, 2)))

    plan()
    count, size = len(derived), kept.nbytes
    assert count > 0 and size > 0
    plan()
    assert len(derived) == count
    assert kept.nbytes == size


def test_what_is_kept_is_bounded(recent):
    mesh = LogicalMesh((4, 2), ("x", "y"))
    one = prices._pairs(MeshCost(A100, mesh), MATRICES, MATRICES, NBYTES)
    kept = recent(3 * one.nbytes)
    costs = [MeshCost(replace(A100, memory_bandwidth=1e12 + i), mesh) for i in range(5)]
    for cost in costs:
        prices.pairs(cost, MATRICES, MATRICES, NBYTES)
        assert kept.nbytes <= kept.limit
    assert kept.nbytes == 3 * one.nbytes
    assert prices.pairs(costs[-1], MATRICES, MATRICES, NBYTES) is prices.pairs(costs[-1], MATRICES, MATRICES, NBYTES)
    np.testing.assert_array_equal(prices.pairs(costs[0], MATRICES, MATRICES, NBYTES), one)


def test_prices_cannot_be_changed_by_those_who_ask(recent):
    recent(2**20)
    table = prices.pairs(MeshCost(A100, LogicalMesh((8,), ("x",))), (Layout((("x",),)),), (Layout(((),)),), NBYTES)
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0, 0] = 0.0
