"""The sections of a plan's printout: where the time goes, stages, schedule, memory, shardings, collectives, transfers.

One mesh is a pipeline of one stage: a section that has nothing to say for one stage, or for one task, is left out.
Identical stages (on meshes of one shape, with arguments that differ in layer numbers alone) are one row or one section.

Where the time goes is a mean over devices. With n_m devices on submesh m, N in all, and stages s,

    compute = sum_s n_m(s) compute_s / N,    idle = step - compute - communication within stages,

so that the rows add up to the step. Transfers between submeshes overlap with computation; where they do not, devices
are idle.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from alpa_lite import schedules
from alpa_lite.records import Collective, Division, Replicated
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import timeline, units
from alpa_lite.report.tables import (
    BAR,
    CollectiveRow,
    add,
    bars,
    collective_rows,
    collective_table,
    section,
    sharding_table,
    table,
)

_MAX_COLLECTIVES = 12  # rows, divided among kinds of stages
_MAX_TRANSFERS = 12
_LEAST = 5e-4  # the share of a step below which idling is rounding
_KEPT = ("params", "frozen", "gathered", "gradients", "optimizer")
_NUMBER = re.compile(r"\d+")
_TRANSFER = re.compile(r"submesh (\d+) to (\d+), (.*)")


def sections(plan: Plan) -> list[RenderableType]:
    """The sections on shardings and communication, in the order of the printout."""
    parts: list[RenderableType] = []
    groups = identical(plan)
    for group in groups:
        stages = [plan.stages[s] for s in group]
        parts.append(section(f"Shardings{_of(plan, 'of', group)}{_each(group)}", sharding_table(*stages)))
    items = list(zip(plan.collectives, plan.collective_seconds, strict=True))
    for group in groups:
        rows = collective_rows(item for item in items if item[0].stage in group and item[0].kind != "transfer")
        if rows:
            heading = f"Collectives per step{_of(plan, 'within', group)}{', total' * (len(group) > 1)}"
            parts.append(section(heading, collective_table(rows, _MAX_COLLECTIVES // len(groups) + 4)))
    rows = transfer_rows(items)
    if rows:
        parts.append(section("Transfers between submeshes per step (overlapped with compute)", _transfers(rows)))
    return parts


def overview(plan: Plan) -> list[RenderableType]:
    """Where the time goes, the stages and their schedule, and the memory. A single task is no schedule."""
    division = plan.division
    several = len(plan.stages) > 1
    whole = f"Predicted step: {units.seconds(plan.step_seconds)}{' (mean over devices)' * several}"
    time = bars(_time_rows(plan), max(plan.step_seconds, 1e-300))
    memory = section("Memory per device", _memory(plan) if several else _memory_of_one(plan))
    hidden = [said] if (said := overlapped(plan)) else []
    if len(division.timeline.events) < 2:
        return [section(whole, time, *hidden), memory]
    return [
        section(whole, time, *hidden, _bubble(plan)),
        section("Stages (times for one micro-batch)", _stages(plan)),
        section("Schedule", timeline.draw(division.timeline, width=98)),
        memory,
    ]


def _of(plan: Plan, preposition: str, group: Sequence[int]) -> str:
    """Which stages, where there are several."""
    return f" {preposition} {named(group)}" if len(plan.stages) > 1 else ""


def identical(plan: Plan) -> list[tuple[int, ...]]:
    """Groups of identical stages: same mesh, layer count and rematerialisation, arguments equal but for numbers."""
    division = plan.division
    found: dict[object, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        leaves = Counter((_NUMBER.sub("#", x.path), x.shape, x.dtype, x.role, x.spec) for x in stage.arguments)
        rest = division.remat[number], division.layers_of(number)[1]
        key = stage.mesh_shape, stage.axis_names, rest, frozenset(leaves.items())
        found.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in found.values()]


def named(group: Sequence[int], noun: str = "stage") -> str:
    """Stage numbers as text, such as "stages 1-6"."""
    plural = "" if len(group) == 1 else "es" if noun.endswith("sh") else "s"
    return f"{noun}{plural} {units.runs(group, '-')}"


def _each(group: Sequence[int]) -> str:
    return " (identical; figures are for one of them)" if len(group) > 1 else ""


def sizes(plan: Plan) -> list[int]:
    """The number of devices of each submesh."""
    out = [1] * len(plan.division.first_devices)
    for stage, mesh in zip(plan.stages, plan.division.submeshes, strict=True):
        out[mesh] = stage.num_devices
    return out


@dataclass(frozen=True)
class Spent:
    """Where the seconds of a step go: means over devices.

    Attributes:
      compute: in the operations of the stages.
      communication: in collectives within stages, by mesh axes, the most expensive first.
      idle: in waiting.
      hidden: of the communication, what hides behind computing and takes no time of its own; hideable: what may.
    """

    compute: float
    communication: dict[tuple[str, ...], float]
    idle: float
    hidden: float = 0.0
    hideable: float = 0.0

    @property
    def waiting(self) -> float:
        """In collectives that computing waits for."""
        return sum(self.communication.values()) - self.hidden


def spent(plan: Plan) -> Spent:
    """Where the seconds of a plan go. Transfers between submeshes overlap with compute, or are waited for."""
    devices = sizes(plan)
    share = [devices[mesh] / sum(devices) for mesh in plan.division.submeshes]
    compute = sum(part * stage.compute_seconds for part, stage in zip(share, plan.stages, strict=True))
    by_axes: dict[tuple[str, ...], float] = {}
    for collective, seconds in zip(plan.collectives, plan.collective_seconds, strict=True):
        if collective.kind != "transfer":
            by_axes[collective.axes] = by_axes.get(collective.axes, 0.0) + share[collective.stage] * seconds
    hidden = sum(part * stage.hidden_seconds for part, stage in zip(share, plan.stages, strict=True))
    hideable = sum(part * stage.hideable_seconds for part, stage in zip(share, plan.stages, strict=True))
    idle = max(0.0, plan.step_seconds - compute - sum(by_axes.values()) + hidden)
    return Spent(compute, dict(sorted(by_axes.items(), key=lambda item: -item[1])), idle, hidden, hideable)


def overlapped(plan: Plan) -> str:
    """How much of the communication hides behind computing, where the plan counts on that; else nothing."""
    if not plan.cluster.overlap:
        return ""
    if not plan.cluster.overlaps:
        return f"overlapped: nothing, since the compiler for {plan.cluster.platform} runs collectives to their end"
    where = spent(plan)
    what = "parameter gathers"
    if "all_reduce" in plan.cluster.hides:
        what = f"gradient synchronisation and {what}"
    return f"overlapped: {units.seconds(where.hidden)} of {units.seconds(where.hideable)} of {what}"


def _time_rows(plan: Plan) -> list[tuple[str, float, str]]:
    where = spent(plan)
    rows = [("compute", where.compute, "green")]
    rows += [(f"over {units.axes(axes)}", seconds, "yellow") for axes, seconds in where.communication.items()]
    return [*rows, ("idle", where.idle, "red")] if where.idle > _LEAST * plan.step_seconds else rows


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
    unequal = len(set(sizes(plan))) > 1
    return f"{text}; idle shares below are means over submeshes, whatever their size" if unequal else text


def _stages(plan: Plan) -> RenderableType:
    """A row for each group of identical stages."""
    division = plan.division
    events = division.timeline.events
    kinds = [kind for kind in ("forward", "backward", "weight") if any(event.kind == kind for event in events)]
    columns = ("stages", "layers", "devices", "mesh", "in flight", "remat", *kinds, "once per step")
    out = table(*columns, right=(1, 2, 4, *range(6, 6 + len(kinds) + 1)))
    devices = sizes(plan)
    for group in identical(plan):
        stage, mesh_of = plan.stages[group[0]], division.submeshes
        layers = [division.layers_of(s) for s in group]
        meshes = [mesh_of[s] for s in group]
        used = [(division.first_devices[m], division.first_devices[m] + devices[m] - 1) for m in meshes]
        held = [
            schedules.in_flight_formula(plan.schedule, len(devices), plan.num_microbatches, m, division.virtual)
            for m in meshes
        ]
        timed = [[_seconds(division, s, (kind,), statistics.median) for s in group] for kind in kinds]
        timed.append([_seconds(division, s, ("prologue", "update", "step"), sum) for s in group])
        cells = (
            named(group).split(" ", 1)[1],
            _runs([(first, first + count - 1) for first, count in layers]),
            _runs(used),
            units.mesh(stage.mesh_shape, stage.axis_names),
            _between(sorted(held), str),
            division.remat[group[0]],
        )
        add(out, *cells, *(_between(sorted(values), units.seconds) for values in timed))
    return out


def _seconds(
    division: Division, stage: int, kinds: Sequence[str], combine: Callable[[list[float]], float]
) -> float:  # fmt: skip
    """The seconds of one stage's events of some kinds, combined."""
    found = [event.seconds for event in division.timeline.events if event.stage == stage and event.kind in kinds]
    return combine(found) if found else 0.0


