"""Effects of steps: callbacks and mutable references (`jax.new_ref`).

Callbacks run as often as under plain `jit`, on the same values, ordered ones in order; or are refused, which names the
callback and its line. Steps with references compute what plain `jit` does under every method.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.experimental import io_callback

import alpa_lite
import gallery
from alpa_lite import AlpaLiteError, DataParallel, MicrobatchError, Pipeline, Zero
from gallery.batches import f32
from gallery.references import WIDTH, batch, descent, gradients, model, weights
from gallery.steps import updated
from tests.comparing import assert_close
from tests.marks import slow_but, slow_one_in

seen: list[list[float]] = []


def record(*values):
    seen.append([float(np.abs(v).sum()) for v in values])


def recorded(*values):
    """As `record`, and gives the first value back."""
    record(*values)
    return np.asarray(values[0])


def trained(state, x, report=lambda loss, grads: None):
    loss, grads = gradients(state, x)
    report(loss, grads)
    return updated(state, grads), loss


def of_everything(state, x):
    """Of the batch, of the state, of nothing, and of results."""
    io_callback(record, None, x)
    io_callback(record, None, state[3])
    io_callback(record, None)
    jax.debug.callback(record, x, state[0])
    return trained(state, x, lambda loss, grads: jax.debug.callback(record, loss))


def in_order(state, x):
    io_callback(record, None, x, ordered=True)
    io_callback(record, None, state[3], ordered=True)
    io_callback(record, None, ordered=True)

    def report(loss, grads):
        for g in grads:
            io_callback(record, None, g, ordered=True)
        io_callback(record, None, loss, ordered=True)
        io_callback(record, None, state[0], x, ordered=True)

    return trained(state, x, report)


def control_flow_in_order(state, x):
    loss, grads = gradients(state, x)

    def body(count, g):
        io_callback(record, None, count, g, ordered=True)
        jax.lax.cond(count > 1, lambda: io_callback(record, None, count, ordered=True), lambda: None)
        return count + 1, None

    jax.lax.scan(body, 0, jnp.stack(grads))
    jax.lax.fori_loop(0, 2, lambda i, _: io_callback(record, None, i, ordered=True), None)
    return updated(state, grads), loss


def rate_from_host(state, x):
    rate = io_callback(lambda: recorded(np.float32(0.1)), f32())
    loss, grads = gradients(state, x)
    return jax.tree.map(lambda w, g: w - rate * g, state, grads), loss


@descent
def scale_from_host(state, x):
    """All layers read the result."""
    scale = io_callback(lambda: recorded(np.float32(0.5)), f32())
    return jnp.square(model([w * scale for w in state], x)).mean()


def augmented(state, x):
    return trained(state, io_callback(recorded, jax.ShapeDtypeStruct(x.shape, x.dtype), x))


def unread(state, x):
    io_callback(recorded, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return trained(state, x)


@descent
def activations(state, h):
    for w in state:
        h = jnp.tanh(h @ w)
        jax.debug.callback(record, h, ordered=True)
    return jnp.square(h).mean()


@jax.custom_vjp
def spied(x):
    return x


spied.defvjp(lambda x: (x, None), lambda _, g: (jax.debug.callback(record, g), (g,))[1])


@descent
def cotangents(state, h):
    for w in state:
        h = spied(jnp.tanh(h @ w))
    return jnp.square(h).mean()


@descent
def layers(state, x):
    """In a scan over layers, of what is the same for all examples."""

    def body(h, layer):
        number, w = layer
        jax.debug.callback(record, number)
        return jnp.tanh(h @ w), None

    return jnp.square(jax.lax.scan(body, x, (jnp.arange(len(state)), jnp.stack(state)))[0]).mean()


def examples(state, x):
    """Once for each example."""

    def one(example):
        jax.debug.callback(record, example)
        return 2 * example

    return trained(state, jax.lax.map(one, x))


def before_the_model(state, x):
    """A loop on the whole batch, whose result all examples need."""

    def body(carry):
        jax.debug.callback(record, carry[0])
        return carry[0] + 1, carry[1] * 1.5

    _, scale = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x.mean()))
    return trained(state, x * scale)


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(3):
            x = linen.tanh(linen.Dense(WIDTH)(x))
            jax.debug.callback(record, x.mean())
        return x


def in_linen(state, x):
    loss, grads = jax.value_and_grad(lambda state: jnp.square(jnp.asarray(Mlp().apply(state, x))).mean())(state)
    jax.debug.callback(record, *jax.tree.leaves(state), ordered=True)
    return updated(state, grads), loss


METHODS = {
    "zero": {"method": Zero(3)},
    "micro-batches": {"method": DataParallel(), "num_microbatches": 2},
    "pipeline": {"method": Pipeline(num_stages=2), "num_microbatches": 1},
    "1f1b": {"method": Pipeline(num_stages=2), "num_microbatches": 2},
    "zb-h1": {"method": Pipeline(num_stages=2, schedule="zb-h1"), "num_microbatches": 4},
}
ORDERED = (in_order, control_flow_in_order, activations)
STEPS = (
    of_everything, in_order, control_flow_in_order, rate_from_host, scale_from_host, augmented, unread,
    activations, cotangents, layers, examples, before_the_model, in_linen,
)  # fmt: skip
REFUSED = {layers: ("micro-batches", "1f1b", "zb-h1"), scale_from_host: ("pipeline", "1f1b", "zb-h1")}
CASES = slow_one_in(3, slow_but({(in_order, "1f1b")}, itertools.product(STEPS, METHODS)))
WITH_REFERENCES = itertools.product(gallery.find("references"), [method for method in METHODS if method != "1f1b"])


def name_of(value):
    return getattr(value, "__name__", value)


def run(step, fun, *args):
    """The results of a call, and what its callbacks have seen; sorted, where no order is asked for."""
    seen.clear()
    results = jax.block_until_ready(fun(*args))
    jax.effects_barrier()
    return results, seen.copy() if step in ORDERED else sorted(seen)


@pytest.mark.parametrize(("step", "method"), CASES, ids=name_of)
def test_callbacks_run_as_under_plain_jit(step, method):
    state, x = Mlp().init(jax.random.key(0), batch()) if step is in_linen else weights(), batch()
    want, expected = run(step, jax.jit(step), state, x)
    parallel = alpa_lite.parallelize(step, **METHODS[method])
    if method in REFUSED.get(step, ()):
        with pytest.raises(AlpaLiteError, match=r"callback at tests/test_callbacks.py:\d+ \(") as caught:
            parallel(state, x)
        assert "; use " in str(caught.value)
        return
    for _ in range(2):
        got, found = run(step, parallel, jax.tree.map(jnp.copy, state), x)
        assert [len(values) for values in found] == [len(values) for values in expected]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert_close(got, want)


@descent
def attentive(state, h):
    """A causal model whose activations are seen."""
    causal = jnp.tril(jnp.ones((h.shape[1],) * 2, bool))
    for w in state:
        scores = jnp.einsum("btd,bsd->bts", h @ w, h)
        h = jnp.tanh(h + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ h @ w)
        jax.debug.callback(record, h)
    return jnp.square(h).mean()


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_activations_are_seen_in_slices_of_the_sequence(num_microbatches):
    state, x = weights(), jnp.asarray(np.random.default_rng(2).normal(size=(4, 8, WIDTH)), jnp.float32)
    want, expected = run(attentive, jax.jit(attentive), state, x)
    method = Pipeline(num_stages=2, token_slices=(4, 4))
    parallel = alpa_lite.parallelize(attentive, method=method, num_microbatches=num_microbatches)
    got, found = run(attentive, parallel, state, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert_close(got, want)


@pytest.mark.parametrize("trips", [1, 5])
def test_what_a_callback_communicates_is_in_the_predicted_seconds(trips):
    """Its results reach the other devices in each iteration of a loop."""

    def step(state, x):
        def called(y):
            return io_callback(recorded, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

        y = jax.lax.fori_loop(0, trips, lambda _, y: called(y), x @ state) if trips > 1 else called(x @ state)
        return 0.9 * state, y.sum()

    options: dict[str, Any] = {"method": DataParallel(), "batch_argnums": 1, "cluster": "a100"}
    plan = alpa_lite.make_plan(step, f32(256, 256), f32(64, 256), **options)
    reduced = sum(c.count for c in plan.collectives if c.kind == "all_reduce" and c.bytes == 64 * 256 * 4)
    assert reduced == trips
    assert plan.step_seconds > sum(plan.collective_seconds)


# -- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method"), slow_one_in(3, slow_but({("metrics", "zb-h1")}, WITH_REFERENCES)))
def test_a_step_with_references_is_equal_to_plain_jit(name, method):
    step, args = gallery.get("references", name).make()
    want = jax.jit(step)(*args)
    try:
        got = alpa_lite.parallelize(step, **METHODS[method])(*args)
    except MicrobatchError as error:  # parts of the batch of their own, and other batches
        assert name in ("accumulation", "scanned"), error
        assert "num_microbatches" in str(error)
        return
    assert_close(got, want)
