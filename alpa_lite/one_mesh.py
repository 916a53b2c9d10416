"""One mesh: the whole step as one executable on all devices, with a loop over micro-batches in it where that pays.

Where nothing but the fastest plan is asked for, textbook plans are evaluated first (`textbook_first`): the search
begins with the best of them, so that its plan is never slower than any (to `search.CLOSED`), however little time there
is.

A search that ran out of time can go on (`OneMesh.longer`): pipelines are searched in between.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite import textbook_first
from alpa_lite.analysed import Analyse, Analysed
from alpa_lite.asked import REPAID, Asked, Step
from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.figures import Comparison
from alpa_lite.passes import factors, microbatches, programs, sharding
from alpa_lite.passes.layers.division import Divisible, divisible, recomputing
from alpa_lite.passes.layers.remat import NOTHING
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.programs import ways
from alpa_lite.passes.programs.outcomes import Chosen, Outcome, Rest, Solve, Unfinished, Way, unknown
from alpa_lite.passes.programs.staged import Staged, Verdict, noted
from alpa_lite.passes.sharding import computing, search, worth
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.sharding.lessons import Lessons
from alpa_lite.passes.sharding.tables import Shared
from alpa_lite.passes.stages import planning, promise, staging
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.runner import Passes
from alpa_lite.strategy import Rule
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


@dataclass(frozen=True, eq=False)
class OneMesh:
    """The step as one executable, as far as that was searched.

    Attributes:
      chosen: the best way, not lowered yet; None if nothing that fits was found in the time.
      rest: the search goes on; None if all of it was searched.
      textbook: takes the best of textbook plans not evaluated yet, where it takes less than so many seconds; what was
        chosen before says what none undercuts.
    """

    chosen: Chosen[Decided] | None
    rest: Rest[Decided] | None
    textbook: Callable[[float, Chosen[Decided] | None], Chosen[Decided] | None]

    @property
    def whole(self) -> DecidedStage | None:
        """The plan."""
        return None if self.chosen is None else self.chosen.value.stage

    @property
    def seconds(self) -> float:
        """Predicted, of a step; `inf` if nothing was found."""
        return math.inf if self.chosen is None else self.chosen.seconds

    @property
    def figures(self) -> Comparison:
        """What stands beside a pipeline that is faster: its program would have the same seconds and bytes."""
        assert self.whole is not None
        found = self.whole.found
        return Comparison("one mesh", found.mesh.shape, self.seconds, math.ceil(found.solution.peak))

    def longer(self, deadline: Deadline, below: float = math.inf, *, must: bool = False) -> OneMesh:
        """The same after more time, and no slower than any textbook plan that takes less than `below` seconds.

        Raises:
          InfeasibleError: nothing fits. MicrobatchError: as of `searched`.
        """
        mesh = self
        if self.rest is not None:
            try:
                chosen = self.rest(deadline, below, must=must)
                mesh = replace(self, chosen=chosen, rest=chosen.rest)
            except Unfinished as error:
                mesh = replace(self, rest=error.rest)
            except InfeasibleError:
                chosen = self.textbook(below, None)
                if chosen is None:
                    raise
                return replace(self, chosen=chosen, rest=None)
        chosen = mesh.textbook(min(below, mesh.seconds), mesh.chosen)
        return mesh if chosen is None else replace(mesh, chosen=chosen)


def best(run: Passes, step: Step, asked: Asked) -> Staged:
    """The step as one executable; micro-batches, and what is computed again, only save memory there.

    Raises:
      InfeasibleError: nothing fits.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
    """
    return finished(run, asked, searched(run, step, asked).longer(asked.deadline, must=True))


def finished(run: Passes, asked: Asked, mesh: OneMesh) -> Staged:
    """The program of what was found."""
    assert mesh.chosen is not None
    return lowered(run, asked, mesh.chosen)


def searched(
    run: Passes, step: Step, asked: Asked, *, must: bool = True, kept: float = 0.0, first: bool = False
) -> OneMesh:  # fmt: skip
    """The best way, not lowered yet, and what the time did not allow.

    Args:
      must: whether to go on without time until something fits.
      kept: seconds of the time that are for pipelines, unless none is hoped for beside what is found.
      first: whether the first plan is enough, where one is hoped for.

    Raises:
      InfeasibleError: nothing fits.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
    """
    ready: dict[Way, Analysed] = {}
    refused: dict[Way, MicrobatchError] = {}
    took: list[float] = []
    cut = cuts(run, step, asked)

    def analyse(way: Way) -> Analysed:
        if way in refused:
            raise refused[way]
        if way not in ready:
            start = time.perf_counter()
            try:
                ready[way] = analysed(run, step, cut, way)
            except MicrobatchError as error:
                refused[way] = error
                raise
            took.append(time.perf_counter() - start)
        return ready[way]

    known = TextbookPlans({}, None, ())
    if textbook_first.applies(asked):
        known = textbook_first.evaluated(run, step, asked, analyse)
    solve = functools.partial(decided, run, asked, analyse, known.plans)

    def elsewhere(seconds: float, computing_seconds: float) -> bool:
        """Whether a pipeline is hoped for, by what its products take, and what the plan of one mesh computes for."""
        if not asked.pipelines:
            return False
        about = analyse(Way(asked.num_microbatches or 1))
        values = about.loop.traced.graph.values
        products = computing.products_seconds(about.groups, about.rules, values, asked.cluster)
        return max(products, computing_seconds) < promise.HOPE * seconds

    def textbook(below: float, chosen: Chosen[Decided] | None) -> Chosen[Decided] | None:
        """Textbook plans in further ways."""
        found = known.below(below, unknown if chosen is None else chosen.known)
        if found is None:
            return None
        assert found.best is not None
        outcome = begun(run, asked, analyse, found, found.best, solve)
        return Chosen(outcome.value, outcome.seconds, (), ())

    start = None if known.best is None else (known.best, begun(run, asked, analyse, known, known.best, solve))
    floor = numbers.state_bytes(step.traced) / asked.cluster.num_devices
    try:
        chosen = ways.best(
            solve, asked.remat, asked.num_microbatches, floor=floor, budget=asked.budget, deadline=asked.deadline,
            must=must, start=start, ready=ready.__contains__,
            analysing=lambda: max(took, default=0.0), elsewhere=elsewhere, kept=kept, first=first,
        )  # fmt: skip
    except Unfinished as error:
        return OneMesh(None, error.rest, textbook)
    except InfeasibleError:
        chosen = textbook(math.inf, None)
        if chosen is None:
            raise
    return OneMesh(chosen, chosen.rest, textbook)


def analysed(run: Passes, step: Step, cut: Cuts, way: Way) -> Analysed:
    """The step as a way runs it, grouped.

    Raises:
      MicrobatchError: it cannot be cut into as many micro-batches.
    """
    loop, layers = looped(run, step, cut, way)
    traced = loop.traced
    if traced is step.traced:
        rules = step.rules
    elif way.remat == NOTHING:
        rules = cut.rules(way.count)
    else:
        rules = run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values)
    groups = run("grouping", sharding.group, traced, rules)
    return Analysed(way, loop, layers, rules, groups, Shared(traced, groups))


def begun(
    run: Passes, asked: Asked, analyse: Analyse, known: TextbookPlans, way: Way, solve: Solve[Decided]
) -> Outcome[Decided]:  # fmt: skip
    """The best textbook plan of a way, as what the search of ways begins with."""
    about = analyse(way)
    found = run(
        "sharding", search.unsearched, about.loop.traced, about.groups, asked.cluster, asked.method,
        budget=asked.budget, known=known.plans[way], shared=about.shared, settled=about.settled(asked.cluster),
    )  # fmt: skip

    def go_on(deadline: Deadline) -> Outcome[Decided]:
        return solve(way, math.inf, Lessons(), deadline)

    return outcome(about, asked.cluster, found, go_on)


def decided(
    run: Passes, asked: Asked, analyse: Analyse, plans: Mapping[Way, Sequence[search.Plain]], way: Way, cutoff: float,
    lessons: Lessons, deadline: Deadline,
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

    def go_on(rest: search.Rest, deadline: Deadline) -> Outcome[Decided]:
        return going_on(run("sharding", rest, deadline))

    return going_on(
        run(
            "sharding", search.search, about.loop.traced, about.groups, about.rules, asked.cluster, asked.method,
            budget=asked.budget, pins=asked.pins, wishes=asked.wishes,
            deadline=deadline, cutoff=cutoff, lessons=lessons, known=plans.get(way, ()), shared=about.shared,
            progress=run.count, settled=about.settled(asked.cluster),
        )
    )  # fmt: skip


def outcome(
    about: Analysed, cluster: Cluster, found: search.Found, rest: Callable[[Deadline], Outcome[Decided]] | None
) -> Outcome[Decided]:  # fmt: skip
    """What was found of a way, with what is left to be searched of it."""
    stage = DecidedStage(
        staging.whole(about.loop.traced, about.loop.scan), about.rules, about.groups, found, cluster
    )  # fmt: skip
    seconds = about.settled(cluster)(found)
    value = Decided(about.way, about.loop, stage)
    return Outcome(value, seconds, found.free, about.layers, found.mesh, found.bounds, rest, found.compute_seconds)


def lowered(run: Passes, asked: Asked, chosen: Chosen[Decided]) -> Staged:
    """The program of the best way, with why it is that and what the user's own shardings cost it."""
    way = chosen.value
    stage, found = way.stage, way.stage.found
    traced, costs = way.loop.traced, ()
    if worth.items(traced, asked.wishes):
        costs = run(
            "constraints", worth.worth, traced, stage.grouping, stage.rules, asked.cluster, asked.method, found,
            budget=asked.budget, pins=asked.pins, wishes=asked.wishes,
        )  # fmt: skip
    planned = run("lowering", planning.lowered_whole, stage, asked.options.communication)
    solution = found.solution
    verdict = Verdict("step", solution.status, solution.objective, solution.bound, found.candidates)
    staged = run("programs", programs.single, way.loop, planned, verdict, str(way.way.remat))
    return noted(staged, *costs, *chosen.notes, *_unsearched(asked, chosen))


