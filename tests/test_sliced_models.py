"""Models that were written elsewhere, or whose layers are a scan, in slices of the sequence on two stages.

The models of Hugging Face need the extra `outside`, without which their tests are skipped.
"""

from typing import Any

import jax
import pytest

import gallery
from alpa_lite.errors import OptionError
from alpa_lite.passes.tokens import opening
from gallery import linen, nnx
from gallery.outside.hugging_face import model_of
from gallery.tokens import models
from gallery.tokens.parts import HEADS, TOKENS, VOCAB, WIDE
from tests.comparing import compare
from tests.helpers import piped
from tests.marks import thorough


def sliced(step: Any, *lengths: int, **method: Any) -> Any:
    return piped(step, 2, num_stages=2, token_slices=lengths, **method)


# -- scans over layers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "lengths", "method"),
    [
        (gallery.get("tokens", "scan-remat").make, (9, 7), {"schedule": "1f1b"}),
        (lambda: linen.gpt(scan=True, layers=2, remat=True, dropout=0.25), (9, 7), {}),
        thorough((lambda: nnx.gpt(scan=True, layers=2), (7, 9), {"remat": "layer"})),
    ],
    ids=["plain", "linen", "nnx"],
)
def test_scans_over_layers(make: Any, lengths: tuple[int, ...], method: dict[str, Any]) -> None:
    step, args = make()
    compare(sliced(step, *lengths, **method)(*args), jax.jit(step)(*args))


def test_what_would_be_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "MOST", 10)
    step, args = gallery.get("tokens", "scan-remat").make()
    with pytest.raises(OptionError, match=r"the loop at .*tokens/models.py.* would be \d+ operations.* most 10"):
        sliced(step, 8, 8).plan(*args)


# -- models of other libraries ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["haiku", "hf-gpt2", "hf-llama", "hf-bloom", "hf-gemma"])
@pytest.mark.filterwarnings("ignore")
def test_decoders_of_other_libraries(name: str) -> None:
    """With dropout and, those of Hugging Face, on sequences of several lengths."""
    pytest.importorskip("transformers" if name.startswith("hf") else name)
    step, args = gallery.get("tokens", name).make()
    compare(sliced(step, 7, TOKENS - 7)(*args), jax.jit(step)(*args))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_encoders_of_hugging_face_are_refused_with_their_reason() -> None:
    pytest.importorskip("transformers")
    model, shapes = model_of(
        "Bert", "ForMaskedLM", vocab_size=VOCAB, hidden_size=WIDE, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=WIDE,
    )  # fmt: skip

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return (model(batch["tokens"], params=params, dropout_rng=key, train=True)[0] ** 2).mean()

    step, args = models.step(loss, models.random_arrays(shapes), models.text())
    with pytest.raises(OptionError, match=r"dot_general at .*FlaxBert.*layer/0/attention.* waits for later tokens"):
        sliced(step, 6, TOKENS - 6).plan(*args)
