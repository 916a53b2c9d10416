"""Cases in Flax linen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from tests.zoo_base import Case, attend, cross_entropy, filled, images, normal, regression, route, text, updated

Loss = Callable[[jax.Array, Any], jax.Array]


class MLP(nn.Module):
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for size in self.sizes[:-1]:
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
        x = embed(tokens) + nn.Embed(tokens.shape[1], self.hidden, dtype=self.dtype)(jnp.arange(tokens.shape[1]))
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

    channels: int = 8
    classes: int = 8
    blocks: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.channels, (3, 3))(x)
        for _ in range(self.blocks):
            y = nn.Conv(self.channels, (3, 3))(nn.gelu(nn.GroupNorm(4)(x)))
            x = x + nn.Conv(self.channels, (3, 3), use_bias=False)(nn.gelu(y))
        return nn.Dense(self.classes)(x.mean((1, 2)))


class UNet(nn.Module):
    """Convolutions down and up again, with skips that cross what lies between."""

    channels: int = 8
    outputs: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, channels: int) -> jax.Array:
            return nn.gelu(nn.Conv(channels, (3, 3))(x))

        skips = []
        for depth in (1, 2):
            skips.append(block(x, depth * self.channels))
            x = nn.avg_pool(skips[-1], (2, 2), (2, 2))
        x = block(x, 4 * self.channels)
        for depth in (2, 1):
            x = nn.ConvTranspose(depth * self.channels, (2, 2), strides=(2, 2))(x)
            x = block(jnp.concatenate([x, skips.pop()], -1), depth * self.channels)
        return nn.Conv(self.outputs, (1, 1))(x)


class Translator(nn.Module):
    """An encoder, whose result every layer of the decoder reads, and a decoder."""

    vocab: int = 64
    hidden: int = 32
    heads: int = 4
    layers: int = 2

    @nn.compact
    def __call__(self, tokens: dict[str, jax.Array]) -> jax.Array:
        split = (self.heads, self.hidden // self.heads)

        def attention(x: jax.Array, memory: jax.Array, *, causal: bool) -> jax.Array:
            q = nn.DenseGeneral(split)(nn.LayerNorm()(x))
            memory = nn.LayerNorm()(memory)
            k, v = nn.DenseGeneral(split)(memory), nn.DenseGeneral(split)(memory)
            return x + nn.DenseGeneral(self.hidden, axis=(-2, -1))(attend(q, k, v, causal=causal))

        def dense(x: jax.Array) -> jax.Array:
            return x + nn.Dense(self.hidden)(nn.gelu(nn.Dense(2 * self.hidden)(nn.LayerNorm()(x))))

        embed = nn.Embed(self.vocab, self.hidden)
        memory, x = embed(tokens["source"]), embed(tokens["inputs"])
        for _ in range(self.layers):
            memory = dense(attention(memory, memory, causal=False))
        for _ in range(self.layers):
            x = dense(attention(attention(x, x, causal=True), memory, causal=False))
        return nn.Dense(self.vocab)(nn.LayerNorm()(x))


class MoE(nn.Module):
    inner: int = 32
    experts: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = x.shape[-1]
        init = nn.initializers.lecun_normal()
        up = self.param("up", init, (self.experts, hidden, self.inner))
        down = self.param("down", init, (self.experts, self.inner, hidden))
        combine = route(jax.nn.softmax(nn.Dense(self.experts, use_bias=False)(x)), slots=6)
        inputs = jnp.einsum("gnec,gnm->egcm", (combine > 0).astype(x.dtype), x)
        inner = nn.gelu(jnp.einsum("egcm,emh->egch", inputs, up))
        return x + jnp.einsum("gnec,egch,ehm->gnm", combine, inner, down)


class Recurrent(nn.Module):
    hidden: int = 32
    outputs: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden: Any = nn.RNN(nn.GRUCell(self.hidden))(x)
        return nn.Dense(self.outputs)(hidden[:, -1])


def squared(outputs: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((outputs - batch["y"]) ** 2)


def classified(outputs: jax.Array, batch: Any) -> jax.Array:
    return cross_entropy(outputs, batch["y"])


def likelihood(outputs: jax.Array, batch: Any) -> jax.Array:
    return cross_entropy(outputs, batch["targets"])


def variables(model: nn.Module, inputs: Any) -> Any:
    """The module's variables, filled."""
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return filled(jax.eval_shape(model.init, rngs, inputs))


