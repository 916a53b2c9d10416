"""What the zoo's files share: the record of a case, batches and losses, numbers to fill shapes with, and updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    """

    name: str
    make: Make
    dtype: str = "float32"
    notes: str = ""
    style: str = "functional"
    reference: Make | None = None


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


def variants(library: str, make: Callable[..., Any]) -> list[Case]:
    """The cases of the models that both libraries have, by what makes one of a kind with options."""
    odd = {"vocab": 67, "seq": 12, "hidden": 24, "heads": 3, "tied": True}
    table: dict[str, tuple[str, dict[str, Any], str]] = {
        "mlp": ("mlp", {"sizes": (32, 64, 64, 16)}, ""),
        "mlp_odd": ("mlp", {"sizes": (33, 30, 6, 3)}, "no feature dim divides by eight"),
        "gpt": ("gpt", {}, "unrolled layers"),
        "gpt_scan": ("gpt", {"scan": True, "layers": 3}, "scanned layers, an odd number of them"),
        "gpt_scan_remat": ("gpt", {"scan": True, "remat": True}, "scanned layers, each recomputed"),
        "gpt_tied": ("gpt", {"tied": True}, "one embedding used twice"),
        "gpt_odd": ("gpt", odd, "vocabulary, sequence and heads do not divide by eight"),
        "gpt_dropout": ("gpt", {"dropout": 0.25}, "a typed key as an argument, or keys and counts within the state"),
        "gpt_scan_dropout": ("gpt", {"dropout": 0.25, "scan": True}, "a key split over scanned layers, or stacked"),
        "gpt_bf16": ("gpt", {"dtype": jnp.bfloat16}, ""),
        "gpt_clip": ("gpt", {"tx": clipped()}, "the update depends on the norm of all gradients"),
        "convnet": ("convnet", {}, "batch norm, two kinds of pooling, a residual"),
        "convnet_odd": ("convnet", {"channels": 6, "classes": 5}, "channels do not divide by eight"),
        "resnet": ("resnet", {}, "residual convolutions, group norm instead of batch norm"),
        "unet": ("unet", {}, "skips, a transposed convolution, concatenation"),
        "translator": ("translator", {}, "an encoder and a decoder, both with the embedding"),
        "moe": ("moe", {}, "top_k, cumulative sums, dropped tokens"),
        "gru": ("gru", {}, "lax.scan over time"),
    }
    half = {"dtype": "bfloat16", "reference": partial(make, "gpt")}
    return [
        Case(f"{library}_{name}", partial(make, kind, **options), notes=notes, **(half if "bf16" in name else {}))
        for name, (kind, options, notes) in table.items()
    ]


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
