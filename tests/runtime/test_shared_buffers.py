"""A buffer that reaches a step twice, or leaves it twice: results are those of plain `jit`, and nothing is deleted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
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
from tests.marks import slow, slow_one_in
from tests.runtime.cases import METHODS, deleted, descend, draw, equal_leaves

WIDTH, ROWS = 16, 16
Run = Callable[..., Any]
Program = Callable[[Callable[[Any], Run]], Iterator[Any]]
"""Yields what it computes with steps that its argument makes. All of it is compared, and must live, at the end."""


def weights(seed: int = 0) -> Any:
    return {"a": draw(WIDTH, WIDTH, seed=seed), "b": draw(WIDTH, WIDTH, seed=seed + 1)}


def apply(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["a"]) @ p["b"]


def distil(params: Any, ref: Any, x: jax.Array) -> Any:
    return descend(lambda p: jnp.square(apply(p, x) - apply(ref, x)).mean() + jnp.square(apply(p, x)).mean(), params)


def view(tree: Any) -> Any:
    """Other arrays with the same buffers."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        self.a, self.b = (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed)) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


class Mlp(eqx.Module):
    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


# -- given twice ------------------------------------------------------------------------------------------------------


def references(make: Callable[[Any], Run]) -> Iterator[Any]:
    """The reference is a state that a call returned, and stays."""
    run, params, ref = make(distil), weights(), weights(2)
    for number in range(5):
        params, loss = run(params, ref, draw(ROWS, WIDTH))
        yield loss
        if number in (1, 3):
            ref = params
    yield params, ref


def itself(make: Callable[[Any], Run]) -> Iterator[Any]:
    """The state twice in every call, each of which leaves the old one readable."""
    run, params = make(distil), weights()
    for _ in range(3):
        old = params
        params, loss = run(params, params, draw(ROWS, WIDTH))
        yield loss, old
    yield params


def views(make: Callable[[Any], Run]) -> Iterator[Any]:
    run, params = make(distil), weights()
    ref = weights(2)
    for _ in range(4):
        params, loss = run(params, ref, draw(ROWS, WIDTH))
        ref = view(params)
        yield loss, ref
    params, loss = run(ref, params, draw(ROWS, WIDTH))  # views as state
    yield params, ref, loss


def numpy_views(make: Callable[[Any], Run]) -> Iterator[Any]:
    run, params, ref = make(distil), weights(), weights(2)
    for _ in range(3):
        params, loss = run(params, ref, draw(ROWS, WIDTH))
        ref = jax.tree.map(np.asarray, params)
        yield loss
    yield params, ref


def one_pytree(make: Callable[[Any], Run]) -> Iterator[Any]:
    """One array as two leaves of the state, or a view of it as another."""

    def step(state: Any, x: jax.Array) -> Any:
        params, loss = distil(state["params"], state["target"], x)
        target = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, state["target"], params)
        return {"params": params, "target": target}, loss

    run, state = make(step), {"params": weights(), "target": weights(2)}
    for twice in (lambda x: x, view, lambda x: x, view):
        state, loss = run(state, draw(ROWS, WIDTH))
        state = {"params": state["params"], "target": twice(state["params"])}
        yield loss, state


def keys(make: Callable[[Any], Run]) -> Iterator[Any]:
    def step(state: Any, key: jax.Array, x: jax.Array) -> Any:
        noise = jax.random.normal(key, (WIDTH, WIDTH))
        params, loss = distil(state["params"], {"a": noise, "b": noise}, x)
        return {"params": params, "key": jax.random.split(state["key"])[0]}, loss

    run, state = make(step), {"params": weights(), "key": jax.random.key(0)}
    for _ in range(3):
        before = state["key"]
        state, loss = run(state, state["key"], draw(ROWS, WIDTH))
        yield loss, jax.random.key_data(before)
    yield state["params"], jax.random.key_data(state["key"])


