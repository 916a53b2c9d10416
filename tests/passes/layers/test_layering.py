"""Layers and stages: what is forward, where it is cut, and that every assignment computes the step."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Traced, check
from alpa_lite.passes import factors
from alpa_lite.passes.layers import cuts as layering_cuts
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.layering import cut_into_layers
from alpa_lite.passes.layers.types import Assignment, Layer, Layering
from alpa_lite.passes.stages.planning import digest
from alpa_lite.passes.stages.staging import stage_graphs
from gallery.batches import normal
from gallery.steps import sgd
from tests import pipeline_driver
from tests.passes import microbatched

GPT: dict[str, Any] = {"hidden": 32, "heads": 2, "seq": 8, "vocab": 64, "dtype": jnp.float32}
RESIDUAL = 4 * 8 * 32 * 4  # bytes of a micro-batch's residual stream in `GPT`
SGD = optax.sgd(0.1, momentum=0.9)  # its momentum is the gradient


def layered(traced: Traced, **options: Any) -> Layering:
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return cut_into_layers(traced, microbatched.scan_of(traced), rules, **options)


def layers_of(step: Any, *arguments: Any, **options: Any) -> Layering:
    return layered(microbatched.traced_of(step, *arguments), **options)


def layers_of_loss(loss_fn: Any, params: Any, batch: Any, **options: Any) -> Layering:
    """Layers of a step of descent on a loss."""
    step, state = microbatched.step_of(loss_fn, params, 2, SGD)
    return layers_of(step, state, batch, **options)


def even(layers: Layering, stages: int) -> list[int]:
    return [round(len(layers.layers) * k / stages) for k in range(1, stages)]


def sent(layers: Layering, assignment: Assignment) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """(from, to) -> the shapes of what goes there of a micro-batch."""
    defined = {value: op for op in layers.body.ops for value in op.results}
    found: dict[tuple[int, int], set[int]] = {}
    for op in layers.body.ops:
        for value in () if op.index in assignment.dissolved_additions | assignment.shared_ops else op.reads:
            made = defined.get(value)
            if made is not None and made.index not in assignment.shared_ops:
                ends = assignment.stage[made.index], assignment.stage[op.index]
                if ends[0] != ends[1]:
                    found.setdefault(ends, set()).add(value)
    return {ends: [layers.traced.graph.values[v].shape for v in some] for ends, some in found.items()}


@functools.cache
def gpt() -> Layering:
    """Four blocks between an embedding and a head of its own."""
    return layers_of(*microbatched.zoo("gpt", 2, layers=4, tied=False, **GPT), max_layers=6)


def test_alike_blocks_are_alike_layers_cut_at_the_residual_stream():
    layers = gpt()
    prints = [layer.fingerprint for layer in layers.layers]
    assert len(prints) == 6 and len(set(prints[1:5])) == 1
    assert [layer.bytes_out for layer in layers.layers] == [RESIDUAL] * 5 + [0]
    ops = [index for layer in layers.layers for index in layer.ops]
    assert set(ops) == layers.forward and len(set(ops)) == len(ops)
    assert not any("transpose" in str(op.source.name_stack) for op in layers.body.ops if op.index in layers.forward)


def test_a_pipeline_sends_the_residual_stream_and_its_cotangent_alone():
    layers = gpt()
    for stages in (2, 3, 4):
        links = [ends for s in range(stages - 1) for ends in ((s, s + 1), (s + 1, s))]
        assert sent(layers, assign(layers, even(layers, stages))) == {ends: [(4, 8, 32)] for ends in links}


def test_state_and_gradients_of_parameters_are_at_home_with_their_layer():
    layers = gpt()
    traced, assignment = layers.traced, assign(layers, [3])
    for number, argument in enumerate(traced.arguments):
        stage, path = assignment.home[traced.graph.block.inputs[number]], argument.path
        if "blocks" in path:
            assert stage == int(path.split("['layers'][")[1].split("]")[0]) // 2, path
        elif "head" in path or "['norm']" in path:
            assert stage == 1, path
        elif "tokens" in path or "positions" in path or "count" in path:
            assert stage == 0, path
    products = [op.index for op in layers.body.ops if op.name == "dot_general" and op.index in assignment.phases.number]
    # Each block: six projections, and two products of attention that have two gradients of activations each.
    assert (
        len(products) == 4 * (6 * 2 + 4) + 2 and [assignment.phases.number[i] for i in products].count(2) == 4 * 6 + 1
    )


@pytest.mark.slow
def test_as_many_layers_as_allowed_of_whole_repeats():
    traced = microbatched.traced_of(*microbatched.zoo("gpt", 2, layers=12, **GPT))
    for most, alike in [(1, 0), (2, 0), (5, 3), (8, 6), (14, 12), (40, 24)]:
        prints = [layer.fingerprint for layer in layered(traced, max_layers=most).layers]
        assert len(prints) <= most
        if alike == 24:  # attention and feed-forward apart
            assert len(prints) == 26 and len(set(prints[1:-1])) == 2
        elif alike:
            assert max(prints.count(p) for p in prints) == alike


def test_gradients_inside_the_loss_are_forward():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def energy(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ params["w"]).sum()

        return (jax.grad(energy)(batch["x"]) ** 2).mean() + energy(batch["x"]) * 0.1

    layers = layers_of_loss(loss_fn, {"w": normal(0, 8, 8)}, {"x": normal(1, 4, 8)})
    stacks = {op.index: str(op.source.name_stack) for op in layers.body.ops}
    inner = {i for i, s in stacks.items() if "jvp(transpose(" in s and "transpose(jvp(transpose" not in s}
    outer = {i for i, s in stacks.items() if s.startswith("transpose")}
    assert inner and inner <= layers.forward
    assert outer and not outer & layers.forward


def test_a_body_without_marks_is_split_by_order():
    def step(state: Any, batch: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            total, sums = carry
            hidden = jnp.tanh(x @ state["w"])
            loss = (hidden**2).mean()
            back = 2 * hidden / hidden.size * (1 - hidden**2)
            return (total + loss, sums + x.T @ back), None

        (total, sums), _ = jax.lax.scan(body, (jnp.zeros(()), jnp.zeros_like(state["w"])), batch.reshape(2, 4, 8))
        return {"w": state["w"] - 0.1 * sums}, total

    layers = layers_of(step, {"w": normal(0, 8, 8)}, normal(1, 8, 8))
    assert [op.name for op in layers.body.ops if op.index not in layers.forward].count("dot_general") == 1
    for stage in stage_graphs(layers.traced, layers.scan, assign(layers, even(layers, 2))):
        check(stage.traced.graph)


def test_the_gradient_of_looked_up_rows_is_added_up_where_they_are():
    """The lookup is done once a step, before the micro-batches, and its transpose after them."""

    @sgd
    def step(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["first"] + params["table"][jnp.arange(4)]
        for w in params["weights"]:
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    state = {"table": normal(9, 16, 8), "first": normal(8, 8, 8), "weights": [normal(i, 8, 8) for i in range(4)]}
    cut = pipeline_driver.staged(step, (state, {"x": normal(20, 4, 4, 8)}), 2, 2, cuts=[1])
    layers, values = cut.layers, cut.traced.graph.values
    (row,) = (i for i, v in enumerate(layers.scan_op.results) if values[v].shape == (4, 8))
    made = {value: op for op in layers.body.ops for value in op.results}
    assert cut.assignment.stage[made[layers.body.outputs[row]].index] == 0  # type: ignore[index]
    homes = dict(zip((a.path for a in cut.traced.arguments), cut.traced.graph.block.inputs, strict=False))
    assert cut.assignment.home[homes["state['table']"]] == 0


def test_gradients_of_biases_and_regularisers_run_with_their_parameters():
    """What crosses is the activation and its cotangent, and the regularisers' sum."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w, b in params:
            x = jnp.tanh(x @ w) + b
        return (x**2).mean() + 0.01 * sum((w**2).sum() for w, _ in params)

    params = [(normal(i, 8, 8), normal(i + 9, 8)) for i in range(4)]
    layers = layers_of_loss(loss_fn, params, {"x": normal(20, 8, 8)})
    assignment = assign(layers, even(layers, 2))
    assert assignment.split_sums == ()
    crossing = sent(layers, assignment)
    assert set(crossing) == {(0, 1), (1, 0)} and all(shapes.count((4, 8)) == 1 for shapes in crossing.values())
    assert {shape for shapes in crossing.values() for shape in shapes} <= {(4, 8), ()}
    homes = zip(layers.traced.arguments, layers.traced.graph.block.inputs, strict=False)
    stages = [assignment.home[v] for a, v in homes if "params" in a.path]
    assert stages == sorted(stages) and set(stages) == {0, 1}


