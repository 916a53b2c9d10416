"""Seconds of computing: what each product is priced as."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping, strategies
from alpa_lite.passes.tracing import tracing

BARE = dataclasses.replace(Cluster.preset("a100"), memory_efficiency=1.0, kernel_start=0.0)
MESH = LogicalMesh((8,), ("x",))
A100 = MeshCost(BARE, MESH)


def shape(dtype, *dims):
    return jax.ShapeDtypeStruct(dims, dtype)


def product_seconds(dims, left, right, preferred=None, cost=A100):
    """Seconds of the one product of a step, by strategy."""

    def step(state, x):
        return state, jax.lax.dot_general(x, state, dims, preferred_element_type=preferred)

    traced = tracing.trace(step, (right, left), {})
    rules = dict(factors.rules_of(traced.graph.ops(), traced.graph.values))
    groups = grouping.group(traced, rules)
    space = strategies.build(traced, groups, rules, cost)
    (heavy,) = [g for g in groups.groups if g.kind == "heavy"]
    node = space.nodes[space.node_of[heavy.index]]
    return node.compute


def test_a_head_mask_is_a_multiplication():
    """[16] times [32, 16, 128, 128] along the heads, in integers and bfloat16: FlaxBert's masks of attention heads."""
    scores = shape(jnp.bfloat16, 32, 16, 128, 128)
    seconds = product_seconds((((), ()), ((0,), (1,))), shape(jnp.int32, 16), scores)
    moved = 2 * 2 * 32 * 16 * 128 * 128 / 8
    assert seconds.min() == pytest.approx(moved / A100.cluster.memory_bandwidth, rel=0.01)


def test_a_vector_reads_its_matrix_once():
    seconds = product_seconds((((1,), (0,)), ((), ())), shape(jnp.float32, 4096, 4096), shape(jnp.float32, 4096))
    assert seconds.min() == pytest.approx(4 * 4096**2 / 8 / A100.cluster.memory_bandwidth, rel=0.01)


def test_sums_in_float32_run_at_the_rate_of_their_operands():
    dims = (((1,), (0,)), ((), ()))
    square = shape(jnp.bfloat16, 4096, 4096)
    assert product_seconds(dims, square, square, jnp.float32).min() == pytest.approx(
        product_seconds(dims, square, square).min()
    )
    mixed = product_seconds(dims, square, shape(jnp.float32, 4096, 4096), jnp.float32).min()
    assert mixed == pytest.approx(2 * product_seconds(dims, square, square).min())


def test_integers_of_four_bytes_have_no_matrix_unit():
    dims = (((1,), (0,)), ((), ()))
    squares = {kind: shape(kind, 4096, 4096) for kind in (jnp.int32, jnp.int8)}
    of = {kind: product_seconds(dims, square, square).min() for kind, square in squares.items()}
    assert of[jnp.int32] == pytest.approx(16 * of[jnp.int8])


def test_steps_are_priced_at_their_own_rates():
    square = shape(jnp.bfloat16, 4096, 4096)
    dims = (((1,), (0,)), ((), ()))
    bare = product_seconds(dims, square, square).min()
    slower = dataclasses.replace(BARE, sustained_efficiency=BARE.sustained_efficiency / 2, kernel_start=1e-3)
    assert product_seconds(dims, square, square, cost=MeshCost(slower, MESH)).min() == pytest.approx(2 * bare + 1e-3)
    vector = [(((1,), (0,)), ((), ())), shape(jnp.float32, 4096, 4096), shape(jnp.float32, 4096)]
    slower = dataclasses.replace(BARE, memory_efficiency=0.5)
    assert product_seconds(*vector, cost=MeshCost(slower, MESH)).min() == pytest.approx(
        2 * product_seconds(*vector).min()
    )
