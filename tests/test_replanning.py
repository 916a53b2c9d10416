"""Calls that differ in weak dtypes alone share a planning; plannings say why."""

from __future__ import annotations

import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite
from alpa_lite.compilation import existing_placement
from tests.comparing import assert_close
from tests.gallery import train_state
from tests.marks import slow_but

METHODS: dict[str, dict[str, Any]] = {
    "one mesh": {"method": alpa_lite.Zero(stage=3)},
    "pipeline": {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}
X = jnp.cos(jnp.arange(128.0)).reshape(16, 8)


def strong(tree: Any) -> Any:
    """As a checkpoint restores it."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def same(got: Any, want: Any) -> None:
    """Types equal, weak types included, values close."""
    types = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)] for tree in (got, want)]
    assert types[0] == types[1]
    assert_close(got, want, rtol=2e-5)


# -- what shares a planning -------------------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.tanh(nn.Dense(8)(x)))


MODEL, OPTIMIZER = Linen(), optax.adamw(optax.cosine_decay_schedule(1e-2, 10))


def make_state() -> Any:
    return train_state(MODEL, X, OPTIMIZER)


def train_step(state: Any, batch: Any, rate: Any = 1.0) -> Any:
    def loss_of(params: Any) -> jax.Array:
        return ((state.apply_fn({"params": params}, batch) - batch[:, ::-1]) ** 2).mean() * rate

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.fixture
def plannings(monkeypatch) -> list[Any]:
    """The planned steps, one a planning."""
    made: list[Any] = []
    original = existing_placement.compile_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(existing_placement, "compile_step", counting)
    return made


@pytest.mark.parametrize("where", slow_but({"one mesh"}, ["one mesh", "pipeline"]))
def test_a_step_counter_host_copies_and_restored_states_share_one_planning(where, plannings):
    run, jitted = alpa_lite.parallelize(train_step, batch_argnums=1, **METHODS[where]), jax.jit(train_step)
    state = want = make_state()
    assert isinstance(state.step, int)
    first = run.plan(state, X, 1.0)
    executables = set()
    changes = [lambda s: s, lambda s: s, strong, lambda s: s, lambda s: jax.tree.map(np.asarray, s), lambda s: s]
    for change in changes:
        state, want = change(state), strong(want)
        for rate in (1.0, np.float32(1.0), jnp.asarray(1.0)):
            state, loss = run(state, X, rate)
            want, expected = jitted(want, X, rate)
            executables.add(run._current)
            assert jax.tree.map(lambda x: x.dtype, (state, loss)) == jax.tree.map(lambda x: x.dtype, (want, expected))
            assert_close((state, loss), (want, expected), rtol=2e-5)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), (state, X))
    assert run.plan(*shapes, 1.0) is run.plan(state, X, np.float32(2)) is first
    assert run.plan(jax.eval_shape(make_state), X, 1.0) is first
    assert len(plannings) == 1 and len(executables) == 1


def test_a_weak_dtype_that_decides_promotion_is_planned_apart(plannings):
    def step(state: Any, batch: Any, rate: Any) -> Any:
        return {"w": (state["w"] - batch.sum(0) * rate).astype(jnp.bfloat16)}, batch[0, 0] * rate

    args = {"w": jnp.ones(8, jnp.bfloat16)}, jnp.ones((16, 8), jnp.bfloat16)
    run = alpa_lite.parallelize(step, batch_argnums=1, method=alpa_lite.DataParallel())
    for rate in (0.5, np.float32(0.5), jnp.bfloat16(0.5), 0.5, np.float32(0.25)):
        same(run(*args, rate), jax.jit(step)(*args, rate))
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
        same((state, loss), (want, expected))
    assert dtypes == [jnp.float32, jnp.bfloat16, jnp.bfloat16] and len(plannings) == 2


def test_every_other_planning_says_what_differs(caplog):
    def step(state: Any, batch: Any, scale: Any = 1.0, *, train: bool = True) -> Any:
        value, grads = jax.value_and_grad(lambda w: ((batch["x"] @ w) ** 2).mean() * scale)(state["w"])
        return ({"w": state["w"] - grads} if train else state), value

    run = alpa_lite.parallelize(step, batch_argnums=1, static_argnames="train", method=alpa_lite.DataParallel())
    state, batch = {"w": jnp.ones((8, 4))}, {"x": jnp.ones((16, 8))}
    with caplog.at_level(logging.INFO, "alpa_lite.planned_calls"):
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
