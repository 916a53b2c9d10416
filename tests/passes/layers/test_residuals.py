"""Backward scans compute again what is cheaper to compute than to save, and gradients stay what they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from alpa_lite.ir.graph import Graph
from alpa_lite.models import MODELS
from alpa_lite.passes.ir.evaluation import evaluate_block
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.layers.residuals import reduce_residuals
from alpa_lite.passes.tracing import tracing


def saved_bytes(graph: Graph) -> int:
    """Bytes of everything that scans of the top block stack."""
    scans = [ScanView(op) for op in graph.block.ops if op.name == "scan"]
    return sum(graph.values[stack].nbytes for view in scans for _, stack in view.ys)


def stacks(graph: Graph) -> list[int]:
    return [len(ScanView(op).ys) for op in graph.block.ops if op.name == "scan"]


def gelu_layers(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w), None

    return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)


def norm_layers(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return x + jnp.tanh(normed @ w) * jax.nn.sigmoid(normed), None

    return jnp.sum(jax.lax.scan(layer, x, params, reverse=True)[0] ** 2)


def recurrent(params: Any, x: Any) -> Any:
    def cell(carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(h @ params[0].repeat(4, 1) + x.repeat(4, -1), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), h

    x = x.reshape(4, -1, x.shape[-1])
    zero = jnp.zeros_like(x[0])
    return jnp.sum(jax.lax.scan(cell, (zero, zero), x)[1] ** 2)


def accumulated(params: Any, x: Any) -> Any:
    def part(total: Any, x: Any) -> Any:
        return total + gelu_layers(params, x), None

    return jax.lax.scan(part, 0.0, x.reshape(2, -1, x.shape[-1]))[0]


def named(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = checkpoint_name(jnp.sin(x @ w), "y")
        return x + y * y * 3.0, None

    return jnp.sum(jax.lax.scan(layer, x, params)[0])


LOSSES = (gelu_layers, norm_layers, recurrent, accumulated, named)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_step_as_it_was(loss: Any) -> None:
    params, x = (jax.random.normal(jax.random.key(n), (4, 8, 8), jnp.float32) / 3 for n in range(2))
    x = x.reshape(-1, 8)

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return params - 0.1 * grads, value

    traced = tracing.trace(step, (params, x), {})
    reduced = reduce_residuals(traced)
    before, after = (evaluate_block(g.block, (params, x, *g.constants)) for g in (traced.graph, reduced.graph))
    for ours, theirs in zip(after, before, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
    assert saved_bytes(reduced.graph) <= saved_bytes(traced.graph)


def test_of_gelu_its_argument_alone_is_saved() -> None:
    """x and x @ w are all that is stacked of the activations."""
    params, x = jnp.zeros((4, 64, 64)), jnp.zeros((32, 64))
    traced = tracing.trace(lambda p, x: (jax.grad(gelu_layers)(p, x), x), (params, x), {})
    assert stacks(traced.graph)[0] > 4
    assert stacks(reduce_residuals(traced).graph)[0] == 2


def test_what_the_user_named_stays_saved() -> None:
    params, x = jnp.zeros((4, 8, 8)), jnp.zeros((4, 8))
    graph = reduce_residuals(tracing.trace(jax.grad(named), (params, x), {})).graph
    (view, *_) = [ScanView(op) for op in graph.block.ops if op.name == "scan"]
    makers = {value: op.name for op in view.body.ops for value in op.results}
    assert "name" in {makers.get(atom) for atom, _ in view.ys if isinstance(atom, int)}


def masked(params: Any, x: Any) -> Any:
    mask = jnp.tril(jnp.ones((512, 512), bool))

    def layer(x: Any, w: Any) -> Any:
        scores = jnp.where(mask, jnp.einsum("bid,bjd->bij", x @ w, x), -jnp.inf)
        return x + jnp.einsum("bij,bjd->bid", jax.nn.softmax(scores), x), None

    return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)


def test_masks_are_made_within_the_loop_from_the_smallest_values() -> None:
    """JAX broadcasts mask and fill to the shape of the scores outside of the loops; no scan reads that."""
    params, x = jax.random.normal(jax.random.key(0), (2, 8, 8)) / 3, jax.random.normal(jax.random.key(1), (8, 512, 8))
    traced = tracing.trace(jax.value_and_grad(masked), (params, x), {})
    reduced = reduce_residuals(traced)

    def largest(graph: Graph) -> int:
        scans = [ScanView(op) for op in graph.block.ops if op.name == "scan"]
        atoms = [atom for view in scans for atom, _ in view.consts if isinstance(atom, int)]
        return max((graph.values[atom].nbytes for atom in atoms), default=0)

    assert largest(traced.graph) == 8 * 4 * 512 * 512
    assert largest(reduced.graph) <= 512 * 512
    before, after = (evaluate_block(g.block, (params, x, *g.constants)) for g in (traced.graph, reduced.graph))
    for ours, theirs in zip(after, before, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_steps_without_scans_are_the_same_object() -> None:
    traced = tracing.trace(lambda w, x: w + jnp.sin(x), (jnp.zeros(4), jnp.zeros(4)), {})
    assert reduce_residuals(traced) is traced


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_transformers_save_about_half(name: str) -> None:
    step, args = MODELS[name].abstract(next(iter(MODELS[name].sizes)), 8, scan=True)[:2]
    traced = tracing.trace(step, args, {})
    assert saved_bytes(reduce_residuals(traced).graph) < 0.75 * saved_bytes(traced.graph)
