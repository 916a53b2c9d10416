"""Cases in Flax linen."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from gallery import twins
from gallery.batches import random_arrays, regression, text
from gallery.registry import Case, parse_tags
from gallery.twins import attend, likelihood, route, squared


class MLP(nn.Module):
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for size in self.sizes[1:-1]:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.sizes[-1])(x)


class Block(nn.Module):
    heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = x.shape[-1]
        split = (self.heads, hidden // self.heads)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        q, k, v = (nn.DenseGeneral(split, dtype=self.dtype, name=name)(y) for name in "qkv")
        y = nn.DenseGeneral(hidden, axis=(-2, -1), dtype=self.dtype, name="out")(attend(q, k, v))
        if self.dropout:
            y = nn.Dropout(self.dropout, deterministic=False)(y)
        x = x + y
        y = nn.gelu(nn.Dense(4 * hidden, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(hidden, dtype=self.dtype)(y)


class GPT(nn.Module):
    """A small decoder: unrolled or scanned, tied or not, with dropout, remat and a compute dtype."""

    vocab: int = 64
    seq: int = 16
    hidden: int = 32
    heads: int = 8
    layers: int = 2
    scan: bool = False
    tied: bool = False
    remat: bool = False
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.hidden, dtype=self.dtype)
        x = embed(tokens) + nn.Embed(self.seq, self.hidden, dtype=self.dtype)(jnp.arange(tokens.shape[1]))
        layer: Any = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        block = partial(layer, self.heads, self.dropout, self.dtype)
        if self.scan:
            axes: Any = {"params": 0}
            keys: Any = {"params": True, "dropout": True}
            loop = nn.scan(lambda m, x, _: (m(x), None), variable_axes=axes, split_rngs=keys, length=self.layers)
            x, _ = loop(block(), x, None)
        else:
            for _ in range(self.layers):
                x = block()(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, dtype=self.dtype)(x)


class ConvNet(nn.Module):
    channels: int = 16
    classes: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv_norm(x: jax.Array) -> jax.Array:
            x = nn.Conv(self.channels, (3, 3), use_bias=False)(x)
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

        x = nn.max_pool(nn.relu(conv_norm(x)), (2, 2), (2, 2))
        x = nn.avg_pool(x + conv_norm(nn.relu(conv_norm(x))), (2, 2), (2, 2))
        return nn.Dense(self.classes)(x.mean((1, 2)))


class ResNet(nn.Module):
    """A residual convolutional net without batch norm: examples do not meet, so it may be cut into micro-batches."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3, 3))(x)
        for _ in range(4):
            y = nn.Conv(8, (3, 3))(nn.gelu(nn.GroupNorm(4)(x)))
            x = x + nn.Conv(8, (3, 3), use_bias=False)(nn.gelu(y))
        return nn.Dense(8)(x.mean((1, 2)))


