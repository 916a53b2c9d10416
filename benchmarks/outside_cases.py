"""Train steps of models that nobody here wrote, by shapes alone: what `planning.py` plans.

A case is a function that returns a step and the shapes of its arguments, with the cluster and the method. Models of
Hugging Face are those of `transformers` in Flax, at published sizes, without their weights; their steps differentiate
a loss and apply Adam, as their users write it. Models in plain linen are written as tutorials write them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

Built = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A step to be planned.

    Attributes:
      build: makes the step and the shapes of its arguments.
      cluster, nodes: a preset.
      options: of `make_plan`, the method aside.
      method: the name of a method, and its arguments.
      target: planning seconds on a quiet machine of two cores; None without one.
      of: "issue" for the cases that were reported, "published" for models at published sizes, "unusual" for steps that
        are not one loss and one optimizer, "toy" for small ones.
    """

    build: Callable[[], Built]
    cluster: str
    nodes: int = 1
    method: tuple[str, tuple[Any, ...]] = ("Auto", ())
    options: Mapping[str, Any] = field(default_factory=dict)
    target: float | None = 30
    of: str = "published"


# --- steps ----------------------------------------------------------------------------------------------------------


def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """The shape of an argument."""
    return jax.ShapeDtypeStruct(dims, dtype)


def random_key() -> Any:
    """The shape of a key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def initial(model: Any, *given: Any) -> Any:
    """The shapes of a model's variables."""
    return jax.eval_shape(model.init, jax.random.key(0), *given)


