"""Models whose steps take less than starting the tasks of a pipeline get one mesh."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster, Dispatch

CPU = Cluster.preset("cpu")
FREE = dataclasses.replace(CPU, dispatch=Dispatch())
"""The same devices, where starting a task takes no time."""


def step(weights: Any, batch: Any) -> tuple[Any, Any]:
    """Least squares of a perceptron, whatever its widths."""

    def loss_fn(weights: Any) -> Any:
        hidden = batch[0]
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean((hidden - batch[1]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def planned(cluster: Cluster, widths: tuple[int, ...], examples: int, **options: Any) -> alpa_lite.Plan:
    weights = [jax.ShapeDtypeStruct(pair, "float32") for pair in itertools.pairwise(widths)]
    batch = tuple(jax.ShapeDtypeStruct((examples, width), "float32") for width in (widths[0], widths[-1]))
    return alpa_lite.make_plan(step, weights, batch, cluster=cluster, verify="off", **options)


@pytest.mark.parametrize(
    ("widths", "examples"), [((16,) * 3, 16), ((64,) * 9, 64), ((180,) * 5, 64), ((32, 256, 64, 8), 8)]
)  # fmt: skip
def test_auto_takes_one_mesh(widths: tuple[int, ...], examples: int) -> None:
    assert planned(CPU, widths, examples).num_stages == 1


def test_a_tiny_pipeline_takes_as_long_as_its_dispatch() -> None:
    """Each of four stages runs four micro-batches forward and backward: tasks that one process starts in turn."""
    widths, examples = (128,) * 9, 32
    pipeline: dict[str, Any] = {"method": alpa_lite.Pipeline(num_stages=4), "num_microbatches": 4}
    free, counted = (planned(cluster, widths, examples, **pipeline) for cluster in (FREE, CPU))
    least = (2 * 4 * 4 - 1) * CPU.dispatch.seconds(2)
    assert free.step_seconds < least <= counted.step_seconds
    mesh = planned(CPU, widths, examples, method=alpa_lite.Sharded())
    assert mesh.step_seconds == mesh.solver.objective < counted.step_seconds
