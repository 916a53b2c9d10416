"""Auto is never slower than a textbook plan, be the time ever so short and the machine ever so slow."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

import alpa_lite
from alpa_lite import one_mesh
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError
from alpa_lite.passes.sharding.lessons import Beaten
from tests import zoo

METHODS = (
    alpa_lite.DataParallel(), alpa_lite.Zero(1), alpa_lite.Zero(2), alpa_lite.Zero(3), alpa_lite.TensorParallel(),
)  # fmt: skip
ROUNDING = 1e-9
A100, V5E, LOCAL = Cluster.preset("a100", nodes=1), Cluster.preset("v5e"), Cluster.local()


def planned(name: str, method: Any, cluster: Cluster, **options: Any) -> alpa_lite.Plan:
    step, args = zoo.get(name).make()
    shapes = jax.eval_shape(lambda: args)
    return alpa_lite.make_plan(step, *shapes, cluster=cluster, method=method, verify="off", **options)


@functools.cache
def textbook(name: str, cluster: Cluster) -> dict[str, float]:
    """Seconds of the methods that fit."""
    found = {}
    for method in METHODS:
        try:
            found[method.describe()] = planned(name, method, cluster).step_seconds
        except AlpaLiteError:
            continue
    return found


def check(name: str, cluster: Cluster, seconds: float) -> None:
    auto = planned(name, alpa_lite.Auto(), cluster, search_time_limit=seconds)
    others = textbook(name, cluster)
    assert len(others) > 2
    assert {method: s for method, s in others.items() if s < auto.step_seconds * (1 - ROUNDING)} == {}


@pytest.mark.parametrize("name", ["linen_gpt", "nnx_gpt"])
def test_in_half_a_second_auto_is_no_slower_than_any_textbook_plan(name: str) -> None:
    check(name, A100, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("linen_unet", A100),
        ("linen_unet", LOCAL),
        ("linen_translator", A100),
        ("nnx_resnet", V5E),
        ("linen_moe", LOCAL),
    ],
)
def test_auto_is_no_slower_on_other_models_and_devices(name: str, cluster: Cluster) -> None:
    check(name, cluster, 0.5)


def test_where_the_search_finds_nothing_the_best_textbook_plan_is_returned(monkeypatch) -> None:
    """As on a machine too slow for any free program; the plan says which method it is, and claims no proof."""

    def nothing(*given: Any, **named: Any) -> Any:
        raise Beaten({})

    others = textbook("linen_gpt", A100)
    monkeypatch.setattr(one_mesh.search, "search", nothing)
    plan = planned("linen_gpt", alpa_lite.Sharded(), A100)
    assert plan.step_seconds == min(others.values())
    (chosen,) = [c for c in plan.candidates if c.status == "chosen"]
    assert chosen.method in ("DataParallel", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel")
    assert plan.solver.status == "feasible" and plan.solver.bound < plan.solver.objective
