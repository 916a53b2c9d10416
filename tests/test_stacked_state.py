"""State stacked over layers that a pipeline cuts stays with its stages between calls, and is an array when read."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite
from alpa_lite.errors import DonatedError
from alpa_lite.runtime.stacked import StackedArray, StackedLeaf
from gallery.steps import apply_optimizer, sgd
from tests.comparing import assert_close
from tests.marks import slow_but
from tests.test_settings import X

LAYERS = 4


def trained(loss_of: Callable[[Any, Any], jax.Array], params: Any, optimizer: Any = None) -> tuple[Any, Any]:
    """A step and its state, under SGD without momentum unless an optimizer is given."""
    if optimizer is None:
        return sgd(loss_of), params
    state = {"params": params, "memory": optimizer.init(params)}
    return lambda state, x: apply_optimizer(lambda params: loss_of(params, x), state, optimizer), state


def weights(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) / 3, jnp.float32)


def plain_loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> Any:
        return jnp.tanh(h @ w["m"] + w["b"]), None

    return jnp.mean((jax.lax.scan(layer, x, params["layers"])[0] @ params["out"]) ** 2)


PLAIN = {"layers": {"m": weights(LAYERS, 8, 8), "b": weights(LAYERS, 8)}, "out": weights(8, 8)}


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, h: jax.Array, _: Any) -> Any:
                return nn.tanh(nn.Dense(8)(h)), None

        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return layers()(x, None)[0]


def linen() -> tuple[Any, Any]:
    model = Scanned()
    params = model.init(jax.random.key(0), X)
    return trained(lambda p, x: jnp.mean((model.apply(p, x) - x) ** 2), params, optax.sgd(0.1, momentum=0.9))


PROGRAMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: trained(plain_loss, PLAIN),
    "adamw": lambda: trained(plain_loss, PLAIN, optax.adamw(1e-2)),
    "weak": lambda: trained(plain_loss, {**PLAIN, "layers": {**PLAIN["layers"], "b": jnp.full((LAYERS, 8), 0.1)}}),
    "linen": linen,
}
WAYS = {
    "interleaved": {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
    "1f1b": {"method": alpa_lite.Pipeline(num_stages=2, schedule="1f1b"), "num_microbatches": 2},
}


@pytest.fixture
def compilations() -> Any:
    """A list that grows with each program that XLA compiles."""
    seen: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


same = functools.partial(assert_close, rtol=3e-5, weak_types=True)


@pytest.mark.parametrize(("program", "where"), slow_but({("weak", "1f1b")}, itertools.product(PROGRAMS, WAYS)))
def test_calls_move_and_compile_nothing_and_results_are_those_of_jit(program, where, compilations, monkeypatch):
    step, start = PROGRAMS[program]()
    run, state, want = alpa_lite.parallelize(step, batch_argnums=1, **WAYS[where]), start, start
    with monkeypatch.context() as patch:
        patch.setattr(StackedArray, "make_array", lambda self: pytest.fail("joined between calls"))
        patch.setattr(StackedLeaf, "join", lambda *_: pytest.fail("joined between calls"))
        state, _ = run(state, X)
        jax.block_until_ready(state)
        compilations.clear()
        for _ in range(3):
            state, loss = run(state, X)
        jax.block_until_ready(state)
        assert not compilations
    for _ in range(4):
        want, expected = jax.jit(step)(want, X)
    assert any(isinstance(leaf, StackedArray) for leaf in jax.tree.leaves(state))
    same((state, loss), (want, expected))
    again, _ = run(state, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    with pytest.raises(DonatedError):
        run(state, X)
    same(again, jax.jit(step)(want, X)[0])
    assert len(run.plans) == 1


@pytest.mark.slow
def test_state_may_be_read_changed_copied_and_given_again():
    step, start = PROGRAMS["plain"]()
    run, jitted = alpa_lite.parallelize(step, batch_argnums=1, **WAYS["1f1b"]), jax.jit(step)
    state, want = run(start, X)[0], jitted(start, X)[0]
    changes: list[Callable[[Any], Any]] = [
        lambda s: s,
        lambda s: jax.tree.map(lambda w: w * 0.5, s),
        lambda s: jax.tree.map(np.asarray, s),
        lambda s: jax.tree.map(jnp.copy, s),
        lambda s: jax.tree.unflatten(jax.tree.structure(s), jax.tree.leaves(s)),
        lambda s: {**s, "layers": {**s["layers"], "b": s["layers"]["b"].at[0].set(0)}},
    ]
    for change in changes:
        state, want = change(state), change(want)
        norms = [optax.tree.norm(tree["layers"]) for tree in (state, want)]
        np.testing.assert_allclose(*norms, rtol=1e-5)
        (state, loss), (want, expected) = run(state, X), jitted(want, X)
        same((state, loss), (want, expected))
    placed = run.place(state, X)[0]
    same(placed, want)
    same(run(placed, X)[0], jitted(want, X)[0])
    same(state, want)  # what was placed was a copy
    assert len(run.plans) == 1


@pytest.mark.slow
def test_evaluation_reads_state_in_parts(compilations, monkeypatch):
    step, start = PROGRAMS["plain"]()
    run = alpa_lite.parallelize(step, batch_argnums=1, **WAYS["1f1b"])
    state, _ = run(start, X)
    evaluate = alpa_lite.parallelize(plain_loss, batch_argnums=1, state_from=run)
    want = jax.jit(plain_loss)(jax.tree.map(np.asarray, state), X)
    np.testing.assert_allclose(evaluate(state, X), want, rtol=1e-5)
    layers = jax.jit(lambda layers: jax.tree.map(jnp.sum, layers))(state["layers"])  # "out" is on its stage alone
    want_layers = jax.tree.map(lambda w: np.asarray(w).sum(), state["layers"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), layers, want_layers)
    state, _ = run(state, X)
