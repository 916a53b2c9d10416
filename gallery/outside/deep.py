"""Deep networks whose blocks are unlike one another, or route tokens, in plain linen as their users write them.

The search was not tuned on them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gallery.batches import f32, initial, shape
from gallery.outside.tutorials import rotate
from gallery.registry import Built, published_fields
from gallery.steps import cross_entropy, habits, module, statistical_step

Dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
Conv = functools.partial(nn.Conv, use_bias=False)
Norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)


@module
def DenseNet(self, x):
    """DenseNet-201: each of 98 blocks reads what all before it in its group have made.

    [batch, height, width, 3] to [batch, 1000].
    """

    def active(x: Any) -> Any:
        return nn.relu(nn.BatchNorm(use_running_average=False)(x))

    x = nn.max_pool(active(Conv(64, (7, 7), (2, 2))(x)), (3, 3), (2, 2), "SAME")
    for i, blocks in enumerate((6, 12, 48, 32)):
        if i:
            x = nn.avg_pool(Conv(x.shape[-1] // 2, (1, 1))(active(x)), (2, 2), (2, 2))
        for _ in range(blocks):
            x = jnp.concatenate([x, Conv(32, (3, 3))(active(Conv(128, (1, 1))(active(x))))], -1)
    return nn.Dense(1000)(active(x).mean((1, 2)))


@module
def EfficientNet(self, x):
    """EfficientNet-B7: 55 blocks of convolutions in groups of one channel, with a gate for each channel.

    [batch, height, width, 3] to [batch, 1000].
    """

    def normal(x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False)(x)

    x = nn.swish(normal(Conv(64, (3, 3), (2, 2))(x)))
    groups = (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), \
             (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)  # fmt: skip
    for expansion, width, depth, stride, size in groups:
        for block in range(math.ceil(3.1 * depth)):
            inner, steps = expansion * x.shape[-1], (stride if block == 0 else 1,) * 2
            y = nn.swish(normal(Conv(inner, (1, 1))(x))) if expansion > 1 else x
            y = nn.swish(normal(Conv(inner, (size, size), steps, feature_group_count=inner)(y)))
            gate = nn.swish(nn.Conv(x.shape[-1] // 4, (1, 1))(y.mean((1, 2), keepdims=True)))
            y = normal(Conv(2 * width, (1, 1))(y * nn.sigmoid(nn.Conv(inner, (1, 1))(gate))))
            x = x + y if x.shape == y.shape else y
    return nn.Dense(1000)(nn.swish(normal(Conv(2560, (1, 1))(x))).mean((1, 2)))


def classification_step(model: nn.Module, batch: int, size: int, optimizer: Any) -> Built:
    """A classifier of pictures with running statistics."""

    def apply(variables: Any, pictures: Any) -> Any:
        return model.apply(variables, pictures, mutable=["batch_stats"])

    variables = initial(model, f32(1, size, size, 3))
    return statistical_step(apply, variables, optimizer, f32(batch, size, size, 3), shape(batch))


@module
def Experts(self, x):
    """Six of 64 experts for each token, in order of arrival as far as they have room, and two that all share.

    [batch, length, width] to the same.
    """
    tokens = x.reshape(-1, x.shape[-1])
    count, width = tokens.shape
    gates = jax.nn.softmax(nn.Dense(64, use_bias=False)(tokens.astype(jnp.float32)))
    weights, chosen = jax.lax.top_k(gates, 6)
    room = count * 6 // 64 * 5 // 4
    first = jax.nn.one_hot(chosen.reshape(-1), 64, dtype=jnp.int32)
    place = ((jnp.cumsum(first, 0) - 1) * first).sum(-1).reshape(chosen.shape)
    slot = jnp.where(place < room, chosen * room + place, 64 * room)
    queues = jnp.zeros((64 * room + 1, width), jnp.bfloat16).at[slot.reshape(-1)].set(jnp.repeat(tokens, 6, 0))
    queues = queues[:-1].reshape(64, room, width)
    normal = nn.initializers.normal(0.02)
    up, gate = (self.param(name, normal, (64, width, 1408), jnp.bfloat16) for name in ("up", "gate"))
    down = self.param("down", normal, (64, 1408, width), jnp.bfloat16)
    hidden = nn.silu(jnp.einsum("ecf,efd->ecd", queues, gate)) * jnp.einsum("ecf,efd->ecd", queues, up)
    out = jnp.einsum("ecf,efd->ecd", hidden, down).reshape(-1, width)
    out = jnp.concatenate([out, jnp.zeros((1, width), out.dtype)])[slot] * weights[..., None].astype(out.dtype)
    return out.sum(1).reshape(x.shape) + gated_mlp(x, 2816)


def gated_mlp(x: Any, inner: int) -> Any:
    """The feed-forward part of a Llama."""
    return Dense(x.shape[-1])(nn.silu(Dense(inner)(x)) * Dense(inner)(x))


@module
def Latent(self, x):
    """Attention whose keys and values are made of 512 numbers for each token, with one rotary key for all heads.

    [batch, length, 2048] to the same.
    """
    batch, length, width = x.shape
    queries = Dense(16 * 192)(x).reshape(batch, length, 16, 192)
    latent = Dense(576)(x)
    both = Dense(16 * 256)(Norm()(latent[..., :512])).reshape(batch, length, 16, 256)
    rotary = jnp.broadcast_to(rotate(latent[..., None, 512:]), (batch, length, 16, 64))
    queries = jnp.concatenate([queries[..., :128], rotate(queries[..., 128:])], -1)
    keys = jnp.concatenate([both[..., :128], rotary], -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(192)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9).astype(jnp.float32)
    seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(jnp.bfloat16), both[..., 128:])
    return Dense(width)(seen.reshape(batch, length, -1))


@module
def Routed(self, tokens):
    """A language model of 16 billion parameters: 27 layers of latent attention, experts in all but the first.

    [batch, length] to [batch, length, 102400].
    """
    x = nn.Embed(102400, 2048, dtype=jnp.bfloat16)(tokens)
    for layer in range(27):
        x = x + Latent()(Norm()(x))
        x = x + (Experts()(Norm()(x)) if layer else gated_mlp(Norm()(x), 10944))
    return Dense(102400)(Norm()(x))


def routed(batch: int, length: int) -> Built:
    """The language model with AdamW."""
    model = Routed()

    def loss(params: Any, tokens: Any) -> Any:
        return cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    return habits(loss, initial(model, shape(1, 128)), optax.adamw(1e-4), shape(batch, length + 1))


PLANNED: dict[str, dict[str, Any]] = {
    "densenet-201": published_fields("a100", classification_step, DenseNet(), 512, 224, optax.sgd(0.1, momentum=0.9)),
    "efficientnet-b7": published_fields(
        "v5p:2x2x2", classification_step, EfficientNet(), 128, 600, optax.rmsprop(0.01, momentum=0.9)
    ),
    "routed-16b": published_fields("h100 x 4", routed, 64, 4096),
}
