"""Value numbers in program order: the graph computes the same, and alike stages become equal but for their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite import graph
from alpa_lite.cluster import Cluster
from alpa_lite.graph import walk
from alpa_lite.options import Sharded
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.ir.pruning import renumbered
from alpa_lite.passes.stages import planning
from alpa_lite.passes.tracing import tracing
from tests import pipeline_driver
from tests.passes import microbatched
from tests.passes.layers.test_layering import GPT


def numbers(one: graph.Graph) -> list[tuple[object, ...]]:
    """Inputs, operations and outputs by value number alone."""
    ops = [(op.key, tuple(a for a in op.operands if isinstance(a, int)), op.results) for op in walk(one.block)]
    return [one.block.inputs, *ops, tuple(a for a in one.block.outputs if isinstance(a, int))]


def test_the_graph_computes_the_same_and_leaves_no_number_out():
    step, state, batch = microbatched.zoo("gpt", 2, layers=1, **GPT)
    traced = microbatched.traced_of(step, state, batch)
    new = renumbered(traced.graph)
    graph.check(new)
    met = [*new.block.inputs, *(v for op in walk(new.block) for b in op.bodies for v in b.inputs)]
    met += [v for op in walk(new.block) for v in op.results]
    assert sorted(met) == list(range(len(new.values)))
    leaves = jax.tree.leaves(((state, batch), {}))
    results = [jax.jit(functools.partial(evaluation.evaluate, one))(leaves) for one in (new, traced.graph)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert numbers(renumbered(new)) == numbers(new)


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


def test_alike_stages_get_equal_numbers():
    first, second, third, _ = chain(jnp.tanh, jnp.tanh, jnp.tanh, jnp.tanh).graphs
    assert planning.digest(second) == planning.digest(third)
    assert numbers(second.traced.graph) != numbers(third.traced.graph)
    assert numbers(renumbered(second.traced.graph)) == numbers(renumbered(third.traced.graph))
    assert planning.digest(first) != planning.digest(second)


def test_numbers_do_not_tell_stages_apart():
    """A layer that multiplies by another number, or reads another row, takes over the choices of one like it."""
    rows = jnp.linspace(0.0, 1.0, 4 * 8).reshape(4, 8)
    functions = [lambda x, i=i: jnp.tanh(x * (i + 0.5)) + rows[i] for i in range(4)]
    _, second, third, _ = chain(*functions).graphs
    assert second.traced.graph.block.ops != third.traced.graph.block.ops
    assert planning.digest(second) == planning.digest(third)
    cluster, method = Cluster.local().part(4), Sharded((4,))
    first = planning.decide(second, cluster, method, price=0.0)
    taken, own = (planning.decide(third, cluster, method, price=0.0, like=it) for it in (first, None))
    assert taken.found is first.found
    assert taken.found.choice == own.found.choice
    seconds = [sorted(planning.lowered(one, split_weights=False).seconds.values()) for one in (taken, own)]
    assert seconds[0] == seconds[1]


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
def test_what_a_single_iteration_ends_with_is_not_computed_for_itself(length, products):
    """The gradient that a scan of layers carries, where nobody reads what it ends with."""

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
