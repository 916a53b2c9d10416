"""GPT: a decoder with layer norm before each block, as in GPT-2 and GPT-3.

    x = E[tokens] + P[positions]
    x = x + Attention(LN(x));  x = x + FeedForward(LN(x))      for each layer
    loss = mean over tokens of -log softmax(LN(x) Eᵀ)[target]

Sizes: "tiny" for tests; "small" is GPT-2's 12 x 768; "350M" to "39B" are the family of the Alpa paper (Zheng et al.,
2022), "175B" is GPT-3 (Brown et al., 2020, Table 2.1), all with a vocabulary padded to an even number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .attention import Block, Stack, TransformerConfig, make_embedding, transformer_flops
from .spec import Field, ModelSpec


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT, in addition to that of its layers.

    Attributes:
      vocab, seq: rows of the token embedding, and tokens in a sequence.
      ffn_factor: the feed-forward's inner size over `hidden`.
      tied: whether the output projection is the token embedding.
      dropout: probability of dropping an element of a block's output; 0 for none.
    """

    vocab: int = 51200
    seq: int = 1024
    ffn_factor: int = 4
    tied: bool = True
    dropout: float = 0.0


class GPT(nnx.Module):
    """The whole decoder."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        dtype = config.dtype
        self.tokens = make_embedding(config.vocab, config, rngs)
        self.positions = make_embedding(config.seq, config, rngs)
        block = functools.partial(Block, causal=True, dropout=config.dropout)
        self.blocks = Stack(block, config.layers, config, rngs=rngs)
        self.norm = nnx.LayerNorm(config.hidden, dtype=dtype, rngs=rngs)
        self.head = (
            None if config.tied else nnx.Linear(config.hidden, config.vocab, use_bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns tokens (batch, sequence) int32 to float32 logits (batch, sequence, vocab)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.norm(self.blocks(x))
        logits = self.tokens.attend(x) if self.head is None else self.head(x)
        return logits.astype(jnp.float32)


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean negative log-likelihood of the targets, in nats a token."""
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def fields(config: Any, batch: int) -> dict[str, Field]:
    """Returns tokens and the tokens that follow them."""
    tokens = Field((batch, config.seq), np.int32, config.vocab)
    return {"inputs": tokens, "targets": tokens}


def flops(config: GPTConfig, batch: int) -> float:
    """72·B·S·H²·L·(1 + S/(6H)) + 6·B·S·H·V where the feed-forward factor is 4."""
    products = config.layers * (4 + 2 * config.ffn_factor) * config.hidden**2 + config.vocab * config.hidden
    return transformer_flops(config, batch, products)


SIZES = {
    "tiny": GPTConfig(vocab=256, seq=64, hidden=128, layers=2, heads=8, dtype=jnp.float32),
    "small": GPTConfig(vocab=50304, hidden=768, layers=12, heads=12),
    "350M": GPTConfig(hidden=1024, layers=24, heads=16),
    "760M": GPTConfig(hidden=1536, layers=24, heads=16),
    "1.3B": GPTConfig(hidden=2048, layers=24, heads=32),
    "2.6B": GPTConfig(hidden=2560, layers=32, heads=32),
    "6.7B": GPTConfig(hidden=4096, layers=32, heads=32),
    "15B": GPTConfig(hidden=5120, layers=48, heads=40),
    "39B": GPTConfig(hidden=8192, layers=48, heads=64),
    "175B": GPTConfig(seq=2048, hidden=12288, layers=96, heads=96),
}

SPEC = ModelSpec("gpt", SIZES, GPT, loss_fn, fields, flops)
