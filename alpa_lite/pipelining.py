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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpa_lite import schedules, token_slicing
from alpa_lite.asked import Asked, Step
from alpa_lite.errors import InfeasibleError
from alpa_lite.one_mesh import MAX_LAYERS
from alpa_lite.passes import microbatches, stages
from alpa_lite.passes.layers.division import Divisible, divisible
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.programs.staged import Staged, noted
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages import Slower, settling, submeshes
from alpa_lite.passes.stages.choosing import CERTAIN, Sliced
from alpa_lite.passes.stages.counts import Layered
from alpa_lite.passes.stages.layer_costs import Layer
from alpa_lite.passes.stages.pricing import Key, Priced
from alpa_lite.realising import Before, realised
from alpa_lite.report import units
from alpa_lite.runner import Passes

logger = logging.getLogger(__name__)

REALISING = 2.4
"""How long planning the chosen stages takes, as a multiple of tracing: 1.1 to 2.5 for six models of 24 to 53 layers. It
is longest where no two stages are alike."""

CHOOSING = 1.0
"""How long choosing stages takes at least, as a multiple of tracing: 1.0 to 1.3 for four models of 28 to 53 layers."""

SHORTEST = 2.7
"""How long choosing stages and planning them takes at least, as a multiple of tracing: planning takes as little as 1.1
where most stages are alike."""

AMPLE = 12.0
"""With so many times what tracing took, neither one mesh nor pipelines are to be short for the sake of the other.

Of 30 s, models of 24 to 53 layers that have pipelines have 5 to 10 times that left, a GPT of 12 layers 24 times."""

LEAST = 0.3
"""The part of the limit that choosing stages has in any case, where there must be some: tracing may take all of it."""

SPARE = 0.5
"""Another number of micro-batches is priced before all are compared where such a part of what that takes is left (to
bound its costs, and to work out those that its stages use): to search all of them takes as long."""

SLICINGS = 3
"""How often stages are chosen, each time with what the program before exceeded the costs of its layers by."""

HASTE = 3.0
"""By what multiple of the bytes that are missing a stage is taken for larger where the time is over: the next are to
fit."""

MISTAKEN = 1.6
"""Stages are planned whose bytes, estimated from their layers, exceed the budget by this factor at most.

Estimates may be too high, since a stage has once what each of its layers has. Measured on one model alone, a GPT of 16
layers of 25,600 on 384 MI250X: 1.41 to 1.63 times the bytes of the planned stages, when all that a layer saves was
counted where it is computed again.
"""


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
    if not must and asked.deadline.left <= time_for_stages(run):
        raise OutOfTime  # there is no time to choose stages, beside what is kept for planning them
    kinds = submeshes.kinds(asked.cluster, asked.pipeline)
    if math.isfinite(below):
        kinds = tuple(size for size in kinds if size < asked.cluster.num_devices)
    given = asked.num_microbatches
    counts = [given] if given else numbers.of_pipelines(step.traced, step.rules, asked.cluster, asked.pipeline)
    cut = functools.cache(functools.partial(in_layers, run, step, asked))
    layers = Layered(counts, kinds, cut, functools.cache(functools.partial(priced_layers, run, asked, cut, {})))
    try:
        staged = best(run, step, asked, layers, below=below, must=must)
    except InfeasibleError as error:
        if math.isfinite(below) or error.smallest_budget is None:
            raise
    else:
        if math.isfinite(below) or staged.needed <= asked.budget or asked.pipeline.lengths:
            return fitting(staged, asked)
    return fitting(of_least_memory(run, asked, layers), asked)


