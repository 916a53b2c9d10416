"""Equinox: the arrays of a module are state, the rest of it is static and joined again within the step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.loops.base import Loop, rng_of

INPUTS, SEQ = 6, 8


class Regressor(eqx.Module):
    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(INPUTS, width, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[1])
        self.mlp = eqx.nn.MLP(width, width, 2 * width, depth=1, activation=jax.nn.gelu, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 1, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        """One example: (SEQ, INPUTS) to a scalar."""
        x = jax.vmap(self.embed)(x)
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        x = x + jax.vmap(self.mlp)(x)
        return self.head(x.mean(axis=0))[0]


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))
PARAMS, STATIC = eqx.partition(Regressor(16, jax.random.key(0)), eqx.is_inexact_array)


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    model = eqx.combine(params, STATIC)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def train_step(params: Any, opt_state: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, Any, jax.Array]:
    loss, grads = eqx.filter_value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state, loss


def eval_step(params: Any, x: jax.Array) -> jax.Array:
    """Predictions."""
    return jax.vmap(eqx.combine(params, STATIC))(x)


def make_state() -> tuple[Any, ...]:
    return PARAMS, TX.init(PARAMS)


def make_batch(seed: int, rows: int) -> Any:
    x = rng_of(seed).standard_normal((rows, SEQ, INPUTS), "float32")
    return x, x.mean(axis=(1, 2)) + x.max(axis=(1, 2))


LOOP = Loop(
    "equinox_partition", make_state, train_step, eval_step, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0], batch[0]),
)  # fmt: skip
