"""Where the seconds of operations go: those that take most, by source line, and what bounds them.

An operation computes for max(FLOPs / rate, bytes / bandwidth) seconds, and waits for its collectives: those that bring
its operands into their layouts, and those that it issues. A collective takes alpha + bytes * beta, its latency and its
time on links (`alpa_lite.cost`). The largest of the four terms is what bounds the operation; what it takes is

    max(FLOPs, bytes) + links + latency    where latency has the starts of kernels
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from alpa_lite.figures import Spending
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import stages, units
from alpa_lite.report.tables import add, table

LISTED = 10
"""How many rows are printed."""

BOUNDS: tuple[str, ...] = ("FLOPs", "bytes", "links", "latency")
"""What may bound an operation."""


def heaviest(plan: Plan) -> list[Spending]:
    """What operations take of an average device, those first that take most; a stage counts by its share of devices.

    A row is all operations of one name at one place that have the same bound, those of repeated layers together. What
    the rows take adds up to the computing and the collectives of all stages.
    """
    devices = stages.sizes(plan)
    found: dict[tuple[str, str, str], Spending] = {}
    for mesh, stage in zip(plan.division.submeshes, plan.stages, strict=True):
        part = devices[mesh] / sum(devices)
        for spent in stage.spending:
            key = spent.operation, spent.where, "FLOPs" if spent.flops > spent.bytes else "bytes"
            was = found.get(key) or Spending(spent.where, spent.operation)
            found[key] = replace(
                was, flops=was.flops + part * spent.flops, bytes=was.bytes + part * spent.bytes,
                links=was.links + part * spent.links, latency=was.latency + part * spent.latency,
                starts=was.starts + part * spent.starts,
                count=was.count + spent.count,
            )  # fmt: skip
    return sorted(found.values(), key=lambda row: -row.total)


def bounds(rows: Iterable[Spending]) -> dict[str, float]:
    """The seconds that each resource bounds: of computing those of the larger term; starts of kernels are latency."""
    out: dict[str, float] = dict.fromkeys(BOUNDS, 0.0)
    for row in rows:
        out["FLOPs" if row.flops > row.bytes else "bytes"] += row.seconds - row.starts
        out["links"] += row.links
        out["latency"] += row.latency + row.starts
    return out


def bounds_text(rows: Iterable[Spending]) -> str:
    """`bounds` as shares, such as "FLOPs 61 %, bytes 20 %, links 19 %"; what is next to nothing is left out."""
    found = bounds(rows)
    whole = sum(found.values())
    return ", ".join(f"{name} {units.percent(s, whole)}" for name, s in found.items() if s > 5e-4 * whole)


def terms_text(row: Spending) -> str:
    """The terms, such as "FLOPs 3.1 ms, bytes 1.02 ms, links 0 s, latency 0 s"."""
    terms = zip(BOUNDS, (row.flops, row.bytes, row.links, row.latency + row.starts), strict=True)
    return ", ".join(f"{name} {units.seconds(seconds)}" for name, seconds in terms)


def count_text(row: Spending) -> str:
    """How many there are, such as "x 24"."""
    return f"x {row.count:,}" if row.count > 1 else ""


def line_text(row: Spending) -> str:
    """The source line alone, and whether it is of the reverse pass."""
    backward = "transpose" in row.where or "backward" in row.where
    line = row.where if row.where.endswith(" of the step") else row.where.split(" ", 1)[0]
    return f"{line}, backward" if backward else line


def renderable(rows: list[Spending]) -> RenderableType:
    """The first of the rows as a table, and what all others take."""
    whole = sum(row.total for row in rows)
    columns = ("operation", "", "time", "share", "bound by", "FLOPs", "bytes", "links", "latency")
    out = table(*columns, right=(1, 2, 3, 5, 6, 7, 8), wide=0)
    for row in rows[:LISTED]:
        terms = (units.seconds(seconds) for seconds in (row.flops, row.bytes, row.links, row.latency + row.starts))
        share = units.percent(row.total, whole)
        name = Group(Text(row.operation), Padding(Text(row.where), (0, 0, 0, 2)))
        add(out, name, count_text(row), units.seconds(row.total), share, row.bound, *terms)
    rest = rows[LISTED:]
    if rest:
        seconds = sum(row.total for row in rest)
        cells = units.seconds(seconds), units.percent(seconds, whole)
        add(out, f"{len(rest)} more", "", *cells, "", *(units.seconds(s) for s in _summed(rest)))
    return out


def _summed(rows: Iterable[Spending]) -> tuple[float, ...]:
    """The terms of some rows together."""
    return tuple(
        map(sum, zip(*((row.flops, row.bytes, row.links, row.latency + row.starts) for row in rows), strict=True))
    )
