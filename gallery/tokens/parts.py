"""Parts of small language models: norms, feed-forward parts, and every form of attention, position and recurrence.

`w(name, *shape)` is a parameter, and `w / name` has those of a part. A mixer is a function (w, x, batch, key) of
[batch, tokens, width].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

TOKENS, VOCAB, WIDE, HEADS = 16, 31, 16, 4
Array = jax.Array


@dataclass(frozen=True)
class Weights:
    """Parameters by name, `get` of their names and shapes."""

    get: Callable[..., Array]
    scope: str = ""

    def __call__(self, name: str, *shape: int) -> Array:
        """A parameter."""
        return self.get(self.scope + name, *shape)

    def __truediv__(self, part: Any) -> Weights:
        """The parameters of a part."""
        return Weights(self.get, f"{self.scope}{part}.")


Mixer = Callable[[Weights, Array, Any, Array], Array]


# -- parts ------------------------------------------------------------------------------------------------------------


def dense(w: Weights, name: str, x: Array, out: int = WIDE) -> Array:
    """A linear map of the last dim."""
    return x @ w(name, x.shape[-1], out)


def layer_norm(w: Weights, x: Array) -> Array:
    """As in GPT-2."""
    return jax.nn.standardize(x) * w("scale", x.shape[-1]) + w("bias", x.shape[-1])


def rms_norm(w: Weights, x: Array) -> Array:
    """As in Llama."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w("scale", x.shape[-1])


def heads(w: Weights, name: str, x: Array, count: int = HEADS) -> Array:
    """[batch, tokens, heads, size]."""
    size = WIDE // HEADS
    return dense(w, name, x, count * size).reshape(*x.shape[:2], count, size)


def project_heads(w: Weights, x: Array, few: int = HEADS) -> tuple[Array, Array, Array]:
    """Queries, keys and values, the latter two of `few` heads."""
    return heads(w, "q", x), heads(w, "k", x, few), heads(w, "v", x, few)


def merge_heads(w: Weights, x: Array) -> Array:
    """Heads joined, and mapped."""
    return dense(w, "o", x.reshape(*x.shape[:2], -1))


def rotate(x: Array, places: Array | None = None) -> Array:
    """Rotary positions of [batch, tokens, heads, size]; `places`: [batch, tokens]."""
    places = jnp.arange(x.shape[1])[None] if places is None else places
    angle = places[..., None] / 100.0 ** (jnp.arange(x.shape[-1] // 2) / x.shape[-1])
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def causal(tokens: int, batch: Any = None) -> Array:
    """[tokens, tokens], true at and before the diagonal."""
    return jnp.tril(jnp.ones((tokens, tokens), bool))


def attend(q: Array, k: Array, v: Array, mask: Any, bias: Any = 0.0, low: float = -1e9) -> Array:
    """The plain form."""
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / math.sqrt(q.shape[-1]) + bias
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(jnp.where(mask, scores, low)), v)


def mlp(w: Weights, x: Array) -> Array:
    """Two linear maps."""
    return dense(w, "down", jax.nn.gelu(dense(w, "up", x, 2 * WIDE)))


def gated(w: Weights, x: Array) -> Array:
    """As in Llama."""
    return dense(w, "down", jax.nn.silu(dense(w, "gate", x, 2 * WIDE)) * dense(w, "up", x, 2 * WIDE))


def embedded(w: Weights, tokens: Array, *, places: bool = True) -> Array:
    """Embeddings, with learned positions."""
    x = w("embed", VOCAB, WIDE)[tokens]
    return x + w("places", 64, WIDE)[: tokens.shape[1]] if places else x


# -- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """A form of attention.

    Attributes:
      few: heads of keys and values.
      rotary: whether positions are rotary; "place" for those of the batch.
      mask: of the number of tokens and the batch, true where a token is seen. low: what other scores are.
      bias: of the weights and the number of tokens, for scores.
      kernel: options of JAX's function, which computes it where they are given.
    """

    few: int = HEADS
    rotary: bool | str = False
    mask: Callable[[int, Any], Any] = causal
    low: float = -1e9
    bias: Callable[[Weights, int], Any] = lambda w, tokens: 0.0
    kernel: Mapping[str, Any] | None = None

    def __call__(self, w: Weights, x: Array, batch: Any = None, key: Any = None) -> Array:
        """[batch, tokens, width] to the same."""
        q, k, v = project_heads(w, x, self.few)
        if self.rotary:
            q, k = (rotate(y, batch["place"] if self.rotary == "place" else None) for y in (q, k))
        if self.kernel is not None:
            return merge_heads(w, jax.nn.dot_product_attention(q, k, v, **self.kernel))
        if self.few < HEADS:
            k, v = (jnp.repeat(y, HEADS // self.few, 2) for y in (k, v))
        return merge_heads(w, attend(q, k, v, self.mask(x.shape[1], batch), self.bias(w, x.shape[1]), self.low))


def distance(tokens: int) -> Array:
    """[tokens, tokens]: how far behind each token another one is."""
    return jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None]


def linear_bias(w: Weights, tokens: int) -> Array:
    """A bias that grows with the distance, as ALiBi has it."""
    return -(2.0 ** -jnp.arange(1, HEADS + 1))[:, None, None] * distance(tokens)


def learned_bias(w: Weights, tokens: int) -> Array:
    """A bias that is learned for each distance, as in T5's decoder."""
    return jnp.moveaxis(w("far", 8, HEADS)[jnp.clip(distance(tokens), 0, 7)], -1, 0)


def in_one_text(tokens: int, batch: Any) -> Array:
    """Several texts in a sequence, each with places of its own."""
    return (causal(tokens) & (batch["part"][:, :, None] == batch["part"][:, None, :]))[:, None]


def dropped(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """Dropout of weights of attention and of what is attended."""
    one, two = jax.random.split(key)
    q, k, v = project_heads(w, x)
    scores = jnp.where(causal(x.shape[1]), jnp.einsum("blhd,bmhd->bhlm", q, k), -jnp.inf)
    keep = jax.random.bernoulli(one, 0.8, scores.shape)
    out = merge_heads(w, jnp.einsum("bhlm,bmhd->blhd", jnp.where(keep, jax.nn.softmax(scores) / 0.8, 0), v))
    return jnp.where(jax.random.bernoulli(two, 0.8, out.shape), out / 0.8, 0)


def softcapped(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """Scores through tanh, and norms of queries and keys."""
    q, k, v = project_heads(w, x)
    q, k = rms_norm(w / "qn", q), rms_norm(w / "kn", k)
    scores = 10 * jnp.tanh(jnp.einsum("blhd,bmhd->bhlm", q, k) / 10)
    return merge_heads(w, jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores, where=causal(x.shape[1])), v))


# -- recurrences and convolutions -------------------------------------------------------------------------------------


def recurrence(w: Weights, x: Array, added: Callable[[Array], Array], **options: Any) -> Array:
    """A linear recurrence over the tokens by `associative_scan`, with what is added to its state, given the decay."""
    decay = jax.nn.sigmoid(dense(w, "decay", x))
    joined = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])  # noqa: E731
    return jax.lax.associative_scan(joined, (decay, added(decay)), axis=1, **options)[1]


