"""Programs of pipelines on devices: results, buffers, donation, timing and what the compiled executables say."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite import program as programs
from alpa_lite.errors import ExecutionError, VerificationError
from alpa_lite.passes import checks
from alpa_lite.program import Run, Send
from alpa_lite.report import timeline, units
from alpa_lite.runtime.pipeline import PipelineExecutable
from alpa_lite.runtime.signatures import NewSignature
from alpa_lite.timeline import Event
from tests import comparing, pipeline_driver, pipelines, zoo

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
    "gpipe": {"devices": (4, 4), "microbatches": 4},
    "1f1b": {"devices": (2, 2, 4), "microbatches": 4},
    "eager-1f1b": {"devices": (2, 2, 2, 2), "microbatches": 2},
    "interleaved-1f1b": {"devices": (4, 2), "microbatches": 4, "virtual": 2},
    "zb-h1": {"devices": (2, 4), "microbatches": 4},
}
SLOW = ("1f1b", "eager-1f1b")
ALL = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]


@functools.cache
def driven(schedule: str) -> pipeline_driver.Driven:
    return pipeline_driver.drive(step, arguments(), schedule=schedule, **CASES[schedule])


@functools.cache
def executable(schedule: str) -> PipelineExecutable:
    return driven(schedule).executable()


def deleted(tree) -> set[bool]:
    return {leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ALL)
def test_three_steps_equal_the_single_device_ones(schedule):
    pipeline_driver.compare_steps(executable(schedule), step, arguments())


@pytest.mark.parametrize("schedule", ALL)
def test_peak_of_live_arrays_is_the_program_s(schedule):
    measured = executable(schedule).measure_peak(*arguments())
    predicted = programs.peak_bytes(driven(schedule).pipeline.program)
    for have, want in zip(measured, predicted, strict=True):
        assert abs(have - want) <= 0.05 * want


def test_other_arguments_are_refused():
    state, batch = arguments()
    with pytest.raises(NewSignature):
        executable("gpipe")(state, arguments(rows=32)[1])
    with pytest.raises(NewSignature):
        executable("gpipe")(state, batch | {"z": batch["x"]})
    with pytest.raises(NewSignature):
        executable("gpipe")(state, batch | {"x": batch["x"].astype(np.float16)})


def test_a_program_for_more_devices_is_refused():
    drive = driven("gpipe")
    with pytest.raises(alpa_lite.PlanError, match="2 submeshes have 8 devices, but there are 4"):
        PipelineExecutable(drive.staged.traced, drive.pipeline, drive.cluster, jax.devices()[:4])


# -- arguments: placed, copied, donated -------------------------------------------------------------------------------


def test_what_is_placed_is_a_copy_and_the_caller_s_arrays_stay():
    run, (state, batch) = executable("gpipe"), arguments()
    placed = run.place(state, batch)
    run(*placed)
    run(state, batch)
    assert deleted((state, batch)) == {False}
    assert deleted(placed[0]) == {True} and deleted(placed[1]) == {False}


def test_an_array_that_is_two_arguments_is_copied():
    """The program consumes both; only one of them can have the buffer."""
    state, batch = arguments()
    state["params"]["layers"][1] = state["params"]["layers"][0]
    want, _ = jax.jit(step)(state, batch)
    run = executable("gpipe")
    placed, _ = run.place(state, batch)
    placed["params"]["layers"][1] = placed["params"]["layers"][0]
    got, _ = run(placed, batch)
    comparing.compare({"grads": got}, {"grads": want})


def test_a_state_that_is_dropped_is_not_kept_alive():
    run, (state, batch) = executable("gpipe"), arguments()
    state, out = run(state, batch)
    jax.block_until_ready((state, out))
    gc.collect()  # arrays of the tests before that lie in cycles, which would go with those of this one
    before = len(jax.live_arrays())
    count = len(jax.tree.leaves((state, out)))
    del state, out
    gc.collect()
    assert len(jax.live_arrays()) == before - count


def test_a_state_from_elsewhere_after_ours():
    """The remembered state must not be taken for arrays that are not it."""
    run, (first, batch) = executable("gpipe"), arguments()
    other = jax.tree.map(lambda x: 2 * x, first)
    state, _ = run(first, batch)
    mixed = {"params": state["params"], "momentum": other["momentum"]}
    want, _ = jax.jit(step)(jax.device_get(mixed), batch)
    got, _ = run(mixed, batch)
    comparing.compare({"grads": got}, {"grads": want})
    assert deleted(other) == {False}


def toy_parallel(**options):
    method = alpa_lite.Pipeline(num_stages=2, schedule="1f1b")
    return alpa_lite.parallelize(step, method=method, num_microbatches=2, **options)


@pytest.mark.parametrize(
    ("donate", "state_goes"),
    [((), False), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (((1,), False), ((0,), True)))],
)
def test_only_what_is_donated_is_deleted(donate, state_goes):
    run = toy_parallel(donate_argnums=donate, verify="off")
    host = arguments(layers=2)
    state, batch = run.place(*host)
    want, _ = jax.jit(step)(jax.jit(step)(*host)[0], host[1])
    once, _ = run(state, batch)
    twice, _ = run(once, batch)
    comparing.compare({"grads": twice}, {"grads": want})
    assert deleted(state) == deleted(once) == {state_goes}
    assert deleted(batch) == {False}


def test_donating_an_argument_that_is_not_there():
    with pytest.raises(alpa_lite.OptionError, match="donate_argnums names argument 2"):
        toy_parallel(donate_argnums=(2,), verify="off").plan(*arguments(layers=2))


@pytest.mark.parametrize("schedule", pipelines.every([1, 3], [4]), ids=lambda s: f"{s.name} {s.num_stages}")
def test_spared_buffers_are_freed_in_place_of_consumed(schedule):
    program = pipelines.toy(schedule)
    owned = {b for group in program.inputs for b in group}

    def consumed(one: programs.Program) -> set[int]:
        return {b for items in one.lists for item in items if isinstance(item, Run) for b in one.consumed(item)}

    spared = programs.sparing(program, owned)
    programs.check(spared)
    assert consumed(program) >= owned
    assert consumed(spared) == consumed(program) - owned


# -- timing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ALL)
def test_a_trace_has_every_task_once_after_what_it_reads(schedule):
    run, program = executable(schedule), driven(schedule).pipeline.program
    state, batch = arguments()
    traced = run.trace(state, batch)
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
                event, read, wrote = next(pending), program.transfers[number].sent, program.transfers[number].received
            case _:
                continue
        assert event.start >= max((made.get(b, 0.0) for b in read), default=0.0)
        assert event.end >= event.start
        made.update(dict.fromkeys(wrote, event.end))


def heavy_step(state, batch):
    """Two layers that take milliseconds for each micro-batch."""

    def loss_fn(params):
        hidden = batch["x"]
        for weight in params:
            for _ in range(20):
                hidden = hidden @ weight
        return jnp.mean(hidden**2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], loss


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
    case = zoo.get("nnx_mlp")
    make, args = case.make()
    run = pipeline_driver.drive(make, args, devices=(4, 4), microbatches=2).executable()
    before = comparing.leaves([jax.device_get(x) for x in jax.tree.leaves(args)])
    assert run.trace(*args).events
    after = comparing.leaves([jax.device_get(x) for x in jax.tree.leaves(args)])
    assert all(np.array_equal(before[k], after[k]) for k in before)


# -- what was compiled ------------------------------------------------------------------------------------------------


@functools.cache
def verified() -> tuple:
    run = toy_parallel(verify="hlo")
    args = arguments(layers=2)
    return run, args, run.plan(*args)


def test_compiled_stages_communicate_as_planned_and_their_temporaries_are_shown():
    run, args, plan = verified()
    made = run._executable(args, {})
    several = sum(made._program.submeshes[e.mesh].mesh.size > 1 for e in made._program.executables)
    assert any(f"{several} stage executables have the planned collectives" in line for line in plan.verification)
    for mesh in range(2):
        sizes = [
            memory.temp_size_in_bytes
            for memory, e in zip(made.memory_analysis(), made._program.executables, strict=True) if e.mesh == mesh
        ]  # fmt: skip
        most = units.exact_bytes(max(sizes))
        assert any(f"submesh {mesh} at most {most} of temporaries" in line for line in plan.verification)


def test_a_compiled_stage_that_communicates_otherwise_is_named():
    run, args, plan = verified()
    compiled = run._compiled(args, {})
    made = run._executable(args, {}).compiled()
    found = compiled.staged
    kinds = [executable.name for executable in found.program.executables]
    update, forward = kinds.index("stage 1 update"), kinds.index("stage 1 forward")
    assert made[update].as_text().count("all-reduce") != made[forward].as_text().count("all-reduce")
    wrong = list(made)
    wrong[forward] = made[update]
    with pytest.raises(VerificationError, match="stage 1 forward: the compiled program does not communicate"):
        checks.verified_compiled(replace(plan, verification=()), found, wrong)


def test_inputs_and_outputs_of_executables_are_the_program_s_buffers():
    run = executable("zb-h1")
    program = driven("zb-h1").pipeline.program
    first = {item.executable: item for items in program.lists for item in items if isinstance(item, Run)}
    for number, memory in enumerate(run.memory_analysis()):
        assert memory.argument_size_in_bytes == sum(program.buffers[b].bytes for b in first[number].inputs)
        outputs = sum(program.buffers[b].bytes for b in first[number].outputs)
        assert 0 <= memory.output_size_in_bytes - outputs <= 16 * len(first[number].outputs)  # a table of pointers


# -- failures that are not callbacks' ---------------------------------------------------------------------------------


def test_a_failing_instruction_is_named_with_its_lines():
    run = executable("gpipe")
    state, batch = run.place(*arguments())
    run.compiled()
    number = next(
        n for n, item in enumerate(run._items) if "stage 1 forward" in programs.describe(run._program, item.source)
    )

    def broken(*arrays):
        raise ValueError("broken")

    run._items[number] = replace(run._items[number], call=broken)
    with pytest.raises(ExecutionError, match=r"run stage 1 .*made from runtime/test_pipeline.py:\d+ .*broken"):
        run(state, batch)
