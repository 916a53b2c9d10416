"""Models that were written elsewhere, or whose layers are a scan, in slices of the sequence on two stages.

The models of Hugging Face need the extra `outside`, without which their tests are skipped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_lite.errors import OptionError
from alpa_lite.passes.tokens import opening
from tests import language_models as lm
from tests import zoo_linen, zoo_nnx
from tests.comparing import compare
from tests.marks import thorough


def sliced(step: Any, *lengths: int, **method: Any) -> Any:
    return lm.piped(step, 2, num_stages=2, token_slices=lengths, **method)


# -- scans over layers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "lengths", "method"),
    [
        (lm.scanned, (7, 5), {"schedule": "1f1b"}),
        (lambda: zoo_linen.gpt(scan=True, layers=2, remat=True, dropout=0.25), (9, 7), {}),
        thorough((lambda: zoo_nnx.gpt(scan=True, layers=2), (7, 9), {"remat": "layer"})),
    ],
    ids=["plain", "linen", "nnx"],
)
def test_scans_over_layers(make: Any, lengths: tuple[int, ...], method: dict[str, Any]) -> None:
    step, args = make()
    compare(sliced(step, *lengths, **method)(*args), jax.jit(step)(*args))


def test_what_would_be_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "MOST", 10)
    step, args = lm.scanned()
    with pytest.raises(OptionError, match=r"the loop at .*language_models.py.* would be \d+ operations.* most 10"):
        sliced(step, 6, 6).plan(*args)


# -- Haiku ------------------------------------------------------------------------------------------------------------


def haiku_decoder(causal: bool = True) -> Any:
    hk = pytest.importorskip("haiku")

    def forward(tokens: jax.Array) -> jax.Array:
        length = tokens.shape[1]
        positions = hk.get_parameter("positions", [length, lm.WIDE], init=hk.initializers.TruncatedNormal())
        x = hk.Embed(lm.VOCAB, lm.WIDE)(tokens) + positions
        mask = (tokens != 0)[:, None, None] & (jnp.tril(jnp.ones((1, 1, length, length))) == 1 if causal else True)
        for _ in range(2):
            attention = hk.MultiHeadAttention(4, 4, w_init=hk.initializers.VarianceScaling(1.0))
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(y, y, y, mask=mask))
            y = hk.Linear(4 * lm.WIDE)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(lm.WIDE)(jax.nn.gelu(y)))
        return hk.Linear(lm.VOCAB)(hk.LayerNorm(-1, True, True)(x))

    model = hk.transform(forward)
    tokens = lm.tokens_of(4)
    params = lm.filled(jax.eval_shape(model.init, jax.random.key(0), tokens))

    def loss(params: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return lm.next_token(model.apply(params, key, tokens), tokens)

    return lm.descending(loss), (params, tokens, jax.random.key(2))


@pytest.mark.slow
def test_haiku() -> None:
    step, args = haiku_decoder()
    compare(sliced(step, 7, 5)(*args), jax.jit(step)(*args))


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def trained_elsewhere(name: str, config: str, sizes: dict[str, Any], padded: bool) -> Any:
    """A model of `transformers`, trained with dropout and, if `padded`, on sequences of several lengths."""
    model, params = lm.hugging_face(name, config, sizes)
    tokens = lm.tokens_of(4)
    mask = jnp.arange(lm.TOKENS) < jnp.array([[12], [9], [12], [4]]) if padded else jnp.ones((4, lm.TOKENS), bool)

    def loss(params: Any, tokens: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        given = mask.astype(jnp.int32)
        logits = model(tokens, attention_mask=given, params=params, dropout_rng=key, train=True).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()

    return lm.descending(loss), (params, tokens, mask, jax.random.key(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", lm.DECODERS)
@pytest.mark.filterwarnings("ignore")
def test_decoders_of_hugging_face(name: str) -> None:
    step, args = trained_elsewhere(name, *lm.DECODERS[name], padded=name.startswith(("GPT2", "Llama")))
    compare(sliced(step, 7, 5)(*args), jax.jit(step)(*args))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_encoders_of_hugging_face_are_refused_with_their_reason() -> None:
    step, args = trained_elsewhere("BertForMaskedLM", "Bert", lm.SMALL | {"intermediate_size": 32}, padded=True)
    with pytest.raises(OptionError, match=r"dot_general at .*FlaxBert.*layer/0/attention.* waits for later tokens"):
        sliced(step, 6, 6).plan(*args)
