"""Models of Hugging Face's Flax, at published sizes and as toys, without their weights: what `planning` plans.

Their steps differentiate a loss and apply an optimizer, as their users write it. Models whose code does not run on both
ends of the JAX that is supported, such as T5 (`jnp.clip` lost an argument), are left out.
"""

from __future__ import annotations

import importlib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

from gallery.batches import f32, shape
from gallery.registry import Built
from gallery.steps import adam_step, cross_entropy, habits, statistical_step, weighted_cross_entropy

TABLE: dict[str, Any] = tomllib.loads((Path(__file__).parent / "cases.toml").read_text())


def sizes_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The items of a model's configuration that a row of the table stands for."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        if key == "like":
            out |= sizes_of(TABLE["like"][value])
        elif key in TABLE["names"]:
            out |= {
                name: size for names, size in zip(TABLE["names"][key], value, strict=False) for name in names.split()
            }
        else:
            out[key] = getattr(jnp, value) if key == "dtype" else value
    return out


def model_of(name: str, head: str, dtype: Any = jnp.bfloat16, **sizes: Any) -> tuple[Any, Any]:
    """A model of `transformers` in Flax, without weights, and the shapes of its parameters."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"Flax{name}{head}")(config, dtype=dtype, _do_init=False)
    return model, model.params_shape_tree


def mode(model: Any, train: bool) -> dict[str, bool]:
    """The keyword that tells a model whether it trains: some take `train`, others `deterministic`."""
    return {"train": train} if "train" in inspect.signature(model.__call__).parameters else {"deterministic": not train}


def training_step(
    model: tuple[Any, Any], loss: Callable[..., Any], *batch: Any, given: Callable[..., dict[str, Any]] = lambda *_: {},
    rng: bool = True, keys: tuple[str, ...] = ("dropout_rng",), step: Callable[..., Built] = adam_step,
) -> Built:  # fmt: skip
    """A step of a model, whose first argument is the first array of the batch.

    Args:
      loss: of what the model makes and the batch.
      given: further arguments of the model, of the batch.
      rng: whether it drops out, by the last argument of the step, as each of `keys`.
      step: makes the step of the loss, the parameters and the batch.
    """
    net, params = model

    def value(params: Any, *arrays: Any) -> Any:
        arrays, key = (arrays[:-1], arrays[-1]) if rng else (arrays, None)
        out = net(arrays[0], **given(*arrays), params=params, **dict.fromkeys(keys, key), **mode(net, rng))
        return loss(out, *arrays)

    return step(value, params, *batch, rng=rng)


def next_tokens(out: Any, *ids: Any) -> Any:
    """Each token of the last sequence from those before it."""
    return cross_entropy(out.logits[:, :-1], ids[-1][:, 1:])


def labelled(out: Any, *batch: Any) -> Any:
    """The last array of the batch as labels."""
    return cross_entropy(out.logits, batch[-1])


HEADS = {"GPT2": "LMHeadModel"}
"""Of decoders whose class has another name."""


def causal(name: str, batch: int, length: int, dropout: bool = False, **sizes: Any) -> Built:
    """Next-token prediction."""
    return training_step(model_of(name, HEADS.get(name, "ForCausalLM"), **sizes), next_tokens, shape(batch, length),
                         rng=dropout)  # fmt: skip


def masked(name: str, batch: int, length: int, **sizes: Any) -> Built:
    """Prediction of masked tokens, with an attention mask and dropout."""
    return training_step(model_of(name, "ForMaskedLM", **sizes), labelled, *[shape(batch, length)] * 3,
                         given=lambda ids, mask, labels: {"attention_mask": mask})  # fmt: skip


def translation(
    name: str, batch: int, source: int, target: int, head: str = "ForConditionalGeneration", **sizes: Any
) -> Built:
    """A sequence to a sequence."""
    return training_step(model_of(name, head, **sizes), next_tokens, shape(batch, source), shape(batch, target),
                         given=lambda ids, out: {"decoder_input_ids": out})  # fmt: skip


def speech(batch: int, frames: int, target: int, **sizes: Any) -> Built:
    """Whisper: spectrograms to text."""
    sound = f32(batch, sizes.get("num_mel_bins", 80), frames)
    model = model_of("Whisper", "ForConditionalGeneration", **sizes)
    return training_step(model, next_tokens, sound, shape(batch, target),
                         given=lambda sound, out: {"decoder_input_ids": out}, rng=False)  # fmt: skip


def pictures(name: str, batch: int, size: int, classes: int = 1000, **sizes: Any) -> Built:
    """Classification of pictures by a transformer."""
    model = model_of(name, "ForImageClassification", image_size=size, num_labels=classes, **sizes)
    return training_step(model, labelled, f32(batch, 3, size, size), shape(batch))


def convolutions(name: str, batch: int, size: int = 224, **sizes: Any) -> Built:
    """Classification of pictures by a convolutional net with batch statistics."""
    model, variables = model_of(name, "ForImageClassification", num_labels=1000, dtype=jnp.float32, **sizes)

    def apply(variables: Any, pixels: Any) -> Any:
        inputs = jnp.transpose(pixels, (0, 2, 3, 1))
        out, updated = model.module.apply(variables, inputs, deterministic=False, mutable=["batch_stats"])
        return out.logits, updated

    return statistical_step(apply, variables, optax.sgd(0.1, momentum=0.9), f32(batch, 3, size, size), shape(batch))


def contrastive(batch: int, texts: str, pictures: str, projection: int) -> Built:
    """CLIP: pictures and texts of a batch against each other, by encoders of sizes of the table."""
    text, vision = sizes_of({"like": texts}), sizes_of({"like": pictures})

    def loss(out: Any, ids: Any, pixels: Any) -> Any:
        own = jnp.arange(batch)
        return cross_entropy(out.logits_per_image, own) + cross_entropy(out.logits_per_text, own)

    size, length = vision["image_size"], text.get("max_position_embeddings", 77)
    model = model_of("CLIP", "Model", text_config=text, vision_config=vision, projection_dim=projection)
    return training_step(model, loss, shape(batch, length), f32(batch, 3, size, size),
                         given=lambda ids, pixels: {"pixel_values": pixels})  # fmt: skip


def sparse(batch: int, length: int) -> Built:
    """BigBird: attention to blocks, some of them random."""
    return training_step(model_of("BigBird", "ForMaskedLM"), labelled, *[shape(batch, length)] * 3,
                         given=lambda ids, mask, labels: {"attention_mask": mask},
                         keys=("dropout_rng", "indices_rng"))  # fmt: skip


def sound(batch: int, samples: int, letters: int, **sizes: Any) -> Built:
    """Wav2Vec2: sound to letters, by convolutions, a transformer and the CTC loss."""

    def loss(out: Any, waves: Any, labels: Any, missing: Any) -> Any:
        logits = out.logits.astype(jnp.float32)
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, missing).mean()

    model = model_of("Wav2Vec2", "ForCTC", vocab_size=32, feat_extract_norm="layer", do_stable_layer_norm=True,
                     conv_bias=True, mask_time_prob=0.0, **sizes)  # fmt: skip
    return training_step(model, loss, f32(batch, samples), shape(batch, letters), f32(batch, letters))


def scaled(optimizer: Any) -> Callable[..., Built]:
    """A step of a loss that is scaled for float16."""
    return lambda loss, params, *batch, rng: habits(loss, params, optimizer, *batch, rng=rng, scaled=True)


def padded(name: str, batch: int, length: int) -> Built:
    """Next-token prediction with a padding mask, in float16, with Adafactor."""
    return training_step(model_of(name, "ForCausalLM", jnp.float16),
                         lambda out, ids, mask: weighted_cross_entropy(out.logits[:, :-1], ids[:, 1:], mask[:, 1:]),
                         *[shape(batch, length)] * 2, given=lambda ids, mask: {"attention_mask": mask},
                         step=scaled(optax.adafactor(1e-4)))  # fmt: skip


def dialogue(batch: int, length: int) -> Built:
    """Blenderbot of 3 B: 2 layers of an encoder and 24 of a decoder, in float16."""

    def given(ids: Any, mask: Any, out: Any, seen: Any) -> dict[str, Any]:
        before = jnp.zeros_like(out).at[:, 1:].set(out[:, :-1])
        return {"attention_mask": mask, "decoder_input_ids": before, "decoder_attention_mask": seen}

    return training_step(model_of("Blenderbot", "ForConditionalGeneration", jnp.float16),
                         lambda out, ids, mask, labels, seen: weighted_cross_entropy(out.logits, labels, seen),
                         *[shape(batch, length)] * 4, given=given, step=scaled(optax.adam(1e-4)))  # fmt: skip


def shared_layers(batch: int, length: int, **sizes: Any) -> Built:
    """ALBERT: one layer applied twelve times, with LAMB."""
    return training_step(model_of("Albert", "ForMaskedLM", embedding_size=128, **sizes),
                         lambda out, ids, mask, labels: weighted_cross_entropy(out.logits, labels, mask),
                         *[shape(batch, length)] * 3,
                         given=lambda ids, mask, labels: {"attention_mask": mask},
                         step=lambda loss, params, *batch, rng: habits(loss, params, optax.lamb(1e-3), *batch,
                                                                       rng=rng))  # fmt: skip
