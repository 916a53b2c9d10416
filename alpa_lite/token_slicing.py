"""Whether a pipeline's sequences are cut into slices, and how: `Pipeline(token_slices="auto")`.

    chosen stages ──a few slices──▶ planned, simulated ──latency──▶ seconds of any slice ──choice──▶ proposals
         ──▶ planned, simulated ──▶ the fastest that fits, whole sequences among them

The pipeline of whole sequences is planned in any case. What is proposed follows from a model, but what is taken is what
the simulator says of programs, so that a plan is never predicted to be slower than without slices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from alpa_lite.asked import Asked
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError, OrderError
from alpa_lite.graph import Traced
from alpa_lite.options import Auto
from alpa_lite.passes.layers.division import Divisible
from alpa_lite.passes.plans.comparing import beside
from alpa_lite.passes.programs import token_samples
from alpa_lite.passes.programs.staged import Staged, noted
from alpa_lite.passes.stages import token_choice as choice
from alpa_lite.passes.stages import token_latency as latency
from alpa_lite.passes.stages.choosing import Sliced
from alpa_lite.passes.stages.token_choice import Proposal
from alpa_lite.passes.stages.token_latency import Sample
from alpa_lite.program import Program
from alpa_lite.report import units
from alpa_lite.runner import Passes

logger = logging.getLogger(__name__)

WAITING = 0.03
"""Slices are searched if the devices wait, together, for more than this fraction of the step."""

FEW = 16
"""`Auto` searches slices if the batch has at most so many micro-batches: with more, a pipeline waits for little."""

SLICES = 8
"""In so many slices a sequence is for choosing the stages: these balance better, the more runs they are chosen for."""

ATTEMPTS = 4
"""How many slicings are planned and simulated at most, after the first, which says what slices take."""

SHARE = 0.5
"""The part of the time for searching that slices have, behind the pipeline of whole sequences."""

STAGES = 0.25
"""The part of that in which stages that suit slices are chosen."""

GRACE = 0.1
"""By what share of the limit slices may exceed it. It may be missed by more, since seconds are estimates."""

AFTER = 0.5
"""What writing and verifying a plan in slices takes beyond one of whole sequences, as a share of planning it."""

DOUBT = 0.04
"""A proposal is planned if it may be the fastest when it takes less than the model says, by this share of it."""

_WHOLE = "token_slices: whole sequences"
_REFUSED = InfeasibleError, MicrobatchError, OptionError, OrderError
"""What stages or slices raise that cannot be planned."""

Realise = Callable[[Passes, Sliced, Asked, tuple[int, ...]], Staged]
"""Plans chosen stages in slices of some lengths."""


@dataclass
class _Search:
    """What has been planned.

    Attributes:
      best: the fastest that fits; None if none does.
      samples: of every slice that was planned.
      program: of the slices that were planned last.
      took: seconds that planning one slice takes: what the whole sequence took, or of slicings the most.
      tried: micro-batches and lengths.
      late: proposals that may have been faster, and were not planned in the time.
    """

    run: Passes
    asked: Asked
    realise: Realise
    best: Staged | None
    samples: list[Sample] = field(default_factory=list)
    program: Program | None = None
    took: float = 0.0
    tried: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    late: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)

    def has_time(self, slices: int) -> bool:
        """Whether so many slices are planned in the time, and the plan of them, or of the best so far, is written.

        Whole sequences may have taken more than their part.
        """
        limit = self.asked.deadline
        left = limit.seconds - limit.spent + GRACE * self.asked.options.search_time_limit
        written = max(slices, len(self.best.token_slices) if self.best is not None else 0)
        return self.took * (slices + AFTER * written) <= left


def refusal(traced: Traced, asked: Asked, counts: Sequence[int]) -> str | None:
    """Why no slices are searched: None if they are, a note, or an empty one where nobody has asked for them."""
    if asked.pipeline.token_slices != "auto":
        return ""
    sizes = choice.sizes(traced)
    tile = choice.TILE.get(asked.cluster.platform, choice.TILE_ELSEWHERE)
    if isinstance(asked.base, Auto) and (counts[-1] > FEW or max(sizes, default=0) < choice.FEWEST * tile):
        return ""
    if asked.pipeline.schedule == "zb-h1":
        return f"{_WHOLE}: zb-h1 computes gradients of parameters apart, which slices do not"
    return None if sizes else f"{_WHOLE}: no argument of the batch has a sequence"


def without_split(asked: Asked) -> Asked:
    """The same for stages in slices, whose gradients of parameters are not computed apart."""
    method = asked.pipeline
    method = replace(method, schedule="1f1b") if method.schedule == "auto" else method
    return replace(asked, options=replace(asked.options, method=method))


def for_whole(asked: Asked) -> Asked:
    """What whole sequences are searched for, where slices are searched next."""
    return asked.within((1 - SHARE) * asked.deadline.left)


def for_stages(asked: Asked) -> Asked:
    """What stages that suit slices are searched for."""
    return asked.within(STAGES * asked.deadline.left)


def as_runs(chosen: Sliced, slices_of_each: int) -> Sliced:
    """Stages for whole sequences as if they had been chosen for so many slices of each."""
    slices = chosen.slices
    name = "1f1b" if slices.schedule == "zb-h1" else slices.schedule
    count = slices.num_microbatches * slices_of_each
    return replace(chosen, slices=replace(slices, schedule=name, num_microbatches=count))


def best(
    run: Passes, asked: Asked, whole: Staged | None, chosen: Sliced, counts: Sequence[int],
    cut: Callable[[int], Divisible], realise: Realise, took: float,
) -> Staged | None:  # fmt: skip
    """The pipeline in the fastest slices that are found in the time, or in whole sequences; its notes say why.

    Args:
      whole: the pipeline of whole sequences, if one was planned; then the answer is not None.
      chosen: stages for slices, of which `SLICES` make up a micro-batch.
      counts: the numbers of micro-batches that there may be.
      cut: the step in layers with a number of micro-batches.
      took: seconds that planning the pipeline of whole sequences took, once its stages were chosen.
    """
    waiting = 1.0 if whole is None else _waiting(whole, asked)
    if whole is not None and waiting < WAITING:
        return noted(whole, f"{_WHOLE}: devices wait for {waiting:.1%} of the step")
    search = _Search(run, asked, realise, whole, took=took)
    count = chosen.slices.num_microbatches // SLICES
    tokens, reason = _begin(search, _with_microbatches(chosen, count, cut))
    if not tokens:
        return None if whole is None else noted(whole, f"{_WHOLE}: {reason}")
    step = choice.step_of(tokens, asked.cluster.platform)
    fewer = [number for number in counts if number <= count]
    assert search.program is not None
    dispatch = token_samples.dispatch_seconds(search.program, asked.cluster)
    error = 0.0
    for _ in range(ATTEMPTS):
        model = run("slices", latency.fitted, search.samples)
        error, search.late = model.error, set()
        found = run("slices", choice.proposed, model, tokens, fewer, step, dispatch)
        most = max((n for n in range(2, choice.MOST + 1) if search.has_time(n)), default=0)
        if 0 < most < choice.MOST:
            found += run("slices", choice.proposed, model, tokens, fewer, step, dispatch, most)
        proposal = _next(search, sorted(found, key=lambda one: one.seconds))
        if proposal is None:
            break
        search.tried.add((proposal.microbatches, proposal.lengths))
        try:
            _plan(search, _with_microbatches(chosen, proposal.microbatches, cut), proposal.lengths)
        except _REFUSED as refused:
            logger.info("slices %s: %s", proposal, refused)
    answer = _said(search.best, whole, error)
    if answer is None or not search.late:
        return answer
    late = f"slicings that may take less and were not planned: {len(search.late)}"
    return noted(answer, f"{asked.ran_out}: {late}")


def in_given(
    run: Passes, asked: Asked, staged: Staged, before: Sliced, chosen: Sliced, cut: Callable[[int], Divisible],
    realise: Realise, took: float,
) -> Staged:  # fmt: skip
    """The pipeline in the slices that are given, with stages that suit them if these are faster and there is time.

    Args:
      staged, before: in these slices with stages for whole sequences, and how these were chosen.
      chosen: stages for slices.
      took: seconds that planning `staged` took, once its stages were chosen.
    """
    lengths = asked.pipeline.lengths
    count = chosen.slices.num_microbatches // len(lengths)
    same = replace(chosen.slices, num_microbatches=count, seconds=before.slices.seconds, bytes=before.slices.bytes)
    search = _Search(run, asked, realise, staged, took=took / len(lengths))
    if same == before.slices or not search.has_time(len(lengths)):
        return staged
    try:
        _plan(search, _with_microbatches(chosen, count, cut), lengths)
    except _REFUSED as refused:
        logger.info("stages for slices of %s tokens: %s", lengths, refused)
    assert search.best is not None
    return search.best


def _waiting(staged: Staged, asked: Asked) -> float:
    """The fraction of a step for which devices do not compute, those that are idle included."""
    pairs = zip(staged.timeline.busy, staged.program.submeshes, strict=True)
    return 1 - sum(busy * submesh.mesh.size for busy, submesh in pairs) / (asked.cluster.num_devices * staged.seconds)


def _begin(search: _Search, chosen: Sliced) -> tuple[int, str]:
    """Plans the first slices, which say how many tokens there are; 0 and a reason if the step cannot be sliced."""
    reasons: list[str] = []
    asked = search.asked
    for tokens in choice.sizes(chosen.priced.step.accumulated.traced):
        most = next((n for n in (4, 2) if search.has_time(n)), 0)
        lengths = choice.first(tokens, choice.step_of(tokens, asked.cluster.platform), most)
        if not most:
            return 0, f"{asked.ran_out}: slices were not searched"
        if len(lengths) < 2:
            continue
        try:
            _plan(search, chosen, lengths)
        except (InfeasibleError, OptionError, OrderError) as error:
            logger.info("slices of %s tokens: %s", lengths, error)
            reasons.append(str(error).split("]: ", 1)[-1].rsplit(";", 1)[0])
            continue
        search.tried.add((chosen.slices.num_microbatches, lengths))
        return tokens, ""
    late = [reason for reason in reasons if "waits for" in reason]
    return 0, (late or reasons or ["no argument of the batch has a sequence"])[0]


def _plan(search: _Search, chosen: Sliced, lengths: tuple[int, ...]) -> None:
    """Plans stages in slices, and takes them if they are the fastest that fit."""
    start = time.perf_counter()
    staged = search.realise(search.run, chosen, search.asked, lengths)
    search.took = max(search.took, (time.perf_counter() - start) / len(lengths))
    search.samples += token_samples.samples(staged.program, lengths)
    search.program, before = staged.program, search.best
    room = search.asked.budget
    better = staged.needed <= room
    if before is not None:
        better = (max(staged.needed, room), staged.seconds) < (max(before.needed, room), before.seconds)
    logger.info("slices of %s tokens: %.4g s, %s", lengths, staged.seconds, units.nbytes(staged.needed))
    if better:
        search.best = staged


def _next(search: _Search, found: Sequence[Proposal]) -> Proposal | None:
    """The fastest proposal that was not tried, may be faster than all that were, and is planned in the time."""
    for proposal in found:
        if search.best is not None and (1 - DOUBT) * proposal.seconds >= search.best.seconds:
            return None
        key = proposal.microbatches, proposal.lengths
        if key not in search.tried and search.has_time(len(proposal.lengths)):
            return proposal
        if key not in search.tried:
            search.late.add(key)
    return None


def _with_microbatches(chosen: Sliced, count: int, cut: Callable[[int], Divisible]) -> Sliced:
    """The same stages with another number of micro-batches.

    Raises:
      MicrobatchError: the step has other layers then.
    """
    step = cut(count)
    if len(step.layering.layers) != len(chosen.priced.layers):
        raise MicrobatchError(f"with {count} micro-batches the step has other layers")
    return replace(
        chosen, priced=chosen.priced.rescaled(step), slices=replace(chosen.slices, num_microbatches=count)
    )  # fmt: skip


def _said(staged: Staged | None, whole: Staged | None, error: float) -> Staged | None:
    """The pipeline, with what was gained in its notes and beside it."""
    if staged is None:
        return None
    model = f"the model of seconds that proposed them misses planned slices by {error:.1%} at most"
    if whole is None:
        return noted(
            staged, f"token_slices: chosen, since no pipeline of whole sequences is faster than one mesh; {model}"
        )
    count = whole.program.num_microbatches
    before = f"{whole.seconds:.4g} s with {count} micro-batch{'es' if count > 1 else ''} of whole sequences"
    if staged is whole:
        return noted(whole, f"{_WHOLE}: no slices were found that take less than {before}")
    gain = f"{whole.seconds / staged.seconds:.2f} times as fast"
    note = f"token_slices: chosen for {staged.seconds:.4g} s instead of {before}, {gain}; {model}"
    return beside(noted(staged, note), "whole sequences", whole)
