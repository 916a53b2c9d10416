"""Groups: every value has a home, cheap operations follow, and depth adds no decisions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite import models
from alpa_lite.graph import Lit, Traced
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping
from alpa_lite.passes.sharding.groups import Group, Grouping
from alpa_lite.passes.tracing import tracing
from tests import zoo


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def grouped(step, *args: Any) -> tuple[Traced, Grouping, dict[Any, Any]]:
    traced = tracing.trace(step, args, {})
    rules = dict(factors.rules_of(traced.graph.ops(), traced.graph.values))
    return traced, grouping.group(traced, rules), rules


def descent(loss):
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step


def group_of(groups: Grouping, name: str) -> list[Group]:
    """The group of every operation of a primitive, in program order."""
    of = {op: g for g in groups.groups for op in g.ops}
    return [of[i] for i, op in sorted(groups.ops.items()) if op.name == name and i in of]


@pytest.mark.parametrize("name", ["plain_tied", "plain_scan", "plain_while", "plain_cond", "plain_dropout_typed"])
def test_every_value_has_a_home_or_is_lazy(name):
    step, args = zoo.get(name).make()
    traced, groups, _ = grouped(step, *args)
    values = traced.graph.values
    for op in traced.graph.ops():
        for value in op.results:
            assert (value in groups.homes) != (value in groups.lazy), op.name
    for value, home in groups.homes.items():
        group = groups.groups[home.group]
        assert len(home.dims) == len(values[value].shape)
        for size, dim in zip(values[value].shape, home.dims, strict=True):
            assert all(0 <= f < len(group.factors) for f in dim)
            if dim and all(group.factors[f].kind == "parallel" for f in dim):
                product = 1
                for f in dim:
                    product *= group.factors[f].size
                assert product == size


@pytest.mark.parametrize("name", ["plain_tied", "plain_scan", "plain_cond"])
def test_demands_are_of_values_that_are_made_before(name):
    step, args = zoo.get(name).make()
    traced, groups, _ = grouped(step, *args)
    slots: dict[int, list[int]] = {}
    for demand in groups.demands:
        assert demand.value in groups.homes
        assert groups.defined[demand.value] <= demand.position < groups.points
        assert len(demand.dims) == len(traced.graph.values[demand.value].shape)
        slots.setdefault(demand.group, []).append(demand.slot)
    assert all(found == list(range(len(found))) for found in slots.values())


def test_classes_partition_the_groups_and_agree():
    _, groups, _ = grouped(*models.get("mlp").abstract("tiny", 16)[:1], *models.get("mlp").abstract("tiny", 16)[1])
    members = [m for found in groups.classes.values() for m in found]
    assert sorted(members) == list(range(len(groups.groups)))
    for found in groups.classes.values():
        first = groups.groups[found[0]]
        for m in found:
            other = groups.groups[m]
            assert (other.kind, other.factors, other.trips) == (first.kind, first.factors, first.trips)
            assert len(other.ops) == len(first.ops)


def test_elementwise_operations_follow_one_group():
    def loss(state, batch):
        return jnp.sum(jnp.sin(jnp.exp(batch["x"] @ state["w"])) * 3.0)

    def forward(state, batch):
        return state, loss(state, batch)

    _, groups, _ = grouped(forward, {"w": f32(16, 32)}, {"x": f32(8, 16)})
    (product,) = group_of(groups, "dot_general")
    (exp,), (sin,), (mul,) = (group_of(groups, name) for name in ("exp", "sin", "mul"))
    assert product.kind == "heavy"
    assert exp is sin is mul and exp.kind == "light" and exp is not product
    # One demand: the product's result; what follows is made in place.
    (demand,) = [d for d in groups.demands if d.group == exp.index]
    assert groups.homes[demand.value].group == product.index


def test_masks_are_lazy_and_demand_their_small_sources():
    def forward(state, batch):
        mask = jnp.tril(jnp.ones((64, 64), bool))
        return state, jnp.where(mask, batch["x"] @ state["w"] + state["b"], 0.0)

    args = {"w": f32(16, 64), "b": f32(64)}, {"x": f32(64, 16)}
    traced, groups, _ = grouped(forward, *args)
    size = traced.graph.values
    made = [op for op in traced.graph.ops() if op.name in ("iota", "broadcast_in_dim")]
    made_of_nothing = [op for op in made if size[op.results[0]].shape == (64, 64)]
    assert len(made_of_nothing) >= 3
    assert all(value in groups.lazy for op in made_of_nothing for value in op.results)
    (compare,) = [op for op in traced.graph.ops() if op.name == "ge"]
    assert all(value in groups.lazy for value in compare.results)
    # The broadcast bias is wanted as the 64 numbers that it is.
    assert any(size[d.value].shape in ((64,), (1, 64)) for d in groups.demands)


def test_sums_of_partial_sums_are_linear():
    def loss(state, batch):
        h = batch["x"]
        return jnp.sum(jnp.tanh(h @ state["a"] + h @ state["b"]))

    def forward(state, batch):
        return state, loss(state, batch)

    _, groups, _ = grouped(forward, {"a": f32(16, 32), "b": f32(16, 32)}, {"x": f32(8, 16)})
    (addition,) = group_of(groups, "add")
    assert addition.kind == "linear"


def stacks_of(groups: Grouping) -> list[str]:
    """The kinds of the groups of stacked results."""
    return [group.kind for group in groups.groups if group.name == "ys"]


def layer(x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"]), None


def scanned_loss(state, batch):
    return jnp.mean(jax.lax.scan(layer, batch["x"], state)[0] ** 2)


def test_stacked_gradients_of_scanned_layers_may_be_partial_sums():
    """And their biases, whose sums are reshaped; what is saved for the reverse pass may not."""
    _, groups, _ = grouped(descent(scanned_loss), {"w": f32(4, 16, 16), "b": f32(4, 16)}, {"x": f32(8, 16)})
    kinds = stacks_of(groups)
    assert kinds.count("linear") == 2 and set(kinds) == {"linear", "leaf"}


def test_a_stack_of_one_has_no_choice():
    _, groups, _ = grouped(descent(scanned_loss), {"w": f32(1, 16, 16), "b": f32(1, 16)}, {"x": f32(8, 16)})
    assert "linear" not in stacks_of(groups)


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

    traced, groups, _ = grouped(step, {"w": f32(16, 16), "b": f32(16)}, {"x": f32(4, 5, 8, 16)})
    sums = [group for group in groups.groups if group.name == "carry" and group.kind == "linear"]
    assert sorted(group.trips for group in sums) == [4, 4, 4, 20, 20]
    held = {groups.homes[d.value].group for d in groups.demands if d.op >= 0 and traced.graph.values[d.value].shape}
    assert {group.index for group in sums if group.factors} <= held


def test_outputs_of_state_keep_the_groups_of_their_arguments():
    step = descent(lambda state, batch: jnp.mean((batch["x"] @ state["w"]) ** 2))
    traced, groups, _ = grouped(step, {"w": f32(16, 32)}, {"x": f32(8, 16)})
    assert traced.state
    for output, argument in traced.state:
        place = groups.outputs[output]
        assert place is not None and place[0] == groups.leaves[argument]
    literal = [isinstance(atom, Lit) for atom in traced.graph.block.outputs]
    assert [place is None for place in groups.outputs] == literal


def layers_loss(state, batch):
    h = batch["x"]
    for layer in state:
        h = h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
    return jnp.mean(h**2)


@pytest.mark.parametrize("depths", [(8, 9), (8, 16)])
def test_classes_do_not_grow_with_depth(depths):
    counts, sizes = [], []
    for depth in depths:
        state = [{"up": f32(16, 64), "down": f32(64, 16)} for _ in range(depth)]
        _, groups, _ = grouped(descent(layers_loss), state, {"x": f32(8, 16)})
        counts.append(len(groups.classes))
        sizes.append(len(groups.groups))
    assert counts[0] == counts[1]
    assert sizes[0] < sizes[1]


@pytest.mark.slow
def test_classes_of_a_transformer_do_not_grow_with_depth():
    spec = models.get("gpt")
    layers: Any = next(name for name in ("layers", "num_layers", "depth") if hasattr(spec.config("tiny"), name))
    counts = []
    for depth in (4, 8):
        step, args = spec.abstract("tiny", 8, **dict[str, Any]({layers: depth}))
        counts.append(len(grouped(step, *args)[1].classes))
    assert counts[0] == counts[1]


# -- what does not tell layers apart ----------------------------------------------------------------------------------


def classes_of(layers: int, made) -> int:
    """The number of classes of so many layers, each of which weighs with what `made(number, batch)` gives."""

    def loss(state, batch):
        x = batch["x"]
        for number, w in enumerate(state):
            x = jnp.tanh(x @ w) * made(number, batch)
        return jnp.sum(x)

    batch = {"x": f32(32, 16), "rows": f32(12, 16), "ids": jax.ShapeDtypeStruct((32, 1), jnp.int32)}
    _, groups, _ = grouped(descent(loss), [f32(16, 16) for _ in range(layers)], batch)
    return len(groups.classes)


@pytest.mark.parametrize(
    "made",
    [
        lambda number, batch: batch["rows"][number],
        lambda number, batch: jax.lax.dynamic_slice(batch["rows"], (number, 0), (1, 16)),
        lambda number, batch: jnp.where(batch["ids"] > 0, 1.0, 0.5),
    ],
    ids=["a row each", "a row each, cut by a number", "a mask for itself"],
)
def test_layers_are_tied_whichever_of_alike_values_they_read(made):
    assert classes_of(8, made) == classes_of(12, made)


def test_what_is_joined_is_tied_in_any_place():
    def step(state, batch):
        grads = jax.grad(lambda state: sum(jnp.sum((batch["x"] @ w) ** 2) for w in state))(state)
        finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]).all()
        return [jnp.where(finite, p - 0.1 * g, p) for p, g in zip(state, grads, strict=True)]

    few, many = (
        grouped(step, [f32(16, 32) for _ in range(layers)], {"x": f32(32, 16)})[1].classes for layers in (6, 12)
    )  # fmt: skip
    assert len(few) == len(many)


def test_operands_that_are_not_alike_are_told_apart():
    """Two weights of equal shape of which one is a scale and the other an offset, in one chain of operations."""
    groups = grouped(
        descent(lambda state, batch: jnp.sum(jnp.tanh(batch["x"] * state["scale"] + state["offset"]))),
        {"scale": f32(32, 16), "offset": f32(32, 16)}, {"x": f32(32, 16)},
    )[1]  # fmt: skip
    scale, offset = (groups.groups[groups.leaves[n]].color for n in (1, 0))
    assert scale != offset
