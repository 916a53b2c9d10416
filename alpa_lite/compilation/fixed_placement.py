"""Planning a step whose state is on submeshes already, and stays there: no search over stages, and nothing moves.

The same step on other shapes keeps the division of its first plan, and each stage is planned again. Any other step is
divided by where its arguments are placed (`partition_by_placement`).
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.compilation.division import DividedStep, cut_as_plan, divide_as_plan, solve
from alpa_lite.compilation.partition_by_placement import partition_by_placement
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import MicrobatchError, OptionError, PlanError
from alpa_lite.ir.paths import shown
from alpa_lite.ir.schedules import Schedule
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, noted
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.pins import Pin, Pins, pin_of
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Stage


def is_given(request: PlanRequest) -> bool:
    """Whether the division of the step is given: by a pipeline of the same step, or by arguments on submeshes."""
    pipelined = request.like is not None and request.like.pipelined
    return pipelined or request.pins.on_submeshes(request.cluster.num_devices)


def plan_on_existing_placement(run: Passes, step: Step, request: PlanRequest) -> Staged:
    """As the plan of the same step divides it; where there is none, or that cannot be, as its arguments are placed.

    Raises:
      AlpaLiteError: as `divide_again` or `partition_by_placement` does.
    """
    if request.like is None or not request.like.pipelined:
        return partition_by_placement(run, step, request)
    try:
        return solve(run, request, divide_again(run, step, request, request.like))
    except (MicrobatchError, PlanError) as error:
        if not request.pins.on_submeshes(request.cluster.num_devices):
            raise
        options = replace(request.options, num_microbatches="auto")  # the given number may be what cannot be
        staged = partition_by_placement(run, step, replace(request, options=options))
        return noted(staged, f"divided by the placement of the state, not as in the plan of the first call: {error}")


def divide_again(run: Passes, step: Step, request: PlanRequest, plan: Plan) -> DividedStep:
    """The step divided as a plan for other shapes divides it, its state where that plan has it.

    Layers, submeshes, schedule and rematerialisation are those of the plan; where the batch does not divide into as
    many micro-batches, there are as many as can be.

    Raises:
      PlanError: the step is another one, or has other layers.
      MicrobatchError: the step cannot be a loop over micro-batches.
    """
    replay.check_devices(plan, request.cluster)
    loop, schedule = _in_most_microbatches(run, step, request, plan)
    division = divide_as_plan(run, loop, schedule, plan)
    why = f"the state is kept where the plan for {plan.num_microbatches} micro-batches of another shape has it"
    firsts = [plan.division.first_devices[mesh] for mesh in plan.division.submeshes]
    stages = zip(division.graphs, plan.stages, firsts, strict=True)
    return replace(division, pins=[_pins(graph, stage, first, why) for graph, stage, first in stages])


def _in_most_microbatches(run: Passes, step: Step, request: PlanRequest, plan: Plan) -> tuple[Accumulated, Schedule]:
    """The step in the plan's number of micro-batches, or in the greatest smaller one that the batch divides into.

    Raises:
      MicrobatchError: not even one micro-batch is possible, or none that the schedule exists for.
    """
    refusal = None
    for count in range(request.num_microbatches or plan.num_microbatches, 0, -1):
        try:
            return cut_as_plan(run, step, request, plan, count)
        except (MicrobatchError, OptionError) as error:
            refusal = refusal or error
    raise MicrobatchError(f"the batch divides into no number of micro-batches that the plan allows: {refusal}")


def _pins(graph: StageGraph, stage: Stage, first_device: int, why: str) -> Pins:
    """Where the state of a stage is placed, by the argument's number in it.

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
                "again without state_from="
            )
        found[number] = pin_of(stage, first_device, planned[argument.path], why)
    return Pins(found)
