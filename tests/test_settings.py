"""JAX's settings are part of a signature: another setting is another program, as for `jax.jit`."""

from __future__ import annotations

import contextlib
import threading
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
from jax.experimental import io_callback

import alpa_lite
from alpa_lite import _jax
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


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.tanh(nn.Dense(8)(x)))


def plain() -> tuple[Any, Any]:
    def step(state: Any, x: jax.Array) -> Any:
        noise = jax.random.normal(jax.random.key(1), x.shape)
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh((x + noise) @ w[0]) @ w[1]) ** 2))(state)
        return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], (loss, jnp.sum(x.astype(float)))

    return step, [jnp.eye(8), jnp.ones((8, 8)) / 8]


def linen() -> tuple[Any, Any]:
    model, optimizer = Linen(), optax.adam(1e-2)
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))

    def step(state: Any, x: jax.Array) -> Any:
        kept = jax.random.bernoulli(jax.random.key(2), 0.5, x.shape)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.asarray(model.apply(p, x * kept)) ** 2))(
            state["params"]
        )
        updates, moments = optimizer.update(grads, state["moments"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return step, {"params": params, "moments": optimizer.init(params)}


def flax_nnx() -> tuple[Any, Any]:
    graph, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(state: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(nnx.merge(graph, state)(x)) ** 2) + jax.random.uniform(jax.random.key(3))

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return step, state


def equinox_arrays() -> tuple[Any, Any]:
    arrays, rest = equinox.partition(equinox.nn.MLP(8, 8, 8, 2, key=jax.random.key(0)), equinox.is_array)

    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda s: jnp.mean(jax.vmap(equinox.combine(s, rest))(x) ** 2))(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), (loss, jax.random.normal(jax.random.key(4)))

    return step, arrays


def scanned() -> tuple[Any, Any]:
    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            out, _ = jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)
            return jnp.mean(out**2) + jnp.mean(jnp.arange(3) / 3)

        loss, grads = jax.value_and_grad(loss_of)(state)
        return state - 0.1 * grads, (loss, jax.random.randint(jax.random.key(5), (4,), 0, 100))

    return step, jnp.ones((4, 8, 8)) / 8


PROGRAMS = {f.__name__: f for f in (plain, linen, flax_nnx, equinox_arrays, scanned)}
X = jnp.cos(jnp.arange(128.0)).reshape(16, 8)
CASES = slow_one_in(
    3,
    [
        pytest.param(program, where, marks=pytest.mark.slow if (program, where) != ("plain", "one mesh") else ())
        for program in PROGRAMS
        for where in METHODS
    ],
)


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
    run = alpa_lite.parallelize(lambda w, x: (w + x.sum(0), jnp.zeros(3) + jnp.zeros((2, 3))), batch_argnums=1)
    run.plan(jnp.ones(8), X)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        run(jnp.ones(8), X)


@pytest.mark.slow
def test_a_mesh_of_the_context_is_part_of_the_signature():
    step, state = plain()
    run = alpa_lite.parallelize(step, donate_argnums=(), batch_argnums=1, **METHODS["one mesh"]())
    want = run(state, X)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        same(run(state, X), want)
    assert len(run.plans) == 2


def test_other_settings_have_other_fingerprints_and_files(tmp_path, caplog):
    def step(state: Any, x: jax.Array) -> Any:
        return state - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state), jax.random.normal(jax.random.key(0))

    state, plans = jnp.eye(8), []
    for setting in (contextlib.nullcontext, SETTINGS["precision"], SETTINGS["random stream"], SETTINGS["x64"]):
        run = alpa_lite.parallelize(step, batch_argnums=1, cache_dir=str(tmp_path), **METHODS["one mesh"]())
        with setting():
            plans.append(run.plan(state, X))
    assert len({plan.fingerprint for plan in plans}) == len(list(tmp_path.iterdir())) == len(plans)
    assert plans[1].ingredients["jax_default_matmul_precision"] == "highest"
    assert "jax_default_matmul_precision" in plans[0].diff(plans[1])


def test_threads_keep_their_settings_apart():
    step, state = plain()
    run = alpa_lite.parallelize(step, donate_argnums=(), batch_argnums=1, **METHODS["one mesh"]())
    with jax.enable_x64(True):
        wide = run(state, X)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(run(state, X)))
        thread.start()
        thread.join()
        same(run(state, X), wide)
    same(found[0], jax.jit(step)(state, X))


def test_batches_are_prefetched_under_the_settings_of_the_loop():
    def step(state: Any, x: jax.Array) -> Any:
        return state - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state), x.sum()

    run = alpa_lite.parallelize(step, batch_argnums=1, **METHODS["one mesh"]())
    with jax.enable_x64(True):
        state = jnp.eye(8, dtype="float64")
        run.plan(state, np.ones((16, 8)))
        for batch in run.prefetch(np.ones((16, 8)) + i for i in range(3)):
            assert batch.dtype == "float64"
            state, total = run(state, batch)
        assert total.dtype == "float64"
    assert len(run.plans) == 1


def test_settings_are_carried_to_a_thread_and_left_there():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        carried = _jax.carry_settings(_jax.trace_context)
        own = _jax.trace_context()
    before = _jax.trace_context()
    assert carried() == own != before
    assert _jax.trace_context() == before


@pytest.mark.parametrize(
    ("callback", "wide"),
    [
        (lambda x: io_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True), "float64"),
        (
            lambda x: jax.pure_callback(lambda x: np.argsort(x), jax.ShapeDtypeStruct((8,), "int64"), x[0]),
            "float64, int64",
        ),
        (lambda x: jax.debug.callback(lambda x: None, jnp.sum(x)), "float64"),
        (
            lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jax.debug.callback(lambda x: None, x[0]), lambda: None),
            "float64",
        ),
        (lambda x: jax.lax.map(lambda x: io_callback(np.sin, jax.ShapeDtypeStruct((8,), "float64"), x), x), "float64"),
    ],
)
def test_callbacks_with_64_bits_of_one_thread_are_refused_on_several_devices(callback, wide):
    """JAX calls back in threads that have 32 bits; a result of another dtype would leave the other devices waiting."""

    def step(state: Any, x: jax.Array) -> Any:
        y = x @ state
        called = callback(y)
        return state * 0.5, y.mean() if called is None else called

    run = alpa_lite.parallelize(step, batch_argnums=1, **METHODS["one mesh"]())
    with jax.enable_x64(True), pytest.raises(alpa_lite.OptionError, match=f"{wide} under.*jax.config.update"):
        run(jnp.eye(8, dtype="float64"), jnp.ones((16, 8)))
