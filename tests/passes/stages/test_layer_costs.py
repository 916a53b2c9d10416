"""What a layer costs as a stage: what scales with the size of a micro-batch, and on which logical mesh."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.options import Sharded
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.stages import planning
from alpa_lite.passes.stages.layer_costs import Layer, LayerCost, MeasuredLayer
from alpa_lite.passes.stages.planning import PlannedStage
from tests import pipeline_driver
from tests.mlps import mlp
from tests.zoo_base import updated

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
    return planned, MeasuredLayer(planned).cost()


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
    scaled = cost.steady + (cost.forward - cost.steady) / 2
    assert scaled < smaller.forward < cost.forward  # products of fewer examples take longer each


def test_a_layer_costs_more_on_a_mesh_that_suits_it_less() -> None:
    layer = Layer(graph_of(2))
    best = layer.at(DEVICES, Sharded(), 0)
    other = layer.at(DEVICES, Sharded(), 0, (4,))
    assert best.mesh_shape == (2, 2) and other.mesh_shape == (4,)
    seconds = [2 * (cost.forward + cost.backward) + cost.update for cost in (best, other)]
    assert seconds[0] < seconds[1]
    assert layer.at(DEVICES, Sharded(), 0, (5,)) == best  # no mesh of the devices


def gated(state: Any, batch: Any) -> Any:
    """A step of gradient descent on gated layers four times as wide inside."""

    def loss(weights: Any) -> Any:
        x = batch
        for up, down in weights:
            inner = x @ up
            x = x + (jnp.sin(inner) * jnp.tanh(inner)) @ down
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return updated(state, grads), value


@pytest.mark.parametrize("choice", ["layer", "selective"])
def test_temporary_bytes_of_computing_again_are_those_of_the_planned_stage(choice: Choice) -> None:
    """What is computed again lives from there to its last reader: not all of it is there at the fullest point."""
    weights = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512)))] * 4
    args = weights, jax.ShapeDtypeStruct((8192, 512), jnp.float32)

    def second(remat: tuple[Choice, ...]) -> PlannedStage:
        graph = pipeline_driver.staged(gated, args, 4, 2, remat=remat).graphs[1]
        return planning.lowered(planning.decide(graph, DEVICES, Sharded((4,)), price=0.0), split_weights=False)

    plain, again = second(()), second((choice,) * 4)
    cost = MeasuredLayer(plain).cost()
    found, saved = (cost.temporary_layer, 0.0) if choice == "layer" else (cost.temporary_selective, cost.kept)
    assert found == pytest.approx(max(again.temporary.values()), rel=0.15)
    assert found < 0.4 * (cost.temporary + cost.saved - saved)
