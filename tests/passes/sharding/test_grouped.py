"""`TensorParallel()` of convolutions in groups: cut where the groups divide over the devices, else whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import alpa_lite
from tests.gallery import sgd

CONVOLUTION = functools.partial(
    lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
)
METHODS: dict[str, Any] = {
    "tensor": {"method": alpa_lite.TensorParallel()},
    "pipeline": {"method": alpa_lite.Pipeline(submesh_shapes=((4,), (4,))), "num_microbatches": 2},
}


def compare(groups: int, inputs: int, outputs: int, method: str) -> alpa_lite.Plan:
    """Runs two convolutions, the second in groups, as planned and under plain `jit`."""

    @sgd
    def step(weights: Any, x: Any) -> Any:
        h = jnp.tanh(CONVOLUTION(x, weights["first"]))
        h = CONVOLUTION(h, weights["grouped"], feature_group_count=groups)
        return jnp.mean((h.mean((1, 2)) @ weights["dense"]) ** 2)

    def arguments() -> Any:
        rng = np.random.default_rng(0)
        shapes = {"first": (3, 3, 4, inputs), "grouped": (3, 3, inputs // groups, outputs), "dense": (outputs, 8)}
        weights = {name: jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32) for name, shape in shapes.items()}
        return weights, jnp.asarray(rng.normal(size=(16, 6, 6, 4)), jnp.float32)

    want = jax.jit(step)(*arguments())
    planned = alpa_lite.parallelize(step, **METHODS[method])
    got = planned(*arguments())
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-6)
    return planned.plan(*arguments())


@pytest.mark.parametrize(("groups", "sharded"), [(2, False), (8, True)])
def test_a_kernel_is_sharded_where_its_groups_divide(groups: int, sharded: bool) -> None:
    plan = compare(groups, 16, 32, "tensor")
    (spec,) = [leaf.spec for leaf in plan.stages[0].arguments if "grouped" in leaf.path]
    assert any(spec) == sharded


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("groups", "inputs", "outputs"), [(1, 8, 16), (2, 16, 32), (3, 12, 24), (4, 16, 16), (8, 16, 32), (16, 16, 16)]
)
def test_convolutions_in_groups_equal_plain_jit(groups: int, inputs: int, outputs: int, method: str) -> None:
    compare(groups, inputs, outputs, method)
