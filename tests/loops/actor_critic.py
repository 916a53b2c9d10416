"""Proximal policy optimisation: advantages by a reversed scan over time, time before environments in every array.

Acting is the evaluation: it samples actions from the policy, with a key of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tests.loops.base import Loop, rng_of

OBSERVATIONS, ACTIONS, TIME = 6, 3, 5


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        actor = nn.tanh(nn.Dense(32)(x))
        critic = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(ACTIONS, kernel_init=nn.initializers.orthogonal(0.01))(actor), nn.Dense(1)(critic)[..., 0]


class Rollout(NamedTuple):
    observations: Any
    actions: Any
    log_probs: Any
    rewards: Any
    values: Any
    dones: Any
    last_value: Any


class Learner(NamedTuple):
    params: Any
    opt_state: Any


NETWORK: Any = ActorCritic()
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9))


def advantages(rollout: Rollout, discount: float = 0.99, smoothing: float = 0.95) -> jax.Array:
    def backwards(carry: Any, step: Any) -> tuple[Any, jax.Array]:
        advantage, next_value = carry
        reward, value, done = step
        delta = reward + discount * next_value * (1 - done) - value
        advantage = delta + discount * smoothing * (1 - done) * advantage
        return (advantage, value), advantage

    start = (jnp.zeros_like(rollout.last_value), rollout.last_value)
    steps = (rollout.rewards, rollout.values, rollout.dones)
    return jax.lax.scan(backwards, start, steps, reverse=True, unroll=2)[1]


def train_step(learner: Learner, rollout: Rollout) -> tuple[Learner, dict[str, jax.Array]]:
    advantage = advantages(rollout)
    target = advantage + rollout.values
    normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    def loss_fn(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, values = NETWORK.apply({"params": params}, rollout.observations)
        log_all = jax.nn.log_softmax(logits)
        log_probs = jnp.take_along_axis(log_all, rollout.actions[..., None], -1)[..., 0]
        ratio = jnp.exp(log_probs - rollout.log_probs)
        policy = -jnp.minimum(ratio * normalised, jnp.clip(ratio, 0.8, 1.2) * normalised).mean()
        value = 0.5 * ((values - target) ** 2).mean()
        entropy = -(jnp.exp(log_all) * log_all).sum(-1).mean()
        return policy + 0.5 * value - 0.01 * entropy, {"value": value, "entropy": entropy}

    (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(learner.params)
    updates, opt_state = TX.update(grads, learner.opt_state)
    return Learner(optax.apply_updates(learner.params, updates), opt_state), {"loss": loss, **parts}


def eval_step(params: Any, observations: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    logits, value = NETWORK.apply({"params": params}, observations)
    action = jax.random.categorical(key, logits)
    return {"action": action, "value": value, "log_prob": jax.nn.log_softmax(logits)}


def make_state() -> tuple[Any, ...]:
    params = NETWORK.init(jax.random.key(0), jnp.zeros((1, OBSERVATIONS)))["params"]
    return (Learner(params, TX.init(params)),)


def make_batch(seed: int, rows: int) -> Rollout:
    rng = rng_of(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, "float32")

    return Rollout(
        observations=normal(TIME, rows, OBSERVATIONS),
        actions=rng.integers(0, ACTIONS, (TIME, rows), dtype="int32"),
        log_probs=(-np.log(ACTIONS) + 0.3 * normal(TIME, rows)).astype("float32"),
        rewards=normal(TIME, rows),
        values=0.1 * normal(TIME, rows),
        dones=(rng.random((TIME, rows)) < 0.1).astype("float32"),
        last_value=0.1 * normal(rows),
    )


LOOP = Loop(
    "actor_critic", make_state, train_step, eval_step, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0].params, batch.observations[0], jax.random.key(3)),
)  # fmt: skip
