"""Planning a step whose state already lies on submeshes, and stays there: no search over stages, and nothing moves.

`redivided` plans the same step on other shapes: the division is that of the first plan, each stage is planned again.
Any other step is divided by where its arguments lie (`owned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpa_lite.compilation.asked import PlanRequest, Step
from alpa_lite.compilation.owned import owned, solved
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import MicrobatchError, OptionError, PlanError
from alpa_lite.ir import schedules
from alpa_lite.ir.paths import shown
from alpa_lite.ir.schedules import Schedule
from alpa_lite.passes import microbatches, programs
from alpa_lite.passes.layers.division import divisible
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict, noted
from alpa_lite.passes.search.pipeline_analysis import cut_into_stages
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.pins import Pin, Pins, pin_of
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Stage


def is_given(asked: PlanRequest) -> bool:
    """Whether the division of the step is given: by a pipeline of the same step, or by arguments on submeshes."""
    pipelined = asked.like is not None and asked.like.pipelined
    return pipelined or asked.pins.on_submeshes(asked.cluster.num_devices)


def divided_as_given(run: Passes, step: Step, asked: PlanRequest) -> Staged:
    """As the plan of the same step divides it; where there is none, or that cannot be, as its arguments lie.

    Raises:
      AlpaLiteError: as `redivided` or `owned` does.
    """
    if asked.like is None or not asked.like.pipelined:
        return owned(run, step, asked)
    try:
        return redivided(run, step, asked, asked.like)
    except (MicrobatchError, PlanError) as error:
        if not asked.pins.on_submeshes(asked.cluster.num_devices):
            raise
        anyhow = replace(asked, options=replace(asked.options, num_microbatches="auto"))  # they may be what cannot be
        staged = owned(run, step, anyhow)
        return noted(staged, f"divided by where the state lies, and not as the plan of the first call: {error}")


def redivided(run: Passes, step: Step, asked: PlanRequest, plan: Plan) -> Staged:
    """The step divided as a plan for other shapes divides it, its state where that plan has it.

    Layers, submeshes, schedule and rematerialisation are those of the plan; where the batch does not divide into as
    many micro-batches, there are as many as can be. Each stage is solved once, for the new shapes.

    Raises:
      PlanError: the step is another one, or has other layers.
      MicrobatchError: the step is no loop over micro-batches.
    """
    replay.check_devices(plan, asked.cluster)
    division = plan.division
    loop, schedule = _in_microbatches(run, step, asked, plan)
    loop, graphs = cut_as(run, loop, plan)
    why = f"the state is kept where the plan for {plan.num_microbatches} micro-batches of another shape has it"
    pins = [
        _pins(graph, stage, division.first_devices[mesh], why)
        for graph, stage, mesh in zip(graphs, plan.stages, division.submeshes, strict=True)
    ]
    shapes = [stage.mesh_shape for stage in plan.stages]
    planned = solved(run, asked, graphs, shapes, pins, split_weights=schedule.splits_backward)
    seconds = sum(stage.found.solution.objective for stage in planned)
    bound = sum(stage.found.solution.bound for stage in planned)
    return program_as(run, loop, planned, schedule, asked, plan, Verdict("layers", "feasible", seconds, bound))


def cut_as(run: Passes, loop: Accumulated, plan: Plan) -> tuple[Accumulated, tuple[StageGraph, ...]]:
    """Returns a step over micro-batches cut into the layers of a plan, with its rematerialisation, and its stages.

    Raises:
      PlanError: the step has other layers.
    """
    layers = run("layers", divisible, loop, max_layers=plan.division.max_layers)
    replay.check_layers(plan, len(layers.layering.layers))
    again: list[Choice] = [remat.choice for remat in replay.remat_of(plan)]
    return cut_into_stages(run, layers, plan.division.first_layers, again, plan.division.token_slices)


def schedule_as(plan: Plan, count: int) -> Schedule:
    """The schedule of a plan for a number of micro-batches; raises OptionError if it does not exist for it."""
    virtual, slices = plan.division.virtual, len(plan.division.token_slices) or 1
    return schedules.schedule(plan.schedule, len(plan.division.first_devices), count, virtual=virtual, slices=slices)


def program_as(
    run: Passes, loop: Accumulated, planned: Sequence[PlannedStage], schedule: Schedule, asked: PlanRequest, plan: Plan,
    verdict: Verdict,
) -> Staged:  # fmt: skip
    """The program of stages that a step was cut into as a plan says, on the plan's submeshes."""
    division = plan.division
    return run(
        "programs", programs.pipelined, loop, planned, division.first_devices, schedule, asked.cluster,
        first_layers=division.first_layers, num_layers=division.num_layers, max_layers=division.max_layers,
        remat=division.remat, token_slices=division.token_slices, idle_devices=division.idle_devices, verdict=verdict,
    )  # fmt: skip


def _in_microbatches(run: Passes, step: Step, asked: PlanRequest, plan: Plan) -> tuple[Accumulated, Schedule]:
    """The step in the plan's number of micro-batches, or in the greatest smaller one that the batch divides into.

    Raises:
      MicrobatchError: not even one micro-batch is possible, or none that the schedule exists for.
    """
    refusal = None
    for count in range(asked.num_microbatches or plan.num_microbatches, 0, -1):
        try:
            schedule = schedule_as(plan, count)
            loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **asked.inexact)
        except (MicrobatchError, OptionError) as error:
            refusal = refusal or error
            continue
        return loop, schedule
    raise MicrobatchError(f"the batch divides into no number of micro-batches that the plan allows: {refusal}")


def _pins(graph: StageGraph, stage: Stage, first_device: int, why: str) -> Pins:
    """Where the state of a stage lies, by the argument's number in it.

    Raises:
      PlanError: the stage has other state than that of the plan.
    """
    planned = {leaf.path: leaf for leaf in stage.arguments if leaf.role != "batch"}
    found: dict[int, Pin] = {}
    for number, (port, argument) in enumerate(zip(graph.inputs, graph.traced.arguments, strict=True)):
        if port.kind != "argument" or argument.role == "batch":
            continue
        if argument.path not in planned:
            raise PlanError(
                f"{shown(argument.path)} belongs to another stage than in the plan that the step is divided as; plan "
                "again without like="
            )
        found[number] = pin_of(stage, first_device, planned[argument.path], why)
    return Pins(found)
