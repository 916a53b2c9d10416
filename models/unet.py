"""U-Net for denoising diffusion (Ho et al., 2020, appendix B).

Residual blocks at falling and then at rising resolution; each block on the way up also takes the output of its partner
on the way down. The model sees x_t = √ᾱ_t·x + √(1 - ᾱ_t)·ε and is fitted to the noise ε by least squares, with 1000
steps t whose β rises linearly from 1e-4 to 0.02. Sizes "cifar10" (32 x 32) and "lsun" (256 x 256) are the paper's.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .spec import Field, ModelSpec
from .transformer import SelfAttention

STEPS = 1000
Channels = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UNetConfig:
    """The shape of a U-Net.

    Attributes:
      image: height and width of the images.
      channels: of the first level; a multiple of `groups`.
      factors: channels of each level over `channels`; each level halves height and width.
      blocks: residual blocks in a level on the way down; one more on the way up.
      attention: heights at which every block is followed by self-attention.
      groups: of group norm.
      dropout: probability of dropping an element within a block; 0 for none.
      dtype: of the computation; parameters are float32.
    """

    image: int = 32
    channels: int = 128
    factors: tuple[int, ...] = (1, 2, 2, 2)
    blocks: int = 2
    attention: tuple[int, ...] = (16,)
    groups: int = 32
    dropout: float = 0.1
    dtype: Any = jnp.float32

    def levels(self) -> tuple[list[Channels], list[Channels]]:
        """Returns the channels in and out of each block, by level, on the way down and on the way up."""
        widths = [self.channels * factor for factor in self.factors]
        skips = [self.channels, *(out for out in widths for _ in range(self.blocks + 1))][:-1]
        down = [((into, out), *[(out, out)] * (self.blocks - 1)) for into, out in pairwise((self.channels, *widths))]
        up = []
        for into, out in pairwise((widths[-1], *reversed(widths))):
            up.append(tuple((inputs + skips.pop(), out) for inputs in (into, *[out] * self.blocks)))
        return down, up


class PixelAttention(nnx.Module):
    """Self-attention with one head over all pixels, added to the input."""

    def __init__(self, channels: int, config: UNetConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.norm = nnx.GroupNorm(channels, num_groups=config.groups, dtype=config.dtype, rngs=rngs)
        self.attention = SelfAttention(channels, 1, causal=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, channels) to the same."""
        y = self.norm(x).reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3])
        return x + self.attention(y).reshape(x.shape)


class ResidualBlock(nnx.Module):
    """Two convolutions, with the embedded time added between; followed by attention where a level has it."""

    def __init__(self, inputs: int, outputs: int, config: UNetConfig, *, attend: bool, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        dtype, groups = config.dtype, config.groups
        self.norm_in = nnx.GroupNorm(inputs, num_groups=groups, dtype=dtype, rngs=rngs)
        self.conv_in = nnx.Conv(inputs, outputs, (3, 3), dtype=dtype, rngs=rngs)
        self.time = nnx.Linear(4 * config.channels, outputs, dtype=dtype, rngs=rngs)
        self.norm_out = nnx.GroupNorm(outputs, num_groups=groups, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None
        self.conv_out = nnx.Conv(outputs, outputs, (3, 3), dtype=dtype, rngs=rngs)
        self.project = None if inputs == outputs else nnx.Linear(inputs, outputs, dtype=dtype, rngs=rngs)
        self.attention = PixelAttention(outputs, config, rngs=rngs) if attend else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """(batch, height, width, inputs) and (batch, 4 channels) to (batch, height, width, outputs)."""
        y = self.conv_in(nnx.silu(self.norm_in(x)))
        y = y + self.time(nnx.silu(time))[:, None, None]
        y = nnx.silu(self.norm_out(y))
        if self.dropout is not None:
            y = self.dropout(y)
        y = self.conv_out(y) + (x if self.project is None else self.project(x))
        return y if self.attention is None else self.attention(y)


class UNet(nnx.Module):
    """The whole network."""

    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        time = 4 * config.channels
        down, up = config.levels()
        heights = [config.image >> level for level in range(len(down))]
        middle, last = down[-1][-1][1], up[-1][-1][1]
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), dtype=config.dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, dtype=config.dtype, rngs=rngs)
        block = functools.partial(ResidualBlock, config=config, rngs=rngs)

        def levels(rows: list[Channels], heights: list[int]) -> nnx.List:
            """Returns the blocks of each level."""
            pairs = zip(rows, heights, strict=True)
            return nnx.List(
                [nnx.List([block(*pair, attend=h in config.attention) for pair in row]) for row, h in pairs]
            )

        self.config = config
        self.time_in, self.time_out = linear(config.channels, time), linear(time, time)
        self.conv_in = conv(3, config.channels)
        self.down = levels(down, heights)
        self.shrink = nnx.List([conv(row[-1][1], row[-1][1], strides=(2, 2)) for row in down[:-1]])
        self.middle = nnx.List([block(middle, middle, attend=attend) for attend in (True, False)])
        self.up = levels(up, heights[::-1])
        self.grow = nnx.List([conv(row[-1][1], row[-1][1]) for row in up[:-1]])
        self.norm = nnx.GroupNorm(last, config.groups, dtype=config.dtype, rngs=rngs)
        self.conv_out = conv(last, 3)

    def __call__(self, x: jax.Array, step: jax.Array) -> jax.Array:
        """Noisy images (batch, height, width, 3) and steps (batch,) int32 to the noise, float32."""
        time = self.time_out(nnx.silu(self.time_in(embed_time(step, self.config.channels))))
        x = self.conv_in(x)
        skips = [x]
        for number, blocks in enumerate(self.down):
            for block in blocks:
                x = block(x, time)
                skips.append(x)
            if number < len(self.shrink):
                x = self.shrink[number](x)
                skips.append(x)
        for block in self.middle:
            x = block(x, time)
        for number, blocks in enumerate(self.up):
            for block in blocks:
                x = block(jnp.concatenate([x, skips.pop()], axis=-1), time)
            if number < len(self.grow):
                x = self.grow[number](jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
        return self.conv_out(nnx.silu(self.norm(x))).astype(jnp.float32)


def embed_time(step: jax.Array, features: int) -> jax.Array:
    """Sines and cosines of the step: (batch,) int32 to (batch, features) float32."""
    half = features // 2
    rates = jnp.exp(-math.log(10_000) / (half - 1) * jnp.arange(half, dtype=jnp.float32))
    angles = step.astype(jnp.float32)[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def loss_fn(model: UNet, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean squared error of the predicted noise."""
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, STEPS))[batch["step"]][:, None, None, None]
    noisy = jnp.sqrt(kept) * batch["images"] + jnp.sqrt(1 - kept) * batch["noise"]
    return jnp.mean((model(noisy, batch["step"]) - batch["noise"]) ** 2)


def fields(config: UNetConfig, batch: int) -> dict[str, Field]:
    """Returns images, noise, and the step of diffusion of each image."""
    images = Field((batch, config.image, config.image, 3))
    return {"images": images, "noise": images, "step": Field((batch,), np.int32, STEPS)}


SIZES = {
    "tiny": UNetConfig(image=16, channels=16, factors=(1, 2), blocks=1, attention=(8,), groups=8, dropout=0.0),
    "cifar10": UNetConfig(),
    "lsun": UNetConfig(image=256, factors=(1, 1, 2, 2, 4, 4), dropout=0.0),
}

SPEC = ModelSpec("unet", SIZES, UNet, loss_fn, fields)
