"""Operations by their seconds, by source line and by module, the resource that bounds them, and saved activations.

An operation computes for max(FLOPs / rate, bytes / bandwidth) seconds, and waits for its collectives: those that bring
its operands into their layouts, and those that it issues. A collective takes alpha + bytes * beta, its latency and its
time on links (`alpa_lite.cluster.cost`). The largest of the four terms is what bounds the operation; what it takes is

    max(FLOPs, bytes) + links + latency    where latency has the starts of kernels
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from alpa_lite.ir import units
from alpa_lite.plan.figures import OpCost, Residual
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import grouping, prose, stages
from alpa_lite.report.tables import Bar, Column, Nested, Part, Table

_LISTED = 10
_TERMS = ("flops", "bytes", "links", "latency", "starts")
_MODULE_OPERATIONS = 12  # listed of a module
_PLACE = re.compile(r"(\S+:\d+)?(?: ?\((\S+)\))?\s*(.*)", re.DOTALL)
_TRANSFORMS = re.compile(r"\b(?:transpose|jvp|vmap|remat|checkpoint|jit|pjit|custom_jvp|custom_vjp|linearize)\(")
_MARKS = ("forward", "backward", "rematted_computation", "checkpoint")
COLOURS = {"forward": "blue", "backward and update": "green", "communication": "red"}
"""The colour of each kind of a module's time."""


