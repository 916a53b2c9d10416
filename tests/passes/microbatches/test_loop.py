"""The loop over micro-batches computes what the step on the whole batch does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gallery
from alpa_lite.errors import MicrobatchError
from alpa_lite.ir import graph as graphs
from alpa_lite.ir.graph import Block
from alpa_lite.passes import factors
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.microbatches import loop as accumulation
from alpa_lite.passes.tracing import tracing
from alpa_lite.passes.tracing.conversion import graph_of
from gallery import accumulation as steps
from tests import comparing
from tests.comparing import assert_close_in_norm
from tests.marks import slow
from tests.passes.numerics import outputs


def accumulated(fun, args, parts, *, batch_argnums: Any = "auto", **options: Any):
    """The traced step, and the same as a loop."""
    traced = tracing.trace(fun, args, {}, batch_argnums=batch_argnums)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    found = accumulation.accumulate(traced, rules, parts, **options)
    graphs.check(found.traced.graph)
    loop = next(op for op in found.traced.graph.block.ops if op.index == found.scan)
    assert loop.name == "scan" and loop.params["length"] == parts == found.num_microbatches
    return traced, found


def equal(made, parts, **options):
    """Asserts equality, and returns what was rewritten."""
    fun, args = made
    traced, found = accumulated(fun, args, parts, **options)
    assert_close_in_norm(outputs(found.traced, args), outputs(traced, args))
    return found


BY_POSITION = {"noise"}
"""Steps of which a micro-batch has consecutive examples: draws."""


ACROSS = gallery.find("micro-batches", "across the batch")
EXACT = {name: case for name, case in gallery.find("micro-batches").items() if name not in ACROSS}


@pytest.mark.parametrize("name", EXACT)
def test_steps(name):
    """Consecutive examples, or every fourth; results with one value an example come back in their order."""
    fun, args = EXACT[name].make()
    traced, found = accumulated(fun, args, 4)
    assert not any("inexact" in note for note in found.notes)
    want = outputs(traced, args)
    assert_close_in_norm(outputs(found.traced, args), want)
    _, strided = accumulated(fun, args, 4, strided=True)
    assert any("t, t + 4, t + 8" in note for note in strided.notes) == (name not in BY_POSITION)
    if name not in BY_POSITION:
        assert_close_in_norm(outputs(strided.traced, args), want)


def test_a_batch_that_is_taken_apart_stays_in_its_order():
    """Neighbours are compared: every fourth example has others."""

    def loss(p, b):
        pairs = (b["x"] @ p["a"]).reshape(-1, 2, 8)
        return jnp.mean((pairs[:, 0] - 2 * pairs[:, 1]) ** 2)

    made = steps.descent(loss, {"a": steps.normal(0, 4, 8)}, {"x": steps.normal(1, 16, 4)})
    assert not any("moves no data" in note for note in equal(made, 4, strided=True).notes)


@pytest.mark.parametrize("strided", [False, True])
def test_batches_of_two_sizes_are_cut_each_by_itself(strided):
    """Of 16 and of 24 examples, whose values come back in their order."""

    def loss(p, x, z):
        inner, edge = steps.forward(p, x), steps.forward(p, z)
        return jnp.mean(inner**2) + jnp.mean((edge - 1) ** 2), (inner, edge.T)

    step = jax.value_and_grad(loss, has_aux=True)
    made = step, (steps.WEIGHTS, steps.X, steps.normal(6, 24, 8))
    found = equal(made, 4, batch_argnums=(1, 2), strided=strided)
    assert any("the groups of examples t, t + 4" in note for note in found.notes) == strided


# -- the zoo ----------------------------------------------------------------------------------------------------------

SLOW = [
    ("plain_custom_vjp", 2), ("plain_remat_policy", 4), ("plain_pick", 2), ("plain_dropout_raw", 4), ("linen_moe", 2),
    ("linen_user_optax", 4), ("nnx_gru", 2), ("nnx_gpt_scan_remat", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parts"), [("plain_scan", 4), *(slow(*pair) for pair in SLOW)])
def test_zoo(name, parts):
    fun, args = gallery.get("zoo", name).make()
    traced, found = accumulated(fun, args, parts)
    tree = jax.tree.structure(jax.eval_shape(fun, *args))
    got, want = (jax.tree.unflatten(tree, outputs(one, args)) for one in (found.traced, traced))
    comparing.compare(got, want)


@pytest.mark.parametrize("name", gallery.find("zoo", "plain", "across the batch"))
def test_zoo_across_the_batch_is_refused(name):
    with pytest.raises(MicrobatchError, match=r"num_microbatches=2: [a-z_]+ at .*gallery/plain.py:\d+"):
        accumulated(*gallery.get("zoo", name).make(), 2)


# -- refusals, and what is allowed to be inexact ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("contrastive", "dot_general"), ("log_of_mean", "mul"), ("capacity", "cumsum"),
        ("recurrent_over_examples", "scan"),
    ],
)  # fmt: skip
def test_what_looks_across_the_batch_is_refused_by_name(name, operation):
    fun, args = ACROSS[name].make()
    with pytest.raises(MicrobatchError, match=rf"num_microbatches=4: {operation} at .*accumulation.py:\d+"):
        accumulated(fun, args, 4)


def test_batch_norm_is_refused_by_name():
    with pytest.raises(MicrobatchError, match=r"num_microbatches=2: .* at gallery/linen.py.*BatchNorm.*allow_inexact"):
        accumulated(*gallery.get("zoo", "linen_convnet").make(), 2)


@pytest.mark.slow
def test_inexact_batch_norm_is_that_of_each_microbatch():
    fun, args = gallery.get("zoo", "linen_convnet").make()
    _, found = accumulated(fun, args, 2, allow_inexact=True)
    inexact = [note for note in found.notes if "inexact" in note]
    assert inexact and all("gallery/linen.py" in note and "BatchNorm" in note for note in inexact)
    assert_close_in_norm(outputs(found.traced, args), jax.tree.leaves(steps.reference(fun, args, 2)))


def test_inexact_statistics_of_every_layer_are_those_of_each_microbatch():
    """Each layer needs sums over the batch, forward and backward, that depend on those of the layers before it."""

    def forward(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
        return x

    def step(params, batch):
        grads = jax.grad(lambda p: jnp.mean((forward(p, batch["x"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    args = [steps.normal(i, 8, 8) for i in range(8)], {"x": steps.normal(8, 16, 8), "y": steps.normal(9, 16, 8)}
    _, found = accumulated(step, args, 2, allow_inexact=True)
    assert sum("inexact, computed within each micro-batch" in note for note in found.notes) >= 4
    assert_close_in_norm(outputs(found.traced, args), jax.tree.leaves(steps.reference(step, args, 2)))


@pytest.mark.parametrize(("parts", "words"), [(3, "16 examples.*1, 2, 4, 8, 16"), (0, "positive")])
def test_numbers_that_do_not_divide(parts, words):
    with pytest.raises(MicrobatchError, match=f"num_microbatches={parts}.*{words}"):
        accumulated(*steps.sum_loss(), parts)


def test_a_step_without_a_batch():
    with pytest.raises(MicrobatchError, match="batch_argnums"):
        accumulated(lambda w, x: {"w": w["w"] * x}, ({"w": steps.X}, 2.0), 2)


# -- what the rewritten step looks like -------------------------------------------------------------------------------


def loop_of(found):
    return next(op for op in found.traced.graph.block.ops if op.index == found.scan)


def test_gradients_of_a_leaf_share_one_accumulator():
    _, found = accumulated(*steps.embedding(), 4)
    assert loop_of(found).params["num_carry"] == 3  # of embeddings, of positions, and the loss


def test_the_update_is_outside_of_the_loop():
    _, found = accumulated(*steps.multi_steps(), 4)
    assert "cond" in [op.name for op in found.traced.graph.block.ops]
    assert "cond" not in [op.name for op in loop_of(found).bodies[0].ops]


def test_denominators_are_computed_once_and_said():
    _, found = accumulated(*steps.masked_loss(), 4)
    assert any("whole batch, before" in note and "reduce_sum" in note for note in found.notes)
    assert found.notes[0].startswith("4 micro-batches of 4 examples: dim 0 of batch/mask")


def test_narrow_sums_are_accumulated_in_float32():
    def step(state, batch):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(batch["x"].astype(jnp.bfloat16) @ w)).astype(jnp.float32))(state)
        return state - grads

    _, found = accumulated(step, (steps.WEIGHTS["a"].astype(jnp.bfloat16), {"x": steps.X}), 4)
    loop, values = loop_of(found), found.traced.graph.values
    assert {str(values[v].dtype) for v in loop.results} == {"float32"}


def test_names_and_lines_are_kept():
    fun, args = gallery.get("zoo", "linen_mlp").make()
    traced, found = accumulated(fun, args, 2)

    def stacks(graph):
        return {str(op.source.name_stack) for op in graph.ops() if op.name == "dot_general"}

    assert stacks(found.traced.graph) == stacks(traced.graph)


def test_a_helper_with_a_constant_and_a_literal_computes_the_same():
    """As JAX makes a constant of the cut of an array without elements."""
    graph = graph_of(jax.make_jaxpr(lambda x: x * 2.0)(jnp.ones(3)))
    (value,), (op,) = graph.block.inputs, graph.block.ops
    writer = FunctionWriter(graph)
    ops, (out,) = writer.write(lambda x, y: x * np.arange(3.0, dtype="float32") + y, op.operands, kind="helper")
    rewritten = writer.finish(Block((value,), tuple(ops), (out,)))
    (found,) = evaluation.evaluate(rewritten, [jnp.full(3, 5.0)])
    np.testing.assert_array_equal(found, [2.0, 7.0, 12.0])