def _runs(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges of numbers, adjacent ones joined: (0, 3), (4, 7) is "0-7"."""
    out: list[list[int]] = []
    for first, last in sorted(set(ranges)):
        if out and out[-1][1] + 1 == first:
            out[-1][1] = last
        else:
            out.append([first, last])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def _between(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    """The first and the last of some values in order, where their texts differ: "1.20-1.35 ms"."""
    low, high = text(values[0]), text(values[-1])
    if low == high:
        return low
    number, unit = low.rsplit(" ", 1) if " " in low else (low, "")
    return f"{number}-{high}" if high.endswith(unit) else f"{low}-{high}"


@dataclass(frozen=True)
class SubmeshMemory:
    """Bytes per device of one submesh: the sums over its stages.

    Attributes:
      params, frozen, gathered, gradients, optimizer: as of `Memory`.
      in_flight: all other buffers between tasks: values saved for backward passes, transfers, the batch.
      temporaries: the most that one executable needs in addition to its buffers.
      peak: the peak of the buffers, plus temporaries.
    """

    params: int
    frozen: int
    gathered: int
    gradients: int
    optimizer: int
    in_flight: int
    temporaries: int
    peak: int

    @property
    def kinds(self) -> dict[str, int]:
        """The kinds in the order of reports, by their names there; some only where there are any."""
        named = {"in flight": self.in_flight, "temporaries": self.temporaries}
        names = ("params", "frozen", "gathered", "gradients", "optimizer")
        return {k: getattr(self, k) for k in names if getattr(self, k) or k not in ("frozen", "gathered")} | named


def memory(plan: Plan) -> list[SubmeshMemory]:
    """The memory of each submesh."""
    division = plan.division
    out = []
    for mesh, (buffers, temporary) in enumerate(zip(division.buffer_bytes, division.temporary_bytes, strict=True)):
        stages = [stage.memory for stage, m in zip(plan.stages, division.submeshes, strict=True) if m == mesh]
        kept = {kind: sum(getattr(m, kind) for m in stages) for kind in _KEPT}
        flying = max(0, buffers - sum(kept.values()))
        out.append(SubmeshMemory(**kept, in_flight=flying, temporaries=temporary, peak=buffers + temporary))
    return out


def _memory(plan: Plan) -> RenderableType:
    """A row for each submesh; submeshes with equal numbers share a row."""
    found: dict[SubmeshMemory, list[int]] = {}
    for number, row in enumerate(memory(plan)):
        found.setdefault(row, []).append(number)
    names = tuple(dict.fromkeys(name for row in found for name in row.kinds))
    names = tuple(n for n in (*_KEPT, "in flight", "temporaries") if n in names)
    columns = ("submesh", *names, "peak", f"of {units.nbytes(plan.memory_per_device)}")
    out = table(*columns, right=range(1, len(columns)))
    for row, meshes in found.items():
        sizes = (*(row.kinds.get(name, 0) for name in names), row.peak)
        share = units.percent(row.peak, plan.memory_per_device)
        add(out, named(meshes).split(" ", 1)[1], *map(units.nbytes, sizes), share)
    return out


def transfer_rows(items: Iterable[tuple[Collective, float]]) -> list[CollectiveRow]:
    """The transfers between submeshes, identical ones as one row; the two directions are separate rows."""
    ways: dict[tuple[int, bool], list[tuple[Collective, float]]] = {}
    for collective, seconds in items:
        match = _TRANSFER.fullmatch(collective.where) if collective.kind == "transfer" else None
        if match:
            apart = int(match[2]) - int(match[1])
            ways.setdefault((min(abs(apart), 2), apart > 0), []).append((collective, seconds))
        elif collective.kind == "transfer":
            ways.setdefault((0, True), []).append((collective, seconds))
    return [row for _, found in sorted(ways.items()) for row in collective_rows(found)]


def _transfers(rows: Sequence[CollectiveRow]) -> RenderableType:
    out = table("transfer", "size each", "count", "time on links", right=(1, 2, 3), wide=0)
    for row in rows[:_MAX_TRANSFERS]:
        add(
            out,
            re.sub(r"\b1 buffers", "1 buffer", row.where),
            units.nbytes(row.bytes),
            f"x {row.count}",
            units.seconds(row.seconds),
        )
    for name, some in ((f"{len(rows) - _MAX_TRANSFERS} more rows", rows[_MAX_TRANSFERS:]), ("total", rows)):
        if some:
            size = units.nbytes(sum(row.bytes * row.count for row in some))
            cells = size, f"x {sum(row.count for row in some)}", units.seconds(sum(row.seconds for row in some))
            add(out, name, *cells, style="bold" if name == "total" else "")
    return out


def _memory_of_one(plan: Plan) -> RenderableType:
    """A bar for each kind of memory of the only stage. Kinds need not peak together."""
    memory = plan.stages[0].memory
    out = table("", "", "", "", right=(1, 2))
    for kind, size in memory.kinds.items():
        text = Text(units.bar(size, plan.memory_per_device, BAR), style="blue")
        add(out, kind, units.nbytes(size), units.percent(size, plan.memory_per_device), text)
    text = Text(units.bar(memory.total, plan.memory_per_device, BAR), style="bold blue")
    share = units.percent(memory.total, plan.memory_per_device)
    add(out, f"peak, of {units.nbytes(plan.memory_per_device)}", units.nbytes(memory.total), share, text)
    return out


def replicated(plan: Plan) -> tuple[Replicated, ...]:
    """Operations that are not distributed, of all stages, the largest first, each with its stages if there are
    others."""
    found: dict[Replicated, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        for row in stage.replicated:
            found.setdefault(row, []).append(number)
    several = len(plan.stages) > 1
    rows = [
        replace(row, where=f"{named(stages)}: {row.where}" if several else row.where, seconds=row.seconds * len(stages))
        for row, stages in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def meshes(plan: Plan) -> str:
    """The meshes of all stages, equal ones joined: "stages 0-3: x=4; stage 4: x=2 y=2"; of one stage the mesh alone."""
    found: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        found.setdefault(units.mesh(stage.mesh_shape, stage.axis_names), []).append(number)
    if len(plan.stages) == 1:
        return next(iter(found))
    return "; ".join(f"{named(numbers)}: {mesh}" for mesh, numbers in found.items())


def layer_ranges(plan: Plan) -> str:
    """The layers of each stage, such as "0-3, 4-7"; "all" for one stage."""
    if len(plan.stages) == 1:
        return "all"
    counts = (plan.division.layers_of(stage) for stage in range(plan.num_stages))
    return ", ".join(str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in counts)
