"""Haiku with state: `transform_with_state`, batch norm, dropout with a key that the loop splits."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.loops.base import Arrays, Loop, images

SIZE, CLASSES = 8, 4


class TrainingState(NamedTuple):
    params: Any
    state: hk.State
    opt_state: optax.OptState
    key: jax.Array


def network(x: jax.Array, is_training: bool) -> jax.Array:
    for channels in (8, 16):
        shortcut = hk.Conv2D(channels, 1, stride=2)(x)
        y = hk.Conv2D(channels, 3, stride=2, with_bias=False)(x)
        y = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(y, is_training)
        x = jax.nn.relu(y) + shortcut
    x = x.mean(axis=(1, 2))
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
    return hk.Linear(CLASSES)(x)


NETWORK = hk.transform_with_state(network)
TX = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9))


def loss_fn(params: Any, state: Any, key: jax.Array, batch: Arrays) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    logits, state = NETWORK.apply(params, state, key, batch["image"], is_training=True)
    one_hot = jax.nn.one_hot(batch["label"], CLASSES)
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(one_hot, 0.1)).mean(), (state, logits)


def train_step(train_state: TrainingState, batch: Arrays) -> tuple[TrainingState, dict[str, jax.Array]]:
    key, dropout_key = jax.random.split(train_state.key)
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (state, logits)), grads = grad_fn(train_state.params, train_state.state, dropout_key, batch)
    updates, opt_state = TX.update(grads, train_state.opt_state, train_state.params)
    params = optax.apply_updates(train_state.params, updates)
    correct = (logits.argmax(-1) == batch["label"]).mean()
    return TrainingState(params, state, opt_state, key), {"loss": loss, "accuracy": correct}


def eval_step(params: Any, state: Any, batch: Arrays) -> jax.Array:
    logits, _ = NETWORK.apply(params, state, None, batch["image"], is_training=False)
    return (logits.argmax(-1) == batch["label"]).sum()


def make_state() -> tuple[Any, ...]:
    init_key, key = jax.random.split(jax.random.PRNGKey(0))
    params, state = NETWORK.init(init_key, jnp.zeros((1, SIZE, SIZE, 3)), is_training=True)
    return (TrainingState(params, state, TX.init(params), key),)


def make_batch(seed: int, rows: int) -> Arrays:
    return images(seed, rows, SIZE, 3, CLASSES)


LOOP = Loop(
    "haiku_state", make_state, train_step, eval_step, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0].params, carried[0].state, batch),
)  # fmt: skip
