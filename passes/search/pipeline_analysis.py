"""The step in micro-batches and layers, the costs of layers on submeshes, and pipelines of them: each made once.

Bound. However a step is divided, its products compute for at least their FLOPs over all devices at the highest rate of
large products. With S stages and n runs of each stage in each direction, the first and the last are waited for: the
published bubbles are at least (S - 1) / 3n of computing, with S = 2 and zb-h1. A process starts one task after another:
2n of them for each of its stages. So

    T  >=  min over n of max(W / D * (1 + 1 / 3n), (2 n S_p - 1) * seconds of a dispatch),   S_p: 2 if all devices have
                                                                                             one process, else 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import InfeasibleError
from alpa_lite.passes import microbatches, stages
from alpa_lite.passes.layers.division import Divisible, divisible
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.search.analysis import max_layers
from alpa_lite.passes.search.build_pipeline import StageCache, build_pipeline
from alpa_lite.passes.sharding import computing
from alpa_lite.passes.stages import submeshes
from alpa_lite.passes.stages.choosing import CERTAIN, StagePlan
from alpa_lite.passes.stages.layer_costs import Layer
from alpa_lite.passes.stages.pricing import LayerCosts
from alpa_lite.runner import Passes

RUNS = tuple(1 << i for i in range(12))
"""The numbers of runs of a stage that the bound considers."""

MAX_LAYER_ERROR = 1.6
"""Stages are planned whose bytes, estimated from their layers, exceed the budget by this factor at most.

Estimates may be too high, since a stage holds once what each of its layers holds.
"""


@dataclass(eq=False)
class PipelineAnalyses:
    """Analyses of a step for pipelines.

    Attributes:
      below_all: whether a single stage on all devices, which is one mesh, is no pipeline.
    """

    run: Passes
    step: Step
    request: PlanRequest
    below_all: bool
    layers: dict[str, Layer] = field(default_factory=dict)
    cache: StageCache = field(default_factory=StageCache)

    @functools.cached_property
    def bound(self) -> float:
        """Seconds that no pipeline takes less of: see the module."""
        cluster = self.request.cluster
        work = computing.products_bound(self.step.traced, self.step.rules, cluster)
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
        request, step = self.request, self.step
        if request.num_microbatches:
            return [request.num_microbatches]
        return numbers.candidate_numbers(step.traced, step.rules, request.cluster, request.pipeline)

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
        return self.run("slicing", stages.choose, costs, self.request.pipeline, [count], room, rough=rough, **names)

    def choose_or_least(self, costs: LayerCosts, count: int, *, rough: bool = False) -> tuple[StagePlan, float]:
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
