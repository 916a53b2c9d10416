"""Annotations of large code bases, and steps with a `shard_map` of the user's own: planned, and as plain `jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import DataParallel, OptionError, Pipeline
from gallery.batches import normal
from gallery.steps import nnx_step, sgd
from tests.comparing import close_to_jit
from tests.helpers import mesh_of
from tests.marks import slow, slow_but

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


def test_reshard_that_jax_inserts_constrains_nothing():
    with jax.set_mesh(mesh_of(8)):
        plan = plan_close_to_jit(step_with(masked), weights(), X)
    assert not any("reshard" in note for note in plan.notes)


BATCH = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)


def mlp_weights() -> dict[str, jax.Array]:
    return {"up": normal(0, 32, 64) / 6, "down": normal(1, 64, 32) / 8}


def mapped(body: Callable[..., Any], specs: Any, out: Any, *, check_vma: bool = True, axes: Any = None) -> Any:
    """The body over the mesh of a test, to be called with the mesh, the batch and the mlp_weights."""

    def apply(mesh: Any, x: Any, w: Any) -> Any:
        names = {} if axes is None else {"axis_names": axes}
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma, **names)
        return run(x, w["up"], w["down"])

    return apply


def mlp(x: Any, up: Any, down: Any) -> Any:
    return jnp.tanh(x @ up) @ down


def gathered(x: Any, up: Any, down: Any) -> Any:
    up, down = (lax.all_gather(w, "data", axis=0, tiled=True) for w in (up, down))
    return mlp(x, up, down)


def megatron(x: Any, up: Any, down: Any) -> Any:
    return lax.psum(mlp(x, up, down), "model")


def scattered(x: Any, up: Any, down: Any) -> Any:
    return lax.psum_scatter(mlp(x, up, down), "model", scatter_dimension=1, tiled=True)


def layered(x: Any, up: Any, down: Any) -> Any:
    def layer(h, _):
        h = jax.checkpoint(mlp)(h, up, down)
        return h - lax.pmean(h.mean(), ("data", "model")), h.max()

    return lax.scan(layer, x, length=2)[0] * (1 + lax.axis_index("data"))


ROWS, WHOLE, COLUMNS = P("data"), P(), P(None, "model")
REGIONS = {
    "batch alone": mapped(mlp, (ROWS, WHOLE, WHOLE), ROWS),
    "batch alone, unchecked": mapped(mlp, (P(("data", "model")), WHOLE, WHOLE), P(("data", "model")), check_vma=False),
    "parameters gathered": mapped(gathered, (ROWS, ROWS, ROWS), ROWS, check_vma=False),
    "a sum over products": mapped(megatron, (ROWS, COLUMNS, P("model")), ROWS),
    "a scattered sum": mapped(scattered, (ROWS, COLUMNS, P("model")), P("data", "model")),
    "a loop, and means over devices": mapped(layered, (P(("model", "data")), WHOLE, WHOLE), P(("model", "data"))),
    "some axes are left to the compiler": mapped(mlp, (ROWS, WHOLE, WHOLE), ROWS, axes={"data"}),
}


def step_of(region: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    return sgd(lambda w, x: jnp.mean((region(mesh, x, w) - 1) ** 2))


def assert_equal_to_jit(plain: Any, **options: Any) -> alpa_lite.Plan:
    return close_to_jit(plain, mlp_weights(), BATCH, **options).plan(mlp_weights(), BATCH)


@pytest.mark.parametrize("name", slow_but({"batch alone", "parameters gathered", "a sum over products"}, REGIONS))
def test_regions_are_planned_as_operations_on_whole_arrays(name):
    plan = assert_equal_to_jit(step_of(REGIONS[name], mesh_of(4, 2)))
    assert "shard_map" not in {row.name for row in plan.replicated}
    assert plan.collectives


@pytest.mark.parametrize(
    "options",
    [
        {"method": DataParallel(), "num_microbatches": 2},
        slow({"method": Pipeline(num_stages=2), "num_microbatches": 2}),
    ],
)
@pytest.mark.parametrize("name", ["batch alone", slow("parameters gathered")])
def test_regions_in_micro_batches_and_stages(name, options):
    assert_equal_to_jit(step_of(REGIONS[name], mesh_of(4, 2)), **options)


@pytest.mark.parametrize("sizes", [(1, 1), slow((2, 2))])
def test_regions_for_fewer_devices_run_on_all(sizes):
    assert_equal_to_jit(step_of(REGIONS["a sum over products"], mesh_of(*sizes)))


@pytest.mark.parametrize("concrete", [True, slow(False)])
def test_the_mesh_of_the_context(concrete):
    mesh = mesh_of(8, 1)
    with jax.set_mesh(mesh):
        assert_equal_to_jit(step_of(REGIONS["parameters gathered"], mesh if concrete else None))


def turned(x: Any, up: Any, down: Any) -> Any:
    size = lax.axis_size("data")
    return lax.ppermute(mlp(x, up, down), "data", [(i, (i + 1) % size) for i in range(size)])


TURNED = mapped(turned, (ROWS, WHOLE, WHOLE), ROWS)


def test_a_region_that_moves_blocks_runs_as_it_is_written():
    plan = assert_equal_to_jit(step_of(TURNED, mesh_of(8, 1)))
    assert "shard_map" in {row.name for row in plan.replicated}


@pytest.mark.parametrize("sizes", [(1, 1), slow((4, 1))])
def test_a_region_that_moves_blocks_of_other_devices_is_refused(sizes):
    with pytest.raises(OptionError, match=rf"shard_map at .* a mesh of {sizes[0]} devices.*for 8.*ppermute"):
        alpa_lite.parallelize(step_of(TURNED, mesh_of(*sizes))).plan(mlp_weights(), BATCH)
