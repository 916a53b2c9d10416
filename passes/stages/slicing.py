"""Which layers run on which devices: the stages of a pipeline, its micro-batches and its schedule, chosen together.

Problem. Cut layers 0..L into consecutive ranges [i, j). Give each a kind of submesh k (n_k devices) and a variant v: a
point of the trade of seconds against bytes (logical mesh shape, sharding of state, rematerialisation). Choose the
number of micro-batches B among those given, and the schedule, so as to minimise the seconds of a step within a budget
of bytes per device.

Time. Stage s takes f_s forward and b_s backward for one micro-batch, w_s of b_s for gradients of parameters; c_s is one
transfer over the cut behind it (0 behind the last); u_s is spent once a step. With t = f + b,

    T = sum_s l_s + max_s e_s + max_s u_s,                 l: latency, e: excess of the slowest stage

    1f1b                l = t + 2c             e = (B - 1)(t + 2c)
    gpipe, eager-1f1b   l = t + 2c             e = (B - 1) max(t, 2c)
    zb-h1               l = t - 2w' + 2c       e = (B - 1)(t + 2c) + 2w'     w' = min(w, f, b - w); S <= B
    interleaved-1f1b    l = (t + 2c) / v       e = (Bv - 1)(t + 2c)          of each of the vS stages; S divides B

A micro-batch passes all stages once (the sum of l), and the slowest stage runs all others (e). At uniform times and
free transfers each is exact: B t plus the published bubble, (S-1) t, or (S-1)(t - 2w) for zb-h1, or (S-1) t for the
stages of interleaved-1f1b, v times shorter than a submesh's. Where transfers take time: in 1F1B a stage with r stages
left holds r micro-batches, so its period is the sum of t + 2c over those stages divided by r, at most max(t + 2c). With
2r - 1 in flight it is at most max(t, 2c): transfers hide (Zhuang et al., arXiv:2211.05322). GPipe's phases are flow
shops, whose excess is (B - 1)(max_s f + max_s b), which equals the above where one stage is slowest in both.

Memory. fixed + inflight * (micro-batches in flight, `schedules.in_flight_formula`) + buffers of both cuts <= budget. A
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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpa_lite.errors import OptionError
from alpa_lite.passes.stages.paths import Minimum, Path, PathProblem, least_bytes, minimise
from alpa_lite.passes.stages.ranges import StageCosts
from alpa_lite.passes.stages.slices import Infeasible, SliceOptions, StageChoice, StageSlices, StageSlicing, Weighed
from alpa_lite.report import units
from alpa_lite.schedules import NAMES, in_flight_formula

_SCALES = (1.0, 0.97, 0.93, 0.87, 0.8)  # of the budget, for stages that share a submesh with equal ones
_SHARES = (0.5, 0.25, 0.75, 0.125, 0.375, 0.625, 0.875)  # of the budget, for what is saved in flight


LARGE = 128
"""Devices above which submeshes that differ much from the best equal ones are not searched."""


def slice_stages(costs: Sequence[StageCosts], options: SliceOptions) -> StageSlicing:
    """The fastest pipeline.

    Args:
      costs: one for each number of micro-batches to try; layers, kinds, variants and devices are equal.
      options: the budget, and what is fixed.

    Raises:
      OptionError: an option names what is not there, or `costs` is empty.
    """
    _validate(costs, options)
    equal = [task for c in costs for task in _equal_tasks(c, options)]
    first, weighed = _fastest(equal, options, fewer=False) if equal else (_Best(None, math.inf), ())
    if options.equal and equal:
        infeasible = _why_not(costs, equal, options, fewer=True) if first.slices is None else None
        return StageSlicing(first.slices, None, first.bound, infeasible, weighed)
    if first.slices is not None and options.allowed is None and costs[0].total_devices > LARGE:
        options = replace(options, allowed=_near(costs[0], first.slices.devices[0]))
    tasks = [task for c in costs for task in _tasks(c, options)]
    anywhere, weighed = _fastest(tasks, options, fewer=True, known=first.slices)
    exact, fastest, weighed_exact = anywhere, anywhere.slices, weighed
    if fastest is None or fastest.devices_used != costs[0].total_devices:
        exact, weighed_exact = _fastest(tasks, options, fewer=False, known=first.slices)
    chosen = exact.slices
    fewer = fastest if fastest and (chosen is None or fastest.seconds < chosen.seconds * (1 - 1e-9)) else None
    weighed = weighed if fewer else weighed_exact
    infeasible = _why_not(costs, tasks, options, fewer=fastest is None) if chosen is None else None
    return StageSlicing(chosen, fewer, anywhere.bound, infeasible, weighed)


def _near(costs: StageCosts, size: int) -> tuple[int, ...]:
    """The kinds of submesh of half to twice as many devices as the best equal ones have."""
    return tuple(kind for kind, other in enumerate(costs.devices) if size <= 2 * other <= 4 * size)


def evaluate(costs: StageCosts, slices: StageSlices) -> tuple[float, tuple[float, ...]]:
    """Seconds of a step, and bytes per device of each submesh, straight from the formulas of the module.

    `costs` must be those of `slices.num_microbatches`; seconds and bytes in `slices` are not read.
    """
    count, meshes = slices.num_microbatches, slices.num_meshes
    terms = []
    fixed: list[list[float]] = [[] for _ in range(meshes)]
    each: list[list[float]] = [[] for _ in range(meshes)]
    for s, stage in enumerate(slices.stages):
        at = stage.first, stage.stop, stage.kind, stage.variant
        after = slices.stages[s + 1].kind if s + 1 < len(slices.stages) else None
        cut = 0.0 if after is None else costs.cut_seconds(stage.stop, stage.kind, after)
        latency, excess = _terms(slices.schedule, costs, at, cut, slices.virtual)
        terms.append((float(latency), float(excess), float(costs.update[at])))
        fixed[stage.mesh].append(float(costs.fixed_bytes[at]) + costs.buffer_bytes(stage.first, stage.stop))
        each[stage.mesh].append(float(costs.flying(slices.schedule)[at]))
    counts = [in_flight_formula(slices.schedule, meshes, count, mesh, slices.virtual) for mesh in range(meshes)]
    total = sum(t[0] for t in terms) + max(t[1] for t in terms) + max(t[2] for t in terms)
    return total, tuple(sum(f) + n * max(e) for f, e, n in zip(fixed, each, counts, strict=True))


@dataclass(frozen=True)
class _Task:
    """One B, schedule and number of virtual stages; for virtual ones and for equal submeshes also S and their kind."""

    costs: StageCosts
    schedule: str
    virtual: int = 1
    meshes: int = 0
    kind: int = -1


@dataclass(frozen=True)
class _Best:
    slices: StageSlices | None
    bound: float


def _validate(costs: Sequence[StageCosts], options: SliceOptions) -> None:
    if not costs:
        raise OptionError("costs=() holds no number of micro-batches; give at least one.")
    shape = costs[0].forward.shape
    if any(c.forward.shape != shape or c.devices != costs[0].devices for c in costs):
        raise OptionError("costs differ in layers, kinds of submesh or variants; give the same for every B.")
    unknown = [name for name in options.schedules if name not in NAMES]
    if unknown or not options.schedules:
        raise OptionError(f"schedules={options.schedules!r}: choose from {', '.join(map(repr, NAMES))}.")
    if any(v < 2 for v in options.virtual):
        raise OptionError(f"virtual={options.virtual!r}: interleaving needs at least 2 stages on a submesh.")
    if options.num_stages is not None and options.num_stages < 1:
        raise OptionError(f"num_stages={options.num_stages!r}: give at least 1, or None to search it.")
    kinds = options.kinds
    if kinds is not None and not (kinds and all(0 <= k < shape[2] for k in kinds)):
        raise OptionError(f"kinds={kinds!r}: there are kinds 0 to {shape[2] - 1}; give one for each stage.")
    if kinds is not None and options.num_stages not in (None, len(kinds)):
        raise OptionError(f"num_stages={options.num_stages} but kinds={kinds!r} has {len(kinds)}; drop one of them.")
    if options.variants is not None and not all(0 <= v < shape[3] for v in options.variants):
        raise OptionError(f"variants={options.variants!r}: there are variants 0 to {shape[3] - 1}.")
    if not 0 <= options.gap < 1:
        raise OptionError(f"gap={options.gap!r}: give a fraction, at least 0 and below 1.")


def _stage_range(costs: StageCosts, options: SliceOptions) -> tuple[int, int]:
    """The least and the largest number of submeshes."""
    fixed = len(options.kinds) if options.kinds is not None else options.num_stages
    most = min(costs.num_layers, costs.total_devices // min(costs.devices))
    return (1, most) if fixed is None else (fixed, min(fixed, most))


def _tasks(costs: StageCosts, options: SliceOptions) -> list[_Task]:
    """What can be searched for one B."""
    count, layers = costs.num_microbatches, costs.num_layers
    lowest, highest = _stage_range(costs, options)
    tasks = []
    for name in options.schedules:
        if name != "interleaved-1f1b":
            top = min(highest, count) if name == "zb-h1" else highest
            tasks += [_Task(costs, name)] if lowest <= top else []
            continue
        for v in options.virtual:
            for kind, size in enumerate(costs.devices):
                most = min(highest, costs.total_devices // size, layers // v)
                for s in range(max(2, lowest), most + 1):
                    if options.allowed is not None and (kind not in options.allowed or s * size != costs.total_devices):
                        continue
                    wanted = options.kinds is None or options.kinds == (kind,) * s
                    tasks += [_Task(costs, name, v, s, kind)] if wanted and count % s == 0 else []
    return tasks


def _equal_tasks(costs: StageCosts, options: SliceOptions) -> list[_Task]:
    """What can be searched for one B on equal submeshes that take up all devices, one stage on each."""
    lowest, highest = _stage_range(costs, options)
    tasks = []
    for kind, size in enumerate(costs.devices):
        stages, rest = divmod(costs.total_devices, size)
        wanted = options.kinds is None or options.kinds == (kind,) * stages
        if rest or not wanted or not lowest <= stages <= highest:
            continue
        cut = costs.boundary_seconds
        own = costs if cut.ndim == 1 else replace(costs, boundary_seconds=cut[:, kind, kind])
        for name in options.schedules:
            if name != "interleaved-1f1b" and (name != "zb-h1" or stages <= costs.num_microbatches):
                tasks.append(_Task(own, name, 1, stages, kind))
    return tasks


def _fastest(
    tasks: Sequence[_Task], options: SliceOptions, *, fewer: bool, known: StageSlices | None = None
) -> tuple[_Best, tuple[Weighed, ...]]:
    """The best of all tasks, in the order of their simplest bounds, and what each came to; or `known`, if none is."""
    best = known
    bound = math.inf
    limit = math.inf if known is None else known.seconds
    weighed: list[Weighed] = []
    area = functools.cache(lambda costs, kind: _least_area(costs, kind, options.variants))
    order = [(area(t.costs, t.kind) * t.costs.num_microbatches / t.costs.total_devices, t) for t in tasks]
    for simple, task in sorted(order, key=lambda pair: pair[0]):
        if not fewer and not _can_use_all(task):
            continue
        if simple >= limit * (1 - max(options.gap, 1e-12)):
            found, problem = Minimum(math.inf, None, simple), None
        else:
            found, problem = _minimise(task, options, fewer, limit)
        bound = min(bound, found.bound)
        weighed += _weighed(task, problem, found)
        if problem is not None and found.path is not None:
            limit, best = found.seconds, _slices(task, problem, found.path)
    if known is not None and best is known:
        row = known.num_microbatches, known.schedule, known.virtual, known.num_meshes
        weighed.append(Weighed(*row, known.seconds, max(known.bytes), min(bound, limit), "met"))
    return _Best(best, min(bound, limit)), _ranked(weighed, best)


def _can_use_all(task: _Task) -> bool:
    """Whether a task is one of pipelines that may use every device."""
    return not task.meshes or task.meshes * task.costs.devices[task.kind] == task.costs.total_devices


def _least_area(costs: StageCosts, kind: int, variants: tuple[int, ...] | None) -> float:
    """Device-seconds per micro-batch: every range at its cheapest; times B / D it is below any pipeline's seconds."""
    seconds = costs.forward + costs.backward
    size = np.asarray(costs.devices, dtype=float)
    if kind >= 0:
        seconds, size = seconds[:, :, kind : kind + 1], size[kind : kind + 1]
    if variants is not None:
        seconds = seconds[..., list(variants)]
    cost = (seconds.min(-1, initial=np.inf) * size).min(-1)
    least = np.full(len(cost) + 1, np.inf)
    least[-1] = 0.0
    for i in range(len(cost) - 1, -1, -1):
        least[i] = (cost[i, i + 1 :] + least[i + 1 :]).min()
    return float(least[0])


