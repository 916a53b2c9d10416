"""Layers and stages: what is forward, where it is cut, and that every assignment computes the step."""

from __future__ import annotations

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
from alpa_lite.ir.graph import Traced
from alpa_lite.passes import factors
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.layers import cuts as layering_cuts
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.layering import layering
from alpa_lite.passes.layers.types import Assignment, Layer, Layering
from alpa_lite.passes.stages.planning import digest
from alpa_lite.passes.stages.staging import stage_graphs
from tests import pipeline_driver
from tests.passes import microbatched, staged
from tests.zoo_base import attend, cross_entropy, normal, tokens

GPT: dict[str, Any] = {"hidden": 32, "heads": 2, "seq": 8, "vocab": 64, "dtype": jnp.float32}
RESIDUAL = 4 * 8 * 32 * 4  # bytes of a micro-batch's residual stream in `GPT`


SGD = optax.sgd(0.1, momentum=0.9)  # its momentum is the gradient


def layered(traced: Traced, **options: Any) -> Layering:
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return layering(traced, microbatched.scan_of(traced), rules, **options)


def layers_of(step: Any, *arguments: Any, **options: Any) -> Layering:
    return layered(microbatched.traced_of(step, *arguments), **options)


def even(layers: Layering, stages: int) -> list[int]:
    return [round(len(layers.layers) * k / stages) for k in range(1, stages)]


def sent(layers: Layering, assignment: Assignment) -> dict[tuple[int, int], set[int]]:
    """(from, to) -> the values of a micro-batch that go there."""
    defined = {value: op for op in layers.body.ops for value in op.results}
    found: dict[tuple[int, int], set[int]] = {}
    for op in layers.body.ops:
        for value in () if op.index in assignment.dissolved | assignment.shared else op.reads:
            made = defined.get(value)
            if made is not None and made.index not in assignment.shared:
                ends = assignment.stage[made.index], assignment.stage[op.index]
                if ends[0] != ends[1]:
                    found.setdefault(ends, set()).add(value)
    return found


def assert_equal_to_step(layers: Layering, assignment: Assignment, *arguments: Any) -> None:
    """Runs the assignment and compares with the step."""
    leaves = jax.tree.leaves((arguments, {}))
    actual = jax.jit(lambda *x: staged.run(layers, assignment, x))(*leaves)
    expected = jax.jit(lambda *x: evaluation.evaluate(layers.traced.graph, x))(*leaves)
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


def assert_complete(layers: Layering, assignment: Assignment) -> None:
    """Every op has a stage; shared ops read only inputs and shared ops; weight ops feed weight ops of their stage."""
    top, body = layers.traced.graph.block, layers.body
    for op in (*top.ops, *body.ops):
        if op.index != layers.scan:
            assert 0 <= assignment.stage[op.index] < assignment.num_stages
    defined = {value: op for op in (*top.ops, *body.ops) for value in op.results}
    for op in (*top.ops, *body.ops):
        if op.index in assignment.shared:
            assert all(v not in defined or defined[v].index in assignment.shared for v in op.reads), op.name
    for op in body.ops:
        for value in op.reads:
            made = defined.get(value)
            if made is not None and made.index in assignment.weight and op.index not in assignment.dissolved:
                assert op.index in assignment.weight
                assert assignment.stage[made.index] == assignment.stage[op.index]
    assert set(assignment.home) == set(top.inputs)


def test_alike_blocks_are_alike_layers_cut_at_the_residual_stream():
    layers = layers_of(*microbatched.zoo("gpt", 2, layers=12, **GPT))
    prints = [layer.fingerprint for layer in layers.layers]
    assert len(prints) == 14
    assert len(set(prints[1:13])) == 1
    assert [layer.bytes_out for layer in layers.layers] == [RESIDUAL] * 13 + [0]
    ops = [index for layer in layers.layers for index in layer.ops]
    assert ops == list(layers.order)
    assert set(ops) == layers.forward
    assert len(set(ops)) == len(ops)


