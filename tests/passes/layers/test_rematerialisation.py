"""Rematerialisation: the backward pass reads what is saved and nothing else, and computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_lite.ir.graph import check
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.ir.rewriting import Rewritten
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.rematerialisation import choices, rematerialise
from alpa_lite.passes.layers.types import Layering
from tests.passes import microbatched, staged
from tests.passes.layers.test_layering import GPT, even, layered, layers_of
from tests.zoo_base import normal

SGD = optax.sgd(0.1, momentum=0.9)


def rewritten(layers: Layering, saved: frozenset[int]) -> Rewritten:
    backward = [op.index for op in layers.body.ops if op.index not in layers.forward]
    return rematerialise(layers.traced, layers.scan, [layer.ops for layer in layers.layers], backward, saved)


def read_back(layers: Layering) -> set[int]:
    """The forward values that backward ops read."""
    made = {v for op in layers.body.ops if op.index in layers.forward for v in op.results}
    return {v for op in layers.body.ops if op.index not in layers.forward for v in op.reads if v in made}


def nbytes(layers: Layering, values: set[int]) -> int:
    return sum(layers.traced.graph.values[v].nbytes for v in values)


def assert_same(layers: Layering, result: Rewritten, arguments: Any, *, exact: bool = False) -> None:
    leaves = jax.tree.leaves((arguments, {}))
    expected = jax.jit(lambda *x: evaluation.evaluate(layers.traced.graph, x))(*leaves)
    actual = jax.jit(lambda *x: evaluation.evaluate(result.traced.graph, x))(*leaves)
    for a, b in zip(actual, expected, strict=True):
        if exact:
            np.testing.assert_array_equal(a, b)
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


MODELS: list[Any] = [
    pytest.param("mlp", {}, id="mlp"),
    pytest.param("gpt", {"layers": 1, **GPT}, id="gpt", marks=pytest.mark.slow),
    pytest.param("gpt", {"layers": 4, **GPT, "scan": True}, id="scan", marks=[pytest.mark.slow, pytest.mark.thorough]),
    pytest.param("moe", {"dtype": jnp.float32}, id="moe", marks=[pytest.mark.slow, pytest.mark.thorough]),
    pytest.param("unet", {"dtype": jnp.float32}, id="unet", marks=[pytest.mark.slow, pytest.mark.thorough]),
]


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_saving_less_computes_the_same(name: str, options: Mapping[str, Any]):
    step, state, batch = microbatched.zoo(name, 2, batch=4, tx=SGD, **options)
    layers = layers_of(step, state, batch)
    saved = choices(layers)
    kept = {}
    for choice, values in saved.items():
        result = rewritten(layers, values)
        check(result.traced.graph)
        again = layered(result.traced)
        assert [layer.fingerprint for layer in again.layers][1:-1] == [x.fingerprint for x in layers.layers][1:-1] or (
            choice != "none"
        )
        kept[choice] = nbytes(again, read_back(again))
        if choice == "none":
            assert not result.copies
        else:
            forward = {result.origin[index] for index in again.forward}
            assert forward <= layers.forward
            assert not result.copies & again.forward
        if choice == "layer" or name == "mlp":
            assert_same(layers, result, (state, batch))
    assert name == "mlp" or kept["layer"] <= kept["selective"] <= kept["none"]
    assert kept["layer"] < kept["none"]


def test_only_layer_boundaries_are_read_back():
    step, state, batch = microbatched.zoo("gpt", 2, layers=4, **GPT)
    layers = layers_of(step, state, batch, max_layers=6)
    again = layered(rewritten(layers, choices(layers)["layer"]).traced, max_layers=6)
    values = again.traced.graph.values
    made = {v: op for op in again.body.ops for v in op.results}
    shapes = sorted(values[v].shape for v in read_back(again) if made[v].index not in again.free)
    # The residual stream before each block, and before the last norm: what enters the embedding is no activation.
    assert shapes == [(4, 8, 32)] * 5
    barriers = [op for op in again.body.ops if op.name == "optimization_barrier"]
    assert len(barriers) == 6


def test_copies_stand_right_before_their_use():
    step, state, batch = microbatched.zoo("gpt", 2, layers=4, **GPT)
    layers = layers_of(step, state, batch, max_layers=6)
    result = rewritten(layers, choices(layers)["layer"])
    again = layered(result.traced, max_layers=6)
    layer_of = {index: number for number, layer in enumerate(layers.layers) for index in layer.ops}
    order = [layer_of[result.origin[op.index]] for op in again.body.ops if op.index in result.copies]
    assert order == sorted(order, reverse=True)
    last = next(i for i, op in enumerate(again.body.ops) if op.index in result.copies)
    first = max(i for i, op in enumerate(again.body.ops) if op.index in again.forward and op.name != "add")
    assert last > first


def test_random_draws_are_the_same():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for i, w in enumerate(params):
            key = jax.random.fold_in(jax.random.wrap_key_data(batch["key"][0]), i)
            x = jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.7, x.shape)
        return (x**2).mean()

    step, state = microbatched.step_of(loss_fn, [normal(i, 16, 16) for i in range(3)], 2, SGD)
    batch = {"x": normal(7, 8, 16), "key": jnp.arange(16, dtype=jnp.uint32).reshape(8, 2)}
    layers = layers_of(step, state, batch)
    result = rewritten(layers, frozenset())
    copied = [op.name for op in layered(result.traced).body.ops if op.index in result.copies]
    assert "random_bits" in copied
    assert_same(layers, result, (state, batch))


@pytest.mark.slow
def test_stages_run_what_is_rematerialised():
    step, state, batch = microbatched.zoo("gpt", 2, layers=1, batch=4, tx=SGD, **GPT)
    layers = layers_of(step, state, batch)
    again = layered(rewritten(layers, choices(layers)["selective"]).traced)
    assignment = assign(again, even(again, 2))
    leaves = jax.tree.leaves(((state, batch), {}))
    actual = jax.jit(lambda *x: staged.run(again, assignment, x))(*leaves)
    expected = jax.jit(lambda *x: evaluation.evaluate(layers.traced.graph, x))(*leaves)
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


def test_part_of_the_model_may_be_rematerialised():
    step, state, batch = microbatched.zoo("gpt", 2, layers=4, **GPT)
    layers = layers_of(step, state, batch, max_layers=6)
    assignment = assign(layers, [3])
    backward = [index for index in assignment.backward if assignment.stage[index] == 0]
    result = rematerialise(
        layers.traced, layers.scan, [layer.ops for layer in layers.layers[:3]], backward, choices(layers)["layer"]
    )
    stages = {assignment.stage[result.origin[index]] for index in result.copies}
    assert stages == {0}
