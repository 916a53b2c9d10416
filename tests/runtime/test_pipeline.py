"""Programs of pipelines on devices: results, buffers, donation, timing and what the compiled executables say."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
import gallery
from alpa_lite.errors import ExecutionError, VerificationError
from alpa_lite.ir import program as programs
from alpa_lite.ir import units
from alpa_lite.ir.program import Run, Send
from alpa_lite.ir.timeline import Event
from alpa_lite.passes import checks
from alpa_lite.report import timeline
from alpa_lite.runtime.pipeline import PipelineExecutable
from gallery.steps import sgd
from tests import comparing, pipeline_driver
from tests.marks import slow
from tests.runtime.cases import deleted

WIDTH = 16


def step(state, batch):
    """Least squares of a network of residual layers, by momentum. Returns the gradients too."""

    def loss_fn(params):
        hidden = batch["x"]
        for layer in params["layers"]:
            hidden = hidden + jnp.tanh(hidden @ layer["a"]) @ layer["b"]
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, {"loss": loss, "grads": grads}


def arguments(layers: int = 4, rows: int = 16):
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    params = {"layers": [{"a": normal(WIDTH, 32), "b": normal(32, WIDTH)} for _ in range(layers)], "out": normal(16, 8)}
    batch = {"x": random.normal(size=(rows, WIDTH)).astype(np.float32), "y": np.ones((rows, 8), np.float32)}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}, batch


CASES = {
    "interleaved-1f1b": {"devices": (4, 2), "microbatches": 2, "virtual": 2},
    "zb-h1": {"devices": (2, 4), "microbatches": 4},
}


@functools.cache
def driven(schedule: str) -> pipeline_driver.Driven:
    return pipeline_driver.drive(step, arguments(), schedule=schedule, **CASES[schedule])


@functools.cache
def executable(schedule: str) -> PipelineExecutable:
    return driven(schedule).executable()


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", CASES)
def test_three_steps_equal_the_single_device_ones_within_the_predicted_peak(schedule):
    run = executable(schedule)
    pipeline_driver.compare_steps(run, step, arguments())
    predicted = programs.peak_bytes(driven(schedule).pipeline.program)
    for have, want in zip(pipeline_driver.measure_peak(run, *arguments()), predicted, strict=True):
        assert abs(have - want) <= 0.05 * want


# -- arguments: placed, copied, donated -------------------------------------------------------------------------------


def test_what_is_placed_is_a_copy_and_the_caller_s_arrays_stay():
    run, (state, batch) = executable("interleaved-1f1b"), arguments()
    placed = run.place(state, batch)
    run(*placed)
    run(state, batch)
    assert deleted((state, batch)) == {False}
    assert deleted(placed[0]) == {True} and deleted(placed[1]) == {False}


def test_an_array_that_is_two_arguments_is_copied():
    """The program consumes both; only one of them can have the buffer."""
    state, batch = arguments()
    layers = state["params"]["layers"]
    layers[1] = layers[0]
    want, _ = jax.jit(step)(state, batch)
    placed, _ = executable("interleaved-1f1b").place(state, batch)
    layers = placed["params"]["layers"]
    layers[1] = layers[0]
    got, _ = executable("interleaved-1f1b")(placed, batch)
    comparing.compare({"grads": got}, {"grads": want})


def test_a_state_from_elsewhere_after_ours():
    """The remembered state must not be taken for arrays that are not it."""
    run, (first, batch) = executable("interleaved-1f1b"), arguments()
    other = jax.tree.map(lambda x: 2 * x, first)
    state, _ = run(first, batch)
    mixed = {"params": state["params"], "momentum": other["momentum"]}
    want, _ = jax.jit(step)(jax.device_get(mixed), batch)
    got, _ = run(mixed, batch)
    comparing.compare({"grads": got}, {"grads": want})
    assert deleted(other) == {False}


def parallel(**options):
    method = alpa_lite.Pipeline(num_stages=2, schedule="1f1b")
    return alpa_lite.parallelize(step, method=method, num_microbatches=2, **options)


@functools.cache
def verified():
    return parallel(verify="hlo", donate_argnums=())


@pytest.mark.parametrize(
    ("donate", "state_goes"),
    [((), False), slow((1,), False), slow((0,), True)],
)
def test_only_donated_arguments_are_deleted(donate, state_goes):
    run = parallel(donate_argnums=donate, verify="off") if donate else verified()
    host = arguments(layers=2)
    state, batch = run.place(*host)
    want, _ = jax.jit(step)(jax.jit(step)(*host)[0], host[1])
    once, _ = run(state, batch)
    twice, _ = run(once, batch)
    comparing.compare({"grads": twice}, {"grads": want})
    assert deleted(state) == deleted(once) == {state_goes}
    assert deleted(batch) == {False}


# -- timing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", CASES)
def test_a_trace_has_every_task_once_after_what_it_reads(schedule):
    program, (state, batch) = driven(schedule).pipeline.program, arguments()
    traced = executable(schedule).trace(state, batch)
    assert deleted((state, batch)) == {False}
    runs = [(m, i.microbatch, program.executables[i.executable]) for m, items in enumerate(program.lists)
            for i in items if isinstance(i, Run)]  # fmt: skip
    want = sorted((m, microbatch, e.kind, e.stage) for m, microbatch, e in runs)
    tasks = [e for e in traced.events if e.kind != "transfer"]
    assert sorted((e.mesh, e.microbatch, e.kind, e.stage) for e in tasks) == want
    assert len(traced.events) - len(tasks) == len(program.transfers)
    for mesh in range(len(program.lists)):
        own = sorted((e.start, e.end) for e in tasks if e.mesh == mesh)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    check_dependencies(program, traced.events)
    names = {e["args"].get("name") for e in timeline.trace_events(traced)["traceEvents"] if e["ph"] == "M"}
    assert {"executed", "submesh 0", "submesh 1, transfers"} <= names


def check_dependencies(program: programs.Program, events: Sequence[Event]) -> None:
    """What a run or transfer reads was made before it started. Events come in the order of dispatch, as `order` has."""
    made: dict[int, float] = {}
    pending = iter(events)
    for mesh, position in program.order:
        match program.lists[mesh][position]:
            case Run() as item:
                event, read, wrote = next(pending), item.inputs, item.outputs
            case Send(transfer=number):
                event, read, wrote = (
                    next(pending),
                    program.transfers[number].sent_buffers,
                    program.transfers[number].received_buffers,
                )
            case _:
                continue
        assert event.start >= max((made.get(b, 0.0) for b in read), default=0.0)
        assert event.end >= event.start
        made.update(dict.fromkeys(wrote, event.end))


@sgd
def heavy_step(params, batch):
    """Two layers that take milliseconds for each micro-batch."""
    hidden = batch["x"]
    for weight in params:
        for _ in range(20):
            hidden = hidden @ weight
    return jnp.mean(hidden**2)


def test_a_trace_does_not_hold_the_stages_up():
    """Stages work side by side while they are traced, though on few cores each takes longer then."""
    args = [jnp.eye(256), jnp.eye(256)], {"x": np.ones((4 * 256, 256), np.float32)}
    run = pipeline_driver.drive(heavy_step, args, devices=(1, 1), microbatches=4, schedule="gpipe").executable()
    run.trace(*args)
    traced = run.trace(*args)
    first, second = ([e for e in traced.events if e.mesh == mesh and e.kind == "forward"] for mesh in (0, 1))
    together = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in first for b in second)
    assert together >= 0.2 * min(sum(e.seconds for e in first), sum(e.seconds for e in second))


def test_modules_are_not_updated_by_a_trace():
    make, args = gallery.get("zoo", "nnx_mlp").make()
    run = pipeline_driver.drive(make, args, devices=(1, 1), microbatches=2).executable()
    before = jax.device_get(jax.tree.leaves(args))
    assert run.trace(*args).events
    comparing.assert_equal(jax.device_get(jax.tree.leaves(args)), before)


# -- what was compiled ------------------------------------------------------------------------------------------------


def test_compiled_stages_communicate_as_planned_and_their_temporaries_are_shown():
    args = arguments(layers=2)
    plan = verified().plan(*args)
    made: Any = verified().prepare_call(args, {})[1]
    executables = made._program.executables
    several = sum(made._program.submeshes[e.mesh].mesh.size > 1 for e in executables)
    assert any(f"{several} stage executables have the planned collectives" in line for line in plan.verification)
    for mesh in range(2):
        memories = zip((one.memory_analysis() for one in made.compiled_executables()), executables, strict=True)
        most = units.exact_bytes(max(memory.temp_size_in_bytes for memory, e in memories if e.mesh == mesh))
        assert any(f"submesh {mesh} at most {most} of temporaries" in line for line in plan.verification)


def test_a_compiled_stage_that_communicates_otherwise_is_named():
    args = arguments(layers=2)
    made, found = (
        verified().prepare_call(args, {})[1].compiled_executables(),
        verified().prepare_call(args, {})[0].staged,
    )
    names = [executable.name for executable in found.program.executables]
    update, forward = names.index("stage 1 update"), names.index("stage 1 forward")
    assert made[update].as_text().count("all-reduce") != made[forward].as_text().count("all-reduce")
    wrong = list(made)
    wrong[forward] = made[update]
    with pytest.raises(VerificationError, match="stage 1 forward: the compiled program does not communicate"):
        checks.verify_compiled(replace(verified().plan(*args), verification=()), found, wrong)


# -- failures that are not callbacks' ---------------------------------------------------------------------------------


def test_a_failing_instruction_is_named_with_its_lines():
    run = driven("interleaved-1f1b").executable()
    state, batch = run.place(*arguments())
    run.compiled_executables()
    texts = [programs.describe(run._program, item.source) for item in run._items]
    number = next(n for n, text in enumerate(texts) if "stage 1 forward" in text)

    def broken(*arrays):
        raise ValueError("broken")

    run._items[number] = replace(run._items[number], call=broken)
    with pytest.raises(ExecutionError, match=r"run stage 1 .*made from runtime/test_pipeline.py:\d+ .*broken"):
        run(state, batch)