def token_loss(logits: Any, labels: Any) -> Any:
    """Mean cross entropy of tokens, in float32."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.mean()


def adam_step(loss: Callable[..., Any], params: Any, *batch: Any, rng: bool = False) -> Built:
    """A step of Adam in a `TrainState`: `loss(params, *batch)`, with a key as the last argument if `rng`."""

    def step(state: Any, *given: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, *given)
        return state.apply_gradients(grads=grads), value

    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=loss, params=p, tx=optax.adamw(1e-4)), params)
    keys = (random_key(),) if rng else ()
    return step, (state, *batch, *keys)


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def hugging_face(kind: str, config: str, **sizes: Any) -> tuple[Any, Any]:
    """A model of `transformers` in Flax, without weights, and the shapes of its parameters."""
    transformers = importlib.import_module("transformers")
    dtype = sizes.pop("dtype", jnp.bfloat16)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes), dtype=dtype, _do_init=False)
    return model, model.params_shape_tree


def causal(kind: str, config: str, batch: int, length: int, dropout: bool = False, **sizes: Any) -> Built:
    """Next-token prediction."""
    model, params = hugging_face(kind, config, **sizes)

    def loss(params: Any, ids: Any, key: Any = None) -> Any:
        logits = model(ids, params=params, dropout_rng=key, **mode(model, key is not None)).logits
        return token_loss(logits[:, :-1], ids[:, 1:])

    return adam_step(loss, params, shape(batch, length), rng=dropout)


def mode(model: Any, train: bool) -> dict[str, bool]:
    """What tells a model that it trains: some take `train`, others `deterministic`."""
    return {"train": train} if "train" in inspect.signature(model.__call__).parameters else {"deterministic": not train}


def masked(kind: str, config: str, batch: int, length: int, **sizes: Any) -> Built:
    """Prediction of masked tokens, with an attention mask and dropout."""
    model, params = hugging_face(kind, config, **sizes)

    def loss(params: Any, ids: Any, mask: Any, labels: Any, key: Any) -> Any:
        logits = model(ids, attention_mask=mask, params=params, dropout_rng=key, train=True).logits
        return token_loss(logits, labels)

    tokens = shape(batch, length)
    return adam_step(loss, params, tokens, tokens, tokens, rng=True)


def translation(kind: str, config: str, batch: int, source: int, target: int, **sizes: Any) -> Built:
    """A sequence to a sequence."""
    model, params = hugging_face(kind, config, **sizes)

    def loss(params: Any, ids: Any, out: Any, key: Any) -> Any:
        logits = model(ids, decoder_input_ids=out, params=params, dropout_rng=key, train=True).logits
        return token_loss(logits[:, :-1], out[:, 1:])

    return adam_step(loss, params, shape(batch, source), shape(batch, target), rng=True)


def speech(batch: int, frames: int, target: int, **sizes: Any) -> Built:
    """Whisper: spectrograms to text."""
    model, params = hugging_face("FlaxWhisperForConditionalGeneration", "WhisperConfig", **sizes)
    mels = sizes.get("num_mel_bins", 80)

    def loss(params: Any, sound: Any, out: Any) -> Any:
        logits = model(sound, decoder_input_ids=out, params=params, train=False).logits
        return token_loss(logits[:, :-1], out[:, 1:])

    return adam_step(loss, params, shape(batch, mels, frames, dtype=jnp.float32), shape(batch, target))


def pictures(kind: str, config: str, batch: int, size: int, classes: int = 1000, **sizes: Any) -> Built:
    """Classification of pictures by a transformer."""
    model, params = hugging_face(kind, config, image_size=size, num_labels=classes, **sizes)

    def loss(params: Any, pixels: Any, labels: Any, key: Any) -> Any:
        logits = model(pixels, params=params, dropout_rng=key, train=True).logits
        return token_loss(logits, labels)

    return adam_step(loss, params, shape(batch, 3, size, size, dtype=jnp.float32), shape(batch), rng=True)


def convolutions(kind: str, config: str, batch: int, size: int = 224, **sizes: Any) -> Built:
    """Classification of pictures by a convolutional net with batch statistics."""
    model, variables = hugging_face(kind, config, num_labels=1000, **sizes)
    params, statistics = variables["params"], variables["batch_stats"]
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, statistics: Any, momentum: Any, pixels: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            inputs = jnp.transpose(pixels, (0, 2, 3, 1))
            out, updated = model.module.apply(
                {"params": params, "batch_stats": statistics}, inputs, deterministic=False, mutable=["batch_stats"]
            )
            return token_loss(out.logits, labels), updated["batch_stats"]

        (value, statistics_after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, after = optimizer.update(grads, momentum, params)
        return optax.apply_updates(params, updates), statistics_after, after, value

    momentum = jax.eval_shape(optimizer.init, params)
    return step, (params, statistics, momentum, shape(batch, 3, size, size, dtype=jnp.float32), shape(batch))


def contrastive(batch: int, **sizes: Any) -> Built:
    """CLIP: pictures and texts of a batch against each other."""
    transformers = importlib.import_module("transformers")
    text, vision = sizes["text"], sizes["vision"]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=sizes["projection"])
    model = transformers.FlaxCLIPModel(config, dtype=jnp.bfloat16, _do_init=False)
    size, length = vision["image_size"], text.get("max_position_embeddings", 77)

    def loss(params: Any, ids: Any, pixels: Any, key: Any) -> Any:
        out = model(ids, pixels, params=params, dropout_rng=key, train=True)
        own = jnp.arange(batch)
        return token_loss(out.logits_per_image, own) + token_loss(out.logits_per_text, own)

    picture = shape(batch, 3, size, size, dtype=jnp.float32)
    return adam_step(loss, model.params_shape_tree, shape(batch, length), picture, rng=True)


# --- plain linen ----------------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    """A block of a GPT as tutorials write it."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        """[batch, length, hidden] to the same."""
        hidden = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, y, mask=mask)
        y = nn.Dense(4 * hidden, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(hidden, dtype=self.dtype)(nn.gelu(y))


class GPT(nn.Module):
    """A GPT with a tied embedding and one causal mask for all blocks."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    causal: bool
    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        """[batch, length] tokens to [batch, length, vocabulary] logits."""
        embed = nn.Embed(self.vocabulary, self.hidden, dtype=self.dtype)
        places = self.param("places", nn.initializers.normal(0.02), (self.length, self.hidden))
        x = embed(ids) + places.astype(self.dtype)
        mask = nn.make_causal_mask(ids) if self.causal else None
        for _ in range(self.layers):
            x = GPTBlock(self.heads, self.dtype)(x, mask)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def linen_gpt(
    batch: int, length: int, layers: int, hidden: int, heads: int, vocabulary: int = 51200, causal: bool = True,
    dtype: Any = jnp.float16,
) -> Built:  # fmt: skip
    """Next-token prediction with the GPT above."""
    model = GPT(layers, hidden, heads, vocabulary, length, causal, dtype)
    ids = shape(batch, length)
    params = initial(model, shape(1, length))

    def loss(params: Any, ids: Any) -> Any:
        logits: Any = model.apply(params, ids)
        return token_loss(logits[:, :-1], ids[:, 1:])

    return adam_step(loss, params, ids)


