"""Editing a graph: functions keep keys of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

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
    # And functions of a part that is traced later.
    part = graph_of(jax.make_jaxpr(lambda x: callbacks(2 * x))(jnp.ones(4)), graph.keys)
    assert len({op.key for op in (*graph.block.ops, *part.block.ops)}) == 5  # and the product
