"""Operations of helper functions in the rewritten step: their constants and literals are taken in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.ir.graph import Block, Op
from alpa_lite.passes import factors
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.microbatches.blocks import Scope
from alpa_lite.passes.microbatches.builder import Builder
from alpa_lite.passes.microbatches.states import StepStates
from alpa_lite.passes.tracing.conversion import graph_of


def test_a_function_with_a_constant_and_a_literal_computes_the_same():
    """As JAX makes a constant of the cut of an array without elements."""
    graph = graph_of(jax.make_jaxpr(lambda x: x * 2.0)(jnp.ones(3)))
    (value,), (op,) = graph.block.inputs, graph.block.ops
    builder = Builder(StepStates(graph, factors.rules_of(graph.ops(), graph.values), 1, {}, []))
    ops: list[Op] = []
    (out,) = Scope(builder).append(
        lambda x, y: x * np.arange(3.0, dtype="float32") + y, op.operands, kind="helper", outside=ops
    )
    rewritten = builder.finish(Block((value,), tuple(ops), (out,)))
    (found,) = evaluate(rewritten, [jnp.full(3, 5.0)])
    np.testing.assert_array_equal(found, [2.0, 7.0, 12.0])
