"""Networks of pictures, fields and flows of the steps in `unusual.py`, in plain linen as their users write them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from gallery.steps import module

Dense = functools.partial(nn.Dense, dtype=jnp.bfloat16)
Conv = functools.partial(nn.Conv, dtype=jnp.bfloat16)
Norm = functools.partial(nn.LayerNorm, dtype=jnp.bfloat16)


@module
def Fourier(self, x, *, width, modes):
    """An operator on functions of the plane: products with their lowest frequencies.

    [batch, height, width, channels] to [batch, height, width, 1].
    """
    x, modes = nn.Dense(width)(x), modes
    for number in range(8):
        found = jnp.fft.rfft2(x, axes=(1, 2))
        dims = (2, modes, modes, width, width)
        parts = [self.param(f"weights{number}{half}", nn.initializers.normal(0.01), dims) for half in range(2)]
        low, high = (part[0] + 1j * part[1] for part in parts)
        out = jnp.zeros_like(found)
        out = out.at[:, :modes, :modes].set(jnp.einsum("bxyi,xyio->bxyo", found[:, :modes, :modes], low))
        out = out.at[:, -modes:, :modes].set(jnp.einsum("bxyi,xyio->bxyo", found[:, -modes:, :modes], high))
        x = nn.gelu(jnp.fft.irfft2(out, s=x.shape[1:3], axes=(1, 2)) + nn.Dense(width)(x))
    return nn.Dense(1)(nn.gelu(nn.Dense(256)(x)))


@module
def Modulated(self, x, style, *, width):
    """A convolution whose kernel is scaled for each picture by its style.

    [batch, height, width, channels] and [batch, features] to [batch, height, width, width of the kernel].
    """
    scale = nn.Dense(x.shape[-1])(style) + 1
    kernel = self.param("kernel", nn.initializers.normal(0.02), (3, 3, x.shape[-1], width))
    size = jax.lax.rsqrt(jnp.einsum("hwio,bi->bo", kernel**2, scale**2) + 1e-8)
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x * scale[:, None, None], kernel, (1, 1), "SAME", dimension_numbers=layout)
    return nn.leaky_relu(x * size[:, None, None], 0.2)


@module
def Generator(self, z):
    """Pictures of 256 x 256 from noise: [batch, 512] to [batch, 256, 256, 3]."""
    for _ in range(8):
        z = nn.leaky_relu(nn.Dense(512)(z), 0.2)
    start = self.param("start", nn.initializers.normal(1), (4, 4, 512))
    x = jnp.broadcast_to(start, (z.shape[0], 4, 4, 512))
    for width in (512, 512, 512, 256, 128, 64):
        batch, height, across, channels = x.shape
        x = jax.image.resize(x, (batch, 2 * height, 2 * across, channels), "bilinear")
        for _ in range(2):
            x = Modulated(width)(x, z)
    return nn.Conv(3, (1, 1))(x)


@module
def Discriminator(self, x):
    """Whether pictures are real, from residual convolutions and the deviation within groups of four pictures.

    [batch, height, width, 3] to [batch, 1] logits.
    """
    x = nn.Conv(64, (1, 1))(x)
    for width in (128, 256, 512, 512, 512, 512):
        y = nn.leaky_relu(nn.Conv(width, (3, 3))(x), 0.2)
        y = nn.avg_pool(nn.leaky_relu(nn.Conv(width, (3, 3))(y), 0.2), (2, 2), (2, 2))
        x = (y + nn.avg_pool(nn.Conv(width, (1, 1), use_bias=False)(x), (2, 2), (2, 2))) * 2**-0.5
    groups = x.reshape(-1, 4, *x.shape[1:])
    deviation = jnp.broadcast_to(jnp.sqrt(groups.var(0) + 1e-8).mean(), (*x.shape[:3], 1))
    x = jnp.concatenate([x, deviation], -1).reshape(x.shape[0], -1)
    return nn.Dense(1)(nn.leaky_relu(nn.Dense(512)(x), 0.2))


def waves(x: Any, count: int) -> Any:
    """[..., 3] and its sines and cosines at `count` frequencies, [..., 3 + 6 * count]."""
    return jnp.concatenate([x, *(f(x * 2.0**i) for i in range(count) for f in (jnp.sin, jnp.cos))], -1)


@module
def Field(self, points, directions):
    """Colours and densities of points that are seen from directions.

    [rays, points, 3] and [rays, 1, 3] to [rays, points, 3] and [rays, points].
    """
    start = waves(points, 10)
    y = start
    for number in range(8):
        y = nn.relu(nn.Dense(256)(jnp.concatenate([y, start], -1) if number == 5 else y))
    density = nn.Dense(1)(y)[..., 0]
    y = nn.Dense(256)(y)
    y = jnp.concatenate([y, jnp.broadcast_to(waves(directions, 4), (*y.shape[:-1], 27))], -1)
    return nn.sigmoid(nn.Dense(3)(nn.relu(nn.Dense(128)(y)))), nn.softplus(density)


def blocks(x: Any, size: int) -> Any:
    """[batch, height, width, channels] to [batch, rows, columns, size, size, channels]."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // size, size, width // size, size, channels).transpose(0, 1, 3, 2, 4, 5)


