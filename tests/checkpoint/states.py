"""States to save, and whether what was restored is the same, bit for bit."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.passes.tracing import pytrees
from gallery.steps import apply_optimizer, square_layers

Pair = collections.namedtuple("Pair", "first second")

WIDTH, LAYERS = 16, 4


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mesh(low: int, high: int, *shape: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[low:high]).reshape(shape), ("x", "y")[: len(shape)])


def put(value: Any, where: Mesh, *spec: str | None) -> jax.Array:
    return jax.device_put(value, NamedSharding(where, PartitionSpec(*spec)))


def everything() -> dict[str, Any]:
    """One of each kind of leaf and of container, on one device, on all, and on two submeshes."""
    whole, low, high = mesh(0, 8, 8), mesh(0, 4, 4), mesh(4, 8, 2, 2)
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    params = linen.Dense(16).init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
    return {
        "sharded": put(draw(16, 8), whole, "x"),
        "low": put(draw(16, 8), low, None, "x"),
        "high": put(draw(16, 8), high, "y", "x"),
        "replicated": put(draw(5), whole),
        "bfloat16": put(draw(8).astype(jnp.bfloat16), low),
        "small": (jnp.ones(4, jnp.float8_e4m3fn), jnp.ones(3, bool), jnp.ones(3, jnp.complex64), jnp.int32(7)),
        "keys": [put(jax.random.split(jax.random.key(3), 8), high, "x"), jax.random.key(5, impl="rbg")],
        "python": {"int": 3, "float": 2.5, "bool": True, "str": "text", "none": None, "empty": Pair((), {})},
        "numpy": [np.float32(3), np.bool_(True), draw(3)],
        "no elements": jnp.zeros((0, 4)),
        "nnx": (model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), nnx.Rngs(dropout=7)),
        "linen": TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3)),
    }


def same(got: Any, want: Any) -> None:
    """Raises AssertionError unless leaves have the same types, shardings and bits."""
    leaves = [pytrees.flatten_nnx(tree, with_constants=True) for tree in (got, want)]
    for mine, other in zip(leaves[0][0], leaves[1][0], strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, jax.Array):
            assert mine.dtype == other.dtype and mine.sharding == other.sharding
    equal(got, want)


def equal(got: Any, want: Any) -> None:
    """Raises AssertionError unless leaves have the same bits, wherever they lie."""
    leaves = [pytrees.flatten_nnx(tree, with_constants=True)[0] for tree in (got, want)]
    for mine, other in zip(*leaves, strict=True):
        assert bits(mine) == bits(other)


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return (leaf.shape, np.asarray(leaf).tobytes()) if hasattr(leaf, "shape") else leaf


def create(key: jax.Array) -> dict[str, Any]:
    """The state of `train`: layers of one width, the moments of Adam, a random key."""
    init = jax.nn.initializers.lecun_normal()
    params = [init(k, (WIDTH, WIDTH)) for k in jax.random.split(key, LAYERS)]
    return {"params": params, "memory": optax.adam(1e-2).init(params), "key": jax.random.fold_in(key, 1)}


def train(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
    return apply_optimizer(lambda params: square_layers(params, batch), state, optax.adam(1e-2))
