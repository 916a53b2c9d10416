"""The list of the operations that take most, what bounds them, and what explaining them says."""

import dataclasses
import functools

import pytest

import alpa_lite
from alpa_lite.options import Method
from alpa_lite.plan.figures import OpCost
from alpa_lite.plan.plan import Plan
from alpa_lite.report import html, operations, stages
from gallery.steps import mlp
from tests.plans import pipeline_plan

CLUSTER = dataclasses.replace(alpa_lite.Cluster.preset("h100", nodes=1), collectives=())


@functools.cache
def planned(method: Method) -> Plan:
    step, args = mlp(1024, 32768, 3)
    return alpa_lite.make_plan(step, *args, cluster=CLUSTER, method=method, verify="off")


def data_parallel() -> Plan:
    return planned(alpa_lite.DataParallel())


def test_rows_add_up_to_the_step():
    stage, rows = data_parallel().stages[0], operations.rank_operations(data_parallel())
    assert [row.total for row in rows] == sorted((row.total for row in rows), reverse=True)
    assert sum(row.seconds for row in rows) == pytest.approx(stage.compute_seconds)
    assert sum(row.links + row.latency for row in rows) == pytest.approx(stage.communication_seconds)
    assert sum(operations.bounds(rows).values()) == pytest.approx(stage.seconds)


def test_a_bound_is_the_largest_term():
    row = OpCost("f.py:1", "mul", flops=1e-6, bytes=2e-6, links=1.5e-6, latency=1e-6, count=2)
    assert row.bound == "bytes" and row.seconds == 2e-6 and row.total == pytest.approx(4.5e-6)
    assert operations.bounds([row]) == pytest.approx({"FLOPs": 0.0, "bytes": 2e-6, "links": 1.5e-6, "latency": 1e-6})
    assert operations.bounds_text([row]) == "bytes 44 %, links 33 %, latency 22 %"


def test_printed_and_explained_with_the_bound():
    plan = data_parallel()
    rows, details, brief = operations.rank_operations(plan), plan.details(), str(plan)
    heavy = rows[0]
    assert heavy.operation == "dot_general" and ".py:" in heavy.where
    line = next(text for text in details.splitlines() if text.strip().startswith("dot_general  "))
    assert f"x {heavy.count}" in line and " FLOPs " in line
    assert f"bound by     {operations.bounds_text(rows)}" in brief
    assert f"dot_general x {heavy.count}: " in brief and f"({heavy.bound}), {heavy.where.split()[0]}, backward" in brief
    assert max(map(len, [*brief.splitlines(), *details.splitlines()])) <= 100
    assert html.document(plan).count("<td>FLOPs</td>") == sum(row.bound == "FLOPs" for row in rows)
    assert Plan.from_json(plan.to_json()).stages[0].spending == plan.stages[0].spending
    told = plan.explain("dot_general")
    assert "the method fixed this sharding" in told and "bound by FLOPs" in told
    assert "of the computing and the collectives of the stage" in told


def test_memory_over_the_step_is_drawn_and_reaches_the_peak():
    plan = data_parallel()
    memory = plan.stages[0].memory
    curves = memory.over_step
    assert curves is not None and len({len(amounts) for amounts in curves.values()}) == 1
    assert all(1 < len(amounts) <= 64 for amounts in curves.values())
    assert max(map(sum, zip(*curves.values(), strict=True))) == pytest.approx(memory.total, abs=len(curves))
    assert all(min(amounts) >= 0 and max(amounts) <= memory.kinds[kind] for kind, amounts in curves.items())
    text = html.document(plan)
    assert "Memory over the step" in text and text.count("<polygon") == len(curves)
    assert "Memory over the step" not in plan.details()


def test_memory_of_a_pipeline_follows_its_microbatches():
    plan = pipeline_plan()
    for use, curves in zip(stages.memory(plan), stages.memory_over_step(plan), strict=True):
        assert [(kind, max(amounts)) for kind, amounts in curves.items()] == list(use.kinds)
        assert len(set(curves["params"])) == 1
    flights = [curves["in flight"] for curves in stages.memory_over_step(plan)]
    assert [len(set(amounts) - {0.0}) for amounts in flights] == [4, 3, 2, 1]  # as many micro-batches at most
    assert flights[0][0] > 0 == flights[3][0] and flights[0][-1] > 0 == flights[3][-1]  # the last stage begins last


def test_alternatives_are_explained_with_the_bound():
    plan = planned(alpa_lite.Sharded()).with_alternatives()
    decision = max(plan.decisions, key=lambda d: d.seconds)  # of a product, whose group a transpose may name
    chosen = decision.chosen_alternative
    assert chosen is not None
    starts = CLUSTER.kernel_start * decision.count
    assert chosen.compute_seconds == pytest.approx(max(chosen.flops_seconds, chosen.bytes_seconds) + starts)
    terms = {"FLOPs": chosen.flops_seconds, "bytes": chosen.bytes_seconds, "links": chosen.link_seconds}
    assert f"bound by {max(terms, key=lambda name: terms[name])}: FLOPs " in plan.explain(decision.key)
