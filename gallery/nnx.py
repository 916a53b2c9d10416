"""Cases in Flax NNX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gallery import twins
from gallery.batches import random_arrays
from gallery.registry import Case, parse_tags
from gallery.twins import attend, route


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, sizes: tuple[int, ...]):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x) if layer is self.layers[-1] else nnx.relu(layer(x))
        return x


class Block(nnx.Module):
    def __init__(self, hidden: int, heads: int, dropout: float, dtype: Any, rngs: nnx.Rngs):
        split = (heads, hidden // heads)
        self.norms = nnx.List([nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.List([nnx.LinearGeneral(hidden, split, dtype=dtype, rngs=rngs) for _ in range(3)])
        self.out = nnx.LinearGeneral(split, hidden, axis=(-2, -1), dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(hidden, 4 * hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * hidden, hidden, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norms[0](x)
        y = self.out(attend(*[project(y) for project in self.qkv]))
        x = x + (y if self.dropout is None else self.dropout(y))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """A small decoder: unrolled or scanned, tied or not, with dropout, remat and a compute dtype."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        vocab: int = 64,
        seq: int = 16,
        hidden: int = 32,
        heads: int = 8,
        layers: int = 2,
        scan: bool = False,
        tied: bool = False,
        remat: bool = False,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
    ):
        self.layers, self.scan, self.remat = layers, scan, remat
        self.tokens = nnx.Embed(vocab, hidden, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(seq, hidden, dtype=dtype, rngs=rngs)

        def create(rngs: nnx.Rngs) -> Block:
            return Block(hidden, heads, dropout, dtype, rngs)

        self.blocks: Any
        if scan:
            self.blocks = nnx.split_rngs(splits=layers)(nnx.vmap(create))(rngs)
        else:
            self.blocks = nnx.List([create(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.head = None if tied else nnx.Linear(hidden, vocab, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        call = nnx.remat(Block.__call__) if self.remat else Block.__call__
        if self.scan:
            x = nnx.scan(lambda x, b: call(b, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = call(block, x)
        x = self.norm(x)
        return self.tokens.attend(x) if self.head is None else self.head(x)


class ConvNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, channels: int = 16, classes: int = 8):
        self.convs = nnx.List(
            [nnx.Conv(a, channels, (3, 3), use_bias=False, rngs=rngs) for a in (8, channels, channels)]
        )
        self.norms = nnx.List([nnx.BatchNorm(channels, momentum=0.9, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norms[0](self.convs[0](x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        y = nnx.relu(self.norms[1](self.convs[1](x)))
        x = nnx.avg_pool(x + self.norms[2](self.convs[2](y)), (2, 2), (2, 2))
        return self.head(x.mean((1, 2)))


class ResNet(nnx.Module):
    """A residual convolutional net without batch norm: examples do not meet, so it may be cut into micro-batches."""

    def __init__(self, rngs: nnx.Rngs):
        def conv(**options: Any) -> nnx.Conv:
            return nnx.Conv(8, 8, (3, 3), rngs=rngs, **options)

        self.stem = conv()
        self.norms = nnx.List([nnx.GroupNorm(8, 4, rngs=rngs) for _ in range(4)])
        self.first = nnx.List([conv() for _ in range(4)])
        self.second = nnx.List([conv(use_bias=False) for _ in range(4)])
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for norm, first, second in zip(self.norms, self.first, self.second, strict=True):
            x = x + second(nnx.gelu(first(nnx.gelu(norm(x)))))
        return self.head(x.mean((1, 2)))


class UNet(nnx.Module):
    """Convolutions down and up again, with skips that cross what lies between."""

    def __init__(self, rngs: nnx.Rngs):
        sizes, ups = pairwise((4, 8, 16, 32)), pairwise((32, 16, 8))
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in (*sizes, (32, 16), (16, 8))])
        self.ups = nnx.List([nnx.ConvTranspose(a, b, (2, 2), strides=(2, 2), rngs=rngs) for a, b in ups])
        self.head = nnx.Conv(8, 4, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skips = []
        for conv in self.convs[:2]:
            skips.append(nnx.gelu(conv(x)))
            x = nnx.avg_pool(skips[-1], (2, 2), (2, 2))
        x = nnx.gelu(self.convs[2](x))
        for up, conv in zip(self.ups, self.convs[3:], strict=True):
            x = nnx.gelu(conv(jnp.concatenate([up(x), skips.pop()], -1)))
        return self.head(x)


class Translator(nnx.Module):
    """An encoder, whose result the decoder's attention reads, and a decoder."""

    def __init__(self, rngs: nnx.Rngs):
        def projections() -> nnx.List:
            linears = [nnx.LinearGeneral(32, (4, 8), rngs=rngs) for _ in range(3)]
            return nnx.List([*linears, nnx.LinearGeneral((4, 8), 32, axis=(-2, -1), rngs=rngs)])

        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.encoder = nnx.List([Block(32, 4, 0.0, None, rngs) for _ in range(2)])
        self.decoder = nnx.List([Block(32, 4, 0.0, None, rngs) for _ in range(2)])
        self.crossing = nnx.List([projections() for _ in range(2)])
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens: dict[str, jax.Array]) -> jax.Array:
        memory, x = self.embed(tokens["source"]), self.embed(tokens["inputs"])
        for block in self.encoder:
            memory = block(memory)
        for block, (q, k, v, out) in zip(self.decoder, self.crossing, strict=True):
            x = block(x)
            x = x + out(attend(q(x), k(memory), v(memory), causal=False))
        return self.head(x)


class MoE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.gate = nnx.Linear(16, 8, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (8, 16, 32)))
        self.down = nnx.Param(init(rngs.params(), (8, 32, 16)))

    def __call__(self, x: jax.Array) -> jax.Array:
        combine = route(jax.nn.softmax(self.gate(x)), slots=6)
        inputs = jnp.einsum("gnec,gnm->egcm", (combine > 0).astype(x.dtype), x)
        inner = nnx.gelu(jnp.einsum("egcm,emh->egch", inputs, self.up[...]))
        return x + jnp.einsum("gnec,egch,ehm->gnm", combine, inner, self.down[...])


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(16, 32, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden: Any = self.rnn(x)
        return self.head(hidden[:, -1])


MODELS: dict[str, Callable[..., nnx.Module]] = {
    "mlp": MLP, "gpt": GPT, "convnet": ConvNet, "resnet": ResNet, "unet": UNet, "translator": Translator, "moe": MoE,
    "gru": Recurrent,
}  # fmt: skip


def task(kind: str, **options: Any) -> tuple[Callable[[nnx.Rngs], nnx.Module], Callable[[Any, Any], jax.Array], Any]:
    """What creates a model, its loss of a batch, and a batch."""
    loss_fn, batch, inputs = twins.task(kind, **options)
    return partial(MODELS[kind], **options), lambda model, batch: loss_fn(model(batch[inputs]), batch), batch


def make(kind: str, tx: optax.GradientTransformation | None = None, **options: Any) -> Any:
    """A functional step of a model; by plain gradient descent unless `tx` is given."""
    create, loss_fn, batch = task(kind, **options)
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))), nnx.Param, ...)
    state = {"params": random_arrays(nnx.to_pure_dict(params)), "rest": random_arrays(nnx.to_pure_dict(rest), 1)}
    if tx is not None:
        state["opt_state"] = tx.init(state["params"])

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        def inner(params: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graphdef, params, state["rest"])
            loss = loss_fn(model, batch)
            return loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

        (loss, rest), grads = jax.value_and_grad(inner, has_aux=True)(state["params"])
        return {"rest": rest, **twins.advanced(state, grads, tx)}, {"loss": loss, "grads": grads}

    return step, (state, batch)


gpt = partial(make, "gpt")


def in_place(kind: str, **options: Any) -> Any:
    """The step that NNX's own guide writes: the model and the optimizer are arguments, and change."""
    create, loss_fn, batch = task(kind, **options)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))))
    model = nnx.merge(graphdef, random_arrays(nnx.to_pure_dict(state)))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step, (model, optimizer, batch)


CASES = [
    *twins.variants("nnx", make),
    Case(
        "nnx_user_gpt", partial(in_place, "gpt", tied=True, dropout=0.25),
        tags=parse_tags("nnx, attention, random, optimizer, mutable state"),
        notes="updates in place, a shared parameter, dropout counters", style="nnx",
    ),
    Case(
        "nnx_user_convnet", partial(in_place, "convnet"), tags=parse_tags("nnx, convolution, optimizer, mutable state"),
        notes="updates in place, batch statistics", style="nnx",
    ),
]  # fmt: skip
