"""Annotations of large code bases: meshes with many axes, logical names, and constraints that constrain nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.passes.sharding.limits import _orders
from alpa_lite.report import units
from tests.comparing import close_to_jit
from tests.gallery import mesh_of, nnx_step, sgd
from tests.marks import slow, slow_but
from tests.zoo_base import normal

X = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)


NAMES = "data stage fsdp fsdp_transpose sequence context tensor tensor_transpose expert autoregressive slice layers"
"""A dozen axes, as large code bases have them."""


def weights() -> list[jax.Array]:
    return [normal(seed, 64, 64) / 8 for seed in range(2)]


def step_with(say: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step of two layers whose activations go through `say`."""

    def loss(w, h):
        for one in w:
            h = jnp.tanh(say(h) @ one)
        return jnp.mean((say(h) - 1) ** 2)

    return sgd(loss)


def plan_close_to_jit(step: Callable[..., Any], *args: Any) -> alpa_lite.Plan:
    return close_to_jit(step, *args).plan(*args)


def constrained(mesh: Any, spec: P) -> Callable[[Any], Any]:
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


MANY = mesh_of(4, 1, 2, *(1,) * 9, names=NAMES)


@pytest.mark.parametrize(
    "spec",
    [
        P(("data", "fsdp", "fsdp_transpose", "expert"), ("context", "sequence")),
        slow(P(("data", "stage"), ("fsdp", "tensor", "tensor_transpose"))),
        slow(P("slice", "layers")),
        slow(P(P.UNCONSTRAINED, "fsdp")),
        slow(P("data", P.UNCONSTRAINED)),
    ],
)
def test_a_dozen_axes_in_constraints(spec):
    with jax.set_mesh(MANY):
        plan = plan_close_to_jit(step_with(constrained(MANY, spec)), weights(), X)
    assert plan.stages[0].axis_names == tuple(NAMES.split()) and plan.stages[0].mesh_shape == MANY.axis_sizes
    assert "data=4 fsdp=2" in str(plan) and "stage=1" not in str(plan)


def test_a_dozen_axes_on_arrays():
    w = jax.device_put(weights(), NamedSharding(MANY, P(("fsdp", "tensor"), None)))
    plan = plan_close_to_jit(step_with(lambda x: x), w, X)
    assert {leaf.spec for leaf in plan.stages[0].arguments if leaf.role == "state"} == {P("fsdp")}


@pytest.mark.parametrize("axes", [1, 3, 12])
def test_orders_of_a_mesh_are_polynomial_in_the_number_of_names(axes):
    orders = list(_orders((4, 2), axes))
    assert len(orders) == len(set(orders)) == axes * (axes - 1)


class Logical(nnx.Module):
    """Layers whose kernels have logical names, and the same without them."""

    def __init__(self, names: int):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(max(names // 2, 1))])
        for i, layer in enumerate(self.layers if names else ()):
            layer.kernel.set_metadata(out_sharding=(f"name{2 * i}", f"name{2 * i + 1}"))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.parametrize("names", [4, slow(12)])
def test_logical_names_of_nnx_without_rules_are_no_constraints(names):
    def plan(names: int, layers: int) -> alpa_lite.Plan:
        model = Logical(layers)
        for layer in model.layers if not names else ():
            layer.kernel.set_metadata(out_sharding=None)
        return alpa_lite.parallelize(nnx_step).plan(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), X)

    annotated = plan(names, names)
    assert annotated.step_seconds == plan(0, names).step_seconds
    assert any(f"annotations name {names} axes" in note for note in annotated.notes)


def test_logical_names_with_rules_are_constraints():
    model = Logical(4)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with jax.set_mesh(mesh_of(4, 2)), nnx.logical_axis_rules([("name0", None), ("name1", "model")]):
        plan = alpa_lite.parallelize(nnx_step).plan(model, optimizer, X)
    assert any(spec == P(None, "model") for spec in plan.stages[0].inputs.values())


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        one = mesh_of(1)
        for _ in range(2):
            x = constrained(one, P("data", None))(jnp.tanh(nn.Dense(64)(x)))
        return x


def masked(x: Any) -> Any:
    """Attention with a mask of host data: JAX inserts `reshard` where it meets a value that has the mesh."""
    mesh = mesh_of(8)
    scores = constrained(mesh, P("data", None))(x)
    mask = np.arange(64)[:, None] >= np.arange(64)[None, :]
    return jnp.where(mask, scores, 0.0) + jnp.where(np.eye(64) > 0, 1.0, scores)


ONE = {
    "whole": constrained(mesh_of(1), P(None, None)),
    "named": constrained(mesh_of(1, 1), P("data", "model")),
    "device_put": lambda x: jax.device_put(x, NamedSharding(mesh_of(1), P(None))),
    "explicit": constrained(mesh_of(1), P()),
}


@pytest.mark.parametrize("name", slow_but({"whole"}, ONE))
def test_constraints_over_one_device_constrain_nothing(name):
    free = alpa_lite.parallelize(step_with(lambda x: x)).plan(weights(), X)
    plan = alpa_lite.parallelize(step_with(ONE[name])).plan(weights(), X)
    assert plan.step_seconds == free.step_seconds and not any("applied" in note for note in plan.notes)


def test_constraints_of_linen_over_one_device():
    model = Dense()
    step = sgd(lambda params, x: jnp.mean((jnp.asarray(model.apply(params, x)) - 1) ** 2))
    plan = alpa_lite.parallelize(step).plan(jax.eval_shape(model.init, jax.random.key(0), X), X)
    assert not any("applied" in note or "constraint" in note for note in plan.notes)


def test_reshard_that_jax_inserts_constrains_nothing():
    with jax.set_mesh(mesh_of(8)):
        plan = plan_close_to_jit(step_with(masked), weights(), X)
    assert not any("reshard" in note for note in plan.notes)


def test_axes_of_size_one_are_not_printed():
    assert units.mesh((4, 1, 2), ("a", "b", "c")) == "a=4 c=2" and units.mesh((1, 1), ("a", "b")) == "a=1"
