"""Candidates of pipelines: all of them, those of each number of micro-batches, and slices of their sequences.

All pipelines are expanded by pricing the step's layers at one number of micro-batches (`search.pipeline_analysis`, with
the bound), those of a number by choosing stages with the DP, at scaled costs where that has the same layers and at its
own else, and planning them. Slices of the sequence follow from a planned pipeline (`search.token_slices`).

Memory. The DP reads sums over layers. Where planned stages exceed the budget, their excess is added to the costs of
their layers (`LayerCosts.beyond`), and the candidate waits again with the DP's next choice, `ATTEMPTS` times.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import AlpaLiteError, InfeasibleError, OptionError
from alpa_lite.passes.programs.staged import Staged, noted
from alpa_lite.passes.search.best_first import LAYER_COST, STAGE_DP, STAGE_PER_OP, Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import ExecutionConfig
from alpa_lite.passes.search.one_mesh import LAST, OneMeshSearch
from alpa_lite.passes.search.pipeline_analysis import REFUSALS, PipelineAnalyses, found_plan
from alpa_lite.passes.search.token_slices import SliceSearch, open_slices, plan_lengths
from alpa_lite.passes.stages.choosing import CERTAIN, StagePlan
from alpa_lite.passes.stages.pricing import LayerCosts
from alpa_lite.report import units

logger = logging.getLogger(__name__)

EXPECTED_OVERHEAD = 0.1
"""Estimated share by which a pipeline takes longer than computing: bubble, transfers, and communication in stages."""

ATTEMPTS = 3
"""Divisions that are planned for a number of micro-batches, each with the excess of those before added to its costs."""


class PipelineSearch:
    """Candidates of pipelines, and the state that they share.

    Attributes:
      found: planned pipelines of whole sequences. slicings: of those in slices. errors: why others cannot be planned.
      estimates: of the best pipeline with each number of micro-batches, in seconds, by sums over layers.
    """

    def __init__(self, run: Passes, step: Step, request: PlanRequest, one_mesh: OneMeshSearch | None) -> None:
        """`one_mesh`: the search of plans of one mesh, which are no pipelines; None if the method admits none."""
        self.analyses = PipelineAnalyses(run, step, request, one_mesh is not None)
        self.found: list[FoundPlan] = []
        self.slicings: list[SliceSearch] = []
        self.errors: list[AlpaLiteError] = []
        self.estimates: list[float] = []
        self._one_mesh = one_mesh
        self._planned: set[tuple[Any, ...]] = set()
        self._planned_ratio = math.inf  # the least one of planned to estimated seconds, if any is planned

    @property
    def root(self) -> Candidate:
        """All pipelines, after one mesh."""
        return Candidate("pipelines", (2, 1, 0), (2, 0), self.estimate, self._expand)

    def estimate(self) -> tuple[float, float]:
        """Returns the bound in seconds, and the computing of one mesh with the overhead of a pipeline."""
        bound = self.analyses.bound
        computing = self._one_mesh.compute_seconds() if self._one_mesh else 0.0
        return bound, max(bound, computing) * (1 + EXPECTED_OVERHEAD)

    def fit_or_explain(self) -> FoundPlan:
        """The pipeline of the least memory, where the search found none that fits.

        Raises:
          AlpaLiteError: why it does not fit either, or why there is no pipeline.
        """
        own, error = self.analyses, (*self.errors, InfeasibleError("the step has no pipeline"))[0]
        if any(isinstance(e, InfeasibleError) and e.smallest_budget is not None for e in self.errors):
            best = self._least_memory()
            if best is not None and best.needed <= own.request.budget:
                return found_plan(best)
            error = error if best is None else exceeds_budget(best, own.request.budget)
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
                costs, room = own.price(own.reference, own.kinds), math.inf
                try:
                    own.choose(costs, count, 1.0)
                except InfeasibleError as error:
                    room = (error.smallest_budget or math.inf) * (1 + 1e-9)
                chosen = own.choose(costs, count, room)
                anew = PipelineAnalyses(own.run, own.step, own.request.with_budget(1), own.below_all)
                staged = anew.build(chosen, own.request.pipeline.lengths)
            except AlpaLiteError:
                continue
            best = staged if best is None or staged.needed < best.needed else best
            if best.needed <= own.request.budget:
                break
        return best

    def _expect(self, seconds: float) -> float:
        """The least seconds that a planned pipeline is expected to take whose layers are estimated to take some.

        Planned pipelines differ from their estimates for reasons that others share, such as communication that hides.
        """
        ratio = self._planned_ratio if self.found else 1.0
        return (1 - CERTAIN) * ratio * seconds

    def _expand(self, cutoff: float) -> Expansion:
        """One candidate for each number of micro-batches, by the DP over equal submeshes at scaled costs."""
        own, out = self.analyses, list[Candidate]()
        try:
            if own.below_all and not own.kinds:
                return Expansion()
            costs = own.price(own.reference, own.kinds)
        except REFUSALS as error:
            self.errors.append(error)
            return Expansion()
        for count in own.counts:
            try:
                rough, _ = own.choose_or_least(costs, count, rough=True)
                seconds = rough.seconds
                self.estimates.append(seconds)
            except (InfeasibleError, OptionError) as error:
                self.errors.append(error)
                if isinstance(error, OptionError):
                    continue
                seconds = cutoff if math.isfinite(cutoff) else LAST  # unequal submeshes, or other schedules, may fit
            out.append(self._of_count(count, costs, seconds))
        return Expansion(out, work=LAYER_COST * len(costs.known) + STAGE_DP * len(own.counts))

    def _of_count(self, count: int, costs: LayerCosts, seconds: float, attempt: int = 0) -> Candidate:
        """All pipelines with a number of micro-batches, by the costs of layers at this number or another one.

        `seconds` estimates the best of them. `attempt` divisions were planned, and exceeded the budget.
        """
        bound, name = self.analyses.bound, f"pipelines of {ExecutionConfig(count)}"

        def expand(cutoff: float) -> Expansion:
            parts = self._choose(count, costs, attempt, cutoff)
            return replace(parts, bound=bound, work=STAGE_DP + parts.work)

        return Candidate(
            name, (2, count, 0), (2, 1, count), lambda: (bound, max(bound, self._expect(seconds))), expand
        )  # fmt: skip

    def _choose(self, count: int, costs: LayerCosts, attempt: int, cutoff: float) -> Expansion:
        """The same at costs of its own; or the planned pipeline of the DP's stages, and its slices."""
        own = self.analyses
        try:
            chosen, room = own.choose_or_least(costs, count)
        except (InfeasibleError, OptionError) as error:
            self.errors.append(error)
            return Expansion()
        if self._expect(chosen.seconds) >= cutoff:
            return Expansion()
        if count != costs.num_microbatches:
            step = own.cut(count)
            if len(step.layering.layers) != len(costs.layers):
                return self._price(count, costs, chosen, attempt)
            chosen = replace(chosen, priced=costs.rescaled(step))
        return self._plan(chosen, room, costs, attempt)

    def _price(self, count: int, costs: LayerCosts, rough: StagePlan, attempt: int) -> Expansion:
        """The same with layers priced at this number of micro-batches, on the sizes of submeshes that the DP chose."""
        own, work = self.analyses, 0
        for kinds in dict.fromkeys((tuple(sorted(set(rough.slices.devices))), own.kinds)):
            try:
                exact = own.price(count, kinds)
                work += LAYER_COST * len(exact.known)
                chosen, _ = own.choose_or_least(exact, count)
            except REFUSALS as error:
                self.errors.append(error)
                continue
            exact = replace(exact, beyond=costs.beyond)
            return Expansion([self._of_count(count, exact, chosen.seconds, attempt)], work=work)
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
        try:
            staged = own.build(chosen, lengths)
        except REFUSALS as error:
            self.errors.append(error)
            return Expansion(work=work)
        if staged.needed > budget:
            self.errors.append(exceeds_budget(staged, budget))
            if attempt + 1 >= ATTEMPTS:
                return Expansion(work=work)
            logger.info("the pipeline exceeds the budget by %s", units.nbytes(staged.needed - budget))
            costs = replace(costs, beyond=excess(costs.beyond, chosen, staged, room, budget))
            return Expansion([self._of_count(count, costs, chosen.seconds, attempt + 1)], work=work)
        self._planned_ratio = min(self._planned_ratio, staged.seconds / chosen.seconds)
        slicing, note = open_slices(own, chosen, staged)
        staged = noted(staged, note) if note else staged
        others = plan_lengths(own, chosen, lengths) if lengths else []
        plans = [found_plan(one) for one in (staged, *others) if one.needed <= budget]
        self.found += plans
        if slicing is None:
            return Expansion(plans=plans, work=work)
        self.slicings.append(slicing)
        return Expansion(slicing.first(), plans, work=work)


