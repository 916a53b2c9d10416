"""Errors of searches where nothing fits."""

from __future__ import annotations

import math

import pytest

from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError
from alpa_lite.options import Sharded
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping, search
from alpa_lite.passes.sharding.lessons import Lessons
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.tracing import tracing

LIMIT = 1.0


def searched(share: float, lessons: Lessons | None = None) -> search.Found:
    """A mixture of experts within a share of the bytes that its fastest plan takes."""
    fun, args = models.get("moe").abstract("tiny", 16)
    traced = tracing.trace(fun, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    cluster, method = Cluster.preset("a100", nodes=1), Sharded((4, 2))
    groups = grouping.group(traced, rules)
    return search.search(
        traced, groups, rules, cluster, method, budget=share * 4_463_104, time_limit=LIMIT, lessons=lessons
    )


def test_what_does_not_fit_says_which_budget_is_the_smallest():
    with pytest.raises(InfeasibleError, match="smallest budget that works on one mesh is") as caught:
        searched(0.001)
    assert caught.value.smallest_budget


@pytest.mark.parametrize(
    ("peak", "said", "budget"),
    [
        (math.inf, r"3\.76 MiB \(3,944,832 bytes\) per device", 3_944_832),
        (
            3 * 2**30,
            r"at least 1\.00 GiB \([\d,]+ bytes\) and at most 3\.00 GiB \([\d,]+ bytes\) per device",
            3 * 2**30,
        ),
        (2**30, r"1\.00 GiB \([\d,]+ bytes\) per device", 2**30),
    ],
)
def test_what_does_not_fit_says_what_was_found_of_the_smallest_budget_in_the_time(monkeypatch, peak, said, budget):
    """Without a layout of few bytes, the one of the least is looked for, so that a budget that works is known."""
    monkeypatch.setattr(solve, "bound_of_peak", lambda program: (float(2**30), peak))
    text = f"the smallest budget that works on one mesh is {said}, on a mesh of 4 x 2"
    with pytest.raises(InfeasibleError, match=text) as caught:
        searched(0.001, Lessons(quick=True))
    assert caught.value.smallest_budget == budget