# -- places ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A place in a program.

    Attributes:
      line: the source line, such as "gpt.py:57"; empty if it is not known.
      function: of that line.
      scope: the name stack, such as "transpose(jvp(GPT))/h_3/attn", or a remark where there is no line.
    """

    line: str
    function: str
    scope: str

    @staticmethod
    def parse(where: str) -> Place:
        """Returns the parts of a text that `_jax.describe_location` wrote."""
        match = _PLACE.fullmatch(where)
        return Place(match[1] or "", match[2] or "", match[3]) if match else Place("", "", where)

    @property
    def source(self) -> str:
        """The source line with its function."""
        return f"{self.line} ({self.function})" if self.function else self.line

    @property
    def stack(self) -> str:
        """The name stack alone, without the layout behind it."""
        return self.scope.partition(" -> ")[0].partition(" ")[0] if " -> " in self.scope else self.scope

    @property
    def is_backward(self) -> bool:
        """Whether it is in the reverse pass."""
        return "transpose" in self.stack or "backward" in self.stack

    @property
    def is_forward(self) -> bool:
        """Whether it is differentiated, and not in the reverse pass; neither is so for the update."""
        return not self.is_backward and ("jvp" in self.stack or "forward" in self.stack)

    @property
    def module(self) -> str:
        """The Flax scope, with layers as one; else the function, or the line.

        Scopes of JAX's own functions say less than the function that called them: `_where`, an einsum's subscripts.
        """
        parts = _TRANSFORMS.sub("", self.stack).replace(")", "").split("/")
        own = [part for part in parts if part and part not in _MARKS and not part.startswith("_") and "->" not in part]
        return re.sub(r"\d+", "#", "/".join(own)) or self.function or self.line or "other"


# -- operations --------------------------------------------------------------------------------------------------------


def rank_operations(plan: Plan) -> list[OpCost]:
    """Seconds of operations on an average device, the most expensive first; a stage counts by its share of devices.

    A row is all operations of one name at one place that have the same bound, those of repeated layers together. The
    rows add up to the computing and the collectives of all stages.
    """
    found: dict[tuple[str, str, str], OpCost] = {}
    for part, stage in zip(stages.shares(plan), plan.stages, strict=True):
        for spent in stage.spending:
            key = spent.operation, spent.where, "FLOPs" if spent.flops > spent.bytes else "bytes"
            was = found.get(key) or replace(spent, **dict.fromkeys(_TERMS, 0.0), count=0)
            terms = {name: getattr(was, name) + part * getattr(spent, name) for name in _TERMS}
            found[key] = replace(was, **terms, count=was.count + spent.count)
    return sorted(found.values(), key=lambda row: -row.total)


def bounds(rows: Iterable[OpCost]) -> dict[str, float]:
    """The seconds that each resource bounds: of computing those of the larger term; starts of kernels are latency."""
    out = {"FLOPs": 0.0, "bytes": 0.0, "links": 0.0, "latency": 0.0}
    for row in rows:
        out["FLOPs" if row.flops > row.bytes else "bytes"] += row.seconds - row.starts
        out["links"] += row.links
        out["latency"] += row.latency + row.starts
    return out


def bounds_text(rows: Iterable[OpCost]) -> str:
    """Returns `bounds` as shares, such as "FLOPs 61 %, bytes 20 %, links 19 %", without those of 0.05 % or less."""
    found = bounds(rows)
    whole = sum(found.values())
    return ", ".join(f"{name} {units.percent(s, whole)}" for name, s in found.items() if s > 5e-4 * whole)


def terms_text(terms: Mapping[str, float]) -> str:
    """The largest term, and all, such as "bound by FLOPs: FLOPs 3.1 ms, bytes 1.02 ms, links 0 s, latency 0 s"."""
    largest = max(terms, key=terms.__getitem__)
    return f"bound by {largest}: {', '.join(f'{name} {units.seconds(s)}' for name, s in terms.items())}"


def line_text(row: OpCost) -> str:
    """Returns the source line alone, and whether it is of the reverse pass."""
    place = Place.parse(row.where)
    return f"{place.line or row.where}{', backward' * place.is_backward}"


def table(rows: Sequence[OpCost]) -> Table:
    """Returns the table of operations; a terminal shows the first ones, and the sums of all others."""
    total, share = attrgetter("total"), partial(units.percent, whole=sum(row.total for row in rows))
    terms = {name: lambda row, name=name: row.terms[name] for name in bounds(())}
    columns = (
        Column("operation", lambda row: Nested(row.operation, (row.where,)), is_wide=True),
        Column("", lambda row: row.count if row.count > 1 else None, units.times),
        Column("time", total, units.seconds, total),
        Column("share", total, share, total),
        Column("bound by", lambda row: row.bound),
        *(Column(name, term, units.seconds, term) for name, term in terms.items()),
    )
    return Table.from_items(columns, rows, _LISTED, "{} more", order="time", search_noun="operations")


# -- modules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """Seconds per step of an average device, in one module.

    Attributes:
      name: of the module, the Flax scope of operations or the function that they are written in; layers are one.
      times: seconds of each kind of `COLOURS`. The update counts as backward.
      operations: seconds of each primitive or collective.
    """

    name: str
    times: dict[str, float]
    operations: dict[str, float]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.times.values())


def modules(plan: Plan) -> list[Module]:
    """Returns the modules of a plan, the most expensive first; none where the seconds of operations are not known."""
    shares = stages.shares(plan)
    items = [
        (row.where, row.operation, "", share * row.seconds)
        for share, stage in zip(shares, plan.stages, strict=True)
        for row in stage.spending
    ]
    items += [
        (collective.where, collective.kind, "communication", shares[collective.stage] * seconds)
        for collective, seconds in plan.priced_collectives
        if items and collective.kind != "transfer"
    ]
    found: dict[str, Module] = {}
    for where, operation, kind, seconds in items:
        place = Place.parse(where)
        module = found.setdefault(place.module, Module(place.module, defaultdict(float), defaultdict(float)))
        module.times[kind or ("forward" if place.is_forward else "backward and update")] += seconds
        module.operations[operation] += seconds
    return sorted(found.values(), key=lambda row: -row.seconds)


def module_table(rows: list[Module], step_seconds: float) -> Table:
    """Returns the modules, with a bar each."""
    body = []
    for row in rows:
        times = {name: row.times.get(name, 0.0) for name in COLOURS}
        parts = tuple(Part(f"{name}: {units.seconds(s)}", s, COLOURS[name]) for name, s in times.items())
        bar = Bar(parts, rows[0].seconds, ", ".join(part.label for part in parts))
        by_size = sorted(row.operations.items(), key=lambda item: -item[1])[:_MODULE_OPERATIONS]
        lines = tuple(f"{name}: {units.seconds(s)}" for name, s in by_size)
        body.append((Nested(row.name, lines), bar, row.seconds, row.seconds))
    share = Column("share", format=partial(units.percent, whole=step_seconds))
    return Table.from_items(
        (Column("module", is_wide=True), Column(), Column("time", format=units.seconds), share), body
    )


# -- activations -------------------------------------------------------------------------------------------------------


def activations(plan: Plan) -> str:
    """The activations that wait for the backward pass, by stage, with their sums; of a pipeline those of a micro-batch.

    A line holds where an activation is made, by which operation, its type, its layout, and the bytes of one device's
    block. Layers that differ in numbers alone are one line. Lines are in the order of their texts, not of the program,
    so that two plans of one step differ where their activations do.
    """
    lines = []
    for number, stage in enumerate(plan.stages):
        size = sum(row.bytes * row.count for row in stage.held)
        head, *rows = prose.lines("activations", plan, number, stage.held, _joined(stage.held), size)
        lines += [head, *(f"  {row}" for row in sorted(rows))]
    return "\n".join(lines)


def activation_table(plan: Plan) -> Table:
    """Returns the activations of all stages."""
    columns = (
        Column("operation", lambda row: Nested(row.operation, (row.where,)), is_wide=True),
        Column("type", lambda row: units.type_name(row.dtype, row.shape)),
        Column("layout", lambda row: units.spec(row.spec)),
        Column("count", lambda row: row.count, units.times),
        Column("per device, each", lambda row: row.bytes, units.nbytes),
        Column("all", lambda row: row.bytes * row.count, units.nbytes),
    )
    rows = _joined(row for stage in plan.stages for row in stage.held)
    return Table.from_items(columns, rows, order="all", search_noun="activations")


def _joined(rows: Iterable[Residual]) -> list[Residual]:
    """Returns activations that differ in the numbers of their scopes alone as one."""

    def key(row: Residual) -> tuple[str, Hashable]:
        place = Place.parse(row.where)
        return place.scope, (place.source, row.operation, row.shape, row.dtype, row.spec, row.bytes)

    return [
        replace(same[0], where=f"{Place.parse(same[0].where).source} {scope}", count=sum(row.count for row in same))
        for scope, same in grouping.group_by_numbers(rows, key)
    ]
