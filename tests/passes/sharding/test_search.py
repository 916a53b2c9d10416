"""Known answers: what the search must choose where theory says what is best, on clusters that are not here."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import LogicalMesh
from gallery.batches import f32
from gallery.steps import sgd
from tests.passes.sharding.test_textbook import low_rank


def h100(nodes):
    """Nodes of H100 whose collectives are priced by their links."""
    return dataclasses.replace(Cluster.preset("h100", nodes=nodes), collectives=())


H100 = h100(1)
XYZ = ("x", "y", "z")


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@sgd
def mlp_step(state, batch):
    return ((jax.nn.gelu(batch["x"] @ state["w1"]) @ state["w2"] - batch["y"]) ** 2).mean()


def mlp_args(batch: int, width: int, hidden: int) -> tuple[Any, ...]:
    state = {"w1": f32(width, hidden), "w2": f32(hidden, width)}
    return state, {"x": f32(batch, width), "y": f32(batch, width)}


def kinds(plan: alpa_lite.Plan) -> collections.Counter[str]:
    return collections.Counter(c.kind for c in plan.collectives)


def state_bytes(plan: alpa_lite.Plan) -> int:
    stage = plan.stages[0]
    return sum(stage.bytes_per_device(leaf) for leaf in stage.arguments if leaf.role == "state")


# -- tensor and data parallelism --------------------------------------------------------------------------------------


def test_wide_layers_and_a_small_batch_give_the_megatron_pattern():
    batch, width, hidden = 64, 8192, 32768
    plan = alpa_lite.make_plan(mlp_step, *mlp_args(batch, width, hidden), cluster=H100)
    stage = plan.stages[0]
    assert stage.mesh_shape == (8,)
    assert stage.inputs["state['w1']"] == P(None, "x")
    assert stage.inputs["state['w2']"] == P("x")
    # The activations after the second product.
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_reduce", batch * width * 4)]
    # Seconds are compute and communication together.
    assert stage.seconds == plan.step_seconds == plan.solver.objective
    assert stage.compute_seconds + stage.communication_seconds == pytest.approx(stage.seconds, rel=1e-12)
    assert sum(plan.collective_seconds) == pytest.approx(stage.communication_seconds)


def test_a_large_batch_with_small_layers_gives_data_parallelism():
    plan = alpa_lite.make_plan(mlp_step, *mlp_args(65536, 256, 256), cluster=H100)
    inputs = plan.stages[0].inputs
    assert inputs["batch['x']"] == inputs["batch['y']"] == P("x")
    assert inputs["state['w1']"] == inputs["state['w2']"] == P()
    weights = 256 * 256 * 4
    assert sorted((c.kind, c.bytes) for c in plan.collectives) == [
        ("all_reduce", 4), ("all_reduce", weights), ("all_reduce", weights)
    ]  # fmt: skip
    # The reductions of the gradients pay latency once together.
    alpha, beta = MeshCost(H100, LogicalMesh((8,), ("x",))).coefficients("all_reduce", ("x",))
    gradients = [s for c, s in zip(plan.collectives, plan.collective_seconds, strict=True) if c.bytes > 4]
    assert sum(gradients) == pytest.approx(alpha + beta * 2 * weights)


# -- memory -----------------------------------------------------------------------------------------------------------


LAYERS = 2


def adam_step(state, batch):
    def loss(params):
        h = batch["x"]
        for p in params:
            h = h + jax.nn.gelu(h @ p["a"]) @ p["b"]
        return ((h - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["nu"], grads)
    params = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-8), state["params"], mu, nu)
    return {"params": params, "mu": mu, "nu": nu}, value


def adam_args(layers: int = LAYERS, width: int = 1024, batch: int = 8192) -> tuple[Any, ...]:
    params = [{"a": f32(width, 4 * width), "b": f32(4 * width, width)} for _ in range(layers)]
    return {"params": params, "mu": params, "nu": params}, {"x": f32(batch, width), "y": f32(batch, width)}


def adam_plan(budget: int | None) -> alpa_lite.Plan:
    """Without micro-batches and rematerialisation, which would also make room."""
    return alpa_lite.make_plan(
        adam_step, *adam_args(), cluster=H100, method=alpa_lite.Sharded((8,), remat="none"), memory_per_device=budget,
        num_microbatches=1,
    )  # fmt: skip


def sharded(plan: alpa_lite.Plan, part: str) -> list[bool]:
    stage = plan.stages[0]
    return [stage.shards(leaf.spec) > 1 for leaf in stage.arguments if leaf.path.startswith(f"state['{part}']")]


@pytest.mark.slow
def test_a_tightening_budget_trades_communication_for_state():
    plans = [adam_plan(None)]
    peak = plans[0].stages[0].memory.total
    plans += [adam_plan(int(peak * share)) for share in (0.95, 0.9, 0.85)]
    said = re.findall(r"works on one mesh is [\d.]+ \wiB \(([\d,]+) bytes\)", str(refusal(peak // 4)))
    smallest = int(said[0].replace(",", ""))
    plans.append(adam_plan(smallest))
    refusal(int(smallest * 0.999))
    for plan in plans[1:]:
        assert plan.stages[0].memory.total <= plan.memory_per_device
    sizes = [state_bytes(plan) for plan in plans]
    seconds = [plan.stages[0].communication_seconds for plan in plans]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0]
    # Within the optimality gap of each solution.
    slack = [plan.solver.gap * plan.step_seconds for plan in plans]
    for i in range(1, len(plans)):
        assert seconds[i] >= seconds[i - 1] - slack[i - 1] - 1e-12
    assert seconds[-1] > 1.5 * seconds[0]

    loose, tight = plans[0], plans[-1]
    # ZeRO-2: optimizer state and gradients sharded, parameters whole.
    assert all(sharded(loose, "mu")) and all(sharded(loose, "nu")) and not any(sharded(loose, "params"))
    assert kinds(loose) == {"reduce_scatter": 2 * LAYERS, "all_gather": 2 * LAYERS, "all_reduce": 1}
    # ZeRO-3: parameters sharded too, gathered for the forward pass and, all but one, again for the backward pass.
    assert all(sharded(tight, "params")) and all(sharded(tight, "mu"))
    assert kinds(tight)["reduce_scatter"] == 2 * LAYERS and kinds(tight)["all_gather"] > 2 * LAYERS


def refusal(budget: int) -> alpa_lite.InfeasibleError:
    with pytest.raises(alpa_lite.InfeasibleError) as caught:
        adam_plan(budget)
    return caught.value


# -- experts and vocabularies -----------------------------------------------------------------------------------------


@sgd
def expert_step(state, batch):
    x, experts = batch["x"], state["up"].shape[0]
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ state["gate"]), 2)
    hot = jax.nn.one_hot(chosen, experts)
    place = jnp.cumsum(hot.sum(2), 1).astype(jnp.int32) - 1
    dispatch = jax.nn.one_hot(place, 2 * x.shape[1] // experts) * hot.sum(2)[..., None]
    combine = dispatch * jnp.einsum("gnk,gnke->gne", weights, hot)[..., None]
    inputs = jnp.einsum("gnec,gnd->egcd", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", inputs, state["up"]))
    outputs = jnp.einsum("egcf,efd->egcd", hidden, state["down"])
    return ((jnp.einsum("gnec,egcd->gnd", combine, outputs) - batch["y"]) ** 2).mean()


def test_experts_give_all_to_all():
    width, hidden, experts, groups, tokens = 2048, 8192, 16, 8, 1024
    state = {"gate": f32(width, experts), "up": f32(experts, width, hidden), "down": f32(experts, hidden, width)}
    batch = {"x": f32(groups, tokens, width), "y": f32(groups, tokens, width)}
    plan = alpa_lite.make_plan(expert_step, state, batch, cluster=H100, method=alpa_lite.Sharded((8,)))
    inputs = plan.stages[0].inputs
    assert inputs["state['up']"] == inputs["state['down']"] == P("x")
    assert inputs["batch['x']"] == inputs["batch['y']"] == P("x")
    # To the experts, back, and the gradient back to them; the batch itself needs none. Nothing else is large.
    assert kinds(plan)["all_to_all"] == 3
    dispatched = 2 * groups * tokens * width * 4 // 8
    assert {c.bytes for c in plan.collectives if c.kind == "all_to_all"} == {dispatched}
    assert all(c.bytes <= width * experts * 4 for c in plan.collectives if c.kind != "all_to_all")


@sgd
def language_step(state, batch):
    hidden = jnp.tanh(state["embedding"][batch["tokens"]] @ state["w"])
    logs = jax.nn.log_softmax(hidden @ state["out"])
    return -jnp.take_along_axis(logs, batch["targets"][..., None], -1).mean()


def test_a_large_vocabulary_gives_a_vocabulary_parallel_loss():
    vocabulary, width, batch, length = 262144, 4096, 4, 64
    state = {"embedding": f32(vocabulary, width), "w": f32(width, width), "out": f32(width, vocabulary)}
    tokens = {"tokens": i32(batch, length), "targets": i32(batch, length)}
    plan = alpa_lite.make_plan(language_step, state, tokens, cluster=H100, method=alpa_lite.Sharded((8,)))
    assert plan.stages[0].inputs["state['out']"] == P(None, "x")
    logits = batch * length * vocabulary * 4
    assert max(c.bytes for c in plan.collectives) == batch * length * width * 4 < logits // 8
    # The maximum, the sum of exponentials and the picked label each cost one small all-reduce.
    assert sum(c.kind == "all_reduce" and c.bytes == batch * length * 4 for c in plan.collectives) >= 3


# -- three axes -------------------------------------------------------------------------------------------------------

SIDE = 16384


def product_step(state, batch):
    return {"w1": 0.5 * state["w1"]}, batch["x"] @ state["w1"]


@sgd
def two_products_step(state, batch):
    return ((batch["x"] @ state["w1"] @ state["w2"]) ** 2).mean()


def cube_plan(step: Any, mesh: tuple[int, ...], x: P, *weights: P) -> alpa_lite.Plan:
    names = [f"w{number}" for number in range(1, len(weights) + 1)]
    specs = {"batch['x']": x, **{f"state['{name}']": w for name, w in zip(names, weights, strict=True)}}
    return alpa_lite.make_plan(
        step, {name: f32(SIDE, SIDE) for name in names}, {"x": f32(SIDE, SIDE)}, cluster=h100(math.prod(mesh) // 8),
        method=alpa_lite.Manual(specs, mesh, XYZ[: len(mesh)]),
    )  # fmt: skip


def sent(plan: alpa_lite.Plan) -> float:
    """Bytes that each device sends: a ring over k devices sends (k - 1) / k of the payload, twice for an all-reduce."""
    stage = plan.stages[0]
    sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    rings = [(c, math.prod(sizes[axis] for axis in c.axes)) for c in plan.collectives]
    return sum(c.bytes * c.count * (k - 1) / k * (2 if c.kind == "all_reduce" else 1) for c, k in rings)


@pytest.mark.parametrize(("cube", "square"), [((2, 2, 2), (4, 2)), ((4, 4, 4), (8, 8))])
def test_a_cube_reaches_the_three_dimensional_algorithm(cube, square):
    q, devices = cube[0], math.prod(cube)
    three = cube_plan(product_step, cube, P(("x", "y"), "z"), P("z", ("y", "x")))
    block = SIDE * SIDE * 4 // q**2
    assert [(c.kind, c.axes, c.bytes) for c in three.collectives] == [
        ("all_gather", ("y",), block), ("all_gather", ("x",), block), ("reduce_scatter", ("z",), block)
    ]  # fmt: skip
    stage = three.stages[0]
    (result,) = [leaf for leaf in stage.results if leaf.shape == (SIDE, SIDE) and "'w1'" not in leaf.path]
    assert stage.shards(result.spec) == devices

    one = cube_plan(product_step, (devices,), P("x"), P("x"))
    two = cube_plan(product_step, square, P("x", "y"), P("x", "y"))
    for flat in (one, two):
        assert all(flat.stages[0].shards(leaf.spec) == devices for leaf in flat.stages[0].arguments)
    assert sent(three) == pytest.approx(3 * block * (q - 1) / q)
    assert sent(three) < sent(two) < sent(one)
    assert sum(three.collective_seconds) < sum(two.collective_seconds) < sum(one.collective_seconds)


def test_a_train_step_on_a_cube_communicates_less():
    """Input and output axes swap from one product to the next."""
    three = cube_plan(two_products_step, (2, 2, 2), P(("x", "y"), "z"), P("z", ("y", "x")), P("y", ("z", "x")))
    two = cube_plan(two_products_step, (4, 2), P("x", "y"), P("x", "y"), P("x", "y"))
    one = cube_plan(two_products_step, (8,), P("x"), P("x"), P("x"))
    assert sent(three) < sent(two) < sent(one)
    assert three.step_seconds < two.step_seconds < one.step_seconds


# -- against textbook plans -------------------------------------------------------------------------------------------

TEXTBOOK = [alpa_lite.DataParallel(), alpa_lite.Zero(stage=2), alpa_lite.Zero(stage=3), alpa_lite.TensorParallel()]


def against_textbook(step: Any, args: Any, cluster: Cluster) -> list[float]:
    """Holds the plan of the search against textbook plans; seconds of all, the search's first."""
    plans = [
        alpa_lite.make_plan(step, *args, cluster=cluster, method=method, verify="off")
        for method in (alpa_lite.Auto(), *TEXTBOOK)
    ]
    auto, *others = [plan.step_seconds for plan in plans]
    assert auto * (1 - plans[0].solver.gap) <= min(others) * (1 + 1e-9)
    return [auto, *others]


