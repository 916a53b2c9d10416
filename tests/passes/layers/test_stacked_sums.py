"""Loops that add up stacks of scanned layers add within the layers, and sums stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.ir.graph import Graph
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.layers.stacked_sums import add_within_scans
from alpa_lite.passes.tracing import tracing
from gallery.batches import normal
from gallery.steps import updated
from tests.comparing import assert_close_in_norm
from tests.passes.numerics import outputs

LAYERS, PARTS, WIDTH = 3, 4, 8


def loss(params: Any, x: Any, *, reverse: bool = False) -> Any:
    layer = lambda x, w: (jnp.tanh(x @ w["weight"] + w["bias"]), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(layer, x, params, reverse=reverse)[0] ** 2)


def accumulated(params: Any, x: Any, gradient: Callable[..., Any]) -> Any:
    def part(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, gradient(params, x)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(part, zeros, x.reshape(PARTS, -1, WIDTH))[0]


def gradients(params: Any, x: Any) -> Any:
    return accumulated(params, x, jax.grad(loss))


def reversed_gradients(params: Any, x: Any) -> Any:
    return accumulated(params, x, jax.grad(lambda p, x: loss(p, x, reverse=True)))


def two_losses(params: Any, x: Any) -> Any:
    """Two backward scans; the gradients of both are added before they reach the carry."""
    return accumulated(params, x, jax.grad(lambda p, x: loss(p, x) + loss(p, x + 1)))


def read_twice(params: Any, x: Any) -> Any:
    """Each stack is also read by something else, so that it has to be there."""

    def part(total: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(jnp.add, total, grads), jax.tree.map(jnp.max, grads)

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(part, zeros, x.reshape(PARTS, -1, WIDTH))


def arguments() -> Any:
    return {"weight": normal(0, LAYERS, WIDTH, WIDTH), "bias": normal(1, LAYERS, WIDTH)}, normal(2, 16, WIDTH)


def additions_of_stacks(graph: Graph) -> int:
    """Additions to carries of the outermost scan, outside of the scans in it."""
    return sum(len(ScanView(op).accumulators) for op in graph.block.ops if op.name == "scan")


@pytest.mark.parametrize(
    ("step", "before", "after"), [(gradients, 2, 0), (reversed_gradients, 2, 0), (two_losses, 2, 2), (read_twice, 2, 2)]
)
def test_stacks_are_added_within_the_scan_that_makes_them(step: Any, before: int, after: int) -> None:
    args = arguments()
    traced = tracing.trace(step, args, {})
    moved, _ = add_within_scans(traced, -1)
    assert additions_of_stacks(traced.graph) == before and additions_of_stacks(moved.graph) == after
    assert_close_in_norm(
        outputs(moved, [*jax.tree.leaves(args), *moved.graph.constants]), jax.tree.leaves(jax.jit(step)(*args))
    )


def test_steps_without_such_sums_are_the_same_object() -> None:
    traced = tracing.trace(lambda p, x: jax.grad(loss)(p, x), arguments(), {})
    assert add_within_scans(traced, -1) == (traced, -1)


def written_out(params: Any, x: Any) -> Any:
    """The loop over micro-batches in Python."""
    grads = [jax.grad(loss)(params, part) for part in x.reshape(PARTS, -1, WIDTH)]
    return jax.tree.map(lambda *g: sum(g), *grads)


@pytest.mark.parametrize(
    ("gradient", "method"),
    [(gradients, alpa_lite.DataParallel()), (written_out, alpa_lite.DataParallel()), (gradients, alpa_lite.Zero(3))],
)
def test_accumulated_stacks_are_reduced_once_after_the_loop(gradient: Any, method: Any) -> None:
    def step(params: Any, x: Any) -> Any:
        return updated(params, gradient(params, x))

    args = arguments()
    planned = alpa_lite.parallelize(step, cluster=alpa_lite.Cluster.local(jax.devices()[:4]), method=method)
    plan = planned.plan(*args)
    if isinstance(method, alpa_lite.DataParallel):
        assert sum(c.count for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter")) == 2
    assert_close_in_norm(jax.tree.leaves(planned(*args)), jax.tree.leaves(jax.jit(step)(*args)))
