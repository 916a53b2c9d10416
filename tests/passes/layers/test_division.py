"""From layers that are priced to the step of chosen stages: one scan a stage, and the same numbers."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import check
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.layers import division
from alpa_lite.passes.layers.division import Divided, Divisible
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.search.pipeline_analysis import max_layers
from alpa_lite.passes.tracing import tracing
from tests import zoo_linen
from tests.passes.layers.test_stacked_arguments import apart
from tests.zoo_base import normal


def step_in_layers(step: Any, arguments: Any, layers: int = 16) -> Divisible:
    traced = tracing.trace(
        step, arguments, {}, batch_argnums="auto", batch_argnames=(), static_argnums=(), static_argnames=()
    )
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return division.divisible(loop.accumulate(traced, rules, 2), max_layers=layers)


def scanned(layers: int = 6) -> tuple[Any, Any]:
    """A step with a scan over layers, and layers before and after it."""

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            def layer(x: jax.Array, p: Any) -> Any:
                return x + jax.nn.gelu(x @ p["w"]) @ p["v"], None

            x, _ = jax.lax.scan(layer, batch["x"] @ params["first"], params["layers"])
            return ((x @ params["last"] - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    layer = {"w": normal(0, layers, 8, 16) / 3, "v": normal(1, layers, 16, 8) / 3}
    state = {"layers": layer, "first": normal(2, 8, 8), "last": normal(3, 8, 8)}
    return step, (state, {"x": normal(4, 8, 8), "y": normal(5, 8, 8)})


@pytest.mark.parametrize(("layers", "stages", "parts"), [(126, 16, 63), (126, None, 63), (100, 100, 100), (12, 4, 12)])
def test_scans_are_cut_into_as_many_parts_as_stages_need(layers, stages, parts):
    """Stages of whole layers are balanced, and there are as many layers as stages, however deep the model is."""
    step, arguments = scanned(layers)
    most = max_layers(Pipeline(num_stages=stages))
    found = step_in_layers(step, arguments, most)
    assert found.fine is not None
    assert len(found.fine.pieces) in (parts, 2 * parts)  # forward, and backward where that is a scan of its own
    assert parts <= len(found.layering.layers) <= most


def forward_scans(done: Divided) -> dict[int, int]:
    """Stage -> the length of its forward scan."""
    found: dict[int, int] = {}
    for op in done.layering.body.ops:
        if op.name == "scan" and op.index in done.layering.forward:
            assert done.assignment.stage[op.index] not in found
            found[done.assignment.stage[op.index]] = op.params["length"]
    return found


def assert_computes(step: Divisible, done: Divided, arguments: Any) -> None:
    check(done.accumulated.traced.graph)
    leaves = jax.tree.leaves((arguments, {}))
    stacked = done.accumulated.traced.stacked
    assert stacked is not None
    whole = jax.jit(lambda *x: evaluation.evaluate(step.accumulated.traced.graph, x))(*leaves)
    graph = done.accumulated.traced.graph
    actual = jax.jit(lambda *x: evaluation.evaluate(graph, x))(*apart(leaves, stacked.arguments))
    for a, b in zip(actual, apart(whole, stacked.results), strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


def test_each_stage_has_one_scan_of_its_iterations():
    function, arguments = scanned()
    step = step_in_layers(function, arguments)
    count = len(step.layering.layers)
    assert count >= 6
    for cuts in ([2], [3], [1, 3], [2, 4]):
        done = division.divided(step, cuts)
        lengths = forward_scans(done)
        assert sum(lengths.values()) == 6
        assert len(lengths) >= len(cuts)
        layer_of = {v: n for n, layer in enumerate(done.layering.layers) for v in layer.ops}
        made = {v: op.index for op in done.layering.body.ops for v in op.results}
        for op in done.layering.body.ops:
            if op.index in layer_of:
                assert all(layer_of[made[v]] <= layer_of[op.index] for v in op.reads if made.get(v) in layer_of)
        assert sum(layer.seconds for layer in done.layering.layers) == pytest.approx(
            sum(layer.seconds for layer in step.layering.layers)
        )
    assert_computes(step, done, arguments)


@pytest.mark.parametrize("remat", [("layer", "none"), ("none", "selective"), ("selective", "layer")])
def test_stages_compute_again_what_they_do_not_save(remat: tuple[Choice, Choice]):
    function, arguments = scanned()
    step = step_in_layers(function, arguments)
    cuts = [len(step.layering.layers) // 2]
    bytes_read = {}
    both: tuple[tuple[Choice, Choice], ...] = (("none", "none"), remat)
    for choice in both:
        done = division.divided(step, cuts, choice)
        forward, values = done.layering.forward, done.accumulated.traced.graph.values
        made = {v: op for op in done.layering.body.ops if op.index in forward for v in op.results}
        backward = [op for op in done.layering.body.ops if op.index not in forward]
        held = {v for op in backward for v in op.reads if v in made}
        bytes_read[choice] = [
            sum(values[v].nbytes for v in held if done.assignment.stage[made[v].index] == stage) for stage in (0, 1)
        ]
    for before, after, choice in zip(bytes_read["none", "none"], bytes_read[remat], remat, strict=True):
        assert after == before if choice == "none" else after < before
    assert_computes(step, done, arguments)


def test_a_step_without_scans_is_left_as_it_is():
    step = step_in_layers(*zoo_linen.gpt(layers=2))
    assert step.fine is None
    done = division.divided(step, [2], ("none", "none"))
    assert done.layering is step.layering
    assert done.accumulated.traced is step.accumulated.traced
    assert [*itertools.chain(*(layer.ops for layer in done.layering.layers))] == [*done.layering.order]
    with pytest.raises(OptionError, match="rise strictly"):
        division.divided(step, [3, 3])
