"""Candidates of pipelines: all of them, and those of each number of micro-batches.

All pipelines are expanded by pricing the step's layers at one number of micro-batches (`search.pipeline_analysis`, with
the bound), those of a number by choosing stages with the DP at costs scaled to it, and planning them. Scaled costs keep
the layouts of another size: the best plan by them is followed by costs of its own, which the adjacent numbers of
micro-batches are estimated by, too; so are steps that have other layers at this number.

Memory. The DP reads sums over layers. Where planned stages exceed the budget, two candidates follow: the DP's next
choice with the excess added to the costs of their layers (`LayerCosts.excess_bytes`), and the same stages with memory
more expensive in their integer programs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import AlpaLiteError, InfeasibleError, OptionError
from alpa_lite.ir import units
from alpa_lite.passes.programs.staged import Staged, add_notes
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import ExecutionConfig
from alpa_lite.passes.search.one_mesh import LAST, OPTIMISM, OneMeshSearch
from alpa_lite.passes.search.pipeline_analysis import REFUSALS, PipelineAnalyses, found_plan
from alpa_lite.passes.search.slices import SliceSearch, open_slices, plan_lengths
from alpa_lite.passes.stages.choosing import CERTAIN, StagePlan
from alpa_lite.passes.stages.pricing import LayerCosts

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

EXPECTED_OVERHEAD = 0.1  # estimated share added to computing: bubble, transfers, and communication in stages


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
        self._ties = itertools.count()
        self._ratios: list[float] = []  # of planned to estimated seconds

    @property
    def root(self) -> Candidate:
        """All pipelines, after one mesh."""
        return Candidate("pipelines", (2, 1, 0), (2, 0), self.estimate, self.analyses.count_work(self._expand))

    def estimate(self) -> tuple[float, float]:
        """Returns the bound in seconds, and the computing of one mesh with the overhead of a pipeline."""
        bound = self.analyses.bound
        computing = self.analyses.one_mesh.compute_seconds() if self.analyses.one_mesh else 0.0
        return bound, max(bound, computing) * (1 + EXPECTED_OVERHEAD)

    def fit_or_explain(self) -> FoundPlan:
        """Returns the first pipeline that fits of the fewest bytes by the costs of layers, where the search found none.

        Built for a budget of nothing, so that it does not depend on the budget, and works when that is given.

        Raises:
          AlpaLiteError: why none fits, which names the fewest bytes found, or why there is no pipeline.
        """
        own, budget, best = self.analyses, self.analyses.request.budget, list[Staged]()
        anew = PipelineAnalyses(own.run, own.step, own.request.with_budget(1), own.one_mesh)
        is_short = any(isinstance(e, InfeasibleError) and e.smallest_budget is not None for e in self.errors)
        for count in reversed(own.counts if is_short else ()):
            with contextlib.suppress(AlpaLiteError):
                chosen, _ = own.choose_or_least(own.price(own.reference, own.kinds), count, most=math.inf)
                best.append(anew.build(chosen, own.request.pipeline.lengths))
                if best[-1].needed_bytes <= budget:
                    return found_plan(best[-1])
        refusals = [exceeds_budget(min(best, key=lambda one: one.needed_bytes), budget)] if best else self.errors
        error = refusals[0] if refusals else InfeasibleError("the step has no pipeline")
        if isinstance(error, InfeasibleError) and own.request.num_microbatches is None:
            tried = f"up to {max(own.counts)} micro-batches were tried, num_microbatches takes others"
            raise InfeasibleError(f"{error}; {tried}", error.smallest_budget)
        raise error

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
        own = self.analyses
        costs = self._tried(lambda: own.price(own.reference, own.kinds) if own.kinds else None)
        if costs is None:
            return Expansion()
        return Expansion(self._estimate_each(costs, own.counts))

    def _candidate(
        self, count: int, rank: int, estimate: Callable[[], float], expand: Callable[[float], Expansion],
        how: str = "", slack: float = 1.0,
    ) -> Candidate:  # fmt: skip
        """Returns pipelines with a number of micro-batches; those of lower rank come first among equal estimates."""
        bound = self.analyses.bound
        return Candidate(
            f"pipelines of {ExecutionConfig(count)}{how}", (2, count, 0), (2, rank, count, next(self._ties)),
            lambda: (bound, max(bound, estimate())),
            self.analyses.count_work(lambda cutoff: replace(expand(cutoff), bound=bound)), slack=slack,
        )  # fmt: skip

    def _of_count(self, count: int, costs: LayerCosts, seconds: float) -> Candidate:
        """Returns all pipelines with a number of micro-batches, by the costs of layers at this number or another one.

        `seconds` estimates the best of them.
        """
        return self._candidate(
            count, 1, lambda: self._expect(seconds), partial(self._choose, count, costs), slack=OPTIMISM
        )

    def _estimate_each(self, costs: LayerCosts, counts: Sequence[int]) -> list[Candidate]:
        """Returns pipelines with each of some numbers of micro-batches, estimated by the DP over equal submeshes."""
        out = list[Candidate]()
        for count in counts:
            rough = self._tried(self.analyses.choose_or_least, costs, count, rough=True)
            if rough is not None:
                self.estimates.append(rough[0].seconds)
            elif isinstance(self.errors[-1], OptionError):
                continue
            out.append(self._of_count(count, costs, rough[0].seconds if rough else LAST))  # unequal ones may fit
        return out

    def _choose(self, count: int, costs: LayerCosts, cutoff: float) -> Expansion:
        """Returns the planned pipeline of the DP's stages, and its slices; if it has other layers, the same anew."""
        own = self.analyses
        found = self._tried(own.choose_or_least, costs, count)
        if found is None or OPTIMISM * self._expect(found[0].seconds) >= cutoff:
            return Expansion()
        chosen, room = found
        suited = chosen if count == costs.num_microbatches else own.rescale(chosen, count)
        return self._plan(suited, room, costs) if suited else self._price(count, chosen)

    def _price(self, count: int, like: StagePlan) -> Expansion:
        """The same, and those of the next fewer and more micro-batches, by the costs of layers at this number.

        On submeshes of half to twice as many devices as those of a plan, and on all of them if none fits.
        """
        own, place = self.analyses, self.analyses.counts.index(count)
        near = tuple(n for n in own.kinds if any(n <= 2 * other <= 4 * n for other in like.slices.devices))
        for kinds in dict.fromkeys((near, own.kinds)):
            costs = self._tried(own.price, count, kinds)
            found = self._estimate_each(costs, own.counts[max(0, place - 1) : place + 2]) if costs else []
            if found:
                return Expansion(found)
        return Expansion()

    def _plan(self, chosen: StagePlan, room: float, costs: LayerCosts) -> Expansion:
        """The planned pipeline of chosen stages, and its slices.

        If it exceeds the budget, the DP's next choice, once, and the same stages with memory more expensive.
        """
        own, count, lengths = self.analyses, chosen.slices.num_microbatches, self.analyses.request.pipeline.lengths
        key = count, chosen.slices.schedule, chosen.slices.virtual, chosen.slices.stages
        if key in self._planned:
            return Expansion()
        self._planned.add(key)
        staged = self._tried(own.build, chosen, lengths, attempts=1)
        if staged is None or self._fits(staged):
            return self._take(staged, chosen, costs)
        budget, parts = own.request.budget, list[Candidate]()
        dearer = replace(costs, excess_bytes=excess(chosen, staged, room, budget))
        other = None if costs.excess_bytes else self._tried(own.choose_or_least, dearer, count)
        if other is not None:
            parts.append(self._of_count(count, dearer, other[0].seconds * staged.seconds / chosen.seconds))

        def repeat(_: float) -> Expansion:
            return self._take(self._tried(own.build, chosen, lengths), chosen, costs)

        seconds = staged.seconds * staged.needed_bytes / budget  # estimated: slower by the share by which it exceeds
        parts.append(self._candidate(count, 3, lambda: seconds, repeat, " with memory more expensive"))
        return Expansion(parts)

    def _fits(self, staged: Staged) -> bool:
        """Returns whether a planned pipeline fits; if not, the reason is one of the errors."""
        budget = self.analyses.request.budget
        if staged.needed_bytes > budget:
            self.errors.append(exceeds_budget(staged, budget))
            logger.info("the pipeline exceeds the budget by %s", units.nbytes(staged.needed_bytes - budget))
        return staged.needed_bytes <= budget

    def _take(self, staged: Staged | None, chosen: StagePlan, costs: LayerCosts) -> Expansion:
        """Returns a planned pipeline that fits as a plan, its slices, and others at costs of their own."""
        own, lengths = self.analyses, self.analyses.request.pipeline.lengths
        if staged is None or not self._fits(staged):
            return Expansion()
        self._ratios.append(staged.seconds / chosen.seconds)
        slicings, notes = open_slices(own, chosen, staged)
        staged = add_notes(staged, *notes) if notes else staged
        other = self._tried(plan_lengths, own, chosen, lengths) if lengths else None
        plans = [found_plan(one) for one in (staged, other) if one is not None and self._fits(one)]
        self.found += plans
        self.slicings += slicings
        parts = [first for one in slicings for first in one.first_slicings()]
        if chosen.slices.num_microbatches != costs.num_microbatches:
            parts.append(self._of_own_costs(plans[0], chosen))
        return Expansion(parts, plans)

    def _of_own_costs(self, plan: FoundPlan, chosen: StagePlan) -> Candidate:
        """Returns the pipelines of a planned one's number of micro-batches, by the costs of layers at this number.

        Only those of the best planned one, which are estimated to take as long.
        """
        count = chosen.slices.num_microbatches
        return self._candidate(
            count, 2, lambda: plan.seconds if plan.seconds <= min(p.seconds for p in self.found) else math.inf,
            lambda _: self._price(count, chosen), " by costs of their own", slack=OPTIMISM,
        )  # fmt: skip


