"""Groups of operations: cheap ones follow, sums of partial sums stay partial, and depth adds no decisions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.ir.graph import Traced
from alpa_lite.passes.sharding.groups import Group, Grouping
from gallery.batches import f32
from gallery.steps import residual_layers, sgd
from tests.helpers import grouped_step

BATCH = {"x": f32(32, 16), "rows": f32(12, 16), "ids": jax.ShapeDtypeStruct((32, 1), jnp.int32)}


def grouped(step, *args: Any) -> tuple[Traced, Grouping]:
    found = grouped_step(step, *args)
    return found.traced, found.grouping


def forward(fun):
    return lambda state, batch: (state, fun(state, batch))


def group_of(groups: Grouping, name: str) -> Group:
    """The group of the only grouped operation of a primitive."""
    of = {op: g for g in groups.groups for op in g.ops}
    (found,) = [of[i] for i, op in groups.ops.items() if op.name == name and i in of]
    return found


def test_elementwise_operations_follow_one_group():
    _, groups = grouped(
        forward(lambda state, batch: jnp.sum(jnp.sin(jnp.exp(batch["x"] @ state["w"])) * 3.0)),
        {"w": f32(16, 32)}, {"x": f32(8, 16)},
    )  # fmt: skip
    product, exp, sin, mul = (group_of(groups, name) for name in ("dot_general", "exp", "sin", "mul"))
    assert product.kind == "heavy"
    assert exp is sin is mul and exp.kind == "light" and exp is not product
    # One demand: the product's result; the rest is computed in place.
    (demand,) = [d for d in groups.demands if d.group == exp.index]
    assert groups.homes[demand.value].group == product.index


def test_masks_are_lazy_and_demand_their_small_sources():
    def masked(state, batch):
        return jnp.where(jnp.tril(jnp.ones((64, 64), bool)), batch["x"] @ state["w"] + state["b"], 0.0)

    traced, groups = grouped(forward(masked), {"w": f32(16, 64), "b": f32(64)}, {"x": f32(64, 16)})
    values = traced.graph.values
    made = [op for op in traced.graph.ops() if op.name in ("iota", "broadcast_in_dim", "ge")]
    square = [op for op in made if values[op.results[0]].shape == (64, 64)]
    assert len(square) >= 4 and all(value in groups.lazy_sources for op in square for value in op.results)
    # The broadcast bias is demanded as the 64 numbers that it is.
    assert any(values[d.value].shape in ((64,), (1, 64)) for d in groups.demands)


def test_sums_of_partial_sums_are_linear():
    _, groups = grouped(
        forward(lambda state, batch: jnp.sum(jnp.tanh(batch["x"] @ state["a"] + batch["x"] @ state["b"]))),
        {"a": f32(16, 32), "b": f32(16, 32)}, {"x": f32(8, 16)},
    )  # fmt: skip
    assert group_of(groups, "add").kind == "linear"


@pytest.mark.parametrize(("layers", "kinds"), [(4, ["leaf", "linear", "linear"]), (1, [])])
def test_stacked_gradients_of_scanned_layers_may_be_partial_sums(layers, kinds):
    """And their biases, whose sums are reshaped; residuals may not, and a stack of one has no choice."""

    def loss(state, batch):
        def layer(x, p):
            return x + jnp.tanh(x @ p["w"] + p["b"]), None

        return jnp.mean(jax.lax.scan(layer, batch["x"], state)[0] ** 2)

    _, groups = grouped(sgd(loss), {"w": f32(layers, 16, 16), "b": f32(layers, 16)}, {"x": f32(8, 16)})
    stacks = [group.kind for group in groups.groups if group.name == "ys"]
    assert stacks.count("linear") == kinds.count("linear") and set(stacks) >= set(kinds)
    assert layers == 1 or set(stacks) == {"linear", "leaf"}


def test_gradients_in_nested_loops_may_be_partial_sums():
    """The bias of a recurrent cell, in the carry of a loop over time within one that accumulates, and the loss."""

    def loss(state, batch):
        def cell(h, x):
            return jnp.tanh(h @ state["w"] + x + state["b"]), None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((8, 16)), batch)[0] ** 2)

    def step(state, batch):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(state, part)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state)
        value, grads = jax.lax.scan(add, zeros, batch["x"])[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    _, groups = grouped(step, {"w": f32(16, 16), "b": f32(16)}, {"x": f32(4, 5, 8, 16)})
    sums = [group for group in groups.groups if group.name == "carry" and group.kind == "linear"]
    assert sorted(group.trips for group in sums) == [4, 4, 4, 20, 20]


def layers_loss(state, batch):
    return jnp.mean(residual_layers(state, batch["x"]) ** 2)


def layers_of(count: int) -> list[Any]:
    return [{"up": f32(16, 64), "down": f32(64, 16)} for _ in range(count)]


def scaled(factor):
    """Layers each multiplied by `factor(number, batch)`."""

    def loss(state, batch):
        x = batch["x"]
        for number, w in enumerate(state):
            x = jnp.tanh(x @ w["up"] @ w["down"]) * factor(number, batch)
        return jnp.sum(x)

    return sgd(loss)


def clipped_if_finite(state, batch):
    """Layers whose gradients are joined in one flag."""
    grads = jax.grad(lambda state: sum(jnp.sum((batch["x"] @ w["up"]) ** 2) for w in state))(state)
    finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
    return jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), state, grads)


@pytest.mark.parametrize(
    "step",
    [
        sgd(layers_loss),
        scaled(lambda number, batch: batch["rows"][number]),
        scaled(lambda number, batch: jax.lax.dynamic_slice(batch["rows"], (number, 0), (1, 16))),
        scaled(lambda number, batch: jnp.where(batch["ids"] > 0, 1.0, 0.5)),
        clipped_if_finite,
    ],
    ids=["residual", "a row each", "a row each, cut by a number", "a mask for itself", "joined"],
)
def test_depth_adds_no_decisions(step):
    few, many = (grouped(step, layers_of(count), BATCH)[1] for count in (7, 12))
    assert len(few.classes) == len(many.classes) and len(few.groups) < len(many.groups)


def test_operands_that_are_not_alike_are_told_apart():
    """Two weights of equal shape of which one is a scale and the other an offset, in one chain of operations."""
    _, groups = grouped(
        sgd(lambda state, batch: jnp.sum(jnp.tanh(batch["x"] * state["scale"] + state["offset"]))),
        {"scale": f32(32, 16), "offset": f32(32, 16)}, {"x": f32(32, 16)},
    )  # fmt: skip
    scale, offset = (groups.groups[groups.leaves[n]].color for n in (1, 0))
    assert scale != offset
