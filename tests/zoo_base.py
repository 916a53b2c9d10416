"""What the zoo's files share: the record of a case, numbers to fill shapes with, and the update of every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass(frozen=True)
class Case:
    """A training step to compare with itself on one device.

    Attributes:
      name: unique in the zoo.
      make: gives the step and its arguments, small arrays on the default device; the same at every call.
      dtype: of the computation.
      notes: what the case is there for.
      style: "functional" for `(state, batch, ...) -> (state, {"loss", "grads"})`, where `grads` has the tree of
        `state["params"]`; "train_state" for `(TrainState, batch) -> (TrainState, {"loss"})`; "optax" for
        `(params, opt_state, batch) -> (params, opt_state, loss)`; "nnx" for `(model, optimizer, batch) -> loss`, which
        updates its first two arguments in place.
      reference: for a case in bfloat16, the same step and arguments in float32.
      divisible: whether every large dim is a multiple of eight.
    """

    name: str
    make: Make
    dtype: str = "float32"
    notes: str = ""
    style: str = "functional"
    reference: Make | None = None
    divisible: bool = True


def filled(shapes: Any, seed: int = 0) -> Any:
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


def updated(params: Any, grads: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def normal(seed: int, *shape: int) -> jax.Array:
    """Standard normal float32 numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def tokens(seed: int, limit: int, *shape: int) -> jax.Array:
    """int32 numbers in [0, limit)."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, limit, shape).astype(np.int32))


def text(vocab: int, batch: int = 8, seq: int = 16) -> dict[str, jax.Array]:
    """A batch of tokens and the tokens that follow them."""
    row = tokens(7, vocab, batch, seq + 1)
    return {"inputs": row[:, :-1], "targets": row[:, 1:]}


def regression(inputs: int, outputs: int, batch: int = 16) -> dict[str, jax.Array]:
    """A batch of features and targets."""
    return {"x": normal(1, batch, inputs), "y": normal(2, batch, outputs)}


def images(channels: int, classes: int, batch: int = 8, size: int = 8) -> dict[str, jax.Array]:
    """A batch of images and labels."""
    return {"x": normal(3, batch, size, size, channels), "y": tokens(4, classes, batch)}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean negative log-likelihood, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True) -> jax.Array:
    """Attention on (batch, sequence, heads, head size)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


def route(gates: jax.Array, slots: int) -> jax.Array:
    """(group, token, expert) gates to (group, token, expert, slot) weights of each token's two best experts."""
    weights, choices = jax.lax.top_k(gates, 2)
    chosen = jax.nn.one_hot(choices, gates.shape[-1])
    totals = chosen.sum(1)
    before = jnp.cumsum(chosen, 1) - chosen + (jnp.cumsum(totals, 1) - totals)[:, None]
    slot = jnp.sum(before * chosen, -1).astype(jnp.int32)
    return jnp.einsum("gnk,gnke,gnkc->gnec", weights, chosen, jax.nn.one_hot(slot, slots))
