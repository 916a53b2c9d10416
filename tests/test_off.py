"""Options of `jax.jit` with `method="off"` and NNX modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite


def step(model, x):
    return model(x)


def test_shardings_of_results_hold():
    mesh = Mesh(jax.devices()[:2], ("d",))
    rows = NamedSharding(mesh, PartitionSpec("d"))
    model, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
    planned = alpa_lite.parallelize(step, method="off", in_shardings=(None, rows), out_shardings=rows)
    assert planned(model, x).sharding.is_equivalent_to(rows, 2)


def test_options_for_the_compiler_are_refused():
    planned = alpa_lite.parallelize(step, method="off", compiler_options={"xla_cpu_enable_fast_math": True})
    with pytest.raises(alpa_lite.OptionError, match=r"compiler_options .* nnx.jit takes none; leave them out"):
        planned(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((8, 4)))
