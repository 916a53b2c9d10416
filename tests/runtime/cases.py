"""Methods, numbers and comparisons that tests of running steps share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite
from gallery.steps import sgd

METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "one mesh": lambda: {"method": alpa_lite.DataParallel()},
    "zero": lambda: {"method": alpa_lite.Zero(3)},
    "replicated microbatches": lambda: {"method": alpa_lite.DataParallel(), "num_microbatches": 2},
    "two microbatches": lambda: {"method": alpa_lite.Zero(3), "num_microbatches": 2},
    "tensor": lambda: {"method": alpa_lite.TensorParallel()},
    "whole pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2)},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def descend(loss: Callable[[Any], jax.Array], params: Any) -> tuple[Any, jax.Array]:
    """The parameters after a step of gradient descent, and the loss before it."""
    return sgd(lambda params, _: loss(params))(params, None)


def equal_leaves(got: Any, want: Any, rtol: float, atol: float) -> None:
    """Raises AssertionError unless two trees have leaves of equal dtypes that are close, read as float32."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rtol, atol=atol)


def pointers(tree: Any) -> set[int]:
    """Where the blocks of arrays are."""
    arrays = jax.tree.leaves(tree)
    blocks = {s.data.unsafe_buffer_pointer() for x in arrays if isinstance(x, jax.Array) for s in x.addressable_shards}
    return blocks | {x.ctypes.data for x in arrays if isinstance(x, np.ndarray)}


def deleted(tree: Any) -> set[bool]:
    """Whether arrays are deleted."""
    return {leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
