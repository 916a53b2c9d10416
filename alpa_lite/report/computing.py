"""Operations by their seconds: those that take most, by source line, and the resource that bounds them.

An operation computes for max(FLOPs / rate, bytes / bandwidth) seconds, and waits for its collectives: those that bring
its operands into their layouts, and those that it issues. A collective takes alpha + bytes * beta, its latency and its
time on links (`alpa_lite.cluster.cost`). The largest of the four terms is what bounds the operation; what it takes is

    max(FLOPs, bytes) + links + latency    where latency has the starts of kernels
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from alpa_lite.plan.figures import Spending
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import stages, units
from alpa_lite.report.places import Place
from alpa_lite.report.tables import Column, Nested, Table

_LISTED = 10
_TERMS = ("flops", "bytes", "links", "latency", "starts")


def heaviest(plan: Plan) -> list[Spending]:
    """Seconds of operations on an average device, the most expensive first; a stage counts by its share of devices.

    A row is all operations of one name at one place that have the same bound, those of repeated layers together. The
    rows add up to the computing and the collectives of all stages.
    """
    found: dict[tuple[str, str, str], Spending] = {}
    for part, stage in zip(stages.shares(plan), plan.stages, strict=True):
        for spent in stage.spending:
            key = spent.operation, spent.where, "FLOPs" if spent.flops > spent.bytes else "bytes"
            was = found.get(key) or replace(spent, **dict.fromkeys(_TERMS, 0.0), count=0)
            terms = {name: getattr(was, name) + part * getattr(spent, name) for name in _TERMS}
            found[key] = replace(was, **terms, count=was.count + spent.count)
    return sorted(found.values(), key=lambda row: -row.total)


def bounds(rows: Iterable[Spending]) -> dict[str, float]:
    """The seconds that each resource bounds: of computing those of the larger term; starts of kernels are latency."""
    out = {"FLOPs": 0.0, "bytes": 0.0, "links": 0.0, "latency": 0.0}
    for row in rows:
        out["FLOPs" if row.flops > row.bytes else "bytes"] += row.seconds - row.starts
        out["links"] += row.links
        out["latency"] += row.latency + row.starts
    return out


def bounds_text(rows: Iterable[Spending]) -> str:
    """Returns `bounds` as shares, such as "FLOPs 61 %, bytes 20 %, links 19 %", without those of 0.05 % or less."""
    found = bounds(rows)
    whole = sum(found.values())
    return ", ".join(f"{name} {units.percent(s, whole)}" for name, s in found.items() if s > 5e-4 * whole)


def terms_text(terms: Mapping[str, float]) -> str:
    """The largest term, and all, such as "bound by FLOPs: FLOPs 3.1 ms, bytes 1.02 ms, links 0 s, latency 0 s"."""
    largest = max(terms, key=terms.__getitem__)
    return f"bound by {largest}: {', '.join(f'{name} {units.seconds(s)}' for name, s in terms.items())}"


def line_text(row: Spending) -> str:
    """The source line alone, and whether it is of the reverse pass."""
    place = Place.of(row.where)
    return f"{place.line or row.where}{', backward' * place.backward}"


def operation_table(rows: Sequence[Spending]) -> Table:
    """Returns the table of operations; a terminal shows the first ones, and the sums of all others."""
    total, share = attrgetter("total"), partial(units.percent, whole=sum(row.total for row in rows))
    terms = {name: lambda row, name=name: row.terms[name] for name in bounds(())}
    columns = (
        Column("operation", lambda row: Nested(row.operation, (row.where,)), wide=True),
        Column("", lambda row: row.count if row.count > 1 else None, units.times),
        Column("time", total, units.seconds, total),
        Column("share", total, share, total),
        Column("bound by", lambda row: row.bound),
        *(Column(name, term, units.seconds, term) for name, term in terms.items()),
    )
    return Table.of(columns, rows, _LISTED, "{} more", order="time", searched="operations")
