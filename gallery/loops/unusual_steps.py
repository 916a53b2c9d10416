"""Loops whose steps are not one loss of one batch: rollouts, frozen weights, several steps in a call."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from gallery.loops.base import Arrays, Loop, registers, rng_of
from gallery.registry import Case
from gallery.steps import advantages, module, optimizer_step, weighted_cross_entropy

CASES: list[Case] = []
registered = partial(registers, CASES)


@module
def ActorCriticNetwork(self, x):
    """[..., features] to [..., 3] logits and [...] values."""
    actor, critic = (nn.tanh(nn.Dense(32)(x)) for _ in range(2))
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


@registered("ActorCritic", "linen, perceptron, scan, random, optimizer, unusual")
def actor_critic() -> Loop:
    """Proximal policy optimisation: advantages by a reversed scan, time before environments in every array.

    Acting is the evaluation: it samples actions from the policy, with a key of its own.
    """
    network: Any = ActorCriticNetwork()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9))

    def make_state():
        params = network.init(jax.random.key(0), jnp.zeros((1, 6)))["params"]
        return (Learner(params, tx.init(params)),)

    def train_step(learner: Learner, rollout: Rollout):
        advantage = advantages(rollout.rewards, rollout.values, rollout.last_value, rollout.dones, unroll=2)
        target = advantage + rollout.values
        normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        def loss_fn(params: Any):
            logits, values = network.apply({"params": params}, rollout.observations)
            log_all = jax.nn.log_softmax(logits)
            log_probs = jnp.take_along_axis(log_all, rollout.actions[..., None], -1)[..., 0]
            ratio = jnp.exp(log_probs - rollout.log_probs)
            policy = -jnp.minimum(ratio * normalised, jnp.clip(ratio, 0.8, 1.2) * normalised).mean()
            value = 0.5 * ((values - target) ** 2).mean()
            entropy = -(jnp.exp(log_all) * log_all).sum(-1).mean()
            return policy + 0.5 * value - 0.01 * entropy, {"value": value, "entropy": entropy}

        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(learner.params)
        updates, opt_state = tx.update(grads, learner.opt_state)
        return Learner(optax.apply_updates(learner.params, updates), opt_state), {"loss": loss, **parts}

    def eval_step(params: Any, observations: jax.Array, key: jax.Array):
        logits, value = network.apply({"params": params}, observations)
        return {"action": jax.random.categorical(key, logits), "value": value, "log_prob": jax.nn.log_softmax(logits)}

    def batch(seed: int, rows: int):
        rng, time = rng_of(seed), 5

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, "float32")

        return Rollout(
            observations=normal(time, rows, 6), actions=rng.integers(0, 3, (time, rows), dtype="int32"),
            log_probs=(-np.log(3) + 0.3 * normal(time, rows)).astype("float32"), rewards=normal(time, rows),
            values=0.1 * normal(time, rows), dones=(rng.random((time, rows)) < 0.1).astype("float32"),
            last_value=0.1 * normal(rows),
        )  # fmt: skip

    def evaluate(step: Any, carried: Any, batch: Rollout):
        return step(carried[0].params, batch.observations[0], jax.random.key(3))

    return Loop(make_state, train_step, eval_step, batch, evaluate)


def frozen_layers(width: int = 16, vocab: int = 32) -> Any:
    """Weights of two layers that stand for a download."""
    keys = iter(jax.random.split(jax.random.key(0), 10))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / jnp.sqrt(shape[0])

    shapes = {"query": (width, width), "value": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(2)]
    return {"embed": normal(vocab, width), "layers": layers, "head": normal(width, vocab)}


def apply_lora(base: Any, lora: Any, tokens: jax.Array) -> jax.Array:
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


@registered("Lora", "plain, attention, frozen weights, optimizer, unusual")
def lora() -> Loop:
    """LoRA: the base weights are an argument that the step does not return; low-rank adapters are trained."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def make_state():
        """For each query and value matrix a random `a` and a zero `b`, so that training starts at the base."""
        base, lora = frozen_layers(), {}
        for i, name in itertools.product(range(2), ("query", "value")):
            rows, columns = base["layers"][i][name].shape
            a = jax.random.normal(jax.random.fold_in(jax.random.key(1), len(lora)), (rows, 2)) / jnp.sqrt(rows)
            lora[f"{i}/{name}"] = {"a": a, "b": jnp.zeros((2, columns))}
        return lora, tx.init(lora), base

    def eval_step(lora: Any, base: Any, batch: Arrays):
        return weighted_cross_entropy(
            apply_lora(base, lora, batch["tokens"][:, :-1]), batch["tokens"][:, 1:], batch["mask"]
        )

    def train_step(lora: Any, opt_state: Any, base: Any, batch: Arrays):
        return optimizer_step(eval_step, tx)(lora, opt_state, base, batch)

    def batch(seed: int, rows: int):
        rng = rng_of(seed)
        tokens = (rng.integers(0, 32, (rows, 1)) + 3 * rng.integers(0, 2, (rows, 9)).cumsum(1)) % 32
        mask = rng.integers(2, 9, (rows, 1)) > range(8)
        return {"tokens": tokens.astype("int32"), "mask": mask.astype("float32")}

    def evaluate(step: Any, carried: Any, batch: Arrays):
        return step(carried[0], carried[2], batch)

    return Loop(make_state, train_step, eval_step, batch, evaluate)


