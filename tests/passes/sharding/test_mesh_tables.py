"""Programs of one step that share what their meshes have in common are those that are built alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping, limits, strategies, tables
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.tracing import tracing

METHODS = (
    alpa_lite.Zero(2), alpa_lite.DataParallel(), alpa_lite.Zero(3), alpa_lite.TensorParallel(), alpa_lite.Sharded()
)  # fmt: skip


def step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = batch["x"]
        for layer in params:
            hidden = hidden + jax.nn.softmax(hidden @ layer["a"]) @ layer["b"]
        return ((hidden - batch["y"]) ** 2).mean()

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None


def numbers(space: Space) -> list[Any]:
    """All that a program is made of."""
    program = space.program
    assert program.buffers is not None
    found: list[Any] = [*program.node_cost]
    for node in space.nodes:
        found += [node.terms, node.communication, [hash(s) for s in node.strategies], node.members]
    for move, transfer in zip(space.moves, program.transfers, strict=True):
        found += [transfer.src, transfer.src_class, transfer.cost, move.produced, move.wanted]
        found += [part for consumer in transfer.consumers for part in consumer]
    buffers = program.buffers
    found += [buffers.start, buffers.end, buffers.owner, buffers.transfer, buffers.copy, *buffers.klass, *buffers.size]
    return found


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_programs_that_share_are_those_that_are_built_alone(shape: tuple[int, ...]):
    wide = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    rows = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    traced = tracing.trace(step, ([{"a": wide, "b": wide}] * 3, {"x": rows, "y": rows}), {})
    rules = dict(factors.rules_of(traced.graph.ops(), traced.graph.values))
    groups = grouping.group(traced, rules)
    cost = MeshCost(Cluster.preset("h100", nodes=1), LogicalMesh(shape, ("x", "y")[: len(shape)]))
    shared = tables.Shared(traced, groups)
    sizes = set()
    for method in METHODS:
        for regather in (False, True):
            fixed = limits.limits(traced, groups, method, cost.mesh)
            asked = {"constraints": fixed, "regather": regather, "budget": 1e9}
            mine = numbers(strategies.build(traced, groups, rules, cost, shared=shared, **asked))
            alone = numbers(strategies.build(traced, groups, rules, cost, **asked))
            assert len(mine) == len(alone)
            assert all(np.array_equal(a, b) for a, b in zip(mine, alone, strict=True))
            sizes.add(sum(np.size(part) for part in mine))
    assert len(sizes) > 3  # they differ between methods
    assert list(shared.meshes) == [cost]