def rotate(x: Any) -> Any:
    """Rotary places of [batch, length, heads, size]."""
    length, size = x.shape[1], x.shape[-1]
    angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)[None]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class LlamaBlock(nn.Module):
    """A block of a Llama."""

    heads: int
    wide: int

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        """[batch, length, hidden] to the same, as a scan wants it."""
        hidden, size = x.shape[-1], x.shape[-1] // self.heads
        dense = lambda n, name: nn.Dense(n, use_bias=False, dtype=jnp.bfloat16, name=name)  # noqa: E731
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        q, k, v = (dense(hidden, n)(y).reshape(*y.shape[:2], self.heads, size) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)).astype(jnp.float32) / size**0.5
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(jnp.bfloat16)
        x = x + dense(hidden, "o")(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return x + dense(hidden, "down")(nn.silu(dense(self.wide, "gate")(y)) * dense(self.wide, "up")(y)), None


class Llama(nn.Module):
    """A Llama, scanned over its layers or not, each computed again in the backward pass."""

    layers: int
    hidden: int
    heads: int
    wide: int
    vocabulary: int
    scan: bool

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        """[batch, length] tokens to logits."""
        x = nn.Embed(self.vocabulary, self.hidden, dtype=jnp.bfloat16)(ids)
        block = nn.remat(LlamaBlock, prevent_cse=not self.scan)
        if self.scan:
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = stack(self.heads, self.wide)(x, None)
        else:
            for _ in range(self.layers):
                x, _ = block(self.heads, self.wide)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=jnp.bfloat16)(nn.RMSNorm(dtype=jnp.bfloat16)(x))


def linen_llama(batch: int, length: int, scan: bool, layers: int = 32) -> Built:
    """A Llama of 7 B parameters."""
    model = Llama(layers, 4096, 32, 11008, 32000, scan)
    params = initial(model, shape(1, length))

    def loss(params: Any, ids: Any) -> Any:
        logits: Any = model.apply(params, ids)
        return token_loss(logits[:, :-1], ids[:, 1:])

    return adam_step(loss, params, shape(batch, length))


class MLP(nn.Module):
    """Dense layers."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, features] to logits."""
        for width in self.widths[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def linen_mlp(batch: int, features: int, *widths: int) -> Built:
    """Classification by dense layers."""
    model = MLP(widths)
    params = initial(model, shape(1, features, dtype=jnp.float32))

    def loss(params: Any, x: Any, labels: Any) -> Any:
        return token_loss(model.apply(params, x), labels)

    return adam_step(loss, params, shape(batch, features, dtype=jnp.float32), shape(batch))


def accumulating(batch: int, parts: int, features: int, *widths: int) -> Built:
    """A step that accumulates gradients over parts of its batch in a scan of its own."""
    model = MLP(widths)
    params = initial(model, shape(1, features, dtype=jnp.float32))
    optimizer = optax.adam(1e-3)

    def step(params: Any, memory: Any, x: Any, labels: Any) -> Any:
        def loss(params: Any, x: Any, labels: Any) -> Any:
            return token_loss(model.apply(params, x), labels)

        def one(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, total, grads), value

        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, labels))
        grads, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), cut)
        updates, after = optimizer.update(jax.tree.map(lambda g: g / parts, grads), memory, params)
        return optax.apply_updates(params, updates), after, losses.mean()

    memory = jax.eval_shape(optimizer.init, params)
    return step, (params, memory, shape(batch, features, dtype=jnp.float32), shape(batch))