def scanned(make: Callable[[Any], Run]) -> Iterator[Any]:
    """Stacked layers, which a pipeline takes apart."""

    def forward(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0]

    def step(params: Any, ref: Any, x: jax.Array) -> Any:
        return descend(lambda p: jnp.square(forward(p, x) - forward(ref, x) + 1).mean(), params)

    run, params = make(step), draw(4, WIDTH, WIDTH)
    ref = draw(4, WIDTH, WIDTH, seed=1)
    for number in range(4):
        params, loss = run(params, ref, draw(ROWS, WIDTH))
        ref = view(params) if number == 2 else params
        yield loss, ref


def linen_states(make: Callable[[Any], Run]) -> Iterator[Any]:
    """The new state is also among the metrics."""

    def step(state: TrainState, ref: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.square(state.apply_fn(p, x) - state.apply_fn(ref, x) + 1).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        new = state.apply_gradients(grads=grads)
        return new, {"loss": value, "params": new.params, "step": new.step, "moments": new.opt_state}

    model = linen.Sequential([linen.Dense(WIDTH), jnp.tanh, linen.Dense(WIDTH)])
    params = model.init(jax.random.key(0), draw(ROWS, WIDTH))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    run, ref = make(step), state.params
    for number in range(4):
        state, metrics = run(state, ref, draw(ROWS, WIDTH, seed=number))
        ref = state.params
        yield metrics, ref


def nnx_targets(make: Callable[[Any], Run]) -> Iterator[Any]:
    """Two modules whose Variables come to hold the same arrays, which are also among the results."""

    def step(online: Net, target: Net, x: jax.Array) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.square(m(x) - target(x) + 1).mean())(online)
        nnx.update(online, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(online), grads))
        return {"loss": value, "params": jax.tree.map(lambda p: p, nnx.state(online))}

    run, online, target = make(step), Net(0), Net(1)
    for number in range(4):
        metrics = run(online, target, draw(ROWS, WIDTH, seed=number))
        nnx.update(target, nnx.state(online))
        yield metrics, nnx.state(target)


def equinox_modules(make: Callable[[Any], Run]) -> Iterator[Any]:
    """A part of the new model is also among the metrics."""

    def step(model: Mlp, ref: Mlp, x: jax.Array) -> Any:
        new, value = descend(lambda m: jnp.square(jax.vmap(m)(x) - jax.vmap(ref)(x) + 1).mean(), model)
        return new, {"loss": value, "first": new.a}

    model = ref = Mlp(*(eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in jax.random.split(jax.random.key(0))))
    run = make(step)
    for number in range(4):
        model, metrics = run(model, ref, draw(ROWS, WIDTH, seed=number))
        ref = model
        yield metrics, ref


# -- returned twice ---------------------------------------------------------------------------------------------------


def regress(params: Any, x: jax.Array) -> Any:
    return descend(lambda p: jnp.square(jnp.tanh(x @ p["a"]) @ p["b"] + p["c"]).mean(), params)


BIASED = weights() | {"c": draw(WIDTH, seed=2)}


def new_state(params: Any, x: jax.Array) -> Any:
    new, loss = regress(params, x)
    return new, {"loss": loss, "new": new, "again": new["a"]}


def old_state(params: Any, x: jax.Array) -> Any:
    new, loss = regress(params, x)
    return new, {"loss": loss, "old": params}


def unchanged_state(params: Any, x: jax.Array) -> Any:
    new, loss = regress(params, x)
    return {**new, "b": params["b"]}, {"loss": loss, "b": params["b"], "x": x, "twice": [loss, loss]}


def equal_states(params: Any, x: jax.Array) -> Any:
    """Two leaves of new state that are one value, the one of which begins as other values."""
    new, loss = regress(params["online"], x)
    return {"online": new, "target": new}, {"loss": loss, "target": params["target"]}


def consecutive(step: Callable[..., Any], state: Any) -> Program:
    """Four calls of a step, whose results are kept."""

    def program(make: Callable[[Any], Run]) -> Iterator[Any]:
        run, current = make(step), state
        for number in range(4):
            current, metrics = run(current, draw(ROWS, WIDTH, seed=number))
            yield metrics
        yield current

    program.__name__ = step.__name__
    return program


