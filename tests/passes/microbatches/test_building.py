"""What the loop over micro-batches traces anew, and what it has traced before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite
from alpa_lite.passes.tracing import conversion


def dropout(layers: int) -> tuple[Any, tuple[Any, ...]]:
    """A step with a draw of its own in each layer."""

    def step(weights: Any, key: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            x = batch
            for number, w in enumerate(weights):
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, x.shape)
                x = jnp.where(kept, jnp.tanh(x @ w), 0.0)
            return (x**2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [jax.ShapeDtypeStruct((16, 16), jnp.float32) for _ in range(layers)]
    return step, (weights, jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((32, 16), jnp.float32))


def test_equal_draws_are_traced_once(monkeypatch) -> None:
    """The draw of a micro-batch takes many operations, which are the same in every layer."""
    count = [0]
    original = conversion.graph_of

    def counted(*given: Any, **named: Any) -> Any:
        count[0] += 1
        return original(*given, **named)

    monkeypatch.setattr(conversion, "graph_of", counted)
    traced = []
    for layers in (2, 6):
        step, args = dropout(layers)
        count[0] = 0
        plan = alpa_lite.make_plan(
            step, *args, cluster=alpa_lite.Cluster.preset("a100").part(2), method=alpa_lite.Sharded(), verify="off",
            num_microbatches=2,
        )  # fmt: skip
        assert plan.num_microbatches == 2
        traced.append(count[0])
    assert traced[1] < traced[0] + 4  # four more layers