def _terms(schedule: str, costs: StageCosts, at: Any, cut: Any, virtual: int) -> tuple[np.ndarray, np.ndarray]:
    """Latency and excess of stages `at` (an index into the cost arrays) with `cut` seconds behind them."""
    count = costs.num_microbatches
    forward, backward = costs.forward[at], costs.backward[at]
    t, both = forward + backward, 2 * np.asarray(cut)
    possible = np.isfinite(t + both)
    with np.errstate(invalid="ignore"):  # 0 * inf and inf - inf where there is no such stage
        latency, excess = t + both, (count - 1) * (t + both)
        if schedule in ("gpipe", "eager-1f1b"):
            excess = (count - 1) * np.maximum(t, both)
        elif schedule == "zb-h1":
            weight = costs.weight_seconds[at]
            hidden = 2 * np.minimum(np.minimum(weight, forward), np.maximum(backward - weight, 0.0))
            latency, excess = latency - hidden, excess + hidden
        elif schedule == "interleaved-1f1b":
            latency, excess = latency / virtual, (count * virtual - 1) * (t + both)
    return np.where(possible, latency, np.inf), np.where(possible, excess, np.inf)


def _problem(task: _Task, options: SliceOptions, fewer: bool) -> PathProblem:
    """The graph of a task: a node for each cut, or for each cut and kind of the stage behind it."""
    c, name = task.costs, task.schedule
    layers, kinds = c.num_layers, len(c.devices)
    by_kind = c.boundary_seconds.ndim == 3
    allowed = [k for k in range(kinds) if task.kind in (-1, k) and c.devices[k] <= c.total_devices]
    allowed = [k for k in allowed if options.allowed is None or k in options.allowed]
    unit = math.gcd(c.total_devices, *(c.devices[k] for k in allowed))
    first, stop = (x.ravel() for x in np.meshgrid(np.arange(layers), np.arange(1, layers + 1), indexing="ij"))
    first, stop = first[stop > first], stop[stop > first]
    columns = []
    for k in allowed:
        for after in allowed if by_kind else [k]:
            keep = (stop < layers) | (after == allowed[0]) | (not by_kind)
            columns.append(np.stack([first[keep], stop[keep], np.full(keep.sum(), k), np.full(keep.sum(), after)]))
    i, j, k, after = np.concatenate(columns, axis=1)
    wide = kinds if by_kind else 1
    tail = i * wide + (k if by_kind else 0)
    head = np.where(j == layers, layers * wide, j * wide + (after if by_kind else 0))
    order = np.argsort(tail, kind="stable")
    i, j, k, after, tail, head = (x[order] for x in (i, j, k, after, tail, head))
    cut = c.boundary_seconds[j, k, after] if by_kind else c.boundary_seconds[j]
    at = i, j, k
    latency, excess = _terms(name, c, at, np.where(j == layers, 0.0, cut)[:, None], task.virtual)
    if options.variants is not None:
        forbidden = np.setdiff1d(np.arange(c.forward.shape[3]), options.variants)
        latency = latency.copy()
        latency[:, forbidden] = np.inf
    buffers = np.where(i == 0, 0.0, c.boundary_bytes[i]) + np.where(j == layers, 0.0, c.boundary_bytes[j])
    count, most = c.num_microbatches, _stage_range(c, options)
    problem = PathProblem(
        tail=tail,
        head=head,
        size=np.asarray(c.devices)[k] // unit,
        kind=k,
        latency=latency,
        excess=excess,
        update=c.update[at],
        fixed=c.fixed_bytes[at] + buffers[:, None],
        each=c.flying(name)[at],
        num_nodes=layers * wide + 1,
        sources=tuple(allowed) if by_kind else (0,),
        devices=c.total_devices // unit,
        fewer=fewer,
        budget=options.budget,
        count=lambda left, total: in_flight_formula(name, left, count, 0),
        stages=most,
        kinds=options.kinds,
    )
    if name == "zb-h1":
        stages = most[0], min(most[1], count)
        problem = replace(
            problem,
            count=lambda left, total: in_flight_formula(name, max(total, left), count, 0),
            stages=stages,
            exact_count=False,
        )
        return _of_equal(problem, task.meshes) if task.meshes else problem
    if not task.meshes:
        return problem
    if task.virtual == 1:
        return _of_equal(problem, task.meshes)
    chunks = task.meshes * task.virtual

    def in_chunk(left: int, total: int) -> int:
        return in_flight_formula(name, task.meshes, count, (chunks - left) % task.meshes, task.virtual)

    return replace(problem, size=np.zeros_like(k), devices=0, count=in_chunk, stages=(chunks, chunks), kinds=None)


