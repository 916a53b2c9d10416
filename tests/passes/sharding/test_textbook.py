"""Textbook methods fix what operations do: which collectives a step has is known by hand."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.hlo_text import read_hlo
from alpa_lite.passes.sharding import limits, mesh_program, space, strategies
from gallery.batches import f32, normal
from gallery.steps import by_momentum, sgd
from tests import comparing
from tests.helpers import grouped_step

H100 = Cluster.preset("h100", nodes=1)
METHODS = {
    "data": alpa_lite.DataParallel(), "zero-1": alpa_lite.Zero(1), "zero-2": alpa_lite.Zero(2),
    "zero-3": alpa_lite.Zero(3), "tensor": alpa_lite.TensorParallel(),
}  # fmt: skip


@by_momentum
def step(params: Any, batch: Any) -> Any:
    return ((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2).mean()


def arguments(batch: int = 16, width: int = 512, hidden: int = 2048) -> tuple[Any, Any]:
    """A small batch and wide layers: what is fastest is tensor parallelism."""
    params = {"a": f32(width, hidden), "b": f32(hidden, width)}
    return {"params": params, "mu": params}, {"x": f32(batch, width), "y": f32(batch, width)}


def moved(plan: alpa_lite.Plan) -> list[tuple[str, int]]:
    return sorted((c.kind, c.bytes) for c in plan.collectives for _ in range(c.count))


WEIGHTS = 512 * 2048 * 4
EXPECTED = {
    "data": [("all_reduce", 4), *2 * [("all_reduce", WEIGHTS)]],
    "zero-1": [*2 * [("all_gather", WEIGHTS)], ("all_reduce", 4), *2 * [("reduce_scatter", WEIGHTS)]],
    # The second matrix is read by the backward pass, too; the first one is not, since no input needs a gradient.
    "zero-3": [*3 * [("all_gather", WEIGHTS)], ("all_reduce", 4), *2 * [("reduce_scatter", WEIGHTS)]],
    "tensor": [("all_reduce", 16 * 512 * 4)],
}
EXPECTED["zero-2"] = EXPECTED["zero-1"]


@pytest.mark.parametrize("name", METHODS)
def test_a_perceptron_with_a_small_batch(name):
    plan = alpa_lite.make_plan(step, *arguments(), cluster=H100, method=METHODS[name], verify="shardy")
    assert moved(plan) == EXPECTED[name]
    kernels = [leaf.spec for leaf in plan.stages[0].arguments if leaf.path.startswith("state['params']")]
    assert all(any(spec) for spec in kernels) == (name in ("zero-3", "tensor"))


@pytest.mark.parametrize("name", ["data", "zero-2", "zero-3", "tensor"])
def test_what_is_compiled(name):
    """On CPU equal gathers are merged, and plans there count on one of each."""
    args = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), arguments(16, 64, 128))
    run = alpa_lite.parallelize(step, method=METHODS[name])
    executable: Any = run.prepare_call(args, {})[1]
    (text,) = executable.hlo()
    found = collections.Counter(op.kind for op in read_hlo(text, LogicalMesh((8,), ("x",))).collectives)
    wanted = {"data": {"all_reduce": 3}, "tensor": {"all_reduce": 1}}.get(name)
    both = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}
    assert found == (wanted or both)


def transformer(**options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab": 4096, "seq": 128, "hidden": 512, "heads": 8, "layers": 2}
    return models.get("gpt").abstract("tiny", 64, **{**sizes, **options})


@pytest.mark.parametrize("options", [{}, {"scan": True, "remat": True}])
def test_tensor_parallelism_of_a_transformer_is_that_of_megatron(options):
    """Two all-reduces of activations a layer forward, two backward; embedding and logits cut along the vocabulary."""
    fun, args = transformer(**options)
    plan = alpa_lite.make_plan(fun, *args, cluster=H100, method=METHODS["tensor"], verify="off")
    activations, rows = 64 * 128 * 512 * 4, 64 * 128 * 4
    again = 2 if options else 0  # the projection of attention, which the backward pass computes again
    large, small = ("all_reduce", activations), ("all_reduce", rows)
    # One for the embedding, one for the gradient of the logits' input; three rows of the softmax: maximum, sum, label.
    assert moved(plan) == sorted([*(2 * 4 + again + 2) * [large], *3 * [small]])


def test_zero_3_gathers_parameters_forward_and_backward_in_loops_too():
    fun, args = transformer(scan=True)
    plan = alpa_lite.make_plan(fun, *args, cluster=H100, method=METHODS["zero-3"], verify="off")
    kernel = 512 * 2048 * 4  # the first product's of a feed-forward, and the second's
    gathered = [c for c in plan.collectives if (c.kind, c.bytes) == ("all_gather", kernel)]
    assert [c.count for c in gathered] == [2] * 4  # two layers; two kernels, forward and backward
    assert not [c for c in plan.collectives if c.bytes > 4096 * 512 * 4]  # no stack of layers moves


def low_rank(state: Any, batch: Any) -> Any:
    """A step whose update multiplies small weights with one another, as LoRA and Muon do."""
    grads = jax.grad(lambda p: ((batch["x"] @ (p["a"] @ p["b"]) - batch["y"]) ** 2).mean())(state["params"])
    mu = jax.tree.map(lambda m, g: m + (g @ g.T) @ g, state["mu"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu), "mu": mu}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fun", [step, low_rank])
def test_the_search_has_every_strategy_of_data_parallelism_on_one_axis(fun: Any, name: str) -> None:
    """Their groups are tied alike, so that what no plan of the search undercuts, none of theirs does.

    Tensor parallelism may leave axes idle where the search does not, such as between products of few heads.
    """
    method = METHODS[name]
    batch = {"x": f32(16, 512), "y": f32(16, 512)}
    params = {"a": f32(512, 8), "b": f32(8, 512)}
    state = {"params": params, "mu": params} if fun is low_rank else arguments()[0]
    grouped = grouped_step(fun, state, batch)
    within = mesh_program.has_all_plans_of(grouped, H100, method)
    assert within == (name != "tensor")
    ((mesh, constraints),) = limits.admissible_meshes(grouped, H100, method)
    free, own = (
        strategies.build(grouped, MeshCost(H100, mesh), constraints=some) for some in (space.UNCONSTRAINED, constraints)
    )
    if not within:
        return
    assert [node.members for node in free.nodes] == [node.members for node in own.nodes]
    for mine, every in zip(own.nodes, free.nodes, strict=True):
        assert set(mine.strategies) <= set(every.strategies), grouped.grouping.groups[mine.group]


def test_heads_that_do_not_divide_are_gathered_and_weights_stay():
    sizes: dict[str, Any] = {"vocab": 4096, "seq": 128, "hidden": 512, "ffn": 2048, "layers": 1}
    fun, args = models.get("llama").abstract("tiny", 24, heads=8, kv_heads=2, **sizes)
    plan = alpa_lite.make_plan(fun, *args, cluster=H100, method=METHODS["tensor"], verify="off")
    keys = 24 * 128 * 128 * 4  # of two heads of 64, for every example and position
    assert collections.Counter(c.kind for c in plan.collectives if c.bytes == 4 * keys)["all_reduce"] == 6
    assert [c for c in plan.collectives if c.bytes == keys]
    assert not [c for c in plan.collectives if c.bytes % 24]


def test_examples_are_followed_through_reshapes():
    def fun(w, x):
        rows = x.reshape(4 * 6, 8) @ w  # 4 examples of 6 rows
        parts = rows.reshape(2, 2, 6, 8)
        return jnp.einsum("pbsf,qbsf->pqs", parts, parts).sum(), w

    step = grouped_step(lambda state, batch: fun(state, batch["x"])[::-1], f32(8, 8), {"x": f32(4, 6, 8)})
    groups, found = step.grouping, step.examples
    held = {g.name: sorted(found[g.index].values()) for g in groups.groups if g.index in found and g.kind == "heavy"}
    products = [sorted(found[g.index].values()) for g in groups.groups if g.name == "dot_general" and g.index in found]
    assert [4] in products, held  # the 24 rows of the product are four examples
    assert [2, 2, 2] in products, held  # parts, parts, and the examples of a part


def test_a_batch_in_pieces_that_do_not_divide_is_refused():
    with pytest.raises(alpa_lite.MicrobatchError, match="fewer examples at a time than divide over 8 devices"):
        alpa_lite.make_plan(step, *arguments(), cluster=H100, method=METHODS["data"], num_microbatches=4)


CONVOLUTION = functools.partial(
    jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
)


def test_convolutions_are_pairs_and_their_weights_stay():
    @sgd
    def fun(state: Any, batch: Any) -> Any:
        x = CONVOLUTION(batch["x"], state["in"])
        return (CONVOLUTION(jnp.tanh(CONVOLUTION(x, state["a"])), state["b"]) ** 2).mean()

    state = {"in": f32(3, 3, 3, 256), "a": f32(3, 3, 256, 512), "b": f32(3, 3, 512, 256)}
    plan = alpa_lite.make_plan(fun, state, {"x": f32(8, 20, 20, 3)}, cluster=H100, method=METHODS["tensor"])
    activations = 8 * 20 * 20 * 256 * 4
    assert {c.bytes for c in plan.collectives} <= {activations, 4}
    assert ("all_reduce", activations) in moved(plan)


def compare_grouped(groups: int, inputs: int, outputs: int, **options: Any) -> alpa_lite.Plan:
    """Runs two convolutions, the second in groups, as planned and under plain `jit`."""

    @sgd
    def fun(weights: Any, x: Any) -> Any:
        h = jnp.tanh(CONVOLUTION(x, weights["first"]))
        h = CONVOLUTION(h, weights["grouped"], feature_group_count=groups)
        return jnp.mean((h.mean((1, 2)) @ weights["dense"]) ** 2)

    shapes = {"first": (3, 3, 4, inputs), "grouped": (3, 3, inputs // groups, outputs), "dense": (outputs, 8)}
    weights = {name: 0.3 * normal(n, *shape) for n, (name, shape) in enumerate(shapes.items())}
    x = normal(9, 16, 6, 6, 4)
    return comparing.close_to_jit(fun, weights, x, rtol=2e-5, **options).plan(weights, x)


@pytest.mark.parametrize(("groups", "sharded"), [(2, False), (8, True)])
def test_a_kernel_is_sharded_where_its_groups_divide(groups: int, sharded: bool) -> None:
    plan = compare_grouped(groups, 16, 32, method=METHODS["tensor"])
    (spec,) = [leaf.spec for leaf in plan.stages[0].arguments if "grouped" in leaf.path]
    assert any(spec) == sharded


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize(
    ("groups", "inputs", "outputs"), [(1, 8, 16), (2, 16, 32), (3, 12, 24), (4, 16, 16), (8, 16, 32), (16, 16, 16)]
)
def test_convolutions_in_groups_equal_plain_jit(groups: int, inputs: int, outputs: int, pipeline: bool) -> None:
    halves = {"method": alpa_lite.Pipeline(submesh_shapes=((4,), (4,))), "num_microbatches": 2}
    compare_grouped(groups, inputs, outputs, **(halves if pipeline else {"method": METHODS["tensor"]}))
