"""Models that were written elsewhere, or whose layers are a scan, in slices of the sequence on two stages.

The models of Hugging Face need the extra `outside`, without which their tests are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite
from alpa_lite.errors import OptionError
from alpa_lite.methods import Pipeline
from alpa_lite.passes.tokens import unrolling
from tests import zoo_linen, zoo_nnx
from tests.comparing import compare

TOKENS, VOCAB, WIDE = 12, 31, 16


def sliced(step: Any, *lengths: int, devices: int = 2, **method: Any) -> Any:
    cluster = alpa_lite.Cluster.local(jax.devices()[:devices])
    chosen = Pipeline(num_stages=2, token_slices=lengths, **method)
    return alpa_lite.parallelize(step, method=chosen, cluster=cluster, num_microbatches=2)


def tokens_of(seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (4, TOKENS), 1, VOCAB)


def filled(shapes: Any) -> Any:
    """Parameters of given shapes, none of them zero."""
    leaves, tree = jax.tree.flatten(shapes)
    draw = np.random.default_rng(0)
    arrays = [jnp.asarray(draw.normal(size=x.shape) * 0.3 + (x.ndim == 1), x.dtype) for x in leaves]
    return jax.tree.unflatten(tree, arrays)


def descending(loss: Callable[..., jax.Array]) -> Any:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), "grads": grads, "loss": value}

    return step


def next_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


# -- scans over layers ------------------------------------------------------------------------------------------------


def stacked(layers: int = 2) -> Any:
    """Layers as a plain scan over stacked parameters, recomputed in the backward pass."""
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def weight(*shape: int) -> jax.Array:
        return 0.3 * jax.random.normal(next(keys), shape)

    layer = {"qkv": weight(layers, WIDE, 3 * WIDE), "out": weight(layers, WIDE, WIDE)}
    params = {"embed": weight(VOCAB, WIDE), "layers": layer, "head": weight(WIDE, VOCAB)}

    @jax.checkpoint
    def block(x: jax.Array, w: Any) -> Any:
        heads = (jax.nn.standardize(x) @ w["qkv"]).reshape(*x.shape[:2], 3, 4, WIDE // 4)
        attended = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        return x + jnp.tanh(attended.reshape(x.shape) @ w["out"]), None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(block, params["embed"][tokens], params["layers"])
        return next_token(x @ params["head"], tokens)

    return descending(loss), (params, tokens_of())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "lengths", "method"),
    [
        (stacked, (7, 5), {"schedule": "1f1b"}),
        (lambda: zoo_linen.gpt(scan=True, layers=2, remat=True, dropout=0.25), (9, 7), {}),
        pytest.param(lambda: zoo_nnx.gpt(scan=True, layers=2), (7, 9), {"remat": "layer"}, marks=pytest.mark.thorough),
    ],
    ids=["plain", "linen", "nnx"],
)
def test_scans_over_layers(make: Any, lengths: tuple[int, ...], method: dict[str, Any]) -> None:
    step, args = make()
    compare(sliced(step, *lengths, **method)(*args), jax.jit(step)(*args))


def test_what_would_be_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling, "MOST", 10)
    step, args = stacked()
    with pytest.raises(OptionError, match=r"the loop at .*test_sliced_models.py.* would be \d+ operations.* most 10"):
        sliced(step, 6, 6).plan(*args)


# -- Haiku ------------------------------------------------------------------------------------------------------------


def haiku_decoder(causal: bool = True) -> Any:
    hk = pytest.importorskip("haiku")

    def forward(tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        positions = hk.get_parameter("positions", [length, WIDE], init=hk.initializers.TruncatedNormal())
        x = hk.Embed(VOCAB, WIDE)(tokens) + positions
        mask = (tokens != 0)[:, None, None] & (jnp.tril(jnp.ones((1, 1, length, length))) == 1 if causal else True)
        for _ in range(2):
            attention = hk.MultiHeadAttention(4, 4, w_init=hk.initializers.VarianceScaling(1.0))
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(y, y, y, mask=mask))
            y = hk.Linear(4 * WIDE)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(WIDE)(jax.nn.gelu(y)))
        return hk.Linear(VOCAB)(hk.LayerNorm(-1, True, True)(x))

    model = hk.transform(forward)
    tokens = tokens_of()
    params = filled(jax.eval_shape(model.init, jax.random.key(0), tokens))

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return next_token(model.apply(params, key, tokens), tokens)

    return descending(loss), (params, tokens, jax.random.key(2))


@pytest.mark.slow
def test_haiku() -> None:
    step, args = haiku_decoder()
    compare(sliced(step, 7, 5)(*args), jax.jit(step)(*args))


# -- Hugging Face -----------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": VOCAB, "hidden_size": WIDE, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SMALL | {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 16}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHead": ("GPT2", {"vocab_size": VOCAB, "n_embd": WIDE, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "LlamaForCausalLM": ("Llama", LLAMA),
    "BloomForCausalLM": ("Bloom", SMALL),
    "GemmaForCausalLM": ("Gemma", LLAMA | {"head_dim": 4, "hidden_activation": "gelu"}),
}  # fmt: skip


def hugging_face(name: str, config: str, sizes: dict[str, Any], padded: bool) -> Any:
    """A model of `transformers`, trained with dropout and, if `padded`, on sequences of several lengths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        suffix = "Model" if name.endswith("Head") else ""
        kind = getattr(transformers, f"Flax{name}{suffix}")
        model = kind(getattr(transformers, f"{config}Config")(**sizes), _do_init=False)
        params = filled(model.params_shape_tree)
    tokens = tokens_of()
    mask = jnp.arange(TOKENS) < jnp.array([[12], [9], [12], [4]]) if padded else jnp.ones((4, TOKENS), bool)

    def loss(params: Any, tokens: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        given = mask.astype(jnp.int32)
        logits = model(tokens, attention_mask=given, params=params, dropout_rng=key, train=True).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()

    return descending(loss), (params, tokens, mask, jax.random.key(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.filterwarnings("ignore")
def test_decoders_of_hugging_face(name: str) -> None:
    step, args = hugging_face(name, *DECODERS[name], padded=name.startswith(("GPT2", "Llama")))
    compare(sliced(step, 7, 5)(*args), jax.jit(step)(*args))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_encoders_of_hugging_face_are_refused_with_their_reason() -> None:
    step, args = hugging_face("BertForMaskedLM", "Bert", SMALL | {"intermediate_size": 32}, padded=True)
    with pytest.raises(OptionError, match=r"dot_general at .*FlaxBert.*layer/0/attention.* waits for later tokens"):
        sliced(step, 6, 6).plan(*args)