def _of_equal(problem: PathProblem, meshes: int) -> PathProblem:
    """The problem of so many submeshes of one kind: there are no devices to divide."""
    return replace(problem, size=np.zeros_like(problem.size), devices=0, stages=(meshes, meshes), kinds=None)


def _minimise(task: _Task, options: SliceOptions, fewer: bool, cutoff: float) -> tuple[Minimum, PathProblem]:
    """The best of a task, and its graph.

    With virtual stages: as if each were alone in its memory. If those do not fit together, three ways to a choice that
    does: each as if the others of its submesh were like it; each with its own share of the budget for what it keeps and
    for what it saves; the one that takes the least memory of all.
    """
    if task.costs.boundary_seconds.ndim == 3 and math.isinf(cutoff):
        cutoff = _first_guess(task, options, fewer)
    if task.costs.boundary_seconds.ndim == 3:  # as if every cut were as fast as for its fastest kinds: a smaller graph
        problem = _problem(_one_kind(task, np.min), options, fewer)
        found = minimise(problem, cutoff, options.gap)
        if found.path is None:
            return Minimum(math.inf, None, found.bound), problem
    problem = _problem(task, options, fewer)
    found = minimise(problem, cutoff, options.gap)
    if task.virtual == 1 or found.path is None or _holds(task, problem, found.path, options):
        return found, problem
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


