"""JAX's settings are part of a signature: another setting is another program, as for `jax.jit`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import alpa_lite
from tests.marks import slow_one_in

METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "one mesh": lambda: {"method": alpa_lite.Zero(stage=3)},
    "micro-batches": lambda: {"method": alpa_lite.DataParallel(), "num_microbatches": 2},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}
SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "random stream": lambda: jax.threefry_partitionable(False),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "default PRNG": lambda: jax.default_prng_impl("rbg"),  # no reason for jit to trace again
}


def plain() -> tuple[Any, Any]:
    def step(state: Any, x: jax.Array) -> Any:
        noise = jax.random.normal(jax.random.key(1), x.shape)
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh((x + noise) @ w[0]) @ w[1]) ** 2))(state)
        return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], (loss, jnp.sum(x.astype(float)))

    return step, [jnp.eye(8), jnp.ones((8, 8)) / 8]


def flax_nnx() -> tuple[Any, Any]:
    graph, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(state: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(nnx.merge(graph, state)(x)) ** 2) + jax.random.uniform(jax.random.key(3))

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return step, state


def scanned() -> tuple[Any, Any]:
    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            out, _ = jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)
            return jnp.mean(out**2) + jnp.mean(jnp.arange(3) / 3)

        loss, grads = jax.value_and_grad(loss_of)(state)
        return state - 0.1 * grads, (loss, jax.random.randint(jax.random.key(5), (4,), 0, 100))

    return step, jnp.ones((4, 8, 8)) / 8


PROGRAMS = {f.__name__: f for f in (plain, flax_nnx, scanned)}
X = jnp.cos(jnp.arange(128.0)).reshape(16, 8)
CASES = slow_one_in(2, [
    pytest.param(program, where, marks=pytest.mark.slow if (program, where) != ("plain", "one mesh") else ())
    for program in PROGRAMS for where in METHODS
])  # fmt: skip


def same(got: Any, want: Any) -> None:
    """Dtypes and weak types equal, values close."""
    types = [[(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)] for tree in (got, want)]
    assert types[0] == types[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


@pytest.mark.parametrize(("program", "where"), CASES)
def test_results_are_those_of_jit_under_each_setting(program, where):
    step, state = PROGRAMS[program]()
    run = alpa_lite.parallelize(step, donate_argnums=(), batch_argnums=1, **METHODS[where]())
    jitted = jax.jit(step)
    same(run(state, X), jitted(state, X))
    first = run._current
    for name, setting in SETTINGS.items():
        with setting():
            same(run(state, X), jitted(state, X))
            planned = run._current
            run(state, X)
            assert run._current is planned
        assert (planned is first) == (name == "default PRNG")
        run(state, X)
        assert run._current is first
    assert len(run.plans) == 5


def test_an_error_of_a_setting_is_raised():
    def step(w: Any, x: jax.Array) -> Any:
        return w + x.sum(0), jnp.zeros(3) + jnp.zeros((2, 3))

    run = alpa_lite.parallelize(step, batch_argnums=1, **METHODS["one mesh"]())
    run.plan(jnp.ones(8), X)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        run(jnp.ones(8), X)


def sgd(state: Any, x: jax.Array) -> Any:
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - 0.1 * grad, (x.sum(), jax.random.normal(jax.random.key(0)))


@pytest.mark.slow
def test_a_mesh_of_the_context_is_part_of_the_signature():
    run = alpa_lite.parallelize(sgd, donate_argnums=(), batch_argnums=1, **METHODS["one mesh"]())
    want = run(jnp.eye(8), X)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        same(run(jnp.eye(8), X), want)
    assert len(run.plans) == 2


def test_other_settings_have_other_fingerprints_and_files(tmp_path):
    plans = []
    for setting in (contextlib.nullcontext, SETTINGS["precision"], SETTINGS["random stream"], SETTINGS["x64"]):
        run = alpa_lite.parallelize(sgd, batch_argnums=1, cache_dir=str(tmp_path), **METHODS["one mesh"]())
        with setting():
            plans.append(run.plan(jnp.eye(8, dtype="float32"), X))
    assert len({plan.fingerprint for plan in plans}) == len(list(tmp_path.iterdir())) == len(plans)
    assert plans[1].ingredients["jax_default_matmul_precision"] == "highest"
    assert "jax_default_matmul_precision" in plans[0].diff(plans[1])


def test_threads_keep_their_settings_apart_and_prefetch_those_of_the_loop():
    run = alpa_lite.parallelize(sgd, donate_argnums=(), batch_argnums=1, **METHODS["one mesh"]())
    narrow = jnp.eye(8)
    with jax.enable_x64(True):
        state = jnp.eye(8, dtype="float64")
        run.plan(state, np.ones((16, 8)))
        for batch in run.prefetch(np.ones((16, 8)) + i for i in range(2)):
            assert batch.dtype == "float64"
            wide = run(state, batch)
            assert wide[1][0].dtype == "float64"
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(run(narrow, X)))
        thread.start()
        thread.join()
        same(run(state, batch), wide)
    same(found[0], jax.jit(sgd)(narrow, X))
    assert len(run.plans) == 2


CALLBACKS: dict[str, tuple[Callable[[jax.Array], Any], str]] = {
    "ordered": (lambda x: io_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True), "float64"),
    "pure": (lambda x: jax.pure_callback(np.argsort, jax.ShapeDtypeStruct((8,), "int64"), x[0]), "float64, int64"),
    "debug": (lambda x: jax.debug.callback(lambda x: None, jnp.sum(x)), "float64"),
    "in a branch": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jax.debug.callback(lambda x: None, x[0]), lambda: None), "float64",
    ),
    "in a loop": (
        lambda x: jax.lax.map(lambda x: io_callback(np.sin, jax.ShapeDtypeStruct((8,), "float64"), x), x), "float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_with_64_bits_of_one_thread_are_refused_on_several_devices(name):
    """JAX calls back in threads that have 32 bits; a result of another dtype would leave the other devices waiting."""
    callback, wide = CALLBACKS[name]

    def step(state: Any, x: jax.Array) -> Any:
        y = x @ state
        called = callback(y)
        return state * 0.5, y.mean() if called is None else called

    run = alpa_lite.parallelize(step, batch_argnums=1, **METHODS["one mesh"]())
    with jax.enable_x64(True), pytest.raises(alpa_lite.OptionError, match=f"{wide} under.*jax.config.update"):
        run(jnp.eye(8, dtype="float64"), jnp.ones((16, 8)))
