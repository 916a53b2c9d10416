"""Functions that are one operation: `register_rule` and Pallas kernels, on one mesh, in parts and in stages."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite import Pipeline, RuleError, Sharded, register_rule
from gallery.batches import normal
from gallery.kernels import flash, norm
from gallery.steps import sgd
from tests.comparing import assert_close
from tests.marks import slow

M, H, D = 16, 4, 4
B, S = 8, 8
FLASH = "b s h d, b t h d, b t h d -> b s h d"
ATTENTION = register_rule(flash, FLASH, replicate="s t d")
NORM = register_rule(norm, "b d, d -> b d", replicate="d")


def weights(layers: int = 1) -> Any:
    shapes = {"q": (M, H, D), "k": (M, H, D), "v": (M, H, D), "o": (H, D, M)}
    return [{n: normal(4 * i + j, *shapes[n]) / 4 for j, n in enumerate("qkvo")} for i in range(layers)]


def inputs() -> jax.Array:
    return normal(9, B, S, M)


def step_with(attend: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, y: Any) -> Any:
        for layer in w:
            q, k, v = (jnp.einsum("bsm,mhd->bshd", y, layer[n]) for n in "qkv")
            y = y + jnp.einsum("bshd,hdm->bsm", attend(q, k, v), layer["o"])
        return (y**2).mean()

    return sgd(loss)


def equal(want: Any, got: Any) -> None:
    assert_close(got, want, rtol=2e-5, atol=2e-5)


def decisions(plan: alpa_lite.Plan, name: str) -> list[Any]:
    return [d for stage in plan.stages for d in stage.decisions if name in d.name]


@pytest.mark.parametrize("parts", [slow(1), 2])
def test_a_registered_attention_is_sharded_over_batch_and_heads_forward_and_backward(parts: int):
    step = step_with(ATTENTION)
    run = alpa_lite.parallelize(step, method=Sharded(mesh_shape=(2, 4)), num_microbatches=parts)
    w, x = weights(), inputs()
    plan = run.plan(w, x)
    found = decisions(plan, "flash")
    assert [d.name.split(" [")[0] for d in found] == ["flash", "backward of flash"]
    batch, heads = found[0].strategy[0], found[0].strategy[2]
    assert {batch, heads} == {("x",), ("y",)}
    assert all(d.strategy == (batch, (), heads, (), ()) for d in found)
    assert not plan.stages[0].replicated
    assert not any(
        c.bytes >= B // parts * S * H * D * 4 for c in plan.collectives if c.kind == "all_gather" and parts > 1
    )
    equal(jax.jit(step_with(flash))(w, x), run(w, x))
    text = run.hlo(w, x)[0]
    sizes = {("x",): 2, ("y",): 4}
    block = f"f32[{B // sizes[batch] // parts},{S},{H // sizes[heads]},{D}]"
    assert block in text and f"f32[{B // parts},{S},{H},{D}]" not in text


@pytest.mark.slow
def test_a_kernel_is_sharded_where_the_compiler_communicates():
    step = step_with(ATTENTION)
    run = alpa_lite.parallelize(step, method=Sharded(mesh_shape=(2, 4)), communication="compiler")
    w, x = weights(), inputs()
    equal(jax.jit(step_with(flash))(w, x), run(w, x))
    assert f"f32[{B},{S},{H},{D}]" not in run.hlo(w, x)[0]


def test_an_unregistered_kernel_is_sharded_along_independent_dims_of_its_grid():
    step = step_with(flash)
    run = alpa_lite.parallelize(step, method=Sharded(mesh_shape=(2, 4)))
    w, x = weights(), inputs()
    assert not run.plan(w, x).stages[0].replicated
    equal(jax.jit(step)(w, x), run(w, x))


def test_an_unregistered_kernel_without_a_grid_is_replicated_with_a_note_that_names_the_remedy():
    step = sgd(lambda w, x: (norm(x @ w["in"], w["scale"]) ** 2).mean())
    w, x = {"in": normal(0, M, M), "scale": jnp.full((M,), 1.5)}, normal(1, 64, M)
    run = alpa_lite.parallelize(step, method=Sharded((8,)))
    plan = run.plan(w, x)
    assert {r.name for r in plan.stages[0].replicated} == {"pallas_call"}
    assert all("register_rule" in r.reason for r in plan.stages[0].replicated)
    equal(jax.jit(step)(w, x), run(w, x))


def test_what_an_operand_lacks_is_summed_in_its_gradient():
    step = sgd(lambda w, x: (NORM(x @ w["in"], w["scale"]) ** 3).mean())
    w, x = {"in": normal(0, M, M), "scale": jnp.full((M,), 1.5)}, normal(1, 4096, M)
    run = alpa_lite.parallelize(step, method=Sharded((8,)))
    plan = run.plan(w, x)
    assert [d.strategy for d in decisions(plan, "norm")] == [(("x",), ())] * 2
    assert M * 4 in [c.bytes for c in plan.collectives if c.kind == "all_reduce"]
    equal(jax.jit(step)(w, x), run(w, x))


@pytest.mark.slow
def test_kernels_in_the_stages_of_a_pipeline():
    step = step_with(ATTENTION)
    w, x = weights(2), inputs()
    run = alpa_lite.parallelize(step, method=Pipeline(num_stages=2), num_microbatches=2)
    assert len(run.plan(w, x).stages) == 2
    equal(jax.jit(step_with(flash))(w, x), run(w, x))


def test_the_example_of_the_documentation_runs():
    page = (Path(alpa_lite.__file__).parents[1] / "docs" / "kernels.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["w"].shape == (16,)


# --- derivatives and vectorisation, without a plan --------------------------------------------------------------------


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x) @ w


PRODUCT = register_rule(product, "... k, k n -> ... n", reduce="sum")


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1)),
        lambda f: lambda x, w: jax.jvp(f, (x, w), (w.T, x.T)),
        slow(lambda f: jax.hessian(lambda x, w: (f(x, w) ** 2).sum())),
        lambda f: jax.grad(lambda x, w: (jax.vmap(f, (0, None))(x, w) ** 2).sum(), (0, 1)),
        lambda f: jax.checkpoint(jax.grad(lambda x, w: (f(x, w) ** 2).sum())),
    ],
)
def test_derivatives_of_a_kernel_are_those_of_the_function(transform: Any):
    x, w = normal(0, 3, 2), normal(1, 2, 3)
    equal(transform(product)(x, w), transform(PRODUCT)(x, w))


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_name_that_results_lack_is_reduced_as_the_rule_says(reduce: Any):
    lowest = register_rule(lambda x: getattr(jnp, reduce)(x, axis=0), "b d -> d", reduce=reduce)

    def step(w: Any, x: Any) -> Any:
        return w + lowest(x * 2), None

    w, x = jnp.zeros(4), normal(0, 2**16, 4)
    run = alpa_lite.parallelize(step, method=alpa_lite.DataParallel())
    plan = run.plan(w, x)
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    np.testing.assert_allclose(step(w, x)[0], run(w, x)[0], rtol=1e-3)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    [
        ("b s d", {}, "no single '->'"),
        ("b s! -> b", {}, "cannot be read"),
        ("b b -> b", {}, "twice"),
        ("(b s -> b", {}, "bracket"),
        ("b ... -> b", {}, "must come first"),
        ("b s -> b t", {}, "results of the rule 'b s -> b t' alone"),
        ("b s -> b", {"replicate": "t"}, "replicate names 't'"),
        ("b s -> b", {"reduce": {"t": "sum"}}, "reduce names 't'"),
        ("b s -> b", {"reduce": {"b": "sum"}}, "every result"),
        ("b s -> b", {"reduce": {"s": "mean"}}, "'sum', 'max' or 'min'"),
    ],
)
def test_rules_that_cannot_be(rule: str, options: Any, says: str):
    with pytest.raises(RuleError, match="register_rule") as error:
        register_rule(product, rule, **options)
    assert says in str(error.value) and "product" in str(error.value)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("b k -> b n", "has 1"),
        ("b s k, k n -> b n", "operand 0 of product has shape (2, 4), of rank 2"),
        ("k b, k n -> b n", "different names"),
        ("(b k) m, m n -> (b k) n", "how large b and k"),
    ],
)
def test_calls_that_do_not_fit_the_rule(rule: str, says: str):
    with pytest.raises(RuleError) as error:
        register_rule(product, rule, replicate="n k b")(jnp.ones((2, 4)), jnp.ones((4, 3)))
    assert says in str(error.value)


def test_a_function_that_does_not_run_on_blocks_is_named_with_the_remedy():
    fixed = register_rule(lambda x: x.reshape(16, 4) * 2, "b d -> b d")
    with pytest.raises(RuleError, match=r"cannot be traced on operands of shapes \(8, 4\).*replicate"):
        alpa_lite.parallelize(lambda w, x: (w + fixed(x).sum(0), None), method=alpa_lite.DataParallel()).plan(
            jnp.zeros(4), jnp.ones((16, 4))
        )


def test_arrays_come_by_position():
    with pytest.raises(RuleError, match="by position"):
        PRODUCT(jnp.ones((2, 4)), w=jnp.ones((4, 3)))
    outside = register_rule(lambda f: f(), "-> b", replicate="b")
    with pytest.raises(RuleError, match="make it an operand"):
        jax.jit(lambda x: register_rule(lambda y: y + x, "b -> b")(x))(jnp.ones(3))
    assert "-> b" in repr(outside)