def case(
    model: nn.Module, loss_fn: Loss, batch: Any, *, inputs: str = "x", tx: optax.GradientTransformation | None = None
) -> Any:
    """A step of `model`; with dropout it takes a typed key as its third argument."""
    state = dict(variables(model, batch[inputs]))
    mutable = [name for name in state if name != "params"]
    dropout = bool(getattr(model, "dropout", 0))
    if tx is not None:
        state["opt_state"] = tx.init(state["params"])

    def step(state: dict[str, Any], batch: Any, key: jax.Array | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        def inner(params: Any) -> tuple[jax.Array, Any]:
            trees = {name: state[name] for name in mutable}
            rngs = {"dropout": key} if key is not None else None
            outputs, changed = model.apply({"params": params, **trees}, batch[inputs], mutable=mutable, rngs=rngs)
            return loss_fn(outputs, batch), changed

        (loss, changed), grads = jax.value_and_grad(inner, has_aux=True)(state["params"])
        new = dict(changed)
        if tx is None:
            new["params"] = updated(state["params"], grads)
        else:
            updates, new["opt_state"] = tx.update(grads, state["opt_state"], state["params"])
            new["params"] = optax.apply_updates(state["params"], updates)
        return new, {"loss": loss, "grads": grads}

    return step, (state, batch, jax.random.key(5)) if dropout else (state, batch)


def mlp(*sizes: int) -> Any:
    return case(MLP(sizes[1:]), squared, regression(sizes[0], sizes[-1]))


def gpt(tx: optax.GradientTransformation | None = None, seq: int = 16, **options: Any) -> Any:
    batch = text(options.get("vocab", 64), seq=seq)
    return case(GPT(**options), likelihood, batch, inputs="inputs", tx=tx)


def convnet(channels: int = 16, classes: int = 8) -> Any:
    return case(ConvNet(channels, classes), classified, images(8, classes))


def resnet(**options: Any) -> Any:
    return case(ResNet(**options), classified, images(8, 8))


def unet(**options: Any) -> Any:
    return case(UNet(**options), squared, {"x": normal(3, 8, 8, 8, 4), "y": normal(4, 8, 8, 8, 4)})


def translator(**options: Any) -> Any:
    batch = text(64, seq=8)
    tokens = {"source": text(64, seq=12)["targets"], "inputs": batch["inputs"]}
    return case(Translator(**options), likelihood, {"tokens": tokens, "targets": batch["targets"]}, inputs="tokens")


def moe() -> Any:
    batch = regression(16 * 16, 16 * 16, batch=8)
    return case(MoE(), squared, {name: x.reshape(8, 16, 16) for name, x in batch.items()})


def gru() -> Any:
    batch = regression(12 * 16, 8, batch=8)
    return case(Recurrent(), squared, {"x": batch["x"].reshape(8, 12, 16), "y": batch["y"]})


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
    model, batch, tx = MLP((64, 64, 16)), regression(32, 16), optax.adamw(1e-3)
    params = variables(model, batch["x"])["params"]

    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            outputs: Any = model.apply({"params": params}, batch["x"])
            return squared(outputs, batch)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step, (params, tx.init(params), batch)


def _clip() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))


CASES = [
    Case("linen_mlp", partial(mlp, 32, 64, 64, 16)),
    Case("linen_mlp_odd", partial(mlp, 33, 30, 6, 3), notes="no feature dim divides by eight", divisible=False),
    Case("linen_gpt", gpt, notes="unrolled layers"),
    Case("linen_gpt_scan", partial(gpt, scan=True, layers=3), notes="scanned layers, an odd number of them"),
    Case("linen_gpt_scan_remat", partial(gpt, scan=True, remat=True), notes="scanned layers, each recomputed"),
    Case("linen_gpt_remat", partial(gpt, remat=True), notes="unrolled layers, each recomputed"),
    Case("linen_gpt_tied", partial(gpt, tied=True), notes="one embedding used twice"),
    Case(
        "linen_gpt_odd",
        partial(gpt, vocab=67, seq=12, hidden=24, heads=3, tied=True),
        notes="vocabulary, sequence and heads do not divide by eight",
        divisible=False,
    ),
    Case("linen_gpt_dropout", partial(gpt, dropout=0.25), notes="a typed key as an argument"),
    Case("linen_gpt_scan_dropout", partial(gpt, dropout=0.25, scan=True), notes="a key split over scanned layers"),
    Case("linen_gpt_bf16", partial(gpt, dtype=jnp.bfloat16), dtype="bfloat16", reference=gpt),
    Case("linen_gpt_clip", lambda: gpt(_clip()), notes="the update depends on the norm of all gradients"),
    Case("linen_convnet", convnet, notes="batch norm, two kinds of pooling, a residual"),
    Case("linen_convnet_odd", partial(convnet, 6, 5), notes="channels do not divide by eight", divisible=False),
    Case("linen_resnet", resnet, notes="residual convolutions, group norm instead of batch norm"),
    Case("linen_unet", unet, notes="skips, a transposed convolution, concatenation"),
    Case("linen_translator", translator, notes="an encoder and a decoder, both with the embedding"),
    Case("linen_moe", moe, notes="top_k, cumulative sums, dropped tokens"),
    Case("linen_gru", gru, notes="lax.scan over time"),
    Case("linen_user_train_state", train_state, notes="TrainState and AdamW", style="train_state"),
    Case("linen_user_optax", optax_loop, notes="parameters and optimizer state apart", style="optax"),
]
