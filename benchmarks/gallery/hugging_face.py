"""Models of Hugging Face's Flax, at published sizes and as toys, without their weights: what `planning` plans.

Their steps differentiate a loss and apply an optimizer, as their users write it. Models whose code does not run on both
ends of the JAX that is supported, such as T5 (`jnp.clip` lost an argument), are left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from benchmarks.gallery import steps as forms
from benchmarks.gallery.steps import Built, Case, adam_step, case, habits, numbers, shape, token_loss, weighted


def model_of(name: str, head: str, dtype: Any = jnp.bfloat16, **sizes: Any) -> tuple[Any, Any]:
    """A model of `transformers` in Flax, without weights, and the shapes of its parameters."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"Flax{name}{head}")(config, dtype=dtype, _do_init=False)
    return model, model.params_shape_tree


def mode(model: Any, train: bool) -> dict[str, bool]:
    """The keyword that tells a model whether it trains: some take `train`, others `deterministic`."""
    return {"train": train} if "train" in inspect.signature(model.__call__).parameters else {"deterministic": not train}


def trained(
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
    return token_loss(out.logits[:, :-1], ids[-1][:, 1:])


def labelled(out: Any, *batch: Any) -> Any:
    """The last array of the batch as labels."""
    return token_loss(out.logits, batch[-1])


def causal(name: str, batch: int, length: int, dropout: bool = False, **sizes: Any) -> Built:
    """Next-token prediction."""
    return trained(model_of(name, sizes.pop("head", "ForCausalLM"), **sizes), next_tokens, shape(batch, length),
                   rng=dropout)  # fmt: skip


def masked(name: str, batch: int, length: int, **sizes: Any) -> Built:
    """Prediction of masked tokens, with an attention mask and dropout."""
    return trained(model_of(name, "ForMaskedLM", **sizes), labelled, *[shape(batch, length)] * 3,
                   given=lambda ids, mask, labels: {"attention_mask": mask})  # fmt: skip


def translation(
    name: str, batch: int, source: int, target: int, head: str = "ForConditionalGeneration", **sizes: Any
) -> Built:
    """A sequence to a sequence."""
    return trained(model_of(name, head, **sizes), next_tokens, shape(batch, source), shape(batch, target),
                   given=lambda ids, out: {"decoder_input_ids": out})  # fmt: skip


def speech(batch: int, frames: int, target: int, **sizes: Any) -> Built:
    """Whisper: spectrograms to text."""
    sound = numbers(batch, sizes.get("num_mel_bins", 80), frames)
    return trained(model_of("Whisper", "ForConditionalGeneration", **sizes), next_tokens, sound, shape(batch, target),
                   given=lambda sound, out: {"decoder_input_ids": out}, rng=False)  # fmt: skip


def pictures(name: str, batch: int, size: int, classes: int = 1000, **sizes: Any) -> Built:
    """Classification of pictures by a transformer."""
    model = model_of(name, "ForImageClassification", image_size=size, num_labels=classes, **sizes)
    return trained(model, labelled, numbers(batch, 3, size, size), shape(batch))


def convolutions(name: str, batch: int, size: int = 224, **sizes: Any) -> Built:
    """Classification of pictures by a convolutional net with batch statistics."""
    model, variables = model_of(name, "ForImageClassification", num_labels=1000, dtype=jnp.float32, **sizes)

    def apply(variables: Any, pixels: Any) -> Any:
        inputs = jnp.transpose(pixels, (0, 2, 3, 1))
        out, updated = model.module.apply(variables, inputs, deterministic=False, mutable=["batch_stats"])
        return out.logits, updated

    return forms.statistical_step(
        apply, variables, optax.sgd(0.1, momentum=0.9), numbers(batch, 3, size, size), shape(batch)
    )


def contrastive(batch: int, text: dict[str, Any], vision: dict[str, Any], projection: int) -> Built:
    """CLIP: pictures and texts of a batch against each other."""

    def loss(out: Any, ids: Any, pixels: Any) -> Any:
        own = jnp.arange(batch)
        return token_loss(out.logits_per_image, own) + token_loss(out.logits_per_text, own)

    size, length = vision["image_size"], text.get("max_position_embeddings", 77)
    model = model_of("CLIP", "Model", text_config=text, vision_config=vision, projection_dim=projection)
    return trained(model, loss, shape(batch, length), numbers(batch, 3, size, size),
                   given=lambda ids, pixels: {"pixel_values": pixels})  # fmt: skip


def sparse(batch: int, length: int) -> Built:
    """BigBird: attention to blocks, some of them random."""
    return trained(model_of("BigBird", "ForMaskedLM"), labelled, *[shape(batch, length)] * 3,
                   given=lambda ids, mask, labels: {"attention_mask": mask},
                   keys=("dropout_rng", "indices_rng"))  # fmt: skip


def sound(batch: int, samples: int, letters: int) -> Built:
    """Wav2Vec2: sound to letters, by convolutions, a transformer and the CTC loss."""

    def loss(out: Any, waves: Any, labels: Any, missing: Any) -> Any:
        logits = out.logits.astype(jnp.float32)
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, missing).mean()

    model = model_of("Wav2Vec2", "ForCTC", vocab_size=32, feat_extract_norm="layer", do_stable_layer_norm=True,
                     conv_bias=True, mask_time_prob=0.0, **_LARGE)  # fmt: skip
    return trained(model, loss, numbers(batch, samples), shape(batch, letters), numbers(batch, letters))


