"""Images and batch norm in linen: `batch_stats` are part of the state, and have the statistics of the whole batch.

On one mesh every device normalises by the mean and variance over all devices' examples, as one device would.

python examples/vision_batch_norm.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import alpa_lite

SIZE, CLASSES, BATCH = 8, 4, 32


class ResNet(nn.Module):
    """Two residual blocks."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        for channels in (8, 16):
            y = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            y = nn.Conv(channels, (3, 3), strides=(2, 2), use_bias=False)(y)
            x = y + nn.Conv(channels, (1, 1), strides=(2, 2), use_bias=False)(x)
        return nn.Dense(CLASSES)(nn.relu(x).mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    """The usual state, with the running statistics."""

    batch_stats: Any


@alpa_lite.parallelize
def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
    """One step, written for one device."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), updates

    (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), loss


def make_batch(seed: int) -> dict[str, np.ndarray]:
    """Noise whose brightness is its class."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, BATCH).astype("int32")
    image = rng.normal(size=(BATCH, SIZE, SIZE, 3)).astype("float32") + label[:, None, None, None]
    return {"image": image, "label": label}


def main(steps: int = 30) -> list[float]:
    """The losses of training."""
    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)), train=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.adam(1e-2),
        batch_stats=variables["batch_stats"],
    )
    losses = []
    for step in range(steps):
        state, loss = train_step(state, make_batch(step))
        losses.append(float(loss))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
