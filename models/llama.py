"""Llama 3: a decoder with RMS norm, rotary positions, grouped queries and a gated feed-forward, without biases.

    x = x + Attention(RMS(x));  x = x + W₃(silu(W₁·RMS(x)) ⊙ W₂·RMS(x))      for each layer

Query heads come in `kv_heads` groups that share a key and a value. The groups are a dim of their own, so attention is
a product with no repeated keys and no reshape. Sizes "8B" and "70B" are those of Llama 3 (Meta, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import Stack, TransformerConfig, attend, make_embedding, transformer_flops
from .gpt import fields, loss_fn
from .spec import ModelSpec


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """The shape of a Llama.

    Attributes:
      vocab, seq, hidden, ffn, layers, heads: its sizes; `hidden` must be a multiple of `heads`.
      kv_heads: heads of keys and values; `heads` must be a multiple of it.
      rope_theta: the base of the rotary wavelengths.
    """

    vocab: int = 128256
    seq: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    rope_theta: float = 500_000.0

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


class Attention(nnx.Module):
    """Causal attention with rotary positions and grouped queries."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        if config.hidden % config.heads or config.heads % config.kv_heads:
            raise ValueError(
                f"hidden={config.hidden} must divide into heads={config.heads}, and those into {config.kv_heads=}"
            )
        shared = (config.kv_heads, config.head_size)
        grouped = (config.kv_heads, config.heads // config.kv_heads, config.head_size)
        options: dict[str, Any] = {"use_bias": False, "dtype": config.dtype, "rngs": rngs}
        self.theta = config.rope_theta
        self.query = nnx.LinearGeneral(config.hidden, grouped, **options)
        self.key = nnx.LinearGeneral(config.hidden, shared, **options)
        self.value = nnx.LinearGeneral(config.hidden, shared, **options)
        self.output = nnx.LinearGeneral(grouped, config.hidden, axis=(-3, -2, -1), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to the same."""
        query, key, value = rotate(self.query(x), self.theta), rotate(self.key(x), self.theta), self.value(x)
        return self.output(attend(query, key, value, causal=True))


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotates features i and i + d/2 of position p by the angle p·theta^(-2i/d); x is (batch, sequence, ..., d)."""
    half = x.shape[-1] // 2
    rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    angles = angles.reshape(x.shape[1], *[1] * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        options: dict[str, Any] = {"use_bias": False, "dtype": config.dtype, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.gate = nnx.Linear(config.hidden, config.ffn, **options)
        self.up = nnx.Linear(config.hidden, config.ffn, **options)
        self.down = nnx.Linear(config.ffn, config.hidden, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to the same."""
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """The whole decoder."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.tokens = make_embedding(config.vocab, config, rngs)
        self.blocks = Stack(Block, config.layers, config, rngs=rngs)
        self.norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.hidden, config.vocab, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns tokens (batch, sequence) int32 to float32 logits (batch, sequence, vocab)."""
        return self.head(self.norm(self.blocks(self.tokens(tokens)))).astype(jnp.float32)


def flops(config: LlamaConfig, batch: int) -> float:
    """6·N·D with the output projection and without the embedding, plus attention scores."""
    attention = 2 * config.hidden**2 + 2 * config.hidden * config.kv_heads * config.head_size
    products = config.layers * (attention + 3 * config.hidden * config.ffn) + config.vocab * config.hidden
    return transformer_flops(config, batch, products)


SIZES = {
    "tiny": LlamaConfig(
        vocab=256, seq=64, hidden=128, ffn=384, layers=2, heads=16, kv_heads=8, rope_theta=10_000.0, dtype=jnp.float32
    ),
    "8B": LlamaConfig(),
    "70B": LlamaConfig(hidden=8192, ffn=28672, layers=80, heads=64),
}

SPEC = ModelSpec("llama", SIZES, Llama, loss_fn, fields, flops)
