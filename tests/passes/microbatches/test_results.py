"""Inexact micro-batches: results keep their scale, and the notes name each leaf with how it was combined.

The data are the same in every micro-batch, so that what looks across the batch (statistics, solvers, line searches) has
the same value on each as on the batch: every leaf equals that of plain `jit`, whether it is a sum or a mean.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite
from alpa_lite.errors import MicrobatchError
from gallery.batches import normal
from gallery.steps import sgd, updated
from tests.comparing import assert_close, close_to_jit
from tests.marks import slow
from tests.passes.microbatches.test_independent import accumulated, outputs

PARTS, ROWS, WIDTH = 2, 8, 8


def state() -> Any:
    return {"w": normal(1, WIDTH, WIDTH) / 3, "v": normal(2, WIDTH) / 3}


def batch() -> Any:
    one = {
        "x": normal(3, ROWS, WIDTH),
        "y": normal(4, ROWS, WIDTH),
        "weight": jnp.ones(ROWS),
    }  # which has examples alone
    return jax.tree.map(lambda x: jnp.concatenate([x] * PARTS), one)


def solver(s: Any, b: Any) -> Any:
    """A loop that holds the whole batch; the new weights are made within it."""
    x = b["x"]

    def times(v: Any) -> Any:
        return x.T @ (x @ v) / len(x) + 0.1 * v

    right = x.T @ jnp.tanh(x @ s["v"]) / len(x)
    found, rest = lax.while_loop(
        lambda c: c[1] @ c[1] > 1e-4,
        lambda c: (c[0] + 0.3 * c[1], right - times(c[0] + 0.3 * c[1])),
        (jnp.zeros(WIDTH), right),
    )
    return {"w": s["w"], "v": s["v"] + 1e-2 * found}, rest @ rest


def inner_descent(s: Any, b: Any) -> Any:
    def turn(w: Any, _: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean((jnp.tanh(b["x"] @ w) - b["y"]) ** 2))(w)
        return w - 0.1 * grads, jnp.sum(grads**2)

    w, norms = lax.scan(turn, s["w"], None, length=3)
    return {"w": w, "v": s["v"]}, norms


def clusters(s: Any, b: Any) -> Any:
    def turn(_: Any, centres: Any) -> Any:
        nearest = jnp.argmin(((b["x"][:, None] - centres[None]) ** 2).sum(-1), 1)
        chosen = jax.nn.one_hot(nearest, WIDTH)
        return (chosen.T @ b["x"] + centres) / (chosen.sum(0)[:, None] + 1)

    return {"w": lax.fori_loop(0, 2, turn, s["w"]), "v": s["v"]}, s["v"].sum()


def iterations(s: Any, b: Any) -> Any:
    """A state that counts, which is the same on each micro-batch."""

    def turn(c: Any) -> Any:
        return c[0] + 1, 0.5 * jnp.tanh(b["x"].T @ (b["x"] @ c[1]) / len(b["x"])) * c[1]

    count, v = lax.while_loop(lambda c: c[1] @ c[1] > 1e-3, turn, (jnp.int32(0), s["v"]))
    return {"w": s["w"], "v": 0.9 * s["v"] + v}, count


def in_order(s: Any, b: Any) -> Any:
    """Each example sees those before it: the last weights are new state."""

    def turn(w: Any, one: Any) -> Any:
        return 0.2 * w + 0.5 * jnp.outer(jnp.tanh(one[0] + 1e-3 * one[0] @ w), one[1]), None

    return {"w": lax.scan(turn, s["w"], (b["x"], b["y"]))[0], "v": s["v"]}, s["v"].sum()


@sgd
def whitened(s: Any, b: Any) -> Any:
    h = jnp.tanh(b["x"] @ s["w"])
    root = jnp.linalg.cholesky(h.T @ h / len(h) + jnp.eye(WIDTH))
    return jnp.mean((jax.scipy.linalg.solve_triangular(root, h.T, lower=True).T - b["y"]) ** 2)


@sgd
def extremes(s: Any, b: Any) -> Any:
    return jnp.mean((b["x"] @ s["w"]).max(0) ** 2)


def summed_rows(s: Any, b: Any) -> Any:
    """A sum over examples, and a decay, beside a mean: all in the loop, since rows are compared."""

    def loss(p: Any) -> Any:
        rows = jnp.sort(b["x"] @ p["w"], 0)
        return jnp.sum(rows**2) + 0.5 * jnp.sum(p["w"] ** 2), jnp.mean(rows)

    (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(s)
    return updated(s, grads, 0.01), (value, mean)


def average_of_statistics(s: Any, b: Any) -> Any:
    def loss(w: Any) -> Any:
        h = b["x"] @ w
        mean = h.mean(0)
        return jnp.mean(((h - mean) / jnp.sqrt(h.var(0) + 1e-5) - b["y"]) ** 2), mean

    (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(s["w"])
    return {"w": s["w"] - 0.1 * grads, "v": 0.9 * s["v"] + 0.1 * mean}, value


NAMED = {
    solver: {"result/0/v": "averaged", "result/1": "averaged"},
    inner_descent: {"result/0/w": "averaged", "result/1": "averaged"},
    clusters: {"result/0/w": "averaged"},
    iterations: {"result/0/v": "averaged", "result/1": "taken from the last micro-batch"},
    in_order: {"result/0/w": "averaged"},
    whitened: {"result/0/w": "averaged", "result/1": "averaged"},
    extremes: {"result/0/w": "averaged", "result/1": "averaged"},
    summed_rows: {"result/0/w": "summed", "result/1/0": "summed", "result/1/1": "averaged"},
    average_of_statistics: {"result/0/v": "averaged", "result/0/w": "summed"},
}


@pytest.mark.parametrize("step", NAMED, ids=lambda step: getattr(step, "__name__", "step"))
def test_results_keep_their_scale_and_are_named(step: Any) -> None:
    args = (state(), batch())
    if step is in_order:  # the same on each micro-batch but for what is carried into it, which fades
        args = (jax.tree.map(lambda p: 0.01 * p, state()), batch())
    found = accumulated(step, args, PARTS)
    assert any("inexact" in note for note in found.notes)
    assert_close(outputs(found, step, args), jax.jit(step)(*args), rtol=5e-5, atol=2e-5)
    for path, words in NAMED[step].items():
        (note,) = [note for note in found.notes if path in note.split(": ")[-1].split(", ")]
        assert note.startswith(words)


def test_random_keys_come_from_the_last_micro_batch_and_truth_values_are_refused() -> None:
    def compared(s: Any, b: Any) -> Any:
        rows = jnp.sort(jax.nn.softmax(b["x"] @ s["w"]), 0) @ s["w"]
        return rows, jax.tree.map(lambda p: p - 0.1 * jnp.mean(jnp.tanh(rows)), s)

    def keyed(s: Any, b: Any) -> Any:
        rows, s = compared(s, b)
        bits = lax.bitcast_convert_type(rows[0, :2], jnp.uint32)
        return s, jax.random.wrap_key_data(bits)

    args = (state(), batch())
    found = accumulated(keyed, args, PARTS)
    assert "taken from the last micro-batch: result/1" in found.notes
    key = jax.jit(keyed)(*args)[1]
    assert (jax.random.key_data(outputs(found, keyed, args)[1]) == jax.random.key_data(key)).all()

    def finite(s: Any, b: Any) -> Any:
        rows, s = compared(s, b)
        return s, jnp.isfinite(rows).all()

    with pytest.raises(MicrobatchError, match=r"truth value of the whole batch"):
        accumulated(finite, args, PARTS)


METHODS = {"mesh": alpa_lite.DataParallel(), "pipeline": alpa_lite.Pipeline(num_stages=2)}


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (solver, "mesh"),
        *[slow(step, "pipeline") for step in (solver, inner_descent, whitened)],
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_on_eight_devices(step: Any, method: str) -> None:
    """In pipelines micro-batches have consecutive examples, and so they have on one mesh where results are inexact."""
    args, options = (state(), batch()), {"num_microbatches": PARTS, "allow_inexact": True}
    parallel = close_to_jit(step, *args, method=METHODS[method], **options, rtol=2e-5, atol=2e-5)
    assert any(note.startswith("averaged over micro-batches: ") for note in parallel.plan(*args).notes)
