"""The sections of a plan: where the time goes, stages, schedule, memory, shardings, collectives, transfers.

One mesh is a pipeline of one stage: a section that has nothing to say for one stage, or for one task, is left out.
Identical stages (on meshes of one shape, with arguments that differ in layer numbers alone) are one row or one section.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from rich.text import Text

from alpa_lite.ir import schedules
from alpa_lite.plan.records import Leaf, Stage
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import communication, grouping, pictures, stages, timeline, units
from alpa_lite.report.tables import Bar, Column, Legend, Part, Section, Table, tree

_MAX_COLLECTIVES = 12  # rows, divided among kinds of stages
_MAX_LEAVES = 48  # argument rows before a terminal folds the smallest into one
_MIN_IDLE = 5e-4  # the share of a step below which idling is rounding
COLOURS = {
    "params": "blue", "frozen": "cyan", "gathered": "magenta", "gradients": "bright_magenta", "optimizer": "green",
    "activations": "yellow", "in flight": "yellow", "temporaries": "white",
}  # fmt: skip
"""The colour of each kind of memory."""


def overview(plan: Plan) -> list[Section]:
    """The time, the stages and their schedule, and the memory. A single task is not a schedule."""
    several = len(plan.stages) > 1
    scheduled = len(plan.division.timeline.events) > 1
    step = f"Predicted step: {units.seconds(plan.step_seconds)}{' (mean over devices)' * several}"
    lines = [line for line in (stages.overlapped(plan), _bubble(plan) if scheduled else "") if line]
    parts = [
        Section("time", step, (_time(plan), *lines)),
        Section("mesh", "Mesh", tuple(pictures.meshes(plan)), only="page"),
    ]
    if scheduled:
        drawing = timeline.draw(plan.division.timeline, width=98)
        parts += [
            Section("stages", "Stages (times for one micro-batch)", (_stages(plan),)),
            Section("schedule", "Schedule", (drawing,), only="terminal"),
            Section("schedule", "Schedule", pictures.schedule(plan.division.timeline), only="page"),
        ]
    memory = (_memory_legend(plan), _memory(plan)) if several else (_memory_of_one(plan),)
    return [*parts, Section("memory", "Memory per device", memory)]


def placement(plan: Plan) -> Iterator[Section]:
    """The shardings, and the collectives and transfers."""
    groups = stages.identical(plan)
    items = list(zip(plan.collectives, plan.collective_seconds, strict=True))
    for group in groups:
        each = " (identical; figures are for one of them)" if len(group) > 1 else ""
        table = argument_table(*(plan.stages[s] for s in group))
        yield Section("tensors", f"Shardings{_of(plan, 'of', group)}{each}", (table,))
    for group in groups:
        rows = communication.collective_rows(c for c in items if c[0].stage in group and c[0].kind != "transfer")
        if rows:
            heading = f"Collectives per step{_of(plan, 'within', group)}{', total' * (len(group) > 1)}"
            yield Section("collectives", heading, (communication.table(rows, _MAX_COLLECTIVES // len(groups) + 4),))
    if rows := communication.transfer_rows(items):
        heading = "Transfers between submeshes per step (overlapped with compute)"
        yield Section("transfers", heading, (communication.table(rows, _MAX_COLLECTIVES, True),))


def _of(plan: Plan, preposition: str, group: Sequence[int]) -> str:
    """The name of a group of stages, where there are several stages."""
    return f" {preposition} {stages.named(group)}" if len(plan.stages) > 1 else ""


def _time(plan: Plan) -> Table:
    """Returns the seconds of each use of time, with their shares of the step."""
    where, whole = stages.spent(plan), max(plan.step_seconds, 1e-300)
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
    return Table.of(columns, rows, style=itemgetter(3))


def _bubble(plan: Plan) -> str:
    """The idle share of the schedule itself, apart from that of unequal stages and transfers."""
    division, count = plan.division, plan.num_microbatches
    meshes = len(division.first_devices)
    bubble = schedules.bubble(
        plan.schedule, meshes, count, forward=1, backward_input=1, backward_weight=1, virtual=division.virtual
    )
    tasks = 1 if plan.schedule == schedules.FORWARD else 3
    share = units.percent(bubble, tasks * count * division.virtual + bubble)
    text = f"ideal bubble {share} (equal stages, free transfers); the rest is imbalance, updates and waiting"
    unequal = len(set(stages.sizes(plan))) > 1
    return f"{text}; idle shares below are means over submeshes, whatever their size" if unequal else text


def _stages(plan: Plan) -> Table:
    """A row for each group of identical stages."""
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

    rows = []
    for group in stages.identical(plan):
        stage, meshes = plan.stages[group[0]], [division.submeshes[s] for s in group]
        layers = {layer for s in group for layer in range(*_span(*division.layers_of(s)))}
        devices = {device for m in meshes for device in range(*_span(division.first_devices[m], sizes[m]))}
        held = sorted(
            schedules.in_flight_formula(plan.schedule, len(sizes), plan.num_microbatches, m, division.virtual)
            for m in meshes
        )
        cells = (
            units.runs(group, "-"), units.runs(sorted(layers), "-"), units.runs(sorted(devices), "-"),
            units.mesh(stage.mesh_shape, stage.axis_names), _range(held, str), division.remat[group[0]],
        )  # fmt: skip
        tasks = (times(group, (kind,), statistics.median) for kind in kinds)
        rows.append((*cells, *tasks, times(group, ("prologue", "update", "step"), sum)))
    return Table.of(columns, rows)


def _span(first: int, count: int) -> tuple[int, int]:
    return first, first + count


def _range(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    """The first and the last of some values in order, where their texts differ: "1.20-1.35 ms"."""
    low, high = text(values[0]), text(values[-1])
    if low == high:
        return low
    number, _, unit = low.rpartition(" ")
    return f"{number}-{high}" if number and high.endswith(unit) else f"{low}-{high}"


def _memory_of_one(plan: Plan) -> Table:
    """A bar for each kind of memory of the only stage. Kinds need not peak together."""
    memory, budget = plan.stages[0].memory, plan.memory_per_device
    rows = [(kind, size, COLOURS.get(kind, "blue"), "") for kind, size in memory.kinds.items()]
    rows.append((f"peak, of {units.nbytes(budget)}", memory.total, "blue", "bold"))
    return _bars(rows, budget, units.nbytes)


def _memory_names(plan: Plan) -> list[str]:
    found = {name for use in stages.memory(plan) for name, _ in use.kinds}
    return [name for name in (*stages.KINDS, "in flight", "temporaries") if name in found]


def _memory_legend(plan: Plan) -> Legend:
    return Legend(tuple((name, COLOURS[name]) for name in _memory_names(plan)))


def _memory(plan: Plan) -> Table:
    """A row for each submesh; submeshes with equal numbers share a row."""
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
    return Table.of(columns, rows)


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

    def size(row: grouping.Row) -> int:
        return sum(stage.bytes_per_device(leaves[path]) for path in row.members) // len(same)

    def sharding(row: grouping.Row) -> Text:
        spec = units.spec(first(row).spec)
        return Text(spec, "dim" if spec == "replicated" else "cyan")

    columns = (
        Column("argument", lambda row: row.path, wide=True),
        Column("", lambda row: count(row) if count(row) > 1 else None, units.times, count),
        Column("type", lambda row: type_text(first(row))),
        Column("role", lambda row: first(row).role, only="page"),
        Column("sharding", sharding),
        Column("blocks", lambda row: pictures.blocks(stage, first(row)), only="page"),
        Column(
            "whole", lambda row: sum(leaves[path].bytes for path in row.members) // len(same), units.nbytes, only="page"
        ),
        Column("per device", size, units.nbytes, size),
    )
    smallest = sorted(rows, key=size, reverse=True)[_MAX_LEAVES - 1 :] if len(rows) > _MAX_LEAVES else []
    hidden = set(map(id, smallest))
    folded = Table.of(columns, smallest, 0, "smaller arguments", order="per device", searched="tensors")
    shown = tree(columns, [row for row in rows if id(row) not in hidden])
    return replace(folded, rows=(*shown, *folded.rows))


def type_text(leaf: Leaf) -> str:
    """Dtype and shape of a leaf, such as "f32[768,3072]"."""
    return units.type_name(leaf.dtype, leaf.shape)
