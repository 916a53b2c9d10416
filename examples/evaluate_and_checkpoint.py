"""A whole loop: state that is born sharded, evaluation where it lies, and checkpoints under another plan.

python examples/evaluate_and_checkpoint.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import alpa_lite
from alpa_lite.checkpoint import CheckpointManager

FEATURES, CLASSES, BATCH, EPOCH = 16, 4, 64, 10
Arrays = dict[str, np.ndarray]


class MLP(nn.Module):
    """One hidden layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(64)(x)))


MODEL, TX = MLP(), optax.adam(1e-2)


def create_state(key: jax.Array) -> TrainState:
    params = MODEL.init(key, jnp.zeros((1, FEATURES)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=TX)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    logits: Any = MODEL.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    """One step, written for one device."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def make_batch(seed: int, rows: int = BATCH) -> Arrays:
    """The class of an example is the largest of its first features."""
    x = np.random.default_rng(seed).normal(size=(rows, FEATURES)).astype("float32")
    return {"x": x, "y": x[:, :CLASSES].argmax(1).astype("int32")}


def batches(epoch: int) -> Iterator[Arrays]:
    """The batches of an epoch; the last one is short."""
    for number in range(EPOCH):
        yield make_batch(EPOCH * epoch + number, 24 if number == EPOCH - 1 else BATCH)


def restored(manager: CheckpointManager, step: Any) -> TrainState:
    """The newest checkpoint, each array where the plan of a step wants it."""
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    return manager.restore(shapes, shardings=step.shardings(shapes, make_batch(0)).arguments[0]).state


def main(epochs: int = 3) -> list[float]:
    """The losses of evaluation after each epoch, and after one more under another plan."""
    step = alpa_lite.parallelize(train_step)
    state = step.init(create_state, jax.random.key(0), rest=(make_batch(0),))
    evaluate = alpa_lite.parallelize(loss_fn, state_from=step)
    losses = [float(evaluate(state.params, make_batch(1000)))]
    with tempfile.TemporaryDirectory() as name, CheckpointManager(name, keep=2) as manager:
        for epoch in range(epochs):
            for batch in step.prefetch(batches(epoch)):
                state, _ = step(state, batch)
            losses.append(float(evaluate(state.params, make_batch(1000))))
            manager.save(epoch, state)
        other = alpa_lite.parallelize(train_step, method=alpa_lite.Zero(stage=3))
        state = restored(manager, other)
    for batch in batches(epochs):
        state, _ = other(state, batch)
    losses.append(float(alpa_lite.parallelize(loss_fn, state_from=other)(state.params, make_batch(1000))))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