@pytest.mark.parametrize("nodes", [1, 2])
def test_auto_is_never_slower_than_a_textbook_plan(nodes):
    params = {"a": f32(512, 8), "b": f32(8, 512)}
    args = {"params": params, "mu": params}, {"x": f32(16, 512), "y": f32(16, 512)}
    against_textbook(low_rank, args, h100(nodes))


def test_a_wide_step_beats_a_textbook_plan():
    auto, *textbook = against_textbook(mlp_step, mlp_args(512, 4096, 16384), H100)
    assert auto < 0.9 * max(textbook)


# -- mesh shapes and links --------------------------------------------------------------------------------------------


def test_every_mesh_shape_is_weighed_and_a_slower_link_never_makes_a_plan_faster():
    link = H100.node_link
    slow = dataclasses.replace(H100, node_link=dataclasses.replace(link, bandwidth=link.bandwidth / 10))
    plan, slower = (alpa_lite.make_plan(mlp_step, *mlp_args(512, 1024, 4096), cluster=c) for c in (H100, slow))
    assert {c.mesh_shape for c in plan.candidates} == set(H100.mesh_shapes())
    (chosen,) = [c for c in plan.candidates if c.status == "chosen"]
    assert chosen.mesh_shape == plan.stages[0].mesh_shape
    finished = [c.step_seconds for c in plan.candidates if c.step_seconds is not None]
    assert chosen.step_seconds == min(finished) == plan.step_seconds
    assert slower.step_seconds >= plan.step_seconds
    assert sum(c.bytes for c in slower.collectives) <= sum(c.bytes for c in plan.collectives)
