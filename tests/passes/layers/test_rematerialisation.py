"""Rematerialisation: the backward pass reads what is saved and nothing else, and computes the same."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.passes.ir.rewriting import RewrittenStep
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.rematerialisation import Choice, rematerialise
from alpa_lite.passes.layers.types import Layering
from gallery.batches import normal
from tests.passes import microbatched
from tests.passes.layers.test_layering import GPT, SGD, gpt, layered, layers_of
from tests.passes.numerics import assert_same


def rewritten(layers: Layering, choice: Choice) -> RewrittenStep:
    return rematerialise(layers, dict.fromkeys(range(len(layers.layers)) if choice != "none" else (), choice))


@functools.cache
def gpt_again() -> tuple[RewrittenStep, Layering]:
    """The GPT of `gpt`, of which only layer boundaries are saved."""
    result = rewritten(gpt(), "layer")
    return result, layered(result.traced, max_layers=6)


def read_back(layers: Layering) -> set[int]:
    """The forward values that backward ops read."""
    made = {v for op in layers.body.ops if op.index in layers.forward for v in op.results}
    return {v for op in layers.body.ops if op.index not in layers.forward for v in op.reads if v in made}


RARE = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("mlp", {}, id="mlp"),
        pytest.param("gpt", {"layers": 1, **GPT}, id="gpt", marks=pytest.mark.slow),
        pytest.param("gpt", {"layers": 4, **GPT, "scan": True}, id="scan", marks=RARE),
        pytest.param("unet", {"dtype": jnp.float32}, id="unet", marks=RARE),
    ],
)
def test_saving_less_computes_the_same(name: str, options: Mapping[str, Any]):
    step, *arguments = microbatched.zoo(name, 2, batch=4, tx=SGD, **options)
    layers = layers_of(step, *arguments)
    kept = {}
    for choice in get_args(Choice):
        result = rewritten(layers, choice)
        again = layered(result.traced)
        kept[choice] = sum(again.traced.graph.values[v].nbytes for v in read_back(again))
        assert bool(result.copies) == (choice != "none") and not result.copies & again.forward
        if choice == "layer" or name == "mlp":
            assert_same(layers.traced, result.traced, arguments)
    assert name == "mlp" or kept["layer"] <= kept["selective"] <= kept["none"]
    assert kept["layer"] < kept["none"]


def test_only_layer_boundaries_are_read_back():
    _, again = gpt_again()
    values = again.traced.graph.values
    made = {v: op for op in again.body.ops for v in op.results}
    shapes = sorted(values[v].shape for v in read_back(again) if made[v].index not in again.free_ops)
    # The residual stream before each block, and before the last norm: what enters the embedding is no activation.
    assert shapes == [(4, 8, 32)] * 5
    assert sum(op.name == "optimization_barrier" for op in again.body.ops) == 5


def test_copies_stand_right_before_their_use():
    result, again = gpt_again()
    layer_of = {index: number for number, layer in enumerate(gpt().layers) for index in layer.ops}
    order = [layer_of[result.origin[op.index]] for op in again.body.ops if op.index in result.copies]
    assert order == sorted(order, reverse=True)
    last = next(i for i, op in enumerate(again.body.ops) if op.index in result.copies)
    assert last > max(i for i, op in enumerate(again.body.ops) if op.index in again.forward and op.name != "add")


def test_random_draws_are_the_same():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for i, w in enumerate(params):
            key = jax.random.fold_in(jax.random.wrap_key_data(batch["key"][0]), i)
            x = jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.7, x.shape)
        return (x**2).mean()

    batch = {"x": normal(7, 8, 16), "key": jnp.arange(16, dtype=jnp.uint32).reshape(8, 2)}
    step, state = microbatched.step_of(loss_fn, [normal(i, 16, 16) for i in range(3)], 2, SGD)
    layers = layers_of(step, state, batch)
    result = rewritten(layers, "layer")
    assert "random_bits" in {op.name for op in layered(result.traced).body.ops if op.index in result.copies}
    assert_same(layers.traced, result.traced, (state, batch))


def test_part_of_the_model_may_be_rematerialised():
    layers = gpt()
    assignment = assign(layers, [3])
    result = rematerialise(layers, dict.fromkeys(range(3), "layer"), stages=assignment.stage)
    assert {assignment.stage[result.origin[index]] for index in result.copies} == {0}
