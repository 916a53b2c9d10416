"""Identical stages: what one costs the others cost, and it is worked out once; unread results are not computed."""

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
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.passes.tracing import tracing
from gallery.batches import f32
from gallery.steps import mlp, sgd
from tests import pipeline_driver

WIDTH, LAYERS = 64, 8


def graphs_of(last: Any = "none") -> Any:
    """Four stages of two layers, of which the last computes again what is given."""
    step, args = mlp(WIDTH, 64, LAYERS)
    return pipeline_driver.staged(
        step, args, 4, 2, cuts=[2, 4, 6], remat=("layer", "layer", "layer", last)
    ).graphs  # fmt: skip


@pytest.fixture(scope="module")
def graphs() -> tuple[Any, Any]:
    """Two identical stages."""
    _, one, other, _ = graphs_of()
    assert planning.digest(one) == planning.digest(other)
    return one, other


def decided(graph: Any, price: float = 0.0, **options: Any) -> DecidedStage:
    return planning.decide(graph, Cluster.preset("a100").part(4), Sharded((4,)), price=price, **options)


def test_a_twin_costs_what_the_stage_itself_would(graphs: tuple[Any, Any]) -> None:
    lowered = functools.partial(planning.lower_stage, split_weights=False)
    first = lowered(decided(graphs[0]))
    second = decided(graphs[1], like=first)
    shared, alone = lowered(second, like=first), lowered(second)
    assert shared.twin is first and alone.twin is None
    for name in ("seconds", "communication_seconds", "temporary_bytes", "overlap"):
        one, other = ([getattr(stage, name)[s] for s in stage.segments.items] for stage in (shared, alone))
        assert one == other and (any(one) or name == "overlap")
    assert shared.held == alone.held
    assert shared.prices.operations == alone.prices.operations and shared.prices.arguments == alone.prices.arguments
    assert lowered(decided(graphs[1]), like=first).twin is None  # solved by itself
    assert planning.lower_stage(second, split_weights=True, like=first).twin is None


def named(state: Any, batch: jax.Array) -> Any:
    """Adam on weights of layers by their names: half of what it does is leaf by leaf, and 10 is before 9."""

    def loss(params: Any) -> jax.Array:
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        x = batch.astype(jnp.bfloat16)
        for layer in range(len(params)):
            own = half[f"layer_{layer}"]
            x = x + jnp.tanh(x @ own["in"] + own["bias"]) @ own["out"]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params, first, second, count = state
    value, grads = jax.value_and_grad(loss)(params)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g**2, second, grads)
    rate = 0.1 / jnp.sqrt(count + 1.0)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, first, second)
    return (params, first, second, count + 1.0), value


def test_stages_are_identical_whatever_the_order_of_the_names_of_their_layers() -> None:
    """Layers 3 to 5, 6 to 8 and 9 to 11 of 13, of which 10 and 11 are before 9 by their names."""
    layer = {"in": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH), "out": jnp.ones((WIDTH, WIDTH))}
    params = {f"layer_{number}": layer for number in range(13)}
    args = (params, params, params, jnp.zeros(())), jnp.ones((64, WIDTH))
    graphs = pipeline_driver.staged(named, args, 5, 2, cuts=[3, 6, 9, 12]).graphs
    first, *middle, last = map(planning.digest, graphs)
    assert len(set(middle)) == 1 and first not in middle and last not in middle


def test_stages_are_identical_in_whichever_division_of_the_step(graphs: tuple[Any, Any]) -> None:
    """What the last of four stages computes again is no matter of the second."""
    again = graphs_of("layer")
    assert planning.digest(graphs[0]) == planning.digest(again[1])
    assert planning.digest(graphs_of()[3]) != planning.digest(again[3])


def test_a_stage_at_another_price_of_memory_is_what_it_would_be_solved_anew(graphs: tuple[Any, Any]) -> None:
    """A unit of memory that is a hundred times larger makes price 1 a price of 100."""
    first, anew = decided(graphs[0]), decided(graphs[0], price=100.0)
    again = planning.reprice_stage(first, 100.0)
    one, other = again.mesh_solution.solution, anew.mesh_solution.solution
    assert (one.choice, one.objective, one.peak) == (other.choice, other.objective, other.peak)
    assert one.peak < first.mesh_solution.solution.peak and first.offers is not None
    twin = decided(graphs[1], price=100.0, like=again)
    assert twin.mesh_solution is again.mesh_solution and twin.graph is not again.graph
    unit = decided(graphs[0], price=1.0, unit=100.0 * first.offers.unit)
    assert unit.mesh_solution.choice == anew.mesh_solution.choice


def chain(*functions: Callable[[Any], Any]) -> pipeline_driver.Staged:
    """A chain of square layers, one a stage, with these functions after their products."""

    def loss(weights: Any, x: Any) -> Any:
        for w, function in zip(weights, functions, strict=True):
            x = function(x @ w)
        return (x**2).mean()

    count = len(functions)
    args = [jnp.ones((8, 8))] * count, jnp.ones((4, 8))
    return pipeline_driver.staged(sgd(loss), args, count, 2, cuts=range(1, count))


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

    shapes = [f32(length, 4, 4)] * 2 + [f32(4, 4)]
    traced = tracing.trace(step, shapes, {})
    graph.check(traced.graph)
    assert sum(op.name == "dot_general" for op in walk(traced.graph.block)) == products
    arguments = [jnp.arange(float(s.size)).reshape(s.shape) for s in shapes]
    (found,) = jax.jit(functools.partial(evaluation.evaluate, traced.graph))(arguments)
    np.testing.assert_array_equal(found, jax.jit(step)(*arguments))
