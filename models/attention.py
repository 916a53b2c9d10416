"""Attention, and the stack of layers, that the transformers of this folder share.

Heads are a dim of their own from the projection's kernel to its output (batch, sequence, heads, head size), so that
every product is a plain `dot_general` and no dim is ever split or merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool) -> jax.Array:
    """Softmax(QKᵀ/√d)·V with the softmax in float32.

    Args:
      query, key, value: (batch, sequence, heads, head size).
      causal: whether a position sees only itself and what is before it.

    Returns:
      (batch, sequence, heads, head size), in the dtype of `value`.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query / math.sqrt(query.shape[-1]), key).astype(jnp.float32)
    if causal:
        scores = jnp.where(causal_mask(query.shape[1]), scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def causal_mask(length: int) -> jax.Array:
    """(length, length) bool: whether the row's position may see the column's."""
    return jnp.tril(jnp.ones((length, length), bool))


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


class Stack(nnx.Module):
    """Alike layers in a row: a list of modules, or one module with stacked parameters that `scan` runs through.

    Args:
      create: makes one layer, `rngs -> nnx.Module`.
      length: how many layers.
      scan: whether parameters are stacked, with a leading dim of `length`, and the layers run as a loop.
      remat: whether the backward pass recomputes each layer from its input.
      rngs: for the parameters.
    """

    def __init__(
        self, create: Callable[[nnx.Rngs], nnx.Module], length: int, *, scan: bool, remat: bool, rngs: nnx.Rngs
    ):
        """Draws the parameters from `rngs`."""
        self.length, self.scan, self.remat = length, scan, remat
        self.layers: Any
        if scan:
            self.layers = nnx.split_rngs(splits=length)(nnx.vmap(create, in_axes=0, out_axes=0))(rngs)
        else:
            self.layers = nnx.List([create(rngs) for _ in range(length)])

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


def transformer_flops(products: int, tokens: int, layers: int, hidden: int, seq: int) -> float:
    """6·`products`·`tokens` plus 12·layers·tokens·seq·hidden; `products` counts the parameters that multiply."""
    return 6.0 * products * tokens + 12.0 * layers * tokens * seq * hidden
