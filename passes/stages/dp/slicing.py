"""Which layers run on which devices: the stages of a pipeline, its micro-batches and its schedule, chosen together.

Problem. Cut layers 0..L into consecutive ranges [i, j). Give each a kind of submesh k (n_k devices) and a variant v: a
point of the trade of seconds against bytes (logical mesh shape, sharding of state, rematerialisation). Choose the
number of micro-batches B among those given, and the schedule, so as to minimise the seconds of a step within a budget
of bytes per device.

Time. Stage s takes f_s forward and b_s backward for one micro-batch, half of that for gradients of parameters; c_s is
one transfer over the cut behind it (0 behind the last); u_s is spent once a step. With t = f + b,

    T = sum_s l_s + max_s e_s + max_s u_s,                 l: latency, e: excess of the slowest stage

    1f1b                l = t + 2c             e = (B - 1)(t + 2c)
    gpipe, eager-1f1b   l = t + 2c             e = (B - 1) max(t, 2c')
    zb-h1               l = t - 2w' + 2c       e = (B - 1)(t + 2c) + 2w'     w' = min(b / 2, f); S <= B
    interleaved-1f1b    l = (t + 2c) / v       e = (Bv - 1)(t + 2c)          of each of the vS stages; S divides B

A micro-batch passes all stages once (the sum of l), and the slowest stage runs all others (e). At uniform times and
free transfers each is exact: B t plus the published bubble, (S-1) t, or (S-1)(t - 2w) for zb-h1, or (S-1) t for the
stages of interleaved-1f1b, v times shorter than a submesh's. Where transfers take time: in 1F1B a stage with r stages
left holds r micro-batches, so its period is the sum of t + 2c over those stages divided by r, at most max(t + 2c). With
2r - 1 in flight it is at most max(t, 2c): transfers hide (Zhuang et al., arXiv:2211.05322). GPipe's phases are flow
shops, whose excess is (B - 1)(max_s f + max_s b), which equals the above where one stage is slowest in both. Where
several stages share a node, some cuts are within it and others cross the network: c is their mean, as a period of 1F1B
has of them, and c' the slowest of them, behind which the others hide.

A process starts the tasks of its devices one after the other: with m stages, p runs of each for a micro-batch (2; 3 in
zb-h1) and q transfers that it takes part in, for h = (m p + q) d seconds per micro-batch, d each. Then no l is shorter
than h / m, and no e than (B - 1) h and what the stage takes for the last micro-batch once that is started. The formulas
take m and q of stages of that kind on all devices: others have fewer.

Memory. fixed + inflight * (micro-batches in flight, `Strategy.in_flight`) + buffers of both cuts <= budget. A
submesh with v stages holds the sum of their fixed bytes and buffers, and, of as many micro-batches as its formula says,
what its largest stage saves. Where gradients of parameters are computed apart (zb-h1), a micro-batch is in flight until
they are, with the activations and cotangents that they read: what was computed again is held for them, too.

Devices. Submeshes are powers of two that divide a node, or whole nodes; then any choice with sum n_k <= D can be placed
with each submesh aligned: laid out by falling size every offset is a multiple of the next size (Alpa, theorem 1).

Exact, up to `LARGE` devices (beyond, submeshes have half to twice the devices of the best equal ones): all schedules
but interleaved-1f1b, which is searched with all submeshes of one kind, and there as if each stage
were alone in its memory. If that choice does not fit together, shares of the budget are tried: the result fits,
and `bound` says what may have been missed.

Source: the inter-operator pass of Alpa (Zheng et al., OSDI 2022, section 5), with what it leaves out: transfers,
updates, memory in bytes, variants, B and the schedule. The search is in `stages.paths`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from alpa_lite.ir import units
from alpa_lite.passes.stages.dp.paths import Minimum, least_bytes, least_bytes_together, minimise
from alpa_lite.passes.stages.dp.ranges import StageCosts
from alpa_lite.passes.stages.dp.shortest import Path, PathProblem
from alpa_lite.passes.stages.dp.slices import (
    VIRTUAL,
    Infeasibility,
    SliceOptions,
    StageSlices,
    StageSlicing,
    WeighedSchedule,
)
from alpa_lite.passes.stages.dp.tasks import (
    Task,
    can_use_all,
    least_area,
    pipeline_of,
    problem_of,
    stage_range,
    tasks_of,
)

_SCALES = (1.0, 0.97, 0.93, 0.87, 0.8)  # of the budget, for stages that share a submesh with equal ones
_SHARES = (0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875)  # of the budget, for what is saved in flight


LARGE = 128
"""Devices above which submeshes that differ much from the best equal ones are not searched."""


def slice_stages(costs: Sequence[StageCosts], options: SliceOptions) -> StageSlicing:
    """Returns the fastest pipeline.

    Args:
      costs: one for each number of micro-batches to try; layers, kinds, variants and devices are equal.
    """
    equal = [task for c in costs for task in tasks_of(c, options, equal=True)]
    if options.has_equal_submeshes:
        equal += [task for c in costs for task in tasks_of(c, options) if task.virtual > 1 and can_use_all(task)]
    first, bound, weighed = _fastest(equal, options, fewer=False) if equal else (None, math.inf, ())
    if options.has_equal_submeshes and equal:
        infeasible = explain_infeasible(costs, equal, options, fewer=True) if first is None else None
        return StageSlicing(first, None, bound, infeasible, weighed)
    if first is not None and options.allowed is None and costs[0].total_devices > LARGE:
        options = replace(options, allowed=_near(costs[0], first.devices[0]))
    tasks = [task for c in costs for task in tasks_of(c, options)]
    fastest, bound, weighed = _fastest(tasks, options, fewer=True, known=first)
    chosen, weighed_exact = fastest, weighed
    if fastest is not None and fastest.devices_used != costs[0].total_devices:
        chosen, _, weighed_exact = _fastest(tasks, options, fewer=False, known=first)
    fewer = fastest if fastest and (chosen is None or fastest.seconds < chosen.seconds * (1 - 1e-9)) else None
    weighed = weighed if fewer else weighed_exact
    infeasible = explain_infeasible(costs, tasks, options, fewer=fastest is None) if chosen is None else None
    return StageSlicing(chosen, fewer, bound, infeasible, weighed)


def _near(costs: StageCosts, size: int) -> tuple[int, ...]:
    """Returns the kinds of submesh of half to twice as many devices as the best equal ones have."""
    return tuple(kind for kind, other in enumerate(costs.devices) if size <= 2 * other <= 4 * size)


def _fastest(
    tasks: Sequence[Task], options: SliceOptions, *, fewer: bool, known: StageSlices | None = None
) -> tuple[StageSlices | None, float, tuple[WeighedSchedule, ...]]:
    """Returns the best of all tasks, in order of their simplest bounds, or else `known`; its bound; each's result."""
    best = known
    bound = math.inf
    limit = math.inf if known is None else known.seconds
    weighed: list[WeighedSchedule] = []
    area = functools.cache(least_area)
    order = [(area(t.costs, t.kind) * t.costs.num_microbatches / t.costs.total_devices, t) for t in tasks]
    for simple, task in sorted(order, key=lambda pair: pair[0]):
        if not fewer and not can_use_all(task):
            continue
        slower = simple >= limit * (1 - max(options.gap, 1e-12))
        if slower:
            found, problem = Minimum(math.inf, None, simple), None
        else:
            found, problem = _minimise(task, options, fewer, limit)
        bound = min(bound, found.bound)
        weighed += _weighed(task, problem, found)
        if problem is not None and found.path is not None:
            limit, best = found.seconds, pipeline_of(task, problem, found.path)
    if known is not None and best is known:
        row = known.num_microbatches, known.schedule, known.virtual, known.num_meshes
        weighed.append(WeighedSchedule(*row, known.seconds, max(known.bytes), min(bound, limit), "met"))
    return best, min(bound, limit), _ranked(weighed, best)


