"""A multi-layer perceptron: linear maps with ReLU between, fitted to targets by least squares."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .spec import Field, ModelSpec


@dataclass(frozen=True)
class MLPConfig:
    """The shape of a perceptron.

    Attributes:
      inputs, hidden, outputs: features in, within and out.
      layers: linear maps in all, at least two.
      dtype: of the computation; parameters are float32.
    """

    inputs: int = 1024
    hidden: int = 4096
    outputs: int = 1024
    layers: int = 4
    dtype: Any = jnp.float32

    @property
    def widths(self) -> tuple[int, ...]:
        """Features before, between and after the linear maps."""
        return (self.inputs, *[self.hidden] * (self.layers - 1), self.outputs)


class MLP(nnx.Module):
    """The perceptron."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.layers = nnx.List([nnx.Linear(a, b, dtype=config.dtype, rngs=rngs) for a, b in pairwise(config.widths)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, inputs) to (batch, outputs)."""
        *inner, last = self.layers
        for layer in inner:
            x = nnx.relu(layer(x))
        return last(x)


def loss_fn(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean squared error."""
    return jnp.mean((model(batch["inputs"]).astype(jnp.float32) - batch["targets"]) ** 2)


def fields(config: MLPConfig, batch: int) -> dict[str, Field]:
    """Returns features and targets."""
    return {"inputs": Field((batch, config.inputs)), "targets": Field((batch, config.outputs))}


SIZES = {
    "tiny": MLPConfig(inputs=32, hidden=64, outputs=16, layers=3),
    "base": MLPConfig(),
    "wide": MLPConfig(inputs=8192, hidden=32768, outputs=8192),
}

SPEC = ModelSpec("mlp", SIZES, MLP, loss_fn, fields)
