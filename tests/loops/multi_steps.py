"""`optax.MultiSteps`: gradients of four calls are averaged before an update; a bag-of-bytes language model."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.loops.base import Arrays, Loop, rng_of

VOCAB, SEQ = 32, 8


class RecurrentModel(nn.Module):
    """A gated recurrent language model: `nn.RNN` is a scan over positions."""

    width: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, self.width)(tokens)
        x = nn.RNN(nn.GRUCell(self.width))(x)
        return nn.Dense(VOCAB)(x)


MODEL: Any = RecurrentModel()
TX = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2, momentum=0.9)), every_k_schedule=4)


def loss_fn(params: Any, batch: Arrays) -> jax.Array:
    logits = MODEL.apply({"params": params}, batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def train_step(params: Any, opt_state: optax.MultiStepsState, batch: Arrays) -> tuple[Any, Any, dict[str, Any]]:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, {"loss": loss, "updated": TX.has_updated(opt_state)}


def eval_step(params: Any, batch: Arrays) -> jax.Array:
    return jnp.exp(loss_fn(params, batch))


def make_state() -> tuple[Any, ...]:
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))["params"]
    return params, TX.init(params)


def make_batch(seed: int, rows: int) -> Arrays:
    starts = rng_of(seed).integers(0, VOCAB, (rows, 1), dtype="int32")
    steps = rng_of(seed + 1).integers(1, 3, (rows, 1), dtype="int32")
    return {"tokens": ((starts + steps * jnp.arange(SEQ + 1)) % VOCAB).__array__()}


LOOP = Loop(
    "multi_steps", make_state, train_step, eval_step, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0], batch),
)  # fmt: skip
