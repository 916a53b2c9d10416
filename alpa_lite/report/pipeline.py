"""The sections that only the printout of a pipelined plan has: stages, schedule, memory of submeshes, transfers.

Identical stages (on meshes of one shape, with arguments that differ in layer numbers alone) are one row or one section.

Where the time goes is a mean over devices. With n_m devices on submesh m, N in all, and stages s,

    compute = sum_s n_m(s) compute_s / N,    idle = step - compute - communication within stages,

so that the rows add up to the step. Transfers between submeshes overlap with computation; where they
do not, devices are idle.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType

from alpa_lite import schedules
from alpa_lite.plan import Collective, PipelineShape, Plan, Replicated
from alpa_lite.report import timeline, units
from alpa_lite.report.tables import (
    CollectiveRow,
    add,
    bars,
    collective_rows,
    collective_table,
    section,
    sharding_table,
    table,
)

_MAX_COLLECTIVES = 8  # rows for each kind of stage
_MAX_TRANSFERS = 12
_NUMBER = re.compile(r"\d+")
_TRANSFER = re.compile(r"submesh (\d+) to (\d+), (.*)")


def sections(plan: Plan, shape: PipelineShape) -> list[RenderableType]:
    """All sections of a pipeline, in the order of the printout."""
    parts = overview(plan, shape)
    for group in identical(plan):
        stages = [plan.stages[s] for s in group]
        parts.append(section(f"Shardings of {named(group)}{_each(group)}", sharding_table(*stages)))
    items = list(zip(plan.collectives, plan.collective_seconds, strict=True))
    for group in identical(plan):
        rows = collective_rows(item for item in items if item[0].stage in group and item[0].kind != "transfer")
        if rows:
            heading = f"Collectives per step within {named(group)}{', total' * (len(group) > 1)}"
            parts.append(section(heading, collective_table(rows, _MAX_COLLECTIVES)))
    rows = transfer_rows(items)
    if rows:
        parts.append(section("Transfers between submeshes per step (overlapped with compute)", _transfers(rows)))
    return parts


def overview(plan: Plan, shape: PipelineShape) -> list[RenderableType]:
    """Where the time goes, the stages, the schedule drawn, and the memory."""
    whole = units.seconds(plan.step_seconds)
    lines = (bars(_time_rows(plan, shape), plan.step_seconds), _bubble(plan, shape))
    return [
        section(f"Predicted step: {whole} (mean over devices)", *lines),
        section("Stages (times for one micro-batch)", _stages(plan, shape)),
        section("Schedule", timeline.draw(shape.timeline, width=98)),
        section("Memory per device", _memory(plan, shape)),
    ]


def identical(plan: Plan) -> list[tuple[int, ...]]:
    """Groups of identical stages: same mesh, layer count and rematerialisation, arguments equal but for numbers."""
    shape = plan.pipeline
    found: dict[object, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        leaves = Counter((_NUMBER.sub("#", x.path), x.shape, x.dtype, x.role, x.spec) for x in stage.arguments)
        rest = None if shape is None else (shape.remat[number], _layers(shape, number)[1])
        key = stage.mesh_shape, stage.axis_names, rest, frozenset(leaves.items())
        found.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in found.values()]


def named(group: Sequence[int], noun: str = "stage") -> str:
    """Stage numbers as text, such as "stages 1-6"."""
    plural = "" if len(group) == 1 else "es" if noun.endswith("sh") else "s"
    return f"{noun}{plural} {units.runs(group, '-')}"


def _each(group: Sequence[int]) -> str:
    return " (identical; figures are for one of them)" if len(group) > 1 else ""


def _layers(shape: PipelineShape, stage: int) -> tuple[int, int]:
    """The first layer of a stage, and its number of layers."""
    bounds = [*shape.first_layers, shape.num_layers]
    return bounds[stage], bounds[stage + 1] - bounds[stage]


def sizes(plan: Plan, shape: PipelineShape) -> list[int]:
    """The number of devices of each submesh."""
    out = [1] * len(shape.first_devices)
    for stage, mesh in zip(plan.stages, shape.submeshes, strict=True):
        out[mesh] = 1
        for size in stage.mesh_shape:
            out[mesh] *= size
    return out


@dataclass(frozen=True)
class Spent:
    """Where the seconds of a step go: means over devices.

    Attributes:
      compute: in the operations of the stages.
      communication: in collectives within stages, by mesh axes, the most expensive first.
      idle: in waiting.
    """

    compute: float
    communication: dict[tuple[str, ...], float]
    idle: float


def spent(plan: Plan) -> Spent:
    """Where the seconds of any plan go; one mesh is never idle."""
    shape = plan.pipeline
    devices = [plan.num_devices] if shape is None else sizes(plan, shape)
    mesh_of = (0,) if shape is None else shape.submeshes
    share = [devices[mesh] / sum(devices) for mesh in mesh_of]
    compute = sum(part * stage.compute_seconds for part, stage in zip(share, plan.stages, strict=True))
    by_axes: dict[tuple[str, ...], float] = {}
    for collective, seconds in zip(plan.collectives, plan.collective_seconds, strict=True):
        if collective.kind != "transfer" or shape is None:
            by_axes[collective.axes] = by_axes.get(collective.axes, 0.0) + share[collective.stage] * seconds
    idle = 0.0
    if shape is not None:
        idle = max(0.0, plan.step_seconds - compute - sum(by_axes.values()))
    return Spent(compute, dict(sorted(by_axes.items(), key=lambda item: -item[1])), idle)


def _time_rows(plan: Plan, shape: PipelineShape) -> list[tuple[str, float, str]]:
    where = spent(plan)
    rows = [("compute", where.compute, "green")]
    rows += [(f"over {units.axes(axes)}", seconds, "yellow") for axes, seconds in where.communication.items()]
    return [*rows, ("idle", where.idle, "red")]


def _bubble(plan: Plan, shape: PipelineShape) -> str:
    """The idle share of the schedule itself, apart from that of unequal stages and transfers."""
    meshes, count = len(shape.first_devices), plan.num_microbatches
    bubble = schedules.bubble(
        plan.schedule, meshes, count, forward=1, backward_input=1, backward_weight=1, virtual=shape.virtual
    )
    share = units.percent(bubble, 3 * count * shape.virtual + bubble)
    text = f"ideal bubble {share} (equal stages, free transfers); the rest is imbalance, updates and waiting"
    unequal = len(set(sizes(plan, shape))) > 1
    return f"{text}; idle shares below are means over submeshes, whatever their size" if unequal else text


def _stages(plan: Plan, shape: PipelineShape) -> RenderableType:
    """A row for each group of identical stages."""
    events = shape.timeline.events
    kinds = [kind for kind in ("forward", "backward", "weight") if any(event.kind == kind for event in events)]
    columns = ("stages", "layers", "devices", "mesh", "in flight", "remat", *kinds, "once per step")
    out = table(*columns, right=(1, 2, 4, *range(6, 6 + len(kinds) + 1)))
    devices = sizes(plan, shape)
    for group in identical(plan):
        stage, mesh_of = plan.stages[group[0]], shape.submeshes
        layers = [_layers(shape, s) for s in group]
        meshes = [mesh_of[s] for s in group]
        used = [(shape.first_devices[m], shape.first_devices[m] + devices[m] - 1) for m in meshes]
        held = [
            schedules.in_flight_formula(plan.schedule, len(devices), plan.num_microbatches, m, shape.virtual)
            for m in meshes
        ]
        timed = [[_seconds(shape, s, (kind,), statistics.median) for s in group] for kind in kinds]
        timed.append([_seconds(shape, s, ("prologue", "update"), sum) for s in group])
        cells = (
            named(group).split(" ", 1)[1],
            _runs([(first, first + count - 1) for first, count in layers]),
            _runs(used),
            units.mesh(stage.mesh_shape, stage.axis_names),
            _between(sorted(held), str),
            shape.remat[group[0]],
        )
        add(out, *cells, *(_between(sorted(values), units.seconds) for values in timed))
    return out


def _seconds(
    shape: PipelineShape, stage: int, kinds: Sequence[str], combine: Callable[[list[float]], float]
) -> float:  # fmt: skip
    """The seconds of one stage's events of some kinds, combined."""
    found = [event.seconds for event in shape.timeline.events if event.stage == stage and event.kind in kinds]
    return combine(found) if found else 0.0


