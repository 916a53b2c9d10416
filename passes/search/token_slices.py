"""Candidates in slices of the sequence (token-level pipelines): stages of a pipeline, and the lengths of its slices.

    stages ──a few slices──▶ planned, simulated ──latency──▶ seconds of any slice ──choice──▶ proposals
         ──▶ planned, simulated ──▶ further samples

A proposal follows from a fitted model of latency, and is an estimate. Each expansion plans one slicing, fits the model
again, and opens the next proposal, `ATTEMPTS` at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.asked import PlanRequest
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError, OrderError
from alpa_lite.graph import Traced
from alpa_lite.options import Auto
from alpa_lite.passes.layers.division import Divisible
from alpa_lite.passes.programs import token_samples
from alpa_lite.passes.programs.staged import Staged, noted
from alpa_lite.passes.search import budget as work_units
from alpa_lite.passes.search.analysis import Run
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan, Key, Kind
from alpa_lite.passes.stages import token_choice as choice
from alpa_lite.passes.stages import token_latency as latency
from alpa_lite.passes.stages.choosing import StagePlan
from alpa_lite.passes.stages.token_choice import Proposal
from alpa_lite.passes.stages.token_latency import Sample
from alpa_lite.program import Program

logger = logging.getLogger(__name__)

MIN_IDLE = 0.03
"""Slices are searched if the devices are idle for more than this fraction of the step."""

MAX_MICROBATCHES = 16
"""`Auto` searches slices if the batch has at most so many micro-batches: with more, a pipeline is idle for little."""

SLICES = 8
"""The slices of a sequence for which stages are chosen: these balance better, the more runs they are chosen for."""

ATTEMPTS = 5
"""Slicings that are planned and simulated at most."""

MODEL_ERROR = 0.04
"""The share by which the model may overestimate the seconds of a proposal."""

WHOLE = "token_slices: whole sequences"
REFUSALS = InfeasibleError, MicrobatchError, OptionError, OrderError
"""Errors of stages or slices that cannot be planned."""

Build = Callable[[StagePlan, tuple[int, ...]], Staged]
"""Plans stages in slices of some lengths."""


def refusal(traced: Traced, request: PlanRequest, counts: Sequence[int]) -> str | None:
    """Why no slices are searched: None if they are, a note, or an empty one where nobody has asked for them."""
    if request.pipeline.token_slices != "auto":
        return ""
    sizes = choice.sizes(traced)
    tile = choice.TILE.get(request.cluster.platform, choice.TILE_ELSEWHERE)
    if isinstance(request.base, Auto) and (
        counts[-1] > MAX_MICROBATCHES or max(sizes, default=0) < choice.FEWEST * tile
    ):
        return ""
    if request.pipeline.schedule == "zb-h1":
        return f"{WHOLE}: zb-h1 computes gradients of parameters apart, which slices do not"
    return None if sizes else f"{WHOLE}: no argument of the batch has a sequence"


def idle_fraction(staged: Staged, num_devices: int) -> float:
    """The fraction of a step for which devices do not compute, unused ones included."""
    pairs = zip(staged.timeline.busy, staged.program.submeshes, strict=True)
    return 1 - sum(busy * submesh.mesh.size for busy, submesh in pairs) / (num_devices * staged.seconds)


@dataclass(eq=False)
class SliceSearch:
    """The state that slicings of one set of stages share.

    Attributes:
      chosen: stages for slices, of which `SLICES` make up a micro-batch.
      counts: numbers of micro-batches that there may be.
      cut: the step in layers with a number of micro-batches.
      build: plans stages in slices.
      whole: the pipeline of whole sequences.
    """

    run: Run
    request: PlanRequest
    chosen: StagePlan
    counts: Sequence[int]
    cut: Callable[[int], Divisible]
    build: Build
    whole: Staged
    bound: float
    samples: list[Sample] = field(default_factory=list)
    program: Program | None = None
    tokens: int = 0
    tried: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    found: list[FoundPlan] = field(default_factory=list)
    error: float = 0.0

    def first(self) -> list[Candidate]:
        """The slicing that tells most about the model, for each number of tokens that a sequence may have."""
        count = self.chosen.slices.num_microbatches // SLICES
        platform, idle = self.request.cluster.platform, idle_fraction(self.whole, self.request.cluster.num_devices)
        if idle < MIN_IDLE:
            return []
        priority = self.whole.seconds * (1 - idle)
        out: list[Candidate] = []
        for tokens in choice.sizes(self.chosen.priced.step.accumulated.traced):
            lengths = choice.first(tokens, choice.step_of(tokens, platform))
            if len(lengths) > 1:
                out.append(Slicing(self, Proposal(count, lengths, priority), tokens))
        return out

    def next(self) -> list[Candidate]:
        """The fastest proposal that was not tried."""
        if len(self.tried) >= ATTEMPTS or self.program is None:
            return []
        model = self.run("slices", latency.fitted, self.samples)
        self.error = model.error
        step = choice.step_of(self.tokens, self.request.cluster.platform)
        fewer = [n for n in self.counts if n <= self.chosen.slices.num_microbatches // SLICES]
        dispatch = token_samples.dispatch_seconds(self.program, self.request.cluster)
        found = self.run("slices", choice.proposed, model, self.tokens, fewer, step, dispatch)
        for proposal in sorted(found, key=lambda one: (one.seconds, one.microbatches, one.lengths)):
            if (proposal.microbatches, proposal.lengths) not in self.tried:
                return [Slicing(self, proposal, self.tokens)]
        return []


@dataclass(frozen=True, eq=False)
class Slicing:
    """One slicing of the stages."""

    search: SliceSearch
    proposal: Proposal
    tokens: int

    @property
    def name(self) -> str:
        """The slices and micro-batches."""
        return f"slices of {', '.join(map(str, self.proposal.lengths))} tokens, {self.proposal.microbatches} at once"

    @property
    def kind(self) -> Kind:
        """A pipeline of so many stages."""
        return (len(self.search.whole.stages), self.proposal.microbatches, 0)

    @property
    def key(self) -> Key:
        """After whole sequences."""
        return (3, self.proposal.microbatches, len(self.proposal.lengths), *self.proposal.lengths)

    def estimate(self) -> tuple[float, float]:
        """The bound of pipelines, and the model less its error."""
        return self.search.bound, max(self.search.bound, (1 - MODEL_ERROR) * self.proposal.seconds)

    def expand(self, cutoff: float) -> Expansion:
        """The planned slicing, and the next proposal."""
        del cutoff
        search, proposal = self.search, self.proposal
        key = proposal.microbatches, proposal.lengths
        if key in search.tried or (search.tokens and search.tokens != self.tokens):
            return Expansion()
        search.tried.add(key)
        ops = sum(1 for _ in search.whole.traced.graph.ops())
        work = work_units.STAGE_PER_OP * ops * len(proposal.lengths) // 2
        try:
            staged = search.build(with_microbatches(search, proposal.microbatches), proposal.lengths)
        except REFUSALS as refused:
            logger.info("%s: %s", self.name, refused)
            search.reasons.append(str(refused).split("]: ", 1)[-1].rsplit(";", 1)[0])
            return Expansion(search.next(), bound=search.bound, work=work)
        search.tokens, search.program = self.tokens, staged.program
        search.samples += token_samples.samples(staged.program, proposal.lengths)
        plans = []
        if staged.needed <= search.request.budget:
            staged = noted(staged, self._gain(staged))
            plans = [FoundPlan(self.name, self.kind, staged.seconds, staged)]
            search.found += plans
        return Expansion(search.next(), plans, bound=search.bound, work=work)

    def _gain(self, staged: Staged) -> str:
        whole, error = self.search.whole, self.search.error
        count = whole.program.num_microbatches
        before = f"{whole.seconds:.4g} s with {count} micro-batch{'es' if count > 1 else ''} of whole sequences"
        gain = f"{whole.seconds / staged.seconds:.2f} times as fast"
        return (
            f"token_slices: chosen for {staged.seconds:.4g} s instead of {before}, {gain}; the model of seconds that "
            f"proposed them misses planned slices by {error:.1%} at most"
        )


def as_runs(chosen: StagePlan, slices_of_each: int) -> StagePlan:
    """Stages for whole sequences as if they had been chosen for so many slices of each."""
    slices = chosen.slices
    name = "1f1b" if slices.schedule == "zb-h1" else slices.schedule
    return replace(
        chosen, slices=replace(slices, schedule=name, num_microbatches=slices.num_microbatches * slices_of_each)
    )  # fmt: skip


def without_split(request: PlanRequest) -> PlanRequest:
    """The same for stages in slices, whose gradients of parameters are not computed apart."""
    method = request.pipeline
    method = replace(method, schedule="1f1b") if method.schedule == "auto" else method
    return replace(request, options=replace(request.options, method=method))


def with_microbatches(search: SliceSearch, count: int) -> StagePlan:
    """The same stages with another number of micro-batches.

    Raises:
      MicrobatchError: the step has other layers then.
    """
    step, chosen = search.cut(count), search.chosen
    if len(step.layering.layers) != len(chosen.priced.layers):
        raise MicrobatchError(f"with {count} micro-batches the step has other layers")
    slices = replace(chosen.slices, num_microbatches=count)
    return replace(chosen, priced=chosen.priced.rescaled(step), slices=slices)