def best(run: Passes, step: Step, asked: Asked, layers: Layered, *, below: float, must: bool) -> Staged:
    """The best pipeline by the costs of its layers, whether its program fits the budget or not. As `pipeline`."""
    counts, cut = layers.counts, layers.cut
    refusal = token_slicing.refusal(step.traced, asked, counts)
    try:
        first = asked if refusal is not None else token_slicing.for_whole(asked)
        staged, chosen, took = of_whole_sequences(run, first, layers, below=below, must=must)
    except Slower:
        if refusal is not None:
            raise
        return in_slices_alone(run, asked, layers, below)
    if asked.pipeline.lengths:
        stages_for = for_slices(run, asked, layers, chosen, len(asked.pipeline.lengths))
        staged = token_slicing.in_given(run, asked, staged, chosen, stages_for, cut, realised, took)
    elif refusal is None:
        stages_for = for_slices(run, asked, layers, chosen, token_slicing.SLICES)
        staged = token_slicing.best(run, asked, staged, stages_for, counts, cut, realised, took) or staged
    elif refusal:
        staged = noted(staged, refusal)
    return staged


def of_least_memory(run: Passes, asked: Asked, layers: Layered) -> Staged:
    """The pipeline of the least memory that is known: its stages are those that need the least by the costs of layers.

    The budget has no part in it, nor has anything that was searched within the budget: so what it needs is a budget
    that works.

    Raises:
      InfeasibleError: there are no stages, whatever the memory.
    """
    price = functools.cache(functools.partial(priced_layers, run, asked, layers.cut, {}))
    layers, room, none = replace(layers, price=price), 1.0, asked.with_budget(1.0)
    while True:
        try:
            chosen, _ = Chooser(run, asked.with_budget(room), layers, True).best(math.inf, {})
            return realised(run, chosen, none)
        except InfeasibleError as error:
            if error.smallest_budget is None or error.smallest_budget <= room:
                raise
            room = (1 + CERTAIN) * error.smallest_budget


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


@dataclass(frozen=True, eq=False)
class Chooser:
    """Chooses stages by the costs of layers.

    Attributes:
      run: the passes.
      asked: until when to choose, and what else is asked.
      layers: what stages are chosen from.
      must: whether to go on without time until some can be planned.
    """

    run: Passes
    asked: Asked
    layers: Layered
    must: bool

    def best(self, below: float, beyond: Mapping[tuple[int, int], float], *but: int) -> tuple[Sliced, float]:
        """The best stages that take less than `below` seconds, and the bytes per device that they were chosen for.

        These are the budget, or as many as any stages take by their costs where none fits by them (`sparest`).

        Args:
          beyond: as in `Priced`.
          but: numbers of micro-batches that are left out.

        Raises:
          InfeasibleError, OutOfTime, Slower: as `stages.best`.
        """
        room = self.asked.budget
        layers = replace(self.layers, counts=[count for count in self.layers.counts if count not in but])

        def choose(costs: Priced, some: Sequence[int], limit: float, must: bool, **more: Any) -> Sliced:
            costs, must = replace(costs, beyond=beyond), self.must and must
            return sliced(self.run, costs, self.asked, some, room, limit, must=must, **more)

        def roughly(costs: Priced, some: Sequence[int], limit: float, bounding: float) -> Sliced:
            seconds = self.run.seconds.get("costs", 0.0)

            def enough(found: Sliced, left: float) -> bool:
                working = self.run.seconds.get("costs", 0.0) - seconds
                pricing = bounding + working * found.priced.part_used(found.slices.stages, costs.known)
                return left > SPARE * pricing and found.slices.num_microbatches != costs.num_microbatches

            return choose(costs, some, limit, True, enough=enough)

        while True:
            try:
                return stages.best(layers, choose, self.asked.deadline, below, roughly), room
            except InfeasibleError as error:
                room = sparest(error, self.asked)


