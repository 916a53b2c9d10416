"""What users do around a step: options that do not fit, plans given again, tracers, callbacks that raise."""

import contextlib
import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import alpa_lite
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from gallery.batches import normal
from gallery.steps import descent, distance, layers
from tests import comparing, pipeline_driver
from tests.helpers import local
from tests.marks import slow

WIDTH, ROWS = 16, 8


step = descent(distance)


def arguments(rows: int = ROWS) -> tuple[Any, Any]:
    params = [normal(i, WIDTH, WIDTH) / 4 for i in range(4)]
    return {"params": params}, {"x": normal(8, rows, WIDTH), "y": normal(9, rows, WIDTH)}


def parallel(devices: int = 8, microbatches: int = 2, *, free: bool = False, **method: Any) -> Any:
    """`free`: whether starting a task takes no time."""
    cluster = dataclasses.replace(local(devices), dispatch=0.0) if free else local(devices)
    return alpa_lite.parallelize(
        step, method=alpa_lite.Pipeline(**method), num_microbatches=microbatches, cluster=cluster
    )


# -- options of pipelines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "method", "said"),
    [
        (1, {"num_stages": 2}, "num_stages=2 needs as many devices, but the cluster has 1"),
        (3, {"num_stages": 4}, "num_stages=4 needs as many devices, but the cluster has 3"),
        (8, {"submesh_shapes": (2, 4, 4)}, "needs 10 devices, but the cluster has 8"),
    ],
)
def test_more_devices_than_there_are(devices: int, method: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parallel(devices, **method).plan(*arguments())


@pytest.mark.parametrize("shapes", [((1, 2), 4), slow(((2, 1), (2, 2), 1))])
def test_submeshes_of_given_shapes_and_of_given_sizes(shapes: Any) -> None:
    run = parallel(submesh_shapes=shapes)
    plan = run.plan(*arguments())
    sizes = [int(np.prod(shape)) for shape in shapes]
    assert [int(np.prod(stage.mesh_shape)) for stage in plan.stages] == sizes
    assert all(
        stage.mesh_shape == shape for stage, shape in zip(plan.stages, shapes, strict=True) if isinstance(shape, tuple)
    )
    pipeline_driver.compare_steps(run, step, arguments())


@pytest.mark.parametrize(
    ("devices", "method", "used", "said"),
    [
        (8, {"submesh_shapes": (2, 4)}, 6, "6 of 8 devices are used: submesh_shapes names no more"),
        (3, {"num_stages": 2}, 3, ""),
        (5, {"num_stages": 2}, 5, ""),
    ],
)
def test_why_devices_are_left_over(devices: int, method: Any, used: int, said: str) -> None:
    plan = parallel(devices, free=True, **method).plan(*arguments())
    assert plan.num_devices == used
    assert "".join(note for note in plan.notes if "devices are used" in note) == said


def test_devices_that_take_longer_to_start_than_they_compute_are_left_over() -> None:
    """On CPUs a process starts each device. Two stages were measured to take 1.9 ms on two devices, 3.5 on three."""
    plan = parallel(3, num_stages=2).plan(*arguments())
    assert plan.num_devices == 2
    said = "2 of 3 devices are used: every pipeline on all of them is predicted to be slower"
    assert said in plan.notes
    assert parallel(3, submesh_shapes=(1, 2)).plan(*arguments()).step_seconds > 1.2 * plan.step_seconds


@pytest.mark.slow
def test_what_was_weighed_has_the_chosen_one() -> None:
    plan = parallel(microbatches=4, submesh_shapes=(1, 4)).plan(*arguments())
    assert [candidate.status for candidate in plan.candidates].count("chosen") == 1


@pytest.mark.parametrize("method", [{"num_stages": 2}, {"submesh_shapes": (1, 1)}])
def test_too_little_memory_is_said_of_the_memory(method: Any) -> None:
    run = alpa_lite.parallelize(step, method=alpa_lite.Pipeline(**method), num_microbatches=4, memory_per_device=1000)
    with pytest.raises(InfeasibleError, match=r"memory_per_device=1000 B is .* short"):
        run.plan(*arguments())


def test_a_batch_that_does_not_divide_is_said_of_the_batch() -> None:
    with pytest.raises(MicrobatchError, match=r"holds 6 examples, which 4 micro-batches do not divide"):
        parallel(microbatches=4, num_stages=2).plan(*arguments(6))


# -- given plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [alpa_lite.Sharded(), alpa_lite.Pipeline(num_stages=2)])
def test_a_given_plan_proves_nothing_and_fits_the_memory(method: Any) -> None:
    parts = 2 if isinstance(method, alpa_lite.Pipeline) else 1
    plan = alpa_lite.parallelize(step, method=method, num_microbatches=parts, cluster=local(2)).plan(*arguments())
    again = alpa_lite.parallelize(step, plan=plan, cluster=local(2)).plan(*arguments())
    assert again.solver.status == "replayed"
    assert "no gap" not in str(again) and "gap" not in " ".join(again.notes)
    with pytest.raises(InfeasibleError, match="more than memory_per_device=500"):
        alpa_lite.parallelize(step, plan=plan, cluster=local(2), memory_per_device=500).plan(*arguments())


# -- transformations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [alpa_lite.Sharded(), slow(alpa_lite.Pipeline(num_stages=2))])
def test_under_a_transformation_the_step_is_what_was_written(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    parts = 2 if isinstance(method, alpa_lite.Pipeline) else 1
    run = alpa_lite.parallelize(step, method=method, num_microbatches=parts)
    args = arguments()
    want = jax.jit(step)(*args)
    for first in (True, False):  # before and after it was planned
        with caplog.at_level(logging.WARNING, logger="alpa_lite"):
            shapes = jax.eval_shape(run, *args)
        assert "as written" in caplog.text
        assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, want)
        comparing.compare(jax.jit(run)(*args), want)
        with jax.disable_jit():
            comparing.compare(run(*args), want)
        if first:
            run(*jax.tree.map(jnp.copy, args))


def test_invalid_numbers_of_a_stage_are_floating_point_errors() -> None:
    state, batch = arguments()
    run = parallel(2, num_stages=2)
    run(*jax.tree.map(jnp.copy, (state, batch)))
    invalid = {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"x was given to .* with an invalid value"):
        run(state, invalid)


# -- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pure", slow("io")])
@pytest.mark.parametrize("method", [alpa_lite.Sharded((8,)), alpa_lite.Pipeline(submesh_shapes=(4, 4))])
def test_a_callback_that_raises_on_several_devices_ends_the_step_alone(method: Any, kind: str) -> None:
    """Checked like any other step; the error names the line, nothing hangs, and the next call works."""
    raises = [False]

    def host(x: Any) -> Any:
        if raises[0]:
            raise RuntimeError("boom")
        return np.asarray(x)

    def calling(params: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ params[0])
        fixed = jax.lax.stop_gradient(x)
        if kind == "pure":
            shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            call = lambda row: jax.pure_callback(host, shape, row, vmap_method="sequential")  # noqa: E731
            x = x + jax.vmap(call)(fixed)
        else:
            io_callback(lambda v: print(end="") if host(v) is None else None, None, fixed)
        return ((layers(params[1:], x) - batch["y"]) ** 2).mean()

    run = alpa_lite.parallelize(descent(calling), method=method, num_microbatches=1, donate_argnums=())
    args = arguments()
    want = jax.jit(descent(calling))(*args)
    assert any("Shardy" in line for line in run.plan(*args).verification)
    comparing.compare(run(*args), want)
    raises[0] = True
    with pytest.raises(Exception, match=r"(step|stage \d \w+).*: a callback raised RuntimeError: boom"):
        jax.block_until_ready(run(*args))
    with contextlib.suppress(Exception):  # what was raised is told once more to who waits for all effects
        jax.effects_barrier()
    raises[0] = False
    comparing.compare(run(*args), want)
