"""Further models of Hugging Face's Flax at published sizes, none of which the search was made or tuned on.

`CASES` are these, and those of `outside_habits.py`. Models whose code does not run on both ends of the JAX that is
supported, such as T5 (`jnp.clip` lost an argument), are left out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from outside_cases import (
    MISTRAL,
    Built,
    Case,
    adam_step,
    causal,
    hugging_face,
    masked,
    pictures,
    shape,
    token_loss,
    translation,
)
from outside_habits import CASES as BEFORE

_LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096
}  # fmt: skip
_DINO: dict[str, Any] = {
    "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 24, "use_swiglu_ffn": True, "patch_size": 14
}  # fmt: skip


def sparse(batch: int, length: int) -> Built:
    """BigBird: attention to blocks, some of them random."""
    model, params = hugging_face("FlaxBigBirdForMaskedLM", "BigBirdConfig")

    def loss(params: Any, ids: Any, mask: Any, labels: Any, key: Any) -> Any:
        keys = {"dropout_rng": key, "indices_rng": key}
        return token_loss(model(ids, attention_mask=mask, params=params, train=True, **keys).logits, labels)

    tokens = shape(batch, length)
    return adam_step(loss, params, tokens, tokens, tokens, rng=True)


def sound(batch: int, samples: int, letters: int) -> Built:
    """Wav2Vec2: sound to letters, by convolutions, a transformer and the CTC loss."""
    habits = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True, "mask_time_prob": 0.0}
    model, params = hugging_face("FlaxWav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=32, **habits, **_LARGE)

    def loss(params: Any, waves: Any, labels: Any, missing: Any, key: Any) -> Any:
        logits = model(waves, params=params, dropout_rng=key, train=True).logits.astype(jnp.float32)
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, missing).mean()

    batches = shape(batch, samples, dtype=jnp.float32), shape(batch, letters)
    return adam_step(loss, params, *batches, shape(batch, letters, dtype=jnp.float32), rng=True)


CASES: dict[str, Case] = BEFORE | {
    "electra-large": Case(
        lambda: masked("FlaxElectraForMaskedLM", "ElectraConfig", 512, 512, embedding_size=1024, **_LARGE), "a100"
    ),
    "distilbert": Case(lambda: masked("FlaxDistilBertForMaskedLM", "DistilBertConfig", 512, 512), "a100"),
    "roformer": Case(lambda: masked("FlaxRoFormerForMaskedLM", "RoFormerConfig", 256, 512), "a100"),
    "bigbird": Case(lambda: sparse(32, 4096), "a100"),
    "xlm-roberta-large": Case(
        lambda: masked("FlaxXLMRobertaForMaskedLM", "XLMRobertaConfig", 256, 512, vocab_size=250002,
                       max_position_embeddings=514, **_LARGE),
        "v5p:2x2x2",
    ),
    "xglm-1.7b": Case(
        lambda: causal("FlaxXGLMForCausalLM", "XGLMConfig", 128, 2048, d_model=2048, ffn_dim=8192, num_layers=24,
                       attention_heads=16),
        "h100", 2,
    ),
    "mbart-large": Case(
        lambda: translation("FlaxMBartForConditionalGeneration", "MBartConfig", 256, 512, 128), "a100"
    ),
    "marian-big": Case(
        lambda: translation("FlaxMarianMTModel", "MarianConfig", 512, 256, 256, d_model=1024, encoder_layers=6,
                            decoder_layers=6),
        "p3dn", 2,
    ),
    "beit-large": Case(
        lambda: pictures("FlaxBeitForImageClassification", "BeitConfig", 512, 224, use_relative_position_bias=True,
                         **_LARGE),
        "a100",
    ),
    "dinov2-giant": Case(
        lambda: pictures("FlaxDinov2ForImageClassification", "Dinov2Config", 512, 224, **_DINO), "h100", 2
    ),
    "wav2vec2-large": Case(lambda: sound(128, 160_000, 64), "a100"),
}  # fmt: skip

_GEMMA_2B: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000,
}  # fmt: skip
_LLAMA_13B: dict[str, Any] = {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
_OPT_30B: dict[str, Any] = {
    "hidden_size": 7168, "ffn_dim": 28672, "num_hidden_layers": 48, "num_attention_heads": 56,
    "word_embed_proj_dim": 7168,
}  # fmt: skip
_OPT_1B: dict[str, Any] = {
    "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
}  # fmt: skip
_VIT_GIANT: dict[str, Any] = {
    "hidden_size": 1408, "num_hidden_layers": 40, "num_attention_heads": 16, "intermediate_size": 6144,
    "patch_size": 14,
}  # fmt: skip
_NEO_1B: dict[str, Any] = {
    "hidden_size": 2048, "num_layers": 24, "num_heads": 16, "attention_types": [[["global", "local"], 12]],
}  # fmt: skip

CHOSEN: dict[str, Case] = {
    "gemma-2b": Case(
        lambda: causal("FlaxGemmaForCausalLM", "GemmaConfig", 128, 2048, max_position_embeddings=2048, **_GEMMA_2B),
        "a100", 2,
    ),
    "llama-13b": Case(lambda: causal("FlaxLlamaForCausalLM", "LlamaConfig", 128, 2048, **_LLAMA_13B), "a100", 4),
    "opt-30b": Case(lambda: causal("FlaxOPTForCausalLM", "OPTConfig", 256, 1024, **_OPT_30B), "p3dn", 8),
    "opt-1.3b": Case(lambda: causal("FlaxOPTForCausalLM", "OPTConfig", 128, 2048, **_OPT_1B), "v5p:2x2x2"),
    "roberta-prelayernorm": Case(
        lambda: masked("FlaxRobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", 512, 512, vocab_size=50265,
                       max_position_embeddings=514, **_LARGE),
        "v5p:2x2x2",
    ),
    "bloom-3b": Case(
        lambda: causal("FlaxBloomForCausalLM", "BloomConfig", 128, 2048, hidden_size=2560, n_layer=30, n_head=32,
                       vocab_size=250880),
        "a100", 2,
    ),
    "gpt2-large": Case(
        lambda: causal("FlaxGPT2LMHeadModel", "GPT2Config", 64, 1024, n_embd=1280, n_layer=36, n_head=20),
        "p3.16xlarge",
    ),
    "mistral-8k": Case(
        lambda: causal(**MISTRAL, batch=128, length=8192, max_position_embeddings=8192), "v5p:4x4x2"
    ),
    "vit-giant": Case(
        lambda: pictures("FlaxViTForImageClassification", "ViTConfig", 1024, 224, **_VIT_GIANT), "h100", 2
    ),
    "blenderbot-small": Case(
        lambda: translation("FlaxBlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", 256, 128, 128),
        "p3dn",
    ),
    "gpt-neo-1.3b": Case(lambda: causal("FlaxGPTNeoForCausalLM", "GPTNeoConfig", 64, 2048, **_NEO_1B), "a100"),
    "xglm-7.5b": Case(
        lambda: causal("FlaxXGLMForCausalLM", "XGLMConfig", 128, 2048, d_model=4096, ffn_dim=16384, num_layers=32,
                       attention_heads=32),
        "h100", 4,
    ),
}  # fmt: skip
"""Twelve models chosen for the comparison of two searches (`planning_against.py`), before either had planned them."""

CASES |= CHOSEN
