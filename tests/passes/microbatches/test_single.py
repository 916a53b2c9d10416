"""One micro-batch: whatever the step, its forward and backward pass are in the loop, and its update is behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.microbatches.states import is_intensive
from gallery.steps import cross_entropy, optimizer_step
from tests.comparing import assert_close_in_norm
from tests.passes.microbatches.test_loop import accumulated
from tests.passes.numerics import outputs

VOCAB, WIDE, TOKENS = 11, 8, 6


def clipped(loss: Any, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step that clips gradients by their norm, which waits for all of them."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"embed": (VOCAB, WIDE), "inner": (WIDE, WIDE), "head": (WIDE, VOCAB)}
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, params.items(), strict=True)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    return optimizer_step(loss, optimizer), (params, optimizer.init(params), batch)


def tokens_of(*shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), shape, 0, VOCAB)


def logits_of(params: Any, x: jax.Array) -> jax.Array:
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), x @ jnp.swapaxes(x, -1, -2), -1e9)
    return jnp.tanh(jax.nn.softmax(scores) @ x @ params["inner"]) @ params["head"]


def taken(params: Any, tokens: jax.Array) -> jax.Array:
    return cross_entropy(logits_of(params, params["embed"][tokens])[..., :-1, :], tokens[..., 1:])


def unbatched(params: Any, tokens: jax.Array) -> jax.Array:
    return taken(params, tokens[0])


def drawn(params: Any, key: jax.Array) -> jax.Array:
    """There is no batch."""
    x = jax.random.normal(key, (TOKENS, WIDE))
    return jnp.mean(logits_of(params, x) ** 2) + jnp.mean(params["embed"] ** 2)


def contrasted(params: Any, rows: jax.Array) -> jax.Array:
    """Every example is compared with every other, which has no form in a part of the batch."""
    scores = (x := jnp.tanh(rows @ params["inner"])) @ x.T
    return cross_entropy(scores, jnp.arange(len(rows)))


STEPS = {
    "taken": (taken, tokens_of(1, TOKENS), 5),
    "without_examples": (taken, tokens_of(TOKENS), 5),
    "unbatched": (unbatched, tokens_of(1, TOKENS), 5),
    "drawn": (drawn, jax.random.key(3), 5),
    "contrasted": (contrasted, jax.random.normal(jax.random.key(4), (4, WIDE)), 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_passes_are_in_the_loop_and_the_update_is_not(name: str) -> None:
    loss, batch, products = STEPS[name]
    step, args = clipped(loss, batch)
    traced, found = accumulated(step, args, 1, batch_argnums=() if name == "drawn" else (2,))
    top, scan = found.traced.graph.block.ops, scan_op(found.traced, found.scan)
    heavy = [op for op in scan.bodies[0].ops if is_intensive(op)]
    assert len(heavy) >= products and not any(is_intensive(op) for op in top if op is not scan)
    assert not any(op.name == "sqrt" for op in scan.bodies[0].ops)  # of the norm, and of Adam
    shapes = [found.traced.graph.values[value].shape for value in scan.results]
    assert all(shape == () or shape in {w.shape for w in args[0].values()} for shape in shapes)  # no activations
    assert_close_in_norm(outputs(found.traced, args), outputs(traced, args))


def test_gradients_by_hand_are_in_the_loop() -> None:
    """JAX marks nothing there: how the batch is cut says what is the update."""

    def step(w: Any, rows: jax.Array) -> Any:
        error = rows @ w - 1.0
        return w - 0.1 * rows.T @ error, (error**2).mean()

    args = jax.random.normal(jax.random.key(0), (3, 4)), jax.random.normal(jax.random.key(1), (5, 3))
    traced, found = accumulated(step, args, 1)
    top = found.traced.graph.block.ops
    scan = scan_op(found.traced, found.scan)
    assert sum(map(is_intensive, scan.bodies[0].ops)) == 2
    assert any(op.name == "sub" for op in top[top.index(scan) + 1 :])
    assert_close_in_norm(outputs(found.traced, args), outputs(traced, args))
