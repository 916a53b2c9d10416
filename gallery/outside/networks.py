"""Networks of the steps in `unusual.py`, in plain linen as their users write them."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from gallery.steps import module

Dense = functools.partial(nn.Dense, dtype=jnp.bfloat16)
Conv = functools.partial(nn.Conv, dtype=jnp.bfloat16)
Transposed = functools.partial(nn.ConvTranspose, dtype=jnp.bfloat16)
Norm = functools.partial(nn.LayerNorm, dtype=jnp.bfloat16)


@module
def Actor(self, x):
    """A policy and a value, by residual convolutions.

    [batch, height, width, channels] bytes to [batch, 18] logits and [batch] values.
    """
    x = x.astype(jnp.float32) / 255
    for width in (64, 128, 128):
        x = nn.max_pool(nn.Conv(width, (3, 3))(x), (3, 3), (2, 2), "SAME")
        for _ in range(2):
            y = nn.Conv(width, (3, 3))(nn.relu(x))
            x = x + nn.Conv(width, (3, 3))(nn.relu(y))
    x = nn.relu(nn.Dense(512)(nn.relu(x).reshape(x.shape[0], -1)))
    return nn.Dense(18)(x), nn.Dense(1)(x)[..., 0]


def choices(x: Any) -> Any:
    """[batch, features] to [batch, 32, 32]."""
    return Dense(1024)(nn.silu(Dense(1024)(x))).reshape(-1, 32, 32)


@module
def Moment(self, carry, given):
    """A moment of a world model: 32 choices of one in 32, expected from the memory and drawn once a frame is seen.

    Memory and choices; a frame's code, an action and a key. Logits are [batch, 32, 32].
    """
    memory, chosen = carry
    code, action, key = given
    x = nn.silu(Norm()(Dense(1024)(jnp.concatenate([chosen, action], -1))))
    memory, _ = nn.GRUCell(4096, dtype=jnp.bfloat16)(memory, x)
    expected = choices(memory)
    seen = choices(jnp.concatenate([memory, code], -1))
    hard = jax.nn.one_hot(jax.random.categorical(key, seen.astype(jnp.float32)), 32, dtype=jnp.bfloat16)
    soft = jax.nn.softmax(seen)
    chosen = (hard + soft - jax.lax.stop_gradient(soft)).reshape(memory.shape[0], -1)
    return (memory, chosen), (memory, chosen, expected, seen)


@module
def World(self, frames, actions, key):
    """A recurrent model of frames that follow from actions, a loop over time.

    [batch, time, 64, 64, 3] bytes to the same in float32, with the logits of `Moment` at each time.
    """
    batch, time = frames.shape[:2]
    x = frames.reshape(batch * time, *frames.shape[2:]).astype(jnp.bfloat16) / 255
    for width in (96, 192, 384, 768):
        x = nn.silu(Norm()(Conv(width, (4, 4), (2, 2))(x)))
    given = x.reshape(batch, time, -1), actions.astype(jnp.bfloat16), jax.random.split(key, time)
    axes: Any = ((1, 1, 0),)
    loop = nn.scan(Moment, variable_broadcast="params", split_rngs={"params": False}, in_axes=axes, out_axes=1)
    start = jnp.zeros((batch, 4096), jnp.bfloat16), jnp.zeros((batch, 1024), jnp.bfloat16)
    _, (memory, chosen, expected, seen) = loop()(start, given)
    y = Dense(4 * 4 * 768)(jnp.concatenate([memory, chosen], -1)).reshape(batch * time, 4, 4, 768)
    for width in (384, 192, 96):
        y = nn.silu(Norm()(Transposed(width, (4, 4), (2, 2))(y)))
    y = Transposed(3, (4, 4), (2, 2))(y)
    y = y.reshape(batch, time, *y.shape[1:]).astype(jnp.float32)
    return y, expected.astype(jnp.float32), seen.astype(jnp.float32)


@module
def Decoder(self, ids, *, layers, hidden, heads, vocabulary):
    """A GPT without biases, with squared ReLUs: [batch, length] tokens to logits."""
    norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
    dense = functools.partial(Dense, use_bias=False)
    x = nn.Embed(vocabulary, hidden, dtype=jnp.bfloat16)(ids)
    mask = nn.make_causal_mask(ids)
    for _ in range(layers):
        y = norm()(x)
        attention = nn.MultiHeadDotProductAttention(heads, dtype=jnp.bfloat16, use_bias=False)
        x = x + attention(y, y, mask=mask)
        y = jnp.square(nn.relu(dense(4 * hidden)(norm()(x))))
        x = x + dense(hidden)(y)
    return dense(vocabulary)(norm()(x))


def attend_to_chunk(state: Any, given: Any) -> tuple[Any, Any]:
    """One chunk: q, k and v are [batch, heads, chunk, size], the logarithms kept [batch, heads, chunk]."""
    q, k, v, kept = given
    kept = jnp.cumsum(kept, -1)
    weights = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    weights = weights * jnp.exp(jnp.tril(kept[..., :, None] - kept[..., None, :])).astype(jnp.bfloat16)
    weights = weights * jnp.tril(jnp.ones(weights.shape[-2:], jnp.bfloat16))
    faded = q * jnp.exp(kept)[..., None].astype(jnp.bfloat16)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights, v) + jnp.einsum("bhqd,bhde->bhqe", faded, state)
    added = k * jnp.exp(kept[..., -1:] - kept)[..., None].astype(jnp.bfloat16)
    state = state * jnp.exp(kept[..., -1])[..., None, None].astype(jnp.bfloat16)
    return state + jnp.einsum("bhkd,bhke->bhde", added, v), out


@module
def LinearBlock(self, x, *, size=128, chunk=128):
    """Linear attention that forgets, by a loop over chunks, and dense layers: [batch, length, hidden] to the same."""
    batch, length, hidden = x.shape
    heads, chunks = hidden // size, length // chunk
    y = Norm()(x)
    q, k, v = (
        Dense(hidden, use_bias=False)(y).reshape(batch, chunks, chunk, heads, size).transpose(1, 0, 3, 2, 4)
        for _ in range(3)
    )
    kept = jax.nn.log_sigmoid(nn.Dense(heads)(y.astype(jnp.float32)))
    kept = kept.reshape(batch, chunks, chunk, heads).transpose(1, 0, 3, 2)
    start = jnp.zeros((batch, heads, size, size), jnp.bfloat16)
    _, out = jax.lax.scan(attend_to_chunk, start, (q, k, v, kept))
    x = x + Dense(hidden)(out.transpose(1, 0, 3, 2, 4).reshape(batch, length, hidden))
    return x + Dense(hidden)(nn.gelu(Dense(4 * hidden)(Norm()(x))))


@module
def LinearDecoder(self, ids, *, layers, hidden, vocabulary):
    """A decoder of linear attention, each block computed again in the backward pass.

    [batch, length] tokens to logits.
    """
    x = nn.Embed(vocabulary, hidden, dtype=jnp.bfloat16)(ids)
    for _ in range(layers):
        x = nn.remat(LinearBlock)()(x)
    return Dense(vocabulary)(Norm()(x))


def attend_with_bias(x: Any, bias: Any, heads: int) -> Any:
    """Gated attention of [batch, rows, columns, channels] along its rows, in heads of 32."""
    y = Norm()(x)
    project = functools.partial(nn.DenseGeneral, (heads, 32), dtype=jnp.bfloat16)
    q, k, v = (project(use_bias=False)(y) for _ in range(3))
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * 32**-0.5 + bias
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16)
    out = jnp.einsum("...hqk,...khd->...qhd", weights, v) * nn.sigmoid(project()(y))
    return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=jnp.bfloat16)(out)


def pair_bias(pairs: Any, heads: int) -> Any:
    """[batch, length, length, channels] to what is added to scores, [batch, 1, heads, length, length]."""
    return jnp.moveaxis(Dense(heads, use_bias=False)(Norm()(pairs)), -1, -3)[:, None]


def gate_product(gate: Any, x: Any, width: int) -> Any:
    """A dense layer of x, as far as another lets it through."""
    return nn.sigmoid(Dense(width)(gate)) * Dense(width)(x)


def widen(x: Any) -> Any:
    """Two dense layers, with four times the channels between them."""
    return Dense(x.shape[-1])(nn.relu(Dense(4 * x.shape[-1])(Norm()(x))))


@module
def Evolution(self, carry, _):
    """A block on an alignment of sequences and on pairs of their places: triangles and attention along all axes.

    [batch, sequences, length, 256] and [batch, length, length, 128] to the same, as a scan wants it.
    """
    rows, pairs = carry
    width = pairs.shape[-1]
    rows = rows + attend_with_bias(rows, pair_bias(pairs, 8), 8)
    rows = rows + jnp.swapaxes(attend_with_bias(jnp.swapaxes(rows, 1, 2), 0.0, 8), 1, 2)
    rows = rows + widen(rows)
    y = Norm()(rows)
    products = jnp.einsum("bsic,bsjd->bijcd", Dense(32)(y), Dense(32)(y)) / rows.shape[1]
    pairs = pairs + nn.DenseGeneral(width, axis=(-2, -1), dtype=jnp.bfloat16)(products)
    for triangle in ("bikc,bjkc->bijc", "bkic,bkjc->bijc"):
        y = Norm()(pairs)
        made = jnp.einsum(triangle, gate_product(y, y, 128), gate_product(y, y, 128))
        pairs = pairs + gate_product(y, Norm()(made), width)
    pairs = pairs + attend_with_bias(pairs, pair_bias(pairs, 4), 4)
    turned = jnp.swapaxes(pairs, 1, 2)
    pairs = pairs + jnp.swapaxes(attend_with_bias(turned, pair_bias(turned, 4), 4), 1, 2)
    return (rows, pairs + widen(pairs)), None


@module
def Fold(self, rows, apart, *, layers, scan=True):
    """Distances of places from an alignment: a scan over blocks that are computed again in the backward pass, or none.

    [batch, sequences, length] letters and [batch, length, length] numbers to logits of distances and letters.
    """
    x = Dense(256)(jax.nn.one_hot(rows, 23, dtype=jnp.bfloat16))
    pairs = Dense(128)(x[:, 0])[:, :, None] + Dense(128)(x[:, 0])[:, None]
    pairs = pairs + nn.Embed(65, 128, dtype=jnp.bfloat16)(apart)
    block = nn.remat(Evolution, prevent_cse=False)
    if scan:
        block = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
    for _ in range(1 if scan else layers):
        (x, pairs), _ = block()((x, pairs), None)
    return nn.Dense(64)(pairs + jnp.swapaxes(pairs, 1, 2)), nn.Dense(23)(x)
