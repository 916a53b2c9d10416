"""Groups of identical stages, and the seconds and the memory of a plan.

Seconds are means over devices. With n_m devices on submesh m, N in all, and stages s,

    compute = sum_s n_m(s) compute_s / N,    idle = step - compute - communication within stages,

so that the rows add up to the step. Transfers between submeshes overlap with computation; where they do not, devices
are idle.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from alpa_lite.ir import units
from alpa_lite.plan.decisions import Replicated
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.plan.records import Stage
from alpa_lite.report import grouping

KINDS = ("params", "frozen", "gathered", "gradients", "optimizer")
"""The kinds of memory that last from task to task."""

_SAMPLES = 64  # of the memory over a step
_NUMBER = re.compile(r"\d+")

T = TypeVar("T", bound=Hashable)


def numbers_by_value(values: Iterable[T]) -> dict[T, list[int]]:
    """Returns the places of equal values, in order of first appearance."""
    found = grouping.group_by_key(enumerate(values), lambda item: item[1])
    return {value: [number for number, _ in same] for value, same in found.items()}


def group_identical_stages(plan: Plan) -> list[tuple[int, ...]]:
    """Groups of identical stages: same mesh, layer count and rematerialisation, arguments equal but for numbers."""

    def key(number: int, stage: Stage) -> Hashable:
        leaves = Counter((_NUMBER.sub("#", x.path), x.shape, x.dtype, x.role, x.spec) for x in stage.arguments)
        size = plan.division.layers_of(number)[1]
        return stage.mesh_shape, stage.axis_names, plan.division.remat[number], size, frozenset(leaves.items())

    return [tuple(same) for same in numbers_by_value(key(*site) for site in enumerate(plan.stages)).values()]


def name_stages(group: Sequence[int]) -> str:
    """Stage numbers as text, such as "stages 1-6"."""
    return f"stage{'s' * (len(group) != 1)} {units.runs(group, '-')}"


def sizes(plan: Plan) -> list[int]:
    """Returns the number of devices of each submesh."""
    on = dict(zip(plan.division.submeshes, plan.stages, strict=True))
    return [on[mesh].num_devices for mesh in range(len(plan.division.first_devices))]


def shares(plan: Plan) -> list[float]:
    """Returns the weight of each stage in a mean over devices."""
    devices = sizes(plan)
    return [devices[mesh] / sum(devices) for mesh in plan.division.submeshes]


@dataclass(frozen=True)
class SpentSeconds:
    """Seconds of a step by their use: means over devices.

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
    def waiting_seconds(self) -> float:
        """In collectives that computing waits for."""
        return sum(self.communication.values()) - self.hidden


def seconds_by_use(plan: Plan) -> SpentSeconds:
    """Returns the seconds of a plan by their use.

    Transfers between submeshes overlap with compute, or are waited for.
    """
    share = shares(plan)
    compute, hidden, hideable = (
        sum(part * getattr(stage, name) for part, stage in zip(share, plan.stages, strict=True))
        for name in ("compute_seconds", "hidden_seconds", "hideable_seconds")
    )
    by_axes: dict[tuple[str, ...], float] = defaultdict(float)
    for collective, seconds in plan.priced_collectives:
        if collective.kind != "transfer":
            by_axes[collective.axes] += share[collective.stage] * seconds
    rest = plan.step_seconds - compute - sum(by_axes.values()) + hidden
    idle = rest if rest > 1e-9 * plan.step_seconds else 0.0  # less is rounding
    return SpentSeconds(compute, dict(sorted(by_axes.items(), key=lambda item: -item[1])), idle, hidden, hideable)


def overlapped_share(plan: Plan) -> str:
    """The part of the communication that is overlapped with computing, if the plan counts on that; else empty."""
    if not plan.cluster.overlap:
        return ""
    if not plan.cluster.has_overlap:
        return f"overlapped: nothing, since the compiler for {plan.cluster.platform} runs collectives to their end"
    where, sums = seconds_by_use(plan), "gradient synchronisation and " * ("all_reduce" in plan.cluster.hidden_kinds)
    return f"overlapped: {units.seconds(where.hidden)} of {units.seconds(where.hideable)} of {sums}parameter gathers"


