"""Settings and weak types are those of `jax.jit`: another setting is another program, and a loop is planned once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from flax.training.train_state import TrainState
from jax.experimental import io_callback

import alpa_lite
from alpa_lite import _jax
from alpa_lite.compilation import signature_diff
from alpa_lite.passes.tracing import calls
from tests.comparing import assert_close
from tests.gallery import sgd
from tests.marks import slow_but, slow_one_in
from tests.zoo_base import filled

X = jnp.cos(jnp.arange(128.0)).reshape(16, 8)
METHODS: dict[str, dict[str, Any]] = {
    "one mesh": {"method": alpa_lite.Zero(stage=3)},
    "micro-batches": {"method": alpa_lite.DataParallel(), "num_microbatches": 2},
    "pipeline": {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
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
    def loss_of(w: Any, x: jax.Array) -> Any:
        noise = jax.random.normal(jax.random.key(1), x.shape)
        return jnp.mean(jnp.tanh(jnp.tanh((x + noise) @ w[0]) @ w[1]) ** 2), jnp.sum(x.astype(float))

    return sgd(loss_of, has_aux=True), [jnp.eye(8), jnp.ones((8, 8)) / 8]


def train_state() -> tuple[Any, Any]:
    model = Linen()
    params = filled(jax.eval_shape(model.init, jax.random.key(0), X))["params"]
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, 10))

    def step(state: Any, x: jax.Array) -> Any:
        kept = jax.random.bernoulli(jax.random.key(2), 0.5, x.shape)
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean((jnp.asarray(model.apply({"params": p}, x * kept)) - x) ** 2)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def flax_nnx() -> tuple[Any, Any]:
    graph, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def step(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(nnx.merge(graph, params)(x)) - x) ** 2) + jax.random.uniform(jax.random.key(3))

        loss, grads = jax.value_and_grad(loss_of)(state[0])
        updates, moments = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments, state[2] + 1), loss

    return step, (state, optimizer.init(state), 0)


def equinox_arrays() -> tuple[Any, Any]:
    arrays, rest = equinox.partition(equinox.nn.MLP(8, 8, 8, 2, key=jax.random.key(0)), equinox.is_array)

    def loss_of(state: Any, x: jax.Array) -> Any:
        return jnp.mean(jax.vmap(equinox.combine(state, rest))(x) ** 2), jax.random.normal(jax.random.key(4))

    def step(state: Any, x: jax.Array) -> Any:
        new, found = sgd(loss_of, has_aux=True)(state[0], x)
        return (new, state[1] * 0.99), found

    return step, (arrays, 1.0)


def scanned() -> tuple[Any, Any]:
    """Weights of layers that a pipeline cuts, weak ones."""

    def loss_of(w: Any, x: jax.Array) -> Any:
        out, _ = jax.lax.scan(lambda h, one: (jnp.tanh(h @ one["m"] + one["b"]), None), x, w)
        return jnp.mean(out**2) + jnp.mean(jnp.arange(3) / 3), jax.random.randint(jax.random.key(5), (4,), 0, 100)

    return sgd(loss_of, has_aux=True), {"m": jnp.full((4, 8, 8), 0.1), "b": jnp.full((4, 1, 8), 0.1)}


LIBRARIES = (train_state, flax_nnx, equinox_arrays, scanned)
PROGRAMS = {f.__name__: f for f in (plain, *LIBRARIES)}
CASES = slow_one_in(3, slow_but({("plain", "one mesh")}, itertools.product(PROGRAMS, METHODS)))


def same(got: Any, want: Any) -> None:
    """Dtypes and weak types equal, values close."""
    assert_close(got, want, rtol=2e-5, weak_types=True)


def parallel(step: Any, where: str = "one mesh", **options: Any) -> Any:
    return alpa_lite.parallelize(step, batch_argnums=1, **METHODS[where], **options)


@pytest.mark.parametrize(("program", "where"), CASES)
def test_results_are_those_of_jit_under_each_setting(program, where):
    step, state = PROGRAMS[program]()
    run, jitted = parallel(step, where, donate_argnums=()), jax.jit(step)
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
    run = parallel(step, donate_argnums=())
    want = run(state, X)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        same(run(state, X), want)
    assert len(run.plans) == 2


def test_other_settings_have_other_fingerprints_and_files(tmp_path, caplog):
    def loss_of(w: Any, x: jax.Array) -> Any:
        return jnp.mean((x @ w) ** 2), jax.random.normal(jax.random.key(0))

    step, state, plans = sgd(loss_of, has_aux=True), jnp.eye(8), []
    for setting in (contextlib.nullcontext, SETTINGS["precision"], SETTINGS["random stream"], SETTINGS["x64"]):
        run = parallel(step, cache_dir=str(tmp_path))
        with setting():
            plans.append(run.plan(state, X))
    assert len({plan.fingerprint for plan in plans}) == len(list(tmp_path.iterdir())) == len(plans)
    assert plans[1].ingredients["jax_default_matmul_precision"] == "highest"
    assert "jax_default_matmul_precision" in plans[0].diff(plans[1])


def test_threads_keep_their_settings_apart():
    step, state = plain()
    run = parallel(step, donate_argnums=())
    with jax.enable_x64(True):
        wide = run(state, X)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(run(state, X)))
        thread.start()
        thread.join()
        same(run(state, X), wide)
    same(found[0], jax.jit(step)(state, X))


def test_batches_are_prefetched_under_the_settings_of_the_loop():
    run = parallel(sgd(lambda w, x: (jnp.mean((x @ w) ** 2), x.sum()), has_aux=True))
    with jax.enable_x64(True):
        state = jnp.eye(8, dtype="float64")
        run.plan(state, np.ones((16, 8)))
        for batch in run.prefetch(np.ones((16, 8)) + i for i in range(3)):
            assert batch.dtype == "float64"
            state, (_, total) = run(state, batch)
        assert total.dtype == "float64"
    assert len(run.plans) == 1


def test_settings_are_carried_to_a_thread_and_left_there():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        carried = _jax.carry_settings(_jax.trace_context)
        own = _jax.trace_context()
    before = _jax.trace_context()
    assert carried() == own != before
    assert _jax.trace_context() == before


def test_a_setting_that_a_module_registers_after_planning_is_named():
    """With JAX 0.12 a first Pallas kernel does so; the call after it failed."""
    args = jnp.ones(8), X
    new = calls.signature(calls.calling(lambda w, x: w, args, {}), args, {})
    old = dataclasses.replace(new, settings=new.settings[:-1])
    name = [*_jax.named_settings(new.settings)][-1]
    assert signature_diff.explain_miss(new, [], {old: []}) == f"{name} is a new setting of JAX"


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

    run = parallel(step)
    with jax.enable_x64(True), pytest.raises(alpa_lite.OptionError, match=f"{wide} under.*jax.config.update"):
        run(jnp.eye(8, dtype="float64"), jnp.ones((16, 8)))


# -- weak types --------------------------------------------------------------------------------------------------------


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


LOOPED = {f.__name__: f for f in (counters, loop, *LIBRARIES)}
FAST = {("counters", "one mesh"), ("loop", "one mesh"), ("train_state", "pipeline")}
PAIRS = [pair for pair in itertools.product(LOOPED, METHODS) if pair != ("loop", "pipeline")]  # nothing to cut


def strong(tree: Any) -> Any:
    """As a checkpoint restores it."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.parametrize(("program", "where"), slow_one_in(2, slow_but(FAST, PAIRS)))
def test_a_loop_is_planned_once_and_has_the_weak_types_of_jit(program, where):
    step, start = LOOPED[program]()
    run, jitted = parallel(step, where), jax.jit(step)
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


def test_placed_and_initialised_state_keeps_its_weak_types():
    step, start = counters()
    run = parallel(step)
    placed, _ = run.place(start, X)
    same(placed, jax.tree.map(jnp.asarray, start))
    made = run.init(lambda: {**jax.tree.map(jnp.asarray, start), "step": jnp.asarray(0)})
    same(made, jax.tree.map(jnp.asarray, start))
    assert len(run.plans) == 1


def test_an_array_takes_another_weak_type_without_a_copy():
    array = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(jax.make_mesh((8,), "x"), jax.P("x")))
    weak = _jax.array_with_weak_type(array, True)
    assert weak.weak_type and not array.weak_type and _jax.array_with_weak_type(weak, True) is weak
    assert weak.sharding == array.sharding and (weak * jnp.bfloat16(2)).dtype == jnp.bfloat16
    assert [x.unsafe_buffer_pointer() for x in _jax.blocks_of(weak)] == [
        x.unsafe_buffer_pointer() for x in _jax.blocks_of(array)
    ]
