"""Where the seconds of computing go: the operations that take most, by source line."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType

from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import stages, units
from alpa_lite.report.tables import add, table

LISTED = 10
"""How many rows are printed."""


@dataclass(frozen=True)
class Row:
    """All operations of one name at one place, those of repeated layers together.

    Attributes:
      operation: the primitive. where: source line and scope.
      seconds: per step, of a device on average: a stage counts by its share of the devices.
    """

    operation: str
    where: str
    seconds: float


def heaviest(plan: Plan) -> list[Row]:
    """The rows of a plan, those that take most first; their seconds add up to the computing of all operations."""
    devices = stages.sizes(plan)
    found: dict[tuple[str, str], float] = {}
    for mesh, stage in zip(plan.division.submeshes, plan.stages, strict=True):
        for spent in stage.spending:
            key = spent.operation, spent.where
            found[key] = found.get(key, 0.0) + spent.seconds * devices[mesh] / sum(devices)
    return sorted((Row(*key, seconds) for key, seconds in found.items()), key=lambda row: -row.seconds)


def renderable(rows: list[Row]) -> RenderableType:
    """The first of the rows as a table, and what all others take."""
    whole = sum(row.seconds for row in rows)
    out = table("operation", "time", "share", "place", right=(1, 2), wide=3)
    for row in rows[:LISTED]:
        add(out, row.operation, units.seconds(row.seconds), units.percent(row.seconds, whole), row.where)
    rest = sum(row.seconds for row in rows[LISTED:])
    if rest:
        add(out, f"{len(rows) - LISTED} more", units.seconds(rest), units.percent(rest, whole), "")
    return out
