"""The pictures of a page: meshes as grids of devices, tensors as blocks, and the schedule as a bar for each submesh."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jax.sharding import PartitionSpec

from alpa_lite.ir.timeline import Event, Timeline
from alpa_lite.plan.records import Leaf, Stage, spec_axes
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import stages, timeline, units
from alpa_lite.report.tables import Bar, Block, Blocks, Column, Grid, Legend, Part, Table

_MAX_COLUMNS = 16  # devices in a row of a mesh of one axis
_MAX_BLOCKS = 16
_TRACK = 640  # narrowest width of a schedule in pixels, by which numbers are put in its tasks


def meshes(plan: Plan) -> Iterator[Grid]:
    """The devices of each submesh by their numbers: the last axis to the right, the one before it down."""
    for submesh, numbers in stages.numbers_by_value(plan.division.submeshes).items():
        stage = plan.stages[numbers[0]]
        title = f"submesh {submesh}: {stages.named(numbers)}, " if plan.pipelined else ""
        places = itertools.product(*map(range, stage.mesh_shape))
        cells = tuple(
            (str(number), ", ".join(f"{name}={at}" for name, at in zip(stage.axis_names, place, strict=True)))
            for number, place in enumerate(places, plan.division.first_devices[submesh])
        )
        axes = [name for name, size in zip(stage.axis_names, stage.mesh_shape, strict=True) if size > 1]
        columns = stage.mesh_shape[-1] if len(axes) > 1 else min(_MAX_COLUMNS, stage.num_devices)
        arrows = "".join(f", {name} {arrow}" for name, arrow in zip(reversed(axes), "→↓", strict=False))
        yield Grid(f"{title}mesh {units.mesh(stage.mesh_shape, stage.axis_names)}{arrows}", columns, cells)


def blocks(stage: Stage, leaf: Leaf) -> Blocks:
    """The blocks of a tensor in two of its dims: those that are cut, then the largest; at most 16 each way."""
    parts = [stage.shards(PartitionSpec(axes)) for axes in spec_axes(leaf.spec)]
    parts += [1] * (len(leaf.shape) - len(parts))
    dims = sorted(sorted(range(len(leaf.shape)), key=lambda d: (parts[d] == 1, -leaf.shape[d]))[:2])
    rows, columns = ([1, 1] + [min(_MAX_BLOCKS, parts[d]) for d in dims])[-2:]
    count = stage.shards(leaf.spec)
    copies = f"{count} blocks, {stage.num_devices // max(1, count)} copies of each"
    return Blocks(rows, columns, copies if count > 1 else "every device holds all")


def schedule(drawn: Timeline) -> tuple[Block, ...]:
    """A bar for each submesh: a part for each task, with its micro-batch where there is room."""
    tasks = sorted((e for e in drawn.events if e.kind != "transfer" and e.end > e.start), key=lambda e: e.start)
    used = [kind for kind in timeline.STYLES if any(event.kind == kind for event in tasks)]
    idle = units.percent(sum(drawn.idle), drawn.seconds * drawn.num_meshes)
    rows = []
    for mesh in range(drawn.num_meshes):
        own = [event for event in tasks if event.mesh == mesh]
        ends = [0.0, *(event.end for event in own)]
        parts = tuple(_task(event, end, drawn.seconds) for event, end in zip(own, ends, strict=False))
        share = units.percent(drawn.idle[mesh], drawn.seconds)
        rows.append((f"submesh {mesh}", Bar(parts, drawn.seconds, f"{len(own)} tasks, {share} idle"), share))
    columns = Column(), Column(f"0 s to {units.seconds(drawn.seconds)}"), Column("idle", format=str)
    legend = Legend(tuple((kind, timeline.STYLES[kind][0]) for kind in used))
    note = f"Numbers are micro-batches; {idle} of the time of all submeshes is idle."
    return legend, Table.of(columns, rows), note


def _task(event: Event, before: float, seconds: float) -> Part:
    """A task, after the end of the one before it."""
    number = str(event.microbatch) if event.microbatch >= 0 else ""
    fits = event.seconds / seconds * _TRACK > 7 * len(number) + 3
    label = f"{event.name}, stage {event.stage}, {units.seconds(event.seconds)}"
    gap = max(0.0, event.start - before)
    return Part(label, event.seconds, timeline.STYLES[event.kind][0], number if fits else "", gap)
