"""Purposes of the memory of a step: parameters, gathered weights, gradients, optimizer state, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import alpa_lite
import gallery
from alpa_lite.cluster import Cluster
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.sharding.kinds import state_kinds
from alpa_lite.passes.tracing.tracing import trace
from gallery.batches import f32
from tests.helpers import grouped_step

X, Y = f32(8, 6), f32(8, 4)
H100 = Cluster.preset("h100", nodes=1)
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def descent(loss: Callable[[Any, jax.Array, jax.Array], jax.Array], params: Any, *, metric: bool = False) -> Case:
    """A step of Adam on a pytree of parameters."""
    optimizer = optax.adam(1e-2)

    def step(params, opt, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt = optimizer.update(grads, opt, params)
        # A metric of the update: moments influence a result that is no state, and are no parameters all the same.
        more = [sum(jnp.abs(update).sum() for update in jax.tree.leaves(updates))] if metric else []
        return optax.apply_updates(params, updates), opt, value, more

    return step, (params, jax.eval_shape(optimizer.init, params), X, Y)


def plain() -> Case:
    weights = {"w": f32(6, 4)}
    return descent(lambda p, x, y: ((x @ p["w"] - y) ** 2).mean(), weights, metric=True)


def without_loss() -> Case:
    step, args = plain()
    return lambda *args: step(*args)[:2], args


def actor_critic() -> Case:
    """The actor's loss reads the critic's new weights, which are made of the critic's moments."""
    optimizer = optax.adam(1e-2)
    weights = f32(6, 4)
    state = {n: {"w": weights, "opt": jax.eval_shape(optimizer.init, weights)} for n in ("actor", "critic")}

    def update(old, loss):
        value, gradient = jax.value_and_grad(loss)(old["w"])
        change, opt = optimizer.update(gradient, old["opt"])
        return {"w": old["w"] + change, "opt": opt}, value

    def step(state, x, y):
        critic, _ = update(state["critic"], lambda w: ((x @ w - y) ** 2).mean())
        actor, value = update(state["actor"], lambda w: ((x @ w) * (x @ critic["w"])).mean())
        return {"actor": actor, "critic": critic}, value

    return step, (state, X, Y)


# train loops as their users write them
LOOPS = ("LinenTrainState", "NnxOptimizer", "EquinoxPartition", "Lora", "TwoTowers")  # the last scans over steps
CASES = {"plain": plain, "without loss": without_loss, "actor critic": actor_critic}
CASES |= {name: gallery.get("loop", name).make for name in LOOPS}
NOT_WEIGHTS = {"mu", "nu", "trace", "count", "step", "dropout_key", "rngs", "metrics"}


@pytest.mark.parametrize("name", CASES)
def test_moments_are_optimizer_state_and_weights_are_parameters(name: str) -> None:
    step, args = CASES[name]()
    traced = trace(step, args, {})
    for number, kind in state_kinds(traced).items():
        path = format_path(traced.arguments[number].path)
        assert kind == ("params" if NOT_WEIGHTS.isdisjoint(path.split("/")) else "optimizer"), path
    assert set(state_kinds(traced).values()) == {"params", "optimizer"}


def test_state_that_a_scan_over_steps_carries_keeps_its_kind() -> None:
    step, args = CASES["TwoTowers"]()
    grouped = grouped_step(step, *args)
    (scan,) = [op for op in grouped.traced.graph.block.ops if op.name == "scan"]
    carries = ScanView(scan).carries
    kinds = [{grouped.kinds[value] for value in values_in((one.input, one.output, one.end))} for one in carries]
    assert kinds.count({"params"}) == kinds.count({"optimizer"}) == len(carries) / 2


def test_fully_sharded_weights_that_are_gathered_are_neither_gradients_nor_activations() -> None:
    """Two square layers and a large batch: it is cheaper to gather the weights than to move activations."""
    width, batch = 1024, f32(65536, 1024)
    params = {name: f32(width, width) for name in ("a", "b")}
    step, (*state, _, _) = descent(lambda p, x, y: jnp.mean(jnp.tanh(x @ p["a"]) @ p["b"]), params)
    sharded, whole = (
        alpa_lite.make_plan(step, *state, batch, Y, cluster=H100, method=method).stages[0].memory
        for method in (alpa_lite.Zero(stage=3), alpa_lite.DataParallel())
    )
    weight = 4 * width**2
    assert sharded.params <= 2 * 2 * weight / 8 + 64  # two shards, old and new
    assert weight <= sharded.gathered <= 2 * weight
    assert sharded.optimizer <= (2 * 2 * 2 + 1) * weight / 8 + 4096  # two moments of two weights, and one step
    assert sharded.gradients <= weight * 9 / 8 + 4096  # one at a time, before and after it is scattered
    assert whole.gathered == 0
    assert whole.params >= 2 * weight and whole.optimizer >= 4 * weight and whole.gradients >= weight


def test_frozen_weights_have_a_row_of_their_own() -> None:
    """LoRA: the base is neither state nor batch."""

    def step(lora, base, x):
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ base + x @ w["a"] @ w["b"]) ** 2))(lora)
        return jax.tree.map(lambda w, g: w - g, lora, grads), value

    shapes = {"a": (256, 8), "b": (8, 256), "base": (256, 256), "x": (4096, 256)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    lora = {name: arrays[name] for name in "ab"}
    plan = alpa_lite.make_plan(
        step, lora, arrays["base"], arrays["x"], cluster=H100, batch_argnums=(2,), method=alpa_lite.DataParallel()
    )
    memory = plan.stages[0].memory
    assert memory.frozen == 4 * 256**2 and memory.params <= 4 * 4 * 256 * 8
    assert "frozen 256 KiB" in str(plan) and "frozen" in plan.details()