class UNet(nn.Module):
    """A U-Net with group norms, of widths that double."""

    width: int
    depth: int
    convolutions: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, height, width, channels] to the same."""
        channels, kept = x.shape[-1], []
        for level in range(self.depth):
            x = self.stack(x, self.width * 2**level)
            kept.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = self.stack(x, self.width * 2**self.depth)
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = self.stack(jnp.concatenate([x, kept[level]], -1), self.width * 2**level)
        return nn.Conv(channels, (1, 1))(x)

    def stack(self, x: Any, width: int) -> Any:
        """Convolutions of one level."""
        for _ in range(self.convolutions):
            x = nn.silu(nn.GroupNorm(min(8, width))(nn.Conv(width, (3, 3))(x)))
        return x


def linen_unet(batch: int, size: int, width: int, depth: int) -> Built:
    """Denoising."""
    model = UNet(width, depth)
    picture = shape(batch, size, size, 3, dtype=jnp.float32)
    params = initial(model, shape(1, size, size, 3, dtype=jnp.float32))

    def loss(params: Any, noisy: Any, clean: Any) -> Any:
        return jnp.mean((model.apply(params, noisy) - clean) ** 2)

    return adam_step(loss, params, picture, picture)


class Autoencoder(nn.Module):
    """Convolutions to a code, and transposed ones from it."""

    widths: tuple[int, ...]
    code: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, height, width, channels] to the same."""
        start = x.shape
        for width in self.widths:
            x = nn.relu(nn.Conv(width, (3, 3), (2, 2))(x))
        inner = x.shape
        x = nn.Dense(self.code)(x.reshape(x.shape[0], -1))
        x = nn.relu(nn.Dense(inner[1] * inner[2] * inner[3])(x)).reshape(inner)
        for width in self.widths[::-1]:
            x = nn.relu(nn.ConvTranspose(width, (3, 3), (2, 2))(x))
        return nn.Conv(start[-1], (3, 3))(x)


def linen_autoencoder(batch: int, size: int, *widths: int) -> Built:
    """Reconstruction."""
    model = Autoencoder(widths, 64)
    picture = shape(batch, size, size, 3, dtype=jnp.float32)
    params = initial(model, shape(1, size, size, 3, dtype=jnp.float32))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((model.apply(params, x) - x) ** 2)

    return adam_step(loss, params, picture)


def own(name: str, size: str, batch: int, **overrides: Any) -> Built:
    """A model of this project, for the cases that were reported with it."""
    from alpa_lite import models

    return models.get(name).abstract(size, batch, **overrides)


# --- the cases ------------------------------------------------------------------------------------------------------

