"""Small causal models for `token_correctness`: every form of attention, position, recurrence and loss by itself.

A model is a function (weights, batch, key) -> loss; `weights(name, *shape)` is a parameter. `step` differentiates it
and updates by gradient descent or by Adam. Models of other libraries are in `token_libraries.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.gallery.token_parts import (
    HEADS,
    TOKENS,
    VOCAB,
    WIDE,
    Model,
    Weights,
    alibi,
    attend,
    causal,
    centred,
    convolution,
    decoder,
    dense,
    dropped,
    embedded,
    gated,
    grouped_rotary,
    heads,
    joined,
    layer_norm,
    learned_bias,
    linear_attention,
    merged,
    mlp,
    next_token,
    opaque,
    opaque_window,
    packed,
    padded,
    plain,
    recurrent,
    repeated_rotary,
    rms_norm,
    self_attention,
    softcapped,
    state_space,
    taps,
    window,
)

BATCH = 4
Built = tuple[Callable[..., Any], tuple[Any, ...]]


# -- steps ------------------------------------------------------------------------------------------------------------


def filled(shapes: Any, seed: int = 0) -> Any:
    """Parameters of given shapes, none of them zero: matrices normal with variance one over fan-in, norms near one.

    Fan-in is as for JAX's initialisers: all dims but the last.
    """
    draw = np.random.default_rng(seed)

    def fill(path: Any, leaf: Any) -> jax.Array:
        numbers, name = draw.normal(size=leaf.shape), jax.tree_util.keystr(path[-1:])
        if leaf.ndim > 1:
            return jnp.asarray(numbers / math.sqrt(math.prod(leaf.shape[:-1])), leaf.dtype)
        return jnp.asarray(0.2 * numbers + ("bias" not in name and name != "['b']"), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def shapes_of(model: Model, batch: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters that a model asks for."""
    shapes: dict[str, jax.ShapeDtypeStruct] = {}

    def weights(name: str, *shape: int) -> jax.Array:
        shapes[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jnp.zeros(shape)

    jax.eval_shape(lambda batch, key: model(weights, batch, key), batch, jax.random.key(0))
    return shapes


def step(loss: Callable[..., jax.Array], params: Any, batch: Any, optimizer: str = "sgd") -> Built:
    """A step (state, batch, key) -> (state, {"loss", "grads"}) and its arguments.

    Args:
      loss: of (params, batch, key).
      optimizer: "sgd", or "adam" with an epsilon that keeps gradients which are rounding errors small.
    """
    tx = optax.sgd(0.1) if optimizer == "sgd" else optax.adam(1e-2, eps=1e-2)
    moments = tx.init(params)
    tree = jax.tree.structure(moments)

    def train(state: Any, batch: Any, key: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch, key)
        before = jax.tree.unflatten(tree, state["moments"])
        updates, after = tx.update(grads, before, state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "moments": jax.tree.leaves(after)}
        return new, {"loss": value, "grads": grads}

    return train, ({"params": params, "moments": jax.tree.leaves(moments)}, batch, jax.random.key(2))


def built(model: Model, batch: Any, optimizer: str = "sgd") -> Built:
    """The step of a model of this file."""

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return model(lambda name, *shape: params[name], batch, key)

    return step(loss, filled(shapes_of(model, batch)), batch, optimizer)


def text(tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    """A batch of tokens, none of them 0."""
    draw = np.random.default_rng(1)
    return {"tokens": jnp.asarray(draw.integers(1, VOCAB, (BATCH, tokens)), jnp.int32), **more}


# -- whole models -----------------------------------------------------------------------------------------------------


def llama(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
    """Root mean square norms, rotary positions, grouped queries, a gated MLP, a tied head."""
    tokens = batch["tokens"]
    x = embedded(w, tokens, places=False)
    for n in range(2):
        x = x + grouped_rotary(w, f"{n}.mix", rms_norm(w, f"{n}.a", x), batch, key)
        x = x + gated(w, f"{n}.mlp", rms_norm(w, f"{n}.b", x))
    logits = rms_norm(w, "last", x) @ w("embed", VOCAB, WIDE).T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def parallel(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
    """Attention and MLP beside each other, and tokens with one more than the model reads."""
    given, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    x = embedded(w, given)
    for n in range(2):
        y = layer_norm(w, f"{n}.a", x)
        x = x + self_attention(w, f"{n}.mix", y) + mlp(w, f"{n}.mlp", y)
    return optax.softmax_cross_entropy_with_integer_labels(dense(w, "head", x, VOCAB), labels).mean()


def masked_loss(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
    """The mean over tokens that are real, with the square of the log-normaliser and smooth labels."""
    tokens, real = batch["tokens"], batch["real"].astype(jnp.float32)
    x = embedded(w, tokens)
    for n in range(2):
        x = layer_norm(w, f"{n}.a", x + padded(w, f"{n}.mix", x, batch, key))
        x = layer_norm(w, f"{n}.b", x + mlp(w, f"{n}.mlp", x))
    logits = dense(w, "head", x, VOCAB)[:, :-1]
    labels = optax.smooth_labels(jax.nn.one_hot(tokens[:, 1:], VOCAB), 0.1)
    losses = optax.softmax_cross_entropy(logits, labels) + 1e-2 * jax.nn.logsumexp(logits, -1) ** 2
    return (losses * real[:, 1:]).sum() / real[:, 1:].sum()


def translator(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
    """A decoder that attends to an encoder of another length."""
    memory, tokens = w("source", VOCAB, WIDE)[batch["source"]], batch["tokens"]
    memory = memory + self_attention(w, "encoder", memory, True)
    memory = layer_norm(w, "memory", memory + mlp(w, "encoder.mlp", memory))
    x = embedded(w, tokens)
    for n in range(2):
        x = x + self_attention(w, f"{n}.mix", layer_norm(w, f"{n}.a", x))
        q = heads(w, f"{n}.cross.q", layer_norm(w, f"{n}.b", x))
        k, v = heads(w, f"{n}.cross.k", memory), heads(w, f"{n}.cross.v", memory)
        x = x + merged(w, f"{n}.cross.o", attend(q, k, v, (batch["source"] > 0)[:, None, None]))
        x = x + mlp(w, f"{n}.mlp", layer_norm(w, f"{n}.c", x))
    return next_token(w, x, tokens)


def experts(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
    """The two best of four experts for each token, and a loss that balances them."""
    tokens = batch["tokens"]
    x, balance = embedded(w, tokens), jnp.zeros(())
    for n in range(2):
        x = x + self_attention(w, f"{n}.mix", layer_norm(w, f"{n}.a", x))
        y = layer_norm(w, f"{n}.b", x)
        gates = jax.nn.softmax(dense(w, f"{n}.router", y, 4))
        best, which = jax.lax.top_k(gates, 2)
        share = (jax.nn.one_hot(which, 4) * best[..., None]).sum(2)
        inner = jax.nn.gelu(jnp.einsum("bld,edf->blef", y, w(f"{n}.up", 4, WIDE, WIDE)))
        x = x + jnp.einsum("blef,efd,ble->bld", inner, w(f"{n}.down", 4, WIDE, WIDE), share)
        balance += (gates**2).sum(-1).mean() + 1e-3 * (jax.nn.logsumexp(y, -1) ** 2).mean()
    return next_token(w, x, tokens) + 1e-2 * balance


def recomputed(policy: Any = None) -> Model:
    """Layers under `jax.checkpoint`."""

    def model(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
        x = embedded(w, batch["tokens"])
        for n in range(2):

            def layer(x: jax.Array, n: int = n) -> jax.Array:
                x = x + self_attention(w, f"{n}.mix", layer_norm(w, f"{n}.a", x))
                return x + mlp(w, f"{n}.mlp", layer_norm(w, f"{n}.b", x))

            x = jax.checkpoint(layer, policy=policy)(x)
        return next_token(w, x, batch["tokens"])

    return model


def stacked(*, recompute: bool) -> Model:
    """A scan over stacked layers."""

    def model(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
        shapes = {"qkv": (WIDE, 3 * WIDE), "out": (WIDE, WIDE), "up": (WIDE, 2 * WIDE), "down": (2 * WIDE, WIDE)}
        stack = {name: w(name, 4, *shape) for name, shape in shapes.items()}
        mask = causal(batch["tokens"].shape[1])

        def layer(x: jax.Array, own: Any) -> Any:
            parts = (jax.nn.standardize(x) @ own["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDE // HEADS)
            x = x + attend(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], mask).reshape(x.shape) @ own["out"]
            return x + jax.nn.gelu(jax.nn.standardize(x) @ own["up"]) @ own["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer) if recompute else layer, embedded(w, batch["tokens"]), stack)
        return next_token(w, x, batch["tokens"])

    return model


def _real() -> jax.Array:
    return jnp.arange(TOKENS) < jnp.array([[TOKENS], [9], [13], [5]])


def _packed() -> dict[str, Any]:
    starts = np.zeros((BATCH, TOKENS), int)
    for row, places in enumerate([(6,), (3, 9), (), (1, 2, 12)]):
        starts[row, list(places)] = 1
    part = starts.cumsum(1)
    place = np.stack([[t - max(s for s in range(t + 1) if s == 0 or row[s]) for t in range(TOKENS)] for row in starts])
    return text(part=jnp.asarray(part, jnp.int32), place=jnp.asarray(place, jnp.int32))


def _source() -> dict[str, Any]:
    return text(source=jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (BATCH, 10)), jnp.int32))


MODELS: dict[str, Callable[[], tuple[Model, Any]]] = {
    "einsum": lambda: (decoder(plain), text()),
    "jax-attention": lambda: (decoder(opaque), text()),
    "llama": lambda: (llama, text()),
    "rotary-repeated": lambda: (decoder(repeated_rotary, places=False), text()),
    "alibi": lambda: (decoder(alibi, places=False), text()),
    "learned-bias": lambda: (decoder(learned_bias, places=False), text()),
    "window": lambda: (decoder(window), text()),
    "jax-window": lambda: (decoder(opaque_window), text()),
    "padding": lambda: (decoder(padded), text(real=_real())),
    "segments": lambda: (decoder(packed, places=False), _packed()),
    "dropout": lambda: (decoder(dropped), text()),
    "softcap": lambda: (decoder(softcapped), text()),
    "encoder-decoder": lambda: (translator, _source()),
    "remat": lambda: (recomputed(), text()),
    "remat-policy": lambda: (recomputed(jax.checkpoint_policies.dots_with_no_batch_dims_saveable), text()),
    "scan": lambda: (stacked(recompute=False), text()),
    "scan-remat": lambda: (stacked(recompute=True), text()),
    "state-space": lambda: (decoder(state_space, places=False), text()),
    "recurrent": lambda: (decoder(recurrent, places=False), text()),
    "linear-attention": lambda: (decoder(linear_attention), text()),
    "convolution": lambda: (decoder(convolution, places=False), text()),
    "next-token-convolution": lambda: (decoder(centred), text()),
    "taps": lambda: (decoder(taps, places=False), text()),
    "experts": lambda: (experts, text()),
    "parallel": lambda: (parallel, text(TOKENS + 1)),
    "masked-loss": lambda: (masked_loss, text(real=_real())),
}
"""By name, what makes the model and its batch."""


# -- what is not causal -----------------------------------------------------------------------------------------------


def both_ways(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """Attention without a mask."""
    return self_attention(w, name, x, True)


def prefixed(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """The first six tokens see each other."""
    first = jnp.arange(x.shape[1]) < 6
    return self_attention(w, name, x, causal(x.shape[1]) | first)


def from_the_end(w: Weights, name: str, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    """A linear recurrence that begins with the last token."""
    decay = jax.nn.sigmoid(dense(w, f"{name}.decay", x, WIDE))
    return dense(w, f"{name}.out", jax.lax.associative_scan(joined, (decay, x), reverse=True, axis=1)[1], WIDE)


ENCODERS: dict[str, Callable[[], tuple[Model, Any]]] = {
    "no-mask": lambda: (decoder(both_ways), text()),
    "prefix": lambda: (decoder(prefixed), text()),
    "reverse-recurrence": lambda: (decoder(from_the_end), text()),
}
"""Models with tokens that depend on later ones."""
