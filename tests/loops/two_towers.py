"""A contrastive model of two towers, trained for several steps within one call: `lax.scan` over stacked batches.

The loss compares every example with every other of its batch. Dims: inner steps, examples, features.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.loops.base import Arrays, Loop, rng_of

INNER, IMAGE, VOCAB, SEQ, DIM = 2, 12, 32, 6, 16


class Towers(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array, text: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        left = nn.Dense(DIM)(nn.relu(nn.Dense(32)(image)))
        right = nn.Dense(DIM)(nn.relu(nn.Dense(32)(nn.Embed(VOCAB, 32)(text).mean(axis=-2))))
        scale = self.param("scale", nn.initializers.constant(1.0), ())
        return unit(left), unit(right), jnp.exp(scale)


def unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


MODEL: Any = Towers()
TX = optax.sgd(0.05, momentum=0.9)


def contrastive_loss(params: Any, batch: Arrays) -> jax.Array:
    left, right, scale = MODEL.apply({"params": params}, batch["image"], batch["text"])
    logits = scale * left @ right.T
    labels = jnp.arange(logits.shape[0])
    losses = optax.softmax_cross_entropy_with_integer_labels
    return (losses(logits, labels).mean() + losses(logits.T, labels).mean()) / 2


def train_step(state: Any, batches: Arrays) -> tuple[Any, jax.Array]:
    """One call, `INNER` steps; `batches` has the steps in front."""

    def one(state: Any, batch: Arrays) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(contrastive_loss)(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.lax.scan(one, state, batches)


def eval_step(params: Any, image: jax.Array, text: jax.Array) -> dict[str, jax.Array]:
    """Retrieval: for each image the text that is nearest."""
    left, right, _ = MODEL.apply({"params": params}, image, text)
    nearest = (left @ right.T).argmax(-1)
    return {"nearest": nearest, "recall": (nearest == jnp.arange(nearest.shape[0])).mean()}


def make_state() -> tuple[Any, ...]:
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, IMAGE)), jnp.zeros((1, SEQ), jnp.int32))["params"]
    return ((params, TX.init(params)),)


def make_batch(seed: int, rows: int) -> Arrays:
    rng = rng_of(seed)
    text = rng.integers(0, VOCAB, (INNER, rows, SEQ), dtype="int32")
    image = rng.standard_normal((INNER, rows, IMAGE), "float32") + text[..., :1] / VOCAB
    return {"image": image.astype("float32"), "text": text}


LOOP = Loop(
    "two_towers", make_state, train_step, eval_step, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0][0], batch["image"][0], batch["text"][0]),
)  # fmt: skip
