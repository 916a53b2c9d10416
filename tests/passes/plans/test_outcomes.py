"""What whole steps consist of: equal to the plan's own numbers, and true where batch or links really change."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.options import Sharded
from alpa_lite.passes import factors
from alpa_lite.passes.plans import alternatives
from alpa_lite.passes.plans.outcomes import Outcomes
from alpa_lite.passes.sharding import grouping, strategies
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.solver.problem import from_graph
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.tracing import tracing
from alpa_lite.plan.decisions import Decision
from tests.searching import best_of_meshes

BATCH = 65536
CLUSTER = Cluster.preset("a100", nodes=1)


def _stepped(batch: int):
    step, args = models.get("mlp").abstract("tiny", batch, inputs=1024, hidden=2048)
    return step, *args


@functools.cache
def _grouped(batch: int):
    step, *args = _stepped(batch)
    traced = tracing.trace(step, tuple(args), {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return traced, grouping.group(traced, rules), rules


@functools.cache
def _planned():
    method = Sharded((4, 2))
    found = best_of_meshes(*_grouped(BATCH), CLUSTER, method)
    plan = alpa_lite.make_plan(*_stepped(BATCH), cluster=CLUSTER, method=method, num_microbatches=1, verify="off")
    return found, plan.weighed()


@functools.cache
def _weighed():
    """The problem, the choice, and for each alternative its step and the choice that it is of."""
    found, _ = _planned()
    problem, choice = from_graph(found.space.program), list(found.solution.choice)
    traced, grouping, _ = _grouped(BATCH)
    outcomes = Outcomes(traced, grouping, MeshCost(CLUSTER, found.mesh), found.space, problem, choice)
    rows = alternatives.weigh(problem, choice, [3] * len(choice))
    changes = [weighed.fastest for row in rows for weighed in row]
    return problem, choice, [(outcomes.of(c), alternatives.changed_choice(choice, c)) for c in changes]


def test_the_chosen_step_is_the_plan() -> None:
    _, plan = _planned()
    for decision in plan.stages[0].decisions:
        assert decision.chosen is not None
        step = decision.chosen.step
        assert decision.chosen.fits
        assert step.seconds == pytest.approx(plan.step_seconds)
        assert step.compute_seconds == pytest.approx(plan.stages[0].compute_seconds)
        assert step.bytes_sent == sum(c.bytes * c.count for c in plan.collectives)
        assert step.bytes_per_device == plan.stages[0].memory.total
        assert step.changed == 0


def test_every_alternative_is_a_step_of_its_own() -> None:
    problem, choice, steps = _weighed()
    for step, other in steps:
        assert step.seconds == pytest.approx(problem.seconds(other))
        assert step.bytes_per_device == pytest.approx(problem.peak(other), abs=1)
        assert 0 <= step.latency_seconds <= step.communication_seconds
        assert 0 <= step.batch_seconds <= step.seconds
        assert step.changed == sum(a != b for a, b in zip(choice, other, strict=True))


def test_alternatives_are_ordered_by_the_whole_step() -> None:
    def order(decision: Decision) -> list[tuple[bool, float]]:
        return [(not a.fits, a.step.seconds) for a in decision.alternatives]

    _, plan = _planned()
    assert any(len(d.alternatives) > 3 for d in plan.stages[0].decisions)
    assert all(order(d) == sorted(order(d)) for d in plan.stages[0].decisions)


def test_links_twice_as_fast_halve_what_is_not_latency() -> None:
    link = CLUSTER.node_link
    faster = replace(CLUSTER, node_link=replace(link, bandwidth=2 * link.bandwidth))
    space = strategies.build(GroupedStep(*_grouped(BATCH)), MeshCost(faster, _planned()[0].mesh))
    for step, other in _weighed()[2]:
        waiting = step.communication_seconds - step.latency_seconds
        assert solve.evaluate(space.program, other)[0] == pytest.approx(step.seconds - waiting / 2)


def test_a_batch_twice_as_large_adds_what_grows_with_it() -> None:
    """To first order: products read their weights whatever the batch, and larger ones come closer to the peak."""
    found, _ = _planned()
    space = strategies.build(GroupedStep(*_grouped(2 * BATCH)), MeshCost(CLUSTER, found.mesh))
    assert [n.strategies for n in space.nodes] == [n.strategies for n in found.space.nodes]
    for step, other in _weighed()[2]:
        assert solve.evaluate(space.program, other)[0] == pytest.approx(step.seconds + step.batch_seconds, rel=0.05)
        assert step.batch_seconds > 0.3 * step.seconds
