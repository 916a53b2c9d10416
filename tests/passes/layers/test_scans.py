"""Cutting scans over layers: the same numbers, and whole stacked leaves only at the step's ends."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Traced
from alpa_lite.passes import factors
from alpa_lite.passes.layers.division import even_points, layer_scans
from alpa_lite.passes.layers.scans import Cut, cut_scans
from gallery.batches import normal
from tests.passes import microbatched
from tests.passes.layers.test_layering import SGD
from tests.passes.numerics import assert_same


def stacked_mlp(layers: int = 6, tx: Any = SGD, *, half: bool = False) -> tuple[Any, Any, Any]:
    """A scan over stacked weights, and state that is stacked likewise."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> Any:
            return x + jnp.tanh(x @ p["w"] + p["b"]), None

        weights = params["layers"]
        if half:
            weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), weights)
        x, _ = jax.lax.scan(layer, batch["x"] @ params["first"], weights)
        return (x**2).mean()

    params = {"layers": {"w": normal(0, layers, 8, 8) / 3, "b": normal(1, layers, 8)}, "first": normal(2, 8, 8)}
    step, state = microbatched.step_of(loss_fn, params, 2, tx)
    return step, state, {"x": normal(3, 8, 8)}


def cut(traced: Traced, points: tuple[int, ...]) -> Cut:
    scan = microbatched.scan_of(traced)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return cut_scans(traced, scan, {op.index: points for op in layer_scans(traced, scan)}, rules)


def stacked_ops(traced: Traced, scan: int, length: int, shapes: set[tuple[int, ...]]) -> set[str]:
    """The names of ops that read or make a whole stacked value of one of these shapes."""
    top = traced.graph.block
    body = microbatched.op_of(top, scan).bodies[0]
    values = traced.graph.values
    return {
        op.name
        for op in (*top.ops, *body.ops)
        if op.index != scan and any(values[v].shape in {(length, *s) for s in shapes} for v in (*op.reads, *op.results))
    }


@pytest.mark.parametrize("points", [(), (3,), (1, 5), (1, 2, 3, 4, 5)])
def test_pieces_compute_the_step(points: tuple[int, ...]):
    step, *arguments = stacked_mlp()
    traced = microbatched.traced_of(step, *arguments)
    done = cut(traced, points)
    assert sorted(span[1:] for span in done.pieces.values()) == sorted([*itertools.pairwise([0, *points, 6])] * 2)
    body = microbatched.op_of(done.traced.graph.block, done.scan).bodies[0]
    lengths = {op.index: op.params["length"] for op in body.ops if op.name == "scan"}
    assert lengths == {index: stop - start for index, (_, start, stop) in done.pieces.items()}
    assert_same(traced, done.traced, arguments)


ADAMW = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))


@pytest.mark.parametrize("options", [{"tx": ADAMW}, {"half": True}], ids=["adam", "casts"])
def test_whole_leaves_appear_at_the_ends_alone(options: Any):
    """Their updates, and casts of them, are done in pieces."""
    step, *arguments = stacked_mlp(**options)
    traced = microbatched.traced_of(step, *arguments)
    done = cut(traced, (2, 4))
    assert stacked_ops(done.traced, done.scan, 6, {(8, 8), (8,), (4, 8)}) == {"slice", "concatenate"}
    assert_same(traced, done.traced, arguments)


def test_even_points_are_divisors():
    assert even_points(12, 5) == (3, 6, 9)
    assert even_points(12, 12) == tuple(range(1, 12))
    assert even_points(7, 3) == ()


def test_bad_points_are_named():
    step, *arguments = stacked_mlp()
    traced = microbatched.traced_of(step, *arguments)
    scan = microbatched.scan_of(traced)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    (inner,) = layer_scans(traced, scan)
    with pytest.raises(OptionError, match="not a scan"):
        cut_scans(traced, scan, {0: (1,)}, rules)
    with pytest.raises(OptionError, match="rise strictly"):
        cut_scans(traced, scan, {inner.index: (6,)}, rules)


def test_scans_over_one_stack_may_be_cut_at_different_points():
    """What is read in pieces of one kind and of another comes in as the first; the others are slices."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, batch["x"], params["w"])
        return (jax.lax.scan(layer, x * 2, params["w"])[0] ** 2).mean()

    step, state = microbatched.step_of(loss_fn, {"w": normal(0, 6, 8, 8) / 3}, 2, SGD)
    arguments = state, {"x": normal(3, 8, 8)}
    traced = microbatched.traced_of(step, *arguments)
    scan = microbatched.scan_of(traced)
    first, second = layer_scans(traced, scan)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    done = cut_scans(traced, scan, {first.index: (2,), second.index: (3,)}, rules)
    assert {span[1:] for span in done.pieces.values()} == {(0, 2), (2, 6), (0, 3), (3, 6)}
    assert_same(traced, done.traced, arguments)
