"""Loops whose steps are not one loss of one batch: rollouts, frozen weights, several steps in a call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tests.loops.base import Arrays, Loop, rng_of


class ActorCriticNetwork(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        actor = nn.tanh(nn.Dense(32)(x))
        critic = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(3, kernel_init=nn.initializers.orthogonal(0.01))(actor), nn.Dense(1)(critic)[..., 0]


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


class ActorCritic(Loop):
    """Proximal policy optimisation: advantages by a reversed scan, time before environments in every array.

    Acting is the evaluation: it samples actions from the policy, with a key of its own.
    """

    network: Any = ActorCriticNetwork()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9))

    def make_state(self):
        params = self.network.init(jax.random.key(0), jnp.zeros((1, 6)))["params"]
        return (Learner(params, self.tx.init(params)),)

    @staticmethod
    def train_step(learner: Learner, rollout: Rollout):
        advantage = advantages(rollout)
        target = advantage + rollout.values
        normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        def loss_fn(params: Any):
            logits, values = ActorCritic.network.apply({"params": params}, rollout.observations)
            log_all = jax.nn.log_softmax(logits)
            log_probs = jnp.take_along_axis(log_all, rollout.actions[..., None], -1)[..., 0]
            ratio = jnp.exp(log_probs - rollout.log_probs)
            policy = -jnp.minimum(ratio * normalised, jnp.clip(ratio, 0.8, 1.2) * normalised).mean()
            value = 0.5 * ((values - target) ** 2).mean()
            entropy = -(jnp.exp(log_all) * log_all).sum(-1).mean()
            return policy + 0.5 * value - 0.01 * entropy, {"value": value, "entropy": entropy}

        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(learner.params)
        updates, opt_state = ActorCritic.tx.update(grads, learner.opt_state)
        return Learner(optax.apply_updates(learner.params, updates), opt_state), {"loss": loss, **parts}

    @staticmethod
    def eval_step(params: Any, observations: jax.Array, key: jax.Array):
        logits, value = ActorCritic.network.apply({"params": params}, observations)
        action = jax.random.categorical(key, logits)
        return {"action": action, "value": value, "log_prob": jax.nn.log_softmax(logits)}

    def batch(self, seed: int, rows: int):
        rng, time = rng_of(seed), 5

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, "float32")

        return Rollout(
            observations=normal(time, rows, 6),
            actions=rng.integers(0, 3, (time, rows), dtype="int32"),
            log_probs=(-np.log(3) + 0.3 * normal(time, rows)).astype("float32"),
            rewards=normal(time, rows),
            values=0.1 * normal(time, rows),
            dones=(rng.random((time, rows)) < 0.1).astype("float32"),
            last_value=0.1 * normal(rows),
        )

    def evaluate(self, step: Any, carried: Any, batch: Rollout):
        return step(carried[0].params, batch.observations[0], jax.random.key(3))


def frozen_layers(key: jax.Array, width: int = 16, vocab: int = 32) -> Any:
    """Weights of two layers that stand for a download."""
    keys = iter(jax.random.split(key, 10))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / jnp.sqrt(shape[0])

    shapes = {"query": (width, width), "value": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(2)]
    return {"embed": normal(vocab, width), "layers": layers, "head": normal(width, vocab)}


def adapted(base: Any, lora: Any, tokens: jax.Array) -> jax.Array:
    """Logits of the layers with their adapters."""

    def dense(x: jax.Array, i: int, name: str) -> jax.Array:
        adapter = lora[f"{i}/{name}"]
        return x @ base["layers"][i][name] + (x @ adapter["a"]) @ adapter["b"] * 2.0

    x = base["embed"][tokens]
    mask = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
    for i, layer in enumerate(base["layers"]):
        scores = jnp.einsum("btd,bsd->bts", dense(x, i, "query"), x) / jnp.sqrt(x.shape[-1])
        x = x + jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ dense(x, i, "value")
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    return x @ base["head"]


class Lora(Loop):
    """LoRA: the base weights are an argument that the step does not return; low-rank adapters are trained."""

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def make_state(self):
        """For each query and value matrix a random `a` and a zero `b`, so that training starts at the base."""
        base, lora = frozen_layers(jax.random.key(0)), {}
        for i, layer in enumerate(base["layers"]):
            for name in ("query", "value"):
                rows, columns = layer[name].shape
                a = jax.random.normal(jax.random.fold_in(jax.random.key(1), len(lora)), (rows, 2)) / jnp.sqrt(rows)
                lora[f"{i}/{name}"] = {"a": a, "b": jnp.zeros((2, columns))}
        return lora, self.tx.init(lora), base

    @staticmethod
    def eval_step(lora: Any, base: Any, batch: Arrays):
        logits = adapted(base, lora, batch["tokens"][:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    @staticmethod
    def train_step(lora: Any, opt_state: Any, base: Any, batch: Arrays):
        loss, grads = jax.value_and_grad(Lora.eval_step)(lora, base, batch)
        updates, opt_state = Lora.tx.update(grads, opt_state, lora)
        return optax.apply_updates(lora, updates), opt_state, loss

    def batch(self, seed: int, rows: int):
        rng = rng_of(seed)
        tokens = (rng.integers(0, 32, (rows, 1)) + 3 * rng.integers(0, 2, (rows, 9)).cumsum(1)) % 32
        mask = rng.integers(2, 9, (rows, 1)) > range(8)
        return {"tokens": tokens.astype("int32"), "mask": mask.astype("float32")}

    def evaluate(self, step: Any, carried: Any, batch: Arrays):
        return step(carried[0], carried[2], batch)


class Towers(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array, text: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def unit(x: jax.Array) -> jax.Array:
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        left = nn.Dense(16)(nn.relu(nn.Dense(32)(image)))
        right = nn.Dense(16)(nn.relu(nn.Dense(32)(nn.Embed(32, 32)(text).mean(axis=-2))))
        return unit(left), unit(right), jnp.exp(self.param("scale", nn.initializers.constant(1.0), ()))


class TwoTowers(Loop):
    """A contrastive model of two towers, trained for several steps in one call: `lax.scan` over stacked batches.

    The loss compares every example with every other of its batch. Dims: inner steps, examples, features.
    """

    model: Any = Towers()
    tx = optax.sgd(0.05, momentum=0.9)

    def make_state(self):
        params = self.model.init(jax.random.key(0), jnp.zeros((1, 12)), jnp.zeros((1, 6), jnp.int32))["params"]
        return ((params, self.tx.init(params)),)

    @staticmethod
    def loss_fn(params: Any, batch: Arrays):
        left, right, scale = TwoTowers.model.apply({"params": params}, batch["image"], batch["text"])
        logits = scale * left @ right.T
        labels = jnp.arange(logits.shape[0])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return (losses(logits, labels).mean() + losses(logits.T, labels).mean()) / 2

    @staticmethod
    def train_step(state: Any, batches: Arrays):
        """One call, several steps; `batches` has the steps in front."""

        def one(state: Any, batch: Arrays):
            params, opt_state = state
            loss, grads = jax.value_and_grad(TwoTowers.loss_fn)(params, batch)
            updates, opt_state = TwoTowers.tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return jax.lax.scan(one, state, batches)

    @staticmethod
    def eval_step(params: Any, image: jax.Array, text: jax.Array):
        """Retrieval: for each image the text that is nearest."""
        left, right, _ = TwoTowers.model.apply({"params": params}, image, text)
        nearest = (left @ right.T).argmax(-1)
        return {"nearest": nearest, "recall": (nearest == jnp.arange(nearest.shape[0])).mean()}

    def batch(self, seed: int, rows: int):
        rng = rng_of(seed)
        text = rng.integers(0, 32, (2, rows, 6), dtype="int32")
        image = rng.standard_normal((2, rows, 12), "float32") + text[..., :1] / 32
        return {"image": image.astype("float32"), "text": text}

    def evaluate(self, step: Any, carried: Any, batch: Arrays):
        return step(carried[0][0], batch["image"][0], batch["text"][0])