_LLAMA: dict[str, Any] = {
    "kind": "FlaxLlamaForCausalLM", "config": "LlamaConfig", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rope_theta": 5e5,
}  # fmt: skip
_LLAMA_70B: dict[str, Any] = _LLAMA | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "kind": "FlaxMistralForCausalLM", "config": "MistralConfig", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip
_GPT2_XL: dict[str, Any] = {
    "kind": "FlaxGPT2LMHeadModel", "config": "GPT2Config", "n_embd": 1600, "n_layer": 48, "n_head": 25,
    "batch": 128, "length": 1024, "dropout": True,
}  # fmt: skip
_BERT: dict[str, Any] = {
    "kind": "FlaxBertForMaskedLM", "config": "BertConfig", "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip
_GPTJ: dict[str, Any] = {"kind": "FlaxGPTJForCausalLM", "config": "GPTJConfig", "n_positions": 2048}
_OPT: dict[str, Any] = {
    "kind": "FlaxOPTForCausalLM", "config": "OPTConfig", "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "word_embed_proj_dim": 4096,
}  # fmt: skip
_BLOOM: dict[str, Any] = {
    "kind": "FlaxBloomForCausalLM", "config": "BloomConfig", "hidden_size": 4096, "n_layer": 30, "n_head": 32,
    "vocab_size": 250880,
}  # fmt: skip
_GEMMA: dict[str, Any] = {"kind": "FlaxGemmaForCausalLM", "config": "GemmaConfig"}
_NEO: dict[str, Any] = {
    "kind": "FlaxGPTNeoForCausalLM", "config": "GPTNeoConfig", "hidden_size": 2560, "num_layers": 32, "num_heads": 20,
    "attention_types": [[["global", "local"], 16]],
}  # fmt: skip
_PEGASUS: dict[str, Any] = {"kind": "FlaxPegasusForConditionalGeneration", "config": "PegasusConfig"} | {
    "d_model": 1024, "encoder_layers": 16, "decoder_layers": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16, "decoder_attention_heads": 16, "vocab_size": 96103,
}  # fmt: skip
_BART: dict[str, Any] = {"kind": "FlaxBartForConditionalGeneration", "config": "BartConfig"}
_VIT: dict[str, Any] = {
    "kind": "FlaxViTForImageClassification", "config": "ViTConfig", "hidden_size": 1280, "num_hidden_layers": 32,
    "num_attention_heads": 16, "intermediate_size": 5120, "patch_size": 14,
}  # fmt: skip
_WHISPER: dict[str, Any] = {
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
}  # fmt: skip
_CLIP: dict[str, Any] = {
    "text": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
               "image_size": 224, "patch_size": 14},
    "projection": 768,
}  # fmt: skip
_TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
_LOCAL: dict[str, Any] = {"cluster": "cpu", "target": 8, "of": "toy"}


def _issue(target: float, build: Callable[[], Built], cluster: str, nodes: int = 1, **more: Any) -> Case:
    return Case(build, cluster, nodes, target=target, of="issue", **more)


