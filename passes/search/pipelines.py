"""Candidates of pipelines: all of them, those of each number of micro-batches, and slices of their sequences.

All pipelines are expanded by pricing the step's layers at one number of micro-batches (`search.pipeline_analysis`, with
the bound), those of a number by choosing stages with the DP, at scaled costs where that has the same layers and at its
own else, and planning them.

Memory. The DP reads sums over layers. Where planned stages exceed the budget, their excess is added to the costs of
their layers (`LayerCosts.beyond`), and the candidate waits again with the DP's next choice, `MAX_DIVISIONS` times.

Slices of the sequence (token-level pipelines) follow from a planned pipeline. A proposal follows from a fitted model of
latency, and is an estimate. Each expansion plans and simulates one slicing, fits the model again, and opens the next
proposal, `MAX_SLICINGS` at most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import AlpaLiteError, InfeasibleError, MicrobatchError, OptionError
from alpa_lite.ir.program import Program
from alpa_lite.options import Auto
from alpa_lite.passes import stages
from alpa_lite.passes.programs import token_samples
from alpa_lite.passes.programs.staged import Staged, add_notes
from alpa_lite.passes.search.best_first import LAYER_PER_OP, STAGE_DP, STAGE_PER_OP, Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import ExecutionConfig
from alpa_lite.passes.search.one_mesh import LAST, OneMeshSearch
from alpa_lite.passes.search.pipeline_analysis import REFUSALS, PipelineAnalyses, found_plan
from alpa_lite.passes.stages.choosing import CERTAIN, StagePlan
from alpa_lite.passes.stages.pricing import LayerCosts
from alpa_lite.passes.tokens import lengths as choice
from alpa_lite.passes.tokens.lengths import Proposal, Sample
from alpa_lite.report import units

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

EXPECTED_OVERHEAD = 0.1  # estimated share added to computing: bubble, transfers, and communication in stages
MAX_DIVISIONS = 3  # that are planned for a number of micro-batches, each with the excess of those before in its costs

# Slices:
MIN_IDLE = 0.03  # slices are searched if the devices are idle for more than this fraction of the step
MAX_MICROBATCHES = 16  # `Auto` searches slices with at most this many: with more, a pipeline is idle for little
SLICES = 8  # of a sequence, for which stages are chosen: these balance better, the more runs they are chosen for
MAX_SLICINGS = 5  # slicings that are planned and simulated at most
MODEL_ERROR = 0.04  # the share by which the model may overestimate the seconds of a proposal
WHOLE = "token_slices: whole sequences"


class PipelineSearch:
    """Candidates of pipelines, and the state that they share.

    Attributes:
      found: planned pipelines of whole sequences. slicings: of those in slices. errors: why others cannot be planned.
      estimates: of the best pipeline with each number of micro-batches, in seconds, by sums over layers.
    """

    def __init__(self, run: Passes, step: Step, request: PlanRequest, one_mesh: OneMeshSearch | None) -> None:
        """`one_mesh`: the search of plans of one mesh, which are no pipelines; None if the method admits none."""
        self.analyses = PipelineAnalyses(run, step, request, one_mesh)
        self.found: list[FoundPlan] = []
        self.slicings: list[SliceSearch] = []
        self.errors: list[AlpaLiteError] = []
        self.estimates: list[float] = []
        self._planned: set[tuple[Any, ...]] = set()
        self._ratios: list[float] = []  # of planned to estimated seconds

    @property
    def root(self) -> Candidate:
        """All pipelines, after one mesh."""
        return Candidate("pipelines", (2, 1, 0), (2, 0), self.estimate, self._expand)

    def estimate(self) -> tuple[float, float]:
        """Returns the bound in seconds, and the computing of one mesh with the overhead of a pipeline."""
        bound = self.analyses.bound
        computing = self.analyses.one_mesh.compute_seconds() if self.analyses.one_mesh else 0.0
        return bound, max(bound, computing) * (1 + EXPECTED_OVERHEAD)

    def fit_or_explain(self) -> FoundPlan:
        """Returns the pipeline of the least memory, where the search found none that fits.

        Raises:
          AlpaLiteError: why it does not fit either, or why there is no pipeline.
        """
        own, budget = self.analyses, self.analyses.request.budget
        is_short = any(isinstance(e, InfeasibleError) and e.smallest_budget is not None for e in self.errors)
        best = self._least_memory() if is_short else None
        if best is not None and best.needed <= budget:
            return found_plan(best)
        refusals = [exceeds_budget(best, budget)] if best is not None else self.errors
        error = refusals[0] if refusals else InfeasibleError("the step has no pipeline")
        if isinstance(error, InfeasibleError) and own.request.num_microbatches is None:
            tried = f"up to {max(own.counts)} micro-batches were tried, num_microbatches takes others"
            raise InfeasibleError(f"{error}; {tried}", error.smallest_budget)
        raise error

    def _least_memory(self) -> Staged | None:
        """The first pipeline that fits, else that of the fewest bytes, each of the fewest by the costs of its layers.

        Built for a budget of nothing, so that it does not depend on the budget, and works when that is given.
        """
        own, best = self.analyses, None
        for count in reversed(own.counts):
            try:
                costs = own.price(own.reference, own.kinds)
                try:
                    chosen = own.choose(costs, count, 1.0)
                except InfeasibleError as error:
                    chosen = own.choose(costs, count, (error.smallest_budget or math.inf) * (1 + 1e-9))
                anew = PipelineAnalyses(own.run, own.step, own.request.with_budget(1), own.one_mesh)
                staged = anew.build(chosen, own.request.pipeline.lengths)
            except AlpaLiteError:
                continue
            best = staged if best is None or staged.needed < best.needed else best
            if best.needed <= own.request.budget:
                break
        return best

    def _tried(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Returns the value of a function; None if it refuses, with the error among those of the search."""
        try:
            return function(*args, **kwargs)
        except REFUSALS as error:
            self.errors.append(error)
            return None

    def _expect(self, seconds: float) -> float:
        """The least seconds that a planned pipeline is expected to take whose layers are estimated to take some.

        Planned pipelines differ from their estimates for reasons that others share, such as communication that hides.
        """
        return (1 - CERTAIN) * min(self._ratios, default=1.0) * seconds

    def _expand(self, cutoff: float) -> Expansion:
        """Returns one candidate for each number of micro-batches, by the DP over equal submeshes at scaled costs."""
        own, out = self.analyses, list[Candidate]()
        costs = self._tried(lambda: own.price(own.reference, own.kinds) if own.kinds else None)
        if costs is None:
            return Expansion()
        for count in own.counts:
            rough = self._tried(own.choose_or_least, costs, count, rough=True)
            if rough is not None:
                self.estimates.append(rough[0].seconds)
            elif isinstance(self.errors[-1], OptionError):
                continue
            late = cutoff if math.isfinite(cutoff) else LAST  # unequal submeshes, or other schedules, may fit
            out.append(self._of_count(count, costs, late if rough is None else rough[0].seconds))
        return Expansion(out, work=LAYER_PER_OP * costs.num_ops + STAGE_DP * len(own.counts))

    def _of_count(self, count: int, costs: LayerCosts, seconds: float, attempt: int = 0) -> Candidate:
        """Returns all pipelines with a number of micro-batches, by the costs of layers at this number or another one.

        `seconds` estimates the best of them. `attempt` divisions were planned, and exceeded the budget.
        """
        bound, name = self.analyses.bound, f"pipelines of {ExecutionConfig(count)}"
        expand = partial(self._choose, count, costs, attempt)
        return Candidate(
            name, (2, count, 0), (2, 1, count), lambda: (bound, max(bound, self._expect(seconds))), expand
        )  # fmt: skip

    def _choose(self, count: int, costs: LayerCosts, attempt: int, cutoff: float) -> Expansion:
        """Returns the same at costs of its own; or the planned pipeline of the DP's stages, and its slices."""
        own, parts = self.analyses, Expansion()
        found = self._tried(own.choose_or_least, costs, count)
        if found is not None and self._expect(found[0].seconds) < cutoff:
            chosen, room = found
            suited = chosen if count == costs.num_microbatches else own.rescaled(chosen, count)
            parts = self._plan(suited, room, costs, attempt) if suited else self._price(count, costs, chosen, attempt)
        return replace(parts, bound=own.bound, work=STAGE_DP + parts.work)

    def _price(self, count: int, costs: LayerCosts, rough: StagePlan, attempt: int) -> Expansion:
        """The same with layers priced at this number of micro-batches, on the sizes of submeshes that the DP chose."""
        own, work = self.analyses, 0
        for kinds in dict.fromkeys((tuple(sorted(set(rough.slices.devices))), own.kinds)):
            exact = self._tried(own.price, count, kinds)
            work += LAYER_PER_OP * exact.num_ops if exact else 0
            if exact and (found := self._tried(own.choose_or_least, exact, count)):
                exact = replace(exact, beyond=costs.beyond)
                return Expansion([self._of_count(count, exact, found[0].seconds, attempt)], work=work)
        return Expansion(work=work)

    def _plan(self, chosen: StagePlan, room: float, costs: LayerCosts, attempt: int) -> Expansion:
        """The planned pipeline of chosen stages, and its slices; others at higher costs, if it exceeds the budget."""
        own, count, request = self.analyses, chosen.slices.num_microbatches, self.analyses.request
        budget, lengths = request.budget, request.pipeline.lengths
        slices, work = chosen.slices, STAGE_PER_OP * sum(1 for _ in own.step.traced.graph.ops())
        key = count, slices.schedule, slices.virtual, slices.stages
        if key in self._planned:
            return Expansion()
        self._planned.add(key)
        staged = self._tried(own.build, chosen, lengths)
        if staged is None:
            return Expansion(work=work)
        if staged.needed > budget:
            self.errors.append(exceeds_budget(staged, budget))
            if attempt + 1 >= MAX_DIVISIONS:
                return Expansion(work=work)
            logger.info("the pipeline exceeds the budget by %s", units.nbytes(staged.needed - budget))
            costs = replace(costs, beyond=excess(costs.beyond, chosen, staged, room, budget))
            return Expansion([self._of_count(count, costs, chosen.seconds, attempt + 1)], work=work)
        self._ratios.append(staged.seconds / chosen.seconds)
        slicings, notes = open_slices(own, chosen, staged)
        staged = add_notes(staged, *notes) if notes else staged
        other = self._tried(plan_lengths, own, chosen, lengths) if lengths else None
        plans = [found_plan(one) for one in (staged, other) if one is not None and one.needed <= budget]
        self.found += plans
        self.slicings += slicings
        return Expansion([first for one in slicings for first in one.first()], plans, work=work)


