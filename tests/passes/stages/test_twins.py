"""Identical stages: what one costs is what the others cost, and it is worked out once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.options import Sharded
from alpa_lite.passes.stages import planning
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage
from tests import pipeline_driver

WIDTH, LAYERS = 64, 8


def step(params: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(params: list[jax.Array]) -> jax.Array:
        x = batch
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [weight - 0.1 * grad for weight, grad in zip(params, grads, strict=True)], value


@pytest.fixture(scope="module")
def graphs() -> tuple[Any, Any]:
    """Two identical stages."""
    args = [jnp.ones((WIDTH, WIDTH))] * LAYERS, jnp.ones((64, WIDTH))
    found: dict[str, Any] = {}
    for graph in pipeline_driver.staged(step, args, LAYERS, 2).graphs:
        other = found.setdefault(planning.digest(graph), graph)
        if other is not graph:
            return other, graph
    raise AssertionError("no two stages are identical")


def decided(graph: Any, price: float = 0.0, like: DecidedStage | None = None) -> DecidedStage:
    part = Cluster.preset("a100").part(4)
    return planning.decide(graph, part, Sharded((4,)), price=price, like=like)


def test_a_twin_costs_what_the_stage_itself_would(graphs: tuple[Any, Any]) -> None:
    first = planning.lowered(decided(graphs[0]), split_weights=False)
    second = decided(graphs[1], like=first)
    shared = planning.lowered(second, split_weights=False, like=first)
    alone = planning.lowered(second, split_weights=False)
    assert shared.twin is first and alone.twin is None
    for name in ("seconds", "communication_seconds", "temporary", "overlap"):
        assert costs(shared, name) == costs(alone, name)
        assert sum(map(bool, costs(alone, name))) or name == "overlap"
    assert shared.held == alone.held
    assert shared.prices.operations is first.prices.operations
    assert shared.prices.operations == alone.prices.operations and shared.prices.arguments == alone.prices.arguments


def test_stages_that_differ_are_no_twins(graphs: tuple[Any, Any]) -> None:
    first = planning.lowered(decided(graphs[0]), split_weights=False)
    other = planning.lowered(decided(graphs[1]), split_weights=False, like=first)  # solved by itself
    split = planning.lowered(decided(graphs[1], like=first), split_weights=True, like=first)
    assert other.twin is None and split.twin is None


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
    paths = [graph.traced.arguments[0].path for graph in graphs]
    assert len(set(paths)) == 5, paths


def test_stages_are_identical_in_whichever_division_of_the_step() -> None:
    """What the last of four stages computes again is no matter of the second."""
    args = [jnp.ones((WIDTH, WIDTH))] * LAYERS, jnp.ones((64, WIDTH))
    kept, again = (
        pipeline_driver.staged(step, args, 4, 2, cuts=[2, 4, 6], remat=("layer", "layer", "layer", last)).graphs
        for last in ("none", "layer")
    )
    assert planning.digest(kept[1]) == planning.digest(again[1])
    assert planning.digest(kept[3]) != planning.digest(again[3])


def test_a_whole_stage_at_the_unit_of_its_layers_pays_as_much_for_memory() -> None:
    """A unit that is a thousand times larger makes price 1 a price of 1,000."""
    args = [jnp.ones((WIDTH, WIDTH))] * LAYERS, jnp.ones((64, WIDTH))
    graph = pipeline_driver.staged(step, args, 4, 2).graphs[1]
    part = Cluster.preset("a100").part(4)
    free, dear = (planning.decide(graph, part, Sharded((4,)), price=p) for p in (1.0, 1000.0))
    assert free.offers is not None and dear.found.solution.peak < free.found.solution.peak
    unit = 1000 * free.offers.unit
    same = planning.decide(graph, part, Sharded((4,)), price=1.0, unit=unit)
    assert same.found.choice == dear.found.choice
    assert planning.repriced(same, 1.0).found.choice == dear.found.choice


def costs(planned: PlannedStage, name: str) -> list[Any]:
    table = getattr(planned, name)
    return [table[segment] for segment in planned.segments.items]


def test_a_stage_at_another_price_of_memory_is_what_it_would_be_solved_anew(graphs: tuple[Any, Any]) -> None:
    first, dear = decided(graphs[0]), 10.0
    again, anew = planning.repriced(first, dear), decided(graphs[0], price=dear)
    one, other = again.found.solution, anew.found.solution
    assert (one.choice, one.objective, one.peak) == (other.choice, other.objective, other.peak)
    assert one.peak < first.found.solution.peak
    twin = decided(graphs[1], price=dear, like=again)
    assert twin.found is again.found and twin.graph is not again.graph