CASES: dict[str, Case] = {
    # as reported
    "gpt-39b-mask": _issue(30, lambda: linen_gpt(1024, 1024, 48, 8192, 64), "p3.16xlarge", 8),
    "gpt-39b-no-mask": _issue(30, lambda: linen_gpt(1024, 1024, 48, 8192, 64, causal=False), "p3.16xlarge", 8),
    "llama-8b-8x8": _issue(
        15, lambda: causal(**_LLAMA, batch=64, length=8192, max_position_embeddings=8192), "h100", 8,
        method=("Sharded", ((8, 8),)),
    ),
    "mistral-7b": _issue(
        30, lambda: causal(**MISTRAL, batch=64, length=4096, max_position_embeddings=4096), "h100", 4
    ),
    "llama-8b": _issue(30, lambda: causal(**_LLAMA, batch=64, length=8192, max_position_embeddings=8192), "h100", 8),
    "llama-8b-v5p": _issue(
        20, lambda: causal(**_LLAMA, batch=256, length=8192, max_position_embeddings=8192), "v5p:4x4x4"
    ),
    "llama-70b-v5p": _issue(
        45, lambda: causal(**_LLAMA_70B, batch=512, length=4096, max_position_embeddings=4096), "v5p:8x8x8"
    ),
    "gpt2-xl": _issue(15, lambda: causal(**_GPT2_XL), "a100", 2),
    "llama-7b-scan": _issue(15, lambda: linen_llama(128, 2048, True), "h100", 4),
    "llama-7b-unrolled": _issue(30, lambda: linen_llama(128, 2048, False), "h100", 4),
    "mlp-toy": _issue(1, lambda: linen_mlp(256, 128, 256, 256, 128, 10), "cpu"),
    "own-accumulation": _issue(8, lambda: accumulating(512, 4, 512, 2048, 2048, 16), "cpu"),
    "frontier-1t": _issue(
        60, lambda: own("gpt", "175B", 1600, layers=128, hidden=25600, heads=160, seq=2048), "frontier", 384,
        method=("Pipeline", ()),
    ),
    "bert-large": _issue(30, lambda: masked(**_BERT, batch=256, length=512), "a100"),
    # at published sizes
    "roberta-large": Case(
        lambda: masked(**_BERT | {"kind": "FlaxRobertaForMaskedLM", "config": "RobertaConfig"}, batch=512, length=512,
                       max_position_embeddings=514),
        "h100", 2,
    ),
    "gpt-j-6b": Case(lambda: causal(**_GPTJ, batch=256, length=2048), "v5p:4x4x4"),
    "opt-6.7b": Case(lambda: causal(**_OPT, batch=128, length=2048), "a100", 4),
    "bloom-7b": Case(lambda: causal(**_BLOOM, batch=128, length=2048), "a100", 8),
    "gemma-7b": Case(lambda: causal(**_GEMMA, batch=64, length=4096, max_position_embeddings=4096), "h100", 4),
    "gpt-neo-2.7b": Case(lambda: causal(**_NEO, batch=128, length=2048), "p3dn", 4),
    "pegasus-large": Case(lambda: translation(**_PEGASUS, batch=256, source=512, target=128), "a100", 2),
    "bart-large": Case(lambda: translation(**_BART, batch=256, source=512, target=128), "p3dn"),
    "vit-huge": Case(lambda: pictures(**_VIT, batch=1024, size=224), "h100"),
    "whisper-large": Case(lambda: speech(256, 3000, 448, **_WHISPER), "v5p:2x2x2"),
    "clip-large": Case(lambda: contrastive(4096, **_CLIP), "a100", 2),
    "resnet-152": Case(
        lambda: convolutions("FlaxResNetForImageClassification", "ResNetConfig", 1024, depths=[3, 8, 36, 3],
                             dtype=jnp.float32),
        "p3.16xlarge", 1,
    ),
    "regnet": Case(
        lambda: convolutions("FlaxRegNetForImageClassification", "RegNetConfig", 1024, dtype=jnp.float32), "a100"
    ),
    "unet": Case(lambda: linen_unet(64, 128, 128, 4), "a100"),
    # toys on virtual devices
    "toy-gpt2": Case(
        lambda: causal("FlaxGPT2LMHeadModel", "GPT2Config", 16, 64, n_embd=64, n_layer=4, n_head=4, vocab_size=512,
                       dropout=True, dtype=jnp.float32), **_LOCAL,
    ),
    "toy-bert": Case(
        lambda: masked("FlaxBertForMaskedLM", "BertConfig", 16, 64, vocab_size=512, dtype=jnp.float32, **_TINY),
        **_LOCAL,
    ),
    "toy-llama": Case(
        lambda: causal("FlaxLlamaForCausalLM", "LlamaConfig", 16, 64, vocab_size=512, num_key_value_heads=2,
                       dtype=jnp.float32, **_TINY), **_LOCAL,
    ),
    "toy-bart": Case(
        lambda: translation("FlaxBartForConditionalGeneration", "BartConfig", 16, 64, 32, d_model=64, encoder_layers=3,
                            decoder_layers=3, encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_attention_heads=4,
                            decoder_attention_heads=4, vocab_size=512, dtype=jnp.float32), **_LOCAL,
    ),
    "toy-vit": Case(
        lambda: pictures("FlaxViTForImageClassification", "ViTConfig", 16, 32, classes=10, patch_size=8,
                         dtype=jnp.float32, **_TINY), **_LOCAL,
    ),
    "toy-resnet": Case(
        lambda: convolutions("FlaxResNetForImageClassification", "ResNetConfig", 16, 32, embedding_size=16,
                             hidden_sizes=[16, 32, 64], depths=[1, 2, 1], dtype=jnp.float32), **_LOCAL,
    ),
    "toy-unet": Case(lambda: linen_unet(16, 32, 16, 3), **_LOCAL),
    "toy-autoencoder": Case(lambda: linen_autoencoder(32, 32, 16, 32, 64), **_LOCAL),
    "toy-gpt": Case(
        lambda: linen_gpt(16, 64, 4, 64, 4, vocabulary=512, dtype=jnp.float32), **_LOCAL
    ),
}  # fmt: skip
