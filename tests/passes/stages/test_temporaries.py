"""Temporaries of stages against the compiler's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from alpa_lite import Pipeline
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.passes.checks.verification import compiled_reports
from alpa_lite.runtime import ahead

WIDTH, BATCH = 256, 512


def step(state, x):
    def loss(state):
        y = x
        for w in state:
            y = jax.nn.relu(y @ w)
        return (y * y).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], value


def test_temporaries_of_stages_are_the_compilers():
    """Of each stage the executable that needs most: products, their operands, and one gradient at a time."""
    devices = jax.devices()[:2]
    cluster = Cluster.local(devices)
    state = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 6
    options = make_options(
        {"method": Pipeline(num_stages=2, schedule="1f1b", remat="none"), "num_microbatches": 2, "cluster": cluster}
    )
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    compiled = compile_step(step, (state, x), {}, options, cluster)
    executables = list(ahead.compiled_for(compiled.staged, compiled.plan, devices))
    most = {0: [0, 0], 1: [0, 0]}
    for found in compiled_reports(compiled.plan, compiled.staged, executables, "cpu"):
        assert found.memory is not None and found.memory.predicted is not None
        pair = found.memory.predicted, found.memory.temporaries
        most[found.submesh] = [max(a, b) for a, b in zip(most[found.submesh], pair, strict=True)]
    for predicted, measured in most.values():
        assert measured > WIDTH * WIDTH * 4
        assert predicted == pytest.approx(measured, rel=0.25)