def test_first_products_gradient_runs_where_its_weights_are():
    """x^T dy of a stage's first product reads an activation of the stage before, which was sent there anyway."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = x @ w
        return (x**2).mean()

    layers = layers_of_loss(loss_fn, [normal(i, 8, 8) / 3 for i in range(4)], {"x": normal(20, 8, 8)}, max_layers=5)
    assignment = assign(layers, [1, 2, 3])
    products = [op for op in layers.body.ops if op.name == "dot_general" and op.index in assignment.phases.number]
    assert [sum(assignment.stage[op.index] == s for op in products) for s in range(4)] == [1, 2, 2, 2]


def test_a_mask_of_the_batch_on_every_stage_draws_no_gradient_product():
    """The batch is on every stage, for its mask; the gradient of the first weights still runs where they are."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        mask = batch["x"][:, :1] > 0
        x = batch["x"] @ params["tied"]
        for w in params["layers"]:
            x = jnp.where(mask, jnp.tanh(x @ w), x)
        return ((x @ params["tied"].T) ** 2).mean()

    params = {"tied": normal(9, 16, 16) / 4, "layers": [normal(i, 16, 16) / 4 for i in range(3)]}
    layers = layers_of_loss(loss_fn, params, {"x": normal(20, 8, 16)})
    assignment = assign(layers, range(1, len(layers.layers)))
    products = [o.index for o in layers.body.ops if o.name == "dot_general" and o.index in layers.forward]
    ((_, parts),) = assignment.split_sums
    assert {stage for _, stage in parts} == {assignment.stage[products[0]], assignment.stage[products[-1]]}
    assert assignment.stage[products[0]] == 0 < assignment.stage[products[-1]]


