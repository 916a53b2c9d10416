"""Evidence of a step's operations about its arguments: weights that do not come back are told from the batch."""

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


def pairs(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    """Rows of both are compared with one another, as data are."""
    return jnp.mean((batch @ w @ base["a"].T) ** 2)


@pytest.mark.parametrize(
    ("loss", "shapes", "role"),
    [
        *[(loss, ((ROWS, ROWS), (ROWS, ROWS)), "frozen") for loss in (adapted, transposed, scanned, looked_up)],
        (adapted, ((ROWS, ROWS), (2 * ROWS, ROWS)), "frozen"),
        (against_targets, ((ROWS, ROWS), (ROWS, ROWS)), "batch"),
        (pairs, ((8, ROWS), (2 * ROWS, ROWS)), "batch"),
    ],
)
def test_weights_that_do_not_come_back_are_told_from_the_batch(loss, shapes, role):
    """Though they have as many rows as there are examples."""
    found = roles(loss, {"a": jnp.ones(shapes[0])}, jnp.ones(shapes[1]))
    assert found == {"state": "state", "base": role, "batch": "batch"}
