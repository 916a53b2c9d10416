"""Planning a step by where its arguments lie: each submesh runs what reads its leaves, planned as one stage.

See `passes.stages.owners` for the division. A stacked leaf of which several submeshes have a part is cut into these
parts first, and with it the loops over it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite import _jax
from alpa_lite.compilation.asked import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError, PlanError
from alpa_lite.ir import schedules
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.paths import shown
from alpa_lite.options import Sharded
from alpa_lite.passes import factors, microbatches, programs, stages
from alpa_lite.passes.layers import scans
from alpa_lite.passes.microbatches.loop import Accumulated, batch_dims
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs.staged import Staged, Verdict
from alpa_lite.passes.stages import planning
from alpa_lite.passes.stages.owned import moved
from alpa_lite.passes.stages.owners import is_small
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.pins import Pin, Pins, places
from alpa_lite.plan.plan import Plan
from alpa_lite.report import units

logger = logging.getLogger(__name__)

PRICES = (0.0, 1.0, 4.0, 16.0)
"""Of memory, in units of `sharding.market`: those that a step on given submeshes is planned with, until it fits."""

LEAST = 2e-3
"""Seconds that a step must take for micro-batches to be tried: with two of them on two submeshes there are some ten
tasks and transfers, at about 1e-4 seconds each for one controller (`benchmarks/runtime/tasks.py`)."""

MOVED = "in each call"
"""The text that all notes on moved leaves contain."""


@dataclass(frozen=True, eq=False)
class Parts:
    """A divided step.

    Attributes:
      loop: the step, over micro-batches if there are several.
      graphs: its stages.
      submeshes: of each stage.
      meshes: of each submesh, with the number of its first device.
      pinned: argument number -> the submesh that it lies on.
    """

    loop: Accumulated
    graphs: tuple[StageGraph, ...]
    submeshes: tuple[int, ...]
    meshes: Sequence[tuple[LogicalMesh, int]]
    pinned: Mapping[int, int]


def owned(run: Passes, step: Step, asked: PlanRequest) -> Staged:
    """The step divided by where its pinned arguments lie: what reads a leaf runs on the submesh that has it.

    Where it takes long enough, and the batch can be cut exactly, micro-batches that take turns on the submeshes are
    tried too, and the plan that the simulation says is faster is taken. A given number of micro-batches holds.

    Raises:
      OptionError: arguments lie on submeshes that share devices.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
      InfeasibleError: no sharding was found in the time.
      PlanError: an operation cannot run on a submesh.
    """
    step, asked = in_pieces(run, step, replace(asked, pins=of_leaves(step.traced, asked.pins)))
    given = asked.num_microbatches
    if given is not None and given > 1:
        return _planned(run, _in_turns(run, step, asked, given), asked)
    parts = _at_once(run, step, asked)
    for line in (*step.traced.notes, *parts.loop.notes):
        if MOVED in line:
            logger.warning("%s: %s", step.traced.name, line)
    staged = _planned(run, parts, asked)
    count = _worth(step, asked) if given is None and staged.seconds >= LEAST else 1
    if count == 1:
        return staged
    try:
        other = _planned(run, _in_turns(run, step, asked, count), asked)
    except (MicrobatchError, PlanError):
        return staged
    fits = other.needed <= max(asked.budget, staged.needed)
    return other if fits and other.seconds < staged.seconds else staged


def of_leaves(traced: Traced, pins: Pins) -> Pins:
    """The pins of all but the batch, which is put wherever it is read; all of them if there are no others."""
    found = {n: pin for n, pin in pins.arguments.items() if traced.arguments[n].role != "batch"}
    return replace(pins, arguments=found) if found or pins.pieces else pins


def _worth(step: Step, asked: PlanRequest) -> int:
    """The number of micro-batches to try: four for each submesh, or the greatest power of two that the batch allows."""
    count = 1 << (4 * len(asked.pins.meshes)).bit_length() - 1
    while count > 1 and batch_dims(step.traced, step.rules, count) is None:
        count //= 2
    return count if len(asked.pins.meshes) > 1 else 1


def replayed(run: Passes, step: Step, asked: PlanRequest, plan: Plan) -> Staged:
    """A plan of a step that was divided by where its arguments lay: the same division and decisions, without solving.

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
            f"the plan is for other arguments: {shown(missing[0])} is in the plan but was not passed. Plan again, or "
            "pass the arguments for which it was made."
        )
    whole = {numbers[path]: pin for path, pin in known.items() if isinstance(pin, Pin)}
    pieces = {numbers[path]: some for path, some in known.items() if not isinstance(some, Pin)}
    step, asked = in_pieces(run, step, replace(asked, pins=Pins(whole, pieces)))
    count = plan.num_microbatches
    parts = _at_once(run, step, asked) if count == 1 else _in_turns(run, step, asked, count)
    if len(parts.graphs) != len(plan.stages):
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, but this step has {len(parts.graphs)} on these submeshes: the "
            "plan is for another program or version. Plan again."
        )
    planned = replayed_stages(run, asked, plan, parts.graphs, split_weights=False)
    return _program(run, parts, asked, planned, "replayed")


