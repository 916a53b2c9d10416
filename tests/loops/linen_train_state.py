"""linen with a `TrainState`: a text classifier with dropout, clipped gradients and a learning-rate schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from tests.loops.base import Arrays, Loop, rng_of

VOCAB, SEQ, CLASSES = 64, 8, 4


class Classifier(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Embed(VOCAB, self.width)(tokens)
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(num_heads=2, deterministic=True)(nn.LayerNorm()(x))
            x = x + nn.Dropout(0.1, deterministic=not train)(y)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(axis=1))


class TrainState(train_state.TrainState):
    dropout_key: jax.Array


def create(key: jax.Array) -> TrainState:
    model = Classifier()
    params_key, dropout_key = jax.random.split(key)
    params = model.init(params_key, jnp.zeros((1, SEQ), jnp.int32), train=False)["params"]
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=5, decay_steps=50)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx, dropout_key=dropout_key)


def train_step(state: TrainState, batch: Arrays) -> tuple[TrainState, dict[str, jax.Array]]:
    key = jax.random.fold_in(state.dropout_key, state.step)

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, batch["tokens"], train=True, rngs={"dropout": key})
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def eval_step(state: TrainState, batch: Arrays) -> dict[str, jax.Array]:
    logits = state.apply_fn({"params": state.params}, batch["tokens"], train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"loss": loss.mean(), "accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def make_batch(seed: int, rows: int) -> Arrays:
    rng = rng_of(seed)
    tokens = rng.integers(0, VOCAB, (rows, SEQ), dtype="int32")
    return {"tokens": tokens, "label": (tokens.sum(1) % CLASSES).astype("int32")}


LOOP = Loop("linen_train_state", lambda: (create(jax.random.key(0)),), train_step, eval_step, make_batch)
