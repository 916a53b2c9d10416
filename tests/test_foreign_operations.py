"""Operations that only their user knows: FFI calls, custom partitioning, own primitives; and what lowers elsewhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir

import alpa_lite
from alpa_lite import DataParallel, RuleError, Sharded, register_rule
from alpa_lite.methods import Method
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import assert_close
from tests.helpers import local

M = 16
ROWS = 4096


def step_with(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose new state has gradients, and a sum of results of `fun`."""
    descent = sgd(lambda w, x: ((x @ w) ** 2).mean())

    def step(w: Any, x: Any) -> Any:
        new, value = descent(w, x)
        return new + 1e-3 * fun(x, x * 2).sum(0)[:, None], value

    return step


def arguments() -> Any:
    return jnp.eye(M), normal(0, ROWS, M)


LINE = Sharded((4,))


def planned(fun: Callable[..., Any], method: Method = LINE) -> tuple[Any, alpa_lite.Plan]:
    """By default with strategies as decisions, of which textbook methods leave none."""
    run = alpa_lite.parallelize(step_with(fun), method=method, cluster=local(4))
    return run, run.plan(*arguments())


def strategies(plan: alpa_lite.Plan, name: str) -> list[Any]:
    return [d.strategy for d in plan.stages[0].decisions if d.name.startswith(f"{name} [")]


def equal(run: Any, fun: Callable[..., Any]) -> None:
    """The planned step computes what one device does with a function."""
    assert_close(run(*arguments()), jax.jit(step_with(fun))(*arguments()), rtol=1e-4, atol=1e-5)


# --- custom_partitioning ----------------------------------------------------------------------------------------------


def sorted_sum(x: Any, y: Any) -> Any:
    return jnp.sort(x, -1) + y


def as_given(mesh: Any, operands: Any, results: Any) -> Any:
    return mesh, sorted_sum, jax.tree.map(lambda r: r.sharding, results), jax.tree.map(lambda a: a.sharding, operands)


def communicating(mesh: Any, operands: Any, results: Any) -> Any:
    _, _, made, taken = as_given(mesh, operands, results)
    return mesh, lambda x, y: sorted_sum(x, y) + 0 * jax.lax.psum(y, mesh.axis_names), made, taken


def by_types(mesh: Any, operands: Any, results: Any) -> str:
    return "b d, b d -> b d" if len(operands[0].shape) == 2 else "d, d -> d"


@pytest.mark.parametrize("rule", ["... d, ... d -> ... d", by_types])
def test_custom_partitioning_is_sharded_as_its_own_rule_says(rule: Any):
    fun = custom_partitioning(sorted_sum)
    whole: Any = {} if callable(rule) else {"need_replication_factors": ("d",)}
    fun.def_partition(as_given, sharding_rule=rule, **whole)
    run, plan = planned(fun)
    assert strategies(plan, "custom_partitioning") == [(("x",), ())] and not plan.stages[0].replicated
    equal(run, sorted_sum)
    assert f"f32[{ROWS // 4},{M}]" in run.hlo(*arguments())[0]


@pytest.mark.parametrize(("partition", "rule"), [(communicating, "b d, b d -> b d"), (as_given, None)])
def test_custom_partitioning_that_a_plan_cannot_follow_is_whole(partition: Any, rule: Any):
    fun = custom_partitioning(sorted_sum)
    fun.def_partition(partition, sharding_rule=rule)
    run, plan = planned(fun, DataParallel())
    if rule is None:
        assert "register_rule" in plan.stages[0].replicated[0].reason
    else:
        assert [c.kind for c in plan.collectives].count("all_gather") == 2 and not strategies(
            plan, "custom_partitioning"
        )
    equal(run, sorted_sum)


# --- own primitives and FFI -------------------------------------------------------------------------------------------


def own_primitive() -> Any:
    """A primitive as a user defines one; its name is that of no operation of JAX."""
    primitive = jex.Primitive("users_own")
    primitive.def_impl(sorted_sum)
    primitive.def_abstract_eval(lambda x, y: x)
    mlir.register_lowering(primitive, mlir.lower_fun(sorted_sum, multiple_results=False))
    return primitive


def test_a_primitive_of_the_user_is_bound_again_on_blocks():
    primitive = own_primitive()
    run, plan = planned(primitive.bind)
    assert [r.name for r in plan.stages[0].replicated] == ["users_own"]
    assert register_rule(primitive, "b d, b d -> b d", replicate="d") is primitive
    run, plan = planned(primitive.bind)
    assert strategies(plan, "users_own") == [(("x",), ())] and not plan.stages[0].replicated
    equal(run, sorted_sum)


def test_a_rule_that_does_not_fit_a_primitive_names_both():
    primitive = own_primitive()
    register_rule(primitive, "b d -> b d")
    with pytest.raises(RuleError, match=r"users_own has 2 operands of shapes \(4096, 16\), \(4096, 16\)"):
        planned(primitive.bind)


def foreign(x: Any, y: Any) -> Any:
    return jax.ffi.ffi_call("alpa_lite_test_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


def test_an_ffi_call_has_the_rule_of_its_target():
    """The target does not exist: the step is planned and checked, and what it lowers to has the blocks' shape."""
    _, plan = planned(foreign)
    assert "name of its target" in plan.stages[0].replicated[0].reason
    register_rule("alpa_lite_test_target", "b d, b d -> b d", replicate="d")
    _, plan = planned(foreign)
    assert strategies(plan, "alpa_lite_test_target") == [(("x",), ())] and not plan.stages[0].replicated
    assert plan.verification[0].startswith("Shardy: ")


# --- what lowers where its devices are --------------------------------------------------------------------------------


def compiled_kernel(x: Any, y: Any) -> Any:
    def add(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(add, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


def called_back(x: Any, y: Any) -> Any:
    return jax.pure_callback(np.add, jax.ShapeDtypeStruct(x.shape, x.dtype), x, y)


REGISTERED = register_rule(compiled_kernel, "b d, b d -> b d")


@pytest.mark.parametrize(
    ("fun", "name", "cluster"),
    [
        (REGISTERED, "compiled_kernel", "v5p"),
        (REGISTERED, "compiled_kernel", "cpu"),
        (called_back, "pure_callback", "a100"),
    ],
)
def test_what_stood_in_for_operations_is_said(fun: Any, name: str, cluster: str):
    plan = alpa_lite.make_plan(step_with(fun), *arguments(), cluster=cluster, method=DataParallel())
    checked, not_checked = plan.verification
    assert checked.startswith("Shardy: ")
    assert not_checked.startswith(f"not checked: the inside of {name};")


def test_a_branch_of_another_platform_is_not_lowered():
    def fun(x: Any, y: Any) -> Any:
        return jax.lax.platform_dependent(x, y, cpu=sorted_sum, cuda=foreign, default=lambda x, y: x)

    run, plan = planned(fun)
    assert plan.verification[0].startswith("Shardy: ")
    equal(run, fun)
