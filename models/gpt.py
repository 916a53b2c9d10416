"""GPT: a decoder with layer norm before each block, as in GPT-2 and GPT-3.

    x = E[tokens] + P[positions], then `transformer`'s layers
    loss = mean over tokens of -log softmax(LN(x) Eᵀ)[target]

Sizes: "tiny" for tests; "small" is GPT-2's 12 x 768; "350M" to "39B" are the family of the Alpa paper (Zheng et al.,
2022), "175B" is GPT-3 (Brown et al., 2020, Table 2.1), all with a vocabulary padded to an even number.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from .spec import ModelSpec
from .transformer import Decoder, TransformerConfig, fields, loss_fn


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT, in addition to that of its layers.

    Attributes:
      vocab, seq: rows of the token embedding, and tokens in a sequence.
      ffn_factor, tied, dropout: as in `TransformerConfig`.
    """

    vocab: int = 51200
    seq: int = 1024
    ffn_factor: int = 4
    tied: bool = True
    dropout: float = 0.0


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

SPEC = ModelSpec("gpt", SIZES, Decoder, loss_fn, fields)
