"""Steps whose state already lies on submeshes: nothing of it moves, and they compute what one device computes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite import compiler
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import Compiled
from alpa_lite.errors import AlpaLiteError
from alpa_lite.options import Options, Pipeline
from alpa_lite.runtime import loading


def parameters(layers: int = 4, width: int = 16):
    keys = jax.random.split(jax.random.key(0), layers)
    return {f"w{i}": 0.1 * jax.random.normal(key, (width, width)) for i, key in enumerate(keys)}


def forward(p, x):
    for i in range(len(p)):
        x = jnp.tanh(x @ p[f"w{i}"]) + x
    return x


def train(p, x):
    loss, grad = jax.value_and_grad(lambda p: (forward(p, x) ** 2).mean())(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, grad), loss


def examples(count: int, width: int = 16):
    return jax.random.normal(jax.random.key(1), (count, width))


def cluster(devices: int) -> Cluster:
    return Cluster.local(jax.devices()[:devices])


@functools.cache
def trained(stages: int = 2, devices: int = 4, **method) -> Compiled:
    options = Options(method=Pipeline(num_stages=stages, **method), cluster=cluster(devices), num_microbatches=4)
    return compiler.compile_step(train, (parameters(), examples(8)), {}, options, cluster(devices))


def layouts(compiled: Compiled):
    stages = compiled.plan.stages
    return [{leaf.path: leaf.spec for leaf in stage.arguments if leaf.role == "state"} for stage in stages]


@pytest.mark.parametrize(("batch", "microbatches"), [(6, 3), (7, 1)])
def test_a_train_step_on_another_batch_keeps_its_division(batch: int, microbatches: int) -> None:
    first = trained()
    options = Options(method=Pipeline(num_stages=2), cluster=cluster(4))
    x = examples(batch)
    again = compiler.compile_step(train, (parameters(), x), {}, options, cluster(4), like=first.plan)
    assert again.plan.num_microbatches == microbatches
    assert layouts(again) == layouts(first)
    assert again.plan.division.submeshes == first.plan.division.submeshes
    got = loading.load(again.staged, again.plan)(*loading.load(again.staged, again.plan).place(parameters(), x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(train(parameters(), x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_division_of_another_step_is_refused() -> None:
    first = trained()
    with pytest.raises(AlpaLiteError, match="layers"):
        compiler.compile_step(
            train, (parameters(6), examples(8)), {}, Options(method=Pipeline(), cluster=cluster(4)), cluster(4),
            like=first.plan,
        )  # fmt: skip
