"""Calls that differ in weak dtypes alone share one planning and one executable; every other planning says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import alpa_lite
from alpa_lite.compilation import likeness
from alpa_lite.passes.ir.digest import digest
from alpa_lite.passes.tracing import trace

METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "one mesh": lambda: {"method": alpa_lite.Zero(stage=3)},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}
SLOW_PIPELINE = [pytest.param(w, marks=pytest.mark.slow) if w == "pipeline" else w for w in METHODS]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.tanh(nn.Dense(8)(x)))


def train_step(state: TrainState, batch: Any, rate: Any = 1.0) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean() * rate

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


MODEL, OPTIMIZER = Model(), optax.adamw(optax.cosine_decay_schedule(1e-2, 10))


def make_state() -> TrainState:
    params = MODEL.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def make_batch(rows: int = 16) -> dict[str, jax.Array]:
    x = jnp.cos(jnp.arange(rows * 8, dtype=jnp.float32)).reshape(rows, 8)
    return {"x": x, "y": x[:, ::-1]}


@pytest.fixture
def plannings(monkeypatch) -> list[Any]:
    """The planned steps, one a planning."""
    made: list[Any] = []
    original = likeness.compile_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(likeness, "compile_step", counting)
    return made


def equal(got: Any, want: Any) -> None:
    """Dtypes equal, values close."""
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6), got, want)


def strong(tree: Any) -> Any:
    """As a checkpoint restores it."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_a_step_counter_host_copies_and_restored_states_share_one_planning(where, plannings):
    run, jitted = alpa_lite.parallelize(train_step, batch_argnums=1, **METHODS[where]()), jax.jit(train_step)
    state = want = make_state()
    assert isinstance(state.step, int)
    batch = make_batch()
    first = run.plan(state, batch, 1.0)
    executables = set()
    changes = [lambda s: s, lambda s: s, strong, lambda s: s, lambda s: jax.tree.map(np.asarray, s), lambda s: s]
    for change in changes:
        state, want = change(state), strong(want)
        for rate in (1.0, np.float32(1.0), jnp.asarray(1.0)):
            state, loss = run(state, batch, rate)
            want, expected = jitted(want, batch, rate)
            executables.add(run._current)
            equal((state, loss), (want, expected))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), (state, batch))
    assert run.plan(*shapes, 1.0) is run.plan(state, batch, np.float32(2)) is first
    assert run.plan(jax.eval_shape(make_state), batch, 1.0) is first
    assert len(plannings) == 1 and len(executables) == 1


def test_an_executable_that_accepts_several_patterns_stays_fast(plannings, monkeypatch):
    run, batch = alpa_lite.parallelize(train_step, batch_argnums=1, **METHODS["one mesh"]()), make_batch()
    state, _ = run(make_state(), batch)
    state, _ = run(strong(state), batch)
    settled: list[Any] = []
    monkeypatch.setattr(run._current._binder, "_check", lambda leaves: settled.append(leaves))
    for _ in range(2):
        state, _ = run(state, batch)
    assert not settled and len(plannings) == 1


def test_a_weak_dtype_that_decides_promotion_is_planned_apart(plannings):
    def step(state: Any, batch: Any, rate: Any) -> Any:
        return {"w": (state["w"] - batch.sum(0) * rate).astype(jnp.bfloat16)}, batch[0, 0] * rate

    args = {"w": jnp.ones(8, jnp.bfloat16)}, jnp.ones((16, 8), jnp.bfloat16)
    run = alpa_lite.parallelize(step, batch_argnums=1, method=alpa_lite.DataParallel())
    for rate in (0.5, np.float32(0.5), jnp.bfloat16(0.5), 0.5, np.float32(0.25)):
        equal(run(*args, rate), jax.jit(step)(*args, rate))
    assert len(plannings) == 3


def test_the_state_may_come_back_with_another_weak_type(plannings):
    """A strong scale that comes back weak is, in plain `jit`, another program in the second call."""

    def step(state: Any, batch: Any) -> Any:
        scaled = state["w"] * state["scale"]
        return {"w": scaled.astype(jnp.bfloat16), "scale": jnp.asarray(1.5)}, scaled.sum() + batch.sum(dtype=int)

    state = want = {"w": jnp.ones(8, jnp.bfloat16), "scale": jnp.float32(1.5)}
    run, batch = alpa_lite.parallelize(step, batch_argnums=1, method=alpa_lite.DataParallel()), jnp.ones((16, 8))
    dtypes = []
    for _ in range(3):
        (state, loss), (want, expected) = run(state, batch), jax.jit(step)(want, batch)
        dtypes.append(expected.dtype)
        equal((state, loss), (want, expected))
    assert dtypes == [jnp.float32, jnp.bfloat16, jnp.bfloat16] and len(plannings) == 2


def test_every_other_planning_says_what_differs(caplog):
    def step(state: Any, batch: Any, scale: Any = 1.0, *, train: bool = True) -> Any:
        value, grads = jax.value_and_grad(lambda w: ((batch["x"] @ w) ** 2).mean() * scale)(state["w"])
        return ({"w": state["w"] - grads} if train else state), value

    run = alpa_lite.parallelize(step, batch_argnums=1, static_argnames="train", method=alpa_lite.DataParallel())
    state, batch = {"w": jnp.ones((8, 4))}, {"x": jnp.ones((16, 8))}
    with caplog.at_level(logging.INFO, "alpa_lite.api"):
        run.plan(state, batch)
        assert not caplog.messages
        half = {"x": batch["x"][:8].astype(jnp.bfloat16)}
        for args, kwargs, text in [
            ((state, {"x": jnp.ones((8, 8))}), {}, "batch/x is float32[8,8], planned was float32[16,8]"),
            ((state, half), {}, "batch/x is bfloat16[8,8], planned was float32[8,8]"),
            ((state, {**batch, "z": jnp.ones(16)}), {}, "batch/z is new"),
            ((state, batch), {"train": False}, "train is static"),
            ((state, batch), {"train": True}, "the static argument train is True, planned was False"),
            ((state, batch, 2), {}, "3 positional arguments, planned was 2 positional arguments; scale is new"),
        ]:
            caplog.clear()
            run.plan(*args, **kwargs)
            (message,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
            assert message == f"step is planned again, for another signature: {text}"
        caplog.clear()
        run.plan(state, batch, np.int32(2))
        assert caplog.messages == ["step: another pattern of weak dtypes makes the planned program, and shares it"]


def test_digests_are_equal_where_only_weak_types_differ():
    def looped(count: Any, x: Any) -> Any:
        (count, x), ys = jax.lax.scan(lambda c, _: ((c[0] + 1, c[1] * 2), c[0]), (count, x), None, length=3)
        return count + 1, x * count, ys

    def of(fun: Any, *args: Any) -> str:
        return digest(trace(fun, args, {}, batch_argnums=()).graph)

    x = jnp.ones(4)
    assert of(looped, 0, x) == of(looped, np.int32(0), x) == of(looped, jnp.int32(5), x)
    assert of(looped, 0, x) != of(looped, np.float32(0), x)
    assert of(looped, 0, x) != of(looped, 0, jnp.ones(5))
    held = [jnp.arange(32.0), jnp.arange(32.0) + 1]
    first, second = (lambda s, held=held: s + held for held in held)
    assert of(first, jnp.ones(32)) != of(second, jnp.ones(32))
    traced = [trace(f, (jnp.ones(32),), {}, batch_argnums=()).graph for f in (first, second)]
    assert len({digest(graph, constants=False) for graph in traced}) == 1
