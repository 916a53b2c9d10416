"""`jax.nn.dot_product_attention` in all its forms: one operation in the plan, and equal to one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import alpa_lite
from alpa_lite import Cluster, Sharded

B, T, M, D = 4, 8, 16, 4
Attend = Callable[..., Any]


def step_with(attend: Attend) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            q, k, v = (jnp.einsum("btm,mhd->bthd", x, w[n]) for n in "qkv")
            return (jnp.einsum("bthd,hdm->btm", attend(q, k, v, w), w["o"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    return step


def arguments(heads: int = 4, shared: int = 4, bias: tuple[int, ...] | None = None) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    w = {n: jax.random.normal(next(keys), (M, heads if n == "q" else shared, D)) / 4 for n in "qkv"}
    w["o"] = jax.random.normal(next(keys), (heads, D, M)) / 4
    if bias is not None:
        w["bias"] = jax.random.normal(next(keys), bias)
    return w, jax.random.normal(next(keys), (B, T, M))


def attend(**options: Any) -> Attend:
    def run(q: Any, k: Any, v: Any, w: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, bias=w.get("bias"), **options)

    return run


def with_residual(q: Any, k: Any, v: Any, w: Any) -> Any:
    out, lse = jax.nn.dot_product_attention(q, k, v, return_residual=True)
    return out * jnp.tanh(lse)[..., None]


LENGTHS = np.array([3, 8, 5, 8], np.int32)
MASK = np.random.default_rng(0).random((B, 1, T, T)) > 0.3
FORMS: dict[str, tuple[Attend, dict[str, Any]]] = {
    "plain": (attend(), {}),
    "causal": (attend(is_causal=True, implementation="xla"), {}),
    "mask": (attend(mask=MASK), {}),
    "mask of heads": (attend(mask=MASK.repeat(4, 1)), {}),
    "bias": (attend(), {"bias": (B, 4, T, T)}),
    "shared bias": (attend(scale=0.3), {"bias": (1, 4, T, T)}),
    "grouped queries": (attend(is_causal=True), {"shared": 2}),
    "one head of keys": (attend(), {"shared": 1}),
    "window": (attend(local_window_size=(2, 1)), {}),
    "key lengths": (attend(key_value_seq_lengths=LENGTHS), {}),
    "query lengths": (attend(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS), {}),
    "residual": (with_residual, {}),
}
FAST = {"grouped queries"}


def equal(want: Any, got: Any) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5, err_msg=str(path))


def decisions(plan: alpa_lite.Plan) -> list[Any]:
    return [d for stage in plan.stages for d in stage.decisions if "dot_product_attention" in d.name]


@pytest.mark.parametrize("form", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in FORMS])
def test_every_form_is_one_operation_and_equals_one_device(form: str):
    attend, options = FORMS[form]
    step, (w, x) = step_with(attend), arguments(**options)
    run = alpa_lite.parallelize(step, method=Sharded(mesh_shape=(2, 2)), cluster=Cluster.local(jax.devices()[:4]))
    plan = run.plan(w, x)
    found = decisions(plan)
    assert [d.name.split(" [")[0] for d in found] == ["dot_product_attention", "backward of dot_product_attention"]
    assert found[0].strategy == found[1].strategy
    names = [d.name for stage in plan.stages for d in stage.decisions]
    assert not [name for name in names if name.startswith("dot_general") and f"{T},{T}]" in name]
    equal(jax.jit(step)(w, x), run(w, x))


def test_it_is_sharded_over_batch_and_heads():
    """At sizes where it is worth it, and at no other dim."""
    B, T, M, H, D = 2, 1024, 1024, 16, 64
    w = {n: jax.ShapeDtypeStruct((M, H, D), jnp.float32) for n in "qkv"}
    w["o"] = jax.ShapeDtypeStruct((H, D, M), jnp.float32)
    step = step_with(attend(is_causal=True))
    plan = alpa_lite.make_plan(
        step, w, jax.ShapeDtypeStruct((B, T, M), jnp.float32), cluster="a100", method=Sharded(mesh_shape=(2, 4))
    )
    for found in decisions(plan):
        assert found.strategy[:3] == (("x",), (), ("y",)) and not any(found.strategy[3:])


@pytest.mark.parametrize("options", [{"is_causal": True}, {"key_value_seq_lengths": LENGTHS}, {"bias": (1, 8, 64, 64)}])
def test_cudnn_is_planned_for_gpus_without_one(options: dict[str, Any]):
    """Planned, checked and printed; running it needs a GPU."""
    B, T, M, H, D = 4, 64, 128, 8, 16
    bias = options.get("bias")
    given = {n: x for n, x in options.items() if n != "bias"}
    w = {n: jax.ShapeDtypeStruct((M, H, D), jnp.bfloat16) for n in "qkv"}
    w["o"] = jax.ShapeDtypeStruct((H, D, M), jnp.bfloat16)
    if bias is not None:
        w["bias"] = jax.ShapeDtypeStruct(bias, jnp.bfloat16)
    step = step_with(attend(implementation="cudnn", **given))
    x = jax.ShapeDtypeStruct((B, T, M), jnp.bfloat16)
    plan = alpa_lite.make_plan(step, w, x, cluster="a100", method=Sharded(mesh_shape=(4, 2)))
    assert len(decisions(plan)) == 2 and "dot_product_attention" in str(plan.to_json())
    assert any("dot_product_attention_fwd" in line and "not checked" in line for line in plan.verification)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        q, k, v = (nn.DenseGeneral((4, D), name=n)(x) for n in "qkv")
        return nn.DenseGeneral(M, axis=(-2, -1))(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.LinearGeneral(M, (3, 4, D), rngs=rngs)
        self.out = nnx.LinearGeneral((4, D), M, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        q, k, v = (self.qkv(x)[:, :, i] for i in range(3))
        return self.out(jax.nn.dot_product_attention(q, k, v))


@pytest.mark.slow
def test_in_a_linen_module_with_micro_batches():
    model, x = Linen(), arguments()[1]
    w = model.init(jax.random.key(0), x)

    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda w: (jnp.asarray(model.apply(w, x)) ** 2).mean())(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    run = alpa_lite.parallelize(
        step, method=Sharded((2,)), num_microbatches=2, cluster=Cluster.local(jax.devices()[:2])
    )
    assert decisions(run.plan(w, x))
    equal(jax.jit(step)(w, x), run(w, x))


@pytest.mark.slow
def test_in_an_nnx_module():
    x = arguments()[1]

    def step(model: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda a, g: a - 0.1 * g, nnx.state(model), grads))
        return value

    mine, plain = Module(nnx.Rngs(0)), Module(nnx.Rngs(0))
    run = alpa_lite.parallelize(step, cluster=Cluster.local(jax.devices()[:2]))
    assert decisions(run.plan(mine, x))
    equal(nnx.jit(step)(plain, x), run(mine, x))
    equal(nnx.to_pure_dict(nnx.state(plain)), nnx.to_pure_dict(nnx.state(mine)))
