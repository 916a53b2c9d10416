"""Shapes and arrays for arguments of steps: parameters filled by their names, batches of numbers, tokens and images."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """The shape of an argument."""
    return jax.ShapeDtypeStruct(dims, dtype)


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    """The shape of an argument in float32."""
    return shape(*dims, dtype=jnp.float32)


def shapes(tree: Any) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def random_key() -> Any:
    """The shape of a key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def one_example(*arrays: Any) -> list[Any]:
    """The shapes of arrays with one example."""
    return [shape(1, *x.shape[1:], dtype=x.dtype) for x in arrays]


def initial(model: Any, *given: Any) -> Any:
    """The shapes of a model's variables."""
    return jax.eval_shape(model.init, jax.random.key(0), *given)


def to_bfloat16(params: Any) -> Any:
    """The shapes of parameters in bfloat16."""
    return jax.tree.map(lambda leaf: shape(*leaf.shape, dtype=jnp.bfloat16), params)


def random_arrays(shapes: Any, seed: int = 0) -> Any:
    """Arrays in place of shapes: no leaf is all zeros or all ones, so that no gradient vanishes by accident.

    Norm scales and variances are near one, biases and means near zero, kernels normal with variance one over fan-in.
    Initialisers are not used, because each would be compiled.
    """
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:])
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            keys = jax.random.split(jax.random.key(seed), max(1, math.prod(leaf.shape)))
            return keys.reshape(leaf.shape)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))
        values = rng.standard_normal(leaf.shape)
        if "scale" in name or "var" in name:
            values = 1 + 0.1 * np.abs(values)
        elif leaf.ndim < 2 or "bias" in name:
            values = 0.1 * values
        else:
            values = values / math.sqrt(math.prod(leaf.shape[:-1]))
        return jnp.asarray(values.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(fill, shapes)


def normal(seed: int, *shape: int) -> jax.Array:
    """Standard normal float32 numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def tokens(seed: int, limit: int, *shape: int) -> jax.Array:
    """int32 numbers in [0, limit)."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, limit, shape).astype(np.int32))


def weights(**shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Named parameters with variance one over fan-in."""
    return {name: normal(i, *shape) / np.sqrt(shape[0]) for i, (name, shape) in enumerate(shapes.items(), 10)}


def text(vocab: int, batch: int = 8, seq: int = 16) -> dict[str, jax.Array]:
    """A batch of tokens and the tokens that follow them."""
    row = tokens(7, vocab, batch, seq + 1)
    return {"inputs": row[:, :-1], "targets": row[:, 1:]}


def regression(inputs: int, outputs: int, batch: int = 16) -> dict[str, jax.Array]:
    """A batch of features and targets."""
    return {"x": normal(1, batch, inputs), "y": normal(2, batch, outputs)}


def rows(count: int, width: int) -> dict[str, jax.Array]:
    """A batch of as many features as targets."""
    return regression(width, width, count)


def images(channels: int, classes: int, batch: int = 8, size: int = 8) -> dict[str, jax.Array]:
    """A batch of images and labels."""
    return {"x": normal(3, batch, size, size, channels), "y": tokens(4, classes, batch)}
