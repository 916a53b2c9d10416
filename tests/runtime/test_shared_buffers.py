"""A buffer that reaches a step twice: results are those of plain `jit`, and no array of the caller's is deleted."""

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
from tests.marks import slow_one_in

WIDTH, ROWS = 16, 16
METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "one mesh": lambda: {"method": alpa_lite.DataParallel()},
    "zero": lambda: {"method": alpa_lite.Zero(3)},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}
Run = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def weights(seed: int = 0) -> Any:
    return {"a": draw(WIDTH, WIDTH, seed=seed), "b": draw(WIDTH, WIDTH, seed=seed + 1)}


def apply(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["a"]) @ p["b"]


def distil(params: Any, ref: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        return jnp.square(apply(p, x) - apply(ref, x)).mean() + jnp.square(apply(p, x)).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def view(tree: Any) -> Any:
    """Other arrays with the same buffers."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


Program = Callable[[Callable[[Any], Run]], Iterator[Any]]
"""Yields what it computes with steps that its argument makes."""


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
        loss, grads = jax.value_and_grad(lambda p: jnp.square(forward(p, x) - forward(ref, x) + 1).mean())(params)
        return params - 0.1 * grads, loss

    run, params = make(step), draw(4, WIDTH, WIDTH)
    ref = draw(4, WIDTH, WIDTH, seed=1)
    for number in range(4):
        params, loss = run(params, ref, draw(ROWS, WIDTH))
        ref = view(params) if number == 2 else params
        yield loss, ref


def linen_states(make: Callable[[Any], Run]) -> Iterator[Any]:
    model = linen.Sequential([linen.Dense(WIDTH), jnp.tanh, linen.Dense(WIDTH)])

    def step(state: TrainState, ref: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.square(state.apply_fn(p, x) - state.apply_fn(ref, x) + 1).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    params = model.init(jax.random.key(0), draw(ROWS, WIDTH))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    run, ref = make(step), params
    for _ in range(4):
        state, loss = run(state, ref, draw(ROWS, WIDTH))
        ref = state.params
        yield loss, ref


class Net(nnx.Module):
    def __init__(self, seed: int) -> None:
        self.a, self.b = (nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed)) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


def nnx_targets(make: Callable[[Any], Run]) -> Iterator[Any]:
    """Two modules whose Variables come to hold the same arrays."""

    def step(online: Net, target: Net, x: jax.Array) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.square(m(x) - target(x) + 1).mean())(online)
        nnx.update(online, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(online), grads))
        return value

    run, online, target = make(step), Net(0), Net(1)
    for _ in range(4):
        loss = run(online, target, draw(ROWS, WIDTH))
        nnx.update(target, nnx.state(online))
        yield loss, nnx.state(target)


class Mlp(eqx.Module):
    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(jnp.tanh(self.a(x)))


def equinox_modules(make: Callable[[Any], Run]) -> Iterator[Any]:
    def step(model: Mlp, ref: Mlp, x: jax.Array) -> Any:
        def loss(m: Mlp) -> jax.Array:
            return jnp.square(jax.vmap(m)(x) - jax.vmap(ref)(x) + 1).mean()

        value, grads = jax.value_and_grad(loss)(model)
        return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads), value

    first, second = jax.random.split(jax.random.key(0))
    model = ref = Mlp(eqx.nn.Linear(WIDTH, WIDTH, key=first), eqx.nn.Linear(WIDTH, WIDTH, key=second))
    run = make(step)
    for _ in range(3):
        model, loss = run(model, ref, draw(ROWS, WIDTH))
        ref = model
        yield loss, ref


PROGRAMS: list[Program] = [
    references, itself, views, numpy_views, one_pytree, keys, scanned, linen_states, nnx_targets, equinox_modules,
]  # fmt: skip
FAST = {("itself", "one mesh"), ("views", "one mesh"), ("references", "pipeline")}


def check_as_jit(program: Program, options: dict[str, Any]) -> None:
    """Compares all that a program yields when it ends, so that what it has kept must live until then."""

    def planned(step: Any) -> Run:
        return alpa_lite.parallelize(step, batch_argnums=len(inspect.signature(step).parameters) - 1, **options)

    found = list(program(planned))
    want = list(program(lambda step: nnx.jit(step) if program is nnx_targets else jax.jit(step)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize(
    "program, where",
    slow_one_in(
        2,
        [
            pytest.param(p, w, id=f"{p.__name__}-{w}", marks=[] if (p.__name__, w) in FAST else pytest.mark.slow)
            for p in PROGRAMS
            for w in METHODS
        ],
    ),
)
def test_what_is_given_twice_is_copied(program: Program, where: str) -> None:
    check_as_jit(program, METHODS[where]())


@pytest.mark.parametrize("where", METHODS)
@pytest.mark.slow
def test_named_donation_copies_what_is_given_twice(where: str) -> None:
    check_as_jit(itself, {**METHODS[where](), "donate_argnums": 0})


@pytest.mark.parametrize("where", ["one mesh", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_a_shard_of_the_state_is_an_argument(where: str) -> None:
    def step(state: Any, offset: jax.Array, x: jax.Array) -> Any:
        def loss(s: Any) -> jax.Array:
            return jnp.square(jnp.tanh(x @ s["w"] + s["bias"]) @ s["out"] + offset).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

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
