"""Tasks of a search for stages: one number of micro-batches and one schedule each, as a graph of choices.

`evaluate` and `terms` are the formulas of `dp.slicing` for the seconds and bytes of a pipeline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpa_lite.ir.schedules import STRATEGIES, Strategy
from alpa_lite.passes.stages.dp.ranges import StageCosts
from alpa_lite.passes.stages.dp.shortest import Path, PathProblem
from alpa_lite.passes.stages.dp.slices import VIRTUAL, SliceOptions, StageChoice, StageSlices


@dataclass(frozen=True)
class Task:
    """One B, schedule and number of virtual stages; for virtual ones and for equal submeshes also S and their kind."""

    costs: StageCosts
    schedule: str
    virtual: int = 1
    meshes: int = 0
    kind: int = -1


def stage_range(costs: StageCosts, options: SliceOptions) -> tuple[int, int]:
    """Returns the least and the largest number of submeshes."""
    fixed = len(options.kinds) if options.kinds is not None else options.num_stages
    most = min(costs.num_layers, costs.total_devices // min(costs.devices))
    return (1, most) if fixed is None else (fixed, min(fixed, most))


def tasks_of(costs: StageCosts, options: SliceOptions, *, equal: bool = False) -> list[Task]:
    """Returns the tasks that can be searched for one B, the number of micro-batches.

    Args:
      equal: whether they are those of one stage on each of equal submeshes that take up all devices.
    """
    count, total, allowed = costs.num_microbatches, costs.total_devices, options.allowed
    lowest, highest = stage_range(costs, options)
    tasks = []
    for name in options.schedules:
        virtual = VIRTUAL if name == "interleaved-1f1b" else 1
        top = min(highest, count) if STRATEGIES[name].splits_backward else highest
        if virtual == 1 and not equal:
            tasks += [Task(costs, name)] if lowest <= top else []
            continue
        for kind, size in enumerate(costs.devices) if equal == (virtual == 1) else ():
            if allowed is not None and kind not in allowed:
                continue
            for s in range(max(virtual, lowest), min(top, total // size, costs.num_layers // virtual) + 1):
                fits = s * size == total or (allowed is None and not equal)
                wanted = options.kinds is None or options.kinds == (kind,) * s
                if fits and wanted and (virtual == 1 or count % s == 0):
                    tasks.append(Task(costs, name, virtual, s, kind))
    return tasks


def can_use_all(task: Task) -> bool:
    """Returns whether a task is one of pipelines that may use every device."""
    return not task.meshes or task.meshes * task.costs.devices[task.kind] == task.costs.total_devices


def least_area(costs: StageCosts, kind: int) -> float:
    """Device-seconds per micro-batch: every range at its cheapest; times B / D it is below any pipeline's seconds."""
    kinds = slice(None) if kind < 0 else slice(kind, kind + 1)
    seconds = (costs.forward[:, :, kinds] + costs.backward[:, :, kinds]).min(3)
    cost = (seconds * np.array(costs.devices, float)[kinds]).min(2)
    least = np.full(len(cost) + 1, np.inf)
    least[-1] = 0.0
    for i in range(len(cost) - 1, -1, -1):
        least[i] = (cost[i, i + 1 :] + least[i + 1 :]).min()
    return float(least[0])


def problem_of(task: Task, options: SliceOptions, fewer: bool) -> PathProblem:
    """Returns the graph of a task: a node for each cut and kind of the stage behind it."""
    c, strategy = task.costs, STRATEGIES[task.schedule]
    layers, kinds = c.num_layers, len(c.devices)
    allowed = [k for k in range(kinds) if task.kind in (-1, k) and c.devices[k] <= c.total_devices]
    allowed = [k for k in allowed if options.allowed is None or k in options.allowed]
    unit = math.gcd(c.total_devices, *(c.devices[k] for k in allowed))
    i, j, k, after = _choices(layers, allowed)
    tail = i * kinds + k
    head = np.where(j == layers, layers * kinds, j * kinds + after)
    order = np.argsort(tail, kind="stable")
    i, j, k, after, tail, head = (x[order] for x in (i, j, k, after, tail, head))
    cut = [
        np.where(j == layers, 0.0, seconds[j, k, after])[:, None] for seconds in (c.boundary_seconds, c.slowest_seconds)
    ]
    row = (j * layers + i) * kinds + k  # as ranges lie in memory

    def of(values: np.ndarray) -> np.ndarray:
        """Of each choice: several times faster than an index of three arrays."""
        return values.swapaxes(0, 1).reshape(-1, values.shape[-1]).take(row, axis=0)

    latency, excess = terms(strategy, c, of, cut, task.virtual, k[:, None])
    buffers = np.where(i == 0, 0.0, c.boundary_bytes[i]) + np.where(j == layers, 0.0, c.boundary_bytes[j])
    count, chunks = c.num_microbatches, task.meshes * task.virtual
    least, most = stage_range(c, options)

    def in_flight(left: int, total: int) -> int:
        if task.virtual > 1:
            return strategy.in_flight(task.meshes, count, (chunks - left) % task.meshes, task.virtual)
        return strategy.in_flight(max(total, left) if strategy.splits_backward else left, count, 0)

    problem = PathProblem(
        tail=tail,
        head=head,
        size=np.asarray(c.devices)[k] // unit,
        kind=k,
        latency=latency,
        excess=excess,
        update=of(c.update),
        fixed=of(c.fixed_bytes) + buffers[:, None],
        each=of(c.flight_bytes(task.schedule)),
        num_nodes=layers * kinds + 1,
        sources=tuple(allowed),
        devices=c.total_devices // unit,
        allows_fewer=fewer,
        budget=options.budget,
        count=in_flight,
        stages=(least, min(most, count) if strategy.splits_backward else most),
        exact_count=not strategy.splits_backward,
        kinds=options.kinds,
    )
    if not task.meshes:
        return problem
    # submeshes of one kind: there are no devices to divide
    return replace(problem, size=np.zeros_like(k), devices=0, stages=(chunks, chunks), kinds=None)


