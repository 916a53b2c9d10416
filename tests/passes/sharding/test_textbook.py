"""Textbook methods fix what operations do: which collectives a step has is known by hand."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.passes.checks.hlo_text import parse_hlo

H100 = Cluster.preset("h100", nodes=1)
METHODS = {
    "data": alpa_lite.DataParallel(), "zero-1": alpa_lite.Zero(1), "zero-2": alpa_lite.Zero(2),
    "zero-3": alpa_lite.Zero(3), "tensor": alpa_lite.TensorParallel(),
}  # fmt: skip


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        return ((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu), "mu": mu}, value


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
def test_compiled_collectives(name):
    """On CPU equal gathers are merged, and plans there count on one of each."""
    args = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), arguments(16, 64, 128))
    run = alpa_lite.parallelize(step, method=METHODS[name])
    executable: Any = run._executable(args, {})
    (text,) = executable.hlo()
    found = collections.Counter(op.kind for op in parse_hlo(text, 8))
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


def test_heads_that_do_not_divide_are_gathered_and_weights_stay():
    sizes: dict[str, Any] = {"vocab": 4096, "seq": 128, "hidden": 512, "ffn": 2048, "layers": 1}
    fun, args = models.get("llama").abstract("tiny", 24, heads=8, kv_heads=2, **sizes)
    plan = alpa_lite.make_plan(fun, *args, cluster=H100, method=METHODS["tensor"], verify="off")
    keys = 24 * 128 * 128 * 4  # of two heads of 64, for every example and position
    assert collections.Counter(c.kind for c in plan.collectives if c.bytes == 4 * keys)["all_reduce"] == 6
    assert [c for c in plan.collectives if c.bytes == keys]
    assert not [c for c in plan.collectives if c.bytes % 24]


def test_examples_are_followed_through_reshapes():
    """Rows of a product are examples and their parts, and examples are parts of a batch in two dims."""

    def fun(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            parts = jnp.tanh(batch["x"].reshape(16 * 6, 8) @ w).reshape(8, 2, 6, 8)
            return jnp.einsum("pbsf,pbsf->", parts, jnp.tanh(parts))

        return state - 0.1 * jax.grad(loss)(state), loss(state)

    plan = alpa_lite.make_plan(fun, f32(8, 8), {"x": f32(16, 6, 8)}, cluster=H100, method=METHODS["data"])
    assert {kind for kind, _ in moved(plan)} == {"all_reduce"}


def test_a_batch_in_pieces_that_do_not_divide_is_refused():
    with pytest.raises(alpa_lite.MicrobatchError, match="fewer examples at a time than divide over 8 devices"):
        alpa_lite.make_plan(step, *arguments(), cluster=H100, method=METHODS["data"], num_microbatches=4)


def test_convolutions_are_pairs_and_their_weights_stay():
    def convolve(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def fun(state: Any, batch: Any) -> Any:
        def loss(ws: Any) -> Any:
            x = convolve(batch["x"], ws["in"])
            return (convolve(jnp.tanh(convolve(x, ws["a"])), ws["b"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    state = {"in": f32(3, 3, 3, 256), "a": f32(3, 3, 256, 512), "b": f32(3, 3, 512, 256)}
    plan = alpa_lite.make_plan(fun, state, {"x": f32(8, 20, 20, 3)}, cluster=H100, method=METHODS["tensor"])
    activations = 8 * 20 * 20 * 256 * 4
    assert {c.bytes for c in plan.collectives} <= {activations, 4}
    assert ("all_reduce", activations) in moved(plan)
