"""What a plan's stages have in common, where their seconds go, and what memory they need.

Where the time goes is a mean over devices. With n_m devices on submesh m, N in all, and stages s,

    compute = sum_s n_m(s) compute_s / N,    idle = step - compute - communication within stages,

so that the rows add up to the step. Transfers between submeshes overlap with computation; where they do not, devices
are idle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from alpa_lite.records import PlanRecord as Plan
from alpa_lite.records import Replicated
from alpa_lite.report import units

KINDS = ("params", "frozen", "gathered", "gradients", "optimizer")
"""The kinds of memory that last from task to task."""

_NUMBER = re.compile(r"\d+")

T = TypeVar("T", bound=Hashable)


def numbers_by_value(values: Iterable[T]) -> dict[T, list[int]]:
    """The places of equal values, in order of first appearance."""
    found: dict[T, list[int]] = {}
    for number, value in enumerate(values):
        found.setdefault(value, []).append(number)
    return found


def identical(plan: Plan) -> list[tuple[int, ...]]:
    """Groups of identical stages: same mesh, layer count and rematerialisation, arguments equal but for numbers."""
    division = plan.division
    keys = []
    for number, stage in enumerate(plan.stages):
        leaves = Counter((_NUMBER.sub("#", x.path), x.shape, x.dtype, x.role, x.spec) for x in stage.arguments)
        rest = division.remat[number], division.layers_of(number)[1]
        keys.append((stage.mesh_shape, stage.axis_names, rest, frozenset(leaves.items())))
    return [tuple(numbers) for numbers in numbers_by_value(keys).values()]


def named(group: Sequence[int], noun: str = "stage") -> str:
    """Stage numbers as text, such as "stages 1-6"."""
    plural = "" if len(group) == 1 else "es" if noun.endswith("sh") else "s"
    return f"{noun}{plural} {units.runs(group, '-')}"


def sizes(plan: Plan) -> list[int]:
    """The number of devices of each submesh."""
    out = [1] * len(plan.division.first_devices)
    for stage, mesh in zip(plan.stages, plan.division.submeshes, strict=True):
        out[mesh] = stage.num_devices
    return out


def shares(plan: Plan) -> list[float]:
    """The weight of each stage in a mean over devices."""
    devices = sizes(plan)
    return [devices[mesh] / sum(devices) for mesh in plan.division.submeshes]


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
    share = shares(plan)
    compute, hidden, hideable = (
        sum(part * getattr(stage, name) for part, stage in zip(share, plan.stages, strict=True))
        for name in ("compute_seconds", "hidden_seconds", "hideable_seconds")
    )
    by_axes: dict[tuple[str, ...], float] = {}
    for collective, seconds in zip(plan.collectives, plan.collective_seconds, strict=True):
        if collective.kind != "transfer":
            by_axes[collective.axes] = by_axes.get(collective.axes, 0.0) + share[collective.stage] * seconds
    idle = max(0.0, plan.step_seconds - compute - sum(by_axes.values()) + hidden)
    return Spent(compute, dict(sorted(by_axes.items(), key=lambda item: -item[1])), idle, hidden, hideable)


def overlapped(plan: Plan) -> str:
    """How much of the communication hides behind computing, where the plan counts on that; else nothing."""
    if not plan.cluster.overlap:
        return ""
    if not plan.cluster.overlaps:
        return f"overlapped: nothing, since the compiler for {plan.cluster.platform} runs collectives to their end"
    where = spent(plan)
    hides = "gradient synchronisation and parameter gathers"
    if "all_reduce" not in plan.cluster.hides:
        hides = "parameter gathers"
    return f"overlapped: {units.seconds(where.hidden)} of {units.seconds(where.hideable)} of {hides}"


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
        return {k: getattr(self, k) for k in KINDS if getattr(self, k) or k not in ("frozen", "gathered")} | named


def memory(plan: Plan) -> list[SubmeshMemory]:
    """The memory of each submesh."""
    division = plan.division
    out = []
    for mesh, (buffers, temporary) in enumerate(zip(division.buffer_bytes, division.temporary_bytes, strict=True)):
        stages = [stage.memory for stage, m in zip(plan.stages, division.submeshes, strict=True) if m == mesh]
        kept = {kind: sum(getattr(m, kind) for m in stages) for kind in KINDS}
        flying = max(0, buffers - sum(kept.values()))
        out.append(SubmeshMemory(**kept, in_flight=flying, temporaries=temporary, peak=buffers + temporary))
    return out


def usage(plan: Plan) -> list[tuple[Mapping[str, int], int]]:
    """The bytes of each kind, and the peak, on each submesh; those of the stage where there is one."""
    if len(plan.stages) == 1:
        return [(plan.stages[0].memory.kinds, plan.stages[0].memory.total)]
    return [(row.kinds, row.peak) for row in memory(plan)]


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


def by_stages(texts: Sequence[str]) -> str:
    """A text for each stage as one: equal ones joined, and named if there are several."""
    found = numbers_by_value(texts)
    return "; ".join(f"{named(numbers)}: {text}" if len(texts) > 1 else text for text, numbers in found.items())


def meshes(plan: Plan) -> str:
    """The meshes of all stages: "stages 0-3: x=4; stage 4: x=2 y=2"; of one stage the mesh alone."""
    return by_stages([units.mesh(stage.mesh_shape, stage.axis_names) for stage in plan.stages])


def layer_ranges(plan: Plan) -> str:
    """The layers of each stage, such as "0-3, 4-7"; "all" for one stage."""
    if len(plan.stages) == 1:
        return "all"
    counts = (plan.division.layers_of(stage) for stage in range(plan.num_stages))
    return ", ".join(str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in counts)