def _first_guess(task: _Task, options: SliceOptions, fewer: bool) -> float:
    """A cutoff under which a pipeline remains that is found as if every cut were as slow as for its slowest kinds.

    What is within the gap of a cutoff is not wanted, so the cutoff is above that pipeline by the gap and a little more.
    """
    slowest = _one_kind(task, np.max)
    found, problem = _minimise(slowest, options, fewer, math.inf)
    if found.path is None:
        return math.inf
    return evaluate(task.costs, _slices(slowest, problem, found.path))[0] * (1 + 1e-9) / (1 - options.gap)


def _one_kind(task: _Task, combine: Any) -> _Task:
    """The task with transfers that do not depend on the kinds beside a cut."""
    seconds = combine(task.costs.boundary_seconds, axis=(1, 2))
    return replace(task, costs=replace(task.costs, boundary_seconds=seconds))


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


def _holds(task: _Task, problem: PathProblem, path: Path, options: SliceOptions) -> bool:
    return max(_slices(task, problem, path).bytes) <= options.budget


def _slices(task: _Task, problem: PathProblem, path: Path) -> StageSlices:
    """A path of a task's graph as a pipeline."""
    c = task.costs
    wide = len(c.devices) if c.boundary_seconds.ndim == 3 else 1
    meshes = task.meshes or len(path)
    stages = tuple(
        StageChoice(int(problem.tail[g]) // wide, int(problem.head[g]) // wide, int(problem.kind[g]), v, s % meshes)
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
    """The first device of each submesh, aligned: within a node to a multiple of its size, else to whole nodes.

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


def _weighed(task: _Task, problem: PathProblem | None, found: Minimum) -> list[Weighed]:
    """What the search of one task came to, by number of stages."""
    key = task.costs.num_microbatches, task.schedule, task.virtual
    if problem is None or not found.by_stages:
        status = "infeasible" if math.isinf(found.bound) else "cutoff"
        return [Weighed(*key, task.meshes or None, None, None, found.bound, status)]
    rows = []
    for _, path in found.by_stages.values():
        slices = _slices(task, problem, path)
        status = "optimal" if path == found.path else "met"
        rows.append(Weighed(*key, slices.num_meshes, slices.seconds, max(slices.bytes), found.bound, status))
    return rows


def _ranked(weighed: list[Weighed], best: StageSlices | None) -> tuple[Weighed, ...]:
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


def _why_not(costs: Sequence[StageCosts], tasks: Sequence[_Task], options: SliceOptions, *, fewer: bool) -> Infeasible:
    """The constraint that leaves no pipeline on all devices; with `fewer`, none on fewer either."""
    if not tasks:
        return Infeasible("schedule", _no_schedule(costs, options), None)
    needs = _least_bytes(tasks, options, fewer=False)
    if not needs and fewer:
        needs = _least_bytes(tasks, options, fewer=True)
    if not needs:
        sizes = ", ".join(map(str, costs[0].devices))
        given = "" if options.num_stages is None else f" with num_stages={options.num_stages}"
        message = f"no stages on submeshes of {sizes} devices use all {costs[0].total_devices} devices{given}"
        return Infeasible("devices", message, None)
    need, task = min(needs, key=lambda pair: pair[0])
    message = (
        f"memory_per_device={units.exact_bytes(options.budget)} is {units.exact_bytes(need - options.budget)} short of "
        f"the smallest that works, {units.exact_bytes(need)}, with "
        f"{microbatches(task.costs.num_microbatches)} and {task.schedule}."
    )
    return Infeasible("memory", message, need)


def _least_bytes(tasks: Sequence[_Task], options: SliceOptions, *, fewer: bool) -> list[tuple[float, _Task]]:
    """The least bytes per device that each task could do with; with `fewer`, on fewer devices too."""
    free = replace(options, budget=math.inf)
    needs = []
    names = {task.schedule for task in tasks}
    for task in tasks:
        if not fewer and not _can_use_all(task):
            continue
        if "1f1b" in names and task.schedule not in ("1f1b", "interleaved-1f1b"):
            continue  # holds no fewer micro-batches than 1f1b
        problem = _problem(task, free, fewer)
        need, path = least_bytes(problem)
        if path is not None:
            needs.append((max(_slices(task, problem, path).bytes) if task.virtual > 1 else need, task))
    return needs


def _no_schedule(costs: Sequence[StageCosts], options: SliceOptions) -> str:
    """Why nothing can be searched, and what to change."""
    layers, least = costs[0].num_layers, _stage_range(costs[0], options)[0]
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
        twice = min(options.virtual)
        needs = f"schedule='interleaved-1f1b' puts {twice} stages on each of 2 or more equal submeshes"
        if layers < twice * max(2, least):
            reasons.append(f"{needs}, for which {layers} layers are too few")
        else:
            reasons.append(f"{needs}, and takes a multiple of their number of micro-batches")
    return f"{'; '.join(reasons)}. This is {' or '.join(map(microbatches, counts))} with {layers} layers"


def microbatches(count: int) -> str:
    """A number of micro-batches in words."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"
