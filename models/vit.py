"""ViT: an encoder over image patches (Dosovitskiy et al., 2021, Table 1).

x = [class; patches·W] + P
x = x + Attention(LN(x));  x = x + FeedForward(LN(x))      for each layer
loss = mean over images of -log softmax(W LN(x)[0])[label]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import FeedForward, SelfAttention, Stack, transformer_flops
from .spec import ModelSpec
from .wide_resnet import fields, loss_fn


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT.

    Attributes:
      image, patch: height and width of the images and of their patches.
      hidden, layers, heads: its sizes; `hidden` must be a multiple of `heads`.
      ffn_factor: the feed-forward's inner size over `hidden`.
      classes: to choose from.
      scan: whether the layers are one loop over stacked parameters.
      remat: whether each layer is recomputed in the backward pass.
      dtype: of the computation; parameters are float32.
    """

    image: int = 224
    patch: int = 16
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    ffn_factor: int = 4
    classes: int = 1000
    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def seq(self) -> int:
        """Patches, and the class token."""
        return (self.image // self.patch) ** 2 + 1


class Block(nnx.Module):
    """One layer: attention and feed-forward, each on the normalised input and added to it."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        hidden, dtype = config.hidden, config.dtype
        self.attention_norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.attention = SelfAttention(hidden, config.heads, causal=False, dtype=dtype, rngs=rngs)
        self.ffn_norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.ffn = FeedForward(hidden, config.ffn_factor * hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, sequence, hidden) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class ViT(nnx.Module):
    """The whole classifier."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        size = (config.patch, config.patch)
        hidden, dtype = config.hidden, config.dtype
        self.config = config
        self.patches = nnx.Conv(3, hidden, size, size, padding="VALID", dtype=dtype, rngs=rngs)
        self.first = nnx.Param(jnp.zeros((1, 1, hidden)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, config.seq, hidden)))
        self.blocks = Stack(
            lambda rngs: Block(config, rngs=rngs), config.layers, scan=config.scan, remat=config.remat, rngs=rngs
        )
        self.norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(hidden, config.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Images (batch, height, width, 3) to float32 logits (batch, classes)."""
        config, count = self.config, images.shape[0]
        x = self.patches(images).reshape(count, config.seq - 1, config.hidden)
        first = jnp.broadcast_to(self.first[...].astype(x.dtype), (count, 1, config.hidden))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...].astype(x.dtype)
        return self.head(self.norm(self.blocks(x))[:, 0]).astype(jnp.float32)


def flops(config: ViTConfig, batch: int) -> float:
    """6·N·D over patches and class token, plus attention scores; the head once an image."""
    products = config.layers * (4 + 2 * config.ffn_factor) * config.hidden**2
    body = transformer_flops(products, batch * config.seq, config.layers, config.hidden, config.seq)
    patches = 3 * config.patch**2 * config.hidden * (config.seq - 1)
    return body + 6.0 * batch * (patches + config.hidden * config.classes)


SIZES = {
    "tiny": ViTConfig(image=32, patch=8, hidden=64, layers=2, heads=8, classes=16, dtype=jnp.float32),
    "B/16": ViTConfig(),
    "L/16": ViTConfig(hidden=1024, layers=24, heads=16),
    "H/14": ViTConfig(patch=14, hidden=1280, layers=32, heads=16),
}

SPEC = ModelSpec("vit", SIZES, ViT, loss_fn, fields, flops)
