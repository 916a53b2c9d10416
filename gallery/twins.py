"""Batches, losses and options of the models that the zoo has in linen and in NNX, and their common parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gallery.batches import images, normal, regression, text
from gallery.registry import Case, parse_tags
from gallery.steps import cross_entropy, updated


def squared(outputs: jax.Array, batch: Any) -> jax.Array:
    """The mean square of the distance to targets."""
    return jnp.mean((outputs - batch["y"]) ** 2)


def classified(outputs: jax.Array, batch: Any) -> jax.Array:
    """The likelihood of labels."""
    return cross_entropy(outputs, batch["y"])


def likelihood(outputs: jax.Array, batch: Any) -> jax.Array:
    """The likelihood of tokens."""
    return cross_entropy(outputs, batch["targets"])


def in_time(inputs: int, outputs: int, *dims: int) -> dict[str, jax.Array]:
    """A batch of eight examples, whose features have more dims, and so have targets unless they are fewer."""
    batch = regression(inputs, outputs, batch=8)
    return {name: x.reshape(8, *dims) if x.shape[1] == math.prod(dims) else x for name, x in batch.items()}


def task(kind: str, sizes: Sequence[int] = (), vocab: int = 64, seq: int = 16, classes: int = 8, **_: Any) -> Any:
    """The loss of a kind of models, of their results and the batch, a batch, and the name of the inputs in it."""
    match kind:
        case "mlp":
            return squared, regression(sizes[0], sizes[-1]), "x"
        case "gpt":
            return likelihood, text(vocab, seq=seq), "inputs"
        case "convnet" | "resnet":
            return classified, images(8, classes), "x"
        case "unet":
            return squared, {"x": normal(3, 8, 8, 8, 4), "y": normal(4, 8, 8, 8, 4)}, "x"
        case "translator":
            batch = text(64, seq=8)
            tokens = {"source": text(64, seq=12)["targets"], "inputs": batch["inputs"]}
            return likelihood, {"tokens": tokens, "targets": batch["targets"]}, "tokens"
        case "moe":
            return squared, in_time(256, 256, 16, 16), "x"
    return squared, in_time(192, 8, 12, 16), "x"


def clipped() -> optax.GradientTransformation:
    """Gradient descent with a bounded norm of all gradients."""
    return optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))


def advanced(state: Any, grads: Any, tx: optax.GradientTransformation | None) -> dict[str, Any]:
    """New parameters by plain gradient descent, or by an optimizer, with its new state."""
    if tx is None:
        return {"params": updated(state["params"], grads)}
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def variants(library: str, make: Callable[..., Any]) -> list[Case]:
    """The cases of the models that both libraries have, by what makes one of a kind with options."""
    odd = {"vocab": 67, "seq": 12, "hidden": 24, "heads": 3, "tied": True}
    table: dict[str, tuple[str, dict[str, Any], str, str]] = {
        "mlp": ("mlp", {"sizes": (32, 64, 64, 16)}, "", ""),
        "mlp_odd": ("mlp", {"sizes": (33, 30, 6, 3)}, "", "no feature dim divides by eight"),
        "gpt": ("gpt", {}, "", "unrolled layers"),
        "gpt_scan": ("gpt", {"scan": True, "layers": 3}, "scan", "scanned layers, an odd number of them"),
        "gpt_scan_remat": (
            "gpt", {"scan": True, "remat": True}, "scan, rematerialisation", "scanned layers, each recomputed",
        ),
        "gpt_tied": ("gpt", {"tied": True}, "", "one embedding used twice"),
        "gpt_odd": ("gpt", odd, "", "vocabulary, sequence and heads do not divide by eight"),
        "gpt_dropout": (
            "gpt", {"dropout": 0.25}, "random", "a typed key as an argument, or keys and counts within the state",
        ),
        "gpt_scan_dropout": (
            "gpt", {"dropout": 0.25, "scan": True}, "random, scan", "a key split over scanned layers, or stacked",
        ),
        "gpt_bf16": ("gpt", {"dtype": jnp.bfloat16}, "half precision", ""),
        "gpt_clip": ("gpt", {"tx": clipped()}, "optimizer", "the update depends on the norm of all gradients"),
        "convnet": ("convnet", {}, "mutable state", "batch norm, two kinds of pooling, a residual"),
        "convnet_odd": ("convnet", {"channels": 6, "classes": 5}, "mutable state", "channels do not divide by eight"),
        "resnet": ("resnet", {}, "", "residual convolutions, group norm instead of batch norm"),
        "unet": ("unet", {}, "", "skips, a transposed convolution, concatenation"),
        "translator": ("translator", {}, "", "an encoder and a decoder, both with the embedding"),
        "moe": ("moe", {}, "", "top_k, cumulative sums, dropped tokens"),
        "gru": ("gru", {}, "scan", "lax.scan over time"),
    }  # fmt: skip
    half = {"dtype": "bfloat16", "reference": partial(make, "gpt")}
    return [
        Case(
            f"{library}_{name}", partial(make, kind, **options), tags=parse_tags(f"{library}, {TAGS[kind]}, {more}"),
            notes=notes, **(half if "bf16" in name else {}),
        )
        for name, (kind, options, more, notes) in table.items()
    ]  # fmt: skip


TAGS = {
    "mlp": "perceptron", "gpt": "attention", "convnet": "convolution", "resnet": "convolution", "unet": "convolution",
    "translator": "attention", "moe": "mixture of experts", "gru": "recurrent",
}  # fmt: skip
"""Of each kind of models."""


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
