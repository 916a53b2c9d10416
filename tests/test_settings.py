"""Settings and weak types are those of `jax.jit`: another setting is another program; other plannings say why."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import alpa_lite
from alpa_lite import _jax, planned_calls
from alpa_lite.compilation import existing_placement
from alpa_lite.passes.tracing import calls
from gallery.steps import sgd, train_state
from tests.comparing import assert_close
from tests.helpers import record_calls
from tests.marks import slow_but, slow_one_in

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


MODEL, OPTIMIZER = Linen(), optax.adamw(optax.cosine_decay_schedule(1e-2, 10))


def plain() -> tuple[Any, Any]:
    def loss_of(w: Any, x: jax.Array) -> Any:
        noise = jax.random.normal(jax.random.key(1), x.shape)
        return jnp.mean(jnp.tanh(jnp.tanh((x + noise) @ w[0]) @ w[1]) ** 2), jnp.sum(x.astype(float))

    return sgd(loss_of, has_aux=True), [jnp.eye(8), jnp.ones((8, 8)) / 8]


def in_linen() -> tuple[Any, Any]:
    def step(state: Any, x: jax.Array) -> Any:
        kept = jax.random.bernoulli(jax.random.key(2), 0.5, x.shape)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x * kept) - x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    return step, train_state(MODEL, X, OPTIMIZER)


def scanned() -> tuple[Any, Any]:
    """Weights of layers that a pipeline cuts, weak ones."""

    def loss_of(w: Any, x: jax.Array) -> Any:
        out, _ = jax.lax.scan(lambda h, one: (jnp.tanh(h @ one["m"] + one["b"]), None), x, w)
        return jnp.mean(out**2) + jnp.mean(jnp.arange(3) / 3), jax.random.randint(jax.random.key(5), (4,), 0, 100)

    return sgd(loss_of, has_aux=True), {"m": jnp.full((4, 8, 8), 0.1), "b": jnp.full((4, 1, 8), 0.1)}


PROGRAMS = {f.__name__: f for f in (plain, in_linen, scanned)}
CASES = slow_one_in(3, slow_but({("plain", "one mesh")}, itertools.product(PROGRAMS, METHODS)))


same = functools.partial(assert_close, rtol=2e-5, weak_types=True)


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
    new = calls.signature(calls.describe_calling(lambda w, x: w, args, {}), args, {})
    old = dataclasses.replace(new, settings=new.settings[:-1])
    name = [*_jax.name_settings(new.settings)][-1]
    assert planned_calls.explain_miss(new, [], {old: []}) == f"{name} is a new setting of JAX"


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


LOOPED = {f.__name__: f for f in (counters, loop, in_linen, scanned)}
FAST = {("counters", "one mesh"), ("loop", "one mesh"), ("in_linen", "pipeline")}
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


def test_an_array_takes_another_weak_type_without_a_copy():
    array = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(jax.make_mesh((8,), "x"), jax.P("x")))
    weak = _jax.array_with_weak_type(array, True)
    assert weak.weak_type and not array.weak_type and _jax.array_with_weak_type(weak, True) is weak
    assert weak.sharding == array.sharding and (weak * jnp.bfloat16(2)).dtype == jnp.bfloat16
    assert [x.unsafe_buffer_pointer() for x in _jax.blocks_of(weak)] == [
        x.unsafe_buffer_pointer() for x in _jax.blocks_of(array)
    ]


# -- what shares a planning -------------------------------------------------------------------------------------------


def make_state() -> Any:
    return in_linen()[1]


def train_step(state: Any, batch: Any, rate: Any = 1.0) -> Any:
    def loss_of(params: Any) -> jax.Array:
        return ((state.apply_fn({"params": params}, batch) - batch[:, ::-1]) ** 2).mean() * rate

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.fixture
def plannings(monkeypatch) -> list[Any]:
    """The planned steps, one a planning."""
    return record_calls(monkeypatch, existing_placement, "compile_step")


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