def _minimise(task: Task, options: SliceOptions, fewer: bool, cutoff: float) -> tuple[Minimum, PathProblem]:
    """Returns the best of a task, and its graph.

    With virtual stages: as if each were alone in its memory. If those do not fit together, three ways to a choice that
    does: each as if the others of its submesh were like it; each with its own share of the budget for what it keeps and
    for what it saves; the one that takes the least memory of all.
    """
    problem = problem_of(task, options, fewer)
    found = minimise(problem, cutoff, options.gap)
    if task.virtual == 1 or found.path is None or _holds(task, problem, found.path, options):
        return found, problem
    if least_bytes_together(problem, task.meshes, task.virtual) > options.budget:
        return Minimum(math.inf, None, math.inf), problem
    best = Minimum(math.inf, None, found.bound)
    for part in _alone(problem, task.virtual):
        other = minimise(part, min(cutoff, best.seconds), options.gap)
        if other.path is not None and _holds(task, problem, other.path, options):
            rows = {len(other.path): (other.seconds, other.path)}
            best = Minimum(other.seconds, other.path, found.bound, rows)
    least = least_bytes(problem)[1]
    if best.path is None and least is not None and _holds(task, problem, least, options):
        seconds = _seconds(problem, least)
        best = Minimum(seconds, least, found.bound, {len(least): (seconds, least)}) if seconds < cutoff else best
    return best, problem


def _alone(problem: PathProblem, virtual: int) -> Iterator[PathProblem]:
    """Problems in which each of `virtual` stages of a submesh has its own part of the budget."""
    for scale in _SCALES:
        yield replace(problem, fixed=problem.fixed * virtual, budget=problem.budget * scale)
    for share in _SHARES:
        latency = np.where(problem.fixed <= (1 - share) * problem.budget / virtual, problem.latency, np.inf)
        nothing = np.zeros_like(problem.fixed)
        yield replace(problem, latency=latency, fixed=nothing, budget=share * problem.budget)


def _seconds(problem: PathProblem, path: Path) -> float:
    total = sum(float(problem.latency[c]) for c in path)
    return total + max(float(problem.excess[c]) for c in path) + max(float(problem.update[c]) for c in path)


