"""A step in stages whose submeshes are known: each stage is solved, or takes the decisions of a plan, without a search.

A division comes from a plan of the same step (`divide_as_plan`) or from where arguments are placed
(`partition_by_placement`): each submesh then runs what reads its leaves, planned as one stage. See
`passes.stages.owners` for that division. A stacked leaf of which several submeshes have a part is cut into these parts
first, and with it the loops over it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite import _jax
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError, PlanError
from alpa_lite.ir import schedules, units
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.schedules import Schedule
from alpa_lite.options import Sharded
from alpa_lite.passes import factors, microbatches, programs, stages
from alpa_lite.passes.layers import scans
from alpa_lite.passes.layers.division import find_layers
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches.loop import Accumulated, batch_dims
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict
from alpa_lite.passes.search.pipeline_analysis import cut_into_stages
from alpa_lite.passes.stages import planning
from alpa_lite.passes.stages.owners import is_small
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.pins import Pin, Pins, places
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
      layers: the layers of the stages, as `programs.stage_pipeline` takes them by keyword.
      pins: of each stage, by the argument's number in it; used where stages are solved.
      idle_devices, owned: as of a plan's division.
      copy_notes: notes on leaves that are copied to another submesh in each call.
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
    copy_notes: tuple[str, ...] = ()


def divide_as_plan(run: Passes, step: Step, request: PlanRequest, plan: Plan, count: int) -> DividedStep:
    """Returns a step over `count` micro-batches in the stages of a plan.

    Raises:
      MicrobatchError, OptionError: the batch does not divide into them, or the schedule does not exist for them.
      PlanError: the step has other layers.
    """
    division = plan.division
    schedule = schedules.schedule(
        plan.schedule, len(division.first_devices), count, virtual=division.virtual,
        slices=len(division.token_slices) or 1,
    )  # fmt: skip
    loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **request.inexact_options)
    layers = run("layers", find_layers, loop, max_layers=division.max_layers)
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
        planned.append(run("lowering", planning.lower_stage, decided, split_weights=split))
    if verdict is None:
        solutions = [stage.mesh_solution.solution for stage in planned]
        sums = sum(one.objective for one in solutions), sum(one.bound for one in solutions)
        verdict = Verdict("layers", "feasible" if plan is None else "replayed", *sums)
    return run(
        "programs", programs.stage_pipeline, division.loop, planned, division.first_devices, division.schedule,
        request.cluster, verdict=verdict, idle_devices=division.idle_devices, owned=division.owned, **division.layers,
    )  # fmt: skip


logger = logging.getLogger(__name__)

PRICES = (0.0, 1.0, 4.0, 16.0)
"""Of memory, in units of `sharding.market`: those that a step on given submeshes is planned with, until it fits."""

MIN_STEP_SECONDS = 2e-3
"""Seconds that a step must take for micro-batches to be tried: with two of them on two submeshes there are some ten
tasks and transfers, at about 1e-4 seconds each for one controller (`benchmarks/runtime/tasks.py`)."""


def partition_by_placement(run: Passes, step: Step, request: PlanRequest) -> Staged:
    """Returns the step divided by where its pinned arguments are: what reads a leaf runs on the submesh that has it.

    Where it takes long enough, and the batch can be cut exactly, micro-batches that take turns on the submeshes are
    tried too, and the plan that the simulation says is faster is taken. A given number of micro-batches holds.

    Raises:
      OptionError: arguments are on submeshes that share devices.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
      InfeasibleError: no sharding was found in the time.
      PlanError: an operation cannot run on a submesh.
    """
    pins = pins_of_leaves(step.traced, request.pins)
    step, request, moved_whole = cut_stacked_leaves(run, step, replace(request, pins=pins))
    given = request.num_microbatches
    division = _divide(run, step, request, given or 1)
    for line in (*moved_whole, *division.copy_notes):
        logger.warning("%s: %s", step.traced.name, line)
    staged = _solve(run, request, division)
    count = _microbatches_to_try(step, request) if given is None and staged.seconds >= MIN_STEP_SECONDS else 1
    if count == 1:
        return staged
    try:
        other = _solve(run, request, _divide(run, step, request, count))
    except (MicrobatchError, PlanError):
        return staged
    fits = other.needed_bytes <= max(request.budget, staged.needed_bytes)
    return other if fits and other.seconds < staged.seconds else staged


def pins_of_leaves(traced: Traced, pins: Pins) -> Pins:
    """Returns the pins of all but the batch, which is put wherever it is read; all of them if there are no others."""
    found = {n: pin for n, pin in pins.arguments.items() if traced.arguments[n].role != "batch"}
    return replace(pins, arguments=found) if found or pins.pieces else pins


def _microbatches_to_try(step: Step, request: PlanRequest) -> int:
    """Returns four for each submesh, or the greatest power of two that the batch allows."""
    count = 1 << (4 * len(request.pins.meshes)).bit_length() - 1
    while count > 1 and batch_dims(step.traced, step.rules, count) is None:
        count //= 2
    return count if len(request.pins.meshes) > 1 else 1


def replay_partition(run: Passes, step: Step, request: PlanRequest, plan: Plan) -> Staged:
    """Returns a plan of a step that was divided by where its arguments were: the same division and decisions.

    Raises:
      PlanError: the plan is for other arguments or another program; says what differs.
    """
    owned = frozenset(plan.division.owned)
    kept = replace(plan, stages=tuple(
        replace(stage, arguments=tuple(leaf for leaf in stage.arguments if leaf.path in owned)) for stage in plan.stages
    ))  # fmt: skip
    known = places(kept, "the plan has it there")
    numbers = {argument.path: number for number, argument in enumerate(step.traced.arguments)}
    missing = [path for path in known if path not in numbers]
    if missing:
        raise PlanError(
            f"the plan is for other arguments: {format_path(missing[0])} is in the plan but was not passed. Plan "
            "again, or "
            "pass the arguments for which it was made."
        )
    whole = {numbers[path]: pin for path, pin in known.items() if isinstance(pin, Pin)}
    pieces = {numbers[path]: some for path, some in known.items() if not isinstance(some, Pin)}
    step, request, _ = cut_stacked_leaves(run, step, replace(request, pins=Pins(whole, pieces)))
    count = plan.num_microbatches
    division = _divide(run, step, request, count)
    if len(division.graphs) != len(plan.stages):
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, but this step has {len(division.graphs)} on these submeshes: the "
            "plan is for another program or version. Plan again."
        )
    return plan_stages(run, request, division, plan)


def cut_stacked_leaves(run: Passes, step: Step, request: PlanRequest) -> tuple[Step, PlanRequest, tuple[str, ...]]:
    """Returns the step with stacked leaves in the parts that submeshes have, and its pins; itself where there are none.

    A leaf that cannot be taken apart, because something reads all of it at once, is pinned nowhere: it is moved to
    where it is read, and the plan says so by the notes that are returned, too.
    """
    pieces = request.pins.pieces
    if not pieces:
        return step, request, ()
    bounds = {n: (0, *(piece.high for piece in some)) for n, some in pieces.items()}
    traced = run("layers", scans.cut_stacked_arguments, step.traced, bounds, step.rules)
    stacked = traced.stacked
    assert stacked is not None
    pins: dict[int, Pin] = {stacked.arguments[n].numbers[0]: pin for n, pin in request.pins.arguments.items()}
    notes: list[str] = []
    for number, some in pieces.items():
        leaf = stacked.arguments[number]
        if leaf.bounds == bounds[number]:
            pins.update((n, piece.pin) for n, piece in zip(leaf.numbers, some, strict=True))
            continue
        value = traced.graph.block.inputs[leaf.numbers[0]]
        if any(value in op.reads for op in traced.graph.block.ops):
            size = traced.graph.values[value].nbytes
            notes.append(
                f"{format_path(traced.arguments[leaf.numbers[0]].path)} has parts on {len(some)} submeshes, but an "
                f"operation reads all of it: it is moved in each call ({units.nbytes(size)})"
            )
    traced = replace(traced, notes=(*traced.notes, *notes))
    rules = run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values)
    request = replace(request, pins=replace(request.pins, arguments=pins, pieces={}))
    return Step(traced, rules), request, tuple(notes)


def _divide(run: Passes, step: Step, request: PlanRequest, count: int) -> DividedStep:
    """The step in one part for each submesh, or over `count` micro-batches in one for each round of each submesh.

    Raises:
      MicrobatchError: it cannot be cut into as many.
      PlanError: something outside the loop reads leaves of several submeshes.
    """
    found = submeshes_of(request.pins, request.cluster.num_devices)
    pinned = {n: found.index((pin.mesh, pin.first_device)) for n, pin in request.pins.arguments.items()}
    if count == 1:
        loop, submeshes = Accumulated(step.traced, -1, 1, ()), range(len(found))
        assignment = run("stages", stages.ownership, step.traced, pinned, len(found))
    else:
        loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **request.inexact_options)
        turns = run("stages", stages.turns_of, loop.traced, loop.scan, pinned, len(found))
        assignment, submeshes = turns.assignment, turns.submeshes
    graphs = run("stages", stages.stage_graphs, loop.traced, loop.scan, assignment)
    moved = _find_moved_leaves(graphs, submeshes, pinned)
    if moved and count > 1:
        raise PlanError(
            f"num_microbatches={count}: {format_path(loop.traced.arguments[moved[0][0]].path)} would be "
            "copied to another submesh; use num_microbatches=1"
        )
    copied = tuple(_copy_note(step.traced, *leaf) for leaf in moved)
    loop = replace(loop, notes=(reason(request.pins), *copied, *loop.notes))
    pins = [
        Pins({
            number: request.pins.arguments[port.number]
            for number, port in enumerate(graph.inputs)
            if port.kind == "argument" and pinned.get(port.number) == submesh
        })
        for graph, submesh in zip(graphs, submeshes, strict=True)
    ]  # fmt: skip
    num, paths = len(graphs), [loop.traced.arguments[number].path for number in sorted(request.pins.arguments)]
    return DividedStep(
        loop, graphs, schedules.forwards(submeshes, count), [found[submesh][0].shape for submesh in submeshes],
        [first for _, first in found],
        {"first_layers": tuple(range(num)), "num_layers": num, "max_layers": num, "remat": ("none",) * num},
        pins, owned=tuple(paths), copy_notes=copied,
    )  # fmt: skip


def _find_moved_leaves(
    graphs: Sequence[StageGraph], submeshes: Sequence[int], pinned: Mapping[int, int]
) -> list[tuple[int, list[int], StageGraph]]:
    """Returns large leaves that other submeshes read than the one that has them: these, and the first stage of them."""
    found: dict[int, tuple[list[int], StageGraph]] = {}
    for graph, submesh in zip(graphs, submeshes, strict=True):
        for port, value in zip(graph.inputs, graph.traced.graph.block.inputs, strict=False):
            is_leaf = port.kind in ("argument", "copy") and not is_small(graph.traced.graph.values[value])
            if is_leaf and pinned.get(port.number, submesh) != submesh:
                found.setdefault(port.number, ([], graph))[0].append(submesh)
    return [(number, *found[number]) for number in sorted(found)]


def _solve(run: Passes, request: PlanRequest, division: DividedStep) -> Staged:
    """Returns the stages planned, memory more and more expensive until all fit, or at the highest price.

    Raises:
      InfeasibleError: they do not fit, and leaves are copied between submeshes.
    """
    for price in PRICES:
        staged = plan_stages(run, request, division, price=price)
        if staged.needed_bytes <= request.budget:
            return staged
    if division.copy_notes:
        raise InfeasibleError(
            f"{division.loop.traced.name} needs {units.nbytes(staged.needed_bytes)} per device with its state in "
            f"place, of {units.nbytes(int(request.budget))}, and leaves are copied: {division.copy_notes[0]}. Take the "
            "loop over them out of the step, and call it once for each iteration, or give more memory_per_device",
            staged.needed_bytes,
        )
    return staged


def submeshes_of(pins: Pins, num_devices: int) -> tuple[tuple[LogicalMesh, int], ...]:
    """Returns the submeshes that arguments are on, as (mesh, number of the first device), in the order of devices.

    Raises:
      OptionError: two of them share devices, or one has devices that the cluster has not.
    """
    found = pins.meshes
    for (mesh, first), (other, second) in itertools.pairwise(found):
        if second < first + mesh.size:
            names = [_of_mesh(pins, *pair) for pair in ((mesh, first), (other, second))]
            raise OptionError(
                f"arguments are on submeshes that share devices: {names[0]} and {names[1]}; place both as in "
                "one plan, with the place method of the step that state_from= names"
            )
    mesh, first = found[-1]
    if first + mesh.size > num_devices:
        raise OptionError(
            f"arguments are on devices that the cluster of {num_devices} devices does not have: "
            f"{_of_mesh(pins, mesh, first)}; plan for the cluster that the state was placed on"
        )
    return found


def _of_mesh(pins: Pins, mesh: LogicalMesh, first: int) -> str:
    count = sum((pin.mesh, pin.first_device) == (mesh, first) for pin in pins.arguments.values())
    shape = " x ".join(map(str, mesh.shape))
    return f"{count} on devices {first} to {first + mesh.size - 1} as a mesh of {shape}"


def _copy_note(traced: Traced, number: int, where: Sequence[int], graph: StageGraph) -> str:
    """Returns a plan's note on a leaf that other submeshes read, too: it is copied to them in each call."""
    leaf = traced.graph.block.inputs[number]
    reader = next((op for op in graph.traced.graph.block.ops if leaf in op.reads), None)
    place = "" if reader is None else _jax.describe_location(reader.source) or "an unknown line"
    return (
        f"{format_path(traced.arguments[number].path)} stays in place, and is copied in each call to submesh "
        f"{', '.join(map(str, where))} ({units.nbytes(traced.graph.values[leaf].nbytes * len(where))}): "
        f"{'a result' if reader is None else f'{reader.name} at {place}'} needs it there"
    )


def reason(pins: Pins) -> str:
    """Returns a plan's reason for the division into stages."""
    why = dict.fromkeys(pin.why for pin in pins.arguments.values())
    return (
        f"divided by the placement of {len(pins.arguments)} arguments ({'; '.join(why)}): an operation runs on the "
        "submesh that has the leaves that it reads"
    )
