"""Candidates of slices of the sequence: pipelines of tokens, on the stages of a planned pipeline of whole sequences.

A proposal follows from a fitted model of latency, and is an estimate. Each expansion plans and simulates one slicing,
fits the model again, and opens the next proposal, `MAX_SLICINGS` at most.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.ir.program import Program
from alpa_lite.options import Auto
from alpa_lite.passes import stages
from alpa_lite.passes.programs import token_samples
from alpa_lite.passes.programs.staged import Staged, add_notes
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import ExecutionConfig
from alpa_lite.passes.search.pipeline_analysis import REFUSALS, PipelineAnalyses, found_plan
from alpa_lite.passes.stages.choosing import StagePlan
from alpa_lite.passes.tokens import lengths as choice
from alpa_lite.passes.tokens.lengths import Proposal, Sample

logger = logging.getLogger(__name__)

MIN_IDLE = 0.03  # slices are searched if the devices are idle for more than this fraction of the step
MAX_MICROBATCHES = 16  # `Auto` searches slices with at most this many: with more, a pipeline is idle for little
SLICES = 8  # of a sequence, for which stages are chosen: these balance better, the more runs they are chosen for
MAX_SLICINGS = 5  # slicings that are planned and simulated at most
MODEL_ERROR = 0.04  # the share by which the model may overestimate the seconds of a proposal
WHOLE = "token_slices: whole sequences"


@dataclass(eq=False)
class SliceSearch:
    """Candidates in slices of one set of stages, and the state that they share.

    Attributes:
      chosen: stages for slices, of which `SLICES` make up a micro-batch.
      whole_pipeline: the pipeline of whole sequences. idle: the share of a step for which devices do not compute in it.
      samples: of the model of seconds. program: planned last. tokens: of a sequence, once one is planned.
      refusals: number of micro-batches, and lengths -> why these cannot be planned, if they cannot.
    """

    analyses: PipelineAnalyses
    chosen: StagePlan
    whole_pipeline: Staged
    idle: float
    samples: list[Sample] = field(default_factory=list)
    program: Program | None = None
    tokens: int = 0
    refusals: dict[tuple[int, tuple[int, ...]], str] = field(default_factory=dict)
    found_plans: list[FoundPlan] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of micro-batches of whole sequences."""
        return self.whole_pipeline.program.num_microbatches

    def first_slicings(self) -> list[Candidate]:
        """Returns the slicing that tells most about the model, for each number of tokens that a sequence may have."""
        cluster = self.analyses.request.cluster
        seconds = self.whole_pipeline.seconds * (1 - self.idle)
        sizes = choice.sizes(self.chosen.layer_costs.step.accumulated.traced)
        slicings = [choice.first(tokens, choice.step_of(tokens, cluster.platform)) for tokens in sizes]
        return [self._candidate(Proposal(self.count, some, seconds), 0.0) for some in slicings if len(some) > 1]

    def _next(self) -> list[Candidate]:
        """Returns the fastest proposal that was not tried."""
        if len(self.refusals) >= MAX_SLICINGS or self.program is None:
            return []
        own, cluster = self.analyses, self.analyses.request.cluster
        model = own.run("slices", choice.fit_latency, self.samples)
        step = choice.step_of(self.tokens, cluster.platform)
        fewer = [n for n in own.counts if n <= self.count]
        dispatch = token_samples.dispatch_seconds(self.program, cluster)
        found = own.run("slices", choice.propose_slices, model, self.tokens, fewer, step, dispatch)
        new = [one for one in found if (one.microbatches, one.lengths) not in self.refusals]
        new.sort(key=lambda one: (one.seconds, one.microbatches, one.lengths))
        return [self._candidate(best, model.error) for best in new[:1]]

    def _candidate(self, proposal: Proposal, error: float) -> Candidate:
        """Returns one slicing of the stages, after whole sequences; estimated by the model, less its error."""
        count, lengths, bound = proposal.microbatches, proposal.lengths, self.analyses.bound
        name = f"slices of {', '.join(map(str, lengths))} tokens, {count} at once"
        estimate = bound, max(bound, (1 - MODEL_ERROR) * proposal.seconds)
        kind, key = (len(self.whole_pipeline.stages), count, 0), (3, count, len(lengths), *lengths)
        expand = self.analyses.count_work(lambda _: self._expand(count, lengths, error))
        return Candidate(name, kind, key, lambda: estimate, expand)

    def _expand(self, count: int, lengths: tuple[int, ...], error: float) -> Expansion:
        """Returns the planned slicing, and the next proposal. `error`: of the model of seconds that proposed it."""
        own, whole, tokens = self.analyses, self.whole_pipeline, sum(lengths)
        if (count, lengths) in self.refusals or self.tokens not in (0, tokens):
            return Expansion()
        self.refusals[count, lengths] = ""
        plans: list[FoundPlan] = []
        try:
            suited = own.rescale(self.chosen, count)
            if suited is None:
                raise MicrobatchError(f"with {count} micro-batches the step has other layers; use another number")
            staged = own.build(suited, lengths)
        except REFUSALS as refused:
            logger.info("slices of %s tokens, %d at once: %s", lengths, count, refused)
            self.refusals[count, lengths] = str(refused).split("]: ", 1)[-1].rsplit(";", 1)[0]
        else:
            self.tokens, self.program = tokens, staged.program
            self.samples += token_samples.samples(staged.program, lengths)
            if staged.needed_bytes <= own.request.budget:
                note = (
                    f"token_slices: chosen for {staged.seconds:.4g} s instead of {whole.seconds:.4g} s with "
                    f"{ExecutionConfig(self.count)} of whole sequences, {whole.seconds / staged.seconds:.2f} times as "
                    f"fast; the model of seconds that proposed them misses planned slices by {error:.1%} at most"
                )
                plans = [found_plan(add_notes(staged, note))]
                self.found_plans += plans
        return Expansion(self._next(), plans, own.bound)


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
    pairs = zip(whole.division.timeline.busy_seconds, whole.program.submeshes, strict=True)
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
    free = chosen.layer_costs.without_latency()
    suited = analyses.run("slicing", stages.choose, free, method, [runs], analyses.request.budget)
    return replace(suited, layer_costs=chosen.layer_costs)
