"""Causal models of Flax, Haiku, Equinox and Hugging Face for `token_correctness`, of a few tokens and two layers."""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from gallery import linen as zoo_linen
from gallery import nnx as zoo_nnx
from gallery.outside.hugging_face import HEADS as HEADS_OF
from gallery.outside.hugging_face import TABLE, mode, model_of, sizes_of
from gallery.outside.small import haiku_decoder
from gallery.registry import Built, Case, parse_tags
from gallery.steps import cross_entropy, module, weighted_cross_entropy
from gallery.tokens.models import BATCH, random_arrays, step, text
from gallery.tokens.parts import HEADS, TOKENS, VOCAB, WIDE


def shifted_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean loss of logits against the tokens after theirs."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


# -- Flax -------------------------------------------------------------------------------------------------------------


@module
def Linen(self, tokens):
    """Flax's attention, with one mask for all layers: [batch, tokens] to logits."""
    x = nn.Embed(VOCAB, WIDE)(tokens) + nn.Embed(64, WIDE)(jnp.arange(tokens.shape[1]))
    mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0))
    for _ in range(2):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=False)(y, mask=mask)
        y = nn.Dense(WIDE)(nn.gelu(nn.Dense(2 * WIDE)(nn.LayerNorm()(x))))
        x = x + nn.Dropout(0.1, deterministic=False)(y)
    return nn.Dense(VOCAB)(nn.LayerNorm()(x))


@module
def GatedUnits(self, tokens):
    """A recurrent layer of Flax: [batch, tokens] to logits."""
    x = nn.Embed(VOCAB, WIDE)(tokens)
    cells: list[Any] = [nn.GRUCell(WIDE), nn.OptimizedLSTMCell(WIDE)]
    for cell in cells:
        x = x + jnp.asarray(nn.RNN(cell)(nn.LayerNorm()(x)))
    return nn.Dense(VOCAB)(x)


def linen(model: nn.Module, optimizer: str = "sgd") -> Built:
    """The step of a linen module."""
    batch = text()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = random_arrays(jax.eval_shape(model.init, keys, batch["tokens"]))

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, batch["tokens"], rngs={"dropout": key})
        return shifted_loss(logits, batch["tokens"])

    return step(loss, params, batch, optimizer)


def zoo(make: Callable[..., Built], optimizer: str = "sgd", **options: Any) -> Built:
    """A decoder of the zoo, on as many examples as the others have."""
    train, (state, batch, *keys) = make(**options)
    del optimizer  # the zoo's own is gradient descent
    return train, (state, jax.tree.map(lambda x: x[:BATCH], batch), *keys)


# -- Haiku, Equinox ---------------------------------------------------------------------------------------------------


def haiku(optimizer: str = "sgd") -> Built:
    """A decoder with Haiku's attention."""
    model, batch = haiku_decoder(TOKENS, 2, WIDE, HEADS, VOCAB, 2 * WIDE, dropout=True), text()
    params = random_arrays(jax.eval_shape(model.init, jax.random.key(0), batch["tokens"]))
    return step(
        lambda params, batch, key: shifted_loss(model.apply(params, key, batch["tokens"]), batch["tokens"]),
        params, batch, optimizer,
    )  # fmt: skip


def equinox(optimizer: str = "sgd") -> Built:
    """Equinox's attention, written for one example and mapped over the batch."""
    eqx = importlib.import_module("equinox")
    keys = iter(jax.random.split(jax.random.key(0), 20))
    layers = [
        {
            "norm": eqx.nn.LayerNorm(WIDE), "attention": eqx.nn.MultiheadAttention(HEADS, WIDE, key=next(keys)),
            "mlp": eqx.nn.MLP(WIDE, WIDE, 2 * WIDE, 1, key=next(keys)),
        }
        for _ in range(2)
    ]  # fmt: skip
    embed, head = eqx.nn.Embedding(VOCAB, WIDE, key=next(keys)), eqx.nn.Linear(WIDE, VOCAB, key=next(keys))
    params, rest = eqx.partition((embed, layers, head), eqx.is_array)

    def logits(model: Any, tokens: jax.Array) -> jax.Array:
        embed, layers, head = model
        x = jax.vmap(embed)(tokens)
        mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
        rotary = eqx.nn.RotaryPositionalEmbedding(WIDE // HEADS)

        def turned(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            return jax.vmap(rotary, 1, 1)(q), jax.vmap(rotary, 1, 1)(k), v

        for layer in layers:
            y = jax.vmap(layer["norm"])(x)
            x = x + layer["attention"](y, y, y, mask=mask, process_heads=turned)
            x = x + jax.vmap(layer["mlp"])(x)
        return jax.vmap(head)(x)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        model = eqx.combine(params, rest)
        return shifted_loss(jax.vmap(functools.partial(logits, model))(batch["tokens"]), batch["tokens"])

    return step(
        loss, random_arrays(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)), text(), optimizer
    )


# -- Hugging Face -----------------------------------------------------------------------------------------------------

DECODERS: dict[str, dict[str, Any]] = TABLE["tokens"]
"""Rows of the table, each with the name of its configuration."""


def hugging_face(name: str, optimizer: str = "sgd") -> Built:
    """A decoder of `transformers`, trained with dropout on texts of several lengths."""
    sizes = sizes_of(DECODERS[name])
    config = sizes.pop("config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, shapes = model_of(config, HEADS_OF.get(config, "ForCausalLM"), jnp.float32, **sizes)
        params = random_arrays(shapes)
    if config == "Gemma":  # whose norms scale by one more than their weights
        params = jax.tree.map(lambda x: x - 1 if x.ndim == 1 else x, params)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        tokens, mask = batch["tokens"], batch["real"]
        out = model(tokens, attention_mask=mask.astype(jnp.int32), params=params, dropout_rng=key, **mode(model, True))
        return weighted_cross_entropy(out.logits[:, :-1], tokens[:, 1:], mask[:, 1:])

    lengths = np.array([[TOKENS], [math.ceil(TOKENS / 2)], [TOKENS - 3], [5]])
    return step(loss, params, text(real=np.arange(TOKENS) < lengths), optimizer)


CASES = [
    Case(name, build, tags=parse_tags(f"causal, {tags}"))
    for name, tags, build in (
        ("linen-gpt", "linen, attention, random", functools.partial(linen, Linen())),
        ("linen-rnn", "linen, recurrent, scan", functools.partial(linen, GatedUnits())),
        (
            "linen-scan", "linen, attention, random, scan, rematerialisation",
            functools.partial(zoo, zoo_linen.gpt, scan=True, layers=2, remat=True, dropout=0.25),
        ),
        ("nnx-gpt", "nnx, attention", functools.partial(zoo, zoo_nnx.gpt, layers=2)),
        ("nnx-scan", "nnx, attention, scan", functools.partial(zoo, zoo_nnx.gpt, layers=2, scan=True)),
        ("haiku", "haiku, attention, random", haiku),
        ("equinox", "equinox, attention", equinox),
        *((name, "hugging face, attention, random", functools.partial(hugging_face, name)) for name in DECODERS),
    )
]  # fmt: skip
"""The steps take the optimizer."""
