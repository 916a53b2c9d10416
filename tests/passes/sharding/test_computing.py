"""Seconds of computing: the price of each product."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.sharding import strategies
from tests.helpers import grouped_step

BARE = dataclasses.replace(Cluster.preset("a100"), memory_efficiency=1.0, kernel_start=0.0)
PRODUCT = (((1,), (0,)), ((), ()))


def shape(dtype, *dims):
    return jax.ShapeDtypeStruct(dims, dtype)


def seconds(left, right, dims=PRODUCT, preferred=None, cluster=BARE):
    """Seconds of the one product of a step on eight devices, with its fastest strategy."""

    def step(state, x):
        return state, jax.lax.dot_general(x, state, dims, preferred_element_type=preferred)

    grouped = grouped_step(step, right, left)
    space = strategies.build(grouped, MeshCost(cluster, LogicalMesh((8,), ("x",))))
    (heavy,) = [g for g in grouped.grouping.groups if g.kind == "heavy"]
    return space.nodes[space.node_of[heavy.index]].compute.min()


MATRIX, VECTOR = shape(jnp.float32, 4096, 4096), shape(jnp.float32, 4096)
HALF = shape(jnp.bfloat16, 4096, 4096)


def test_products_without_reuse_are_priced_by_their_bytes():
    """FlaxBert's masks of heads, [16] times [32, 16, 128, 128], are multiplications; a vector reads its matrix once."""
    scores, heads = shape(jnp.bfloat16, 32, 16, 128, 128), shape(jnp.int32, 16)
    moved = 2 * 2 * 32 * 16 * 128 * 128 / 8
    assert seconds(heads, scores, (((), ()), ((0,), (1,)))) == pytest.approx(moved / BARE.memory_bandwidth, rel=0.01)
    assert seconds(MATRIX, VECTOR) == pytest.approx(4 * 4096**2 / 8 / BARE.memory_bandwidth, rel=0.01)


def test_products_run_at_the_rate_of_their_operands():
    """Whatever type sums have; integers of four bytes have no matrix unit."""
    half = seconds(HALF, HALF)
    assert seconds(HALF, HALF, preferred=jnp.float32) == pytest.approx(half)
    assert seconds(HALF, MATRIX, preferred=jnp.float32) == pytest.approx(2 * half)
    wide, narrow = (seconds(shape(kind, 4096, 4096), shape(kind, 4096, 4096)) for kind in (jnp.int32, jnp.int8))
    assert wide == pytest.approx(16 * narrow)


def test_steps_are_priced_at_their_own_rates():
    slower = dataclasses.replace(BARE, sustained_efficiency=BARE.sustained_efficiency / 2, kernel_start=1e-3)
    assert seconds(HALF, HALF, cluster=slower) == pytest.approx(2 * seconds(HALF, HALF) + 1e-3)
    slower = dataclasses.replace(BARE, memory_efficiency=0.5)
    assert seconds(MATRIX, VECTOR, cluster=slower) == pytest.approx(2 * seconds(MATRIX, VECTOR))