def _choices(layers: int, allowed: Sequence[int]) -> np.ndarray:
    """The stages of a graph, int[4, n]: first layer, end, kind of submesh, and kind of the next stage's submesh.

    The last is the first one of `allowed` behind the last layer.
    """
    first, stop = (x.ravel() for x in np.meshgrid(np.arange(layers), np.arange(1, layers + 1), indexing="ij"))
    first, stop = first[stop > first], stop[stop > first]
    columns = []
    for k, after in itertools.product(allowed, repeat=2):
        keep = (stop < layers) | (after == allowed[0])
        columns.append(np.stack([first[keep], stop[keep], np.full(keep.sum(), k), np.full(keep.sum(), after)]))
    return np.concatenate(columns, axis=1)


def pipeline_of(task: Task, problem: PathProblem, path: Path) -> StageSlices:
    """Returns a path of a task's graph as a pipeline."""
    c = task.costs
    kinds = len(c.devices)
    meshes = task.meshes or len(path)
    stages = tuple(
        StageChoice(int(problem.tail[g]) // kinds, int(problem.head[g]) // kinds, int(problem.kind[g]), v, s % meshes)
        for s, (g, v) in enumerate(path)
    )
    devices = tuple(c.devices[stage.kind] for stage in stages[:meshes])
    first = place(devices, c.devices_per_node)
    slices = StageSlices(
        stages=stages,
        num_microbatches=c.num_microbatches,
        schedule=task.schedule,
        virtual=task.virtual,
        seconds=math.nan,
        devices=devices,
        first_devices=first,
        bytes=(),
    )
    seconds, memory = evaluate(c, slices)
    return replace(slices, seconds=seconds, bytes=memory)


def place(devices: Sequence[int], devices_per_node: int) -> tuple[int, ...]:
    """Returns the first device of each submesh, aligned: within a node to a multiple of its size, else to whole nodes.

    In the given order where that leaves no gap, else by falling size, equal ones in order. No gap is ever needed: sizes
    are multiples of a node, or divide it and each other; within one node that is all there is, they may be any.
    """
    unit = [min(n, devices_per_node) for n in devices]
    starts = [sum(devices[:s]) for s in range(len(devices))]
    if all(start % u == 0 for start, u in zip(starts, unit, strict=True)):
        return tuple(starts)
    offset, out = 0, [0] * len(devices)
    for s in sorted(range(len(devices)), key=lambda s: -devices[s]):
        out[s] = offset
        offset += devices[s]
    return tuple(out)


def evaluate(costs: StageCosts, slices: StageSlices) -> tuple[float, tuple[float, ...]]:
    """Returns seconds of a step, and bytes per device of each submesh, straight from the formulas of `dp.slicing`.

    `costs` must be those of `slices.num_microbatches`; seconds and bytes in `slices` are not read.
    """
    count, meshes, strategy = slices.num_microbatches, slices.num_meshes, STRATEGIES[slices.schedule]
    found = []
    fixed: list[list[float]] = [[] for _ in range(meshes)]
    each: list[list[float]] = [[] for _ in range(meshes)]
    for s, stage in enumerate(slices.stages):
        at = stage.first, stage.stop, stage.kind, stage.variant
        after = slices.stages[s + 1].kind if s + 1 < len(slices.stages) else None
        cut = (0.0, 0.0) if after is None else costs.cut_seconds(stage.stop, stage.kind, after)
        latency, excess = terms(strategy, costs, lambda values, at=at: values[at], cut, slices.virtual, stage.kind)
        found.append((float(latency), float(excess), float(costs.update[at])))
        fixed[stage.mesh].append(float(costs.fixed_bytes[at]) + costs.buffer_bytes(stage.first, stage.stop))
        each[stage.mesh].append(float(costs.flight_bytes(slices.schedule)[at]))
    counts = [strategy.in_flight(meshes, count, mesh, slices.virtual) for mesh in range(meshes)]
    total = sum(t[0] for t in found) + max(t[1] for t in found) + max(t[2] for t in found)
    return total, tuple(sum(f) + n * max(e) for f, e, n in zip(fixed, each, counts, strict=True))


def terms(
    strategy: Strategy, costs: StageCosts, of: Callable[[np.ndarray], np.ndarray], cut: Any, virtual: int, kind: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Latency and excess of some stages with `cut` behind them: as of `cut_seconds`.

    Args:
      of: what a cost array holds of the stages.
      kind: their kinds of submesh, one or an array that broadcasts with theirs.
    """
    forward, backward, (mean, slowest) = of(costs.forward), of(costs.backward), map(np.asarray, cut)
    possible = np.isfinite(forward + backward + 2 * mean)
    others, own, started = costs.num_microbatches * virtual - 1, 0.0, 0.0
    if costs.hosts is not None:  # seconds of starting one micro-batch's tasks: of one stage, and of its process
        runs = costs.hosts.period(3 if strategy.splits_backward else 2)
        own, started = (runs / np.array(costs.hosts.stages))[kind], runs[kind]
    with np.errstate(invalid="ignore"):  # 0 * inf and inf - inf where there is no such stage
        latency = np.maximum(strategy.latency(forward, backward, mean), own) / virtual
        period = strategy.period(forward, backward, mean, slowest)
        excess = np.maximum(others * period, others * started + min(others, 1) * period)
        excess = excess + strategy.bubble_filled(forward, backward)
    return np.where(possible, latency, np.inf), np.where(possible, excess, np.inf)
