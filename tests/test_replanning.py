"""Calls that differ in weak dtypes alone share a planning; results have the weak types of `jit`; plannings say why."""

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

import alpa_lite
from alpa_lite.compilation import likeness
from tests.comparing import assert_close
from tests.gallery import sgd, train_state
from tests.marks import slow_but, slow_one_in

METHODS: dict[str, dict[str, Any]] = {
    "one mesh": {"method": alpa_lite.Zero(stage=3)},
    "micro-batches": {"method": alpa_lite.DataParallel(), "num_microbatches": 2},
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
    original = likeness.compile_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(likeness, "compile_step", counting)
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


# -- weak types of results --------------------------------------------------------------------------------------------


def counters() -> tuple[Any, Any]:
    """A weak integer, a weak float, a weak array, and a strong array of the same kind."""
    state = {
        "w": [jnp.eye(8), jnp.eye(8)], "step": 0, "rate": 0.1, "gate": jnp.full((8,), 0.5), "count": jnp.int32(0),
    }  # fmt: skip

    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - x) ** 2))(state["w"])
        w = [a - state["rate"] * b for a, b in zip(state["w"], grads, strict=True)]
        return {
            "w": w, "step": state["step"] + 1, "rate": state["rate"] * 0.5, "gate": state["gate"] * 0.9,
            "count": state["count"] + 1,
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


@sgd
def scan_layers(w: Any, x: jax.Array) -> Any:
    return jnp.mean(jax.lax.scan(lambda h, one: (jnp.tanh(h @ one["m"] + one["b"]), None), x, w)[0] ** 2)


PROGRAMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "train_state": lambda: (train_step, make_state()),
    "counters": counters,
    "loop": loop,
    "stacked": lambda: (scan_layers, {"m": jnp.full((4, 8, 8), 0.1), "b": jnp.full((4, 8), 0.1)}),
}
FAST = {("counters", "one mesh"), ("loop", "one mesh"), ("train_state", "pipeline")}
CASES = [(program, where) for program in PROGRAMS for where in METHODS if (program, where) != ("loop", "pipeline")]


@pytest.mark.parametrize(("program", "where"), slow_one_in(2, slow_but(FAST, CASES)))
def test_a_loop_is_planned_once_and_has_the_weak_types_of_jit(program, where):
    step, start = PROGRAMS[program]()
    run, jitted = alpa_lite.parallelize(step, batch_argnums=1, **METHODS[where]), jax.jit(step)
    for change in (lambda x: x, strong):
        state = want = change(start)
        for _ in range(3):
            got, expected = run(state, X), jitted(want, X)
            same(got, expected)
            state, want = got[0], expected[0]
    if program == "counters":
        same(run.place(start, X)[0], jax.tree.map(jnp.asarray, start))
        same(run.init(lambda: jax.tree.map(jnp.asarray, start)), jax.tree.map(jnp.asarray, start))
    assert len(run.plans) == 1