def scaled(optimizer: Any) -> Callable[..., Built]:
    """A step of a loss that is scaled for float16."""
    return lambda loss, params, *batch, rng: habits(loss, params, optimizer, *batch, rng=rng, scaled=True)


def padded(name: str, batch: int, length: int, optimizer: Any) -> Built:
    """Next-token prediction with a padding mask, in float16."""
    return trained(model_of(name, "ForCausalLM", jnp.float16),
                   lambda out, ids, mask: weighted(out.logits[:, :-1], ids[:, 1:], mask[:, 1:]),
                   *[shape(batch, length)] * 2, given=lambda ids, mask: {"attention_mask": mask},
                   step=scaled(optimizer))  # fmt: skip


def dialogue(batch: int, length: int) -> Built:
    """Blenderbot of 3 B: 2 layers of an encoder and 24 of a decoder, in float16."""

    def given(ids: Any, mask: Any, out: Any, seen: Any) -> dict[str, Any]:
        before = jnp.zeros_like(out).at[:, 1:].set(out[:, :-1])
        return {"attention_mask": mask, "decoder_input_ids": before, "decoder_attention_mask": seen}

    return trained(model_of("Blenderbot", "ForConditionalGeneration", jnp.float16),
                   lambda out, ids, mask, labels, seen: weighted(out.logits, labels, seen),
                   *[shape(batch, length)] * 4, given=given, step=scaled(optax.adam(1e-4)))  # fmt: skip


def shared_layers(batch: int, length: int) -> Built:
    """ALBERT: one layer applied twelve times, with LAMB."""
    return trained(model_of("Albert", "ForMaskedLM", embedding_size=128, **encoder(4096, 12, 64, 16384)),
                   lambda out, ids, mask, labels: weighted(out.logits, labels, mask), *[shape(batch, length)] * 3,
                   given=lambda ids, mask, labels: {"attention_mask": mask},
                   step=lambda loss, params, *batch, rng: habits(loss, params, optax.lamb(1e-3), *batch,
                                                                 rng=rng))  # fmt: skip


# -- the cases --------------------------------------------------------------------------------------------------------


def encoder(hidden: int, layers: int, heads: int, inner: int | None = None) -> dict[str, Any]:
    """The names that most configurations have for sizes."""
    out = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return out if inner is None else out | {"intermediate_size": inner}


def opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Those of OPT."""
    return encoder(hidden, layers, heads) | {"ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden}


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"head": "LMHeadModel", "n_embd": hidden, "n_layer": layers, "n_head": heads}


def _xglm(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"d_model": hidden, "ffn_dim": 4 * hidden, "num_layers": layers, "attention_heads": heads}


def both_sides(width: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """Those of an encoder and a decoder of one size."""
    sides = [f"{side}_{{}}" for side in ("encoder", "decoder")]
    of = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    return {"d_model": width} | {side.format(name): value for side in sides for name, value in of.items()}


_LARGE: dict[str, Any] = encoder(1024, 24, 16, 4096)
LLAMA_8B: dict[str, Any] = encoder(4096, 32, 32, 14336) | {"num_key_value_heads": 8, "vocab_size": 128256}
_LLAMA: dict[str, Any] = LLAMA_8B | {"rope_theta": 5e5}
_LLAMA_70B: dict[str, Any] = _LLAMA | encoder(8192, 80, 64, 28672)
_MISTRAL: dict[str, Any] = encoder(4096, 32, 32, 14336) | {"num_key_value_heads": 8, "sliding_window": 4096}
_LLAMA_13B: dict[str, Any] = encoder(5120, 40, 40, 13824) | {"vocab_size": 32000}
_GEMMA_2B: dict[str, Any] = encoder(2048, 18, 8, 16384) | {"num_key_value_heads": 1, "head_dim": 256}
_GEMMA_2B["vocab_size"] = 256000
_BLOOM: dict[str, Any] = {"n_layer": 30, "n_head": 32, "vocab_size": 250880}
_CLIP: dict[str, Any] = {
    "text": encoder(768, 12, 12, 3072),
    "vision": encoder(1024, 24, 16, 4096) | {"image_size": 224, "patch_size": 14},
    "projection": 768,
}
_TINY: dict[str, Any] = encoder(64, 4, 4, 128) | {"dtype": jnp.float32}


def _alternating(layers: int) -> dict[str, Any]:
    return {"attention_types": [[["global", "local"], layers // 2]], "num_layers": layers}


_issue, _toy = functools.partial(case, of="issue"), functools.partial(case, "cpu", of="toy")
CASES: dict[str, Case] = {
    # as reported
    "llama-8b-8x8": _issue(
        "h100 x 8", causal, "Llama", 64, 8192, method=("Sharded", ((8, 8),)), max_position_embeddings=8192, **_LLAMA
    ),
    "mistral-7b": _issue("h100 x 4", causal, "Mistral", 64, 4096, max_position_embeddings=4096, **_MISTRAL),
    "llama-8b": _issue("h100 x 8", causal, "Llama", 64, 8192, max_position_embeddings=8192, **_LLAMA),
    "llama-8b-v5p": _issue("v5p:4x4x4", causal, "Llama", 256, 8192, max_position_embeddings=8192, **_LLAMA),
    "llama-70b-v5p": _issue("v5p:8x8x8", causal, "Llama", 512, 4096, max_position_embeddings=4096, **_LLAMA_70B),
    "gpt2-xl": _issue("a100 x 2", causal, "GPT2", 128, 1024, dropout=True, **_gpt2(1600, 48, 25)),
    "bert-large": _issue("a100", masked, "Bert", 256, 512, **_LARGE),
    # at published sizes
    "roberta-large": case("h100 x 2", masked, "Roberta", 512, 512, max_position_embeddings=514, **_LARGE),
    "gpt-j-6b": case("v5p:4x4x4", causal, "GPTJ", 256, 2048, n_positions=2048),
    "opt-6.7b": case("a100 x 4", causal, "OPT", 128, 2048, **opt(4096, 32, 32)),
    "bloom-7b": case("a100 x 8", causal, "Bloom", 128, 2048, hidden_size=4096, **_BLOOM),
    "gemma-7b": case("h100 x 4", causal, "Gemma", 64, 4096, max_position_embeddings=4096),
    "gpt-neo-2.7b": case("p3dn x 4", causal, "GPTNeo", 128, 2048, hidden_size=2560, num_heads=20, **_alternating(32)),
    "pegasus-large": case(
        "a100 x 2", translation, "Pegasus", 256, 512, 128, vocab_size=96103, **both_sides(1024, 16, 16, 4096)
    ),
    "bart-large": case("p3dn", translation, "Bart", 256, 512, 128),
    "vit-huge": case("h100", pictures, "ViT", 1024, 224, patch_size=14, **encoder(1280, 32, 16, 5120)),
    "whisper-large": case("v5p:2x2x2", speech, 256, 3000, 448, **both_sides(1280, 32, 20, 5120)),
    "clip-large": case("a100 x 2", contrastive, 4096, **_CLIP),
    "resnet-152": case("p3.16xlarge", convolutions, "ResNet", 1024, depths=[3, 8, 36, 3]),
    "regnet": case("a100", convolutions, "RegNet", 1024),
    "blenderbot-3b": case("p3dn x 2", dialogue, 256, 128),
    "gpt-j-adafactor": case("p3.16xlarge x 8", padded, "GPTJ", 256, 2048, optax.adafactor(1e-4)),
    "albert-xxlarge": case("a100", shared_layers, 512, 512),
    # none of which the search was made or tuned on
    "electra-large": case("a100", masked, "Electra", 512, 512, embedding_size=1024, **_LARGE),
    "distilbert": case("a100", masked, "DistilBert", 512, 512),
    "roformer": case("a100", masked, "RoFormer", 256, 512),
    "bigbird": case("a100", sparse, 32, 4096),
    "xlm-roberta-large": case(
        "v5p:2x2x2", masked, "XLMRoberta", 256, 512, vocab_size=250002, max_position_embeddings=514, **_LARGE
    ),
    "xglm-1.7b": case("h100 x 2", causal, "XGLM", 128, 2048, **_xglm(2048, 24, 16)),
    "mbart-large": case("a100", translation, "MBart", 256, 512, 128),
    "marian-big": case(
        "p3dn x 2", translation, "Marian", 512, 256, 256, "MTModel", d_model=1024, encoder_layers=6, decoder_layers=6
    ),
    "beit-large": case("a100", pictures, "Beit", 512, 224, use_relative_position_bias=True, **_LARGE),
    "dinov2-giant": case(
        "h100 x 2", pictures, "Dinov2", 512, 224, use_swiglu_ffn=True, patch_size=14, **encoder(1536, 40, 24)
    ),
    "wav2vec2-large": case("a100", sound, 128, 160_000, 64),
    # chosen for the comparison of two searches, before either had planned them
    "gemma-2b": case("a100 x 2", causal, "Gemma", 128, 2048, max_position_embeddings=2048, **_GEMMA_2B),
    "llama-13b": case("a100 x 4", causal, "Llama", 128, 2048, max_position_embeddings=2048, **_LLAMA_13B),
    "opt-30b": case("p3dn x 8", causal, "OPT", 256, 1024, **opt(7168, 48, 56)),
    "opt-1.3b": case("v5p:2x2x2", causal, "OPT", 128, 2048, **opt(2048, 24, 32)),
    "roberta-prelayernorm": case(
        "v5p:2x2x2", masked, "RobertaPreLayerNorm", 512, 512, vocab_size=50265, max_position_embeddings=514, **_LARGE
    ),
    "bloom-3b": case("a100 x 2", causal, "Bloom", 128, 2048, hidden_size=2560, **_BLOOM),
    "gpt2-large": case("p3.16xlarge", causal, "GPT2", 64, 1024, **_gpt2(1280, 36, 20)),
    "mistral-8k": case("v5p:4x4x2", causal, "Mistral", 128, 8192, max_position_embeddings=8192, **_MISTRAL),
    "vit-giant": case("h100 x 2", pictures, "ViT", 1024, 224, patch_size=14, **encoder(1408, 40, 16, 6144)),
    "blenderbot-small": case("p3dn", translation, "BlenderbotSmall", 256, 128, 128),
    "gpt-neo-1.3b": case("a100", causal, "GPTNeo", 64, 2048, hidden_size=2048, num_heads=16, **_alternating(24)),
    "xglm-7.5b": case("h100 x 4", causal, "XGLM", 128, 2048, **_xglm(4096, 32, 32)),
    # toys on virtual devices
    "toy-gpt2": _toy(causal, "GPT2", 16, 64, dropout=True, vocab_size=512, dtype=jnp.float32, **_gpt2(64, 4, 4)),
    "toy-bert": _toy(masked, "Bert", 16, 64, vocab_size=512, **_TINY),
    "toy-llama": _toy(causal, "Llama", 16, 64, vocab_size=512, num_key_value_heads=2, **_TINY),
    "toy-bart": _toy(
        translation, "Bart", 16, 64, 32, vocab_size=512, dtype=jnp.float32, **both_sides(64, 3, 4, 128)
    ),
    "toy-vit": _toy(pictures, "ViT", 16, 32, 10, patch_size=8, **_TINY),
    "toy-resnet": _toy(
        convolutions, "ResNet", 16, 32, embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1]
    ),
}  # fmt: skip
