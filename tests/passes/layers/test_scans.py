"""Cutting scans over layers: the same numbers, and whole stacked leaves only at the step's ends."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Traced, check
from alpa_lite.passes import factors
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.rematerialisation import choices, rematerialise
from alpa_lite.passes.layers.scans import Cut, cut_scans, even_points, kept_points, layer_scans
from tests.marks import one_in
from tests.passes import microbatched, staged
from tests.passes.layers.test_layering import GPT, layered
from tests.zoo_base import normal

SGD = optax.sgd(0.1, momentum=0.9)


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


def assert_same(before: Traced, after: Traced, arguments: Any) -> None:
    leaves = jax.tree.leaves((arguments, {}))
    expected = jax.jit(lambda *x: evaluation.evaluate(before.graph, x))(*leaves)
    actual = jax.jit(lambda *x: evaluation.evaluate(after.graph, x))(*leaves)
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


def stacked_ops(traced: Traced, scan: int, length: int, shapes: set[tuple[int, ...]]) -> set[str]:
    """The names of ops that read or make a whole stacked value of one of these shapes."""
    top = traced.graph.block
    body = next(op for op in top.ops if op.index == scan).bodies[0]
    values = traced.graph.values
    return {
        op.name
        for op in (*top.ops, *body.ops)
        if op.index != scan and any(values[v].shape in {(length, *s) for s in shapes} for v in (*op.reads, *op.results))
    }


@pytest.mark.parametrize("points", [(3,), (1, 5), (1, 2, 3, 4, 5)])
def test_pieces_compute_the_step(points: tuple[int, ...]):
    step, state, batch = stacked_mlp()
    traced = microbatched.traced_of(step, state, batch)
    done = cut(traced, points)
    check(done.traced.graph)
    scans = [op for op in microbatched.op_of(done.traced.graph.block, done.scan).bodies[0].ops if op.name == "scan"]
    assert len(scans) == 2 * (len(points) + 1)
    assert {op.index for op in scans} == set(done.pieces)
    for op in scans:
        _, start, stop = done.pieces[op.index]
        assert op.params["length"] == stop - start
    assert_same(traced, done.traced, (state, batch))


@pytest.mark.parametrize(
    "tx", [SGD, optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))], ids=["sgd", "adam"]
)
def test_whole_leaves_appear_at_the_ends_alone(tx: Any):
    step, state, batch = stacked_mlp(tx=tx)
    traced = microbatched.traced_of(step, state, batch)
    done = cut(traced, (2, 4))
    assert stacked_ops(done.traced, done.scan, 6, {(8, 8), (8,), (4, 8)}) == {"slice", "concatenate"}
    assert_same(traced, done.traced, (state, batch))


def test_casts_of_stacked_parameters_are_done_in_pieces():
    step, state, batch = stacked_mlp(half=True)
    traced = microbatched.traced_of(step, state, batch)
    done = cut(traced, (3,))
    assert stacked_ops(done.traced, done.scan, 6, {(8, 8), (8,)}) == {"slice", "concatenate"}
    assert_same(traced, done.traced, (state, batch))


def test_stages_of_a_scanned_model_send_the_residual_stream():
    step, state, batch = stacked_mlp(8)
    traced = microbatched.traced_of(step, state, batch)
    fine = cut(traced, even_points(8, 8))
    layers = layered(fine.traced)
    prints = [layer.fingerprint for layer in layers.layers]
    assert max(prints.count(p) for p in prints) >= 7
    cuts = [4]
    points = kept_points(fine, layers, cuts)
    (kept,) = points.values()
    assert len(kept) == 1
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    coarse = cut_scans(traced, microbatched.scan_of(traced), points, rules)
    names = [op.name for op in microbatched.op_of(coarse.traced.graph.block, coarse.scan).bodies[0].ops]
    assert names.count("scan") == 4
    again = layered(coarse.traced)
    assignment = assign(again, [len(again.layers) - 1])
    leaves = jax.tree.leaves(((state, batch), {}))
    actual = jax.jit(lambda *x: staged.run(again, assignment, x))(*leaves)
    expected = jax.jit(lambda *x: evaluation.evaluate(traced.graph, x))(*leaves)
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("remat", one_in(2, [True, False]))
def test_gpt_with_scanned_layers(remat: bool):
    step, state, batch = microbatched.zoo("gpt", 2, layers=4, batch=4, tx=SGD, scan=True, remat=remat, **GPT)
    traced = microbatched.traced_of(step, state, batch)
    done = cut(traced, (1, 2, 3))
    layers = layered(done.traced)
    assert len(layers.layers) >= 5
    assert_same(traced, done.traced, (state, batch))
    assignment = assign(layers, [2, 4])
    leaves = jax.tree.leaves(((state, batch), {}))
    actual = jax.jit(lambda *x: staged.run(layers, assignment, x))(*leaves)
    expected = jax.jit(lambda *x: evaluation.evaluate(traced.graph, x))(*leaves)
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-4 * np.linalg.norm(np.asarray(b)) + 1e-6


def test_a_cut_scan_is_rematerialised_piece_by_piece():
    step, state, batch = stacked_mlp()
    traced = microbatched.traced_of(step, state, batch)
    done = cut(traced, (2, 4))
    layers = layered(done.traced)
    backward = [op.index for op in layers.body.ops if op.index not in layers.forward]
    saved = choices(layers)["layer"]
    result = rematerialise(done.traced, done.scan, [layer.ops for layer in layers.layers], backward, saved)
    again = layered(result.traced)
    forward = [op for op in again.body.ops if op.index in again.forward and op.name == "scan"]
    assert all(len(op.results) == 1 for op in forward)  # residuals are no longer stacked
    assert_same(traced, result.traced, (state, batch))


@given(st.sets(st.integers(1, 5)))
@settings(max_examples=3, deadline=None)
def test_any_points(points: set[int]):
    step, state, batch = stacked_mlp()
    traced = microbatched.traced_of(step, state, batch)
    done = cut(traced, tuple(sorted(points)))
    spans = sorted(span[1:] for span in done.pieces.values())
    ends = [0, *sorted(points), 6]
    assert spans == sorted([*itertools.pairwise(ends)] * 2)
    assert_same(traced, done.traced, (state, batch))


def test_even_points_are_divisors():
    assert even_points(12, 5) == (3, 6, 9)
    assert even_points(12, 12) == tuple(range(1, 12))
    assert even_points(7, 3) == ()


def test_bad_points_are_named():
    step, state, batch = stacked_mlp()
    traced = microbatched.traced_of(step, state, batch)
    scan = microbatched.scan_of(traced)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    (inner,) = layer_scans(traced, scan)
    with pytest.raises(OptionError, match="no scan"):
        cut_scans(traced, scan, {0: (1,)}, rules)
    with pytest.raises(OptionError, match="rise strictly"):
        cut_scans(traced, scan, {inner.index: (6,)}, rules)