def narrow(x: Any) -> Any:
    """[batch, height, width, channels] to [batch, height / 2, width / 2, 4 * channels]."""
    y = blocks(x, 2)
    return y.reshape(*y.shape[:3], -1)


def couple(x: Any) -> tuple[Any, Any]:
    """[batch, height, width, channels] to the same and [batch] changes of the logarithm."""
    kept, other = jnp.split(x, 2, -1)
    y = nn.relu(nn.Conv(512, (3, 3))(kept))
    y = nn.relu(nn.Conv(512, (1, 1))(y))
    y = nn.Conv(x.shape[-1], (3, 3), kernel_init=nn.initializers.zeros)(y)
    shift, scale = jnp.split(y, 2, -1)
    scale = nn.sigmoid(scale + 2)
    return jnp.concatenate([kept, (other + shift) * scale], -1), jnp.log(scale).sum((1, 2, 3))


@module
def Flow(self, x, *, steps, levels):
    """Likelihoods by functions that can be turned round: scales, rotations, and shifts of one half by the other.

    [batch, height, width, channels] to [batch] logarithms.
    """
    total = 0.0
    zeros, orthogonal = nn.initializers.zeros, nn.initializers.orthogonal()
    for level in range(levels):
        _, height, width, channels = x.shape
        x, channels = narrow(x), 4 * channels
        for number in range(steps):
            offset = self.param(f"offset{level}_{number}", zeros, (channels,))
            scale = self.param(f"scale{level}_{number}", zeros, (channels,))
            turn = self.param(f"turn{level}_{number}", orthogonal, (channels, channels))
            total += scale.sum() * height * width / 4
            total += jnp.linalg.slogdet(turn)[1] * height * width / 4
            x, change = couple(((x + offset) * jnp.exp(scale)) @ turn)
            total += change
    return (-0.5 * x**2 - 0.919).sum((1, 2, 3)) + total


def relative(window: int) -> np.ndarray:
    """The number of each pair's distance within a window: [window**2, window**2] of (2 * window - 1)**2."""
    places = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij"), -1).reshape(-1, 2)
    apart = places[:, None] - places[None] + window - 1
    return apart[..., 0] * (2 * window - 1) + apart[..., 1]


def window_mask(height: int, width: int, window: int, shift: int) -> np.ndarray:
    """What is added to scores of pairs that only a shift brought together: [windows, window**2, window**2]."""
    numbers = np.zeros((height, width), int)
    bounds = slice(0, -window), slice(-window, -shift), slice(-shift, None)
    for number, place in enumerate(itertools.product(bounds, bounds)):
        numbers[place] = number
    own = blocks(numbers[None, ..., None], window).reshape(-1, window**2)
    return np.where(own[:, None] == own[:, :, None], 0.0, -100.0).astype(np.float32)


def attend_in_windows(self: Any, x: Any) -> Any:
    """Attention of [batch, height, width, channels] within windows."""
    batch, height, width, channels = x.shape
    window, length = self.window, self.window**2
    y = Dense(3 * channels)(blocks(x, window).reshape(-1, length, channels))
    q, k, v = jnp.split(y.reshape(-1, length, self.heads, 3 * channels // self.heads), 3, -1)
    table = self.param("places", nn.initializers.normal(0.02), ((2 * window - 1) ** 2, self.heads))
    bias = table[relative(window)].transpose(2, 0, 1).astype(jnp.bfloat16)
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) * q.shape[-1] ** -0.5 + bias
    if self.shift:
        apart = window_mask(height, width, window, self.shift)[None, :, None]
        masked = scores.reshape(batch, -1, *scores.shape[1:]) + apart
        scores = masked.reshape(scores.shape).astype(jnp.bfloat16)
    y = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), v).reshape(-1, length, channels)
    y = Dense(channels)(y).reshape(batch, height // window, width // window, window, window, channels)
    return y.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)


@module
def WindowBlock(self, x, *, heads, shift, window=7):
    """Attention within windows, shifted ones in every other block, and dense layers; examples drop either.

    [batch, height, width, channels] to the same.
    """
    drop = nn.Dropout(0.2, broadcast_dims=(1, 2, 3), deterministic=False)
    y = Norm()(x)
    if shift:
        y = jnp.roll(y, (-shift, -shift), (1, 2))
    y = attend_in_windows(self, y)
    if shift:
        y = jnp.roll(y, (shift, shift), (1, 2))
    x = x + drop(y)
    return x + drop(Dense(x.shape[-1])(nn.gelu(Dense(4 * x.shape[-1])(Norm()(x)))))


@module
def Windows(self, x):
    """A classifier by attention within windows, at four resolutions: [batch, 224, 224, 3] to [batch, 1000] logits."""
    x = Conv(192, (4, 4), (4, 4))(x)
    for level, (layers, heads) in enumerate(((2, 6), (2, 12), (18, 24), (2, 48))):
        if level:
            x = Dense(2 * x.shape[-1], use_bias=False)(Norm()(narrow(x)))
        for number in range(layers):
            x = WindowBlock(heads, 3 * (number % 2) if x.shape[1] > 7 else 0)(x)
    return nn.Dense(1000)(nn.LayerNorm()(x).mean((1, 2)))
