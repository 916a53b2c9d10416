"""The list of the operations that take most, what bounds them, and what explaining them says."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.cost import MeshCost
from alpa_lite.figures import Spending
from alpa_lite.layout import LogicalMesh
from alpa_lite.options import Method
from alpa_lite.plan import Plan
from alpa_lite.report import computing, html

TEXTBOOK = alpa_lite.DataParallel()
CLUSTER = dataclasses.replace(alpa_lite.Cluster.preset("h100", nodes=1), collectives=())


@functools.cache
def planned(method: Method = TEXTBOOK) -> Plan:
    def step(params, batch):
        def loss(params):
            h = batch
            for layer in params[:-1]:
                h = jnp.tanh(h @ layer)
            return (h @ params[-1]).sum()

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 3 + [jax.ShapeDtypeStruct((256, 4096), jnp.float32)]
    batch = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    return alpa_lite.make_plan(step, params, batch, cluster=CLUSTER, method=method, verify="off")


def test_rows_add_up_to_the_step():
    plan = planned()
    rows = computing.heaviest(plan)
    assert [row.total for row in rows] == sorted((row.total for row in rows), reverse=True)
    stage = plan.stages[0]
    assert sum(row.seconds for row in rows) == pytest.approx(stage.compute_seconds)
    assert sum(row.links + row.latency for row in rows) == pytest.approx(stage.communication_seconds)
    assert sum(computing.bounds(rows).values()) == pytest.approx(stage.seconds)


def test_terms_are_those_of_the_cost_model():
    """The product of the last layer in the forward pass: one of [512, 256] x [256, 4096] on each of eight devices."""
    rows = computing.heaviest(planned())
    row = next(r for r in rows if r.operation == "dot_general" and r.count == 1 and "forward" in r.where)
    cost = MeshCost(CLUSTER, LogicalMesh((8,), ("x",)))
    reached = cost.matmul_efficiency(512, 4096, 256)
    assert reached is not None
    assert row.flops == pytest.approx(2 * 512 * 256 * 4096 / CLUSTER.peak(jnp.float32) / reached)
    assert row.bytes > 0 and row.seconds == max(row.flops, row.bytes) + row.starts
    assert row.bound == ("FLOPs" if row.flops > row.bytes else "bytes")
    # The three layers before it are one row, and the gradients of their weights wait for one latency together.
    assert any(r.operation == "dot_general" and r.count == 3 for r in rows)
    waiting = [r for r in rows if r.links]
    alpha, beta = cost.coefficients("all_reduce", ("x",))
    assert sum(r.links for r in waiting) == pytest.approx(beta * (4 * (3 * 256 * 256 + 256 * 4096) + 4))
    assert sum(r.latency for r in waiting) == pytest.approx(2 * alpha)  # of the gradients, and of the loss


def test_a_bound_is_the_largest_term():
    row = Spending("f.py:1", "mul", flops=1e-6, bytes=2e-6, links=1.5e-6, latency=1e-6, count=2)
    assert row.bound == "bytes" and row.seconds == 2e-6 and row.total == pytest.approx(4.5e-6)
    assert computing.bounds([row]) == pytest.approx({"FLOPs": 0.0, "bytes": 2e-6, "links": 1.5e-6, "latency": 1e-6})
    assert computing.bounds_text([row]) == "bytes 44 %, links 33 %, latency 22 %"


def test_printed_with_what_bounds_it():
    plan = planned()
    rows = computing.heaviest(plan)
    heavy = rows[0]
    assert heavy.operation == "dot_general" and "test_computing.py" in heavy.where
    details, brief, page = plan.details(), str(plan), html.document(plan)
    line = next(text for text in details.splitlines() if text.strip().startswith("dot_general  "))
    assert f"x {heavy.count}" in line and " FLOPs " in line
    assert f"bound by     {computing.bounds_text(rows)}" in brief
    assert f"dot_general x {heavy.count}: " in brief and f"({heavy.bound}), {heavy.where.split()[0]}, backward" in brief
    assert max(map(len, [*brief.splitlines(), *details.splitlines()])) <= 100
    assert page.count("<td>FLOPs</td>") == sum(row.bound == "FLOPs" for row in rows)
    assert Plan.from_json(plan.to_json()).stages[0].spending == plan.stages[0].spending


def test_explained_with_what_bounds_it():
    told = planned().explain("dot_general")
    assert "the method fixed this sharding" in told and "bound by FLOPs" in told
    assert "of the computing and the collectives of the stage" in told
    plan = planned(alpa_lite.Sharded()).weighed()
    decision = max(plan.decisions, key=lambda d: d.seconds)  # of a product, whose group a transpose may name
    chosen = decision.chosen
    assert chosen is not None
    starts = CLUSTER.kernel_start * decision.count
    assert chosen.compute_seconds == pytest.approx(max(chosen.flops_seconds, chosen.bytes_seconds) + starts)
    told = plan.explain(decision.key)
    terms = {"FLOPs": chosen.flops_seconds, "bytes": chosen.bytes_seconds, "links": chosen.link_seconds}
    assert f"bound by {max(terms, key=lambda name: terms[name])}: FLOPs " in told
