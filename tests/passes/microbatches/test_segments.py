"""Examples that come several times along one dim are cut in each copy, exactly: concatenations, tiles, their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import close_to_jit
from tests.marks import slow_but, slow_one_in
from tests.passes.microbatches.test_loop import equal

ROWS, WIDTH = 16, 8
Loss = Callable[[Any, Any], Any]


def weights() -> Any:
    return {"w": normal(0, WIDTH, WIDTH) / 3, "v": normal(1, WIDTH) / 3}


def batch() -> Any:
    labels = jnp.asarray(np.random.default_rng(0).integers(0, WIDTH, ROWS), jnp.int32)
    return {"x": normal(2, ROWS, WIDTH), "y": normal(3, ROWS, WIDTH), "s": normal(4, ROWS, 3, WIDTH), "t": labels}


def net(s: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ s["w"])


def consistent(s: Any, b: Any) -> jax.Array:
    """An example and its noisy copy, in one pass."""
    noisy = b["x"] + 0.1 * jax.random.normal(jax.random.key(0), b["x"].shape)
    one, two = jnp.split(net(s, jnp.concatenate([b["x"], noisy])), 2)
    return jnp.mean((one - two) ** 2) + jnp.mean((one - b["y"]) ** 2)


def tiled(s: Any, b: Any) -> jax.Array:
    return jnp.mean((net(s, jnp.tile(b["x"], (3, 1))) - jnp.tile(b["y"], (3, 1))) ** 2)


def discriminator(s: Any, b: Any) -> jax.Array:
    """Real and generated examples, with labels that no example has."""
    logits = net(s, jnp.concatenate([b["x"], b["y"]])) @ s["v"]
    return jnp.mean(jax.nn.softplus(logits) - jnp.concatenate([jnp.zeros(ROWS), jnp.ones(ROWS)]) * logits)


def picked(s: Any, b: Any) -> jax.Array:
    logs = jax.nn.log_softmax(net(s, jnp.concatenate([b["x"], b["x"] + 0.1])))
    return -jnp.mean(logs[jnp.arange(2 * ROWS), jnp.tile(b["t"], 2)])


def dropped_out(s: Any, b: Any) -> jax.Array:
    x = jnp.concatenate([b["x"], b["y"]])
    return jnp.mean(net(s, jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0)) ** 2)


def scanned(s: Any, b: Any) -> jax.Array:
    both = jnp.concatenate([b["x"], b["y"]])
    h, _ = lax.scan(lambda h, _: (net(s, h), None), both, None, length=3)
    return jnp.mean((h[:ROWS] - h[ROWS:]) ** 2)


def of_two_sizes(s: Any, b: Any) -> jax.Array:
    """One anchor and three others for each example."""
    h = net(s, jnp.concatenate([b["x"], b["s"].reshape(-1, WIDTH)]))
    return jnp.mean(h[:ROWS, None] * h[ROWS:].reshape(ROWS, 3, WIDTH)) + jnp.mean(h**2)


def stacked(s: Any, b: Any) -> jax.Array:
    h = net(s, jnp.stack([b["x"], b["y"]]).reshape(-1, WIDTH)).reshape(2, ROWS, WIDTH)
    return jnp.mean((h[0] - h[1]) ** 2)


def looked_up(s: Any, b: Any) -> jax.Array:
    return jnp.mean(jnp.tanh(s["w"][jnp.concatenate([b["t"], (b["t"] + 1) % WIDTH])]) ** 2)


def of_complex_numbers(s: Any, b: Any) -> jax.Array:
    z = jnp.exp(1j * net(s, b["x"])) + jnp.fft.fft(net(s, b["y"]), axis=-1)
    mean = jnp.conj(jnp.sum(z * (1 + 2j))) / z.size
    return mean.real + 2 * mean.imag + lax.complex(mean.real, mean.imag).real


def of_means(s: Any, b: Any) -> jax.Array:
    h = net(s, b["s"])
    groups = jnp.mean(jnp.mean(jnp.mean(h**2, 0), -1))
    return groups + jnp.mean(jnp.stack([jnp.mean(h), jnp.mean((h - 1) ** 2)])) + h.reshape(8, 2, -1).mean(1).mean()


LOSSES: list[Loss] = [
    consistent, tiled, discriminator, picked, dropped_out, scanned, of_two_sizes, stacked, looked_up,
    of_complex_numbers, of_means,
]  # fmt: skip
FAST = (consistent, tiled, of_complex_numbers)


@pytest.mark.parametrize(
    "loss",
    slow_one_in(2, slow_but(FAST, LOSSES)),
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("strided", [False, True])
def test_gradients_are_exact(loss: Loss, strided: bool) -> None:
    found = equal((sgd(loss), (weights(), batch())), 4, strided=strided)
    assert not any("inexact" in note or "tile" in note or "concatenate" in note for note in found.notes)


def test_rows_of_all_copies_come_back_in_their_order() -> None:
    def step(s: Any, b: Any) -> Any:
        h = net(s, jnp.concatenate([b["x"], b["y"], jnp.zeros((ROWS, WIDTH))]))
        return {**s, "w": s["w"] - 0.1 * h.mean(0)}, h, h.T

    for strided in (False, True):
        equal((step, (weights(), batch())), 4, strided=strided)


def test_copies_that_mix_examples_are_refused() -> None:
    def shifted(s: Any, b: Any) -> jax.Array:
        h = net(s, jnp.concatenate([b["x"], b["y"]]))
        return jnp.mean((net(s, h)[: ROWS // 2] - net(s, h)[ROWS // 2 : ROWS]) ** 2)

    with pytest.raises(alpa_lite.MicrobatchError, match="slice at"):
        equal((sgd(shifted), (weights(), batch())), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [alpa_lite.DataParallel(), alpa_lite.Pipeline(num_stages=2)], ids=["mesh", "pipeline"]
)
@pytest.mark.parametrize("loss", [consistent, discriminator, of_complex_numbers], ids=lambda f: f.__name__)
def test_on_eight_devices(loss: Loss, method: Any) -> None:
    close_to_jit(sgd(loss), weights(), batch(), method=method, num_microbatches=2, atol=1e-5)
