"""From layers that are priced to the step of chosen stages: one scan a stage, and the same numbers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Pieces, check
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors
from alpa_lite.passes.layers import division
from alpa_lite.passes.layers.division import AssignedStep, LayeredStep
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.search.pipeline_analysis import max_layers
from alpa_lite.passes.tracing import tracing
from gallery import linen
from gallery.batches import normal
from tests.comparing import assert_close_in_norm
from tests.passes.numerics import outputs


def step_in_layers(step: Any, arguments: Any, layers: int = 16) -> LayeredStep:
    traced = tracing.trace(
        step, arguments, {}, batch_argnums="auto", batch_argnames=(), static_argnums=(), static_argnames=()
    )
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return division.find_layers(loop.accumulate(traced, rules, 2), max_layers=layers)


def scanned(layers: int = 6, draws: bool = False) -> tuple[Any, Any]:
    """A step with a scan over layers, and layers before and after it.

    With `draws`, layers draw masks, and the loss reads a row of each of them.
    """
    tx = optax.adam(0.01)

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            def layer(x: jax.Array, p: Any) -> Any:
                y = jax.nn.gelu(x @ p["w"]) @ p["v"]
                if draws:
                    y = jnp.where(jax.random.bernoulli(jax.random.wrap_key_data(p["key"]), 0.7, y.shape), y, 0.0)
                return x + y, x.mean(-1) if draws else None

            x, rows = jax.lax.scan(layer, batch["x"] @ params["first"], params["layers"] | {"key": keys})
            return ((x @ params["last"] - batch["y"]) ** 2).mean() + sum((x**2).mean() for x in jax.tree.leaves(rows))

        value, grads = jax.value_and_grad(loss)(state[0])
        updates, moments = tx.update(grads, state[1])
        return (optax.apply_updates(state[0], updates), moments), value

    keys = jnp.arange(2 * layers, dtype=jnp.uint32).reshape(layers, 2)
    layer = {"w": normal(0, layers, 8, 16) / 3, "v": normal(1, layers, 16, 8) / 3}
    params = {"layers": layer, "first": normal(2, 8, 8), "last": normal(3, 8, 8)}
    return step, ((params, tx.init(params)), {"x": normal(4, 8, 8), "y": normal(5, 8, 8)})


@pytest.mark.parametrize(("layers", "stages", "parts"), [(126, 16, 63), (126, None, 63), (100, 100, 100), (12, 4, 12)])
def test_scans_are_cut_into_as_many_parts_as_stages_need(layers, stages, parts):
    """Stages of whole layers are balanced, and there are as many layers as stages, however deep the model is."""
    most = max_layers(Pipeline(num_stages=stages))
    found = step_in_layers(*scanned(layers), most)
    assert found.fine is not None
    assert len(found.fine.pieces) in (parts, 2 * parts)  # forward, and backward where that is a scan of its own
    assert parts <= len(found.layering.layers) <= most


@functools.cache
def six_layers(draws: bool = False) -> tuple[LayeredStep, Any, list[Any]]:
    """The step in layers, its arguments, and what it computes of them."""
    step, arguments = scanned(6, draws)
    found = step_in_layers(step, arguments)
    return found, arguments, outputs(found.accumulated.traced, jax.tree.leaves((arguments, {})))


def apart(leaves: list[Any], pieces: tuple[Pieces, ...]) -> list[Any]:
    out = []
    for leaf, one in zip(leaves, pieces, strict=True):
        out += [leaf[a:b] for a, b in itertools.pairwise(one.bounds)] or [leaf]
    return out


def assert_computes(done: AssignedStep, draws: bool = False) -> None:
    """Its arguments and results are those of the step, stacked ones in pieces."""
    traced, stacked = done.accumulated.traced, done.accumulated.traced.stacked
    check(traced.graph)
    step, arguments, expected = six_layers(draws)
    assert stacked is not None
    for argument, one in zip(step.accumulated.traced.arguments, stacked.arguments, strict=True):
        assert bool(one.bounds) == ("['layers']" in argument.path)
    actual = outputs(traced, apart(jax.tree.leaves((arguments, {})), stacked.arguments))
    assert_close_in_norm(actual, apart(expected, stacked.results))


def test_each_stage_has_one_scan_of_its_iterations():
    step, *_ = six_layers()
    assert len(step.layering.layers) >= 6
    for cuts in ([2], [3], [1, 3], [2, 4]):
        done = division.divide_into_stages(step, cuts)
        body, forward = done.layering.body.ops, done.layering.forward
        scans = [op for op in body if op.name == "scan" and op.index in forward]
        lengths = {done.assignment.stage[op.index]: op.params["length"] for op in scans}
        assert sum(lengths.values()) == 6 and len(cuts) <= len(lengths) == len(scans)
        assert sum(layer.seconds for layer in done.layering.layers) == pytest.approx(
            sum(layer.seconds for layer in step.layering.layers)
        )
    assert_computes(done)


@pytest.mark.parametrize("remat", [("layer", "none"), ("none", "selective"), ("selective", "layer")])
def test_stages_compute_again_what_they_do_not_save(remat: tuple[Choice, Choice]):
    step, *_ = six_layers()

    def bytes_read(done: AssignedStep) -> list[int]:
        """Bytes of its forward pass that the backward pass of each stage reads."""
        forward, values = done.layering.forward, done.accumulated.traced.graph.values
        made = {v: op for op in done.layering.body.ops if op.index in forward for v in op.results}
        held = {v for op in done.layering.body.ops if op.index not in forward for v in op.reads if v in made}
        stage = done.assignment.stage
        return [sum(values[v].nbytes for v in held if stage[made[v].index] == number) for number in (0, 1)]

    cuts = [len(step.layering.layers) // 2]
    plain, done = (
        division.divide_into_stages(step, cuts, ("none", "none")),
        division.divide_into_stages(step, cuts, remat),
    )
    for before, after, choice in zip(bytes_read(plain), bytes_read(done), remat, strict=True):
        assert after == before if choice == "none" else after < before
    assert_computes(done)


def test_draws_are_the_same_again_and_what_else_is_read_of_a_scan_stays():
    step, *_ = six_layers(True)
    assert_computes(division.divide_into_stages(step, [len(step.layering.layers) // 2], ("layer", "selective")), True)


def test_a_step_without_scans_is_left_as_it_is():
    step = step_in_layers(*linen.gpt(layers=2))
    assert step.fine is None
    done = division.divide_into_stages(step, [2], ("none", "none"))
    assert done.layering is step.layering
    assert done.accumulated.traced is step.accumulated.traced
    with pytest.raises(OptionError, match="rise strictly"):
        division.divide_into_stages(step, [3, 3])


def test_a_leaf_that_is_needed_whole_stays_whole():
    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["w"])
            return (x**2).mean() + jnp.linalg.norm(jnp.sort(params["w"], 0))

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))

    done = division.divide_into_stages(step_in_layers(step, ({"w": normal(0, 4, 8, 8)}, normal(1, 8, 8))), [1])
    assert done.accumulated.traced.stacked is None or done.accumulated.traced.stacked.arguments[0].bounds == ()
