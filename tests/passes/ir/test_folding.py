"""Folding of repeated layers: plans of folded steps are those of whole ones, and only copies are folded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.compilation import folded_steps
from alpa_lite.ir import graph
from alpa_lite.passes.ir import folding, repeats
from alpa_lite.passes.tracing import tracing
from gallery.batches import normal

LAYERS, WIDTH = 14, 32
ODD = 6
"""The layer that differs, one of those that would be left out."""

Step = Any


def layer(h: Any, weights: Any) -> Any:
    scaled = h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-5) * weights["scale"]
    return h + jnp.tanh(scaled @ weights["up"] + weights["bias"]) @ weights["down"]


def adam(state: Any, grads: Any) -> Any:
    """New weights and moments, one kind after the other over all leaves, as Optax computes them."""
    weights, first, second = state
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, grads)
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-8), first, second)
    return jax.tree.map(lambda w, u: w - 1e-3 * u, weights, updates), first, second


def make(loss: Any) -> Step:
    def step(state, batch):
        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(state[0], batch)
        return adam(state, grads), value, extra

    return step


def loss_of(layer_of: Any) -> Any:
    def loss(weights, batch):
        h, extra = batch["x"], []
        for number, name in enumerate(sorted(weights["layers"], key=int)):
            h = layer_of(number, h, weights["layers"][name], extra)
        return jnp.mean((h - batch["y"]) ** 2), extra

    return loss


def weights_of(number: int, inner: int) -> Any:
    shapes = {"up": (WIDTH, inner), "bias": (inner,), "down": (inner, WIDTH), "scale": (WIDTH,)}
    return {name: 0.1 * normal(number, *shape) for name, shape in shapes.items()}


def arguments(layers: int = LAYERS, inner: Sequence[int] = (4 * WIDTH,)) -> Any:
    """The state and the batch of layers of inner widths that repeat; those of one width are not in order of names."""
    digits = 1 if len(inner) == 1 else 3
    every = {f"{n:0{digits}}": weights_of(n, inner[n % len(inner)]) for n in range(layers)}
    weights = {"layers": every, "unused": normal(99, WIDTH)}
    moments = [jax.tree.map(jnp.zeros_like, weights) for _ in range(2)]
    return (weights, *moments), {"x": normal(20, 64, WIDTH), "y": normal(21, 64, WIDTH)}


def whole_if(number: int, h: Any, weights: Any, extra: Any) -> Any:
    del number, extra
    return layer(h, weights)


def constant(number: int, h: Any, weights: Any, extra: Any) -> Any:
    del extra
    return layer(h, weights) * (2.0 if number == ODD else 1.5)


def dtype(number: int, h: Any, weights: Any, extra: Any) -> Any:
    del extra
    if number != ODD:
        return layer(h, weights)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (h, weights))
    return layer(*half).astype(jnp.float32)


def stopped(number: int, h: Any, weights: Any, extra: Any) -> Any:
    del extra
    return layer(jax.lax.stop_gradient(h) if number == ODD else h, weights)


def frozen(number: int, h: Any, weights: Any, extra: Any) -> Any:
    del extra
    return layer(h, jax.lax.stop_gradient(weights) if number == ODD else weights)


def returned(number: int, h: Any, weights: Any, extra: Any) -> Any:
    h = layer(h, weights)
    extra += [h] if number == ODD else []
    return h


def skipped(number: int, h: Any, weights: Any, extra: Any) -> Any:
    """The odd layer reads the input of the step again."""
    extra += [h] if number == 0 else []
    out = layer(h + extra[0] if number == ODD else h, weights)
    return out


def masked(number: int, h: Any, weights: Any, extra: Any) -> Any:
    """Each layer makes a mask from a number of its own."""
    del extra
    mask = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), 7919 * number), 0.9, h.shape)
    return layer(jnp.where(mask, h, 0.0), weights)


def row(number: int, h: Any, weights: Any, extra: Any) -> Any:
    """Each layer reads a row of its own of one array, which all rows are sharded with."""
    extra += [] if extra else [jnp.tanh(h[:LAYERS])]
    return layer(h, weights) + extra[0][number]


def traced_of(layer_of: Any, *sizes: Any) -> Any:
    return tracing.trace(make(loss_of(layer_of)), arguments(*sizes), {})


def plan_of(monkeypatch: Any, layer_of: Any, method: Any, is_folded: bool, layers: int = LAYERS) -> Any:
    monkeypatch.setattr(folded_steps, "MIN_OPERATIONS", 0 if is_folded else 1 << 40)
    shapes = jax.eval_shape(lambda: arguments(layers))
    return alpa_lite.make_plan(
        make(loss_of(layer_of)), *shapes, cluster=Cluster.preset("a100"), method=method, memory_per_device=2**30
    )


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two parts of plans differ, but for the rounding of sums."""
    if isinstance(one, float) and isinstance(other, float):
        return [] if one == pytest.approx(other, rel=1e-9) else [f"{path}: {one} {other}"]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for n, pair in pairs for line in differences(*pair, f"{path}/{n}")]
    return [] if one == other else [f"{path}: {str(one)[:80]} {str(other)[:80]}"]


