"""The list of the operations that take most, and what explaining them says where a method leaves no choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.report import computing


def planned() -> alpa_lite.Plan:
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
    cluster = alpa_lite.Cluster.preset("h100", nodes=1)
    return alpa_lite.make_plan(step, params, batch, cluster=cluster, method=alpa_lite.DataParallel(), verify="off")


def test_heaviest_operations_and_their_explanation():
    plan = planned()
    rows = computing.heaviest(plan)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(s.seconds for s in plan.stages[0].spending))
    assert sum(row.seconds for row in rows) <= plan.stages[0].compute_seconds * (1 + 1e-9)
    # The last product and its two in reverse are heavier than those of the three layers, which share a row.
    assert rows[0].operation == "dot_general" and "test_computing.py" in rows[0].where
    layers = [r for r in rows if r.operation == "dot_general" and r.where.split()[0] != rows[0].where.split()[0]]
    assert layers and all(row.seconds < rows[0].seconds for row in layers)
    details = plan.details()
    assert "Where computing goes" in details and rows[0].where.split()[0] in details
    told = plan.explain("dot_general")
    assert "the method fixed this sharding" in told and "of the computing of the stage" in told
