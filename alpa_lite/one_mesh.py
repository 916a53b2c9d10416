"""One mesh: the whole step as one executable on all devices, with a loop over micro-batches in it where that pays.

Where nothing but the fastest plan is asked for, textbook plans are evaluated first (`textbook_first`): the search
begins with the best of them, so that its plan is never slower than any, however little time there is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alpa_lite import textbook_first
from alpa_lite.analysed import Analyse, Analysed
from alpa_lite.asked import Asked, Step
from alpa_lite.cluster import Cluster
from alpa_lite.passes import factors, microbatches, programs, sharding
from alpa_lite.passes.layers.division import divisible, recomputing
from alpa_lite.passes.layers.remat import NOTHING
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.programs import ways
from alpa_lite.passes.programs.staged import Staged, Verdict, noted
from alpa_lite.passes.programs.ways import Chosen, Outcome, Way
from alpa_lite.passes.sharding import search, worth
from alpa_lite.passes.sharding.lessons import Lessons
from alpa_lite.passes.sharding.tables import Shared
from alpa_lite.passes.stages import planning, staging
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.runner import Passes
from alpa_lite.textbook_first import TextbookPlans

MAX_LAYERS = 72
"""The most layers that a forward pass is cut into: 64 parts of repeated blocks, and what is before and behind them."""


@dataclass(frozen=True, eq=False)
class Decided:
    """A way to run the step, with its layouts.

    Attributes:
      way: micro-batches, and what is computed again.
      loop: the step so.
      stage: all of it, with the strategy of every group.
    """

    way: Way
    loop: Accumulated
    stage: DecidedStage


def best(run: Passes, step: Step, asked: Asked, *, must: bool = True) -> Staged:
    """The step as one executable; micro-batches, and what is computed again, only save memory there.

    Args:
      must: whether to go on without time until something fits.

    Raises:
      InfeasibleError: nothing fits.
      OutOfTime: without `must`, nothing that fits was found in the time.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
    """
    found = chosen(run, step, asked, must=must)
    late = [f"{asked.ran_out}: {way} was not searched" for way in found.late]
    return noted(lowered(run, asked, found.value), *found.notes, *late)


def chosen(run: Passes, step: Step, asked: Asked, *, must: bool = True) -> Chosen[Decided]:
    """The best way, not lowered yet. As `best`."""
    analyse = functools.cache(functools.partial(analysed, run, step, asked))
    known = textbook_first.evaluated(run, step, asked, analyse) if textbook_first.applies(asked) else None
    plans = {} if known is None else known.plans
    start = None if known is None else begun(run, asked, analyse, known)
    floor = numbers.state_bytes(step.traced) / asked.cluster.num_devices
    return ways.best(
        functools.partial(decided, run, asked, analyse, plans), asked.remat, asked.num_microbatches,
        floor=floor, budget=asked.budget, deadline=asked.deadline, must=must, start=start,
    )  # fmt: skip


def analysed(run: Passes, step: Step, asked: Asked, way: Way) -> Analysed:
    """The step as a way runs it, grouped.

    Raises:
      MicrobatchError: it cannot be cut into as many micro-batches.
    """
    loop, layers = looped(run, step, asked, way)
    traced, rules = loop.traced, step.rules
    if traced is not step.traced:
        rules = run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values)
    groups = run("grouping", sharding.group, traced, rules)
    return Analysed(way, loop, layers, rules, groups, Shared(traced, groups))


def begun(run: Passes, asked: Asked, analyse: Analyse, known: TextbookPlans) -> ways.Start[Decided]:
    """The best textbook plan, as what the search of ways begins with."""
    way = known.best
    about = analyse(way)
    found = run(
        "sharding", search.unsearched, about.loop.traced, about.groups, asked.cluster, asked.method,
        budget=asked.budget, known=known.plans[way], shared=about.shared, settled=about.settled(asked.cluster),
    )  # fmt: skip

    def go_on() -> Outcome[Decided]:
        return decided(run, asked, analyse, known.plans, way, math.inf, Lessons())

    return way, outcome(about, asked.cluster, found, go_on)


def decided(
    run: Passes, asked: Asked, analyse: Analyse, plans: Mapping[Way, Sequence[search.Plain]], way: Way, cutoff: float,
    lessons: Lessons,
) -> Outcome[Decided]:  # fmt: skip
    """The layouts of the whole step as one stage, on the best mesh of all devices within the budget.

    Args:
      plans: those that are known, by their ways.

    Raises:
      InfeasibleError: no mesh fits. Beaten: with a cutoff, no plan below it was found.
      MicrobatchError: the step cannot be cut into as many micro-batches.
    """
    about = analyse(way)

    def going_on(found: search.Found) -> Outcome[Decided]:
        rest = None if found.rest is None else functools.partial(go_on, found.rest)
        return outcome(about, asked.cluster, found, rest)

    def go_on(rest: search.Rest) -> Outcome[Decided]:
        return going_on(run("sharding", rest, asked.deadline))

    return going_on(
        run(
            "sharding", search.search, about.loop.traced, about.groups, about.rules, asked.cluster, asked.method,
            budget=asked.budget, pins=asked.pins, wishes=asked.wishes, time_limit=asked.time_limit,
            deadline=asked.deadline, cutoff=cutoff, lessons=lessons, known=plans.get(way, ()), shared=about.shared,
            progress=run.count, settled=about.settled(asked.cluster),
        )
    )  # fmt: skip


def outcome(
    about: Analysed, cluster: Cluster, found: search.Found, rest: Callable[[], Outcome[Decided]] | None
) -> Outcome[Decided]:  # fmt: skip
    """What was found of a way, with what is left to be searched of it."""
    stage = DecidedStage(
        staging.whole(about.loop.traced, about.loop.scan), about.rules, about.groups, found, cluster
    )  # fmt: skip
    seconds = about.settled(cluster)(found)
    value = Decided(about.way, about.loop, stage)
    return Outcome(value, seconds, found.free, about.layers, found.mesh, found.bounds, rest)


def lowered(run: Passes, asked: Asked, way: Decided) -> Staged:
    """The program of the best way, with what the user's own shardings cost it."""
    stage, found = way.stage, way.stage.found
    traced, costs = way.loop.traced, ()
    if worth.items(traced, asked.wishes):
        costs = run(
            "constraints", worth.worth, traced, stage.grouping, stage.rules, asked.cluster, asked.method, found,
            budget=asked.budget, pins=asked.pins, wishes=asked.wishes, time_limit=asked.time_limit,
        )  # fmt: skip
    planned = run("lowering", planning.lowered_whole, stage, asked.options.communication)
    solution = found.solution
    verdict = Verdict("step", solution.status, solution.objective, solution.bound, found.candidates)
    late = [candidate.mesh_shape for candidate in found.candidates if candidate.status == search.LATE]
    if late:
        costs = (*costs, f"{asked.ran_out}: meshes of {', '.join(map(str, late))} were not searched")
    staged = run("programs", programs.single, way.loop, planned, verdict, str(way.way.remat))
    return noted(staged, *costs)


def looped(run: Passes, step: Step, asked: Asked, way: Way) -> tuple[Accumulated, int]:
    """The step as one mesh runs it, with several micro-batches a loop over them, and the number of its layers.

    What computes forward values again does so in the body of a loop, be it of one micro-batch. Layers are counted only
    there.
    """
    if way == Way():
        return Accumulated(step.traced, -1, 1, ()), 0
    loop = run(
        "micro-batches", microbatches.accumulate, step.traced, step.rules, way.count, strided=True, **asked.inexact
    )  # fmt: skip
    if way.remat == NOTHING:
        return loop, 0
    layers = run("layers", divisible, loop, max_layers=MAX_LAYERS)
    return run("layers", recomputing, layers, way.remat), len(layers.layering.layers)
