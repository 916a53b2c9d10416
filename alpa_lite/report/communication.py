"""Collectives and transfers of a step, identical ones as one row: the same collective in each of twelve layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alpa_lite.records import Collective
from alpa_lite.report import grouping, units
from alpa_lite.report.tables import Cell, Column, Row, Table, limited

MAX_TRANSFERS = 12


@dataclass(frozen=True)
class CollectiveRow:
    """Identical collectives: the same kind, axes, bytes and place, except for layer numbers."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    where: str
    count: int
    seconds: float


def collective_rows(items: Iterable[tuple[Collective, float]]) -> list[CollectiveRow]:
    """Collectives with their seconds per step, identical ones as one row, the most expensive first."""
    found: dict[tuple, list[tuple[Collective, float]]] = {}
    for collective, seconds in items:
        key = (collective.kind, collective.axes, collective.bytes, re.sub(r"\d+", "#", collective.where))
        found.setdefault(key, []).append((collective, seconds))
    rows = []
    for (kind, axes, size, _), same in found.items():
        where = grouping.template([c.where for c, _ in same])
        count, seconds = sum(c.count for c, _ in same), sum(seconds for _, seconds in same)
        rows.append(CollectiveRow(kind, axes, size, where, count, seconds))
    return sorted(rows, key=lambda row: -row.seconds)


def transfer_rows(items: Iterable[tuple[Collective, float]]) -> list[CollectiveRow]:
    """The transfers between submeshes, identical ones as one row; the two directions are separate rows.

    So are transfers to the next submesh and to others.
    """
    routes: dict[tuple[int, bool], list[tuple[Collective, float]]] = {}
    for collective, seconds in items:
        if collective.kind == "transfer":
            source, destination = collective.route or (0, 0)
            distance = destination - source
            routes.setdefault((min(abs(distance), 2), distance > 0), []).append((collective, seconds))
    return [row for _, found in sorted(routes.items()) for row in collective_rows(found)]


def collective_table(rows: Sequence[CollectiveRow], most: int) -> Table:
    """The collectives, of which a terminal shows the `most` most expensive, and the sum of all."""

    def cells(row: CollectiveRow) -> Row:
        return Row((row.kind, units.axes(row.axes), row.bytes, row.count, row.seconds, row.where))

    def rest(some: Sequence[CollectiveRow]) -> tuple[Cell, ...]:
        return f"{len(some)} more rows", "", "", *_sums(some)[1:], ""

    columns = (
        Column("kind"), Column("axes"), Column("size each", units.nbytes), Column("count", units.times),
        Column("time", units.seconds), Column("where", wide=True),
    )  # fmt: skip
    total = Row(("total", "", *_sums(rows), ""), "bold", total=True)
    return Table(columns, (*limited(rows, most, cells, rest), total), searched="collectives")


def transfer_table(rows: Sequence[CollectiveRow]) -> Table:
    """The transfers and the sum of all."""

    def cells(row: CollectiveRow) -> Row:
        return Row((row.where, row.bytes, row.count, row.seconds))

    def rest(some: Sequence[CollectiveRow]) -> tuple[Cell, ...]:
        return f"{len(some)} more rows", *_sums(some)

    columns = (
        Column("transfer", wide=True), Column("size each", units.nbytes), Column("count", units.times),
        Column("time on links", units.seconds),
    )  # fmt: skip
    total = Row(("total", *_sums(rows)), "bold", total=True)
    return Table(columns, (*limited(rows, MAX_TRANSFERS, cells, rest), total))


def _sums(rows: Sequence[CollectiveRow]) -> tuple[int, int, float]:
    """Bytes, executions and seconds of some rows."""
    size = sum(row.bytes * row.count for row in rows)
    return size, sum(row.count for row in rows), sum(row.seconds for row in rows)
