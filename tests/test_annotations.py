"""Annotations of large code bases: meshes with many axes, logical names, and constraints that constrain nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite
from tests.comparing import close_to_jit
from tests.gallery import local, nnx_step, sgd
from tests.marks import slow, slow_but

X = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)


def mesh_of(names: str, *sizes: int, kind: AxisType = AxisType.Auto) -> Any:
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, tuple(names.split()), axis_types=(kind,) * len(sizes), devices=jax.devices()[:count])


NAMES = "data stage fsdp fsdp_transpose sequence context tensor tensor_transpose expert autoregressive slice layers"
"""A dozen axes, as large code bases have them."""


def weights() -> list[jax.Array]:
    return [jax.random.normal(key, (64, 64)) / 8 for key in jax.random.split(jax.random.key(0), 2)]


def step_with(say: Any) -> Any:
    """A step of two layers whose activations go through `say`."""

    def loss(w, x):
        for one in w:
            x = jnp.tanh(say(x) @ one)
        return jnp.mean((say(x) - 1) ** 2)

    return sgd(loss)


def constrained(mesh: Any, spec: P) -> Any:
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


MANY = mesh_of(NAMES, 4, 1, 2, *(1,) * 9)


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
        plan = close_to_jit(step_with(constrained(MANY, spec)), weights(), X).plan(weights(), X)
    assert plan.stages[0].axis_names == tuple(NAMES.split()) and plan.stages[0].mesh_shape == MANY.axis_sizes
    assert "data=4 fsdp=2" in str(plan) and "stage=1" not in str(plan)


def test_a_dozen_axes_on_arrays():
    w = jax.device_put(weights(), NamedSharding(MANY, P(("fsdp", "tensor"), None)))
    plan = close_to_jit(step_with(lambda x: x), w, X).plan(w, X)
    assert {leaf.spec for leaf in plan.stages[0].arguments if leaf.role == "state"} == {P("fsdp")}


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
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        return alpa_lite.parallelize(nnx_step, cluster=local(2)).plan(model, optimizer, X)

    annotated = plan(names, names)
    assert annotated.step_seconds == plan(0, names).step_seconds
    assert any(f"annotations name {names} axes" in note for note in annotated.notes)


def test_logical_names_with_rules_are_constraints():
    model = Logical(4)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with jax.set_mesh(mesh_of("data model", 4, 2)), nnx.logical_axis_rules([("name0", None), ("name1", "model")]):
        plan = alpa_lite.parallelize(nnx_step).plan(model, optimizer, X)
    assert any(spec == P(None, "model") for spec in plan.stages[0].inputs.values())


def masked(x: Any) -> Any:
    """Attention with a mask of host data: JAX inserts `reshard` where it meets a value that has the mesh."""
    mesh = mesh_of("data", 8)
    scores = constrained(mesh, P("data", None))(x)
    mask = np.arange(64)[:, None] >= np.arange(64)[None, :]
    return jnp.where(mask, scores, 0.0) + jnp.where(np.eye(64) > 0, 1.0, scores)


ONE = {
    "whole": constrained(mesh_of("a", 1), P(None, None)),
    "named": constrained(mesh_of("a b", 1, 1), P("a", "b")),
    "device_put": lambda x: jax.device_put(x, NamedSharding(mesh_of("a", 1), P(None))),
    "explicit": constrained(mesh_of("a", 1), P()),
}


@pytest.mark.parametrize("name", slow_but(("whole",), ONE))
def test_constraints_over_one_device_constrain_nothing(name):
    free = alpa_lite.parallelize(step_with(lambda x: x), cluster=local(2)).plan(weights(), X)
    plan = alpa_lite.parallelize(step_with(ONE[name]), cluster=local(2)).plan(weights(), X)
    assert plan.step_seconds == free.step_seconds and not any("heeded" in note for note in plan.notes)


def test_reshard_that_jax_inserts_constrains_nothing():
    with jax.set_mesh(mesh_of("data", 8)):
        plan = close_to_jit(step_with(masked), weights(), X).plan(weights(), X)
    assert not any("reshard" in note for note in plan.notes)