def test_shared_masks_and_casts_run_on_every_stage():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        half = [w.astype(jnp.bfloat16) for w in params]
        mask = (batch["x"][..., :1] > 0).astype(jnp.bfloat16)
        x = batch["x"].astype(jnp.bfloat16)
        for w in (*half, jax.lax.stop_gradient(half[0])):
            x = jnp.tanh(x @ w) * mask
        return (x.astype(jnp.float32) ** 2).mean()

    layers = layers_of_loss(loss_fn, [normal(i, 16, 16) for i in range(3)], {"x": normal(5, 8, 16)})
    assert len(layers.layers) >= 4
    assignment = assign(layers, even(layers, 4))
    shared = [op.name for op in layers.body.ops if op.index in assignment.shared_ops]
    assert "gt" in shared
    assert shared.count("convert_element_type") == 2  # of the mask, and of the weights that two stages use
    for (source, target), crossing in sent(layers, assignment).items():
        assert abs(source - target) == 1 and crossing == [(4, 16)], (source, target)


def test_a_mask_made_once_for_all_blocks_gives_the_layers_of_one_made_in_each():
    """Layers, what crosses them, and which stages are identical, so that they are priced once."""

    def layers_with(once: bool) -> Layering:
        def causal() -> jax.Array:
            rows = jnp.arange(8)
            return (rows[:, None] >= rows).astype(jnp.float32)

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            x, made = batch["x"], causal()
            for w, v in params:
                scores = jnp.einsum("bsd,btd->bst", jnp.tanh(x @ w), x)
                scores = jnp.where((made if once else causal()) > 0, scores, -1e9)
                x = x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), x) @ v
            return (x**2).mean()

        weights = [(normal(i, 16, 16), normal(9 + i, 16, 16)) for i in range(4)]
        return layers_of_loss(loss_fn, weights, {"x": normal(5, 8, 8, 16)})

    one, each = layers_with(True), layers_with(False)
    assert [layer.bytes_out for layer in one.layers] == [layer.bytes_out for layer in each.layers]
    kinds = []
    for layers in (one, each):
        marks = [layer.fingerprint for layer in layers.layers]
        graphs = stage_graphs(layers.traced, layers.scan, assign(layers, range(1, len(marks))))
        stages = [digest(graph) for graph in graphs]
        kinds.append(([marks.index(mark) for mark in marks], [stages.index(stage) for stage in stages]))
    assert kinds[0] == kinds[1]
    assert len(set(kinds[0][1])) < len(one.layers)


