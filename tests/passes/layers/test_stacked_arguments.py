"""Stacked arguments in pieces: what is split, what stays whole, and how pieces make up one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_lite.ir.graph import Traced, check
from alpa_lite.passes import factors
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.layers.scans import cut_scans, layer_scans
from alpa_lite.passes.layers.stacked_arguments import Pieces
from tests.passes import microbatched
from tests.passes.layers.test_scans import SGD, stacked_mlp


def in_pieces(traced: Traced, points: tuple[int, ...]) -> Traced:
    scan = microbatched.scan_of(traced)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    where = {op.index: points for op in layer_scans(traced, scan)}
    return cut_scans(traced, scan, where, rules, split_arguments=True).traced


def apart(leaves: list[Any], pieces: tuple[Pieces, ...]) -> list[Any]:
    out = []
    for leaf, one in zip(leaves, pieces, strict=True):
        out += [leaf[a:b] for a, b in zip(one.bounds, one.bounds[1:], strict=False)] or [leaf]
    return out


@pytest.mark.parametrize("tx", [pytest.param(SGD, marks=pytest.mark.slow), optax.adam(0.01)], ids=["momentum", "adam"])
def test_leaves_and_their_moments_become_arguments_and_results_in_pieces(tx: Any):
    step, state, batch = stacked_mlp(tx=tx)
    traced = microbatched.traced_of(step, state, batch)
    cut = in_pieces(traced, (2, 3))
    check(cut.graph)
    stacked = cut.stacked
    assert stacked is not None
    split = {a.path for a, one in zip(traced.arguments, stacked.arguments, strict=True) if one.bounds}
    assert split == {a.path for a in traced.arguments if "['layers']" in a.path}
    assert all(one.bounds in ((), (0, 2, 3, 6)) for one in (*stacked.arguments, *stacked.results))
    assert "[2:3]" in "".join(a.path for a in cut.arguments)
    assert not {"slice", "concatenate"} & {op.name for op in cut.graph.block.ops}
    values, block = cut.graph.values, cut.graph.block
    for output, argument in cut.state:
        assert values[block.outputs[output]].shape == values[block.inputs[argument]].shape  # type: ignore[index]
    leaves = jax.tree.leaves(((state, batch), {}))
    expected = apart(evaluation.evaluate(traced.graph, leaves), stacked.results)
    actual = jax.jit(lambda *x: evaluation.evaluate(cut.graph, x))(*apart(leaves, stacked.arguments))
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


def test_a_leaf_that_is_needed_whole_stays_whole():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])
        return (x**2).mean() + jnp.linalg.norm(jnp.sort(params["w"], 0))

    step, state = microbatched.step_of(loss_fn, {"w": jnp.ones((4, 8, 8))}, 2, SGD)
    traced = microbatched.traced_of(step, state, {"x": jnp.ones((8, 8))})
    stacked = in_pieces(traced, (2,)).stacked
    assert stacked is not None
    bounds = dict(zip([a.path for a in traced.arguments], [one.bounds for one in stacked.arguments], strict=True))
    assert bounds["state['params']['w']"] == ()
