"""What a layer costs as a stage: what scales with the size of a micro-batch, and on which logical mesh."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.options import Sharded
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.sharding import lagrangian
from alpa_lite.passes.stages import layer_costs, planning
from alpa_lite.passes.stages.layer_costs import Layer, LayerCost
from alpa_lite.passes.stages.planning import PlannedStage
from tests import pipeline_driver
from tests.mlps import mlp

WIDTH, LAYERS, EXAMPLES = 1024, 4, 4096
DEVICES = Cluster.preset("a100").part(4)


def graph_of(microbatches: int) -> Any:
    """The second layer."""
    step, args = mlp(WIDTH, EXAMPLES, LAYERS)
    return pipeline_driver.staged(step, args, LAYERS, microbatches).graphs[1]


def frugal(microbatches: int) -> tuple[PlannedStage, LayerCost]:
    """The layer where memory is very expensive, on a mesh of one axis, and what that costs."""
    decided = planning.decide(graph_of(microbatches), DEVICES, Sharded((4,)), price=1000.0)
    planned = planning.lowered(decided, split_weights=False)
    return planned, layer_costs._cost(planned)


def waiting(planned: PlannedStage, kind: Literal["forward", "backward"]) -> tuple[list[str], float, float]:
    """The collectives of a segment, their seconds, and those of their latency."""
    segment = planned.segments.of(kind)
    assert segment is not None
    found = planned.prices.collectives(segment.instructions)
    latency = sum(alpha for _, alpha, _ in planned.prices.links(segment.instructions))
    return [collective.kind for collective, _ in found], sum(seconds for _, seconds in found), latency


def test_gathering_a_parameter_takes_as_long_whatever_the_size_of_a_micro_batch() -> None:
    """Of 2,048 examples, the parameter is gathered and its gradient scattered, each of them 4 MiB."""
    planned, cost = frugal(2)
    kinds, seconds, latency = waiting(planned, "forward")
    assert kinds == ["all_gather"] and cost.steady == pytest.approx(seconds) and seconds > 2 * latency
    kinds, seconds, _ = waiting(planned, "backward")
    assert kinds == ["all_gather", "reduce_scatter"] and cost.adding > seconds


def test_of_moving_activations_latency_alone_does_not_depend_on_their_size() -> None:
    """Of 512 examples, activations are summed and gathered, which scales; the latency of that does not."""
    planned, cost = frugal(8)
    kinds, seconds, latency = waiting(planned, "forward")
    assert kinds == ["reduce_scatter"] and cost.steady == pytest.approx(latency) and seconds > 1.5 * latency
    smaller = frugal(16)[1]
    assert smaller.steady == cost.steady
    scaled = cost.steady + (cost.forward - cost.steady) / 2
    assert scaled < smaller.forward < cost.forward  # products of fewer examples take longer each


def test_a_layer_costs_more_on_a_mesh_that_suits_it_less() -> None:
    layer = Layer(graph_of(2))
    best = layer.at(DEVICES, Sharded(), 0)
    other = layer.at(DEVICES, Sharded(), 0, (4,))
    assert best.mesh_shape == (2, 2) and other.mesh_shape == (4,)
    seconds = [2 * (cost.forward + cost.backward) + cost.update for cost in (best, other)]
    assert seconds[0] < seconds[1]
    assert layer.at(DEVICES, Sharded(), 0, (2, 2)) == best
    assert layer.at(DEVICES, Sharded(), 0, (5,)) == best  # no mesh of the devices
    assert best.seconds > 2 * (best.forward + best.backward) and best.bytes > best.saved


def test_at_a_price_a_layer_is_as_near_its_optimum_in_seconds_as_without_one(monkeypatch) -> None:
    """At price 16, seconds are a seventeenth of what is minimised, and a gap of its own tells plans apart."""
    seen: list[tuple[float, float]] = []
    solved = lagrangian._solved

    def noted(problems: Any, price: float, *, gap: float, max_work: int) -> Any:
        seen.append((price, gap))
        return solved(problems, price, gap=gap, max_work=max_work)

    monkeypatch.setattr(lagrangian, "_solved", noted)
    layer = Layer(graph_of(2))
    for number in range(len(layer_costs.PRICES)):
        layer.at(DEVICES, Sharded(), number)
    at = {price: gap for price, gap in seen if price}
    assert sorted(gap for gap in at.values()) == [layer_costs.GAP / 16, layer_costs.GAP / 4]
    assert max(gap for price, gap in seen if not price) == lagrangian.ROUGH_GAP


def gated(width: int, batch: int, layers: int) -> tuple[Any, Any]:
    """A step of gradient descent on gated layers four times as wide inside, and shapes of its arguments."""

    def step(state: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            x = batch
            for up, down in weights:
                inner = x @ up
                x = x + (jnp.sin(inner) * jnp.tanh(inner)) @ down
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    f32 = jnp.dtype("float32")
    shapes = (width, 4 * width), (4 * width, width)
    weights = [tuple(jax.ShapeDtypeStruct(shape, f32) for shape in shapes) for _ in range(layers)]
    return step, (weights, jax.ShapeDtypeStruct((batch, width), f32))


@pytest.mark.parametrize("choice", ["layer", "selective"])
def test_temporary_bytes_of_computing_again_are_those_of_the_planned_stage(
    choice: Choice,
) -> None:
    """What is computed again lives from there to its last reader: not all of it is there at the fullest point."""
    step, args = gated(512, 8192, 4)
    every: tuple[Choice, ...] = (choice, choice, choice, choice)
    cuts = [pipeline_driver.staged(step, args, 4, 2, remat=remat) for remat in ((), every)]
    plain, again = (
        planning.lowered(planning.decide(cut.graphs[1], DEVICES, Sharded((4,)), price=0.0), split_weights=False)
        for cut in cuts
    )
    cost = layer_costs._cost(plain)
    found, saved = {
        "layer": (cost.temporary_layer, 0.0), "selective": (cost.temporary_selective, cost.kept)
    }[choice]  # fmt: skip
    assert found == pytest.approx(max(again.temporary.values()), rel=0.15)
    assert found < 0.4 * (cost.temporary + cost.saved - saved)