@module
def Towers(self, image, text):
    """Unit vectors of images and of texts, and a scale of their products."""
    towers = image, nn.Embed(32, 32)(text).mean(axis=-2)
    left, right = (nn.Dense(16)(nn.relu(nn.Dense(32)(x))) for x in towers)
    left, right = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (left, right))
    return left, right, jnp.exp(self.param("scale", nn.initializers.constant(1.0), ()))


@registered("TwoTowers", "linen, perceptron, embedding, scan, across the batch, optimizer, unusual")
def two_towers() -> Loop:
    """A contrastive model of two towers, trained for several steps in one call: `lax.scan` over stacked batches.

    The loss compares every example with every other of its batch. Dims: inner steps, examples, features.
    """
    model: Any = Towers()
    tx = optax.sgd(0.05, momentum=0.9)

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, 12)), jnp.zeros((1, 6), jnp.int32))["params"]
        return ((params, tx.init(params)),)

    def loss_fn(params: Any, batch: Arrays):
        left, right, scale = model.apply({"params": params}, batch["image"], batch["text"])
        logits = scale * left @ right.T
        labels = jnp.arange(logits.shape[0])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return (losses(logits, labels).mean() + losses(logits.T, labels).mean()) / 2

    def train_step(state: Any, batches: Arrays):
        """One call, several steps; `batches` has the steps in front."""

        def one(state: Any, batch: Arrays):
            *state, loss = optimizer_step(loss_fn, tx)(*state, batch)
            return tuple(state), loss

        return jax.lax.scan(one, state, batches)

    def eval_step(params: Any, image: jax.Array, text: jax.Array):
        """Retrieval: for each image the text that is nearest."""
        left, right, _ = model.apply({"params": params}, image, text)
        nearest = (left @ right.T).argmax(-1)
        return {"nearest": nearest, "recall": (nearest == jnp.arange(nearest.shape[0])).mean()}

    def batch(seed: int, rows: int):
        rng = rng_of(seed)
        text = rng.integers(0, 32, (2, rows, 6), dtype="int32")
        image = rng.standard_normal((2, rows, 12), "float32") + text[..., :1] / 32
        return {"image": image.astype("float32"), "text": text}

    def evaluate(step: Any, carried: Any, batch: Arrays):
        return step(carried[0][0], batch["image"][0], batch["text"][0])

    return Loop(make_state, train_step, eval_step, batch, evaluate)
