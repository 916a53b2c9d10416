"""A step with a `shard_map` of the user's own computes the same as plain `jit`, on any devices, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import DataParallel, OptionError, Pipeline
from tests.comparing import close_to_jit
from tests.gallery import mesh_of, sgd
from tests.marks import slow, slow_but
from tests.zoo_base import normal

X = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)


def weights() -> dict[str, jax.Array]:
    return {"up": normal(0, 32, 64) / 6, "down": normal(1, 64, 32) / 8}


def mapped(body: Callable[..., Any], specs: Any, out: Any, *, check_vma: bool = True, axes: Any = None) -> Any:
    """The body over the mesh of a test, to be called with the mesh, the batch and the weights."""

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


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(use_bias=False, use_scale=False)(x)


def linen(x: Any, up: Any, down: Any) -> Any:
    return mlp(Heads().apply({}, x), up, down)


ROWS, WHOLE, COLUMNS = P("data"), P(), P(None, "model")
REGIONS = {
    "batch alone": mapped(mlp, (ROWS, WHOLE, WHOLE), ROWS),
    "batch alone, unchecked": mapped(mlp, (P(("data", "model")), WHOLE, WHOLE), P(("data", "model")), check_vma=False),
    "parameters gathered": mapped(gathered, (ROWS, ROWS, ROWS), ROWS, check_vma=False),
    "a sum over products": mapped(megatron, (ROWS, COLUMNS, P("model")), ROWS),
    "a scattered sum": mapped(scattered, (ROWS, COLUMNS, P("model")), P("data", "model")),
    "a loop, and means over devices": mapped(layered, (P(("model", "data")), WHOLE, WHOLE), P(("model", "data"))),
    "some axes are left to the compiler": mapped(mlp, (ROWS, WHOLE, WHOLE), ROWS, axes={"data"}),
    "linen": mapped(linen, (ROWS, WHOLE, WHOLE), ROWS),
}


def step_of(region: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    return sgd(lambda w, x: jnp.mean((region(mesh, x, w) - 1) ** 2))


def assert_equal_to_jit(plain: Any, **options: Any) -> alpa_lite.Plan:
    return close_to_jit(plain, weights(), X, **options).plan(weights(), X)


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
        alpa_lite.parallelize(step_of(TURNED, mesh_of(*sizes))).plan(weights(), X)