def excess(chosen: StagePlan, staged: Staged, room: float, budget: float) -> dict[tuple[int, int], float]:
    """Returns bytes by which stages exceed the costs of their layers, as in `LayerCosts.excess_bytes`.

    `room`: bytes that they were chosen for. Stages that exceed the budget exceed it, too, from now on.
    """
    found, slices = defaultdict[tuple[int, int], float](float), chosen.slices
    for stage in slices.stages:
        needed, estimated = sum(staged.bytes[stage.mesh]), slices.bytes[stage.mesh]
        size = room - estimated + (1 + CERTAIN) * (needed - budget) if needed > budget else needed - estimated
        for layer in range(stage.first, stage.stop):
            found[layer, slices.devices[stage.mesh]] += max(size, 0.0)
    return dict(found)


def exceeds_budget(staged: Staged, budget: float) -> InfeasibleError:
    """Returns the error of a planned pipeline that does not fit."""
    worst = int(np.argmax(list(map(sum, staged.bytes))))
    return InfeasibleError(
        f"memory_per_device={units.exact_bytes(budget)} is {units.exact_bytes(staged.needed_bytes - budget)} short: "
        f"the pipeline of {len(staged.stages)} stages needs {units.exact_bytes(staged.needed_bytes)} per device on "
        f"submesh {worst}; allow more memory, more micro-batches or more stages",
        staged.needed_bytes,
    )
