"""The sections of a plan: where the time goes, stages, schedule, memory, shardings, collectives, transfers, pictures.

One mesh is a pipeline of one stage: a section that has nothing to say for one stage, or for one task, is left out.
Identical stages (on meshes of one shape, with arguments that differ in layer numbers alone) are one row or one section,
and so are identical collectives: the same in each of twelve layers.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from jax.sharding import PartitionSpec
from rich.text import Text

from alpa_lite.ir import schedules, units
from alpa_lite.ir.timeline import Event, Timeline
from alpa_lite.plan.records import Collective, Leaf, Stage, spec_axes
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import grouping, stages, timeline
from alpa_lite.report.tables import Bar, Block, Blocks, Column, Curve, Grid, Legend, Part, Section, Table, tree

CollectiveCost = tuple[Collective, float]
"""A collective with its seconds per step."""

_MAX_COLLECTIVES = 12  # rows, divided among kinds of stages
_MAX_LEAVES = 48  # argument rows before a terminal folds the smallest into one
_MIN_IDLE = 5e-4  # the share of a step below which idling is rounding
_MAX_COLUMNS = 16  # devices in a row of a mesh of one axis
_MAX_BLOCKS = 16
_TRACK = 640  # narrowest width of a schedule in pixels, by which numbers are put in its tasks
COLOURS = {
    "params": "blue", "frozen": "cyan", "gathered": "magenta", "gradients": "bright_magenta", "optimizer": "green",
    "activations": "yellow", "in flight": "yellow", "temporaries": "white",
}  # fmt: skip
"""The colour of each kind of memory."""


def overview(plan: Plan) -> Iterator[Section]:
    """Yields the time, the stages and their schedule, and the memory. A single task is not a schedule."""
    several, timed = len(plan.stages) > 1, plan.division.timeline
    scheduled = len(timed.events) > 1
    step = f"Predicted step: {units.seconds(plan.step_seconds)}{' (mean over devices)' * several}"
    lines = [line for line in (stages.overlapped_share(plan), _bubble(plan) if scheduled else "") if line]
    yield Section("time", step, (_time(plan), *lines))
    yield Section("mesh", "Mesh", tuple(_meshes(plan)), only="page")
    if scheduled:
        yield Section("stages", "Stages (times for one micro-batch)", (_stages(plan),))
        yield Section("schedule", "Schedule", (timeline.draw(timed, width=98),), only="terminal")
        yield Section("schedule", "Schedule", _schedule(timed), only="page")
    memory = (_legend(_memory_names(plan)), _memory(plan)) if several else (_memory_of_one(plan),)
    yield Section("memory", "Memory per device", memory)
    if any(curves := stages.memory_over_step(plan)):
        yield Section("memory", "Memory over the step", tuple(_memory_over_step(plan, curves)), only="page")


def placement(plan: Plan) -> Iterator[Section]:
    """Yields the shardings, and the collectives and transfers."""
    groups = stages.group_identical_stages(plan)
    for group in groups:
        each = " (identical; figures are for one of them)" if len(group) > 1 else ""
        table = argument_table(*(plan.stages[s] for s in group))
        yield Section("tensors", f"Shardings{_of(plan, 'of', group)}{each}", (table,))
    for group in groups:
        own = (c for c in plan.priced_collectives if c[0].stage in group and c[0].kind != "transfer")
        if rows := collective_rows(own):
            heading = f"Collectives per step{_of(plan, 'within', group)}{', total' * (len(group) > 1)}"
            yield Section("collectives", heading, (_collectives(rows, _MAX_COLLECTIVES // len(groups) + 4),))
    if rows := transfer_rows(plan.priced_collectives):
        heading = "Transfers between submeshes per step (overlapped with compute)"
        yield Section("transfers", heading, (_collectives(rows, _MAX_COLLECTIVES, transfers=True),))


def _of(plan: Plan, preposition: str, group: Sequence[int]) -> str:
    """Returns the name of a group of stages, where there are several stages."""
    return f" {preposition} {stages.name_stages(group)}" if len(plan.stages) > 1 else ""


# -- time --------------------------------------------------------------------------------------------------------------


def _time(plan: Plan) -> Table:
    """Returns the seconds of each use of time, with their shares of the step."""
    where, whole = stages.seconds_by_use(plan), max(plan.step_seconds, 1e-300)
    rows = [("compute", where.compute, "green", "")]
    rows += [(f"over {units.axes(axes)}", seconds, "yellow", "") for axes, seconds in where.communication.items()]
    rows += [("idle", where.idle, "red", "")] if where.idle > _MIN_IDLE * plan.step_seconds else []
    return _bars(rows, whole, units.seconds)


def _bars(rows: Sequence[tuple[str, float, str, str]], whole: float, text: Callable[[float], str]) -> Table:
    """(Name, size, colour, style) as rows, each with its share of the whole."""
    columns = (
        Column("", itemgetter(0)),
        Column("", itemgetter(1), text),
        Column("", itemgetter(1), partial(units.percent, whole=whole)),
        Column("", lambda row: Bar((Part(f"{row[0]} {text(row[1])}", row[1], row[2]),), whole)),
    )
    return Table.from_items(columns, rows, style=itemgetter(3))


def _bubble(plan: Plan) -> str:
    """Returns the idle share of the schedule itself, apart from that of unequal stages and transfers."""
    division, count = plan.division, plan.num_microbatches
    meshes = len(division.first_devices)
    back = int(plan.schedule != schedules.FORWARD.name)
    bubble = schedules.STRATEGIES[plan.schedule].bubble(
        meshes, count, forward=1, backward_input=back, backward_weight=back
    )
    tasks = 1 + 2 * back
    share = units.percent(bubble, tasks * count * division.virtual + bubble)
    text = f"ideal bubble {share} (equal stages, free transfers); the rest is imbalance, updates and waiting"
    unequal = len(set(stages.sizes(plan))) > 1
    return f"{text}; idle shares below are unweighted means over submeshes" if unequal else text


def _stages(plan: Plan) -> Table:
    """Returns a row for each group of identical stages."""
    division, sizes = plan.division, stages.sizes(plan)
    events = division.timeline.events
    kinds = [kind for kind in ("forward", "backward", "weight") if any(event.kind == kind for event in events)]
    names = *kinds, "once per step"
    columns = (
        Column("stages"), Column("layers", format=str), Column("devices", format=str), Column("mesh"),
        Column("in flight", format=str), Column("remat"), *(Column(name, format=str) for name in names),
    )  # fmt: skip

    def times(group: Sequence[int], kinds: Sequence[str], combine: Callable[[list[float]], float]) -> str:
        found = [[e.seconds for e in events if e.stage == s and e.kind in kinds] or [0.0] for s in group]
        return _range(sorted(map(combine, found)), units.seconds)

    def numbers(spans: Iterable[tuple[int, int]]) -> str:
        return units.runs(sorted({n for first, count in spans for n in range(first, first + count)}), "-")

    rows = []
    for group in stages.group_identical_stages(plan):
        stage, meshes = plan.stages[group[0]], [division.submeshes[s] for s in group]
        held = sorted(
            schedules.STRATEGIES[plan.schedule].in_flight(len(sizes), plan.num_microbatches, m, division.virtual)
            for m in meshes
        )
        cells = (
            units.runs(group, "-"), numbers(map(division.layers_of, group)),
            numbers((division.first_devices[m], sizes[m]) for m in meshes),
            units.mesh(stage.mesh_shape, stage.axis_names), _range(held, str), division.remat[group[0]],
        )  # fmt: skip
        tasks = (times(group, (kind,), statistics.median) for kind in kinds)
        rows.append((*cells, *tasks, times(group, ("prologue", "update", "step"), sum)))
    return Table.from_items(columns, rows)


def _range(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    """Returns the first and the last of some values in order, where their texts differ: "1.20-1.35 ms"."""
    low, high = text(values[0]), text(values[-1])
    if low == high:
        return low
    number, _, unit = low.rpartition(" ")
    return f"{number}-{high}" if number and high.endswith(unit) else f"{low}-{high}"


def _schedule(drawn: Timeline) -> tuple[Block, ...]:
    """Returns a bar for each submesh: a part for each task, with its micro-batch where there is room."""
    tasks = sorted((e for e in drawn.events if e.kind != "transfer" and e.end > e.start), key=lambda e: e.start)
    used = [kind for kind in timeline.STYLES if any(event.kind == kind for event in tasks)]
    idle = units.percent(sum(drawn.idle_seconds), drawn.seconds * drawn.num_meshes)
    rows = []
    for mesh in range(drawn.num_meshes):
        own = [event for event in tasks if event.mesh == mesh]
        ends = [0.0, *(event.end for event in own)]
        parts = tuple(_task(event, end, drawn.seconds) for event, end in zip(own, ends, strict=False))
        share = units.percent(drawn.idle_seconds[mesh], drawn.seconds)
        rows.append((f"submesh {mesh}", Bar(parts, drawn.seconds, f"{len(own)} tasks, {share} idle"), share))
    columns = Column(), Column(f"0 s to {units.seconds(drawn.seconds)}"), Column("idle", format=str)
    legend = Legend(tuple((kind, timeline.STYLES[kind][0]) for kind in used))
    note = f"Numbers are micro-batches; {idle} of the time of all submeshes is idle."
    return legend, Table.from_items(columns, rows), note


def _task(event: Event, before: float, seconds: float) -> Part:
    """Returns a task, after the end of the one before it."""
    number = str(event.microbatch) if event.microbatch >= 0 else ""
    fits = event.seconds / seconds * _TRACK > 7 * len(number) + 3
    label = f"{event.name}, stage {event.stage}, {units.seconds(event.seconds)}"
    gap = max(0.0, event.start - before)
    return Part(label, event.seconds, timeline.STYLES[event.kind][0], number if fits else "", gap)


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory_of_one(plan: Plan) -> Table:
    """Returns a bar for each kind of memory of the only stage. Kinds need not peak together."""
    memory, budget = plan.stages[0].memory, plan.memory_per_device
    rows = [(kind, size, COLOURS.get(kind, "blue"), "") for kind, size in memory.kinds.items()]
    rows.append((f"peak, of {units.nbytes(budget)}", memory.total, "blue", "bold"))
    return _bars(rows, budget, units.nbytes)


def _memory_names(plan: Plan) -> list[str]:
    found = {name for use in stages.memory(plan) for name, _ in use.kinds}
    return [name for name in (*stages.KINDS, "in flight", "temporaries") if name in found]


def _legend(kinds: Iterable[str]) -> Legend:
    return Legend(tuple((name, COLOURS[name]) for name in kinds))


def _memory(plan: Plan) -> Table:
    """Returns a row for each submesh; submeshes with equal numbers share a row."""
    names, budget = _memory_names(plan), plan.memory_per_device
    columns = (
        Column("submesh"), *(Column(name, format=units.nbytes) for name in (*names, "peak")),
        Column(f"of {units.nbytes(budget)}", format=partial(units.percent, whole=budget)), Column(only="page"),
    )  # fmt: skip
    rows = []
    for row, meshes in stages.numbers_by_value(stages.memory(plan)).items():
        kinds = dict(row.kinds)
        parts = (Part(f"{name} {units.nbytes(size)}", size, COLOURS[name]) for name, size in row.kinds)
        bar = Bar(tuple(parts), max(budget, sum(kinds.values())))
        rows.append((units.runs(meshes, "-"), *(kinds.get(n, 0) for n in names), row.peak, row.peak, bar))
    return Table.from_items(columns, rows)


def _memory_over_step(plan: Plan, curves: Sequence[stages.Amounts]) -> Iterator[Block]:
    """A picture for each submesh: the kinds one on top of the other, from the beginning of the step to its end."""
    yield _legend(dict.fromkeys(kind for own in curves for kind in own))
    peaks = [max(map(sum, zip(*own.values(), strict=True)), default=0.0) for own in curves]
    rows = []
    for mesh, (own, size) in enumerate(zip(curves, peaks, strict=True)):
        name = f"submesh {mesh}" if len(curves) > 1 else ""
        layers = tuple((COLOURS[kind], amounts) for kind, amounts in own.items())
        rows.append((name, Curve(layers, max(peaks), f"{name} at most {units.nbytes(size)}".strip()), size))
    yield Table.from_items(
        (Column(), Column("from the first operation to the last"), Column("at most", format=units.nbytes)), rows
    )
    if len(curves) > 1:
        yield "Buffers in flight are those of micro-batches whose backward pass has not ended, in equal parts."


# -- meshes and tensors ------------------------------------------------------------------------------------------------


def _meshes(plan: Plan) -> Iterator[Grid]:
    """Yields the devices of each submesh by their numbers: the last axis to the right, the one before it down."""
    for submesh, numbers in stages.numbers_by_value(plan.division.submeshes).items():
        stage = plan.stages[numbers[0]]
        title = f"submesh {submesh}: {stages.name_stages(numbers)}, " if plan.is_pipelined else ""
        places = itertools.product(*map(range, stage.mesh_shape))
        cells = tuple(
            (str(number), ", ".join(f"{name}={at}" for name, at in zip(stage.axis_names, place, strict=True)))
            for number, place in enumerate(places, plan.division.first_devices[submesh])
        )
        axes = [name for name, size in zip(stage.axis_names, stage.mesh_shape, strict=True) if size > 1]
        columns = stage.mesh_shape[-1] if len(axes) > 1 else min(_MAX_COLUMNS, stage.num_devices)
        arrows = "".join(f", {name} {arrow}" for name, arrow in zip(reversed(axes), "→↓", strict=False))
        yield Grid(f"{title}mesh {units.mesh(stage.mesh_shape, stage.axis_names)}{arrows}", columns, cells)


def _blocks(stage: Stage, leaf: Leaf) -> Blocks:
    """Returns the blocks of a tensor in two of its dims: those that are cut, then the largest; at most 16 each way."""
    parts = [stage.shards(PartitionSpec(axes)) for axes in spec_axes(leaf.spec)]
    parts += [1] * (len(leaf.shape) - len(parts))
    dims = sorted(sorted(range(len(leaf.shape)), key=lambda d: (parts[d] == 1, -leaf.shape[d]))[:2])
    rows, columns = ([1, 1] + [min(_MAX_BLOCKS, parts[d]) for d in dims])[-2:]
    count = stage.shards(leaf.spec)
    copies = f"{count} blocks, {stage.num_devices // max(1, count)} copies of each"
    return Blocks(rows, columns, copies if count > 1 else "every device holds all")


def argument_table(*same: Stage) -> Table:
    """The arguments of identical stages, identical ones as one row, below headings for the beginnings of their paths.

    Counts and bytes are for one of the stages.
    """
    stage, leaves = same[0], {leaf.path: leaf for stage in same for leaf in stage.arguments}
    rows = grouping.group_leaves(leaf for stage in same for leaf in stage.arguments)

    def first(row: grouping.Row) -> Leaf:
        return leaves[row.members[0]]

    def count(row: grouping.Row) -> int:
        return -(-len(row.members) // len(same))

    def total(row: grouping.Row, size: Callable[[Leaf], int]) -> int:
        return sum(size(leaves[path]) for path in row.members) // len(same)

    def local(row: grouping.Row) -> int:
        return total(row, stage.bytes_per_device)

    def sharding(row: grouping.Row) -> Text:
        spec = units.spec(first(row).spec)
        return Text(spec, "dim" if spec == "replicated" else "cyan")

    columns = (
        Column("argument", lambda row: row.path, is_wide=True),
        Column("", lambda row: count(row) if count(row) > 1 else None, units.times, count),
        Column("type", lambda row: type_text(first(row))),
        Column("role", lambda row: first(row).role, only="page"),
        Column("sharding", sharding),
        Column("blocks", lambda row: _blocks(stage, first(row)), only="page"),
        Column("whole", lambda row: total(row, lambda leaf: leaf.bytes), units.nbytes, only="page"),
        Column("per device", local, units.nbytes, local),
    )
    smallest = sorted(rows, key=local, reverse=True)[_MAX_LEAVES - 1 :] if len(rows) > _MAX_LEAVES else []
    hidden = set(map(id, smallest))
    folded = Table.from_items(columns, smallest, 0, "smaller arguments", order="per device", search_noun="tensors")
    shown = tree(columns, [row for row in rows if id(row) not in hidden])
    return replace(folded, rows=(*shown, *folded.rows))


def type_text(leaf: Leaf) -> str:
    """Dtype and shape of a leaf, such as "f32[768,3072]"."""
    return units.type_name(leaf.dtype, leaf.shape)


# -- collectives and transfers -----------------------------------------------------------------------------------------


def collective_rows(items: Iterable[CollectiveCost]) -> list[CollectiveCost]:
    """Merges collectives that differ in layer numbers alone, each with the seconds of all; the most expensive first."""
    rows = []
    for where, same in grouping.group_by_numbers(items, lambda c: (c[0].where, (c[0].kind, c[0].axes, c[0].bytes))):
        count, seconds = sum(c.count for c, _ in same), sum(seconds for _, seconds in same)
        rows.append((replace(same[0][0], where=where, count=count), seconds))
    return sorted(rows, key=lambda row: -row[1])


def transfer_rows(items: Iterable[CollectiveCost]) -> list[CollectiveCost]:
    """Merges transfers between submeshes; those to the next submesh, to others, and back are separate rows."""

    def route(item: CollectiveCost) -> tuple[int, bool]:
        """Returns the distance of the submeshes, and whether the transfer goes forward."""
        source, destination = item[0].route or (0, 0)
        return min(abs(destination - source), 2), destination > source

    routes = grouping.group_by_key((item for item in items if item[0].kind == "transfer"), route)
    return [row for _, found in sorted(routes.items()) for row in collective_rows(found)]


def _collectives(rows: Sequence[CollectiveCost], most: int, transfers: bool = False) -> Table:
    """The collectives, or the transfers, of which a terminal shows the `most` most expensive, and the sum of all."""
    where = Column("transfer" if transfers else "where", lambda row: row[0].where, is_wide=True)
    columns = (
        Column("size each", lambda row: row[0].bytes, units.nbytes, lambda row: row[0].bytes * row[0].count),
        Column("count", lambda row: row[0].count, units.times, lambda row: row[0].count),
        Column("time on links" if transfers else "time", lambda row: row[1], units.seconds, lambda row: row[1]),
    )
    if transfers:
        return Table.from_items((where, *columns), rows, most, "{} more rows", has_total=True)
    names = Column("kind", lambda row: row[0].kind), Column("axes", lambda row: units.axes(row[0].axes))
    columns = (*names, *columns, where)
    return Table.from_items(columns, rows, most, "{} more rows", has_total=True, search_noun="collectives")
