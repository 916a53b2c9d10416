"""Transformers: the sizes, the blocks, the stack of layers, and the decoder that the models of this folder share.

    x = x + Attention(Norm(x));  x = x + FeedForward(Norm(x))      for each layer

Heads are a dim of their own from the projection's kernel to its output (batch, sequence, heads, head size), so that
every product is a plain `dot_general` and no dim is ever split or merged. Query heads may come in groups that share a
key and a value: the groups are then a dim of their own, too, with no repeated keys and no reshape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .spec import Field


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a transformer, and how its layers run.

    Attributes:
      hidden, layers, heads: its sizes; `hidden` must be a multiple of `heads`.
      scan: whether the layers are one loop over stacked parameters.
      remat: whether each layer is recomputed in the backward pass.
      dtype: of the computation; parameters are float32.

    Parts of a kind of transformer, some of which its configuration may turn into a size:
      ffn_factor: the feed-forward's inner size over `hidden`.
      causal: whether a token sees only itself and what is before it.
      norm, norm_first: the normalisation; whether it is of the input of each block, or of its sum with the output.
      bias, has_gate: whether products have biases; whether a silu gates the feed-forward, W₃(silu(W₁x) ⊙ W₂x).
      kv_heads: heads of keys and values, of which `heads` is a multiple; as many for None.
      rope_theta: the base of the wavelengths of rotary positions; 0 for learned positions.
      dropout: the probability of dropping an element of a block's output.
      tied: whether the output projection is the token embedding.
    """

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.bfloat16

    ffn_factor: ClassVar[Any] = 4
    causal: ClassVar[bool] = True
    norm: ClassVar[Callable[..., Any]] = nnx.LayerNorm
    norm_first: ClassVar[bool] = True
    bias: ClassVar[bool] = True
    has_gate: ClassVar[bool] = False
    kv_heads: ClassVar[Any] = None
    rope_theta: ClassVar[Any] = 0.0
    dropout: ClassVar[Any] = 0.0
    tied: ClassVar[Any] = True

    @property
    def inner(self) -> int:
        """The inner size of a feed-forward."""
        return self.ffn_factor * self.hidden


def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """Softmax(QKᵀ/√d)·V with the softmax in float32.

    Args:
      query: (batch, sequence, heads, head size), or with grouped queries (batch, sequence, heads, group, head size).
      key, value: (batch, sequence, heads, head size).
      causal: whether a position sees only itself and what is before it.

    Returns:
      The shape of `query`, in the dtype of `value`.
    """
    heads = "hg" if query.ndim == 5 else "h"
    scores = jnp.einsum(f"bq{heads}d,bkhd->b{heads}qk", query / math.sqrt(query.shape[-1]), key).astype(jnp.float32)
    if causal:
        mask = jnp.tril(jnp.ones((query.shape[1], query.shape[1]), bool))
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum(f"b{heads}qk,bkhd->bq{heads}d", weights, value)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotates features i and i + d/2 of position p by the angle p·theta^(-2i/d); x is (batch, sequence, ..., d)."""
    half = x.shape[-1] // 2
    rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    angles = angles.reshape(x.shape[1], *[1] * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class SelfAttention(nnx.Module):
    """Multi-head self-attention, with grouped queries for `kv_heads`, and rotary positions for `theta`."""

    def __init__(
        self, hidden: int, heads: int, *, causal: bool, dtype: Any, rngs: nnx.Rngs, bias: bool = True,
        kv_heads: int | None = None, theta: float = 0.0,
    ):  # fmt: skip
        """Draws the parameters from `rngs`."""
        for whole, name, part in ((hidden, "heads", heads), (heads, "kv_heads", kv_heads or heads)):
            if whole % part:
                raise ValueError(
                    f"{'hidden' if name == 'heads' else 'heads'}={whole} does not divide into {name}={part}"
                )
        shared = (kv_heads or heads, hidden // heads)
        split = shared if kv_heads is None else (kv_heads, heads // kv_heads, hidden // heads)
        linear = functools.partial(nnx.LinearGeneral, use_bias=bias, dtype=dtype, rngs=rngs)
        self.causal, self.theta = causal, theta
        self.query = linear(hidden, split)
        self.key = linear(hidden, shared)
        self.value = linear(hidden, shared)
        self.output = linear(split, hidden, axis=tuple(range(-len(split), 0)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to the same."""
        query, key = self.query(x), self.key(x)
        if self.theta:
            query, key = rotate(query, self.theta), rotate(key, self.theta)
        return self.output(attend(query, key, self.value(x), causal=self.causal))


