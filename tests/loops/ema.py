"""An exponential moving average of the weights, which evaluation uses: a denoising model with sampled noise levels."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from tests.loops.base import Loop, rng_of

DIM = 8


class Denoiser(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        frequencies = 2.0 ** jnp.arange(4)
        time = jnp.concatenate([jnp.sin(level[:, None] * frequencies), jnp.cos(level[:, None] * frequencies)], -1)
        h = nn.Dense(self.width)(x) + nn.Dense(self.width)(time)
        for _ in range(2):
            h = h + nn.Dense(self.width)(nn.silu(nn.RMSNorm()(h)))
        return nn.Dense(DIM)(h)


MODEL: Any = Denoiser()
TX = optax.sgd(0.05, momentum=0.9, nesterov=True)


@struct.dataclass
class State:
    step: int
    params: Any
    ema: Any
    opt_state: Any
    key: jax.Array


def denoising_loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    level_key, noise_key = jax.random.split(key)
    level = jax.random.uniform(level_key, (x.shape[0],))
    noise = jax.random.normal(noise_key, x.shape)
    noisy = jnp.sqrt(1 - level)[:, None] * x + jnp.sqrt(level)[:, None] * noise
    return jnp.mean((MODEL.apply({"params": params}, noisy, level) - noise) ** 2)


def train_step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    key, step_key = jax.random.split(state.key)
    loss, grads = jax.value_and_grad(denoising_loss)(state.params, x, step_key)
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    decay = jnp.minimum(0.999, (1 + state.step) / (10 + state.step))
    ema = jax.tree.map(lambda average, new: decay * average + (1 - decay) * new, state.ema, params)
    return State(step=state.step + 1, params=params, ema=ema, opt_state=opt_state, key=key), loss


def eval_step(ema: Any, x: jax.Array) -> jax.Array:
    return denoising_loss(ema, x, jax.random.key(7))


def make_state() -> tuple[Any, ...]:
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, DIM)), jnp.zeros((1,)))["params"]
    return (State(step=0, params=params, ema=params, opt_state=TX.init(params), key=jax.random.key(1)),)


def make_batch(seed: int, rows: int) -> Any:
    return rng_of(seed).standard_normal((rows, DIM), "float32")


LOOP = Loop(
    "ema", make_state, train_step, eval_step, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0].ema, batch),
)  # fmt: skip
