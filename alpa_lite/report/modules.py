"""Seconds of a step by module: the Flax scope of an operation, or the function that it is written in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import stages, units
from alpa_lite.report.places import Place
from alpa_lite.report.tables import Bar, Column, Nested, Part, Table

_MAX_OPERATIONS = 12
COLOURS = {"forward": "blue", "backward and update": "green", "communication": "red"}
"""The colour of each kind of time."""


@dataclass(frozen=True)
class Module:
    """Seconds per step of an average device, in one module.

    Attributes:
      name: of the module; layers are one.
      forward, backward, communication: their sum is all. The update counts as backward.
      operations: (primitive or collective, seconds), the most expensive first.
    """

    name: str
    forward: float
    backward: float
    communication: float
    operations: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.communication


def of(plan: Plan) -> list[Module]:
    """The modules of a plan, the most expensive first."""
    share = stages.shares(plan)
    spent = [
        (part * row.seconds, row) for part, stage in zip(share, plan.stages, strict=True) for row in stage.spending
    ]
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    operations: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for seconds, row in spent:
        place = Place.of(row.where)
        times[place.module][int(not place.forward)] += seconds
        operations[place.module][row.operation] += seconds
    for collective, seconds in zip(plan.collectives, plan.collective_seconds, strict=True):
        if spent and collective.kind != "transfer":
            module, waiting = Place.of(collective.where).module, share[collective.stage] * seconds
            times[module][2] += waiting
            operations[module][collective.kind] += waiting
    by_size = {name: sorted(own.items(), key=lambda item: -item[1]) for name, own in operations.items()}
    rows = [Module(name, *seconds, operations=tuple(by_size[name])) for name, seconds in times.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def table(rows: list[Module], step_seconds: float) -> Table:
    """The modules, with a bar each."""
    longest = max(row.seconds for row in rows)
    body = []
    for row in rows:
        seconds = zip(COLOURS.items(), (row.forward, row.backward, row.communication), strict=True)
        parts = tuple(Part(f"{name}: {units.seconds(s)}", s, colour) for (name, colour), s in seconds)
        bar = Bar(parts, longest, ", ".join(part.label for part in parts))
        operations = tuple(f"{name}: {units.seconds(s)}" for name, s in row.operations[:_MAX_OPERATIONS])
        body.append((Nested(row.name, operations), bar, row.seconds, row.seconds))
    share = Column("share", format=partial(units.percent, whole=step_seconds))
    return Table.of((Column("module", wide=True), Column(), Column("time", format=units.seconds), share), body)