@pytest.mark.slow
def test_as_many_layers_as_allowed_of_whole_repeats():
    traced = microbatched.traced_of(*microbatched.zoo("gpt", 2, layers=12, **GPT))
    for most, alike in [(1, 0), (2, 0), (5, 3), (8, 6), (14, 12), (40, 24)]:
        layers = layered(traced, max_layers=most)
        assert len(layers.layers) <= most
        prints = [layer.fingerprint for layer in layers.layers]
        if alike == 24:  # attention and feed-forward apart
            assert len(prints) == 26
            assert len(set(prints[1:-1])) == 2
        elif alike:
            assert max(prints.count(p) for p in prints) == alike


def test_forward_ends_with_the_loss():
    step, state, batch = microbatched.zoo("gpt", 2, layers=2, **GPT)
    layers = layers_of(step, state, batch)
    for op in layers.body.ops:
        stack = str(op.source.name_stack)
        assert (op.index in layers.forward) == ("transpose" not in stack and op.index < layers.body.ops[-36].index), (
            stack
        )


def test_gradients_inside_the_loss_are_forward():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def energy(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ params["w"]).sum()

        return (jax.grad(energy)(batch["x"]) ** 2).mean() + energy(batch["x"]) * 0.1

    step, state = microbatched.step_of(loss_fn, {"w": normal(0, 8, 8)}, 2, SGD)
    layers = layers_of(step, state, {"x": normal(1, 4, 8)})
    inner = [op for op in layers.body.ops if "jvp(transpose(" in str(op.source.name_stack)]
    assert inner
    assert all(op.index in layers.forward for op in inner if "transpose(jvp(transpose" not in str(op.source.name_stack))
    outer = [op for op in layers.body.ops if str(op.source.name_stack).startswith("transpose")]
    assert outer
    assert all(op.index not in layers.forward for op in outer)


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

    state, batch = {"w": normal(0, 8, 8)}, normal(1, 8, 8)
    layers = layers_of(step, state, batch)
    names = [op.name for op in layers.body.ops if op.index not in layers.forward]
    assert names.count("dot_general") == 1
    assignment = assign(layers, even(layers, min(2, len(layers.layers))))
    assert_complete(layers, assignment)
    assert_equal_to_step(layers, assignment, state, batch)