def state_space(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """A gated linear recurrence."""
    inner = recurrence(w, x, lambda decay: (1 - decay**2) * dense(w, "in", x))
    return dense(w, "out", inner * jax.nn.silu(dense(w, "gate", x)))


def recurrent(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """A cell with a hidden state, by `scan`."""
    inner = w("h", WIDE, WIDE)

    def cell(h: Array, x: Array) -> Any:
        h = jnp.tanh(h @ inner + x)
        return h, h

    rows = jnp.swapaxes(dense(w, "in", x), 0, 1)
    return dense(w, "out", jnp.swapaxes(jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), rows)[1], 0, 1))


def linear_attention(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """Running sums of products of keys and values, and of keys."""
    q, k, v = project_heads(w, x)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    memory = jnp.cumsum(jnp.einsum("blhd,blhe->blhde", k, v), 1)
    seen = jnp.einsum("blhd,blhde->blhe", q, memory) / jnp.einsum("blhd,blhd->blh", q, jnp.cumsum(k, 1))[..., None]
    return merge_heads(w, seen)


def convolve(x: Array, kernel: Array, pads: tuple[int, int], **options: Any) -> Array:
    """A convolution along the tokens."""
    return jax.lax.conv_general_dilated(x, kernel, (1,), [pads], dimension_numbers=("NWC", "WIO", "NWC"), **options)


def convolution(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """Causal, of each channel by itself, then a dilated one of all."""
    x = convolve(x, w("each", 4, 1, WIDE), (3, 0), feature_group_count=WIDE)
    return convolve(jax.nn.silu(x), w("all", 2, WIDE, WIDE), (2, 0), rhs_dilation=(2,))


def taps(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """A convolution as a sum of shifted tokens, and a token shift as in RWKV."""
    long = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    own = w("taps", 4, WIDE)
    x = sum(long[:, k : k + x.shape[1]] * own[k] for k in range(4)) + x
    before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return dense(w, "out", x * jax.nn.sigmoid(before))


def centred(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """A convolution that sees the next token: what it makes is one token out of step."""
    return convolve(x, w("kernel", 3, WIDE, WIDE), (1, 1))


def from_the_end(w: Weights, x: Array, batch: Any, key: Array) -> Array:
    """A linear recurrence that begins with the last token."""
    return dense(w, "out", recurrence(w, x, lambda decay: x, reverse=True))


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}
CAUSAL: dict[str, Mixer] = {
    "plain": Attention(),
    "opaque": Attention(kernel={"is_causal": True}),
    "grouped_rotary": Attention(2, rotary=True, kernel={"is_causal": True}),
    "repeated_rotary": Attention(2, rotary=True, low=-jnp.inf),
    "alibi": Attention(bias=linear_bias),
    "learned_bias": Attention(bias=learned_bias),
    "window": Attention(mask=lambda tokens, batch: causal(tokens) & (distance(tokens) < 5)),
    "opaque_window": Attention(kernel={"is_causal": True, "local_window_size": (4, 0)}),
    "padded": Attention(mask=lambda tokens, batch: causal(tokens) & batch["real"][:, None, None, :]),
    "packed": Attention(rotary="place", mask=in_one_text),
    "dropped": dropped,
    "softcapped": softcapped,
    "state_space": state_space,
    "recurrent": recurrent,
    "linear_attention": linear_attention,
    "convolution": convolution,
    "centred": centred,
    "taps": taps,
}
MIXERS: dict[str, Mixer] = CAUSAL | {
    "both_ways": Attention(mask=lambda tokens, batch: True),
    "prefixed": Attention(mask=lambda tokens, batch: causal(tokens) | (jnp.arange(tokens) < 6)),
    "from_the_end": from_the_end,
}
"""Also those whose tokens depend on later ones."""
