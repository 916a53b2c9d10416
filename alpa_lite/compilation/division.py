"""A step in stages whose submeshes are known: each stage is solved, or takes the decisions of a plan, without a search.

A division comes from a plan of the same step (`divide_as_plan`) or from where arguments are placed
(`partition_by_placement`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.ir import schedules
from alpa_lite.ir.schedules import Schedule
from alpa_lite.options import Sharded
from alpa_lite.passes import microbatches, programs
from alpa_lite.passes.layers.division import divisible
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict
from alpa_lite.passes.search.pipeline_analysis import cut_into_stages
from alpa_lite.passes.stages import planning
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.pins import Pins
from alpa_lite.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class DividedStep:
    """A step in stages.

    Attributes:
      loop: the step, over micro-batches if there are several.
      graphs: its stages.
      schedule: of their tasks.
      mesh_shapes: of each stage.
      first_devices: of each submesh.
      layers: the layers of the stages, as `programs.pipelined` takes them by keyword.
      pins: of each stage, by the argument's number in it; used where stages are solved.
      idle_devices, owned: as of a plan's division.
      copied: notes on leaves that are copied to another submesh in each call.
    """

    loop: Accumulated
    graphs: Sequence[StageGraph]
    schedule: Schedule
    mesh_shapes: Sequence[Sequence[int]]
    first_devices: Sequence[int]
    layers: Mapping[str, Any]
    pins: Sequence[Pins] = ()
    idle_devices: str = ""
    owned: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


def cut_as_plan(run: Passes, step: Step, request: PlanRequest, plan: Plan, count: int) -> tuple[Accumulated, Schedule]:
    """The step in `count` micro-batches, and the schedule of a plan for them.

    Raises:
      MicrobatchError, OptionError: the batch does not divide into them, or the schedule does not exist for them.
    """
    division = plan.division
    schedule = schedules.schedule(
        plan.schedule, len(division.first_devices), count, virtual=division.virtual,
        slices=len(division.token_slices) or 1,
    )  # fmt: skip
    return run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **request.inexact), schedule


def divide_as_plan(run: Passes, loop: Accumulated, schedule: Schedule, plan: Plan) -> DividedStep:
    """A step over micro-batches in the stages of a plan.

    Raises:
      PlanError: the step has other layers.
    """
    division = plan.division
    layers = run("layers", divisible, loop, max_layers=division.max_layers)
    replay.check_layers(plan, len(layers.layering.layers))
    choices: list[Choice] = [remat.choice for remat in replay.remat_of(plan)]
    loop, graphs = cut_into_stages(run, layers, division.first_layers, choices, division.token_slices)
    names = ("first_layers", "num_layers", "max_layers", "remat", "token_slices")
    return DividedStep(
        loop, graphs, schedule, [stage.mesh_shape for stage in plan.stages], division.first_devices,
        {name: getattr(division, name) for name in names}, idle_devices=division.idle_devices,
    )  # fmt: skip


def plan_stages(
    run: Passes, request: PlanRequest, division: DividedStep, plan: Plan | None = None, price: float = 0.0,
    verdict: Verdict | None = None,
) -> Staged:  # fmt: skip
    """The program of the stages, each with the decisions of a plan, or solved on its submesh, identical ones once.

    Args:
      plan: the decisions; None to solve.
      price: of memory, where stages are solved.
      verdict: on all stages; by default by the sums of their integer programs.

    Raises:
      PlanError: the plan is for another program; says what differs.
    """
    split, planned = division.schedule.splits_backward, []
    known: dict[Any, DecidedStage] = {}
    for number, (graph, sizes) in enumerate(zip(division.graphs, division.mesh_shapes, strict=True)):
        shape, cluster = tuple(sizes), request.cluster.part(math.prod(sizes))
        if plan is not None:
            stage = plan.stages[number]
            decided = run("sharding", replay.replay, graph, cluster, stage, "explicit", split_weights=split)
        else:
            pins = division.pins[number]
            layouts = tuple((argument, pin.mesh, pin.layout) for argument, pin in sorted(pins.arguments.items()))
            key = planning.digest(graph), shape, layouts
            decided = run(
                "sharding", planning.decide, graph, cluster, Sharded(shape), price=price, pins=pins, like=known.get(key)
            )
            known.setdefault(key, decided)
        planned.append(run("lowering", planning.lowered, decided, split_weights=split))
    if verdict is None:
        solutions = [stage.found.solution for stage in planned]
        sums = sum(one.objective for one in solutions), sum(one.bound for one in solutions)
        verdict = Verdict("layers", "feasible" if plan is None else "replayed", *sums)
    return run(
        "programs", programs.pipelined, division.loop, planned, division.first_devices, division.schedule,
        request.cluster, verdict=verdict, idle_devices=division.idle_devices, owned=division.owned, **division.layers,
    )  # fmt: skip
