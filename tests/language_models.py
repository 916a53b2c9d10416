"""Decoders for tests of slices of the sequence: unrolled, and without a dim of examples."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite
from tests.gallery import local, sgd
from tests.zoo_base import normal

TOKENS, VOCAB, WIDE = 12, 31, 16


def tokens_of(examples: int, seed: int = 1, lowest: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(lowest, VOCAB, (examples, TOKENS)), jnp.int32)


def descending(loss: Callable[..., jax.Array]) -> Any:
    """A step that returns its gradients too, for parameters and any number of batches."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), "grads": grads, "loss": value}

    return step


def piped(step: Any, on: int | alpa_lite.Cluster, microbatches: Any = 2, **method: Any) -> Any:
    """The step as a pipeline on a cluster, or on this many devices of this machine."""
    cluster = local(on) if isinstance(on, int) else on
    return alpa_lite.parallelize(
        step, method=alpa_lite.Pipeline(**method), cluster=cluster, num_microbatches=microbatches
    )


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[..., :-1, :], tokens[..., 1:]).mean()


def parameters(layers: int) -> Any:
    """An embedding, layers with one projection each before and after their attention, and a head."""
    seeds = itertools.count()

    def weight(*shape: int) -> jax.Array:
        return 0.3 * normal(next(seeds), *shape)

    stack = [{"qkv": weight(WIDE, 3 * WIDE), "out": weight(WIDE, WIDE)} for _ in range(layers)]
    return {"embed": weight(VOCAB, WIDE), "layers": stack, "head": weight(WIDE, VOCAB)}


def attend(x: jax.Array, layer: Any, causal: bool = True) -> jax.Array:
    """A layer on (examples, tokens, features)."""
    heads = (jax.nn.standardize(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, 4, WIDE // 4)
    attended = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=causal)
    return x + jnp.tanh(attended.reshape(x.shape) @ layer["out"])


def language_model(causal: bool = True, layers: int = 2) -> tuple[Any, Any]:
    """A step of layers with attention, and its arguments."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = attend(x, layer, causal)
        return next_token(x @ params["head"], tokens)

    return sgd(loss), (parameters(layers), tokens_of(8, lowest=0))


def without_examples(one_hot: bool = False) -> tuple[Any, Any]:
    """A step on one sequence that has no dim of examples."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        embed = params["embed"]
        x = jax.nn.one_hot(tokens, VOCAB) @ embed if one_hot else jnp.take(embed, tokens, axis=0)
        for layer in params["layers"]:
            q, k, v = jnp.split((jax.nn.standardize(x) @ layer["qkv"]).reshape(len(x), 3, 4, WIDE // 4), 3, 1)
            scores = jnp.einsum("qhd,khd->hqk", q[:, 0], k[:, 0])
            weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9))
            x = x + jnp.tanh(jnp.einsum("hqk,khd->qhd", weights, v[:, 0]).reshape(x.shape) @ layer["out"])
        return next_token(x @ params["head"], tokens)

    return descending(loss), (parameters(2), tokens_of(1, lowest=0)[0])