MODELS: list[Any] = [
    pytest.param("mlp", {}, id="mlp"),
    pytest.param(
        "gpt",
        {"layers": 2, **GPT, "tied": False, "remat": True},
        id="remat",
        marks=[pytest.mark.slow, pytest.mark.thorough],
    ),
    pytest.param("gpt", {"layers": 4, **GPT, "scan": True}, id="scan", marks=pytest.mark.slow),
    pytest.param("gpt", {"layers": 4, **GPT}, id="gpt", marks=[pytest.mark.slow, pytest.mark.thorough]),
    pytest.param("moe", {"dtype": jnp.float32}, id="moe", marks=[pytest.mark.slow, pytest.mark.thorough]),
    pytest.param("unet", {"dtype": jnp.float32}, id="unet", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_every_assignment_computes_the_step(name: str, options: dict[str, Any]):
    arguments = microbatched.zoo(name, 2, batch=4, tx=SGD, **options)
    layers = layers_of(*arguments)
    for stages in {2, 3, 4, len(layers.layers)} - {1}:
        if stages <= len(layers.layers):
            assert_complete(layers, assign(layers, even(layers, stages)))
    stages = min(4, len(layers.layers))
    assert_equal_to_step(layers, assign(layers, even(layers, stages)), *arguments[1:])


def test_a_pipeline_sends_the_residual_stream_and_its_cotangent_alone():
    layers = layers_of(*microbatched.zoo("gpt", 2, layers=4, **GPT))
    for stages in (2, 3, 4):
        assignment = assign(layers, even(layers, stages))
        values = layers.traced.graph.values
        found = {ends: [values[v].nbytes for v in vs] for ends, vs in sent(layers, assignment).items()}
        expected = {(s, s + 1): [RESIDUAL] for s in range(stages - 1)}
        expected |= {(s + 1, s): [RESIDUAL] for s in range(stages - 1)}
        assert found == expected


def test_tied_embeddings_accumulate_on_both_stages():
    step, state, batch = microbatched.zoo("gpt", 2, layers=1, **GPT)
    layers = layers_of(step, state, batch)
    assignment = assign(layers, even(layers, 2))
    ((carry, parts),) = assignment.split_sums
    assert {stage for _, stage in parts} == {0, 1}
    values = layers.traced.graph.values
    assert {values[v].shape for v, _ in parts} == {(64, 32)}
    assert values[layers.scan_op.results[carry]].shape == (64, 32)
    assert len(assignment.dissolved) == 2
    assert_equal_to_step(layers, assignment, state, batch)


def test_state_is_at_home_with_its_layer():
    step, state, batch = microbatched.zoo("gpt", 2, layers=4, **GPT, tied=False)
    traced = microbatched.traced_of(step, state, batch)
    layers = layered(traced)
    assignment = assign(layers, even(layers, 2))
    for number, argument in enumerate(traced.arguments):
        stage = assignment.home[traced.graph.block.inputs[number]]
        if "blocks" in argument.path:
            block = int(argument.path.split("['layers'][")[1].split("]")[0])
            assert stage == block // 2, argument.path
        if "head" in argument.path or "['norm']" in argument.path:
            assert stage == 1, argument.path
        if "tokens" in argument.path or "positions" in argument.path or "count" in argument.path:
            assert stage == 0, argument.path


def test_the_gradient_of_looked_up_rows_is_added_up_where_they_are():
    """The lookup is done once a step, before the micro-batches, and its transpose after them."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["first"] + params["table"][jnp.arange(4)]
        for w in params["weights"]:
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = {"table": normal(9, 16, 8), "first": normal(8, 8, 8), "weights": [normal(i, 8, 8) for i in range(4)]}
    cut = pipeline_driver.staged(step, (state, {"x": normal(20, 4, 4, 8)}), 2, 2, cuts=[1])
    layers, values = cut.layers, cut.traced.graph.values
    (row,) = (i for i, v in enumerate(layers.scan_op.results) if values[v].shape == (4, 8))
    made = {value: op for op in layers.body.ops for value in op.results}
    assert cut.assignment.stage[made[layers.body.outputs[row]].index] == 0  # type: ignore[index]
    homes = dict(zip((a.path for a in cut.traced.arguments), cut.traced.graph.block.inputs, strict=False))
    assert cut.assignment.home[homes["state['table']"]] == 0


def test_bias_gradients_run_with_the_bias():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w, b in params:
            x = jnp.tanh(x @ w) + b
        return (x**2).mean()

    params = [(normal(i, 8, 8), normal(i + 9, 8)) for i in range(4)]
    step, state = microbatched.step_of(loss_fn, params, 2, SGD)
    batch = {"x": normal(20, 8, 8)}
    layers = layers_of(step, state, batch)
    assignment = assign(layers, even(layers, 2))
    assert sorted(map(len, sent(layers, assignment).values())) == [1, 1]
    homes = [assignment.home[v] for v in layers.traced.graph.block.inputs]
    roles = [a.path for a in layers.traced.arguments]
    assert [h for h, r in zip(homes, roles, strict=True) if "params" in r] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert_equal_to_step(layers, assignment, state, batch)


def test_first_products_gradient_runs_where_its_weights_are():
    """x^T dy of a stage's first product reads an activation of the stage before, which was sent there anyway."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = x @ w
        return (x**2).mean()

    step, state = microbatched.step_of(loss_fn, [normal(i, 8, 8) / 3 for i in range(4)], 2, SGD)
    batch = {"x": normal(20, 8, 8)}
    layers = layers_of(step, state, batch, max_layers=5)
    assignment = assign(layers, [1, 2, 3])
    products = [op for op in layers.body.ops if op.name == "dot_general" and op.index in assignment.backward]
    counts = [sum(assignment.stage[op.index] == s for op in products) for s in range(4)]
    assert counts == [1, 2, 2, 2]
    assert_equal_to_step(layers, assignment, state, batch)


def test_a_mask_of_the_batch_on_every_stage_draws_no_gradient_product():
    """The batch is on every stage, for its mask; the gradient of the first weights still runs where they are."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        mask = batch["x"][:, :1] > 0
        x = batch["x"] @ params["tied"]
        for w in params["layers"]:
            x = jnp.where(mask, jnp.tanh(x @ w), x)
        return ((x @ params["tied"].T) ** 2).mean()

    params = {"tied": normal(9, 16, 16) / 4, "layers": [normal(i, 16, 16) / 4 for i in range(3)]}
    step, state = microbatched.step_of(loss_fn, params, 2, SGD)
    batch = {"x": normal(20, 8, 16)}
    layers = layers_of(step, state, batch)
    assignment = assign(layers, range(1, len(layers.layers)))
    products = [o.index for o in layers.body.ops if o.name == "dot_general" and o.index in layers.forward]
    ((_, parts),) = assignment.split_sums
    assert {stage for _, stage in parts} == {assignment.stage[products[0]], assignment.stage[products[-1]]}
    assert assignment.stage[products[0]] == 0 < assignment.stage[products[-1]]
    assert_equal_to_step(layers, assignment, state, batch)


def encoder_decoder() -> tuple[Any, Any, Any]:
    def block(p: Any, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        heads = lambda y: y.reshape(*y.shape[:2], 2, 8)  # noqa: E731
        source = x if memory is None else memory
        y = attend(heads(x @ p["q"]), heads(source @ p["k"]), heads(source @ p["v"]))
        x = x + y.reshape(x.shape) @ p["o"]
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        memory = params["embed"][batch["inputs"]]
        for p in params["encoder"]:
            memory = block(p, memory)
        x = params["embed"][batch["targets"]]
        for p in params["decoder"]:
            x = block(p, x, memory)
        return cross_entropy(x @ params["embed"].T, batch["targets"])

    def weights(seed: int) -> dict[str, jax.Array]:
        shapes = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "o": (16, 16), "up": (16, 32), "down": (32, 16)}
        return {name: normal(seed + i, *shape) / 4 for i, (name, shape) in enumerate(shapes.items())}

    params = {
        "embed": normal(99, 32, 16),
        "encoder": [weights(10 * i) for i in range(3)],
        "decoder": [weights(100 + 10 * i) for i in range(3)],
    }
    step, state = microbatched.step_of(loss_fn, params, 2, optax.chain(optax.clip_by_global_norm(0.5), SGD))
    return step, state, {"inputs": tokens(1, 32, 4, 8), "targets": tokens(2, 32, 4, 8)}


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_encoder_decoder_with_one_embedding_in_three_places(stages: int):
    step, state, batch = encoder_decoder()
    layers = layers_of(step, state, batch)
    prints = [layer.fingerprint for layer in layers.layers]
    assert max(prints.count(p) for p in prints) >= 3
    assignment = assign(layers, even(layers, stages))
    assert_complete(layers, assignment)
    assert_equal_to_step(layers, assignment, state, batch)
    ((_, parts),) = assignment.split_sums
    assert len(parts) >= 2


@pytest.mark.slow
def test_skips_reach_across_stages():
    arguments = microbatched.zoo("unet", 1, batch=2, dtype=jnp.float32)
    layers = layers_of(*arguments)
    found = sent(layers, assign(layers, even(layers, 4)))
    assert any(target > source + 1 for source, target in found)
    assert any(target < source - 1 for source, target in found)


def test_shared_masks_and_casts_run_on_every_stage():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        half = [w.astype(jnp.bfloat16) for w in params]
        mask = (batch["x"][..., :1] > 0).astype(jnp.bfloat16)
        x = batch["x"].astype(jnp.bfloat16)
        for w in (*half, jax.lax.stop_gradient(half[0])):
            x = jnp.tanh(x @ w) * mask
        return (x.astype(jnp.float32) ** 2).mean()

    step, state = microbatched.step_of(loss_fn, [normal(i, 16, 16) for i in range(3)], 2, SGD)
    layers = layers_of(step, state, {"x": normal(5, 8, 16)})
    assert len(layers.layers) >= 4
    assignment = assign(layers, even(layers, 4))
    assert_complete(layers, assignment)
    names = {op.index: op.name for op in layers.body.ops}
    shared = [names[i] for i in assignment.shared if i in names]
    assert "gt" in shared
    assert shared.count("convert_element_type") == 2  # of the mask, and of the weights that two stages use
    values = layers.traced.graph.values
    for (source, target), crossing in sent(layers, assignment).items():
        assert abs(source - target) == 1, (source, target)
        assert [values[v].shape for v in crossing] == [(4, 16)]


def test_a_mask_made_once_for_all_blocks_gives_the_layers_of_one_made_in_each():
    """Layers, what crosses them, and which stages are identical, so that they are priced once."""

    def layers_with(once: bool) -> Layering:
        def causal() -> jax.Array:
            rows = jnp.arange(8)
            return (rows[:, None] >= rows).astype(jnp.float32)

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            x = batch["x"]
            made = causal()
            for w, v in params:
                scores = jnp.einsum("bsd,btd->bst", jnp.tanh(x @ w), x)
                scores = jnp.where((made if once else causal()) > 0, scores, -1e9)
                x = x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), x) @ v
            return (x**2).mean()

        weights = [(normal(i, 16, 16), normal(9 + i, 16, 16)) for i in range(4)]
        step, state = microbatched.step_of(loss_fn, weights, 2, SGD)
        return layers_of(step, state, {"x": normal(5, 8, 8, 16)})

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


def test_a_regulariser_follows_its_parameters():
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean() + 0.01 * sum((w**2).sum() for w in params)

    step, state = microbatched.step_of(loss_fn, [normal(i, 16, 16) for i in range(4)], 2, SGD)
    batch = {"x": normal(5, 8, 16)}
    layers = layers_of(step, state, batch)
    assignment = assign(layers, even(layers, 4))
    assert assignment.split_sums == ()
    values = layers.traced.graph.values
    for (source, target), crossing in sent(layers, assignment).items():
        assert all(values[v].shape in ((4, 16), ()) for v in crossing), (source, target)
    assert_equal_to_step(layers, assignment, state, batch)


def test_rows_of_examples_one_micro_batch_and_a_stage_without_parameters():
    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["first"]
        for _ in range(6):
            x = jnp.sin(x * 1.5) + x
        y = x @ params["last"]
        return (y**2).mean(), {"norm": (y**2).sum(-1)}

    params = {"first": normal(0, 8, 64), "last": normal(1, 64, 8)}
    step, state = microbatched.step_of(loss_fn, params, 1, SGD, examples=True)
    batch = {"x": normal(2, 4, 8)}
    layers = layers_of(step, state, batch, max_layers=8)
    assignment = assign(layers, even(layers, 3))
    homes = {assignment.home[v] for v in layers.traced.graph.block.inputs[:2]}
    assert homes == {0, 2}
    assert_complete(layers, assignment)
    assert_equal_to_step(layers, assignment, state, batch)


def test_weight_operations_are_the_gradients_of_parameters():
    step, state, batch = microbatched.zoo("gpt", 2, layers=2, **GPT, tied=False)
    layers = layers_of(step, state, batch)
    assignment = assign(layers, even(layers, 2))
    products = [op for op in layers.body.ops if op.name == "dot_general" and op.index in assignment.backward]
    late = [op for op in products if op.index in assignment.weight]
    # Each block: six projections, and two products of attention that have two gradients of activations each.
    assert len(late) == 2 * 6 + 1
    assert len(products) == 2 * (6 * 2 + 4) + 2


def test_bad_arguments_are_named():
    step, state, batch = microbatched.zoo("mlp", 2)
    traced = microbatched.traced_of(step, state, batch)
    with pytest.raises(OptionError, match="max_layers=0"):
        layered(traced, max_layers=0)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    with pytest.raises(ValueError, match="scan=0"):
        layering(traced, 0, rules)
    layers = layered(traced)
    for cuts in ([0], [2, 2], [len(layers.layers)]):
        with pytest.raises(OptionError, match="cuts="):
            assign(layers, cuts)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_dynamic_program_is_exact(sizes: list[tuple[int, int]], most: int):
    atoms = [Layer((i,), float(t), 0.0, str(i), c) for i, (t, c) in enumerate(sizes)]
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
    found = layering_cuts.balanced(atoms, most, mean, 9.0)
    assert cost(tuple(np.cumsum(found)[:-1].tolist())) == pytest.approx(best)


@given(
    st.integers(1, 4),
    st.integers(2, 6),
    st.lists(st.integers(0, 1), max_size=3),
    st.lists(st.integers(0, 1), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_repeats_are_found(period: int, count: int, before: list[int], after: list[int]):
    marks = [f"b{i}{x}" for i, x in enumerate(before)] + [f"r{i}" for i in range(period)] * count
    marks += [f"a{i}{x}" for i, x in enumerate(after)]
    atoms = [Layer((i,), 1.0, 0.0, mark, 1) for i, mark in enumerate(marks)]
    assert layering_cuts.repeats(atoms) == [(len(before), period, count)]
