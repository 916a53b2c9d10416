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

from tests.zoo_base import Case, attend, cross_entropy, filled, images, normal, regression, route, text, updated


def step_and_state(
    create: Callable[[nnx.Rngs], nnx.Module],
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation | None = None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A functional step of an NNX module, and its state; by plain gradient descent unless `tx` is given."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))), nnx.Param, ...)
    state = {"params": filled(nnx.to_pure_dict(params)), "rest": filled(nnx.to_pure_dict(rest), 1)}
    if tx is not None:
        state["opt_state"] = tx.init(state["params"])

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        def inner(params: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graphdef, params, state["rest"])
            loss = loss_fn(model, batch)
            return loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

        (loss, rest), grads = jax.value_and_grad(inner, has_aux=True)(state["params"])
        new = {"rest": rest}
        if tx is None:
            new["params"] = updated(state["params"], grads)
        else:
            updates, new["opt_state"] = tx.update(grads, state["opt_state"], state["params"])
            new["params"] = optax.apply_updates(state["params"], updates)
        return new, {"loss": loss, "grads": grads}

    return step, state


class MLP(nnx.Module):
    def __init__(self, sizes: tuple[int, ...], rngs: nnx.Rngs):
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

    def __init__(self, rngs: nnx.Rngs, inputs: int = 8, channels: int = 8, classes: int = 8, blocks: int = 4):
        def conv(**options: Any) -> nnx.Conv:
            return nnx.Conv(channels, channels, (3, 3), rngs=rngs, **options)

        self.stem = nnx.Conv(inputs, channels, (3, 3), rngs=rngs)
        self.norms = nnx.List([nnx.GroupNorm(channels, 4, rngs=rngs) for _ in range(blocks)])
        self.first = nnx.List([conv() for _ in range(blocks)])
        self.second = nnx.List([conv(use_bias=False) for _ in range(blocks)])
        self.head = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for norm, first, second in zip(self.norms, self.first, self.second, strict=True):
            x = x + second(nnx.gelu(first(nnx.gelu(norm(x)))))
        return self.head(x.mean((1, 2)))


class UNet(nnx.Module):
    """Convolutions down and up again, with skips that cross what lies between."""

    def __init__(self, rngs: nnx.Rngs, inputs: int = 4, channels: int = 8):
        c = channels
        sizes = ((inputs, c), (c, 2 * c), (2 * c, 4 * c), (4 * c, 2 * c), (2 * c, c))
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in sizes])
        ups = ((4 * c, 2 * c), (2 * c, c))
        self.ups = nnx.List([nnx.ConvTranspose(a, b, (2, 2), strides=(2, 2), rngs=rngs) for a, b in ups])
        self.head = nnx.Conv(c, inputs, (1, 1), rngs=rngs)

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

    def __init__(self, rngs: nnx.Rngs, vocab: int = 64, hidden: int = 32, heads: int = 4, layers: int = 2):
        split = (heads, hidden // heads)

        def projections() -> nnx.List:
            linears = [nnx.LinearGeneral(hidden, split, rngs=rngs) for _ in range(3)]
            return nnx.List([*linears, nnx.LinearGeneral(split, hidden, axis=(-2, -1), rngs=rngs)])

        self.embed = nnx.Embed(vocab, hidden, rngs=rngs)
        self.encoder = nnx.List([Block(hidden, heads, 0.0, None, rngs) for _ in range(layers)])
        self.decoder = nnx.List([Block(hidden, heads, 0.0, None, rngs) for _ in range(layers)])
        self.crossing = nnx.List([projections() for _ in range(layers)])
        self.head = nnx.Linear(hidden, vocab, rngs=rngs)

    def __call__(self, tokens: dict[str, jax.Array]) -> jax.Array:
        memory, x = self.embed(tokens["source"]), self.embed(tokens["inputs"])
        for block in self.encoder:
            memory = block(memory)
        for block, (q, k, v, out) in zip(self.decoder, self.crossing, strict=True):
            x = block(x)
            x = x + out(attend(q(x), k(memory), v(memory), causal=False))
        return self.head(x)


class MoE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, hidden: int = 16, inner: int = 32, experts: int = 8):
        init = nnx.initializers.lecun_normal()
        self.gate = nnx.Linear(hidden, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (experts, hidden, inner)))
        self.down = nnx.Param(init(rngs.params(), (experts, inner, hidden)))

    def __call__(self, x: jax.Array) -> jax.Array:
        combine = route(jax.nn.softmax(self.gate(x)), slots=6)
        inputs = jnp.einsum("gnec,gnm->egcm", (combine > 0).astype(x.dtype), x)
        inner = nnx.gelu(jnp.einsum("egcm,emh->egch", inputs, self.up[...]))
        return x + jnp.einsum("gnec,egch,ehm->gnm", combine, inner, self.down[...])


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, inputs: int = 16, hidden: int = 32, outputs: int = 8):
        self.rnn = nnx.RNN(nnx.GRUCell(inputs, hidden, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(hidden, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden: Any = self.rnn(x)
        return self.head(hidden[:, -1])


def squared(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def classified(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch["x"]), batch["y"])


def likelihood(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def mlp(*sizes: int) -> Any:
    step, state = step_and_state(lambda rngs: MLP(sizes, rngs), squared)
    return step, (state, regression(sizes[0], sizes[-1]))


def gpt(tx: optax.GradientTransformation | None = None, **options: Any) -> Any:
    step, state = step_and_state(lambda rngs: GPT(rngs, **options), likelihood, tx)
    return step, (state, text(options.get("vocab", 64), seq=options.get("seq", 16)))


def convnet(channels: int = 16, classes: int = 8) -> Any:
    step, state = step_and_state(lambda rngs: ConvNet(rngs, channels, classes), classified)
    return step, (state, images(8, classes))


def resnet(**options: Any) -> Any:
    step, state = step_and_state(lambda rngs: ResNet(rngs, **options), classified)
    return step, (state, images(8, 8))


def unet(**options: Any) -> Any:
    step, state = step_and_state(lambda rngs: UNet(rngs, **options), squared)
    return step, (state, {"x": normal(3, 8, 8, 8, 4), "y": normal(4, 8, 8, 8, 4)})


def translator(**options: Any) -> Any:
    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["tokens"]), batch["targets"])

    step, state = step_and_state(lambda rngs: Translator(rngs, **options), loss_fn)
    batch = text(64, seq=8)
    tokens = {"source": text(64, seq=12)["targets"], "inputs": batch["inputs"]}
    return step, (state, {"tokens": tokens, "targets": batch["targets"]})


def moe() -> Any:
    step, state = step_and_state(MoE, squared)
    batch = regression(16 * 16, 16 * 16, batch=8)
    return step, (state, {name: x.reshape(8, 16, 16) for name, x in batch.items()})


def gru() -> Any:
    step, state = step_and_state(Recurrent, squared)
    batch = regression(12 * 16, 8, batch=8)
    return step, (state, {"x": batch["x"].reshape(8, 12, 16), "y": batch["y"]})


def in_place(create: Callable[[nnx.Rngs], nnx.Module], loss_fn: Callable[[Any, Any], jax.Array], batch: Any) -> Any:
    """The step that NNX's own guide writes: the model and the optimizer are arguments, and change."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))))
    model = nnx.merge(graphdef, filled(nnx.to_pure_dict(state)))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step, (model, optimizer, batch)


def _clip() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))


CASES = [
    Case("nnx_mlp", partial(mlp, 32, 64, 64, 16)),
    Case("nnx_mlp_odd", partial(mlp, 33, 30, 6, 3), notes="no feature dim divides by eight", divisible=False),
    Case("nnx_gpt", gpt, notes="unrolled layers"),
    Case("nnx_gpt_scan", partial(gpt, scan=True, layers=3), notes="scanned layers, an odd number of them"),
    Case("nnx_gpt_scan_remat", partial(gpt, scan=True, remat=True), notes="scanned layers, each recomputed"),
    Case("nnx_gpt_tied", partial(gpt, tied=True), notes="one embedding used twice"),
    Case(
        "nnx_gpt_odd",
        partial(gpt, vocab=67, seq=12, hidden=24, heads=3, tied=True),
        notes="vocabulary, sequence and heads do not divide by eight",
        divisible=False,
    ),
    Case("nnx_gpt_dropout", partial(gpt, dropout=0.25), notes="typed keys and counts within the state"),
    Case("nnx_gpt_scan_dropout", partial(gpt, dropout=0.25, scan=True), notes="a stacked key, one for each layer"),
    Case("nnx_gpt_bf16", partial(gpt, dtype=jnp.bfloat16), dtype="bfloat16", reference=gpt),
    Case("nnx_gpt_clip", lambda: gpt(_clip()), notes="the update depends on the norm of all gradients"),
    Case("nnx_convnet", convnet, notes="batch norm, two kinds of pooling, a residual"),
    Case("nnx_convnet_odd", partial(convnet, 6, 5), notes="channels do not divide by eight", divisible=False),
    Case("nnx_resnet", resnet, notes="residual convolutions, group norm instead of batch norm"),
    Case("nnx_unet", unet, notes="skips, a transposed convolution, concatenation"),
    Case("nnx_translator", translator, notes="an encoder and a decoder, both with the embedding"),
    Case("nnx_moe", moe, notes="top_k, cumulative sums, dropped tokens"),
    Case("nnx_gru", gru, notes="lax.scan over time"),
    Case(
        "nnx_user_gpt",
        lambda: in_place(lambda rngs: GPT(rngs, tied=True, dropout=0.25), likelihood, text(64)),
        notes="updates in place, a shared parameter, dropout counters",
        style="nnx",
    ),
    Case(
        "nnx_user_convnet",
        lambda: in_place(ConvNet, classified, images(8, 8)),
        notes="updates in place, batch statistics",
        style="nnx",
    ),
]
