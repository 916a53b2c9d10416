"""Small language models for `token_correctness`: every form of attention, position, recurrence and loss by itself.

A model is a function (weights, batch, key) -> loss. Most are `Decoder`s, named ones and those that a seed draws. `step`
differentiates a model and updates by gradient descent or by Adam. Models of other libraries are in
`libraries.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gallery.registry import Built, Case, parse_tags
from gallery.tokens import parts
from gallery.tokens.parts import TOKENS, VOCAB, WIDE, Attention, Weights, dense, embedded, layer_norm, mlp

BATCH = 4
Model = Callable[[Weights, Any, jax.Array], jax.Array]


# -- steps ------------------------------------------------------------------------------------------------------------


def random_arrays(shapes: Any, seed: int = 0) -> Any:
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


def step(loss: Callable[..., jax.Array], params: Any, batch: Any, optimizer: str = "sgd") -> Built:
    """A step (state, batch, key) -> (state, {"loss", "grads"}) and its arguments.

    Args:
      loss: of (params, batch, key).
      optimizer: "sgd", or "adam" with an epsilon that keeps gradients which are rounding errors small.
    """
    batch = jax.tree.map(jnp.asarray, batch)
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
    shapes: dict[str, jax.ShapeDtypeStruct] = {}

    def weights(name: str, *shape: int) -> jax.Array:
        shapes[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jnp.zeros(shape)

    jax.eval_shape(lambda batch, key: model(Weights(weights), batch, key), batch, jax.random.key(0))

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return model(Weights(lambda name, *shape: params[name]), batch, key)

    return step(loss, random_arrays(shapes), batch, optimizer)


def text(tokens: int = TOKENS, /, **more: Any) -> dict[str, Any]:
    """A batch of tokens, none of them 0, in arrays of NumPy: modules make some before JAX may be used."""
    draw = np.random.default_rng(1)
    return {"tokens": draw.integers(1, VOCAB, (BATCH, tokens)).astype(np.int32), **more}


# -- decoders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer of a decoder.

    Attributes:
      mixer, norm: names in `parts`. mlp: that of a function there, or "none".
      residual: whether norms stand before their parts or after the sums, or attention and MLP beside each other.
      recompute: whether the layer is under `jax.checkpoint`, with a policy by its name or without.
    """

    mixer: str = "plain"
    norm: str = "layer_norm"
    mlp: str = "mlp"
    residual: str = "before"
    recompute: bool | str = False

    def __call__(self, w: Weights, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
        """[batch, tokens, width] to the same."""
        norm, inner = parts.NORMS[self.norm], getattr(parts, self.mlp, None)
        mixed = lambda y: parts.MIXERS[self.mixer](w / "mix", y, batch, key)  # noqa: E731
        if self.residual == "beside":
            y = norm(w / "a", x)
            x = x + mixed(y)
            return x + inner(w / "mlp", y) if inner else x
        if self.residual == "before":
            x = x + mixed(norm(w / "a", x))
            return x + inner(w / "mlp", norm(w / "b", x)) if inner else x
        x = norm(w / "a", x + mixed(x))
        return norm(w / "b", x + inner(w / "mlp", x)) if inner else x


@dataclass(frozen=True)
class Decoder:
    """A decoder.

    Attributes:
      layers: in order. places: whether positions are learned.
      last: the norm before the head, or "none". tied: whether the head is the embedding.
      loss: "shifted" against the next tokens; "longer", of one token more than the model reads; "masked" and "smooth",
        of real tokens alone, the latter with smooth labels and the square of the log-normaliser, as "normaliser" has.
      aside: whether the layers have losses of their own.
    """

    layers: tuple[Layer, ...]
    places: bool = True
    last: str = "layer_norm"
    tied: bool = False
    loss: str = "shifted"
    aside: bool = False

    def __call__(self, w: Weights, batch: Any, key: jax.Array) -> jax.Array:
        """The loss of a batch."""
        tokens, aside = batch["tokens"], []
        x = embedded(w, tokens[:, :-1] if self.loss == "longer" else tokens, places=self.places)
        for n, (layer, own) in enumerate(zip(self.layers, jax.random.split(key, len(self.layers)), strict=True)):

            def run(x: jax.Array, own: jax.Array, n: int = n, layer: Layer = layer) -> jax.Array:
                return layer(w / n, x, batch, own)

            if layer.recompute:
                policy = None if layer.recompute is True else getattr(jax.checkpoint_policies, layer.recompute)
                run = jax.checkpoint(run, policy=policy)
            x = run(x, own)
            aside += [1e-2 * (jax.nn.logsumexp(x, -1) ** 2).mean()] * self.aside
        x = x if self.last == "none" else parts.NORMS[self.last](w / "last", x)
        logits = x @ w("embed", VOCAB, WIDE).T if self.tied else dense(w, "head", x, VOCAB)
        return sum(aside, self.loss_of(logits, tokens, batch.get("real")))

    def loss_of(self, logits: jax.Array, tokens: jax.Array, real: jax.Array | None) -> jax.Array:
        """The mean loss of logits."""
        cut, labels = logits if self.loss == "longer" else logits[:, :-1], tokens[:, 1:]
        if self.loss == "smooth":
            smooth = optax.smooth_labels(jax.nn.one_hot(labels, VOCAB), 0.1)
            losses = optax.softmax_cross_entropy(cut, smooth) + 1e-2 * jax.nn.logsumexp(cut, -1) ** 2
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(cut, labels)
        if self.loss in ("masked", "smooth"):
            assert real is not None
            weights = real[:, 1:].astype(jnp.float32)
            return (losses * weights).sum() / weights.sum()
        if self.loss == "normaliser":
            return losses.mean() + 1e-3 * (jax.nn.logsumexp(logits, -1) ** 2).mean()
        return losses.mean()


def decoder(mixer: str = "plain", places: bool = True, layer: Any = (), **more: Any) -> Decoder:
    """Two layers of one kind."""
    return Decoder((Layer(mixer, **dict(layer)),) * 2, places, **more)


def drawn(draw: random.Random) -> tuple[Decoder, Any]:
    """A random decoder and its batch; all are causal."""
    layers = [
        Layer(
            draw.choice(list(parts.CAUSAL)), draw.choice(("layer_norm", "rms_norm")),
            draw.choice(("mlp", "gated", "none")), draw.choice(("before", "after", "beside")), draw.random() < 0.25,
        )
        for _ in range(draw.randint(1, 3))
    ]  # fmt: skip
    loss, tied = draw.choice(("shifted", "longer", "masked", "normaliser")), draw.random() < 0.4
    places, aside = draw.random() < 0.6, draw.random() < 0.3
    numbers = np.random.default_rng(1)
    starts = numbers.random((BATCH, TOKENS)) < 0.2
    real = np.arange(TOKENS) < numbers.integers(4, TOKENS + 1, (BATCH, 1))
    batch = text(TOKENS + (loss == "longer"), real=real, **segments(starts))
    return Decoder(tuple(layers), places, tied=tied, loss=loss, aside=aside), batch


def segments(starts: np.ndarray) -> dict[str, Any]:
    """Of each token the number of its text and its place in it, given where texts start."""
    first = np.maximum.accumulate(np.where(starts, np.arange(TOKENS), 0), 1)
    numbers = {"part": starts.cumsum(1), "place": np.arange(TOKENS) - first}
    return {name: value.astype(np.int32) for name, value in numbers.items()}


# -- other models -----------------------------------------------------------------------------------------------------


def next_token(w: Weights, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of `x[:, :-1]` against `tokens[:, 1:]`."""
    return Decoder(()).loss_of(dense(w, "head", layer_norm(w / "last", x), VOCAB), tokens, None)


def translator(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
    """A decoder that attends to an encoder of another length."""
    memory, tokens = w("source", VOCAB, WIDE)[batch["source"]], batch["tokens"]
    memory = memory + parts.MIXERS["both_ways"](w / "encoder", memory, batch, key)
    memory = layer_norm(w / "memory", memory + mlp(w / "encoder" / "mlp", memory))
    x = embedded(w, tokens)
    for n in range(2):
        x = x + Attention()(w / n / "mix", layer_norm(w / n / "a", x))
        cross = w / n / "cross"
        q = parts.heads(cross, "q", layer_norm(w / n / "b", x))
        k, v = parts.heads(cross, "k", memory), parts.heads(cross, "v", memory)
        x = x + parts.merge_heads(cross, parts.attend(q, k, v, (batch["source"] > 0)[:, None, None]))
        x = x + mlp(w / n / "mlp", layer_norm(w / n / "c", x))
    return next_token(w, x, tokens)


def experts(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
    """The two best of four experts for each token, and a loss that balances them."""
    tokens = batch["tokens"]
    x, balance = embedded(w, tokens), jnp.zeros(())
    for n in range(2):
        own = w / n
        x = x + Attention()(own / "mix", layer_norm(own / "a", x))
        y = layer_norm(own / "b", x)
        gates = jax.nn.softmax(dense(own, "router", y, 4))
        best, which = jax.lax.top_k(gates, 2)
        share = (jax.nn.one_hot(which, 4) * best[..., None]).sum(2)
        inner = jax.nn.gelu(jnp.einsum("bld,edf->blef", y, own("up", 4, WIDE, WIDE)))
        x = x + jnp.einsum("blef,efd,ble->bld", inner, own("down", 4, WIDE, WIDE), share)
        balance += (gates**2).sum(-1).mean() + 1e-3 * (jax.nn.logsumexp(y, -1) ** 2).mean()
    return next_token(w, x, tokens) + 1e-2 * balance


def stacked_decoder(*, recompute: bool) -> Model:
    """A scan over stacked layers."""

    def model(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
        shapes = {"qkv": (WIDE, 3 * WIDE), "out": (WIDE, WIDE), "up": (WIDE, 2 * WIDE), "down": (2 * WIDE, WIDE)}
        stack = {name: w(name, 4, *shape) for name, shape in shapes.items()}
        mask, shape = parts.causal(batch["tokens"].shape[1]), (3, parts.HEADS, WIDE // parts.HEADS)

        def layer(x: jax.Array, own: Any) -> Any:
            qkv = (jax.nn.standardize(x) @ own["qkv"]).reshape(*x.shape[:2], *shape)
            seen = parts.attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], mask)
            x = x + seen.reshape(x.shape) @ own["out"]
            return x + jax.nn.gelu(jax.nn.standardize(x) @ own["up"]) @ own["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer) if recompute else layer, embedded(w, batch["tokens"]), stack)
        return next_token(w, x, batch["tokens"])

    return model


REAL = {"real": np.arange(TOKENS) < np.array([[TOKENS], [9], [13], [5]])}
STARTS = np.array([[place in row for place in range(TOKENS)] for row in ((6,), (3, 9), (), (1, 2, 12))])
SOURCE = {"source": np.random.default_rng(3).integers(0, VOCAB, (BATCH, 10)).astype(np.int32)}
_LLAMA: dict[str, Any] = {"norm": "rms_norm", "mlp": "gated"}
_SAVED = "dots_with_no_batch_dims_saveable"
MODELS: dict[str, tuple[Model, Any]] = {
    "einsum": (decoder(), text()),
    "jax-attention": (decoder("opaque"), text()),
    "llama": (decoder("grouped_rotary", False, _LLAMA, last="rms_norm", tied=True), text()),
    "rotary-repeated": (decoder("repeated_rotary", False), text()),
    "alibi": (decoder("alibi", False), text()),
    "learned-bias": (decoder("learned_bias", False), text()),
    "window": (decoder("window"), text()),
    "jax-window": (decoder("opaque_window"), text()),
    "padding": (decoder("padded"), text(**REAL)),
    "segments": (decoder("packed", False), text(**segments(STARTS))),
    "dropout": (decoder("dropped"), text()),
    "softcap": (decoder("softcapped"), text()),
    "encoder-decoder": (translator, text(**SOURCE)),
    "remat": (decoder(layer={"recompute": True}), text()),
    "remat-policy": (decoder(layer={"recompute": _SAVED}), text()),
    "scan": (stacked_decoder(recompute=False), text()),
    "scan-remat": (stacked_decoder(recompute=True), text()),
    "state-space": (decoder("state_space", False), text()),
    "recurrent": (decoder("recurrent", False), text()),
    "linear-attention": (decoder("linear_attention"), text()),
    "convolution": (decoder("convolution", False), text()),
    "next-token-convolution": (decoder("centred"), text()),
    "taps": (decoder("taps", False), text()),
    "experts": (experts, text()),
    "parallel": (decoder(layer={"residual": "beside"}, last="none", loss="longer"), text(TOKENS + 1)),
    "masked-loss": (decoder("padded", layer={"residual": "after"}, last="none", loss="smooth"), text(**REAL)),
    # with tokens that depend on later ones
    "no-mask": (decoder("both_ways"), text()),
    "prefix": (decoder("prefixed"), text()),
    "reverse-recurrence": (decoder("from_the_end"), text()),
}
"""Models and their batches by name."""
_TAGS = {
    "dropout": "attention, random", "remat": "attention, rematerialisation",
    "remat-policy": "attention, rematerialisation", "scan": "attention, scan",
    "scan-remat": "attention, scan, rematerialisation", "state-space": "recurrent", "recurrent": "recurrent, scan",
    "convolution": "convolution", "next-token-convolution": "convolution", "taps": "convolution",
    "experts": "attention, mixture of experts", "reverse-recurrence": "recurrent",
}  # fmt: skip
_BOTH_WAYS = ("no-mask", "prefix", "reverse-recurrence")
CASES = [
    Case(
        name, partial(built, *model),
        tags=parse_tags(f"plain, {'both ways' if name in _BOTH_WAYS else 'causal'}, {_TAGS.get(name, 'attention')}"),
    )
    for name, model in MODELS.items()
]  # fmt: skip
