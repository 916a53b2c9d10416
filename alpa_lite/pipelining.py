"""The pipeline half of the compiler: a step in layers, in stages on submeshes, each planned, its program simulated.

    step ──micro-batches──▶ ──layers──▶ ──costs──▶ ──slicing──▶ stages chosen by the costs of layers
         ──stages──▶ ──sharding──▶ ──lowering──▶ PlannedStage, for each stage ──programs──▶ Staged

What the search chooses by are sums over layers; what the plan predicts is the simulation of its program.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpa_lite import schedules, token_slicing
from alpa_lite.asked import Asked, Step
from alpa_lite.errors import InfeasibleError
from alpa_lite.one_mesh import MAX_LAYERS
from alpa_lite.options import Sharded
from alpa_lite.passes import microbatches, programs, stages
from alpa_lite.passes.layers.division import Divisible, divided, divisible
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.plans import candidates
from alpa_lite.passes.programs.staged import Staged, Verdict, estimated_bytes, noted
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages import Slower, choosing, planning, submeshes
from alpa_lite.passes.stages.choosing import Sliced
from alpa_lite.passes.stages.layer_costs import PRICES, Layer
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage
from alpa_lite.passes.stages.pricing import VARIANTS, Key, Priced
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.passes.tokens import in_slices
from alpa_lite.report import units
from alpa_lite.runner import Passes

logger = logging.getLogger(__name__)

REALISING = 1.7
"""How long planning the chosen stages takes, as a multiple of tracing: 1.3 to 1.7 for models of 24 to 64 layers."""

CHOOSING = 1.0
"""How long choosing stages takes at least, as a multiple of tracing: 1.0 to 1.3 for four models of 28 to 53 layers."""

LEAST = 0.3
"""The part of the limit that choosing stages has in any case, where there must be some: tracing may take all of it."""

LEAST_OF_STAGE = 2.0
"""Seconds that solving a chosen stage may take in any case; most take less."""

SLICINGS = 3
"""How often stages are chosen, each time with less room by what the program exceeded the budget by."""

HASTE = 3.0
"""By what multiple of the bytes that are missing stages get less room where the time is over: the next are to fit."""

ATTEMPTS = 3
"""How often the same stages are planned, each time with memory more expensive for those that exceed the budget."""

MISTAKEN = 1.6
"""Stages are planned whose bytes, estimated from their layers, exceed the budget by this factor at most.