def in_pieces(run: Passes, step: Step, asked: PlanRequest) -> tuple[Step, PlanRequest]:
    """The step with stacked leaves in the parts that submeshes have, and its pins; itself where there are none.

    A leaf that cannot be taken apart, because something reads all of it at once, is pinned nowhere: it is moved to
    where it is read, and the plan says so.
    """
    pieces = asked.pins.pieces
    if not pieces:
        return step, asked
    bounds = {n: (0, *(piece.high for piece in some)) for n, some in pieces.items()}
    traced = run("layers", scans.cut_by_arguments, step.traced, bounds, step.rules)
    stacked = traced.stacked
    assert stacked is not None
    pins: dict[int, Pin] = {stacked.arguments[n].numbers[0]: pin for n, pin in asked.pins.arguments.items()}
    notes = []
    for number, some in pieces.items():
        leaf = stacked.arguments[number]
        if leaf.bounds == bounds[number]:
            pins.update((n, piece.pin) for n, piece in zip(leaf.numbers, some, strict=True))
            continue
        value = traced.graph.block.inputs[leaf.numbers[0]]
        if any(value in op.reads for op in traced.graph.block.ops):
            size = traced.graph.values[value].nbytes
            notes.append(
                f"{shown(traced.arguments[leaf.numbers[0]].path)} lies in parts on {len(some)} submeshes, but an "
                f"operation reads all of it: it is moved in each call ({units.nbytes(size)})"
            )
    traced = replace(traced, notes=(*traced.notes, *notes))
    rules = run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values)
    return Step(traced, rules), replace(asked, pins=replace(asked.pins, arguments=pins, pieces={}))


def _pinned(asked: PlanRequest) -> tuple[Sequence[tuple[LogicalMesh, int]], dict[int, int]]:
    """Returns `Parts.meshes` and `Parts.pinned`."""
    found = submeshes_of(asked.pins, asked.cluster.num_devices)
    return found, {n: found.index((pin.mesh, pin.first_device)) for n, pin in asked.pins.arguments.items()}


def _at_once(run: Passes, step: Step, asked: PlanRequest) -> Parts:
    """The step in one part for each submesh, without micro-batches."""
    meshes, pinned = _pinned(asked)
    found = run("stages", stages.ownership, step.traced, pinned, len(meshes))
    graphs = run("stages", stages.owned_graphs, step.traced, found, len(meshes))
    notes = (reason(asked.pins), *moves(step.traced, graphs, asked.pins))
    return Parts(Accumulated(step.traced, -1, 1, notes), graphs, tuple(range(len(meshes))), meshes, pinned)


def _in_turns(run: Passes, step: Step, asked: PlanRequest, number: int) -> Parts:
    """The step in so many micro-batches, in one stage for each round of each submesh.

    Raises:
      MicrobatchError: it cannot be cut into as many.
      PlanError: something outside the loop reads leaves of several submeshes.
    """
    loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, number, **asked.inexact)
    meshes, pinned = _pinned(asked)
    found = run("stages", stages.turns_of, loop.traced, loop.scan, pinned, len(meshes))
    graphs = run("stages", stages.stage_graphs, loop.traced, loop.scan, found.assignment)
    for graph, submesh in zip(graphs, found.submeshes, strict=True):
        for port, value in zip(graph.inputs, graph.traced.graph.block.inputs, strict=False):
            is_leaf = port.kind in ("argument", "copy") and not is_small(graph.traced.graph.values[value])
            if is_leaf and pinned.get(port.number, submesh) != submesh:
                raise PlanError(
                    f"num_microbatches={number}: {shown(loop.traced.arguments[port.number].path)} would be copied to "
                    f"another submesh; use num_microbatches=1"
                )
    loop = replace(loop, notes=(reason(asked.pins), *loop.notes))
    return Parts(loop, graphs, found.submeshes, meshes, pinned)


def _program(
    run: Passes, parts: Parts, asked: PlanRequest, planned: Sequence[PlannedStage], status: str = "feasible"
) -> Staged:
    """The program of planned parts."""
    traced, count = parts.loop.traced, len(planned)
    firsts = [first for _, first in parts.meshes]
    verdict = Verdict(
        "layers", status,
        sum(stage.found.solution.objective for stage in planned), sum(stage.found.solution.bound for stage in planned),
    )  # fmt: skip
    owned = tuple(traced.arguments[number].path for number in sorted(asked.pins.arguments))
    schedule = schedules.forwards(parts.submeshes, parts.loop.num_microbatches)
    return run(
        "programs", programs.pipelined, parts.loop, planned, firsts, schedule, asked.cluster,
        first_layers=range(count), num_layers=count, max_layers=count, remat=["none"] * count, owned=owned,
        verdict=verdict,
    )  # fmt: skip


