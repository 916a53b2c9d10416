"""Stages that are alike but for the numbers of their values share choices; unread results are not computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.ir import graph
from alpa_lite.ir.graph import walk
from alpa_lite.options import Sharded
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.stages import planning
from alpa_lite.passes.tracing import tracing
from tests import pipeline_driver


def chain(*functions: Callable[[Any], Any]) -> pipeline_driver.Staged:
    """A chain of square layers, one a stage, with these functions after their products."""

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            x = batch["x"]
            for w, function in zip(weights, functions, strict=True):
                x = function(x @ w)
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    count = len(functions)
    args = [jnp.ones((8, 8))] * count, {"x": jnp.ones((4, 8))}
    return pipeline_driver.staged(step, args, count, 2, cuts=range(1, count))


def test_alike_stages_take_over_choices():
    """Though a layer multiplies by another number, or reads another row, than the one like it."""
    rows = jnp.linspace(0.0, 1.0, 4 * 8).reshape(4, 8)
    functions = [lambda x, i=i: jnp.tanh(x * (i + 0.5)) + rows[i] for i in range(4)]
    first, second, third, _ = chain(*functions).graphs
    assert second.traced.graph.block.ops != third.traced.graph.block.ops
    assert planning.digest(first) != planning.digest(second) == planning.digest(third)
    cluster, method = Cluster.local().part(4), Sharded((4,))
    known = planning.decide(second, cluster, method, price=0.0)
    taken, own = (planning.decide(third, cluster, method, price=0.0, like=it) for it in (known, None))
    assert taken.found is known.found and taken.found.choice == own.found.choice


def test_stages_that_differ_within_a_micro_batch_alone_have_other_digests():
    """The scan over micro-batches keeps the key of the whole step's, so that its body must be looked at."""
    stage = chain(jnp.tanh, jnp.tanh, jnp.tanh).graphs[1]
    whole = stage.traced.graph
    scan = next(op for op in whole.block.ops if op.index == stage.scan)
    (body,) = scan.bodies
    other = replace(body, ops=(replace(body.ops[0], key="another"), *body.ops[1:]))
    ops = tuple(replace(op, bodies=(other,)) if op is scan else op for op in whole.block.ops)
    changed = replace(stage.traced, graph=replace(whole, block=replace(whole.block, ops=ops)))
    assert planning.digest(replace(stage, traced=changed)) != planning.digest(stage)


@pytest.mark.parametrize(("length", "products"), [(1, 1), (2, 2)])
def test_the_last_carry_of_a_single_iteration_is_not_computed_if_unread(length, products):
    """The gradient that a scan of layers carries, where nobody reads the last one."""

    def step(weights, x, grad):
        def layer(grad, saved):
            w, x = saved
            return grad @ w.T, x.T @ grad

        return jax.lax.scan(layer, grad, (weights, x), reverse=True)[1]

    shapes = [jax.ShapeDtypeStruct((length, 4, 4), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((4, 4), jnp.float32)]
    traced = tracing.trace(step, shapes, {})
    graph.check(traced.graph)
    assert sum(op.name == "dot_general" for op in walk(traced.graph.block)) == products
    arguments = [jnp.arange(float(s.size)).reshape(s.shape) for s in shapes]
    (found,) = jax.jit(functools.partial(evaluation.evaluate, traced.graph))(arguments)
    np.testing.assert_array_equal(found, jax.jit(step)(*arguments))
