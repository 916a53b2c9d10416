"""Decoders for tests of slices of the sequence: unrolled, and without a dim of examples."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from gallery.batches import normal, tokens
from gallery.registry import Built
from gallery.steps import cross_entropy, descent, sgd

TOKENS, VOCAB, WIDE = 12, 31, 16


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return cross_entropy(logits[..., :-1, :], tokens[..., 1:])


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


def language_model(causal: bool = True, layers: int = 2) -> Built:
    """A step of layers with attention, and its arguments."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for layer in params["layers"]:
            x = attend(x, layer, causal)
        return next_token(x @ params["head"], tokens)

    return sgd(loss), (parameters(layers), tokens(1, VOCAB, 8, TOKENS))


def without_examples(one_hot: bool = False) -> Built:
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

    return descent(loss), ({"params": parameters(2)}, tokens(1, VOCAB, 1, TOKENS)[0])