def _unsearched(asked: Asked, chosen: Chosen[Decided]) -> Iterator[str]:
    """Notes on what was not searched, for want of time or since it could save too little."""
    candidates = chosen.value.stage.found.candidates
    for why, status, others in (asked.ran_out, search.LATE, chosen.late), (REPAID, search.LITTLE, chosen.little):
        meshes = [candidate.mesh_shape for candidate in candidates if candidate.status == status]
        if meshes:
            yield f"{why}: meshes of {', '.join(map(str, meshes))} were not searched"
        yield from (f"{why}: {way} was not searched" for way in others)


@dataclass(frozen=True, eq=False)
class Cuts:
    """The step in a number of micro-batches: a loop over them, its rules, and its layers. Each is made once."""

    loop: Callable[[int], Accumulated]
    rules: Callable[[int], Mapping[object, Rule]]
    layers: Callable[[int], Divisible]


def cuts(run: Passes, step: Step, asked: Asked) -> Cuts:
    """The step in any number of micro-batches, as one mesh runs them."""

    @functools.cache
    def loop(count: int) -> Accumulated:
        return run(
            "micro-batches", microbatches.accumulate, step.traced, step.rules, count, strided=True, **asked.inexact
        )  # fmt: skip

    @functools.cache
    def rules(count: int) -> Mapping[object, Rule]:
        graph = loop(count).traced.graph
        return run("factors", factors.rules_of, graph.ops(), graph.values)

    @functools.cache
    def layers(count: int) -> Divisible:
        return run("layers", divisible, loop(count), max_layers=MAX_LAYERS, rules=rules(count))

    return Cuts(loop, rules, layers)


def looped(run: Passes, step: Step, cut: Cuts, way: Way) -> tuple[Accumulated, int]:
    """The step as one mesh runs it, with several micro-batches a loop over them, and the number of its layers.

    What computes forward values again does so in the body of a loop, be it of one micro-batch. Layers are counted only
    there.
    """
    if way == Way():
        return Accumulated(step.traced, -1, 1, ()), 0
    if way.remat == NOTHING:
        return cut.loop(way.count), 0
    layers = cut.layers(way.count)
    return run("layers", recomputing, layers, way.remat), len(layers.layering.layers)
