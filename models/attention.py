"""The sizes, blocks and stack of layers that the transformers of this folder share.

Heads are a dim of their own from the projection's kernel to its output (batch, sequence, heads, head size), so that
every product is a plain `dot_general` and no dim is ever split or merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a transformer, and how its layers run.

    Attributes:
      hidden, layers, heads: its sizes; `hidden` must be a multiple of `heads`.
      scan: whether the layers are one loop over stacked parameters.
      remat: whether each layer is recomputed in the backward pass.
      dtype: of the computation; parameters are float32.
    """

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.bfloat16


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


class SelfAttention(nnx.Module):
    """Multi-head self-attention with biases."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, dtype: Any, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        if hidden % heads:
            raise ValueError(f"hidden={hidden} does not divide into heads={heads}")
        split = (heads, hidden // heads)
        self.causal = causal
        self.query = nnx.LinearGeneral(hidden, split, dtype=dtype, rngs=rngs)
        self.key = nnx.LinearGeneral(hidden, split, dtype=dtype, rngs=rngs)
        self.value = nnx.LinearGeneral(hidden, split, dtype=dtype, rngs=rngs)
        self.output = nnx.LinearGeneral(split, hidden, axis=(-2, -1), dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to the same."""
        return self.output(attend(self.query(x), self.key(x), self.value(x), causal=self.causal))


class FeedForward(nnx.Module):
    """Two linear maps with a GELU between."""

    def __init__(self, hidden: int, inner: int, *, dtype: Any, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.up = nnx.Linear(hidden, inner, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(inner, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., hidden) to the same."""
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """One layer: attention and feed-forward, each on the normalised input and added to it."""

    def __init__(self, config: Any, *, causal: bool, dropout: float = 0.0, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`; `dropout` is the probability of dropping an element of either output."""
        hidden, dtype = config.hidden, config.dtype
        self.attention_norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.attention = SelfAttention(hidden, config.heads, causal=causal, dtype=dtype, rngs=rngs)
        self.ffn_norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.ffn = FeedForward(hidden, config.ffn_factor * hidden, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to the same."""
        x = x + self._drop(self.attention(self.attention_norm(x)))
        return x + self._drop(self.ffn(self.ffn_norm(x)))

    def _drop(self, x: jax.Array) -> jax.Array:
        return x if self.dropout is None else self.dropout(x)


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


def make_embedding(rows: int, config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Embed:
    """Returns a table of `rows` vectors of `hidden` features, drawn from N(0, 0.02²)."""
    init = nnx.initializers.normal(0.02)
    return nnx.Embed(rows, config.hidden, dtype=config.dtype, embedding_init=init, rngs=rngs)


def transformer_flops(config: Any, batch: int, products: int) -> float:
    """6·`products`·tokens plus 12·layers·tokens·seq·hidden; `products` counts the parameters that multiply."""
    tokens = batch * config.seq
    return 6.0 * products * tokens + 12.0 * config.layers * tokens * config.seq * config.hidden