def _holds(task: Task, problem: PathProblem, path: Path, options: SliceOptions) -> bool:
    return max(pipeline_of(task, problem, path).bytes) <= options.budget


def _weighed(task: Task, problem: PathProblem | None, found: Minimum) -> list[WeighedSchedule]:
    """Returns the results of the search of one task, by number of stages."""
    key = task.costs.num_microbatches, task.schedule, task.virtual
    if problem is None or not found.by_stages:
        reason = "infeasible" if math.isinf(found.bound) else "cutoff"
        status = reason if found.is_finished else "not searched"
        return [WeighedSchedule(*key, task.meshes or None, None, None, found.bound, status)]
    rows = []
    for _, path in found.by_stages.values():
        slices = pipeline_of(task, problem, path)
        status = "optimal" if path == found.path and found.is_finished else "met"
        rows.append(WeighedSchedule(*key, slices.num_meshes, slices.seconds, max(slices.bytes), found.bound, status))
    return rows


def _ranked(weighed: list[WeighedSchedule], best: StageSlices | None) -> tuple[WeighedSchedule, ...]:
    """Fastest first, the chosen one marked."""
    rows = sorted(weighed, key=lambda w: (w.bound if w.seconds is None else w.seconds, w.schedule, w.num_microbatches))
    if best is None:
        return tuple(rows)
    key = best.num_microbatches, best.schedule, best.virtual, best.num_meshes, best.seconds
    return tuple(
        replace(w, status="chosen")
        if (w.num_microbatches, w.schedule, w.virtual, w.num_stages, w.seconds) == key
        else w
        for w in rows
    )


def explain_infeasible(
    costs: Sequence[StageCosts], tasks: Sequence[Task], options: SliceOptions, *, fewer: bool
) -> Infeasibility:
    """Returns the constraint that leaves no pipeline on all devices; with `fewer`, none on fewer either."""
    if not tasks:
        return Infeasibility("schedule", _no_schedule(costs, options), None)
    found = _least_bytes(tasks, options, fewer=False)
    if found is None and fewer:
        found = _least_bytes(tasks, options, fewer=True)
    if found is None:
        sizes = ", ".join(map(str, costs[0].devices))
        given = "" if options.num_stages is None else f" with num_stages={options.num_stages}"
        message = f"no stages on submeshes of {sizes} devices use all {costs[0].total_devices} devices{given}"
        return Infeasibility("devices", message, None)
    need, task = found
    message = (
        f"memory_per_device={units.exact_bytes(options.budget)} is {units.exact_bytes(need - options.budget)} short of "
        f"the smallest that works, {units.exact_bytes(need)}, with "
        f"{units.count_of(task.costs.num_microbatches, 'micro-batch')} and {task.schedule}."
    )
    return Infeasibility("memory", message, need)


def _least_bytes(tasks: Sequence[Task], options: SliceOptions, *, fewer: bool) -> tuple[float, Task] | None:
    """Returns the least bytes per device that any task could do with, and which; with `fewer`, on fewer devices too.

    Smaller micro-batches mostly need the least: what comes after them only has to be less.
    """
    free = replace(options, budget=math.inf)
    best: tuple[float, Task] | None = None
    names = {task.schedule for task in tasks}
    for task in sorted(tasks, key=lambda task: -task.costs.num_microbatches):
        if not fewer and not can_use_all(task):
            continue
        if "1f1b" in names and task.schedule not in ("1f1b", "interleaved-1f1b"):
            continue  # holds no fewer micro-batches than 1f1b
        problem = problem_of(task, free, fewer)
        need, path = least_bytes(problem, math.inf if best is None else best[0])
        if path is None:
            continue
        need = max(pipeline_of(task, problem, path).bytes) if task.virtual > 1 else need
        if best is None or need < best[0]:
            best = need, task
    return best


def _no_schedule(costs: Sequence[StageCosts], options: SliceOptions) -> str:
    """Returns the reason why nothing can be searched, and a remedy."""
    layers, least = costs[0].num_layers, stage_range(costs[0], options)[0]
    counts = " or ".join(units.count_of(c.num_microbatches, "micro-batch") for c in costs)
    room = costs[0].total_devices // min(costs[0].devices)
    if least > layers:
        return f"the step has {layers} layers, too few for num_stages={least}; give {layers} at most"
    if least > room:
        return f"the submeshes have room for {room} stages, not for num_stages={least}; give {room} at most"
    reasons = []
    if "zb-h1" in options.schedules:
        reasons.append(f"schedule='zb-h1' takes at least as many micro-batches as submeshes; give {least} or more")
    if "interleaved-1f1b" in options.schedules:
        needs = f"schedule='interleaved-1f1b' puts {VIRTUAL} stages on each of 2 or more equal submeshes"
        if layers < VIRTUAL * max(2, least):
            reasons.append(f"{needs}, for which {layers} layers are too few")
        else:
            reasons.append(f"{needs}, and takes a multiple of their number of micro-batches")
    return f"{'; '.join(reasons)}. This is {counts} with {layers} layers"
