"""Editing a graph: copies compute the same, and functions keep keys of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.graph import Block, Op
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tracing.conversion import graph_of


def callbacks(x: jax.Array) -> Any:
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.pure_callback(lambda y: y + 1, like, x), jax.pure_callback(lambda y: y + 2, like, x)


def test_functions_keep_keys_of_their_own_when_one_of_them_is_rewritten() -> None:
    """The second function was the first that the new writer of keys saw, and got the number of the other."""
    graph = graph_of(jax.make_jaxpr(callbacks)(jnp.ones(4)))
    first, second = graph.block.ops
    assert first.key != second.key
    rewriter = Rewriter(graph)
    new = rewriter.finish(replace(graph.block, ops=(first, replace(second, key=None))))
    assert [op.key for op in new.block.ops] == [first.key, second.key]


def test_functions_of_a_part_that_is_traced_later_have_keys_of_their_own() -> None:
    graph = graph_of(jax.make_jaxpr(callbacks)(jnp.ones(4)))
    part = graph_of(jax.make_jaxpr(lambda x: callbacks(2 * x))(jnp.ones(4)), graph.keys)
    assert len({op.key for op in (*graph.block.ops, *part.block.ops)}) == 5  # and the product


def scanned(x: jax.Array) -> Any:
    def step(carry: Any, row: Any) -> Any:
        total, last = carry
        return (total + row, jnp.sin(row) + last), row * total

    return jax.lax.scan(step, (jnp.zeros(3), x[0]), x)


def test_a_scan_is_rebuilt_from_its_parts() -> None:
    x = jnp.arange(12.0).reshape(4, 3)
    graph = graph_of(jax.make_jaxpr(scanned)(x))
    rewriter = Rewriter(graph)

    def again(op: Op) -> Op:
        if op.name != "scan":
            return op
        view = ScanView(op)
        assert set(view.accumulators) == set(view.additions) == {1}  # the other is read by what is stacked
        made = view.rebuilt(view.body.ops, view.consts, view.carries, view.xs, view.ys)
        assert made.operands == op.operands and made.results == op.results
        return rewriter.moved(made, made.operands, made.results)

    new = rewriter.finish(Block(graph.block.inputs, tuple(map(again, graph.block.ops)), graph.block.outputs))
    for a, b in zip(evaluate(new, [x]), evaluate(graph, [x]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    scans = [[op.key for op in one.block.ops if op.name == "scan"] for one in (graph, new)]
    assert scans[0] == scans[1]