def test_bad_arguments_are_named():
    traced = microbatched.traced_of(*microbatched.zoo("mlp", 2))
    with pytest.raises(OptionError, match="max_layers=0"):
        layered(traced, max_layers=0)
    with pytest.raises(ValueError, match="scan=0"):
        cut_into_layers(traced, 0, factors.rules_of(traced.graph.ops(), traced.graph.values))
    layers = layered(traced)
    for cuts in ([0], [2, 2], [len(layers.layers)]):
        with pytest.raises(OptionError, match="cuts="):
            assign(layers, cuts)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_dynamic_program_is_exact(sizes: list[tuple[int, int]], most: int):
    atoms = [Layer((i,), float(t), str(i), c) for i, (t, c) in enumerate(sizes)]
    total = sum(a.seconds for a in atoms)
    mean = max(total / most, max(a.seconds for a in atoms) / 3)
    bound = 10.0 * mean  # wide, so that all cuttings are allowed
    typical = max(1.0, float(np.median([*(a.bytes_out for a in atoms)])))
    aimed = max(1.0, total / mean)

    def cost(ends: tuple[int, ...]) -> float:
        bounds = [0, *ends, len(atoms)]
        spans = [sum(a.seconds for a in atoms[i:j]) for i, j in itertools.pairwise(bounds)]
        cut = sum((1 + atoms[e - 1].bytes_out / typical) / (2 * aimed) for e in ends)
        return cut + aimed * sum((t / total) ** 2 for t in spans) if max(spans) <= bound else np.inf

    best = min(cost(ends) for k in range(most) for ends in itertools.combinations(range(1, len(atoms)), k))
    found = layering_cuts.balance_layers(atoms, most, mean, 9.0)
    assert cost(tuple(np.cumsum(found)[:-1].tolist())) == pytest.approx(best)


ENDS = st.lists(st.integers(0, 1), max_size=3)


@given(st.integers(1, 4), st.integers(2, 6), ENDS, ENDS)
@settings(max_examples=60, deadline=None)
def test_repeats_are_found(period: int, count: int, before: list[int], after: list[int]):
    marks = [f"b{i}{x}" for i, x in enumerate(before)] + [f"r{i}" for i in range(period)] * count
    marks += [f"a{i}{x}" for i, x in enumerate(after)]
    atoms = [Layer((i,), 1.0, mark, 1) for i, mark in enumerate(marks)]
    assert layering_cuts.repeats(atoms) == [(len(before), period, count)]
