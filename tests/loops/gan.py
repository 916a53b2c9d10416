"""Two optimizers in one step: a generator and a discriminator, each with its own `TrainState`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.loops.base import Loop, rng_of

NOISE, DIM = 4, 8


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        h = nn.leaky_relu(nn.Dense(32)(z))
        return nn.tanh(nn.Dense(DIM)(nn.leaky_relu(nn.Dense(32)(h))))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.leaky_relu(nn.Dense(32)(x))
        return nn.Dense(1)(nn.leaky_relu(nn.Dense(32)(h)))[:, 0]


def train_step(
    generator: TrainState, discriminator: TrainState, real: jax.Array, key: jax.Array
) -> tuple[TrainState, TrainState, dict[str, jax.Array]]:
    first, second = jax.random.split(key)

    def discriminator_loss(params: Any) -> jax.Array:
        fake = generator.apply_fn({"params": generator.params}, jax.random.normal(first, (real.shape[0], NOISE)))
        on_real = discriminator.apply_fn({"params": params}, real)
        on_fake = discriminator.apply_fn({"params": params}, fake)
        return jnp.mean(jax.nn.softplus(-on_real)) + jnp.mean(jax.nn.softplus(on_fake))

    d_loss, grads = jax.value_and_grad(discriminator_loss)(discriminator.params)
    discriminator = discriminator.apply_gradients(grads=grads)

    def generator_loss(params: Any) -> jax.Array:
        fake = generator.apply_fn({"params": params}, jax.random.normal(second, (real.shape[0], NOISE)))
        return jnp.mean(jax.nn.softplus(-discriminator.apply_fn({"params": discriminator.params}, fake)))

    g_loss, grads = jax.value_and_grad(generator_loss)(generator.params)
    return generator.apply_gradients(grads=grads), discriminator, {"generator": g_loss, "discriminator": d_loss}


def eval_step(params: Any, z: jax.Array) -> Any:
    """Samples: what evaluation returns has as many rows as its batch."""
    return Generator().apply({"params": params}, z)


def make_state() -> tuple[Any, ...]:
    g_key, d_key, key = jax.random.split(jax.random.key(0), 3)
    generator, discriminator = Generator(), Discriminator()
    generated = generator.init(g_key, jnp.zeros((1, NOISE)))["params"]
    discriminated = discriminator.init(d_key, jnp.zeros((1, DIM)))["params"]
    adam, sgd = optax.adam(1e-3, b1=0.5, eps=1e-2), optax.sgd(0.05, momentum=0.5)
    return (
        TrainState.create(apply_fn=generator.apply, params=generated, tx=adam),
        TrainState.create(apply_fn=discriminator.apply, params=discriminated, tx=sgd),
        key,
    )


def make_batch(seed: int, rows: int) -> Any:
    return rng_of(seed).uniform(-1, 1, (rows, DIM)).astype("float32") ** 3


def advance(step: Any, carried: tuple[Any, ...], batch: Any) -> tuple[tuple[Any, ...], Any]:
    generator, discriminator, key = carried
    key, step_key = jax.random.split(key)
    generator, discriminator, metrics = step(generator, discriminator, batch, step_key)
    return (generator, discriminator, key), metrics


LOOP = Loop(
    "gan", make_state, train_step, eval_step, make_batch, advance,
    lambda step, carried, batch: step(carried[0].params, batch[:, :NOISE]),
)  # fmt: skip