def _planned(run: Passes, parts: Parts, asked: PlanRequest) -> Staged:
    """The parts planned, memory more and more expensive until all fit, or at the highest price.

    Raises:
      InfeasibleError: they do not fit, and leaves are copied between submeshes.
    """
    pins = [
        Pins({
            number: asked.pins.arguments[port.number]
            for number, port in enumerate(graph.inputs)
            if port.kind == "argument" and parts.pinned.get(port.number) == submesh
        })
        for graph, submesh in zip(parts.graphs, parts.submeshes, strict=True)
    ]  # fmt: skip
    shapes = [parts.meshes[submesh][0].shape for submesh in parts.submeshes]
    for price in PRICES:
        planned = solved(run, asked, parts.graphs, shapes, pins, price=price, split_weights=False)
        staged = _program(run, parts, asked, planned)
        if staged.needed <= asked.budget:
            return staged
    copied = [line for line in parts.loop.notes if MOVED in line]
    if copied:
        raise InfeasibleError(
            f"{parts.loop.traced.name} needs {units.nbytes(staged.needed)} per device where its state lies, of "
            f"{units.nbytes(int(asked.budget))}, and leaves are copied: {copied[0]}. Take the loop over them out of "
            "the step, and call it once for each iteration, or give more memory_per_device",
            staged.needed,
        )
    return staged


def solved(
    run: Passes, asked: PlanRequest, graphs: Sequence[StageGraph], shapes: Sequence[tuple[int, ...]],
    pins: Sequence[Pins], *, price: float = 0.0, split_weights: bool,
) -> list[PlannedStage]:  # fmt: skip
    """Stages whose leaves lie on given submeshes, each solved there and lowered; identical ones are solved once.

    Args:
      shapes: of the mesh of each.
      pins: where the arguments of each lie, by their number in it.
      price: of memory.
      split_weights: as for `planning.lowered`.
    """
    out: list[PlannedStage] = []
    known: dict[Any, DecidedStage] = {}
    for graph, shape, own in zip(graphs, shapes, pins, strict=True):
        layouts = tuple((number, pin.mesh, pin.layout) for number, pin in sorted(own.arguments.items()))
        key = planning.digest(graph), shape, layouts
        decided = run(
            "sharding", planning.decide, graph, asked.cluster.part(math.prod(shape)), Sharded(shape),
            price=price, pins=own, like=known.get(key),
        )  # fmt: skip
        known.setdefault(key, decided)
        out.append(run("lowering", planning.lowered, decided, split_weights=split_weights))
    return out


def replayed_stages(
    run: Passes, asked: PlanRequest, plan: Plan, graphs: Sequence[StageGraph], *, split_weights: bool
) -> list[PlannedStage]:
    """The stages of a step with the decisions of a plan, lowered without solving.

    Raises:
      PlanError: the plan is for another program; says what differs.
    """
    planned = []
    for graph, stage in zip(graphs, plan.stages, strict=True):
        cluster = asked.cluster.part(stage.num_devices)
        decided = run("sharding", replay.replay, graph, cluster, stage, "explicit", split_weights=split_weights)
        planned.append(run("lowering", planning.lowered, decided, split_weights=split_weights))
    return planned


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
    """Returns a plan's notes on leaves that another submesh reads, too: they are copied to it in each call."""
    lines = []
    for number, where in moved(traced, graphs).items():
        leaf = traced.graph.block.inputs[number]
        value = traced.graph.values[leaf]
        if number in pins.arguments and not is_small(value):
            reader = next((op for op in graphs[where[0]].traced.graph.block.ops if leaf in op.reads), None)
            what = (
                "a result" if reader is None else f"{reader.name} at {_jax.where(reader.source) or 'an unknown line'}"
            )
            lines.append(
                f"{shown(traced.arguments[number].path)} stays where it is, and is copied in each call to submesh "
                f"{', '.join(map(str, where))} ({units.nbytes(value.nbytes * len(where))}): {what} needs it there"
            )
    return tuple(lines)


def reason(pins: Pins) -> str:
    """Returns a plan's reason for the division into stages."""
    why = dict.fromkeys(pin.why for pin in pins.arguments.values())
    return (
        f"divided by where {len(pins.arguments)} arguments lie ({'; '.join(why)}): an operation runs on the submesh "
        "that has the leaves that it reads"
    )
