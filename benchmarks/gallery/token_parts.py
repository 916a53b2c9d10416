"""Parts of small language models: norms, feed-forward parts, and every form of attention, position and recurrence.

`weights(name, *shape)` is a parameter. A mixer is a function (weights, name, x, batch, key) of [batch, tokens, width].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TOKENS, VOCAB, WIDE, HEADS = 16, 31, 16, 4
Weights = Callable[..., jax.Array]
Model = Callable[[Weights, Any, jax.Array], jax.Array]


# -- parts ------------------------------------------------------------------------------------------------------------


def dense(w: Weights, name: str, x: jax.Array, out: int) -> jax.Array:
    """A linear map of the last dim."""
    return x @ w(name, x.shape[-1], out)


def layer_norm(w: Weights, name: str, x: jax.Array) -> jax.Array:
    """As in GPT-2."""
    return jax.nn.standardize(x) * w(f"{name}.scale", x.shape[-1]) + w(f"{name}.bias", x.shape[-1])


def rms_norm(w: Weights, name: str, x: jax.Array) -> jax.Array:
    """As in Llama."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w(f"{name}.scale", x.shape[-1])


def heads(w: Weights, name: str, x: jax.Array, count: int = HEADS) -> jax.Array:
    """[batch, tokens, heads, size]."""
    size = WIDE // HEADS
    return dense(w, name, x, count * size).reshape(*x.shape[:2], count, size)


def projected(w: Weights, name: str, x: jax.Array, few: int = HEADS) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values, the latter two of `few` heads."""
    return heads(w, f"{name}.q", x), heads(w, f"{name}.k", x, few), heads(w, f"{name}.v", x, few)


def merged(w: Weights, name: str, x: jax.Array) -> jax.Array:
    """Heads joined, and mapped."""
    return dense(w, name, x.reshape(*x.shape[:2], -1), WIDE)


def rotated(x: jax.Array, places: jax.Array | None = None) -> jax.Array:
    """Rotary positions of [batch, tokens, heads, size]; `places`: [batch, tokens]."""
    places = jnp.arange(x.shape[1])[None] if places is None else places
    angle = places[..., None] / 100.0 ** (jnp.arange(x.shape[-1] // 2) / x.shape[-1])
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def causal(tokens: int) -> jax.Array:
    """[tokens, tokens], true at and before the diagonal."""
    return jnp.tril(jnp.ones((tokens, tokens), bool))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, bias: Any = 0.0, low: float = -1e9) -> jax.Array:
    """The plain form."""
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / math.sqrt(q.shape[-1]) + bias
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(jnp.where(mask, scores, low)), v)


def self_attention(w: Weights, name: str, x: jax.Array, mask: Any = None, bias: Any = 0.0) -> jax.Array:
    """Of one layer, in the plain form."""
    q, k, v = projected(w, name, x)
    return merged(w, f"{name}.o", attend(q, k, v, causal(x.shape[1]) if mask is None else mask, bias))


def mlp(w: Weights, name: str, x: jax.Array) -> jax.Array:
    """Two linear maps."""
    return dense(w, f"{name}.down", jax.nn.gelu(dense(w, f"{name}.up", x, 2 * WIDE)), WIDE)


def gated(w: Weights, name: str, x: jax.Array) -> jax.Array:
    """As in Llama."""
    up = jax.nn.silu(dense(w, f"{name}.gate", x, 2 * WIDE)) * dense(w, f"{name}.up", x, 2 * WIDE)
    return dense(w, f"{name}.down", up, WIDE)


def embedded(w: Weights, tokens: jax.Array, *, places: bool = True) -> jax.Array:
    """Embeddings, with learned positions."""
    x = w("embed", VOCAB, WIDE)[tokens]
    return x + w("places", 64, WIDE)[: tokens.shape[1]] if places else x


Mixer = Callable[[Weights, str, jax.Array, Any, jax.Array], jax.Array]


# -- attention --------------------------------------------------------------------------------------------------------


def plain(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """einsum, mask, softmax, einsum."""
    return self_attention(w, name, x)


def opaque(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """JAX's own function."""
    q, k, v = projected(w, name, x)
    return merged(w, f"{name}.o", jax.nn.dot_product_attention(q, k, v, is_causal=True))


