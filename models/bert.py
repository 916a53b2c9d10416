"""BERT: an encoder that predicts masked tokens, with layer norm after each block (Devlin et al., 2019).

    x = LN(E[tokens] + P[positions] + T[segments])
    x = LN(x + Attention(x));  x = LN(x + FeedForward(x))      for each layer
    loss = Σ weight · -log softmax(LN(gelu(W x)) Eᵀ + b)[target] / Σ weight

The denominator is the number of masked tokens, so it depends on the batch's data, though not on the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .spec import Field, ModelSpec
from .transformer import Block, Stack, TransformerConfig, make_embedding


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """The shape of a BERT, in addition to that of its layers.

    Attributes:
      vocab, seq: rows of the token embedding, and tokens in a sequence.
      ffn_factor: the feed-forward's inner size over `hidden`.
      segments: kinds of segments.
    """

    vocab: int = 30522
    seq: int = 512
    ffn_factor: int = 4
    segments: int = 2

    causal: ClassVar[bool] = False
    norm_first: ClassVar[bool] = False


class Bert(nnx.Module):
    """The encoder and its head for masked tokens."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        hidden, dtype = config.hidden, config.dtype
        self.tokens = make_embedding(config.vocab, config, rngs)
        self.positions = make_embedding(config.seq, config, rngs)
        self.segments = make_embedding(config.segments, config, rngs)
        self.norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.blocks = Stack(Block, config.layers, config, rngs=rngs)
        self.transform = nnx.Linear(hidden, hidden, dtype=dtype, rngs=rngs)
        self.transform_norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((config.vocab,)))

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        """Returns tokens and segments (batch, sequence) int32 to float32 logits (batch, sequence, vocab)."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])) + self.segments(segments)
        x = self.blocks(self.norm(x))
        x = self.transform_norm(nnx.gelu(self.transform(x)))
        return self.tokens.attend(x).astype(jnp.float32) + self.bias[...]


def loss_fn(model: Bert, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean negative log-likelihood of the masked tokens, in nats a token."""
    logits = model(batch["tokens"], batch["segments"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def fields(config: BertConfig, batch: int) -> dict[str, Field]:
    """Returns tokens, their segments, the true tokens, and a weight of one where a token is masked."""
    shape = (batch, config.seq)
    tokens = Field(shape, np.int32, config.vocab)
    segments = Field(shape, np.int32, config.segments)
    return {"tokens": tokens, "segments": segments, "targets": tokens, "weights": Field(shape, np.float32, 2)}


SIZES = {
    "tiny": BertConfig(vocab=256, seq=64, hidden=128, layers=2, heads=8, dtype=jnp.float32),
    "base": BertConfig(),
    "large": BertConfig(hidden=1024, layers=24, heads=16),
}

SPEC = ModelSpec("bert", SIZES, Bert, loss_fn, fields)