def make_attention(config: TransformerConfig, rngs: nnx.Rngs) -> SelfAttention:
    """Returns the attention of one layer."""
    return SelfAttention(
        config.hidden, config.heads, causal=config.causal, dtype=config.dtype, rngs=rngs, bias=config.bias,
        kv_heads=config.kv_heads, theta=config.rope_theta,
    )  # fmt: skip


class FeedForward(nnx.Module):
    """Two linear maps with a GELU between, or three of which one gates another."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        linear = functools.partial(nnx.Linear, use_bias=config.bias, dtype=config.dtype, rngs=rngs)
        self.gate = linear(config.hidden, config.inner) if config.has_gate else None
        self.up = linear(config.hidden, config.inner)
        self.down = linear(config.inner, config.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., hidden) to the same."""
        return self.down(nnx.gelu(self.up(x)) if self.gate is None else nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One layer: attention and feed-forward, each added to its input; the input or the sum is normalised."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.norm_first = config.norm_first
        self.attention_norm = make_norm(config, rngs)
        self.attention = make_attention(config, rngs)
        self.ffn_norm = make_norm(config, rngs)
        self.ffn = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to the same."""
        for norm, part in ((self.attention_norm, self.attention), (self.ffn_norm, self.ffn)):
            y = part(norm(x) if self.norm_first else x)
            x = x + (y if self.dropout is None else self.dropout(y))
            x = x if self.norm_first else norm(x)
        return x


class Stack(nnx.Module):
    """Alike layers in a row: a list of modules, or with `config.scan` one module with stacked parameters.

    Args:
      create: makes one layer, `(config, rngs=...) -> nnx.Module`.
      length: the number of layers, the leading dim of stacked parameters.
      config: of the layers; says whether they are scanned, and rematerialised in the backward pass.
      rngs: for the parameters.
    """

    def __init__(self, create: Callable[..., nnx.Module], length: int, config: TransformerConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.length, self.scan, self.remat = length, config.scan, config.remat
        self.layers: Any
        if config.scan:
            stacked = nnx.vmap(lambda rngs: create(config, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=length)(stacked)(rngs)
        else:
            self.layers = nnx.List([create(config, rngs=rngs) for _ in range(length)])

    def __call__(self, x: Any) -> Any:
        """Runs `x`, one array or several, through all layers."""
        call: Callable[[Any, Any], Any] = lambda layer, x: layer(x)  # noqa: E731
        if self.remat:
            call = nnx.remat(call)
        if self.scan:
            loop = nnx.scan(
                lambda x, layer: call(layer, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, length=self.length
            )
            return loop(x, self.layers)
        for layer in self.layers:
            x = call(layer, x)
        return x


def make_norm(config: TransformerConfig, rngs: nnx.Rngs) -> Any:
    """Returns a normalisation of `hidden` features."""
    return type(config).norm(config.hidden, dtype=config.dtype, rngs=rngs)


def make_embedding(rows: int, config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Embed:
    """Returns a table of `rows` vectors of `hidden` features, drawn from N(0, 0.02²)."""
    init = nnx.initializers.normal(0.02)
    return nnx.Embed(rows, config.hidden, dtype=config.dtype, embedding_init=init, rngs=rngs)


class Decoder(nnx.Module):
    """A language model: embeddings of tokens and positions, layers, a norm, and logits."""

    def __init__(
        self, config: Any, *, rngs: nnx.Rngs, layer: Callable[..., nnx.Module] = Block, length: int | None = None
    ):
        """Draws the parameters from `rngs`; `layer` makes one of the `length` alike parts, by default the layers."""
        self.config = config
        self.tokens = make_embedding(config.vocab, config, rngs)
        self.positions = None if config.rope_theta else make_embedding(config.seq, config, rngs)
        self.blocks = Stack(layer, length or config.layers, config, rngs=rngs)
        self.norm = make_norm(config, rngs)
        self.head = (
            None
            if config.tied
            else nnx.Linear(config.hidden, config.vocab, use_bias=False, dtype=config.dtype, rngs=rngs)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns tokens (batch, sequence) int32 to float32 logits (batch, sequence, vocab)."""
        return self.logits(self.blocks(self.embed_tokens(tokens)))

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """Tokens (batch, sequence) int32 to (batch, sequence, hidden)."""
        x = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(jnp.arange(tokens.shape[1]))

    def logits(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to float32 (batch, sequence, vocab)."""
        x = self.norm(x)
        return (self.tokens.attend(x) if self.head is None else self.head(x)).astype(jnp.float32)


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean negative log-likelihood of the targets, in nats a token."""
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def fields(config: Any, batch: int) -> dict[str, Field]:
    """Returns tokens and the tokens that follow them."""
    tokens = Field((batch, config.seq), np.int32, config.vocab)
    return {"inputs": tokens, "targets": tokens}
