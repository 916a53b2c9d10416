"""Steps whose division into stages is known, so that nothing is searched for: given plans, and state that stays.

A plan that is given, comes from the cache or was made by another process is replayed: the step is divided as the plan
says, and each stage takes its decisions (`passes.plans.replay`). A step whose state is on submeshes is solved stage by
stage, and nothing moves: the same step on other shapes keeps the division of its first plan, and any other step is
divided by where its arguments are placed (`partition_by_placement`).
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.compilation import plan_cache
from alpa_lite.compilation.division import (
    DividedStep,
    divide_as_plan,
    partition_by_placement,
    plan_stages,
    replay_partition,
)
from alpa_lite.compilation.plan_cache import PlanCache
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import AlpaLiteError, InfeasibleError, MicrobatchError, OptionError, PlanError
from alpa_lite.ir import units
from alpa_lite.ir.paths import format_path
from alpa_lite.options import Options
from alpa_lite.passes import programs
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict, add_notes, donate_only
from alpa_lite.passes.search.configs import Analyses, ExecutionConfig
from alpa_lite.passes.stages import planning, stage_graph
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.passes.tracing.leaves import donated_leaves
from alpa_lite.plan.pins import Pin, Pins, pin_of
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Stage


def replay_plan(run: Passes, step: Step, request: PlanRequest, plan: Plan) -> Staged:
    """Returns a given plan: the step divided as it says, and each stage with its decisions, without solving.

    Raises:
      PlanError: the plan is for other arguments, devices or another program; says what differs.
    """
    replay.check_devices(plan, request.cluster)
    verdict = Verdict("step", "replayed", plan.step_seconds, plan.step_seconds)
    if not plan.is_pipelined:
        (remat,) = replay.remat_of(plan)
        loop, _ = Analyses(run, step, request).loop_of(ExecutionConfig(plan.num_microbatches, remat))
        graph, communication = stage_graph.whole_step_stage(loop.traced, loop.scan), request.options.communication
        decided = run("sharding", replay.replay, graph, request.cluster, plan.stages[0], communication)
        verdict = replace(verdict, candidates=decided.mesh_solution.candidates)
        planned = run("lowering", planning.lower_whole_step, decided, communication)
        return run("programs", programs.stage_whole_step, loop, planned, verdict, str(remat))
    if plan.division.owned:
        return replay_partition(run, step, request, plan)
    division = divide_as_plan(run, step, request, plan, plan.num_microbatches)
    return plan_stages(run, request, division, plan, verdict=verdict)


def load_cached_plan(run: Passes, step: Step, request: PlanRequest, cache: PlanCache) -> tuple[Plan, Staged] | None:
    """Returns a plan of the cache and the step in the stages that it says; None if there is none that can be used."""
    plan = cache.load()
    if plan is None:
        return None
    try:
        return plan, rebuild_stages(run, step, request, plan, request.budget)
    except AlpaLiteError as error:
        cache.refuse(str(error))
        return None


def rebuild_stages(run: Passes, step: Step, request: PlanRequest, plan: Plan, budget: float) -> Staged:
    """The step in the stages that a plan of the same step says, which came from the cache or from another process.

    Raises:
      PlanError: it takes other seconds or bytes than the plan says, or more bytes than `budget`.
    """
    staged = add_donation(replay_plan(run, step, request, plan), step, request)
    plan_cache.check_same(plan, staged, budget)
    return staged


def add_donation(staged: Staged, step: Step, request: PlanRequest) -> Staged:
    """Returns the step with the user's named leaves donated; unchanged where the option is "auto"."""
    named = request.options.donate
    return staged if named == "auto" else donate_only(staged, donated_leaves(step.traced, named))


def check_memory(plan: Plan, options: Options) -> None:
    """Raises InfeasibleError if a given plan needs more than the given memory."""
    needed = max(stage.memory.total for stage in plan.stages)
    if options.plan is not None and options.memory_per_device is not None and needed > options.memory_per_device:
        raise InfeasibleError(
            f"the given plan needs {units.exact_bytes(needed)} per device, more than memory_per_device="
            f"{units.exact_bytes(options.memory_per_device)}; leave that out, or plan again without plan=",
            needed,
        )


def is_given(request: PlanRequest) -> bool:
    """Whether the division of the step is given: by a pipeline of the same step, or by arguments on submeshes."""
    pipelined = request.like is not None and request.like.is_pipelined
    return pipelined or request.pins.on_submeshes(request.cluster.num_devices)


def plan_on_existing_placement(run: Passes, step: Step, request: PlanRequest) -> Staged:
    """As the plan of the same step divides it; where there is none, or that cannot be, as its arguments are placed.

    Raises:
      AlpaLiteError: as `divide_again` or `partition_by_placement` does.
    """
    if request.like is None or not request.like.is_pipelined:
        return partition_by_placement(run, step, request)
    try:
        return plan_stages(run, request, divide_again(run, step, request, request.like))
    except (MicrobatchError, PlanError) as error:
        if not request.pins.on_submeshes(request.cluster.num_devices):
            raise
        options = replace(request.options, num_microbatches="auto")  # the given number may be what cannot be
        staged = partition_by_placement(run, step, replace(request, options=options))
        return add_notes(
            staged, f"divided by the placement of the state, not as in the plan of the first call: {error}"
        )


def divide_again(run: Passes, step: Step, request: PlanRequest, plan: Plan) -> DividedStep:
    """Returns the step divided as a plan for other shapes divides it, its state where that plan has it.

    Layers, submeshes, schedule and rematerialisation are those of the plan; where the batch does not divide into as
    many micro-batches, there are as many as can be.

    Raises:
      PlanError: the step is another one, or has other layers.
      MicrobatchError: not even one micro-batch is possible, or none that the schedule exists for.
    """
    replay.check_devices(plan, request.cluster)
    refusals: list[Exception] = []
    for count in range(request.num_microbatches or plan.num_microbatches, 0, -1):
        try:
            division = divide_as_plan(run, step, request, plan, count)
            break
        except (MicrobatchError, OptionError) as error:
            refusals.append(error)
    else:
        raise MicrobatchError(
            f"the batch divides into no number of micro-batches from 1 to {plan.num_microbatches}, as the plan of the "
            f"first call needs it: {refusals[0]}; use a batch of the planned size"
        )
    why = f"the state is kept where the plan for {plan.num_microbatches} micro-batches of another shape has it"
    firsts = [plan.division.first_devices[mesh] for mesh in plan.division.submeshes]
    stages = zip(division.graphs, plan.stages, firsts, strict=True)
    return replace(division, pins=[_pins(graph, stage, first, why) for graph, stage, first in stages])


def _pins(graph: StageGraph, stage: Stage, first_device: int, why: str) -> Pins:
    """Returns where the state of a stage is placed, by the argument's number in it.

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
                f"{format_path(argument.path)} belongs to another stage than in the plan that the step is divided as; "
                "plan again without state_from="
            )
        found[number] = pin_of(stage, first_device, planned[argument.path], why)
    return Pins(found)
