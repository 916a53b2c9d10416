"""Loops of other libraries: NNX, whose modules are updated in place, Haiku and Equinox."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gallery.loops.base import Arrays, Loop, pictures, registers, rng_of
from gallery.registry import Case

CASES: list[Case] = []
registered = partial(registers, CASES)


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16 * 2 * 2, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


@registered("NnxOptimizer", "nnx, convolution, mutable state, random, optimizer")
def nnx_optimizer() -> Loop:
    """`nnx.Optimizer`: a convolutional NNX model with batch norm and dropout, updated in place, `nnx.MultiMetric`."""

    def make_state():
        model = CNN(nnx.Rngs(0))
        model.train()
        optimizer = nnx.Optimizer(model, optax.sgd(0.02, momentum=0.9), wrt=nnx.Param)
        return model, optimizer, nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model: CNN, batch: Arrays):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

    def train_step(model: CNN, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: Arrays) -> None:
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    def eval_step(model: CNN, batch: Arrays):
        loss, logits = loss_fn(model, batch)
        return {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}

    def advance(step: Any, carried: Any, batch: Arrays):
        step(*carried, batch)
        metrics = carried[2].compute()
        carried[2].reset()
        return carried, metrics

    def evaluate(step: Any, carried: Any, batch: Arrays):
        model = carried[0]
        model.eval()
        found = step(model, batch)
        model.train()
        return found

    return Loop(make_state, train_step, eval_step, partial(pictures, channels=1), evaluate, advance)


class HaikuTraining(NamedTuple):
    params: Any
    state: hk.State
    opt_state: optax.OptState
    key: jax.Array


@hk.transform_with_state
def network(x: jax.Array, is_training: bool) -> jax.Array:
    for channels in (8, 16):
        shortcut = hk.Conv2D(channels, 1, stride=2)(x)
        y = hk.Conv2D(channels, 3, stride=2, with_bias=False)(x)
        y = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(y, is_training)
        x = jax.nn.relu(y) + shortcut
    x = x.mean(axis=(1, 2))
    return hk.Linear(4)(hk.dropout(hk.next_rng_key(), 0.1, x) if is_training else x)


@registered("HaikuState", "haiku, convolution, mutable state, random, optimizer")
def haiku_state() -> Loop:
    """Haiku with state: `transform_with_state`, batch norm, dropout with a key that the loop splits."""
    tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9))

    def make_state():
        init_key, key = jax.random.split(jax.random.PRNGKey(0))
        params, state = network.init(init_key, jnp.zeros((1, 8, 8, 3)), is_training=True)
        return (HaikuTraining(params, state, tx.init(params), key),)

    def train_step(before: HaikuTraining, batch: Arrays):
        key, dropout_key = jax.random.split(before.key)

        def loss_fn(params: Any):
            logits, state = network.apply(params, before.state, dropout_key, batch["image"], is_training=True)
            labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], 4), 0.1)
            return optax.softmax_cross_entropy(logits, labels).mean(), (state, logits)

        (loss, (state, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(before.params)
        updates, opt_state = tx.update(grads, before.opt_state, before.params)
        correct = (logits.argmax(-1) == batch["label"]).mean()
        after = HaikuTraining(optax.apply_updates(before.params, updates), state, opt_state, key)
        return after, {"loss": loss, "accuracy": correct}

    def eval_step(params: Any, state: Any, batch: Arrays):
        logits, _ = network.apply(params, state, None, batch["image"], is_training=False)
        return (logits.argmax(-1) == batch["label"]).sum()

    def evaluate(step: Any, carried: Any, batch: Arrays):
        return step(carried[0].params, carried[0].state, batch)

    return Loop(make_state, train_step, eval_step, pictures, evaluate)


class Regressor(eqx.Module):
    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(6, width, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[1])
        self.mlp = eqx.nn.MLP(width, width, 2 * width, depth=1, activation=jax.nn.gelu, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 1, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        """One example: (time, features) to a scalar."""
        x = jax.vmap(self.embed)(x)
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        x = x + jax.vmap(self.mlp)(x)
        return self.head(x.mean(axis=0))[0]


@registered("EquinoxPartition", "equinox, attention, optimizer")
def equinox_partition() -> Loop:
    """Equinox: the arrays of a module are state, the rest of it is static and joined again within the step."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))
    initial, static = eqx.partition(Regressor(16, jax.random.key(0)), eqx.is_inexact_array)

    def eval_step(params: Any, x: jax.Array):
        """Predictions."""
        return jax.vmap(eqx.combine(params, static))(x)

    def train_step(params: Any, opt_state: Any, batch: Any):
        def loss_fn(params: Any, x: jax.Array, y: jax.Array):
            return jnp.mean((eval_step(params, x) - y) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, loss

    def batch(seed: int, rows: int):
        x = rng_of(seed).standard_normal((rows, 8, 6), "float32")
        return x, x.mean(axis=(1, 2)) + x.max(axis=(1, 2))

    def evaluate(step: Any, carried: Any, batch: Any):
        return step(carried[0], batch[0])

    return Loop(lambda: (initial, tx.init(initial)), train_step, eval_step, batch, evaluate)
