"""Candidates of pipelines: numbers of micro-batches, and the stages of each.

    Pipelines      all of them; expanded by pricing the step's layers at one number of micro-batches
    Pipeline(B)    those with B micro-batches: stages by the DP at scaled costs, then at their own, then planned
    Slicing        the same stages with sequences in slices (`search.token_slices`)

Bound. However a step is divided, its products compute for at least their FLOPs over all devices at the highest rate of
large products. With S stages and n runs of each stage in each direction, the first and the last are waited for: the
published bubbles are at least (S - 1) / 3n of computing, with S = 2 and zb-h1. A process starts one task after another:
2n of them for each of its stages. So

    T  >=  min over n of max(W / D * (1 + 1 / 3n), (2 n S_p - 1) * seconds of a dispatch),   S_p: 2 if all devices have
                                                                                             one process, else 1.

Memory. The DP reads sums over layers. Where planned stages exceed the budget, their excess is added to the costs of
their layers (`LayerCosts.beyond`), and the candidate waits again with the DP's next choice, `ATTEMPTS` times.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import AlpaLiteError, InfeasibleError, MicrobatchError, OptionError, OrderError
from alpa_lite.passes import microbatches, stages
from alpa_lite.passes.layers.division import Divisible, divisible
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.programs.staged import Staged, noted
from alpa_lite.passes.search import budget as work_units
from alpa_lite.passes.search import token_slices
from alpa_lite.passes.search.analysis import Run, max_layers
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan, Key, Kind
from alpa_lite.passes.search.build_pipeline import StageCache, build_pipeline
from alpa_lite.passes.sharding import computing
from alpa_lite.passes.stages import submeshes
from alpa_lite.passes.stages.choosing import CERTAIN, StagePlan
from alpa_lite.passes.stages.layer_costs import Layer
from alpa_lite.passes.stages.pricing import LayerCosts
from alpa_lite.report import units

logger = logging.getLogger(__name__)

RUNS = tuple(1 << i for i in range(12))
"""The numbers of runs of a stage that the bound considers."""

EXPECTED_OVERHEAD = 0.1
"""Estimated share by which a pipeline takes longer than computing: bubble, transfers, and communication in stages."""

ATTEMPTS = 3
"""Divisions that are planned for a number of micro-batches, each with the excess of those before added to its costs."""

MAX_LAYER_ERROR = 1.6
"""Stages are planned whose bytes, estimated from their layers, exceed the budget by this factor at most.

