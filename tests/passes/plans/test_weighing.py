"""Alternatives of a plan's decisions: weighed when somebody asks for them, once, for every stage."""

from __future__ import annotations

import pickle

import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.options import Method, Pipeline, Sharded
from alpa_lite.passes.plans import alternatives
from alpa_lite.plan.plan import Plan

CLUSTER = Cluster.preset("a100", nodes=1)


def _planned(method: Method) -> Plan:
    step, args = models.get("mlp").abstract("tiny", 4096, inputs=1024, hidden=1024)
    return alpa_lite.make_plan(step, *args, cluster=CLUSTER, method=method, verify="off")


def _has_alternatives(plan: Plan) -> bool:
    return any(decision.alternatives for stage in plan.stages for decision in stage.decisions)


def test_alternatives_are_weighed_when_somebody_asks_and_once(monkeypatch) -> None:
    calls = []
    weigh = alternatives.weigh
    monkeypatch.setattr(alternatives, "weigh", lambda *given: calls.append(given) or weigh(*given))
    plan = _planned(Sharded((4, 2)))
    before = pickle.loads(pickle.dumps(plan))
    assert not calls and not _has_alternatives(plan)
    decided = next(decision.paths[0] for decision in plan.stages[0].decisions if decision.paths)
    assert "no alternatives" not in plan.explain(decided) and len(calls) == 1
    assert _has_alternatives(plan) and plan.weighed() is plan and len(calls) == 1
    assert before == plan and not _has_alternatives(before.weighed())


def test_a_file_has_the_alternatives() -> None:
    plan = _planned(Sharded((4, 2)))
    read = Plan.from_json(plan.to_json())
    assert _has_alternatives(read) and read.stages == plan.stages
    assert [d.alternatives for d in read.stages[0].decisions] == [d.alternatives for d in plan.stages[0].decisions]


def test_every_stage_has_those_of_its_own_decisions() -> None:
    plan = _planned(Pipeline(num_stages=2)).weighed()
    assert len(plan.stages) == 2
    for stage in plan.stages:
        assert stage.decisions
        for decision in stage.decisions:
            assert decision.chosen is not None
            assert decision.chosen.step.seconds == pytest.approx(stage.solver.objective)
