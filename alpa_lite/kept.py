"""Planning a step whose state already lies on submeshes, and stays there: no search over stages, and nothing moves.

`redivided` plans the same step on other shapes: the division is that of the first plan, each stage is planned again.
`owned` plans any step: it is divided by where its arguments lie, each submesh planned as one stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alpa_lite import schedules
from alpa_lite.asked import Asked, Step
from alpa_lite.errors import MicrobatchError, OptionError, PlanError
from alpa_lite.graph import Traced
from alpa_lite.layout import Layout, LogicalMesh
from alpa_lite.options import Sharded
from alpa_lite.passes import microbatches, programs, stages
from alpa_lite.passes.layers.division import divided, divisible
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict
from alpa_lite.passes.stages import planning
from alpa_lite.passes.stages.owned import moved
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.paths import shown
from alpa_lite.pins import Pin, Pins
from alpa_lite.plan import Plan
from alpa_lite.records import Stage, spec_axes
from alpa_lite.runner import Passes
from alpa_lite.schedules import Schedule

PRICES = (0.0, 1.0, 4.0, 16.0)
"""Of memory, in units of `sharding.market`: those that a step on given submeshes is planned with, until it fits."""


def is_given(asked: Asked) -> bool:
    """Whether the division of the step is given: by a pipeline of the same step, or by arguments on submeshes."""
    pipelined = asked.like is not None and asked.like.pipelined
    return pipelined or asked.pins.on_submeshes(asked.cluster.num_devices)


def divided_as_given(run: Passes, step: Step, asked: Asked) -> Staged:
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
        staged = owned(run, step, asked)
        note = f"divided by where the state lies, and not as the plan of the first call: {error}"
        return replace(staged, loop=replace(staged.loop, notes=(*staged.loop.notes, note)))


def redivided(run: Passes, step: Step, asked: Asked, plan: Plan) -> Staged:
    """The step divided as a plan for other shapes divides it, its state where that plan has it.

    Layers, submeshes, schedule and rematerialisation are those of the plan; where the batch does not divide into as
    many micro-batches, there are as many as can be. Each stage is solved once, for the new shapes.

    Raises:
      PlanError: the step is another one, or has other layers.
      MicrobatchError: the step is no loop over micro-batches.
    """
    replay.check_devices(plan, asked.cluster)
    division, remat = plan.division, replay.remat_of(plan)
    loop, schedule = _in_microbatches(run, step, asked, plan)
    layers = run("layers", divisible, loop, max_layers=division.max_layers)
    replay.check_layers(plan, len(layers.layering.layers))
    cut = run("layers", divided, layers, division.first_layers[1:], remat)
    loop = cut.accumulated
    graphs = run("stages", stages.stage_graphs, loop.traced, loop.scan, cut.assignment)
    why = f"the state is kept where the plan for {plan.num_microbatches} micro-batches of another shape has it"
    pins = []
    for graph, stage, mesh in zip(graphs, plan.stages, division.submeshes, strict=True):
        pins.append(_pins(graph, stage, division.first_devices[mesh], why))
    planned: list[PlannedStage] = []
    known: dict[Any, DecidedStage] = {}
    for graph, stage, pinned in zip(graphs, plan.stages, pins, strict=True):
        layouts = tuple((number, pin.layout) for number, pin in sorted(pinned.arguments.items()))
        key = planning.digest(graph), stage.mesh_shape, layouts
        decided = run(
            "sharding", planning.decide, graph, asked.cluster.part(stage.num_devices), Sharded(stage.mesh_shape),
            price=0.0, time_limit=asked.time_limit, pins=pinned, like=known.get(key),
        )  # fmt: skip
        known.setdefault(key, decided)
        planned.append(run("lowering", planning.lowered, decided, split_weights=schedule.splits_backward))
    seconds = sum(stage.found.solution.objective for stage in planned)
    bound = sum(stage.found.solution.bound for stage in planned)
    verdict = Verdict("layers", "feasible", seconds, bound, idle_devices=division.idle_devices)
    return run(
        "programs", programs.pipelined, loop, planned, division.first_devices, schedule, asked.cluster,
        first_layers=division.first_layers, num_layers=division.num_layers, max_layers=division.max_layers,
        remat=remat, verdict=verdict,
    )  # fmt: skip


def _in_microbatches(run: Passes, step: Step, asked: Asked, plan: Plan) -> tuple[Accumulated, Schedule]:
    """The step in the plan's number of micro-batches, or in the greatest smaller one that the batch divides into.

    Raises:
      MicrobatchError: not even one micro-batch is possible, or none that the schedule exists for.
    """
    division, refusal = plan.division, None
    for count in range(asked.num_microbatches or plan.num_microbatches, 0, -1):
        try:
            schedule = schedules.schedule(
                plan.schedule, len(division.first_devices), count, virtual=division.virtual
            )  # fmt: skip
            loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **asked.inexact)
        except (MicrobatchError, OptionError) as error:
            refusal = refusal or error
            continue
        return loop, schedule
    raise MicrobatchError(f"the batch divides into no number of micro-batches that the plan allows: {refusal}")


def owned(run: Passes, step: Step, asked: Asked) -> Staged:
    """The step divided by where its pinned arguments lie: what reads a leaf runs on the submesh that has it.

    Memory has no price at first; where a submesh exceeds the budget, all are planned again with more and more of one.

    Raises:
      OptionError: arguments lie on submeshes that share devices.
      InfeasibleError: no sharding was found in the time.
      PlanError: an operation cannot run on a submesh.
    """
    graphs = _owned_graphs(run, step, asked)
    for price in PRICES:
        staged = _owned_program(run, step, asked, graphs, _planned(run, graphs, asked, price))
        if staged.needed <= asked.budget:
            return staged
    return staged


def replayed(run: Passes, step: Step, asked: Asked, plan: Plan) -> Staged:
    """A plan of a step that was divided by where its arguments lay: the same division and decisions, without solving.

    Raises:
      PlanError: the plan is for other arguments or another program; says what differs.
    """
    division, found = plan.division, dict[str, Pin]()
    for stage, mesh in zip(plan.stages, division.submeshes, strict=True):
        logical = LogicalMesh(tuple(stage.mesh_shape), tuple(stage.axis_names))
        for leaf in stage.arguments:
            if leaf.path in division.owned:
                layout = layout_of(leaf.spec, len(leaf.shape))
                found[leaf.path] = Pin(logical, division.first_devices[mesh], layout, "the plan has it there")
    numbers = {argument.path: number for number, argument in enumerate(step.traced.arguments)}
    missing = [path for path in found if path not in numbers]
    if missing:
        raise PlanError(
            f"the plan is for other arguments: {shown(missing[0])} is in the plan but was not passed. Plan again, or "
            "pass the arguments for which it was made."
        )
    asked = replace(asked, pins=Pins({numbers[path]: pin for path, pin in found.items()}))
    graphs = _owned_graphs(run, step, asked)
    planned = []
    for graph, stage in zip(graphs, plan.stages, strict=True):
        decided = run("sharding", replay.replay, graph, asked.cluster.part(stage.num_devices), stage, "explicit")
        planned.append(run("lowering", planning.lowered, decided, split_weights=False))
    return _owned_program(run, step, asked, graphs, planned, "replayed")


def _owned_graphs(run: Passes, step: Step, asked: Asked) -> tuple[StageGraph, ...]:
    """The parts of a step, one for each submesh that arguments lie on."""
    places = submeshes_of(asked.pins, asked.cluster.num_devices)
    pinned = {number: places.index((pin.mesh, pin.first_device)) for number, pin in asked.pins.arguments.items()}
    found = run("stages", stages.ownership, step.traced, pinned, len(places))
    return run("stages", stages.owned_graphs, step.traced, found, len(places))


def _owned_program(
    run: Passes, step: Step, asked: Asked, graphs: Sequence[StageGraph], planned: Sequence[PlannedStage],
    status: str = "feasible",
) -> Staged:  # fmt: skip
    """The program of planned parts."""
    traced, count = step.traced, len(planned)
    firsts = [first for _, first in submeshes_of(asked.pins, asked.cluster.num_devices)]
    verdict = Verdict(
        "layers", status,
        sum(stage.found.solution.objective for stage in planned), sum(stage.found.solution.bound for stage in planned),
        owned=tuple(traced.arguments[number].path for number in sorted(asked.pins.arguments)),
    )  # fmt: skip
    loop = Accumulated(traced, -1, 1, moves(traced, graphs, asked.pins))
    return run(
        "programs", programs.pipelined, loop, planned, firsts, schedules.forwards(range(count), 1), asked.cluster,
        first_layers=range(count), num_layers=count, max_layers=count, remat=["none"] * count, verdict=verdict,
    )  # fmt: skip


def _planned(run: Passes, graphs: Sequence[StageGraph], asked: Asked, price: float) -> list[PlannedStage]:
    """The parts of a step, each solved on its submesh and lowered; identical ones are solved once."""
    out: list[PlannedStage] = []
    known: dict[Any, DecidedStage] = {}
    for graph in graphs:
        pins = Pins({
            number: asked.pins.arguments[port.number]
            for number, port in enumerate(graph.inputs)
            if port.kind == "argument" and port.number in asked.pins.arguments
        })  # fmt: skip
        ((mesh, _),) = pins.meshes
        layouts = tuple((number, pin.layout) for number, pin in sorted(pins.arguments.items()))
        key = planning.digest(graph), mesh, layouts
        decided = run(
            "sharding", planning.decide, graph, asked.cluster.part(mesh.size), Sharded(mesh.shape),
            price=price, time_limit=asked.time_limit, pins=pins, like=known.get(key),
        )  # fmt: skip
        known.setdefault(key, decided)
        out.append(run("lowering", planning.lowered, decided, split_weights=False))
    return out


def submeshes_of(pins: Pins, num_devices: int) -> tuple[tuple[LogicalMesh, int], ...]:
    """The submeshes that arguments lie on, as (mesh, number of the first device), in the order of devices.

    Raises:
      OptionError: two of them share devices, or one has devices that the cluster has not.
    """
    found = pins.meshes
    for (mesh, first), (other, second) in itertools.pairwise(found):
        if second < first + mesh.size:
            names = [_of_mesh(pins, *pair) for pair in ((mesh, first), (other, second))]
            raise OptionError(
                f"arguments lie on submeshes that share devices: {names[0]} and {names[1]}; place both as one plan "
                "wants them, with the place method of the step that like= names"
            )
    mesh, first = found[-1]
    if first + mesh.size > num_devices:
        raise OptionError(
            f"arguments lie where the cluster of {num_devices} devices has none: {_of_mesh(pins, mesh, first)}; plan "
            "for the cluster that the state was placed on"
        )
    return found


def _of_mesh(pins: Pins, mesh: LogicalMesh, first: int) -> str:
    count = sum((pin.mesh, pin.first_device) == (mesh, first) for pin in pins.arguments.values())
    shape = " x ".join(map(str, mesh.shape))
    return f"{count} on devices {first} to {first + mesh.size - 1} as a mesh of {shape}"


def moves(traced: Traced, graphs: Sequence[StageGraph], pins: Pins) -> tuple[str, ...]:
    """What a plan says of leaves that another submesh reads, too: they are copied to it in each call."""
    lines = []
    for number, where in moved(traced, graphs).items():
        if number in pins.arguments:
            size = traced.graph.values[traced.graph.block.inputs[number]].nbytes * len(where)
            lines.append(
                f"{shown(traced.arguments[number].path)} stays where it is, and is copied in each call to submesh "
                f"{', '.join(map(str, where))} ({size} bytes), where an operation reads it with leaves of that submesh"
            )
    return tuple(lines)


def _pins(graph: StageGraph, stage: Stage, first_device: int, why: str) -> Pins:
    """Where the state of a stage lies, by the argument's number in it.

    Raises:
      PlanError: the stage has other state than that of the plan.
    """
    planned = {leaf.path: layout_of(leaf.spec, len(leaf.shape)) for leaf in stage.arguments if leaf.role != "batch"}
    mesh = LogicalMesh(tuple(stage.mesh_shape), tuple(stage.axis_names))
    found: dict[int, Pin] = {}
    for number, (port, argument) in enumerate(zip(graph.inputs, graph.traced.arguments, strict=True)):
        if port.kind != "argument" or argument.role == "batch":
            continue
        if argument.path not in planned:
            raise PlanError(
                f"{shown(argument.path)} belongs to another stage than in the plan that the step is divided as; plan "
                "again without like="
            )
        found[number] = Pin(mesh, first_device, planned[argument.path], why)
    return Pins(found)


def layout_of(spec: Any, rank: int) -> Layout:
    """The layout of a value with so many dims that a mesh shards as `spec` says."""
    axes = spec_axes(spec)
    return Layout((*axes, *((),) * (rank - len(axes))))
