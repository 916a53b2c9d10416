"""Haiku: a transformed function with dropout; parameters, optimizer state and a key are arguments of the step.

python examples/haiku_mlp.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
import optax

import alpa_lite

FEATURES, CLASSES, BATCH = 16, 4, 64


class State(NamedTuple):
    params: Any
    opt_state: optax.OptState
    key: jax.Array


@hk.transform
def network(x: jax.Array, is_training: bool) -> jax.Array:
    x = jax.nn.relu(hk.Linear(64)(x))
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
    return hk.Linear(CLASSES)(x)


tx = optax.adam(1e-2)


@alpa_lite.parallelize
def train_step(state: State, batch: dict[str, Any]) -> tuple[State, jax.Array]:
    """One step, written for one device."""
    key, dropout_key = jax.random.split(state.key)

    def loss_fn(params: hk.Params) -> jax.Array:
        logits = network.apply(params, dropout_key, batch["x"], True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt_state = tx.update(grads, state.opt_state)
    return State(optax.apply_updates(state.params, updates), opt_state, key), loss


def make_batch(seed: int) -> dict[str, np.ndarray]:
    """The class of an example is the largest of its first features."""
    x = np.random.default_rng(seed).normal(size=(BATCH, FEATURES)).astype("float32")
    return {"x": x, "y": x[:, :CLASSES].argmax(1).astype("int32")}


def main(steps: int = 30) -> list[float]:
    """The losses of training."""
    init_key, key = jax.random.split(jax.random.key(0))
    params = network.init(init_key, make_batch(0)["x"], True)
    state, losses = State(params, tx.init(params), key), []
    for step in range(steps):
        state, loss = train_step(state, make_batch(step))
        losses.append(float(loss))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
