"""Costs of layers as stages: what scales with the size of a micro-batch, and what other numbers of them cost."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cluster import Cluster, Dispatch
from alpa_lite.options import Pipeline, Sharded
from alpa_lite.passes import factors
from alpa_lite.passes.layers import division
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.stages import planning, pricing
from alpa_lite.passes.stages.dp.slices import StageChoice
from alpa_lite.passes.stages.layer_costs import PRICES, Layer, LayerCost, MeasuredLayer
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.pricing import LayerCosts, link_seconds
from alpa_lite.passes.tracing import tracing
from gallery.batches import f32
from gallery.steps import mlp, sgd, square_layers
from tests import pipeline_driver
from tests.helpers import two_machines


@pytest.mark.parametrize(("microbatches", "devices"), [(100, 1.0), (200, 1.0), (400, 2.0), (1600, 8.0)])
def test_devices_that_micro_batches_are_too_small_for_do_the_same(microbatches: int, devices: float) -> None:
    """16 examples in 8 parts at 100 micro-batches: 4 examples have 4 parts, each on two devices."""
    layer, nothing = object(), SimpleNamespace()
    cost = replace(cost_of((8,), 1.0), leading_dim=(16, 8))
    known = {(layer, 0, price, ()): cost for price in range(len(PRICES))}
    priced: Any = LayerCosts
    found = priced(nothing, nothing, (8,), (layer,), known).num_repeats(100 / microbatches)
    assert found.tolist() == [[[[devices] * len(pricing.VARIANTS)]]]


@pytest.mark.parametrize(("nodes", "devices", "share"), [(1, 4, 0.0), (2, 4, 0.5), (8, 2, 0.25), (8, 8, 1.0)])
def test_of_the_cuts_between_submeshes_of_a_node_one_crosses_the_network(
    nodes: int, devices: int, share: float
) -> None:
    """A node has 8 devices and 25 Gb/s: of its two submeshes of 4, one sends to the next node."""
    cluster = Cluster.preset("p3.16xlarge", nodes=nodes)
    crossing = np.array([67e6])
    mean, slowest = link_seconds(cluster, crossing, devices, devices)
    within, _ = link_seconds(Cluster.preset("p3.16xlarge", nodes=1), crossing, devices, devices)
    across = 30e-6 + 67e6 / 3.125e9
    assert mean[0] == pytest.approx(share * across + (1 - share) * within[0])
    assert slowest[0] == pytest.approx(across if share else within[0])


@functools.cache
def priced(microbatches: int, platform: str = "cuda") -> LayerCosts:
    """Layers of a step of 8,192 examples on one device, whose memory is slow."""
    step, args = mlp(1024, 8192, 4)
    traced = tracing.trace(step, args, {})
    loops = loop.accumulate(traced, factors.rules_of(traced.graph.ops(), traced.graph.values), microbatches)
    cluster = replace(two_machines(2**34, 1e11), memory_bandwidth=1e11, platform=platform)
    return pricing.price_layers(division.find_layers(loops, max_layers=16), cluster, Pipeline(), (1,), made={})


def test_adding_gradients_takes_as_long_whatever_the_size_of_a_micro_batch() -> None:
    """Priced with micro-batches of 4,096 examples, or of 1,024, where it is a tenth of the backward pass."""
    few, many = priced(2), priced(8)
    assert len(few.layers) == len(many.layers)
    scaled, exact = few.stage_costs(8), many.stage_costs(8)
    for name in ("forward", "backward"):
        one, other = ([getattr(costs, name)[n, n + 1, 0, 0] for n in range(4)] for costs in (scaled, exact))
        assert one == pytest.approx(other, rel=0.06)
    assert few.stage_costs(2).backward[0, 4, 0, 0] < 0.95 * 4 * exact.backward[0, 4, 0, 0]
    assert few.rescale(many.step).stage_costs(8).backward[0, 4, 0, 0] == pytest.approx(scaled.backward[0, 4, 0, 0])


def cost_of(
    mesh: tuple[int, ...], forward: float, *, steady: float = 0.0, adding: float = 0.0, saved: float = 0.0,
    kept: float = 0.0, again: float = 0.0, temporary: float = 0.0, lasting: float = 0.0,
) -> LayerCost:  # fmt: skip
    """What a layer costs that takes this many seconds forward and twice as many backward."""
    rows = []
    choices = ((saved, temporary, 0.0, 0.0), (0.0, temporary + saved, forward, steady),
               (kept, temporary + saved - kept, again, 0.0))  # fmt: skip
    for flying, most, seconds, own in choices:
        bytes_ = (0.0, 0.0), (0.0, flying), (0.0, flying), (lasting, most - lasting)
        passes = (steady, forward - steady), (adding + own, 2 * forward - adding + seconds - own)
        rows.append([*passes, (0.0, 0.0), *bytes_])
    return LayerCost(mesh, np.array(rows).T)


def two_meshes(**named: Any) -> tuple[LayerCosts, Any, Any]:
    """Layers a b a on 4 devices: a takes 3 s forward on 2 x 2, b takes 4 s on 4."""
    a, b = object(), object()
    cluster = Cluster.preset("a100", nodes=1)
    step: Any = SimpleNamespace(
        accumulated=SimpleNamespace(num_microbatches=4),
        layering=SimpleNamespace(layers=[SimpleNamespace(bytes_out=0.0)] * 3),
    )
    layers: Any = (a, b, a)
    known: Any = {}
    for price in range(3):
        known |= {(a, 0, price, ()): cost_of((2, 2), 3.0, **named), (b, 0, price, ()): cost_of((4,), 4.0, **named)}
    return LayerCosts(step, cluster, (4,), layers, known), a, b


def test_a_stage_costs_what_its_layers_do_on_one_mesh() -> None:
    """On 2 x 2 layers a take 3 s and b 7 s, on 4 all take 4 s: all three together are faster on 4."""
    found, a, b = two_meshes()
    on_others = {(b, 0, 0, (2, 2)): cost_of((2, 2), 7.0), (a, 0, 0, (4,)): cost_of((4,), 4.0)}
    found = replace(found, known_costs={**found.known_costs, **on_others})
    meshes = [found.mesh_of(StageChoice(first, stop, 0, 0, 0), 0) for first, stop in ((0, 3), (1, 2), (0, 1))]
    assert meshes == [(4,), (4,), (2, 2)]
    costs = found.stage_costs(4)
    assert costs.forward[0, 3, 0, 0] == 12.0 and costs.backward[0, 3, 0, 0] == 24.0
    assert costs.forward[0, 1, 0, 0] == 3.0 and costs.forward[1, 2, 0, 0] == 4.0


def test_what_does_not_depend_on_the_size_of_a_micro_batch_is_not_scaled() -> None:
    """With 4 micro-batches 1 of 3 s forward and 6 s backward, 2 of 8 temporary bytes; with 8 there are as many."""
    costs = two_meshes(steady=1.0, adding=1.0, temporary=8.0, lasting=2.0)[0].stage_costs(8)
    assert costs.forward[0, 1, 0, 0] == pytest.approx(2.0) and costs.backward[0, 1, 0, 0] == pytest.approx(3.5)
    assert costs.fixed_bytes[0, 1, 0, 0] == pytest.approx(5.0)


def test_the_gradient_of_a_layer_is_not_scaled_where_it_has_bytes_of_its_own() -> None:
    """Before it is added to its sum, which GPUs add to where it is."""

    def least(microbatches: int, platform: str = "cuda") -> tuple[float, float]:
        costs = priced(microbatches, platform)
        return costs.known_costs[costs.layers[1], 0, 0, ()].parts("temporary_bytes")

    assert least(2)[0] == least(16)[0] == 0
    scaled, exact = (priced(count, "cpu").stage_costs(16).fixed_bytes[1, 2, 0, 0] for count in (2, 16))
    assert scaled == pytest.approx(exact, rel=0.01)
    (few, more), (many, less) = least(2, "cpu"), least(16, "cpu")
    assert few == many == 1024 * 1024 * 4
    assert more == 8 * less > 0


def test_a_process_starts_the_tasks_of_its_stages_and_of_their_cuts() -> None:
    """Of 2 nodes with 4 devices: of 8 stages 4, with 5 cuts; of 4 stages 2, with 3; of 2 stages one, with theirs."""
    cluster = replace(two_machines(2**34, 1e11), dispatch=Dispatch(1.0, 0.5))
    found = pricing.hosts(cluster, (1, 2, 4, 8), 16)
    assert list(found.period(2)) == [18 * 1.5, 10 * 2.0, 4 * 3.0, 2 * 3.0]
    assert pricing.hosts(cluster, (1,), 3).stages == (3,)


def test_stages_with_a_layer_that_exceeds_its_cost_need_more() -> None:
    """10 bytes more than the costs say with layer 1 on 4 devices, and none for any other."""
    found = replace(two_meshes()[0], excess_bytes={(1, 4): 10.0, (2, 2): 5.0, (9, 4): 7.0})
    fixed = found.stage_costs(4).fixed_bytes[..., 0, 0]
    assert fixed[0, 2] == fixed[1, 2] == fixed[0, 3] == 10.0 and fixed[0, 1] == fixed[2, 3] == 0.0


def test_variants_that_are_not_allowed_are_no_stages() -> None:
    """And cost nothing else."""
    found, _, _ = two_meshes(saved=8.0, kept=2.0, again=1.0)
    assert pricing.VARIANTS[:4] == ((0, "none"), (0, "layer"), (0, "selective"), (1, "none"))
    whole, some = found.stage_costs(8), found.stage_costs(8, (1, 2))
    assert np.isinf(some.forward[0, 1, 0]).tolist() == [v not in (1, 2) for v in range(len(pricing.VARIANTS))]
    for name in ("forward", "backward", "update", "fixed_bytes", "inflight_bytes"):
        assert np.array_equal(getattr(some, name)[..., 1:3], getattr(whole, name)[..., 1:3])


WIDTH, LAYERS, EXAMPLES = 1024, 4, 4096
DEVICES = Cluster.preset("a100").part(4)


def halves(params: Any, x: Any) -> Any:
    """The loss of square layers that compute in half precision."""
    return square_layers([w.astype(jnp.bfloat16) for w in params], x.astype(jnp.bfloat16)).astype(jnp.float32)


def graph_of(microbatches: int, loss: Any = square_layers) -> Any:
    """The second layer."""
    _, args = mlp(WIDTH, EXAMPLES, LAYERS)
    return pipeline_driver.staged(sgd(loss), args, LAYERS, microbatches).graphs[1]


def frugal(microbatches: int, loss: Any = square_layers) -> tuple[PlannedStage, LayerCost]:
    """The layer where memory is very expensive, on a mesh of one axis, and what that costs."""
    decided = planning.decide(graph_of(microbatches, loss), DEVICES, Sharded((4,)), price=1000.0)
    planned = planning.lower_stage(decided, split_weights=False)
    return planned, MeasuredLayer(planned).cost()


def waiting(planned: PlannedStage, kind: Literal["forward", "backward"]) -> tuple[list[str], float, float]:
    """The collectives of a segment, their seconds, and those of their latency."""
    segment = planned.segments.find(kind)
    assert segment is not None
    found = planned.prices.collectives(segment.instructions)
    latency = sum(alpha for _, alpha, _ in planned.prices.links(segment.instructions))
    return [collective.kind for collective, _ in found], sum(seconds for _, seconds in found), latency


def test_gathering_a_parameter_takes_as_long_whatever_the_size_of_a_micro_batch() -> None:
    """Of 2,048 examples, the parameter is gathered and its gradient scattered, each of them 4 MiB."""
    planned, cost = frugal(2)
    kinds, seconds, latency = waiting(planned, "forward")
    steady, _ = cost.parts("forward")
    assert kinds == ["all_gather"] and steady == pytest.approx(seconds) and seconds > 2 * latency
    kinds, seconds, _ = waiting(planned, "backward")
    assert kinds == ["all_gather", "reduce_scatter"] and cost.parts("backward")[0] > seconds


def test_reducing_a_gradient_that_is_converted_takes_as_long_whatever_the_size_of_a_micro_batch() -> None:
    """Gradients in half precision are converted before they are added to sums of full precision."""
    planned, cost = frugal(2, halves)
    kinds, seconds, _ = waiting(planned, "backward")
    assert "reduce_scatter" in kinds or "all_reduce" in kinds
    assert cost.parts("backward")[0] > seconds


def test_of_moving_activations_latency_alone_does_not_depend_on_their_size() -> None:
    """Of 512 examples, activations are summed and gathered, which scales; the latency of that does not."""
    planned, cost = frugal(8)
    kinds, seconds, latency = waiting(planned, "forward")
    steady, scaled = cost.parts("forward")
    assert kinds == ["reduce_scatter"] and steady == pytest.approx(latency) and seconds > 1.5 * latency
    smaller = sum(frugal(16)[1].parts("forward"))
    assert steady + scaled / 2 < smaller < steady + scaled  # products of fewer examples take longer each


def test_a_layer_costs_more_on_a_mesh_that_suits_it_less() -> None:
    layer = Layer(graph_of(2))
    best = layer.cost_at(DEVICES, Sharded(), 0)
    other = layer.cost_at(DEVICES, Sharded(), 0, (4,))
    assert best.mesh_shape == (2, 2) and other.mesh_shape == (4,)
    seconds = [2 * cost.passes + cost.parts("update")[0] for cost in (best, other)]
    assert seconds[0] < seconds[1]
    assert layer.cost_at(DEVICES, Sharded(), 0, (5,)).table is best.table  # no mesh of the devices


@sgd
def gated(weights: Any, x: Any) -> Any:
    """Gated layers four times as wide inside."""
    for up, down in weights:
        inner = x @ up
        x = x + (jnp.sin(inner) * jnp.tanh(inner)) @ down
    return (x**2).mean()


@pytest.mark.parametrize("choice", ["layer", "selective"])
def test_temporary_bytes_of_computing_again_are_those_of_the_planned_stage(choice: Choice) -> None:
    """What is computed again lives from there to its last reader: not all of it is there at the fullest point."""
    weights = [tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512)))] * 4
    args = weights, f32(8192, 512)

    def second(remat: tuple[Choice, ...]) -> PlannedStage:
        graph = pipeline_driver.staged(gated, args, 4, 2, remat=remat).graphs[1]
        return planning.lower_stage(planning.decide(graph, DEVICES, Sharded((4,)), price=0.0), split_weights=False)

    plain, again = second(()), second((choice,) * 4)
    cost = MeasuredLayer(plain).cost()
    (found, held), (most, saved) = (
        [sum(cost.parts(name, remat)) for name in ("temporary_bytes", "inflight_bytes")] for remat in (choice, "none")
    )
    assert found == pytest.approx(max(again.temporary_bytes.values()), rel=0.15)
    assert found < 0.4 * (most + saved - held)
