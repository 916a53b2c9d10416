"""Wide ResNet: a ResNet of bottlenecks whose 3 x 3 convolutions are wider, with batch norm.

A block of f filters is 1 x 1 to f, 3 x 3 to width·f, 1 x 1 to 4·f, added to its input (projected where shapes differ).
Batch norm takes its mean and variance over the whole batch. Sizes "250M" to "13B" are those of the Alpa paper (Zheng et
al., 2022), with 1024 classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .spec import Field, ModelSpec


@dataclass(frozen=True)
class WideResNetConfig:
    """The shape of a Wide ResNet.

    Attributes:
      image: height and width of the images.
      blocks: bottlenecks in each stage; stages after the first halve height and width.
      filters: of the first stage; each stage doubles them.
      width: how much wider the 3 x 3 convolutions are.
      classes: to choose from.
      dtype: of the computation; parameters and statistics are float32.
    """

    image: int = 224
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    filters: int = 160
    width: int = 2
    classes: int = 1024
    dtype: Any = jnp.float32

    def bottlenecks(self) -> Iterator[tuple[int, int, int]]:
        """Yields channels in, filters and stride of each bottleneck, in order."""
        channels = self.filters
        for stage, count in enumerate(self.blocks):
            filters = self.filters * 2**stage
            for index in range(count):
                yield channels, filters, 2 if stage and not index else 1
                channels = 4 * filters


class ConvNorm(nnx.Module):
    """A convolution without bias, and batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, *, dtype: Any, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        size, strides = (kernel, kernel), (stride, stride)
        self.conv = nnx.Conv(inputs, outputs, size, strides, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, channels), with the mean and the variance of this batch."""
        return self.norm(self.conv(x))


class Bottleneck(nnx.Module):
    """One block."""

    def __init__(self, inputs: int, filters: int, stride: int, width: int, *, dtype: Any, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.reduce = ConvNorm(inputs, filters, 1, 1, dtype=dtype, rngs=rngs)
        self.spatial = ConvNorm(filters, width * filters, 3, stride, dtype=dtype, rngs=rngs)
        self.expand = ConvNorm(width * filters, 4 * filters, 1, 1, dtype=dtype, rngs=rngs)
        same = stride == 1 and inputs == 4 * filters
        self.project = None if same else ConvNorm(inputs, 4 * filters, 1, stride, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, channels)."""
        y = self.expand(nnx.relu(self.spatial(nnx.relu(self.reduce(x)))))
        return nnx.relu(y + (x if self.project is None else self.project(x)))


class WideResNet(nnx.Module):
    """The whole classifier."""

    def __init__(self, config: WideResNetConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.stem = ConvNorm(3, config.filters, 7, 2, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List(
            [Bottleneck(*block, config.width, dtype=config.dtype, rngs=rngs) for block in config.bottlenecks()]
        )
        outputs = 4 * config.filters * 2 ** (len(config.blocks) - 1)
        self.head = nnx.Linear(outputs, config.classes, dtype=config.dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns images (batch, height, width, 3) to float32 logits (batch, classes)."""
        x = nnx.max_pool(nnx.relu(self.stem(images)), (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2))).astype(jnp.float32)


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean negative log-likelihood of the labels, in nats an image."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"]).mean()


def fields(config: Any, batch: int) -> dict[str, Field]:
    """Returns images and their labels."""
    images = Field((batch, config.image, config.image, 3))
    return {"images": images, "labels": Field((batch,), np.int32, config.classes)}


SIZES = {
    "tiny": WideResNetConfig(image=32, blocks=(1, 1), filters=16, classes=16),
    "250M": WideResNetConfig(filters=160),
    "500M": WideResNetConfig(filters=224),
    "1B": WideResNetConfig(filters=320),
    "2B": WideResNetConfig(filters=448),
    "4B": WideResNetConfig(filters=640),
    "6.8B": WideResNetConfig(filters=320, width=16),
    "13B": WideResNetConfig(blocks=(3, 4, 23, 3), filters=320, width=16),
}

SPEC = ModelSpec("wide_resnet", SIZES, WideResNet, loss_fn, fields)