def excess(
    beyond: Mapping[tuple[int, int], float], chosen: StagePlan, staged: Staged, room: float, budget: float
) -> dict[tuple[int, int], float]:  # fmt: skip
    """Bytes by which stages exceed the costs of their layers, as in `LayerCosts.beyond`: known ones, and these.

    `room`: bytes that they were chosen for. Stages that exceed the budget exceed it, too, from now on.
    """
    found, slices = dict(beyond), chosen.slices
    for stage in slices.stages:
        needed, estimated = sum(staged.bytes[stage.mesh]), slices.bytes[stage.mesh]
        over = needed - budget
        size = room - estimated + (1 + CERTAIN) * over if over > 0 else needed - estimated
        for layer in range(stage.first, stage.stop):
            key = layer, slices.devices[stage.mesh]
            found[key] = found.get(key, 0.0) + max(size, 0.0)
    return found


def exceeds_budget(staged: Staged, budget: float) -> InfeasibleError:
    """The error of a planned pipeline that does not fit."""
    worst = int(np.argmax(list(map(sum, staged.bytes))))
    return InfeasibleError(
        f"memory_per_device={units.exact_bytes(budget)} is {units.exact_bytes(staged.needed - budget)} short: the "
        f"pipeline of {len(staged.stages)} stages needs {units.exact_bytes(staged.needed)} per device on submesh "
        f"{worst}; allow more memory, more micro-batches or more stages",
        staged.needed,
    )
