"""Results have the weak types that `jax.jit` gives, so that a loop is planned once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import alpa_lite
from tests.marks import slow_one_in

METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "one mesh": lambda: {"method": alpa_lite.Zero(stage=3)},
    "micro-batches": lambda: {"method": alpa_lite.DataParallel(), "num_microbatches": 2},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}
X = jnp.cos(jnp.arange(128.0)).reshape(16, 8)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.tanh(nn.Dense(8)(x)))


def train_state() -> tuple[Any, Any]:
    model = Linen()
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, 10))
    params = model.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.asarray(model.apply({"params": p}, x)) - x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    return step, state


def counters() -> tuple[Any, Any]:
    """A weak integer, a weak float, a weak array, and a strong array of the same kind."""
    state = {
        "w": [jnp.eye(8), jnp.eye(8)], "step": 0, "rate": 0.1, "gate": jnp.full((8,), 0.5), "count": jnp.int32(0),
    }  # fmt: skip

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(w: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["w"])
        w = [a - state["rate"] * b for a, b in zip(state["w"], grads, strict=True)]
        gate = state["gate"] * 0.9
        return {
            "w": w, "step": state["step"] + 1, "rate": state["rate"] * 0.5, "gate": gate, "count": state["count"] + 1,
        }, (loss, state["step"] * 2, jnp.float32(1.0))  # fmt: skip

    return step, state


def loop() -> tuple[Any, Any]:
    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(decay: jax.Array) -> jax.Array:
            out = jax.lax.fori_loop(0, 3, lambda i, u: u + 0.1 * decay * jnp.tanh(u), x)
            count = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, state["n"])
            return jnp.mean(out**2) + 0 * count

        loss, grads = jax.value_and_grad(loss_of)(state["decay"])
        total, _ = jax.lax.scan(lambda c, _: (c + 1, None), state["n"], None, length=2)
        return {"decay": state["decay"] - grads, "n": total - 2}, (loss, jax.lax.cond(True, lambda: 1, lambda: 2))

    return step, {"decay": jnp.full((8,), 0.1), "n": 0}


def flax_nnx() -> tuple[Any, Any]:
    graph, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(nnx.merge(graph, params)(x)) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state[0])
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments, state[2] + 1), loss

    return step, (state, optimizer.init(state), 0)


def equinox_arrays() -> tuple[Any, Any]:
    arrays, rest = equinox.partition(equinox.nn.MLP(8, 8, 8, 2, key=jax.random.key(0)), equinox.is_array)

    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda s: jnp.mean(jax.vmap(equinox.combine(s, rest))(x) ** 2))(state[0])
        return (jax.tree.map(lambda w, g: w - 0.1 * g, state[0], grads), state[1] * 0.99), loss

    return step, (arrays, 1.0)


def stacked() -> tuple[Any, Any]:
    """Weights of layers that a pipeline cuts, weak ones."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(w: Any) -> jax.Array:
            out, _ = jax.lax.scan(lambda h, one: (jnp.tanh(h @ one["m"] + one["b"]), None), x, w)
            return jnp.mean(out**2)

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return step, {"m": jnp.full((4, 8, 8), 0.1), "b": jnp.full((4, 8), 0.1)}


PROGRAMS = {f.__name__: f for f in (train_state, counters, loop, flax_nnx, equinox_arrays, stacked)}
FAST = [("counters", "one mesh"), ("loop", "one mesh"), ("train_state", "pipeline")]
CASES = slow_one_in(
    2,
    [
        pytest.param(program, where, marks=() if (program, where) in FAST else pytest.mark.slow)
        for program in PROGRAMS
        for where in METHODS
        if (program, where) != ("loop", "pipeline")  # nothing to cut
    ],
)


def same(got: Any, want: Any) -> None:
    """Types equal, values close."""
    types = [
        [jax.typeof(x).str_short() + str(jax.typeof(x).weak_type) for x in jax.tree.leaves(t)] for t in (got, want)
    ]
    assert types[0] == types[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


def strong(tree: Any) -> Any:
    """As a checkpoint restores it."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.parametrize(("program", "where"), CASES)
def test_a_loop_is_planned_once_and_has_the_weak_types_of_jit(program, where):
    step, start = PROGRAMS[program]()
    run, jitted = alpa_lite.parallelize(step, batch_argnums=1, **METHODS[where]()), jax.jit(step)
    for change in (lambda x: x, strong):
        state = want = change(start)
        for _ in range(3):
            got, expected = run(state, X), jitted(want, X)
            same(got, expected)
            state, want = got[0], expected[0]
    assert len(run.plans) == 1


def test_placed_and_initialised_state_keeps_its_weak_types():
    step, start = counters()
    run = alpa_lite.parallelize(step, batch_argnums=1, **METHODS["one mesh"]())
    placed, _ = run.place(start, X)
    same(placed, start)
    made = run.init(lambda: {**jax.tree.map(jnp.asarray, start), "step": jnp.asarray(0)})
    same(made, start)
    assert len(run.plans) == 1


def test_an_array_takes_another_weak_type_without_a_copy():
    from alpa_lite import _jax

    array = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(jax.make_mesh((8,), "x"), jax.P("x")))
    weak = _jax.array_with_weak_type(array, True)
    assert weak.weak_type and not array.weak_type and _jax.array_with_weak_type(weak, True) is weak
    assert weak.sharding == array.sharding and (weak * jnp.bfloat16(2)).dtype == jnp.bfloat16
    assert [x.unsafe_buffer_pointer() for x in _jax.blocks_of(weak)] == [
        x.unsafe_buffer_pointer() for x in _jax.blocks_of(array)
    ]
