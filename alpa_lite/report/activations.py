"""The activations that wait for the backward pass, as text that can be compared line by line, and as a table.

A line holds where an activation is made, by which operation, its type, its layout, and the bytes of one device's block.
Layers that differ in numbers alone are one line. Lines are in the order of their texts, not of the program, so that
two plans of one step differ where their activations do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from alpa_lite.plan.figures import Held
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import grouping, units
from alpa_lite.report.places import Place
from alpa_lite.report.tables import Column, Nested, Table


def render(plan: Plan) -> str:
    """The activations of every stage with their sums; of a pipeline, those of one micro-batch."""
    parts = []
    for number, stage in enumerate(plan.stages):
        size = sum(row.bytes * row.count for row in stage.held)
        of = f"stage {number}: " if len(plan.stages) > 1 else ""
        each = " of each micro-batch" if plan.num_microbatches > 1 else ""
        count = sum(row.count for row in stage.held)
        parts.append(f"{of}{count} activations{each} wait for the backward pass, {size:,} bytes per device")
        parts += [f"  {line}" for line in sorted(map(_line, joined(stage.held)))]
    return "\n".join(parts)


def table(plan: Plan) -> Table:
    """The activations of all stages."""
    columns = (
        Column("operation", lambda row: Nested(row.operation, (row.where,)), wide=True),
        Column("type", lambda row: units.type_name(row.dtype, row.shape)),
        Column("layout", lambda row: units.spec(row.spec)),
        Column("count", lambda row: row.count, units.times),
        Column("per device, each", lambda row: row.bytes, units.nbytes),
        Column("all", lambda row: row.bytes * row.count, units.nbytes),
    )
    rows = joined(row for stage in plan.stages for row in stage.held)
    return Table.of(columns, rows, order="all", searched="activations")


def joined(rows: Iterable[Held]) -> list[Held]:
    """Activations that differ in the numbers of their scopes alone as one."""

    def key(row: Held) -> tuple[str, Hashable]:
        place = Place.of(row.where)
        return place.scope, (place.source, row.operation, row.shape, row.dtype, row.spec, row.bytes)

    return [
        replace(same[0], where=f"{Place.of(same[0].where).source} {scope}", count=sum(row.count for row in same))
        for scope, same in grouping.by_numbers(rows, key)
    ]


def _line(row: Held) -> str:
    times = f" {units.times(row.count)}" if row.count > 1 else ""
    kind = units.type_name(row.dtype, row.shape)
    return f"{row.where} | {row.operation}{times} | {kind} {units.spec(row.spec)} | {row.bytes:,} bytes".strip()