def grouped_rotary(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Two heads of keys for four of queries, and rotary positions."""
    q, k, v = projected(w, name, x, 2)
    return merged(w, f"{name}.o", jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True))


def repeated_rotary(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """The same with keys that are repeated."""
    q, k, v = projected(w, name, x, 2)
    k, v = (jnp.repeat(y, 2, 2) for y in (rotated(k), v))
    return merged(w, f"{name}.o", attend(rotated(q), k, v, causal(x.shape[1]), low=-jnp.inf))


def alibi(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A bias that grows with the distance."""
    far = jnp.arange(x.shape[1])[None] - jnp.arange(x.shape[1])[:, None]
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    return self_attention(w, name, x, bias=slopes[:, None, None] * far)


def learned_bias(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A bias that is learned for each distance, as in T5's decoder."""
    far = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None]
    bias = w(f"{name}.far", 8, HEADS)[jnp.clip(far, 0, 7)]
    return self_attention(w, name, x, bias=jnp.moveaxis(bias, -1, 0))


def window(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Five tokens."""
    near = causal(x.shape[1]) & ~jnp.tril(jnp.ones((x.shape[1],) * 2, bool), -5)
    return self_attention(w, name, x, near)


def opaque_window(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """The same by JAX's function."""
    q, k, v = projected(w, name, x)
    seen = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(4, 0))
    return merged(w, f"{name}.o", seen)


def padded(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Behind the end of a text nothing is seen."""
    real = batch["real"]
    return self_attention(w, name, x, causal(x.shape[1]) & real[:, None, None, :])


def packed(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Several texts in a sequence, each with rotary positions of its own."""
    part, place = batch["part"], batch["place"]
    q, k, v = projected(w, name, x)
    same = part[:, :, None] == part[:, None, :]
    return merged(w, f"{name}.o", attend(rotated(q, place), rotated(k, place), v, (causal(x.shape[1]) & same)[:, None]))


def dropped(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Dropout of weights of attention and of what is attended."""
    one, two = jax.random.split(key)
    q, k, v = projected(w, name, x)
    scores = jnp.where(causal(x.shape[1]), jnp.einsum("blhd,bmhd->bhlm", q, k), -jnp.inf)
    keep = jax.random.bernoulli(one, 0.8, scores.shape)
    seen = jnp.einsum("bhlm,bmhd->blhd", jnp.where(keep, jax.nn.softmax(scores) / 0.8, 0), v)
    out = merged(w, f"{name}.o", seen)
    return jnp.where(jax.random.bernoulli(two, 0.8, out.shape), out / 0.8, 0)


def softcapped(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Scores through tanh, and norms of queries and keys."""
    q, k, v = projected(w, name, x)
    q, k = rms_norm(w, f"{name}.qn", q), rms_norm(w, f"{name}.kn", k)
    scores = 10 * jnp.tanh(jnp.einsum("blhd,bmhd->bhlm", q, k) / 10)
    weights = jax.nn.softmax(scores, where=causal(x.shape[1]))
    return merged(w, f"{name}.o", jnp.einsum("bhlm,bmhd->blhd", weights, v))


# -- recurrences and convolutions -------------------------------------------------------------------------------------


def joined(left: Any, right: Any) -> Any:
    """Of a linear recurrence."""
    return left[0] * right[0], left[1] * right[0] + right[1]


def state_space(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A gated linear recurrence by `associative_scan`."""
    decay = jax.nn.sigmoid(dense(w, f"{name}.decay", x, WIDE))
    inner = jax.lax.associative_scan(joined, (decay, (1 - decay**2) * dense(w, f"{name}.in", x, WIDE)), axis=1)[1]
    return dense(w, f"{name}.out", inner * jax.nn.silu(dense(w, f"{name}.gate", x, WIDE)), WIDE)


def recurrent(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A cell with a hidden state, by `scan`."""
    inner = w(f"{name}.h", WIDE, WIDE)

    def cell(h: jax.Array, x: jax.Array) -> Any:
        h = jnp.tanh(h @ inner + x)
        return h, h

    rows = jnp.swapaxes(dense(w, f"{name}.in", x, WIDE), 0, 1)
    return dense(w, f"{name}.out", jnp.swapaxes(jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), rows)[1], 0, 1), WIDE)


def linear_attention(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Running sums of products of keys and values, and of keys."""
    q, k, v = projected(w, name, x)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    memory = jnp.cumsum(jnp.einsum("blhd,blhe->blhde", k, v), 1)
    seen = jnp.einsum("blhd,blhde->blhe", q, memory) / jnp.einsum("blhd,blhd->blh", q, jnp.cumsum(k, 1))[..., None]
    return merged(w, f"{name}.o", seen)


def convolution(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Causal, of each channel by itself, then a dilated one of all."""
    numbers = ("NWC", "WIO", "NWC")
    x = jax.lax.conv_general_dilated(
        x, w(f"{name}.each", 4, 1, WIDE), (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=WIDE
    )
    kernel = w(f"{name}.all", 2, WIDE, WIDE)
    return jax.lax.conv_general_dilated(
        jax.nn.silu(x), kernel, (1,), [(2, 0)], rhs_dilation=(2,), dimension_numbers=numbers
    )


def taps(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A convolution as a sum of shifted tokens, and a token shift as in RWKV."""
    long = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    own = w(f"{name}.taps", 4, WIDE)
    x = sum(long[:, k : k + x.shape[1]] * own[k] for k in range(4)) + x
    before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return dense(w, f"{name}.out", x * jax.nn.sigmoid(before), WIDE)


def centred(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A convolution that sees the next token: what it makes is one token out of step."""
    kernel = w(f"{name}.kernel", 3, WIDE, WIDE)
    return jax.lax.conv_general_dilated(x, kernel, (1,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC"))


# -- mixers whose tokens depend on later ones -------------------------------------------------------------------------


def both_ways(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Attention without a mask."""
    return self_attention(w, name, x, True)


def prefixed(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """The first six tokens see each other."""
    first = jnp.arange(x.shape[1]) < 6
    return self_attention(w, name, x, causal(x.shape[1]) | first)


def from_the_end(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A linear recurrence that begins with the last token."""
    decay = jax.nn.sigmoid(dense(w, f"{name}.decay", x, WIDE))
    return dense(w, f"{name}.out", jax.lax.associative_scan(joined, (decay, x), reverse=True, axis=1)[1], WIDE)
