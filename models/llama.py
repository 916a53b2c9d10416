"""Llama 3: a decoder with RMS norm, rotary positions, grouped queries and a gated feed-forward, without biases.

Sizes "8B" and "70B" are those of Llama 3 (Meta, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from .spec import ModelSpec
from .transformer import Decoder, TransformerConfig, fields, loss_fn


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """The shape of a Llama.

    Attributes:
      vocab, seq: rows of the token embedding, and tokens in a sequence.
      ffn: the inner size of the feed-forward.
      hidden, layers, heads, kv_heads, rope_theta: as in `TransformerConfig`.
    """

    vocab: int = 128256
    seq: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    rope_theta: float = 500_000.0

    norm: ClassVar = nnx.RMSNorm
    bias: ClassVar[bool] = False
    has_gate: ClassVar[bool] = True
    tied: ClassVar[bool] = False

    @property
    def inner(self) -> int:
        """The inner size of a feed-forward."""
        return self.ffn


SIZES = {
    "tiny": LlamaConfig(
        vocab=256, seq=64, hidden=128, ffn=384, layers=2, heads=16, kv_heads=8, rope_theta=10_000.0, dtype=jnp.float32
    ),
    "8B": LlamaConfig(),
    "70B": LlamaConfig(hidden=8192, ffn=28672, layers=80, heads=64),
}

SPEC = ModelSpec("llama", SIZES, Decoder, loss_fn, fields)
