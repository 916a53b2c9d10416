"""The time limit holds for all attempts on all mesh shapes together, whatever comes of them."""

from __future__ import annotations

import time

import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError
from alpa_lite.passes.sharding.solver import solve

LIMIT = 1.0
SLACK = 2.5  # seconds that steps between looks at the clock take, on a machine that is busy


@pytest.fixture
def spent(monkeypatch):
    """Seconds of each call of the solver."""
    seconds: list[float] = []

    def timed(name: str) -> None:
        inner = getattr(solve, name)

        def call(*args, **kwargs):
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - started)

        monkeypatch.setattr(solve, name, call)

    timed("solve")
    timed("minimal_budget")
    return seconds


def planned(share: float) -> alpa_lite.Plan:
    """A mixture of experts within a share of the bytes that its fastest plan takes."""
    fun, args = models.get("moe").abstract("tiny", 16)
    cluster = Cluster.preset("a100", nodes=1)
    budget = int(share * 4_463_104)
    return alpa_lite.make_plan(
        fun, *args, cluster=cluster, method=alpa_lite.Sharded((4, 2)), memory_per_device=budget,
        num_microbatches=1, solver_time_limit=LIMIT, verify="off",
    )  # fmt: skip


def test_a_budget_that_binds_is_met_within_the_limit(spent):
    plan = planned(0.88)
    assert plan.solver.status in ("optimal", "feasible")
    assert len(spent) > 1
    assert sum(spent) < LIMIT + SLACK


def test_what_does_not_fit_is_told_within_the_limit(spent):
    with pytest.raises(InfeasibleError, match="smallest budget that works is") as caught:
        planned(0.001)
    assert caught.value.smallest_budget
    assert sum(spent) < LIMIT + SLACK