def of_whole_sequences(
    run: Passes, asked: Asked, layers: Layered, *, below: float, must: bool
) -> tuple[Staged, Sliced, float]:  # fmt: skip
    """A pipeline in the slices that are given, if any; with the stages as they were chosen. As `pipeline`.

    Last, seconds that planning the stages took, once they were chosen: where they were chosen several times, the last.
    """
    least = LEAST * asked.options.search_time_limit if must else 0.0
    chooser = Chooser(run, asked.within(asked.deadline.left - reserve(run), least), layers, must)
    tokens, before = asked.pipeline.lengths, Before()
    beyond: Mapping[tuple[int, int], float] = {}
    chosen, room = chooser.best(below, beyond)
    start = time.perf_counter()
    found = realised(run, chosen, asked, tokens, before)
    took = time.perf_counter() - start
    staged, at = found, chosen
    for _ in range(SLICINGS - 1):
        over = staged.needed - asked.budget
        if over <= 0:
            break
        if not must and asked.deadline.left < took:
            raise OutOfTime(
                f"the pipeline of {len(staged.stages)} stages exceeds the budget, and others were not searched"
            )
        logger.info("the program exceeds the budget by %s: slicing again", units.nbytes(over))
        beyond = learned(beyond, chosen, found, room, asked)
        try:
            chosen, room = chooser.best(below, beyond)  # more is computed again, or there are more stages, or others
        except (InfeasibleError, Slower):
            break
        start = time.perf_counter()
        found = realised(run, chosen, asked, tokens, before)
        took = time.perf_counter() - start
        staged, at = min((staged, at), (found, chosen), key=lambda one: max(one[0].needed, asked.budget))
    for other in (runner_up, roomier) if staged.needed <= asked.budget else ():
        rival = other(chooser, asked, staged, at, beyond, took)
        if rival is not None:
            found = realised(run, rival, asked, tokens, before)
            if found.needed <= asked.budget and found.seconds < staged.seconds:
                staged, at = found, rival
    if chosen.unfinished:
        staged = noted(staged, f"{asked.ran_out}: pipelines were not searched to the end")
    return staged, at, took


def runner_up(
    chooser: Chooser, asked: Asked, staged: Staged, chosen: Sliced, beyond: Mapping[tuple[int, int], float],
    took: float,
) -> Sliced | None:  # fmt: skip
    """Stages with another number of micro-batches, where these may take less than planned ones.

    Sums over layers are estimates, and how far they are off differs from one number to another: of the two best numbers
    the second may be the faster, which shows once both are planned. None where no other takes less than the planned
    one by its estimate, or where the time does not allow or what can be won does not repay planning it.

    Args:
      staged, chosen: stages as they were planned, and as they were chosen.
      took: seconds that planning these took.
    """
    count = chosen.slices.num_microbatches
    gain = staged.seconds - min(
        (row.bound for row in chosen.weighed if row.num_microbatches != count), default=math.inf
    )
    if gain <= CERTAIN * staged.seconds:
        return None
    return another(chooser, asked, gain, took, 1.0, lambda some: some.best(staged.seconds, beyond, count)[0])


def roomier(
    chooser: Chooser, asked: Asked, staged: Staged, chosen: Sliced, beyond: Mapping[tuple[int, int], float],
    took: float,
) -> Sliced | None:  # fmt: skip
    """Faster stages that exceed the budget by their estimates, but by no more than what these may be off; as above.

    A GPT of 39 billion parameters with a mask, on 64 V100: 61.7 s a step instead of 72.8.
    """
    if max(chosen.slices.bytes) < (1 - CERTAIN) * asked.budget:
        return None  # it is not memory that they are chosen for
    room, below = (1 + CERTAIN) * asked.budget, (1 - CERTAIN) * chosen.seconds
    costs, counts = replace(chosen.priced, beyond=beyond), [chosen.slices.num_microbatches]

    def choose(some: Chooser) -> Sliced:
        found = sliced(some.run, costs, some.asked, counts, room, below, must=False)
        if found.seconds >= below:
            raise Slower(found.seconds)
        return found

    return another(chooser, asked, staged.seconds - costs.least_seconds, took, 0.2, choose)


def another(
    chooser: Chooser, asked: Asked, gain: float, took: float, share: float, choose: Callable[[Chooser], Sliced]
) -> Sliced | None:  # fmt: skip
    """Stages that are chosen while there is time, which is kept for planning them; as `runner_up`.

    Args:
      gain: seconds of a step that they can save at most.
      share: of the seconds that planning takes, what choosing needs at least.
    """
    left = asked.deadline.patience(gain) - took
    if left <= share * took:
        return None
    try:
        return choose(replace(chooser, asked=asked.repaying(left), must=False))
    except (InfeasibleError, OutOfTime, Slower):
        return None