def _runs(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges of numbers, adjacent ones joined: (0, 3), (4, 7) is "0-7"."""
    out: list[list[int]] = []
    for first, last in sorted(set(ranges)):
        if out and out[-1][1] + 1 == first:
            out[-1][1] = last
        else:
            out.append([first, last])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _between(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    """The first and the last of some values in order, where their texts differ: "1.20-1.35 ms"."""
    low, high = text(values[0]), text(values[-1])
    if low == high:
        return low
    number, unit = low.rsplit(" ", 1) if " " in low else (low, "")
    return f"{number}-{high}" if high.endswith(unit) else f"{low}-{high}"


@dataclass(frozen=True)
class SubmeshMemory:
    """Bytes per device of one submesh: the sums over its stages.

    Attributes:
      params, gradients, optimizer: as of `Memory`.
      in_flight: all other buffers between tasks: values saved for backward passes, transfers, the batch.
      temporaries: the most that one executable needs in addition to its buffers.
      peak: the peak of the buffers, plus temporaries.
    """

    params: int
    gradients: int
    optimizer: int
    in_flight: int
    temporaries: int
    peak: int


def memory(plan: Plan, shape: PipelineShape) -> list[SubmeshMemory]:
    """The memory of each submesh."""
    out = []
    for mesh, (buffers, temporary) in enumerate(zip(shape.buffer_bytes, shape.temporary_bytes, strict=True)):
        stages = [stage.memory for stage, m in zip(plan.stages, shape.submeshes, strict=True) if m == mesh]
        params, gradients, optimizer = (
            sum(getattr(m, kind) for m in stages) for kind in ("params", "gradients", "optimizer")
        )
        flying = max(0, buffers - params - gradients - optimizer)
        out.append(SubmeshMemory(params, gradients, optimizer, flying, temporary, buffers + temporary))
    return out


def _memory(plan: Plan, shape: PipelineShape) -> RenderableType:
    """A row for each submesh; submeshes with equal numbers share a row."""
    found: dict[SubmeshMemory, list[int]] = {}
    for number, row in enumerate(memory(plan, shape)):
        found.setdefault(row, []).append(number)
    columns = ("submesh", "params", "gradients", "optimizer", "in flight", "temporaries", "peak")
    out = table(*columns, f"of {units.nbytes(plan.memory_per_device)}", right=range(1, 8))
    for row, meshes in found.items():
        amounts = (row.params, row.gradients, row.optimizer, row.in_flight, row.temporaries, row.peak)
        share = units.percent(row.peak, plan.memory_per_device)
        add(out, named(meshes).split(" ", 1)[1], *map(units.nbytes, amounts), share)
    return out


def transfer_rows(items: Iterable[tuple[Collective, float]]) -> list[CollectiveRow]:
    """The transfers between submeshes, identical ones as one row; the two directions are separate rows."""
    ways: dict[tuple[int, bool], list[tuple[Collective, float]]] = {}
    for collective, seconds in items:
        match = _TRANSFER.fullmatch(collective.where) if collective.kind == "transfer" else None
        if match:
            apart = int(match[2]) - int(match[1])
            ways.setdefault((min(abs(apart), 2), apart > 0), []).append((collective, seconds))
        elif collective.kind == "transfer":
            ways.setdefault((0, True), []).append((collective, seconds))
    return [row for _, found in sorted(ways.items()) for row in collective_rows(found)]


def _transfers(rows: Sequence[CollectiveRow]) -> RenderableType:
    out = table("transfer", "size each", "count", "time on links", right=(1, 2, 3), wide=0)
    for row in rows[:_MAX_TRANSFERS]:
        add(
            out,
            re.sub(r"\b1 buffers", "1 buffer", row.where),
            units.nbytes(row.bytes),
            f"x {row.count}",
            units.seconds(row.seconds),
        )
    for name, some in ((f"{len(rows) - _MAX_TRANSFERS} more rows", rows[_MAX_TRANSFERS:]), ("total", rows)):
        if some:
            size = units.nbytes(sum(row.bytes * row.count for row in some))
            cells = size, f"x {sum(row.count for row in some)}", units.seconds(sum(row.seconds for row in some))
            add(out, name, *cells, style="bold" if name == "total" else "")
    return out


def replicated(plan: Plan) -> tuple[Replicated, ...]:
    """Operations that are not distributed, the largest first; for a pipeline those of all stages, with their stages."""
    if not plan.parts:
        return plan.replicated
    found: dict[Replicated, list[int]] = {}
    for number, part in enumerate(plan.parts):
        for row in part.replicated:
            found.setdefault(row, []).append(number)
    rows = [
        replace(row, where=f"{named(stages)}: {row.where}", seconds=row.seconds * len(stages))
        for row, stages in found.items()
    ]
    return (*plan.replicated, *sorted(rows, key=lambda row: -row.seconds))


def meshes(plan: Plan) -> str:
    """The meshes of all stages, equal ones joined: "stages 0-3: x=4; stage 4: x=2 y=2"."""
    if plan.pipeline is None:
        stage = plan.stages[0]
        return units.mesh(stage.mesh_shape, stage.axis_names)
    found: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        found.setdefault(units.mesh(stage.mesh_shape, stage.axis_names), []).append(number)
    return "; ".join(f"{named(numbers)}: {mesh}" for mesh, numbers in found.items())


def layer_ranges(plan: Plan) -> str:
    """The layers of each stage, such as "0-3, 4-7"; "one mesh" without a pipeline."""
    shape = plan.pipeline
    if shape is None:
        return "one mesh"
    counts = (_layers(shape, stage) for stage in range(plan.num_stages))
    return ", ".join(str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in counts)