@dataclass(frozen=True)
class Usage:
    """Memory of each device of a submesh.

    Attributes:
      kinds: (kind, bytes) in the order of reports: of several stages the sums, and "in flight" for all other buffers
        between tasks, such as values saved for backward passes, transfers, and the batch.
      peak: the most that all kinds need together.
    """

    kinds: tuple[tuple[str, int], ...]
    peak: int


def memory(plan: Plan) -> list[Usage]:
    """Returns the memory of each submesh; of one stage, as the plan has it."""
    division = plan.division
    if len(plan.stages) == 1:
        return [Usage(tuple(plan.stages[0].memory.kinds.items()), plan.stages[0].memory.total)]
    out = []
    for mesh, (buffers, temporary) in enumerate(zip(division.buffer_bytes, division.temporary_bytes, strict=True)):
        stages = [stage.memory for stage, m in zip(plan.stages, division.submeshes, strict=True) if m == mesh]
        kept = {kind: sum(getattr(m, kind) for m in stages) for kind in KINDS}
        shown = {kind: size for kind, size in kept.items() if size or kind not in ("frozen", "gathered")}
        flying = max(0, buffers - sum(kept.values()))
        kinds = shown | {"in flight": flying, "temporaries": temporary}
        out.append(Usage(tuple(kinds.items()), buffers + temporary))
    return out


Amounts = Mapping[str, Sequence[float]]
"""Kind of memory -> bytes of a device at equal distances in the step."""


def memory_over_step(plan: Plan) -> list[Amounts]:
    """Returns the memory of each submesh from the beginning of the step to its end; empty where it is not known.

    One mesh has it by operations (`records.Memory.over_step`). In a pipeline the buffers in flight are those of
    micro-batches whose first task has begun and whose last one has not ended, an equal part each.
    """
    if len(plan.stages) == 1:
        return [plan.stages[0].memory.over_step or {}]
    timeline, out = plan.division.timeline, []
    times = [(n + 0.5) * timeline.seconds / _SAMPLES for n in range(_SAMPLES)]
    for mesh, use in enumerate(memory(plan)):
        spans: dict[tuple[int, int], tuple[float, float]] = {}
        for event in timeline.events:
            if event.mesh == mesh and event.microbatch >= 0 and event.kind != "transfer":
                start, end = spans.get((event.stage, event.microbatch), (event.start, event.end))
                spans[event.stage, event.microbatch] = min(start, event.start), max(end, event.end)
        counts = [sum(start <= time < end for start, end in spans.values()) for time in times]
        parts = {"in flight": [count / max(1, *counts) for count in counts]}
        out.append({kind: [size * part for part in parts.get(kind, [1.0] * _SAMPLES)] for kind, size in use.kinds})
    return out


def peak(plan: Plan) -> int:
    """Returns bytes per device of the fullest submesh."""
    return max(use.peak for use in memory(plan))


def replicated_operations(plan: Plan) -> list[Replicated]:
    """Returns operations that are not distributed, of all stages, the largest first, each with its stages if there are
    others."""
    sites = ((number, row) for number, stage in enumerate(plan.stages) for row in stage.replicated)
    rows = []
    for row, same in grouping.group_by_key(sites, lambda site: site[1]).items():
        where = f"{name_stages([number for number, _ in same])}: {row.where}" if len(plan.stages) > 1 else row.where
        rows.append(replace(row, where=where, seconds=row.seconds * len(same)))
    return sorted(rows, key=lambda row: -row.seconds)


def join_equal_stages(texts: Sequence[str]) -> str:
    """Returns a text for each stage as one: equal ones joined, and named if there are several."""
    found = numbers_by_value(texts)
    return "; ".join(f"{name_stages(numbers)}: {text}" if len(texts) > 1 else text for text, numbers in found.items())


def meshes(plan: Plan) -> str:
    """Returns the meshes of all stages: "stages 0-3: x=4; stage 4: x=2 y=2"; of one stage the mesh alone."""
    return join_equal_stages([units.mesh(stage.mesh_shape, stage.axis_names) for stage in plan.stages])


def layer_ranges(plan: Plan) -> str:
    """Returns the layers of each stage, such as "0-3, 4-7"; "all" for one stage."""
    if len(plan.stages) == 1:
        return "all"
    counts = (plan.division.layers_of(stage) for stage in range(plan.num_stages))
    return ", ".join(str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in counts)