GIVEN: list[Program] = [
    references, itself, views, numpy_views, one_pytree, keys, scanned, linen_states, nnx_targets, equinox_modules,
]  # fmt: skip
RETURNED = [
    *(consecutive(step, BIASED) for step in (new_state, old_state, unchanged_state)),
    consecutive(equal_states, {"online": BIASED, "target": jax.tree.map(jnp.zeros_like, BIASED)}),
]
FAST = {
    ("itself", "one mesh"), ("views", "one mesh"), ("references", "pipeline"), ("new_state", "pipeline"),
    ("unchanged_state", "whole pipeline"),
}  # fmt: skip


def check_as_jit(program: Program, options: dict[str, Any]) -> None:
    """Compares all that a program yields when it ends, so that what it has kept must live until then."""

    def planned(step: Any) -> Run:
        return alpa_lite.parallelize(step, batch_argnums=len(inspect.signature(step).parameters) - 1, **options)

    found = list(program(planned))
    want = list(program(nnx.jit if program is nnx_targets else jax.jit))
    equal_leaves(found, want, rtol=3e-5, atol=1e-6)


def cases(share: int, programs: list[Program], *methods: str) -> list[Any]:
    """Each program with each method; of the slow ones all but one in `share` are thorough."""
    pairs = [(p, w, (p.__name__, w) in FAST) for p in programs for w in methods]
    return slow_one_in(share, [
        pytest.param(p, w, id=f"{p.__name__}-{w}", marks=[] if fast else pytest.mark.slow) for p, w, fast in pairs
    ])  # fmt: skip


@pytest.mark.parametrize(
    "program, where",
    cases(2, GIVEN, "one mesh", "zero", "pipeline") + cases(3, RETURNED, "one mesh", "whole pipeline", "pipeline"),
)
def test_what_is_given_or_returned_twice_is_as_under_jit(program: Program, where: str) -> None:
    check_as_jit(program, METHODS[where]())


@pytest.mark.parametrize("where", ["one mesh", "zero", "pipeline"])
@pytest.mark.slow
def test_named_donation_copies_what_is_given_twice(where: str) -> None:
    check_as_jit(itself, {**METHODS[where](), "donate_argnums": 0})


@pytest.mark.parametrize("where", ["one mesh", slow("pipeline")])
def test_a_shard_of_the_state_is_an_argument(where: str) -> None:
    def step(state: Any, offset: jax.Array, x: jax.Array) -> Any:
        return descend(lambda s: jnp.square(jnp.tanh(x @ s["w"] + s["bias"]) @ s["out"] + offset).mean(), state)

    run, jitted = alpa_lite.parallelize(step, batch_argnums=2, **METHODS[where]()), jax.jit(step)
    state = {"w": draw(WIDTH, WIDTH), "out": draw(WIDTH, WIDTH), "bias": jnp.ones(())}
    want, offset, expected = state, jnp.zeros(()), jnp.zeros(())
    for device in range(4):
        state, loss = run(state, offset, draw(ROWS, WIDTH))
        want, value = jitted(want, expected, draw(ROWS, WIDTH))
        np.testing.assert_allclose(loss, value, rtol=1e-5)
        shards = state["bias"].addressable_shards
        offset, expected = shards[device % len(shards)].data, want["bias"]
    np.testing.assert_allclose(offset, expected, rtol=1e-5)


@pytest.mark.parametrize("where", ["one mesh", slow("whole pipeline")])
def test_state_that_a_step_leaves_alone_stays_the_callers(where: str) -> None:
    run = alpa_lite.parallelize(unchanged_state, batch_argnums=1, **METHODS[where]())
    other = alpa_lite.parallelize(regress, batch_argnums=1, state_from=run)
    placed, x = run.place(BIASED, draw(ROWS, WIDTH))
    mine = jax.tree.map(lambda one: jax.device_put(one, one.sharding, may_alias=False), placed)
    state, _ = run(mine, x)
    other(state, x)
    assert deleted(mine) == {False}
