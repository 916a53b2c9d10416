"""An MLP: its step and arguments."""

import jax
import jax.numpy as jnp
import numpy as np


def loss_of(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return ((x - batch["y"]) ** 2).mean()


def step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], loss


def arguments(layers=4, width=32, batch=16):
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(width, width)).astype(np.float32) / 6 for _ in range(layers)]
    return params, {name: rng.normal(size=(batch, width)).astype(np.float32) for name in "xy"}