Estimates are too high, since a stage has once what each of its layers has. Measured on one model alone, a GPT of 16
layers of 25,600 on 384 MI250X: 1.41 to 1.63 times the bytes of the planned stages.
"""

CERTAIN = 0.02
"""By what share an estimate of bytes or seconds may be exceeded without anything following from it."""


@dataclass(frozen=True, eq=False)
class Layered:
    """What stages are chosen from.

    Attributes:
      counts: numbers of micro-batches, rising. kinds: numbers of devices of submeshes.
      cut: the step in layers with a number of micro-batches.
      price: the costs of layers with a number of micro-batches on some kinds of submeshes.
    """

    counts: Sequence[int]
    kinds: tuple[int, ...]
    cut: Callable[[int], Divisible]
    price: Callable[[int, tuple[int, ...]], Priced]


def pipeline(run: Passes, step: Step, asked: Asked, *, below: float = math.inf, must: bool = True) -> Staged:
    """Stages on submeshes. What the plan predicts is the simulation of its program, not the estimate that chose it.

    Stages are chosen in a part of the time; planning them has the rest.

    Args:
      below: seconds of a plan of one mesh that is at hand. Then a single stage on all devices, which is one mesh, is no
        pipeline, and stages that take as long by the costs of their layers are not planned.
      must: whether to go on without time until one is evaluated.

    Raises:
      InfeasibleError: no pipeline fits; names what binds.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
      OptionError: the method asks for what the cluster or the step does not have.
      OutOfTime: without `must`, no pipeline that fits could be evaluated in the time; says if one was that does not.
      Slower: none is faster than one mesh.
    """
    if not must and asked.deadline.left <= shortest(run):
        raise OutOfTime  # there is no time to choose stages and to plan them
    kinds = submeshes.kinds(asked.cluster, asked.pipeline)
    if math.isfinite(below):
        kinds = tuple(size for size in kinds if size < asked.cluster.num_devices)
    given = asked.num_microbatches
    counts = [given] if given else numbers.of_pipelines(step.traced, step.rules, asked.cluster, asked.pipeline)
    cut = functools.cache(functools.partial(in_layers, run, step, asked))
    price = functools.cache(functools.partial(priced_layers, run, asked, cut, {}))
    layers = Layered(counts, kinds, cut, price)
    refusal = token_slicing.refusal(step.traced, asked, counts)
    try:
        first = asked if refusal is not None else token_slicing.for_whole(asked)
        staged, chosen, took = of_whole_sequences(run, first, layers, below=below, must=must)
    except Slower:
        if refusal is not None:
            raise
        return fitting(in_slices_alone(run, asked, layers, below), asked)
    if asked.pipeline.lengths:
        stages_for = for_slices(run, asked, layers, chosen, len(asked.pipeline.lengths))
        staged = token_slicing.in_given(run, asked, staged, chosen, stages_for, cut, realised, took)
    elif refusal is None:
        stages_for = for_slices(run, asked, layers, chosen, token_slicing.SLICES)
        staged = token_slicing.best(run, asked, staged, stages_for, counts, cut, realised, took) or staged
    elif refusal:
        staged = noted(staged, refusal)
    return fitting(staged, asked)


def in_slices_alone(run: Passes, asked: Asked, layers: Layered, below: float) -> Staged:
    """A pipeline in slices, where none of whole sequences takes less than `below`.

    Raises:
      Slower: none in slices does, either.
    """
    count = layers.counts[-1]
    try:
        costs = layers.price(count, layers.kinds)
        runs = [n * token_slicing.SLICES for n in layers.counts]
        chosen = sliced(run, costs, token_slicing.without_split(asked), runs, asked.budget, below, must=False)
    except (InfeasibleError, OutOfTime):
        raise Slower(below) from None
    if chosen.seconds >= below:
        raise Slower(chosen.seconds)
    found = token_slicing.best(run, asked, None, chosen, layers.counts, layers.cut, realised, reserve(run))
    if found is None:
        raise Slower(below)
    return found


def for_slices(run: Passes, asked: Asked, layers: Layered, whole: Sliced, slices: int) -> Sliced:
    """Stages that suit so many slices, each a run like a micro-batch; those of whole sequences without time."""
    runs = [n * slices for n in layers.counts]
    try:
        within = token_slicing.for_stages(token_slicing.without_split(asked))
        return sliced(run, whole.priced, within, runs, asked.budget, must=False)
    except (InfeasibleError, OutOfTime):
        return token_slicing.as_runs(whole, slices)


def of_whole_sequences(
    run: Passes, asked: Asked, layers: Layered, *, below: float, must: bool
) -> tuple[Staged, Sliced, float]:  # fmt: skip
    """A pipeline in the slices that are given, if any; with the stages as they were chosen. As `pipeline`.

    Last, seconds that planning the stages took, once they were chosen: where they were chosen several times, the last.
    """
    least = LEAST * asked.options.search_time_limit if must else 0.0
    pricing = asked.within(asked.deadline.left - reserve(run), least)

    def chosen_in(room: float) -> Sliced:
        def choose(costs: Priced, some: Sequence[int], limit: float) -> Sliced:
            return sliced(run, costs, pricing, some, room, limit, must=must)

        while True:
            try:
                return stages.best(
                    layers.counts, layers.kinds, layers.price, choose, layers.cut, pricing.deadline, below
                )  # fmt: skip
            except InfeasibleError as error:
                room = sparest(error, asked)

    chosen = chosen_in(asked.budget)
    tokens, before = asked.pipeline.lengths, Before()
    start = time.perf_counter()
    staged, at = realised(run, chosen, asked, tokens, before), chosen
    took = time.perf_counter() - start
    room = asked.budget
    for _ in range(SLICINGS - 1):
        over = staged.needed - asked.budget
        if over <= 0:
            break
        if not must and asked.deadline.left < took:
            raise OutOfTime(
                f"the pipeline of {len(staged.stages)} stages exceeds the budget, and others were not searched"
            )
        # By as much the estimate was too low of the fullest submesh: one that is estimated to need no less has no room.
        fullest = int(np.argmax(list(map(sum, staged.bytes))))
        room = min(room, at.slices.bytes[fullest]) - (HASTE if asked.deadline.over else 1.05) * over
        logger.info("the program exceeds the budget by %s: slicing again within %s", *map(units.nbytes, (over, room)))
        try:
            chosen = chosen_in(room)  # more is computed again, or there are more stages or micro-batches
        except (InfeasibleError, stages.Slower):
            break
        start = time.perf_counter()
        other = realised(run, chosen, asked, tokens, before)
        took = time.perf_counter() - start
        staged, at = min((staged, at), (other, chosen), key=lambda one: max(one[0].needed, asked.budget))
    if chosen.unfinished:
        staged = noted(staged, f"{asked.ran_out}: pipelines were not searched to the end")
    return staged, at, took


def shortest(run: Passes) -> float:
    """Seconds that choosing stages and planning them takes at least."""
    return reserve(run) + CHOOSING * run.seconds["tracing"]


def reserve(run: Passes) -> float:
    """Seconds that planning the chosen stages takes after the search."""
    return REALISING * run.seconds["tracing"]


def sparest(error: InfeasibleError, asked: Asked) -> float:
    """A budget for stages chosen by layers: what any can do with, by an estimate that says that none fits in less.

    Raises:
      InfeasibleError: the given one, if even stages that need as much less as was ever measured do not fit.
    """
    least = error.smallest_budget
    if least is None or least > MISTAKEN * asked.budget:
        raise error
    logger.info("by the estimates of layers %s are needed: stages with the least are planned", units.nbytes(least))
    return (1 + CERTAIN) * least


def priced_layers(
    run: Passes, asked: Asked, cut: Callable[[int], Divisible], known: dict[str, Layer], count: int,
    kinds: tuple[int, ...],
) -> Priced:  # fmt: skip
    """The step in micro-batches and in layers, with bounds on what each costs on submeshes of these sizes."""
    return run(
        "costs", stages.priced, cut(count), asked.cluster, asked.pipeline, kinds, made=known, wishes=asked.wishes,
        progress=run.count,
    )  # fmt: skip


def in_layers(run: Passes, step: Step, asked: Asked, count: int) -> Divisible:
    """The step in micro-batches and in layers."""
    loop = run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **asked.inexact)
    return run("layers", divisible, loop, max_layers=MAX_LAYERS)


def sliced(
    run: Passes, costs: Priced, asked: Asked, counts: Sequence[int], room: float, limit: float = math.inf,
    *, must: bool = True,
) -> Sliced:  # fmt: skip
    """Layers to stages, stages to submeshes, the schedule and what is computed again, within `room` bytes a device.

    Costs of layers are worked out as far as the choice depends on them.
    """

    def choose(costs: Priced, rough: bool) -> Sliced:
        names = choosing.ROUGHLY if rough else schedules.NAMES
        return run(
            "slicing", stages.choose, costs, asked.pipeline, counts, room, rough=rough, names=names,
            deadline=asked.deadline,
        )  # fmt: skip

    def hiding(costs: Priced) -> Sliced:
        return run("slicing", stages.choose, costs, asked.pipeline, counts, room, rough=True, names=choosing.HIDING)

    def work_out(costs: Priced, wanted: Sequence[Key], until: Deadline | None) -> Priced:
        most = asked.options.solver_time_limit
        return run("costs", stages.worked_out, costs, wanted, time_limit=most, deadline=until, progress=run.count)

    late = hiding if asked.pipeline.schedule == "auto" else None
    return stages.settled(costs, choose, work_out, room, asked.deadline, limit, must=must, hiding=late)


Kind = tuple[Any, ...]
"""What identical plans of stages are for: the digest, the devices, the meshes allowed, whether weights are apart."""


@dataclass(frozen=True, eq=False)
class Before:
    """What was planned of stages, to be taken over: it grows.

    Attributes:
      digests: of stages.
      solved: one of each kind, at some price of memory.
      planned: the first of each kind at each price.
      own: of each stage of each kind at each price.
    """

    digests: dict[StageGraph, str] = field(default_factory=dict)
    solved: dict[Kind, DecidedStage] = field(default_factory=dict)
    planned: dict[tuple[Kind, float], PlannedStage] = field(default_factory=dict)
    own: dict[tuple[StageGraph, Kind, float], PlannedStage] = field(default_factory=dict)


def realised(
    run: Passes, chosen: Sliced, asked: Asked, tokens: tuple[int, ...] = (), before: Before | None = None
) -> Staged:  # fmt: skip
    """The chosen stages planned whole, in slices of so many tokens if any, their program written and simulated.

    Where a submesh exceeds the budget, its stages are planned again with memory four times as expensive.
    """
    before = before or Before()
    slices = chosen.slices
    firsts = [stage.first for stage in slices.stages]
    remat: tuple[Choice, ...] = tuple(VARIANTS[stage.variant][1] for stage in slices.stages)
    cut = run("layers", divided, chosen.priced.step, firsts[1:], remat)
    if tokens:
        cut = run("slices", in_slices, cut, tokens)
    loop = cut.accumulated
    graphs = run("stages", stages.stage_graphs, loop.traced, loop.scan, cut.assignment)
    schedule = schedules.schedule(
        slices.schedule, slices.num_meshes, slices.num_microbatches, virtual=slices.virtual, slices=len(tokens) or 1
    )
    verdict = Verdict(
        "layers", "feasible", chosen.seconds, chosen.bound, candidates.of_stages(chosen), chosen.idle_devices
    )  # fmt: skip
    write = functools.partial(
        programs.pipelined, loop, first_devices=slices.first_devices, schedule=schedule, cluster=asked.cluster,
        first_layers=firsts, num_layers=len(chosen.priced.step.layering.layers), max_layers=MAX_LAYERS,
        remat=remat, verdict=verdict, token_slices=tokens,
    )  # fmt: skip
    prices = [PRICES[VARIANTS[stage.variant][0]] for stage in slices.stages]
    mesh_of = [stage.mesh for stage in slices.stages]
    staged: Staged | None = None
    for attempt in range(ATTEMPTS):
        last = attempt == ATTEMPTS - 1
        planned = solve_stages(run, graphs, chosen, prices, schedule.splits_backward, asked, before)
        over = [size - asked.budget for size in estimated_bytes(planned, mesh_of, schedule)]
        if max(over) <= CERTAIN * asked.budget or schedule.splits_backward or last:
            staged = run("programs", write, planned)
            over = [sum(pair) - asked.budget for pair in staged.bytes]
            if max(over) <= 0 or last:
                break
        said = ", ".join(units.nbytes(size) for size in over if size > 0)
        logger.info("submeshes exceed the budget by %s: memory becomes more expensive for their stages", said)
        prices = [max(1.0, 4.0 * price) if over[m] > 0 else price for m, price in zip(mesh_of, prices, strict=True)]
    assert staged is not None
    return staged


def solve_stages(
    run: Passes, graphs: Sequence[StageGraph], chosen: Sliced, prices: Sequence[float], split: bool, asked: Asked,
    before: Before,
) -> tuple[PlannedStage, ...]:  # fmt: skip
    """Solves and lowers every stage; the mesh of the first stage of a submesh binds its others.

    Which mesh shape suits a stage has been weighed for its layers. Identical stages take over the choices of the first
    and what they cost, a stage at another attempt with the same price of memory is the one of the attempt before, and
    at another price it has the same integer program.
    """
    slices, kinds = chosen.slices, chosen.priced.devices
    limit = max(asked.time_limit, min(LEAST_OF_STAGE, asked.options.solver_time_limit))
    shapes: dict[int, tuple[int, ...]] = {}
    out: list[PlannedStage] = []
    for number, (graph, stage) in enumerate(zip(graphs, slices.stages, strict=True)):
        run.count("stages planned", number, len(graphs), lasting=True)
        devices, price = slices.devices[stage.mesh], prices[number]
        method = submeshes.shape_of(asked.pipeline, number, devices)
        if stage.mesh in shapes:
            method = Sharded(shapes[stage.mesh])
        elif method.mesh_shape is None:
            method = Sharded(chosen.priced.mesh_of(stage, kinds.index(devices)))
        if graph not in before.digests:
            before.digests[graph] = planning.digest(graph, asked.wishes)
        kind = before.digests[graph], devices, method, split
        if (graph, kind, price) not in before.own:
            twin = before.planned.get((kind, price))
            like = twin or before.solved.get(kind)
            if twin is None and like is not None:
                like = run("sharding", planning.repriced, like, price, time_limit=limit)
            decided = run(
                "sharding", planning.decide, graph, asked.cluster.part(devices), method, price=price,
                time_limit=limit, split_weights=split, wishes=asked.wishes, like=like,
            )  # fmt: skip
            before.solved.setdefault(kind, decided)
            planned = run("lowering", planning.lowered, decided, split_weights=split, like=twin)
            before.own[graph, kind, price] = planned
        planned = before.own[graph, kind, price]
        before.planned.setdefault((kind, price), planned)
        shapes[stage.mesh] = planned.found.mesh.shape
        out.append(planned)
    run.count("stages planned", len(graphs), len(graphs), lasting=True)
    return tuple(out)


def fitting(staged: Staged, asked: Asked) -> Staged:
    """The pipeline itself, if it fits the budget.

    Raises:
      InfeasibleError: it does not.
    """
    if staged.needed > asked.budget:
        worst = int(np.argmax(list(map(sum, staged.bytes))))
        raise InfeasibleError(
            f"the pipeline of {len(staged.stages)} stages needs {units.exact_bytes(staged.needed)} per device on "
            f"submesh {worst}, of {units.exact_bytes(asked.budget)}; allow more memory, more micro-batches or "
            "more stages"
        )
    return staged
