"""Collectives and transfers of a step, identical ones as one row: the same collective in each of twelve layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from alpa_lite.plan.records import Collective
from alpa_lite.report import grouping, units
from alpa_lite.report.tables import Column, Table

Costed = tuple[Collective, float]
"""A collective with its seconds per step."""


def collective_rows(items: Iterable[Costed]) -> list[Costed]:
    """Merges collectives that differ in layer numbers alone, each with the seconds of all; the most expensive first."""
    rows = []
    for where, same in grouping.by_numbers(items, lambda c: (c[0].where, (c[0].kind, c[0].axes, c[0].bytes))):
        count, seconds = sum(c.count for c, _ in same), sum(seconds for _, seconds in same)
        rows.append((replace(same[0][0], where=where, count=count), seconds))
    return sorted(rows, key=lambda row: -row[1])


def transfer_rows(items: Iterable[Costed]) -> list[Costed]:
    """Merges transfers between submeshes; those to the next submesh, to others, and back are separate rows."""
    routes: dict[tuple[int, bool], list[Costed]] = {}
    for collective, seconds in items:
        if collective.kind == "transfer":
            source, destination = collective.route or (0, 0)
            distance = destination - source
            routes.setdefault((min(abs(distance), 2), distance > 0), []).append((collective, seconds))
    return [row for _, found in sorted(routes.items()) for row in collective_rows(found)]


def table(rows: Sequence[Costed], most: int, transfers: bool = False) -> Table:
    """The collectives, or the transfers, of which a terminal shows the `most` most expensive, and the sum of all."""
    where = Column("transfer" if transfers else "where", lambda row: row[0].where, wide=True)
    columns = (
        Column("size each", lambda row: row[0].bytes, units.nbytes, lambda row: row[0].bytes * row[0].count),
        Column("count", lambda row: row[0].count, units.times, lambda row: row[0].count),
        Column("time on links" if transfers else "time", lambda row: row[1], units.seconds, lambda row: row[1]),
    )
    if transfers:
        return Table.of((where, *columns), rows, most, "{} more rows", total=True)
    names = Column("kind", lambda row: row[0].kind), Column("axes", lambda row: units.axes(row[0].axes))
    return Table.of((*names, *columns, where), rows, most, "{} more rows", total=True, searched="collectives")
