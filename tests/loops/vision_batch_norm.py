"""A small residual network in linen with `batch_stats` in the `TrainState`, as the Flax ImageNet example has them.

Its activations are smooth: where rounding turns the sign of one pre-activation, the derivative of a relu jumps, and a
bias differed by 1.4e-5 after 20 steps in one run of the tests, on another processor.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from tests.loops.base import Arrays, Loop, images

SIZE, CLASSES = 8, 4


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.silu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        for channels in (8, 16):
            stride = 1 if channels == x.shape[-1] else 2
            y = nn.silu(norm()(nn.Conv(channels, (3, 3), (stride, stride), use_bias=False)(x)))
            y = norm(scale_init=nn.initializers.zeros)(nn.Conv(channels, (3, 3), use_bias=False)(y))
            if stride != 1:
                x = norm()(nn.Conv(channels, (1, 1), (stride, stride), use_bias=False)(x))
            x = nn.silu(x + y)
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()


def train_step(state: TrainState, batch: Arrays) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, tuple[Any, jax.Array]]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return cross_entropy(logits, batch["label"]) + 0.5e-4 * penalty, (updates, logits)

    (loss, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def eval_step(state: TrainState, batch: Arrays) -> dict[str, jax.Array]:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False, mutable=False)
    return {"loss": cross_entropy(logits, batch["label"]), "logits": logits}


def make_state() -> tuple[Any, ...]:
    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)), train=False)
    tx = optax.sgd(optax.cosine_decay_schedule(0.05, 100), momentum=0.9, nesterov=True)
    params, batch_stats = variables["params"], variables["batch_stats"]
    return (TrainState.create(apply_fn=model.apply, params=params, tx=tx, batch_stats=batch_stats),)


def make_batch(seed: int, rows: int) -> Arrays:
    return images(seed, rows, SIZE, 3, CLASSES)


LOOP = Loop("vision_batch_norm", make_state, train_step, eval_step, make_batch)