def excess(
    beyond: Mapping[tuple[int, int], float], chosen: StagePlan, staged: Staged, room: float, budget: float
) -> dict[tuple[int, int], float]:  # fmt: skip
    """Returns bytes by which stages exceed the costs of their layers, as in `LayerCosts.beyond`: known ones, and these.

    `room`: bytes that they were chosen for. Stages that exceed the budget exceed it, too, from now on.
    """
    found, slices = dict(beyond), chosen.slices
    for stage in slices.stages:
        needed, estimated = sum(staged.bytes[stage.mesh]), slices.bytes[stage.mesh]
        size = room - estimated + (1 + CERTAIN) * (needed - budget) if needed > budget else needed - estimated
        for layer in range(stage.first, stage.stop):
            key = layer, slices.devices[stage.mesh]
            found[key] = found.get(key, 0.0) + max(size, 0.0)
    return found


def exceeds_budget(staged: Staged, budget: float) -> InfeasibleError:
    """Returns the error of a planned pipeline that does not fit."""
    worst = int(np.argmax(list(map(sum, staged.bytes))))
    return InfeasibleError(
        f"memory_per_device={units.exact_bytes(budget)} is {units.exact_bytes(staged.needed - budget)} short: the "
        f"pipeline of {len(staged.stages)} stages needs {units.exact_bytes(staged.needed)} per device on submesh "
        f"{worst}; allow more memory, more micro-batches or more stages",
        staged.needed,
    )


