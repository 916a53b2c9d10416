"""Rows that are indexed by their own number are batch dims: exact in micro-batches, and sharded without a gather."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite
from alpa_lite.passes.tracing import trace
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import close_to_jit
from tests.marks import slow_but
from tests.passes.microbatches.test_loop import equal

ROWS, STEPS, WIDTH = 16, 5, 8
Loss = Callable[[Any, Any], Any]


def weights() -> Any:
    return {"w": normal(0, WIDTH, WIDTH) / 3}


def batch() -> Any:
    draw = np.random.default_rng(0)
    return {
        "x": normal(1, ROWS, STEPS, WIDTH),
        "y": normal(2, ROWS, WIDTH),
        "n": jnp.asarray(draw.integers(1, STEPS + 1, ROWS), jnp.int32),
    }


def hidden(s: Any, b: Any) -> jax.Array:
    """[examples, time, features]."""
    return jnp.tanh(b["x"] @ s["w"])


def distance(picked: jax.Array, b: Any) -> jax.Array:
    return jnp.mean((picked - b["y"]) ** 2)


def last_of_each(s: Any, b: Any) -> jax.Array:
    return distance(jnp.swapaxes(hidden(s, b), 0, 1)[b["n"] - 1, jnp.arange(ROWS)], b)


def rows_of_numpy(s: Any, b: Any) -> jax.Array:
    return distance(hidden(s, b)[np.arange(ROWS), b["n"] - 1], b)


def columns_too(s: Any, b: Any) -> jax.Array:
    return distance(hidden(s, b)[jnp.arange(ROWS)[:, None], b["n"][:, None] - 1, jnp.arange(WIDTH)[None]], b)


def all_rows(s: Any, b: Any) -> jax.Array:
    return distance(jnp.tanh(b["y"] @ s["w"])[jnp.arange(ROWS)], b)


def several_of_each(s: Any, b: Any) -> jax.Array:
    index = jnp.stack([b["n"] - 1, jnp.zeros_like(b["n"])], 1)
    return distance(hidden(s, b)[jnp.arange(ROWS)[:, None], index].mean(1), b)


def overwritten(s: Any, b: Any) -> jax.Array:
    return distance(hidden(s, b).at[jnp.arange(ROWS), b["n"] - 1].set(0.0).sum(1), b)


def added(s: Any, b: Any) -> jax.Array:
    return distance(hidden(s, b).at[jnp.arange(ROWS), b["n"] - 1].add(b["y"] @ s["w"]).mean(1), b)


def experts(h: jax.Array, w: jax.Array) -> jax.Array:
    """Gates of the best two experts of each token, put where all experts are."""
    value, index = lax.top_k(jax.nn.softmax(h @ w), 2)
    one, two = (lax.broadcasted_iota(jnp.int32, index.shape, dim) for dim in (0, 1))
    gates = jnp.zeros(h.shape).at[one, two, index].set(value)
    return jnp.tanh(h * gates + h)


def experts_scanned(s: Any, b: Any) -> jax.Array:
    return jnp.mean(lax.scan(lambda h, k: (experts(h, k * s["w"]), None), b["x"], jnp.arange(1.0, 3.0))[0] ** 2)


def experts_recomputed(s: Any, b: Any) -> jax.Array:
    layer = jax.checkpoint(lambda h, k: (experts(h, k * s["w"]), None))
    return jnp.mean(lax.scan(layer, b["x"], jnp.arange(1.0, 3.0))[0] ** 2)


LOSSES: list[Loss] = [
    last_of_each, rows_of_numpy, columns_too, all_rows, several_of_each, overwritten, added, experts_scanned,
    experts_recomputed,
]  # fmt: skip


def batching_dims(loss: Loss) -> list[bool]:
    """Of each operation that indexes, whether its rows are batch dims."""
    graph = trace(sgd(loss), (weights(), batch()), {}).graph
    ops = [op for op in graph.ops() if op.name in ("gather", "scatter", "scatter-add")]
    return [bool(op.params["dimension_numbers"].operand_batching_dims) for op in ops]


FAST = (last_of_each, rows_of_numpy, overwritten, experts_scanned)


@pytest.mark.parametrize("loss", slow_but(FAST, LOSSES), ids=lambda f: f.__name__)
def test_rows_are_exact_in_micro_batches(loss: Loss) -> None:
    found = equal((sgd(loss), (weights(), batch())), 4, strided=True)
    assert any("cutting moves no data" in note for note in found.notes)


def test_no_row_is_indexed() -> None:
    for loss in LOSSES:
        found = batching_dims(loss)
        assert found and all(found), loss


def test_other_indices_stay() -> None:
    """A position along another dim than that of the rows, or in a larger array, may be any row."""

    def shifted(s: Any, b: Any) -> jax.Array:
        return distance(hidden(s, b)[jnp.arange(ROWS) - 1, b["n"] - 1], b)

    def larger(s: Any, b: Any) -> jax.Array:
        return distance(jnp.concatenate([hidden(s, b)] * 2)[jnp.arange(ROWS), b["n"] - 1], b)

    assert not any(batching_dims(shifted) + batching_dims(larger))


def test_rows_on_eight_devices_are_not_gathered() -> None:
    args = weights(), batch()
    parallel = close_to_jit(sgd(last_of_each), *args, method=alpa_lite.DataParallel(), atol=1e-5)
    assert {c.kind for c in parallel.plan(*args).collectives} == {"all_reduce"}
