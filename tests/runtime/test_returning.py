"""Results are the caller's: no later call deletes one, whatever else of the step has the same value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import alpa_lite
from tests.marks import slow_one_in

WIDTH, ROWS = 16, 16
METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "one mesh": lambda: {"method": alpa_lite.DataParallel()},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2)},
    "two microbatches": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def weights() -> Any:
    return {"a": draw(WIDTH, WIDTH), "b": draw(WIDTH, WIDTH, seed=1), "c": draw(WIDTH, seed=2)}


def descend(params: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(lambda p: jnp.square(jnp.tanh(x @ p["a"]) @ p["b"] + p["c"]).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def new_state(params: Any, x: jax.Array) -> Any:
    new, loss = descend(params, x)
    return new, {"loss": loss, "new": new, "again": new["a"]}


def old_state(params: Any, x: jax.Array) -> Any:
    new, loss = descend(params, x)
    return new, {"loss": loss, "old": params}


def unchanged_state(params: Any, x: jax.Array) -> Any:
    new, loss = descend(params, x)
    return {**new, "b": params["b"]}, {"loss": loss, "b": params["b"], "x": x, "twice": [loss, loss]}


def equal_states(params: Any, x: jax.Array) -> Any:
    """Two leaves of new state that are one value, the one of which begins as other values."""
    new, loss = descend(params["online"], x)
    return {"online": new, "target": new}, {"loss": loss, "target": params["target"]}


def of_linen(state: TrainState, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(lambda p: jnp.square(state.apply_fn(p, x)).mean())(state.params)
    new = state.apply_gradients(grads=grads)
    return new, {"loss": value, "params": new.params, "step": new.step, "moments": new.opt_state}


def of_nnx(model: nnx.Module, x: jax.Array) -> Any:
    value, grads = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
    return {"loss": value, "params": jax.tree.map(lambda p: p, nnx.state(model))}


def of_equinox(model: Any, x: jax.Array) -> Any:
    value, grads = jax.value_and_grad(lambda m: jnp.square(jax.vmap(m["b"])(jnp.tanh(jax.vmap(m["a"])(x)))).mean())(
        model
    )
    new = jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)
    return new, {"loss": value, "first": new["a"]}


def linen_state() -> TrainState:
    model = linen.Sequential([linen.Dense(WIDTH), jnp.tanh, linen.Dense(WIDTH)])
    params = model.init(jax.random.key(0), draw(ROWS, WIDTH))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def nnx_model() -> nnx.Module:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), jnp.tanh, nnx.Linear(WIDTH, WIDTH, rngs=rngs))


def equinox_model() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    return {"a": eqx.nn.Linear(WIDTH, WIDTH, key=first), "b": eqx.nn.Linear(WIDTH, WIDTH, key=second)}


PROGRAMS: dict[Callable[..., Any], Callable[[], Any]] = {
    new_state: weights,
    old_state: weights,
    unchanged_state: weights,
    equal_states: lambda: {"online": weights(), "target": jax.tree.map(jnp.zeros_like, weights())},
    of_linen: linen_state,
    of_nnx: nnx_model,
    of_equinox: equinox_model,
}
FAST = {("new_state", "two microbatches"), ("unchanged_state", "pipeline")}


@pytest.mark.parametrize("step, where", slow_one_in(3, [
    pytest.param(step, w, id=f"{step.__name__}-{w}", marks=[] if (step.__name__, w) in FAST else pytest.mark.slow)
    for step in PROGRAMS for w in METHODS
]))  # fmt: skip
def test_results_live_after_later_calls(step: Any, where: str) -> None:
    updates = step is of_nnx

    def kept(run: Any) -> Any:
        state, found = PROGRAMS[step](), []
        for number in range(4):
            out = run(state, draw(ROWS, WIDTH, seed=number))
            state, metrics = (state, out) if updates else out
            found.append(metrics)
        return found, nnx.state(state) if updates else state

    run = alpa_lite.parallelize(step, batch_argnums=1, **METHODS[where]())
    got, want = kept(run), kept((nnx.jit if updates else jax.jit)(step))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["one mesh", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_state_that_a_step_leaves_alone_stays_the_callers(where: str) -> None:
    run = alpa_lite.parallelize(unchanged_state, batch_argnums=1, **METHODS[where]())
    other = alpa_lite.parallelize(descend, batch_argnums=1, like=run)
    placed, x = run.place(weights(), draw(ROWS, WIDTH))
    mine = jax.tree.map(lambda one: jax.device_put(one, one.sharding, may_alias=False), placed)
    state, _ = run(mine, x)
    other(state, x)
    assert not any(one.is_deleted() for one in jax.tree.leaves(mine))