def fields_of(plan: Any) -> Any:
    found = json.loads(json.dumps(plan.to_json()))["plan"]
    del found["verification"]
    for stage in found["stages"]:
        del stage["memory"]["over_step"]  # a drawing of those points of the step that its memory depends on
    return found


METHODS = [alpa_lite.Auto(), alpa_lite.Zero(3), alpa_lite.TensorParallel(), alpa_lite.DataParallel()]


@pytest.mark.parametrize(
    ("layer_of", "method"),
    [*((whole_if, method) for method in METHODS), (masked, alpa_lite.Auto())],
    ids=lambda part: getattr(part, "__name__", type(part).__name__),
)
def test_the_plan_of_a_folded_step_is_that_of_the_whole_one(layer_of, method, monkeypatch):
    """Decisions, seconds, memory, and the listings of every layer; the check of the folded program passes, too."""
    short, whole = (plan_of(monkeypatch, layer_of, method, is_folded) for is_folded in (True, False))
    assert any("one copy of a repeated layer stands for" in line for line in short.verification)
    assert differences(fields_of(short), fields_of(whole)) == []


NEAR = [constant, dtype, stopped, frozen, returned, skipped]


@pytest.mark.parametrize("layer_of", NEAR, ids=lambda layer_of: layer_of.__name__)
def test_a_layer_that_differs_is_never_left_out(layer_of, monkeypatch):
    """In a constant, a dtype, where its gradient ends, what it returns or what it reads: every pass has it."""
    traced = traced_of(layer_of)
    short = folding.fold(traced)
    if short is not None:
        graph.check(short.graph)
        left_out = {
            n for n, own in enumerate(short.copies.arguments) if traced.arguments[n] is not short.arguments[own]
        }
        assert not [n for n in left_out if f"['layers']['{ODD}']" in traced.arguments[n].path]
    one, other = (plan_of(monkeypatch, layer_of, alpa_lite.Auto(), is_folded) for is_folded in (True, False))
    assert differences(fields_of(one), fields_of(other)) == []


def test_layers_that_decide_together_are_planned_whole(monkeypatch):
    """One group has operations of all layers: a folded step has fewer of them, and is not planned."""
    assert folding.fold(traced_of(row)) is not None
    one, other = (plan_of(monkeypatch, row, alpa_lite.Auto(), is_folded) for is_folded in (True, False))
    assert one.verification == other.verification
    assert differences(fields_of(one), fields_of(other)) == []


def test_layers_that_repeat_in_threes_are_folded_in_threes():
    short = folding.fold(traced_of(whole_if, 42, (4 * WIDTH, 2 * WIDTH, WIDTH)))
    assert short is not None and short.copies.count == 3
    graph.check(short.graph)


def test_depth_adds_nothing_to_a_folded_step():
    few, many = (folding.fold(traced_of(whole_if, layers)) for layers in (LAYERS, 2 * LAYERS))
    assert few is not None and many is not None
    assert [op.key for op in few.graph.block.ops] == [op.key for op in many.graph.block.ops]
    assert many.copies.count - few.copies.count == LAYERS
    graph.check(many.graph)


def test_too_few_layers_and_layers_that_one_operation_reads_are_not_folded():
    assert folding.fold(traced_of(whole_if, 7)) is None

    def joined(weights, batch):
        value, extra = loss_of(whole_if)(weights, batch)
        return value + jnp.concatenate([one["bias"] for one in weights["layers"].values()]).std(), extra

    assert folding.fold(tracing.trace(make(joined), arguments(), {})) is None


@pytest.mark.parametrize("method", [alpa_lite.Auto(), alpa_lite.Zero(3)], ids=lambda method: type(method).__name__)
def test_a_step_that_was_planned_folded_runs_whole(method, monkeypatch):
    monkeypatch.setattr(folded_steps, "MIN_OPERATIONS", 0)
    step, args = make(loss_of(whole_if)), arguments()
    run = alpa_lite.parallelize(step, method=method, cluster=Cluster.local(jax.devices()[:4]))
    assert any("one copy of a repeated layer" in line for line in run.plan(*args).verification)
    for got, want in zip(*map(jax.tree.leaves, (run(*args), jax.jit(step)(*arguments()))), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_pieces_that_move_twice_begin_where_they_began_after_once() -> None:
    """Though a step may begin with operations that equal the last ones of a piece."""

    def step(x: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(jnp.sin(x))
        return jnp.sin(x)

    whole = tracing.trace(step, (jax.ShapeDtypeStruct((4,), jnp.float32),), {}).graph
    ops, layers = whole.block.ops, np.zeros(len(whole.values) + 1, dtype=int)
    layers[list(whole.block.inputs)] = repeats.OUTSIDE  # so that the first sine belongs to no layer
    stretch = repeats.Stretch(ops, 0, 2, len(ops))
    assert stretch.slack == 1
    stretch.move(layers)
    start = stretch.start
    for _ in range(3):
        stretch.move(layers)
    assert stretch.start == start == 1
