"""Why there is no pipeline: the constraint that leaves none, and what to change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from alpa_lite.passes.stages.paths import least_bytes
from alpa_lite.passes.stages.ranges import StageCosts
from alpa_lite.passes.stages.slices import VIRTUAL, Infeasible, SliceOptions
from alpa_lite.passes.stages.tasks import Task, can_use_all, in_one_graph, pipeline_of, problem_of, stage_range
from alpa_lite.report import units


def why_not(costs: Sequence[StageCosts], tasks: Sequence[Task], options: SliceOptions, *, fewer: bool) -> Infeasible:
    """The constraint that leaves no pipeline on all devices; with `fewer`, none on fewer either."""
    if not tasks:
        return Infeasible("schedule", _no_schedule(costs, options), None)
    found = _least_bytes(tasks, options, fewer=False)
    if found is None and fewer:
        found = _least_bytes(tasks, options, fewer=True)
    if found is None:
        sizes = ", ".join(map(str, costs[0].devices))
        given = "" if options.num_stages is None else f" with num_stages={options.num_stages}"
        message = f"no stages on submeshes of {sizes} devices use all {costs[0].total_devices} devices{given}"
        return Infeasible("devices", message, None)
    need, task = found
    message = (
        f"memory_per_device={units.exact_bytes(options.budget)} is {units.exact_bytes(need - options.budget)} short of "
        f"the smallest that works, {units.exact_bytes(need)}, with "
        f"{microbatches(task.costs.num_microbatches)} and {task.schedule}."
    )
    return Infeasible("memory", message, need)


def _least_bytes(tasks: Sequence[Task], options: SliceOptions, *, fewer: bool) -> tuple[float, Task] | None:
    """The least bytes per device that any task could do with, and which; with `fewer`, on fewer devices too.

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
        problem = problem_of(in_one_graph(task), free, fewer)
        need, path = least_bytes(problem, math.inf if best is None else best[0])
        if path is None:
            continue
        need = max(pipeline_of(in_one_graph(task), problem, path).bytes) if task.virtual > 1 else need
        if best is None or need < best[0]:
            best = need, task
    return best


def _no_schedule(costs: Sequence[StageCosts], options: SliceOptions) -> str:
    """Returns the reason why nothing can be searched, and a remedy."""
    layers, least = costs[0].num_layers, stage_range(costs[0], options)[0]
    counts = [c.num_microbatches for c in costs]
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
    return f"{'; '.join(reasons)}. This is {' or '.join(map(microbatches, counts))} with {layers} layers"


def microbatches(count: int) -> str:
    """A number of micro-batches in words."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"
