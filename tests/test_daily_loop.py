"""A whole loop as a user writes it: born sharded, batches ahead, evaluation every few steps, a short last batch."""

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import alpa_lite
from tests import comparing
from tests import test_daily_use as daily

STEPS, EVERY = 20, 5
BATCHES = [
    daily.examples(12 if number % 10 == 9 else 16, number) for number in range(STEPS)
]  # two epochs, each ends short


@pytest.mark.parametrize("method", ["zero", daily.SLOW])
def test_a_loop_on_a_linen_train_state(method: str, caplog: Any) -> None:
    step = daily.parallel(daily.train, method)
    test = alpa_lite.parallelize(daily.evaluate, state_from=step)
    state = step.init(daily.create, jax.random.key(0), rest=(BATCHES[0],))
    reference, plain, plain_test = daily.create(jax.random.key(0)), jax.jit(daily.train), jax.jit(daily.evaluate)
    with step.prefetch(BATCHES) as batches:
        for number, batch in enumerate(batches):
            quiet = number > 10 and method != "pipeline"  # a pipeline moves activations, and that only
            with daily.nothing_moves(caplog) if quiet else contextlib.nullcontext():
                state, loss = step(state, batch)
            reference, want = plain(reference, BATCHES[number])
            comparing.compare(loss, want)
            if number % EVERY == EVERY - 1:
                where = jax.tree.map(lambda x: x.sharding, state)
                with daily.nothing_moves(caplog) if quiet else contextlib.nullcontext():
                    found = test(state, daily.examples(8, 100))
                comparing.compare(found, plain_test(reference, daily.examples(8, 100)))
                assert jax.tree.map(lambda x: x.sharding, state) == where
    assert number == STEPS - 1
    comparing.compare(state.params, reference.params)
    assert len(step.plans) == 2 and len(test.plans) == 1
    assert "moves" not in caplog.text


@pytest.mark.slow
def test_a_loop_on_an_nnx_model(caplog: Any) -> None:
    def make(key: Any) -> tuple[daily.NnxNet, nnx.Optimizer]:
        model = daily.NnxNet(nnx.Rngs(key))
        return model, nnx.Optimizer(model, daily.OPTIMIZER, wrt=nnx.Param)

    step = alpa_lite.parallelize(daily.train_nnx, method=alpa_lite.Zero(3))
    test = alpa_lite.parallelize(lambda model, batch: daily.distance(model(batch["x"]), batch), state_from=step)
    model, optimizer = step.init(make, jax.random.key(0), rest=(BATCHES[0],))
    twin, other = make(jax.random.key(0))
    plain = nnx.jit(daily.train_nnx)
    with step.prefetch(BATCHES) as batches:
        for number, batch in enumerate(batches):
            with daily.nothing_moves(caplog) if number > 10 else contextlib.nullcontext():
                loss = step(model, optimizer, batch)
            comparing.compare(loss, plain(twin, other, BATCHES[number]))
            if number % EVERY == EVERY - 1:
                with daily.nothing_moves(caplog) if number > 10 else contextlib.nullcontext():
                    found = test(model, daily.examples(8, 100))
                comparing.compare(found, daily.distance(twin(daily.examples(8, 100)["x"]), daily.examples(8, 100)))
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(twin)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert len(step.plans) == 2 and len(test.plans) == 1
    assert "moves" not in caplog.text
