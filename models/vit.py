"""ViT: an encoder over image patches (Dosovitskiy et al., 2021, Table 1).

x = [class; patches·W] + P
x = x + Attention(LN(x));  x = x + FeedForward(LN(x))      for each layer
loss = mean over images of -log softmax(W LN(x)[0])[label]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .spec import ModelSpec
from .transformer import Block, Stack, TransformerConfig, make_norm
from .wide_resnet import fields, loss_fn


@dataclass(frozen=True)
class ViTConfig(TransformerConfig):
    """The shape of a ViT, in addition to that of its layers.

    Attributes:
      image, patch: height and width of the images and of their patches.
      ffn_factor: the feed-forward's inner size over `hidden`.
      classes: to choose from.
    """

    image: int = 224
    patch: int = 16
    ffn_factor: int = 4
    classes: int = 1000

    causal: ClassVar[bool] = False

    @property
    def seq(self) -> int:
        """Patches, and the class token."""
        return (self.image // self.patch) ** 2 + 1


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
        self.blocks = Stack(Block, config.layers, config, rngs=rngs)
        self.norm = make_norm(config, rngs)
        self.head = nnx.Linear(hidden, config.classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns images (batch, height, width, 3) to float32 logits (batch, classes)."""
        config, count = self.config, images.shape[0]
        x = self.patches(images).reshape(count, config.seq - 1, config.hidden)
        first = jnp.broadcast_to(self.first[...].astype(x.dtype), (count, 1, config.hidden))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...].astype(x.dtype)
        return self.head(self.norm(self.blocks(x))[:, 0]).astype(jnp.float32)


SIZES = {
    "tiny": ViTConfig(image=32, patch=8, hidden=64, layers=2, heads=8, classes=16, dtype=jnp.float32),
    "B/16": ViTConfig(),
    "L/16": ViTConfig(hidden=1024, layers=24, heads=16),
    "H/14": ViTConfig(patch=14, hidden=1280, layers=32, heads=16),
}

SPEC = ModelSpec("vit", SIZES, ViT, loss_fn, fields)
