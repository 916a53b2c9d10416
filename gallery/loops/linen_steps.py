"""Loops of linen modules with Optax, each for a habit of its users."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax import linen as nn
from flax import struct
from flax.training import train_state

from gallery.loops.base import Arrays, Loop, pictures, registers, rng_of
from gallery.registry import Case

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
CASES: list[Case] = []
registered = partial(registers, CASES)


def accuracy(logits: jax.Array, batch: Arrays) -> jax.Array:
    return (logits.argmax(-1) == batch["label"]).mean()


class Classifier(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Embed(64, self.width)(tokens)
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(num_heads=2, deterministic=True)(nn.LayerNorm()(x))
            x = x + nn.Dropout(0.1, deterministic=not train)(y)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(4)(nn.LayerNorm()(x).mean(axis=1))


class KeyedState(train_state.TrainState):
    dropout_key: jax.Array


@registered("LinenTrainState", "linen, attention, random, train state, optimizer")
def linen_train_state() -> Loop:
    """linen with a `TrainState`: a text classifier with dropout, clipped gradients and a learning-rate schedule."""

    def make_state():
        model = Classifier()
        params_key, dropout_key = jax.random.split(jax.random.key(0))
        params = model.init(params_key, jnp.zeros((1, 8), jnp.int32), train=False)["params"]
        rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=5, decay_steps=50)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9))
        return (KeyedState.create(apply_fn=model.apply, params=params, tx=tx, dropout_key=dropout_key),)

    def train_step(state: KeyedState, batch: Arrays):
        key = jax.random.fold_in(state.dropout_key, state.step)

        def loss_fn(params: Any):
            logits = state.apply_fn({"params": params}, batch["tokens"], train=True, rngs={"dropout": key})
            return cross_entropy(logits, batch["label"]).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy(logits, batch)}

    def eval_step(state: KeyedState, batch: Arrays):
        logits = state.apply_fn({"params": state.params}, batch["tokens"], train=False)
        return {"loss": cross_entropy(logits, batch["label"]).mean(), "accuracy": accuracy(logits, batch)}

    def batch(seed: int, rows: int):
        tokens = rng_of(seed).integers(0, 64, (rows, 8), dtype="int32")
        return {"tokens": tokens, "label": (tokens.sum(1) % 4).astype("int32")}

    return Loop(make_state, train_step, eval_step, batch)


@registered("MultiSteps", "linen, recurrent, scan, optimizer, branch")
def multi_steps() -> Loop:
    """`optax.MultiSteps`: gradients of four calls are averaged before an update; a bag-of-bytes language model.

    It is a gated recurrent one: `nn.RNN` is a scan over positions.
    """
    model: Any = nn.Sequential([nn.Embed(32, 16), nn.RNN(nn.GRUCell(16)), nn.Dense(32)])
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2, momentum=0.9)), 4)

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        return params, tx.init(params)

    def loss_fn(params: Any, batch: Arrays):
        logits = model.apply({"params": params}, batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:]).mean()

    def train_step(params: Any, opt_state: optax.MultiStepsState, batch: Arrays):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, {"loss": loss, "updated": tx.has_updated(opt_state)}

    def eval_step(params: Any, batch: Arrays):
        return jnp.exp(loss_fn(params, batch))

    def batch(seed: int, rows: int):
        starts = rng_of(seed).integers(0, 32, (rows, 1), dtype="int32")
        steps = rng_of(seed + 1).integers(1, 3, (rows, 1), dtype="int32")
        return {"tokens": ((starts + steps * jnp.arange(9)) % 32).__array__()}

    return Loop(make_state, train_step, eval_step, batch, lambda step, carried, batch: step(carried[0], batch))


class Denoiser(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        frequencies = 2.0 ** jnp.arange(4)
        time = jnp.concatenate([jnp.sin(level[:, None] * frequencies), jnp.cos(level[:, None] * frequencies)], -1)
        h = nn.Dense(self.width)(x) + nn.Dense(self.width)(time)
        for _ in range(2):
            h = h + nn.Dense(self.width)(nn.silu(nn.RMSNorm()(h)))
        return nn.Dense(8)(h)


@struct.dataclass
class Averaged:
    step: int
    params: Any
    ema: Any
    opt_state: Any
    key: jax.Array


@registered("Ema", "linen, perceptron, random, optimizer")
def ema() -> Loop:
    """An exponential moving average of the weights, which evaluation uses: denoising with sampled noise levels."""
    model: Any = Denoiser()
    tx = optax.sgd(0.05, momentum=0.9, nesterov=True)

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, 8)), jnp.zeros((1,)))["params"]
        return (Averaged(step=0, params=params, ema=params, opt_state=tx.init(params), key=jax.random.key(1)),)

    def loss_fn(params: Any, x: jax.Array, key: jax.Array):
        level_key, noise_key = jax.random.split(key)
        level = jax.random.uniform(level_key, (x.shape[0],))
        noise = jax.random.normal(noise_key, x.shape)
        noisy = jnp.sqrt(1 - level)[:, None] * x + jnp.sqrt(level)[:, None] * noise
        return jnp.mean((model.apply({"params": params}, noisy, level) - noise) ** 2)

    def train_step(state: Averaged, x: jax.Array):
        key, step_key = jax.random.split(state.key)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x, step_key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        decay = jnp.minimum(0.999, (1 + state.step) / (10 + state.step))
        ema = jax.tree.map(lambda average, new: decay * average + (1 - decay) * new, state.ema, params)
        return Averaged(step=state.step + 1, params=params, ema=ema, opt_state=opt_state, key=key), loss

    def eval_step(ema: Any, x: jax.Array):
        return loss_fn(ema, x, jax.random.key(7))

    def batch(seed: int, rows: int):
        return rng_of(seed).standard_normal((rows, 8), "float32")

    return Loop(make_state, train_step, eval_step, batch, lambda step, carried, batch: step(carried[0].ema, batch))


class Scaled(struct.PyTreeNode):
    params: Any
    opt_state: Any
    scale: jmp.DynamicLossScale


@registered("LossScaling", "linen, perceptron, branch, optimizer")
def loss_scaling() -> Loop:
    """Dynamic loss scaling as jmp has it: the scale is state, and a step with gradients that are not finite is skipped.

    The scale starts so large that the first steps overflow float32, as they do float16 with usual scales.
    """
    model: Any = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(16), nn.tanh, nn.Dense(5)])
    tx = optax.sgd(0.1, momentum=0.9)

    def make_state():
        params = model.init(jax.random.key(0), jnp.zeros((1, 12)))["params"]
        scale = jmp.DynamicLossScale(jnp.float32(2.0**127), period=5)
        return (Scaled(params=params, opt_state=tx.init(params), scale=scale),)

    def eval_step(params: Any, batch: Arrays):
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch["y"]).mean()

    def train_step(state: Scaled, batch: Arrays):
        def scaled(params: Any):
            loss = eval_step(params, batch)
            return state.scale.scale(loss), loss

        grads, loss = jax.grad(scaled, has_aux=True)(state.params)
        grads = state.scale.unscale(grads)
        finite = jmp.all_finite(grads)
        scale = state.scale.adjust(finite)

        def update(_: None):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            return optax.apply_updates(state.params, updates), opt_state

        params, opt_state = jax.lax.cond(finite, update, lambda _: (state.params, state.opt_state), None)
        return Scaled(params=params, opt_state=opt_state, scale=scale), {"loss": loss, "finite": finite}

    def batch(seed: int, rows: int):
        x = 8 * rng_of(seed).standard_normal((rows, 12), "float32")
        return {"x": x, "y": x[:, :5].argmax(1).astype("int32")}

    return Loop(make_state, train_step, eval_step, batch, lambda step, carried, batch: step(carried[0].params, batch))


@registered("Gan", "linen, perceptron, random, several optimizers, train state")
def gan() -> Loop:
    """Two optimizers in one step: a generator and a discriminator, each with its own `TrainState`.

    What evaluation returns, samples, has as many rows as its batch.
    """
    generates, discriminates = (
        nn.Sequential([nn.Dense(32), nn.leaky_relu, nn.Dense(32), nn.leaky_relu, nn.Dense(outputs)])
        for outputs in (8, 1)
    )

    def make_state():
        g_key, d_key, key = jax.random.split(jax.random.key(0), 3)
        adam, sgd = optax.adam(1e-3, b1=0.5, eps=1e-2), optax.sgd(0.05, momentum=0.5)
        states = [
            train_state.TrainState.create(apply_fn=net.apply, params=net.init(k, jnp.zeros((1, n)))["params"], tx=tx)
            for net, k, n, tx in ((generates, g_key, 4, adam), (discriminates, d_key, 8, sgd))
        ]
        return (*states, key)

    def train_step(generator: Any, discriminator: Any, real: jax.Array, key: jax.Array):
        first, second = jax.random.split(key)

        def made(params: Any, key: jax.Array):
            return nn.tanh(generator.apply_fn({"params": params}, jax.random.normal(key, (real.shape[0], 4))))

        def judged(params: Any, x: jax.Array):
            return discriminator.apply_fn({"params": params}, x)[:, 0]

        def discriminator_loss(params: Any):
            fake = judged(params, made(generator.params, first))
            return jnp.mean(jax.nn.softplus(-judged(params, real))) + jnp.mean(jax.nn.softplus(fake))

        d_loss, grads = jax.value_and_grad(discriminator_loss)(discriminator.params)
        discriminator = discriminator.apply_gradients(grads=grads)

        def generator_loss(params: Any):
            return jnp.mean(jax.nn.softplus(-judged(discriminator.params, made(params, second))))

        g_loss, grads = jax.value_and_grad(generator_loss)(generator.params)
        return generator.apply_gradients(grads=grads), discriminator, {"generator": g_loss, "discriminator": d_loss}

    def eval_step(params: Any, z: jax.Array):
        return nn.tanh(jnp.asarray(generates.apply({"params": params}, z)))

    def batch(seed: int, rows: int):
        return rng_of(seed).uniform(-1, 1, (rows, 8)).astype("float32") ** 3

    def advance(step: Any, carried: Any, batch: Any):
        generator, discriminator, key = carried
        key, step_key = jax.random.split(key)
        generator, discriminator, metrics = step(generator, discriminator, batch, step_key)
        return (generator, discriminator, key), metrics

    def evaluate(step: Any, carried: Any, batch: Any):
        return step(carried[0].params, batch[:, :4])

    return Loop(make_state, train_step, eval_step, batch, evaluate, advance)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.silu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        for channels in (8, 16):
            stride = 1 if channels == x.shape[-1] else 2
            y = nn.silu(norm()(nn.Conv(channels, (3, 3), (stride, stride), use_bias=False)(x)))
            y = norm(scale_init=nn.initializers.zeros)(nn.Conv(channels, (3, 3), use_bias=False)(y))
            if stride != 1:
                x = norm()(nn.Conv(channels, (1, 1), (stride, stride), use_bias=False)(x))
            x = nn.silu(x + y)
        return nn.Dense(4)(x.mean(axis=(1, 2)))


class NormedState(train_state.TrainState):
    batch_stats: Any


@registered("VisionBatchNorm", "linen, convolution, mutable state, train state, optimizer")
def vision_batch_norm() -> Loop:
    """A small residual network in linen with `batch_stats` in the `TrainState`, as the Flax ImageNet example has them.

    Its activations are smooth: where rounding turns the sign of one pre-activation, the derivative of a relu jumps, and
    a bias differed by 1.4e-5 after 20 steps in one run of the tests, on another processor.
    """

    def make_state():
        model = ResNet()
        variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)), train=False)
        tx = optax.sgd(optax.cosine_decay_schedule(0.05, 100), momentum=0.9, nesterov=True)
        return (NormedState.create(apply_fn=model.apply, tx=tx, **variables),)

    def train_step(state: NormedState, batch: Arrays):
        def loss_fn(params: Any):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
            penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return cross_entropy(logits, batch["label"]).mean() + 0.5e-4 * penalty, (updates, logits)

        (loss, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
        return state, {"loss": loss, "accuracy": accuracy(logits, batch)}

    def eval_step(state: NormedState, batch: Arrays):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = state.apply_fn(variables, batch["image"], train=False, mutable=False)
        return {"loss": cross_entropy(logits, batch["label"]).mean(), "logits": logits}

    return Loop(make_state, train_step, eval_step, pictures)
