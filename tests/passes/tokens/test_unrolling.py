"""Loops that are written out compute what the loops did, and hand what they stack on without stacking it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.ir.graph import Block
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tokens.unrolling import operations, unrolled
from alpa_lite.passes.tracing import tracing
from tests.comparing import norm

LAYERS = 3


def layers(stacked: jax.Array, x: jax.Array) -> Any:
    """A gradient through a scan over layers, which another scan reads backwards; a stack that is read whole."""

    def loss(stacked: jax.Array) -> Any:
        last, every = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(1)), x, stacked)
        return (last**2).sum() + (every * jnp.arange(1.0, LAYERS + 1)[:, None]).sum(), every

    (value, every), gradient = jax.value_and_grad(loss, has_aux=True)(stacked)
    return gradient, value, every


def flat(wanted: Any = lambda op: True) -> tuple[Rewriter, Block, Block, Any, list[Any]]:
    arguments = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(LAYERS, 4, 4), (2, 4)])]
    graph = tracing.trace(layers, tuple(arguments), {}, batch_argnums=(1,)).graph
    rewriter = Rewriter(graph)
    return rewriter, graph.block, unrolled(rewriter, graph.block, wanted).block, graph, arguments


def test_loops_written_out_compute_the_same():
    rewriter, before, after, graph, arguments = flat()
    counts = Counter(op.name for op in after.ops)
    assert counts["scan"] == 0 < sum(op.name == "scan" for op in before.ops)
    assert counts["dot_general"] == 3 * LAYERS
    assert counts["concatenate"] == 2  # the gradient and `every`: residuals are never stacked
    for a, b in zip(evaluate(graph, arguments), evaluate(rewriter.finish(after), arguments), strict=True):
        assert norm(a - b) <= 1e-5 * norm(a)


def test_what_the_forward_loop_alone_stacks_is_stacked_for_the_other_one():
    rewriter, _, after, graph, arguments = flat(lambda op: not op.params["reverse"])
    counts = Counter(op.name for op in after.ops)
    assert counts["scan"] == 1 and counts["concatenate"] >= 2
    for a, b in zip(evaluate(graph, arguments), evaluate(rewriter.finish(after), arguments), strict=True):
        assert norm(a - b) <= 1e-5 * norm(a)


@pytest.mark.parametrize("length", [2, 7])
def test_operations_are_counted_before_they_are_written(length):
    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    graph = tracing.trace(step, (jnp.ones((length, 4, 4)), jnp.ones((2, 4))), {}, batch_argnums=(1,)).graph
    (scan,) = (op for op in graph.block.ops if op.name == "scan")
    made = unrolled(Rewriter(graph), graph.block, lambda op: True)
    assert operations(scan) == len(made.block.ops) == len(made.part_of) == 4 * length
    assert set(made.rows.values()) == {scan.operands[-1]}