class UNet(nn.Module):
    """Convolutions down and up again, with skips that cross what lies between."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, channels: int) -> jax.Array:
            return nn.gelu(nn.Conv(channels, (3, 3))(x))

        skips = []
        for channels in (8, 16):
            skips.append(block(x, channels))
            x = nn.avg_pool(skips[-1], (2, 2), (2, 2))
        x = block(x, 32)
        for channels in (16, 8):
            x = nn.ConvTranspose(channels, (2, 2), strides=(2, 2))(x)
            x = block(jnp.concatenate([x, skips.pop()], -1), channels)
        return nn.Conv(4, (1, 1))(x)


class Translator(nn.Module):
    """An encoder, whose result every layer of the decoder reads, and a decoder."""

    @nn.compact
    def __call__(self, tokens: dict[str, jax.Array]) -> jax.Array:
        def attention(x: jax.Array, memory: jax.Array, *, causal: bool) -> jax.Array:
            q = nn.DenseGeneral((4, 8))(nn.LayerNorm()(x))
            memory = nn.LayerNorm()(memory)
            k, v = nn.DenseGeneral((4, 8))(memory), nn.DenseGeneral((4, 8))(memory)
            return x + nn.DenseGeneral(32, axis=(-2, -1))(attend(q, k, v, causal=causal))

        def dense(x: jax.Array) -> jax.Array:
            return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))

        embed = nn.Embed(64, 32)
        memory, x = embed(tokens["source"]), embed(tokens["inputs"])
        for _ in range(2):
            memory = dense(attention(memory, memory, causal=False))
        for _ in range(2):
            x = dense(attention(attention(x, x, causal=True), memory, causal=False))
        return nn.Dense(64)(nn.LayerNorm()(x))


class MoE(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        up, down = self.param("up", init, (8, 16, 32)), self.param("down", init, (8, 32, 16))
        combine = route(jax.nn.softmax(nn.Dense(8, use_bias=False)(x)), slots=6)
        inputs = jnp.einsum("gnec,gnm->egcm", (combine > 0).astype(x.dtype), x)
        inner = nn.gelu(jnp.einsum("egcm,emh->egch", inputs, up))
        return x + jnp.einsum("gnec,egch,ehm->gnm", combine, inner, down)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden: Any = nn.RNN(nn.GRUCell(32))(x)
        return nn.Dense(8)(hidden[:, -1])


MODELS: dict[str, Any] = {
    "mlp": MLP, "gpt": GPT, "convnet": ConvNet, "resnet": ResNet, "unet": UNet, "translator": Translator, "moe": MoE,
    "gru": Recurrent,
}  # fmt: skip


def variables(model: nn.Module, inputs: Any) -> Any:
    """The module's variables, filled."""
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return random_arrays(jax.eval_shape(model.init, rngs, inputs))


def make(kind: str, tx: optax.GradientTransformation | None = None, **options: Any) -> Any:
    """A step of a model; with dropout it takes a typed key as its third argument."""
    model, (loss_fn, batch, inputs) = MODELS[kind](**options), twins.task(kind, **options)
    state = dict(variables(model, batch[inputs]))
    mutable = [name for name in state if name != "params"]
    if tx is not None:
        state["opt_state"] = tx.init(state["params"])

    def step(state: dict[str, Any], batch: Any, key: jax.Array | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        def inner(params: Any) -> tuple[jax.Array, Any]:
            trees = {name: state[name] for name in mutable}
            rngs = {"dropout": key} if key is not None else None
            outputs, changed = model.apply({"params": params, **trees}, batch[inputs], mutable=mutable, rngs=rngs)
            return loss_fn(outputs, batch), changed

        (loss, changed), grads = jax.value_and_grad(inner, has_aux=True)(state["params"])
        return {**changed, **twins.advanced(state, grads, tx)}, {"loss": loss, "grads": grads}

    return step, (state, batch, jax.random.key(5)) if options.get("dropout") else (state, batch)


gpt = partial(make, "gpt")


def train_state() -> Any:
    """The step that Flax's guide writes, with a `TrainState` and AdamW."""
    model, batch = GPT(tied=True), text(64)
    params = variables(model, batch["inputs"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    # A step counter that is a Python int would come back as an array, and a second call would be another signature.
    state = state.replace(step=jnp.zeros((), jnp.int32))

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_fn(params: Any) -> jax.Array:
            return likelihood(state.apply_fn({"params": params}, batch["inputs"]), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return train_step, (state, batch)


def optax_loop() -> Any:
    """The step that Optax's guide writes: parameters and optimizer state are arguments of their own."""
    model, batch, tx = MLP((32, 64, 64, 16)), regression(32, 16), optax.adamw(1e-3)
    params = variables(model, batch["x"])["params"]

    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            outputs: Any = model.apply({"params": params}, batch["x"])
            return squared(outputs, batch)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step, (params, tx.init(params), batch)


CASES = [
    *twins.variants("linen", make),
    Case(
        "linen_gpt_remat", partial(gpt, remat=True), tags=parse_tags("linen, attention, rematerialisation"),
        notes="unrolled layers, each recomputed",
    ),
    Case(
        "linen_user_train_state", train_state, tags=parse_tags("linen, attention, optimizer, train state"),
        notes="TrainState and AdamW", style="train_state",
    ),
    Case(
        "linen_user_optax", optax_loop, tags=parse_tags("linen, perceptron, optimizer"),
        notes="parameters and optimizer state apart", style="optax",
    ),
]  # fmt: skip