@dataclass(eq=False)
class SliceSearch:
    """Candidates in slices of one set of stages, and the state that they share.

    Attributes:
      chosen: stages for slices, of which `SLICES` make up a micro-batch.
      whole: the pipeline of whole sequences. idle: the share of a step for which devices do not compute in it.
      samples: of the model of seconds. program: planned last. tokens: of a sequence, once one is planned.
      tried: number of micro-batches, and lengths -> why these cannot be planned, if they cannot.
    """

    analyses: PipelineAnalyses
    chosen: StagePlan
    whole: Staged
    idle: float
    samples: list[Sample] = field(default_factory=list)
    program: Program | None = None
    tokens: int = 0
    tried: dict[tuple[int, tuple[int, ...]], str] = field(default_factory=dict)
    found: list[FoundPlan] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of micro-batches of whole sequences."""
        return self.whole.program.num_microbatches

    def first(self) -> list[Candidate]:
        """Returns the slicing that tells most about the model, for each number of tokens that a sequence may have."""
        cluster = self.analyses.request.cluster
        seconds = self.whole.seconds * (1 - self.idle)
        sizes = choice.sizes(self.chosen.priced.step.accumulated.traced)
        slicings = [choice.first(tokens, choice.step_of(tokens, cluster.platform)) for tokens in sizes]
        return [self._candidate(Proposal(self.count, some, seconds), 0.0) for some in slicings if len(some) > 1]

    def _next(self) -> list[Candidate]:
        """Returns the fastest proposal that was not tried."""
        if len(self.tried) >= MAX_SLICINGS or self.program is None:
            return []
        own, cluster = self.analyses, self.analyses.request.cluster
        model = own.run("slices", choice.fit_latency, self.samples)
        step = choice.step_of(self.tokens, cluster.platform)
        fewer = [n for n in own.counts if n <= self.count]
        dispatch = token_samples.dispatch_seconds(self.program, cluster)
        found = own.run("slices", choice.propose_slices, model, self.tokens, fewer, step, dispatch)
        new = [one for one in found if (one.microbatches, one.lengths) not in self.tried]
        new.sort(key=lambda one: (one.seconds, one.microbatches, one.lengths))
        return [self._candidate(best, model.error) for best in new[:1]]

    def _candidate(self, proposal: Proposal, error: float) -> Candidate:
        """Returns one slicing of the stages, after whole sequences; estimated by the model, less its error."""
        count, lengths, bound = proposal.microbatches, proposal.lengths, self.analyses.bound
        name = f"slices of {', '.join(map(str, lengths))} tokens, {count} at once"
        estimate = bound, max(bound, (1 - MODEL_ERROR) * proposal.seconds)
        kind, key = (len(self.whole.stages), count, 0), (3, count, len(lengths), *lengths)
        return Candidate(name, kind, key, lambda: estimate, lambda _: self._expand(count, lengths, error))

    def _expand(self, count: int, lengths: tuple[int, ...], error: float) -> Expansion:
        """Returns the planned slicing, and the next proposal. `error`: of the model of seconds that proposed it."""
        own, whole, tokens = self.analyses, self.whole, sum(lengths)
        if (count, lengths) in self.tried or self.tokens not in (0, tokens):
            return Expansion()
        self.tried[count, lengths] = ""
        work = STAGE_PER_OP * sum(1 for _ in whole.traced.graph.ops()) * len(lengths) // 2
        plans: list[FoundPlan] = []
        try:
            suited = own.rescaled(self.chosen, count)
            if suited is None:
                raise MicrobatchError(f"with {count} micro-batches the step has other layers")
            staged = own.build(suited, lengths)
        except REFUSALS as refused:
            logger.info("slices of %s tokens, %d at once: %s", lengths, count, refused)
            self.tried[count, lengths] = str(refused).split("]: ", 1)[-1].rsplit(";", 1)[0]
        else:
            self.tokens, self.program = tokens, staged.program
            self.samples += token_samples.samples(staged.program, lengths)
            if staged.needed <= own.request.budget:
                note = (
                    f"token_slices: chosen for {staged.seconds:.4g} s instead of {whole.seconds:.4g} s with "
                    f"{ExecutionConfig(self.count)} of whole sequences, {whole.seconds / staged.seconds:.2f} times as "
                    f"fast; the model of seconds that proposed them misses planned slices by {error:.1%} at most"
                )
                plans = [found_plan(add_notes(staged, note))]
                self.found += plans
        return Expansion(self._next(), plans, own.bound, work)


def open_slices(
    analyses: PipelineAnalyses, chosen: StagePlan, whole: Staged
) -> tuple[list[SliceSearch], list[str]]:  # fmt: skip
    """The search for slices of a planned pipeline's sequences, if any; and a note why there is none, if it was asked.

    Args:
      chosen, whole: the stages as they were chosen, and planned.
    """
    request, slices = analyses.request, chosen.slices
    sizes = choice.sizes(analyses.step.traced)
    tile = choice.TILE.get(request.cluster.platform, choice.TILE_ELSEWHERE)
    short = analyses.counts[-1] > MAX_MICROBATCHES or max(sizes, default=0) < choice.FEWEST * tile
    if request.pipeline.token_slices != "auto" or (isinstance(request.base, Auto) and short):
        return [], []
    if request.pipeline.schedule == "zb-h1":
        return [], [f"{WHOLE}: zb-h1 computes gradients of parameters apart, which slices do not"]
    if not sizes:
        return [], [f"{WHOLE}: no argument of the batch has a sequence"]
    pairs = zip(whole.division.timeline.busy, whole.program.submeshes, strict=True)
    busy = sum(busy * submesh.mesh.size for busy, submesh in pairs)
    idle = 1 - busy / (request.cluster.num_devices * whole.seconds)  # of all devices, unused ones included
    if idle < MIN_IDLE:
        return [], [f"{WHOLE}: devices are idle for {idle:.1%} of the step"]
    runs = SLICES * slices.num_microbatches
    try:
        suited = _balance(analyses, chosen, runs)
    except InfeasibleError:
        schedule = "1f1b" if slices.schedule == "zb-h1" else slices.schedule
        suited = replace(chosen, slices=replace(slices, schedule=schedule, num_microbatches=runs))
    return [SliceSearch(analyses, suited, whole, idle)], []


def plan_lengths(analyses: PipelineAnalyses, chosen: StagePlan, lengths: tuple[int, ...]) -> Staged:
    """Returns the pipeline of stages that suit slices of given lengths; raises one of `REFUSALS` if there is none."""
    count = chosen.slices.num_microbatches
    suited = _balance(analyses, chosen, count * len(lengths))
    return analyses.build(replace(suited, slices=replace(suited.slices, num_microbatches=count)), lengths)


def _balance(analyses: PipelineAnalyses, chosen: StagePlan, runs: int) -> StagePlan:
    """Returns stages for a number of runs at the same costs without latencies, which the choice of slices counts.

    Gradients of parameters are not computed apart in slices.
    """
    method = analyses.request.pipeline
    method = replace(method, schedule="1f1b") if method.schedule == "auto" else method
    free = chosen.priced.without_latency()
    suited = analyses.run("slicing", stages.choose, free, method, [runs], analyses.request.budget)
    return replace(suited, priced=chosen.priced)