def learned(
    beyond: Mapping[tuple[int, int], float], chosen: Sliced, staged: Staged, room: float, asked: Asked
) -> dict[tuple[int, int], float]:  # fmt: skip
    """Bytes by which stages exceed what the costs of layers say, as in `Priced.beyond`: known ones, and these.

    Args:
      chosen, staged: stages as they were chosen, and planned.
      room: bytes that they were chosen for. Stages that exceed the budget exceed it, too, from now on.
    """
    found, slices = dict(beyond), chosen.slices
    for stage in slices.stages:
        needed, estimated = sum(staged.bytes[stage.mesh]), slices.bytes[stage.mesh]
        over = needed - asked.budget
        size = room - estimated + (HASTE if asked.deadline.over else 1.05) * over if over > 0 else needed - estimated
        for layer in range(stage.first, stage.stop):
            key = layer, slices.devices[stage.mesh]
            found[key] = found.get(key, 0.0) + max(size, 0.0)
    return found


def shortest(run: Passes) -> float:
    """Seconds that choosing stages and planning them takes at least."""
    return SHORTEST * run.seconds["tracing"]


def time_for_stages(run: Passes) -> float:
    """Seconds without which stages are not chosen: there would be no time for it, beside what planning them takes."""
    return reserve(run) + CHOOSING * run.seconds["tracing"]


def is_ample(run: Passes, seconds: float) -> bool:
    """Whether so many seconds are enough for one mesh and for pipelines, so that neither need wait for the other."""
    return seconds > AMPLE * run.seconds["tracing"]


def reserve(run: Passes) -> float:
    """Seconds that are kept for planning the chosen stages, after the search."""
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
    *, must: bool = True, enough: Callable[[Sliced, float], bool] = lambda found, left: False,
) -> Sliced:  # fmt: skip
    """Layers to stages, stages to submeshes, the schedule and what is computed again, within `room` bytes a device.

    Costs of layers are worked out as far as the choice depends on them. What may be searched after the end of the time
    (`settling.OVERTIME`) is a part of it.
    """
    late, deadline = asked.pipeline.schedule == "auto", asked.deadline
    if late:
        deadline = deadline.within(deadline.left / (1 + settling.OVERTIME))

    def choose(costs: Priced, rough: bool) -> Sliced:
        names = settling.ROUGHLY if rough else schedules.NAMES
        return run(
            "slicing", stages.choose, costs, asked.pipeline, counts, room, rough=rough, names=names, deadline=deadline
        )

    def hiding(costs: Priced) -> Sliced:
        return run("slicing", stages.choose, costs, asked.pipeline, counts, room, rough=True, names=settling.HIDING)

    def work_out(costs: Priced, wanted: Sequence[Key], until: Deadline, must: bool) -> Priced:
        most = asked.options.solver_time_limit
        return run(
            "costs", stages.worked_out, costs, wanted, until, time_limit=most, must=must, progress=run.count
        )  # fmt: skip

    last = hiding if late else None
    return stages.settled(costs, choose, work_out, room, deadline, limit, must=must, hiding=last, enough=enough)


def fitting(staged: Staged, asked: Asked) -> Staged:
    """The pipeline itself, if it fits the budget.

    Raises:
      InfeasibleError: it does not.
    """
    if staged.needed > asked.budget:
        worst = int(np.argmax(list(map(sum, staged.bytes))))
        raise InfeasibleError(
            f"memory_per_device={units.exact_bytes(asked.budget)} is too small: the pipeline of {len(staged.stages)} "
            f"stages needs {units.exact_bytes(staged.needed)} per device on submesh {worst}; allow more memory, more "
            "micro-batches or more stages",
            staged.needed,
        )
    return staged
