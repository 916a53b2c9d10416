"""What the operations of a step say about its arguments: weights that do not come back are told from the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_lite.passes.tracing import trace

ROWS = 16


def roles(loss: Any, base: Any, batch: Any) -> dict[str, str]:
    """The roles of the arguments of a step that descends a loss in a state `w`."""

    def step(state: Any, base: Any, batch: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(lambda w: loss(w, base, batch))(state["w"])
        return {"w": state["w"] - 0.1 * gradient}, value

    traced = trace(step, ({"w": jnp.ones((ROWS, ROWS))}, base, batch), {})
    return {argument.path.split("[")[0].split(".")[0]: argument.role for argument in traced.arguments}


def adapted(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(batch @ base["a"] + batch @ w) ** 2)


def transposed(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    kernel = (base["a"].astype(jnp.bfloat16).astype(jnp.float32) * 2).T.T
    return jnp.mean((batch @ kernel @ w) ** 2)


def scanned(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(lax.scan(lambda x, _: (jnp.tanh(x @ base["a"]) @ w, None), batch, None, length=2)[0] ** 2)


def looked_up(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((base["a"][batch[:, 0].astype(jnp.int32)] @ w) ** 2)


def against_targets(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    """A product that sums over the examples: both are examples."""
    return -jnp.einsum("bc,bc->", jax.nn.log_softmax(batch @ w), base["a"])


@pytest.mark.parametrize("loss", [adapted, transposed, scanned, looked_up])
def test_weights_with_as_many_rows_as_there_are_examples_are_no_batch(loss):
    found = roles(loss, {"a": jnp.ones((ROWS, ROWS))}, jnp.ones((ROWS, ROWS)))
    assert found == {"state": "state", "base": "frozen", "batch": "batch"}


def test_weights_of_other_sizes_are_no_batch():
    found = roles(adapted, {"a": jnp.ones((ROWS, ROWS))}, jnp.ones((2 * ROWS, ROWS)))
    assert found == {"state": "state", "base": "frozen", "batch": "batch"}


def test_targets_that_are_summed_against_predictions_are_of_the_batch():
    found = roles(against_targets, {"a": jnp.ones((ROWS, ROWS))}, jnp.ones((ROWS, ROWS)))
    assert found == {"state": "state", "base": "batch", "batch": "batch"}


def test_what_is_not_read_as_a_weight_is_data():
    def pairs(w, base, batch):
        return jnp.mean((batch @ w @ base["a"].T) ** 2)

    found = roles(pairs, {"a": jnp.ones((8, ROWS))}, jnp.ones((2 * ROWS, ROWS)))
    assert found == {"state": "state", "base": "batch", "batch": "batch"}
