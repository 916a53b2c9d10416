"""Further models of Hugging Face's Flax at published sizes, none of which the search was made or tuned on.

`CASES` are these, and those of `outside_habits.py`. Models whose code does not run on both ends of the JAX that is
supported, such as T5 (`jnp.clip` lost an argument), are left out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from outside_cases import Built, Case, adam_step, causal, hugging_face, masked, pictures, shape, token_loss, translation
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
