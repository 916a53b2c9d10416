"""Rematerialisation within scans: what forward scans stack, and that backward scans compute the same."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.ir.graph import Traced, check
from alpa_lite.passes.ir.rewriting import Rewritten
from alpa_lite.passes.layers.forward import forward_ops
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.layers.scan_rematerialisation import rematerialise_scans
from alpa_lite.passes.layers.scans import layer_scans
from tests.passes import microbatched
from tests.passes.layers.test_scans import SGD, assert_same, stacked_mlp
from tests.zoo_base import normal


def rewritten(traced: Traced, choice: Choice) -> Rewritten:
    scan = microbatched.scan_of(traced)
    return rematerialise_scans(traced, scan, {op.index: choice for op in layer_scans(traced, scan)})


def stacked_shapes(traced: Traced, scan: int) -> list[tuple[int, ...]]:
    """The shapes that forward scans stack, per iteration."""
    outer = microbatched.op_of(traced.graph.block, scan)
    forward = forward_ops(outer, traced.graph.values)
    return sorted(
        traced.graph.values[v].shape[1:]
        for op in outer.bodies[0].ops
        if op.name == "scan" and op.index in forward
        for v in op.results[op.params["num_carry"] :]
    )


@pytest.mark.parametrize("choice", ["layer", "selective"])
def test_backward_scans_compute_again_what_is_not_saved(choice: Choice):
    step, state, batch = stacked_mlp()
    traced = microbatched.traced_of(step, state, batch)
    before = stacked_shapes(traced, microbatched.scan_of(traced))
    result = rewritten(traced, choice)
    check(result.traced.graph)
    after = stacked_shapes(result.traced, result.scan)
    rows = (4, 8)  # examples of a micro-batch, features
    assert after == [rows] * (1 if choice == "layer" else 2)  # the carry; and with it the product's result
    assert sum(map(math.prod, after)) <= sum(map(math.prod, before)) + (choice == "selective") * math.prod(rows)
    outer = microbatched.op_of(result.traced.graph.block, result.scan)
    forward = forward_ops(outer, result.traced.graph.values)
    (back,) = [op for op in outer.bodies[0].ops if op.name == "scan" and op.index not in forward]
    products = [op.name for op in back.bodies[0].ops].count("dot_general")
    assert products == 2 + (choice == "layer")
    assert_same(traced, result.traced, (state, batch))


def test_draws_in_a_scan_are_the_same_again():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        keys = jax.random.split(jax.random.wrap_key_data(batch["key"][0]), 3)

        def layer(x: jax.Array, p: Any) -> Any:
            w, key = p
            return jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.7, x.shape), None

        x, _ = jax.lax.scan(layer, batch["x"], (params, keys))
        return (x**2).mean()

    step, state = microbatched.step_of(loss_fn, normal(0, 3, 8, 8), 2, SGD)
    batch = {"x": normal(7, 8, 8), "key": jnp.arange(16, dtype=jnp.uint32).reshape(8, 2)}
    traced = microbatched.traced_of(step, state, batch)
    result = rewritten(traced, "layer")
    assert result.copies
    assert_same(traced, result.traced, (state, batch))


def test_what_else_is_read_of_a_scan_stays():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            x = jnp.tanh(x @ w)
            return x, x.mean()

        x, means = jax.lax.scan(layer, batch["x"], params)
        return (x**2).mean() + (means**2).sum()

    step, state = microbatched.step_of(loss_fn, normal(0, 3, 8, 8), 2, SGD)
    batch = {"x": normal(7, 8, 8)}
    traced = microbatched.traced_of(step, state, batch)
    result = rewritten(traced, "layer")
    assert () in stacked_shapes(result.traced, result.scan)
    assert_same(traced, result.traced, (state, batch))
