"""Backward scans compute again what is cheaper to compute than to save, and gradients stay what they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from alpa_lite.ir.graph import Graph
from alpa_lite.models import MODELS
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.layers.residuals import reduce_residuals
from alpa_lite.passes.tracing import tracing
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import assert_close_in_norm
from tests.passes.numerics import outputs


def scans_of(graph: Graph) -> list[ScanView]:
    return [ScanView(op) for op in graph.block.ops if op.name == "scan"]


def saved_bytes(graph: Graph) -> int:
    """Bytes of everything that scans of the top block stack."""
    return sum(graph.values[stack].nbytes for view in scans_of(graph) for _, stack in view.ys)


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


def masked(params: Any, x: Any) -> Any:
    mask = jnp.tril(jnp.ones((512, 512), bool))

    def layer(x: Any, w: Any) -> Any:
        scores = jnp.where(mask, jnp.einsum("bid,bjd->bij", x @ w, x), -jnp.inf)
        return x + jnp.einsum("bij,bjd->bid", jax.nn.softmax(scores), x), None

    return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)


def assert_same(loss: Any, params: Any, x: Any) -> tuple[Graph, Graph]:
    """The graphs of a step of descent before and after, which compute the same; the second saves no more."""
    traced = tracing.trace(sgd(loss), (params, x), {})
    reduced = reduce_residuals(traced)
    got, want = (outputs(t, (params, x, *t.graph.constants)) for t in (reduced, traced))
    assert_close_in_norm(got, want)
    assert saved_bytes(reduced.graph) <= saved_bytes(traced.graph)
    return traced.graph, reduced.graph


@pytest.mark.parametrize("loss", [gelu_layers, norm_layers, recurrent, accumulated], ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_step_as_it_was(loss: Any) -> None:
    assert_same(loss, normal(0, 4, 8, 8) / 3, normal(1, 32, 8) / 3)


def test_of_gelu_its_argument_alone_is_saved() -> None:
    """x and x @ w are all that is stacked of the activations."""
    params, x = jnp.zeros((4, 64, 64)), jnp.zeros((32, 64))
    traced = tracing.trace(lambda p, x: (jax.grad(gelu_layers)(p, x), x), (params, x), {})
    before, after = (len(scans_of(t.graph)[0].ys) for t in (traced, reduce_residuals(traced)))
    assert before > 4 and after == 2


def test_what_the_user_named_stays_saved() -> None:
    _, graph = assert_same(named, normal(0, 4, 8, 8) / 3, normal(1, 4, 8))
    view = scans_of(graph)[0]
    makers = {value: op.name for op in view.body.ops for value in op.results}
    assert "name" in {makers.get(atom) for atom, _ in view.ys if isinstance(atom, int)}


def test_masks_are_made_within_the_loop_from_the_smallest_values() -> None:
    """JAX broadcasts mask and fill to the shape of the scores outside of the loops; no scan reads that."""
    graphs = assert_same(masked, normal(0, 2, 8, 8) / 3, normal(1, 8, 512, 8))
    before, after = (
        max([0, *(graph.values[a].nbytes for view in scans_of(graph) for a, _ in view.consts if isinstance(a, int))])
        for graph in graphs
    )
    assert before == 8 * 4 * 512 * 512 and after <= 512 * 512


def test_steps_without_scans_are_the_same_object() -> None:
    traced = tracing.trace(lambda w, x: w + jnp.sin(x), (jnp.zeros(4), jnp.zeros(4)), {})
    assert reduce_residuals(traced) is traced


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_transformers_save_about_half(name: str) -> None:
    step, args = MODELS[name].abstract(next(iter(MODELS[name].sizes)), 8, scan=True)[:2]
    traced = tracing.trace(step, args, {})
    assert saved_bytes(reduce_residuals(traced).graph) < 0.75 * saved_bytes(traced.graph)