Estimates may be too high, since a stage holds once what each of its layers holds.
"""

_REFUSALS = InfeasibleError, MicrobatchError, OptionError, OrderError


@dataclass(eq=False)
class PipelineSearch:
    """The state that candidates of pipelines share.

    Attributes:
      computing: estimated seconds for which a step computes on all devices, where a plan of one mesh is known.
      below_all: whether a single stage on all devices, which is one mesh, is no pipeline.
      estimates: of the best pipeline with a number of micro-batches, in seconds, by sums over layers.
      planned_ratio: the least ratio of planned to estimated seconds so far, 1 at most: others may gain as much.
    """

    run: Run
    step: Step
    request: PlanRequest
    below_all: bool
    computing: Callable[[], float] = lambda: 0.0
    layers: dict[str, Layer] = field(default_factory=dict)
    cache: StageCache = field(default_factory=StageCache)
    best: FoundPlan | None = None
    errors: list[AlpaLiteError] = field(default_factory=list)
    slicings: list[token_slices.SliceSearch] = field(default_factory=list)
    estimates: dict[int, float] = field(default_factory=dict)
    planned_ratio: float = 1.0

    @functools.cached_property
    def bound(self) -> float:
        """Seconds that no pipeline takes less of: see the module."""
        cluster, traced = self.request.cluster, self.step.traced
        work = computing.products_bound(traced, self.step.rules, cluster)
        in_process = 2 if cluster.controller(cluster.num_devices - 1) == cluster.controller(0) else 1
        task = cluster.dispatch.seconds(1)
        return min(max(work * (1 + 1 / (3 * n)), (2 * n * in_process - 1) * task) for n in RUNS)

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """The numbers of devices of submeshes."""
        request, total = self.request, self.request.cluster.num_devices
        found = submeshes.kinds(request.cluster, request.pipeline)
        if self.below_all:
            layers = len(self.cut(self.reference).layering.layers)
            found = tuple(n for n in found if n < total and 2 * layers * n >= total)
        return found

    @functools.cached_property
    def counts(self) -> list[int]:
        """The numbers of micro-batches to choose from."""
        given, request = self.request.num_microbatches, self.request
        return [given] if given else numbers.candidate_numbers(
            self.step.traced, self.step.rules, request.cluster, request.pipeline
        )  # fmt: skip

    @property
    def reference(self) -> int:
        """The number of micro-batches at which layers are priced first: one in the middle.

        Where a batch is cut into more than the powers of two that divide it, the least of these finer numbers: its
        micro-batches are the largest that are a power of two, so that devices can share them.
        """
        finer = [count for count in self.counts if count & (count - 1)]
        return finer[0] if finer else self.counts[len(self.counts) // 2]

    @functools.cache  # noqa: B019 - as long as the search
    def cut(self, count: int) -> Divisible:
        """The step in micro-batches and in layers."""
        step, arguments = self.step, self.request.inexact
        loop = self.run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **arguments)
        return self.run("layers", divisible, loop, max_layers=max_layers(self.request.pipeline))

    @functools.cache  # noqa: B019
    def price(self, count: int, kinds: tuple[int, ...]) -> LayerCosts:
        """The costs of layers with a number of micro-batches on some kinds of submeshes."""
        request = self.request
        return self.run(
            "costs", stages.price_layers, self.cut(count), request.cluster, request.pipeline, kinds, made=self.layers,
            wishes=request.wishes, progress=self.run.count,
        )  # fmt: skip

    def choose(self, costs: LayerCosts, count: int, room: float, *, rough: bool = False) -> StagePlan:
        """The stages that the DP chooses within `room` bytes a device."""
        names = {"names": ("1f1b",)} if rough else {}
        return self.run(
            "slicing", stages.choose, costs, self.request.pipeline, [count], room, rough=rough, **names
        )  # fmt: skip

    def choose_or_least(
        self, costs: LayerCosts, count: int, *, rough: bool = False
    ) -> tuple[StagePlan, float]:  # fmt: skip
        """Stages within the budget, and the bytes that they were chosen for.

        Where none fits by the estimates of layers, stages that need the fewest bytes, if these may fit all the same.

        Raises:
          InfeasibleError: even those do not.
        """
        budget = self.request.budget
        try:
            return self.choose(costs, count, budget, rough=rough), budget
        except InfeasibleError as error:
            least = error.smallest_budget
            if least is None or least > MAX_LAYER_ERROR * budget:
                raise
            room = (1 + CERTAIN) * least
            return self.choose(costs, count, room, rough=rough), room

    def build(self, chosen: StagePlan, tokens: tuple[int, ...] = ()) -> Staged:
        """A pipeline of chosen stages."""
        return build_pipeline(self.run, chosen, self.request, tokens, self.cache)

    def expect(self, seconds: float) -> float:
        """The least seconds that a planned pipeline may take whose layers are estimated to take some."""
        return (1 - CERTAIN) * self.planned_ratio * seconds

    def note(self, plan: FoundPlan) -> FoundPlan:
        """The same, remembered if it is the best pipeline."""
        if self.best is None or plan.seconds < self.best.seconds:
            self.best = plan
        return plan


@dataclass(frozen=True, eq=False)
class Pipelines:
    """All pipelines."""

    search: PipelineSearch

    @property
    def name(self) -> str:
        """All pipelines."""
        return "pipelines"

    @property
    def kind(self) -> Kind:
        """At least two stages."""
        return (2, 1, 0)

    @property
    def key(self) -> Key:
        """After one mesh."""
        return (2, 0)

    def estimate(self) -> tuple[float, float]:
        """Returns the bound in seconds, and the computing of one mesh with the overhead of a pipeline."""
        computing = max(self.search.bound, self.search.computing())
        return self.search.bound, computing * (1 + EXPECTED_OVERHEAD)

    def expand(self, cutoff: float) -> Expansion:
        """One candidate for each number of micro-batches, by the DP over equal submeshes at scaled costs."""
        search, out = self.search, list[Candidate]()
        if search.below_all and not search.kinds:
            return Expansion()
        try:
            costs = search.price(search.reference, search.kinds)
        except _REFUSALS as error:
            search.errors.append(error)
            return Expansion()
        work = work_units.LAYER_COST * len(costs.known) + work_units.STAGE_DP * len(search.counts)
        for count in search.counts:
            try:
                rough, _ = search.choose_or_least(costs, count, rough=True)
                seconds = rough.seconds
            except InfeasibleError as error:
                search.errors.append(error)
                seconds = cutoff if math.isfinite(cutoff) else 1e30  # unequal submeshes, or other schedules, may fit
            except OptionError as error:
                search.errors.append(error)
                continue
            else:
                search.estimates[count] = seconds
            out.append(Pipeline(search, count, costs, seconds))
        return Expansion(out, bound=math.inf, work=work)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """All pipelines with a number of micro-batches.

    Attributes:
      costs: of layers, at another number or, where `exact`, at this one.
      seconds: estimated, of the best.
      attempt: divisions that were planned, and exceeded the budget.
    """

    search: PipelineSearch
    count: int
    costs: LayerCosts
    seconds: float
    exact: bool = False
    attempt: int = 0

    @property
    def name(self) -> str:
        """The number of micro-batches."""
        return f"pipelines of {self.count} micro-batch{'es' * (self.count > 1)}"

    @property
    def kind(self) -> Kind:
        """At least two stages."""
        return (2, self.count, 0)

    @property
    def key(self) -> Key:
        """After one mesh."""
        return (2, 1, self.count, self.exact, self.attempt)

    def estimate(self) -> tuple[float, float]:
        """The bound of pipelines, and the DP's seconds, less its error where plans were faster than estimated."""
        return self.search.bound, max(self.search.bound, self.search.expect(self.seconds))

    def expand(self, cutoff: float) -> Expansion:
        """Itself at costs of its own; or the planned pipeline of the DP's stages, and its slices."""
        search = self.search
        try:
            chosen, room = search.choose_or_least(self.costs, self.count)
        except (InfeasibleError, OptionError) as error:
            search.errors.append(error)
            return Expansion(bound=search.bound, work=work_units.STAGE_DP)
        work = work_units.STAGE_DP
        if search.expect(chosen.seconds) >= cutoff:
            return Expansion(bound=search.bound, work=work)
        if self.count != self.costs.num_microbatches:
            step = search.cut(self.count)
            if len(step.layering.layers) != len(self.costs.layers):
                return self._at_own_costs(chosen, work)
            chosen = replace(chosen, priced=self.costs.rescaled(step))
        return self._plan(chosen, room, work)

    def _at_own_costs(self, rough: StagePlan, work: int) -> Expansion:
        """The same with layers priced at this number of micro-batches, on the sizes of submeshes that the DP chose."""
        search = self.search
        sizes = tuple(sorted(set(rough.slices.devices)))
        for kinds in dict.fromkeys((sizes, search.kinds)):
            try:
                costs = search.price(self.count, kinds)
                work += work_units.LAYER_COST * len(costs.known)
                chosen, _ = search.choose_or_least(costs, self.count)
            except _REFUSALS as error:
                search.errors.append(error)
                continue
            costs = replace(costs, beyond=self.costs.beyond)
            again = replace(self, costs=costs, seconds=chosen.seconds, exact=True)
            return Expansion([again], bound=search.bound, work=work)
        return Expansion(bound=search.bound, work=work)

    def _plan(self, chosen: StagePlan, room: float, work: int) -> Expansion:
        search, request = self.search, self.search.request
        ops = sum(1 for _ in search.step.traced.graph.ops())
        work += work_units.STAGE_PER_OP * ops
        try:
            staged = search.build(chosen, request.pipeline.lengths)
        except _REFUSALS as error:
            search.errors.append(error)
            return Expansion(bound=search.bound, work=work)
        if staged.needed > request.budget:
            search.errors.append(exceeds_budget(staged, request.budget))
            if self.attempt + 1 >= ATTEMPTS:
                return Expansion(bound=search.bound, work=work)
            logger.info("the pipeline exceeds the budget by %s", units.nbytes(staged.needed - request.budget))
            beyond = excess(self.costs.beyond, chosen, staged, room, request.budget)
            costs = replace(self.costs, beyond=beyond)
            again = replace(self, costs=costs, seconds=chosen.seconds, attempt=self.attempt + 1)
            return Expansion([again], bound=search.bound, work=work)
        search.planned_ratio = min(search.planned_ratio, staged.seconds / chosen.seconds)
        more, note = self._slices(chosen, staged)
        staged = noted(staged, note) if note else staged
        found = [staged, *self._suited(chosen)]
        plans = [
            search.note(FoundPlan(self.name, (len(one.stages), self.count, 0), one.seconds, one))
            for one in found
            if one.needed <= request.budget
        ]
        return Expansion(more, plans, bound=search.bound, work=work)

    def _suited(self, chosen: StagePlan) -> list[Staged]:
        """The pipeline of stages that suit the slices of the sequence, where these are given."""
        search, lengths = self.search, self.search.request.pipeline.lengths
        if not lengths:
            return []
        request, runs = token_slices.without_split(search.request), self.count * len(lengths)
        try:
            suited = self._balanced(chosen, request, runs)
            slices = replace(suited.slices, num_microbatches=self.count)
            return [search.build(replace(suited, slices=slices), lengths)]
        except _REFUSALS as error:
            logger.info("stages for slices of %s tokens: %s", lengths, error)
            return []

    def _slices(self, chosen: StagePlan, staged: Staged) -> tuple[list[Candidate], str]:
        """Candidates in slices of the sequence, or a note why there are none."""
        search, request = self.search, self.search.request
        why = token_slices.refusal(search.step.traced, request, search.counts)
        if why is not None or request.pipeline.lengths:
            return [], why or ""
        runs = self.count * token_slices.SLICES
        try:
            suited = self._balanced(chosen, token_slices.without_split(request), runs)
        except InfeasibleError:
            suited = token_slices.as_runs(chosen, token_slices.SLICES)
        state = token_slices.SliceSearch(
            search.run, request, suited, search.counts, search.cut, search.build, staged, search.bound
        )  # fmt: skip
        idle = token_slices.idle_fraction(staged, request.cluster.num_devices)
        if idle < token_slices.MIN_IDLE:
            return [], f"{token_slices.WHOLE}: devices are idle for {idle:.1%} of the step"
        search.slicings.append(state)
        return state.first(), ""

    def _balanced(self, chosen: StagePlan, request: PlanRequest, runs: int) -> StagePlan:
        """Stages for a number of runs at the same costs without latencies, which the choice of slices counts."""
        free = chosen.priced.without_latency()
        suited = self.search.run("slicing", stages.choose, free, request.pipeline, [runs], request.budget)
        return replace(suited, priced=chosen.priced)


def excess(
    beyond: Mapping[tuple[int, int], float], chosen: StagePlan, staged: Staged, room: float, budget: float
) -> dict[tuple[int, int], float]:  # fmt: skip
    """Bytes by which stages exceed the costs of their layers, as in `LayerCosts.beyond`: known ones, and these.

    Args:
      chosen, staged: stages as they were chosen, and planned.
      room: bytes that they were chosen for. Stages that exceed the budget exceed it, too, from now on.
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
