"""`jax_debug_nans` with planned steps: the error has the line, and the arguments are still there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import alpa_lite
from tests.marks import slow

parallelize = functools.partial(alpa_lite.parallelize, method=alpa_lite.DataParallel())


def place_of(text: str) -> str:
    """The file and line of this module that has a text first."""
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


@pytest.fixture(autouse=True)
def debugging() -> Iterator[None]:
    with jax.debug_nans(True):
        yield


def step(state: dict[str, jax.Array], x: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(w: jax.Array) -> jax.Array:
        top = x
        for i in range(2):
            top = jnp.tanh(top @ w[i])
        masked = jnp.where(top > 2, jnp.sqrt(top - 3), top)  # nan, thrown away
        return (masked**2).mean() + jnp.log(1 - state["at"])

    value, grad = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * jnp.nan_to_num(grad), "at": state["at"] + 0.6}, value


def scanned(state: dict[str, jax.Array], x: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    def body(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sqrt(carry @ w), None

    top = jax.lax.scan(body, x, state["w"])[0]
    return {"w": state["w"] * 0.9}, top.sum()


def fresh(at: float = 0.0) -> dict[str, Any]:
    return {"w": jnp.full((2, 16, 16), 0.01), "at": np.float32(at)}


X = np.ones((32, 16), np.float32)


@pytest.mark.parametrize("pipeline", [False, slow(True)])
def test_the_error_has_the_line_and_the_state_can_be_used_again(pipeline: bool) -> None:
    options: dict[str, Any] = {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2} if pipeline else {}
    planned = parallelize(step, **options)
    state, _ = planned(fresh(), X)
    state, first = planned(state, X)
    assert np.isfinite(first)
    for _ in range(2):  # the second time with the same arguments: nothing was donated
        with pytest.raises(FloatingPointError) as error:
            planned(state, X)
        assert "invalid value (nan) encountered in log at " in str(error.value)
        assert place_of("jnp.log(") in str(error.value)
        assert "It reaches result" in str(error.value)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert float(state["at"]) == pytest.approx(1.2)


def test_inside_a_loop_the_iteration_is_named() -> None:
    state = {"w": jnp.stack([jnp.eye(16), -jnp.eye(16), jnp.eye(16)])}
    with pytest.raises(FloatingPointError) as error:
        parallelize(scanned)(state, X)
    assert "encountered in sqrt at" in str(error.value) and place_of("jnp.sqrt(carry") in str(error.value)
    assert "in iteration 1 of the loop" in str(error.value)


def test_what_was_given_is_told_from_what_was_made() -> None:
    state = fresh(np.nan)
    with pytest.raises(FloatingPointError, match="state/at was given to step with an invalid value"):
        parallelize(step)(state, X)


@pytest.mark.slow
def test_infinities_are_found_likewise() -> None:
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"nan or inf.* encountered in log"):
        parallelize(step)(fresh(1.0), X)


def test_modules_are_not_updated_by_a_step_that_fails() -> None:
    def train(model: nnx.Linear, x: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.log((m(x) ** 2).sum() * 0 - 1))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads))
        return loss

    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    with pytest.raises(FloatingPointError, match=r"encountered in log at .*test_invalid\.py"):
        parallelize(train)(model, X)
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before)
