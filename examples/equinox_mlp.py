"""Equinox: the arrays of a module are the state; the rest of it is fixed, and joined with them within the step.

python examples/equinox_mlp.py
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import alpa_lite

FEATURES, BATCH = 16, 64
tx = optax.adam(1e-2)


def make_step(static: Any) -> Any:
    """The train step of a module whose arrays were taken out; what `eqx.filter_jit` does for `jax.jit`."""

    @alpa_lite.parallelize
    def train_step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            model = eqx.combine(params, static)
            return ((jax.vmap(model)(x)[:, 0] - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(params, updates), opt_state, loss

    return train_step


def make_batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The target is the largest feature."""
    x = np.random.default_rng(seed).normal(size=(BATCH, FEATURES)).astype("float32")
    return x, x.max(axis=1)


def main(steps: int = 30) -> list[float]:
    """The losses of training."""
    model = eqx.nn.MLP(FEATURES, 1, width_size=64, depth=2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    train_step, opt_state, losses = make_step(static), tx.init(params), []
    for step in range(steps):
        params, opt_state, loss = train_step(params, opt_state, *make_batch(step))
        losses.append(float(loss))
    model = eqx.combine(params, static)  # a module again, with sharded arrays
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; one example: {float(model(make_batch(0)[0][0])[0]):.3f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
