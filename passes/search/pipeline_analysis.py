"""The step in micro-batches and layers, the costs of layers on submeshes, and pipelines of them: each made once.

StagePlan ──layers──▶ ──stages──▶ ──sharding──▶ ──lowering──▶ PlannedStage, for each stage ──programs──▶ Staged

Bound. However a step is divided, D devices together compute its FLOPs, move its bytes and start its kernels at least
once (`costs.seconds_at_peak`): W / D seconds, of which products P / D. With S stages and n runs of each stage in each
direction, the first and the last are waited for: the published bubbles are at least (S - 1) / 3n of computing, with
S = 2 and zb-h1. A process starts one task after another: 2n of them for each of its stages. So

    T  >=  min over n of max(W / D + P / 3nD, (2 n S_p - 1) * seconds of a dispatch),    S_p: 2 if all devices have one
                                                                                             process, else 1.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError, OrderError
from alpa_lite.ir import schedules, units
from alpa_lite.options import Pipeline, Sharded
from alpa_lite.passes import microbatches, programs, stages
from alpa_lite.passes.ir.remembered import memoise_method
from alpa_lite.passes.layers.division import MAX_OUTER_LAYERS, LayeredStep, divide_into_stages, find_layers
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches.loop import Accumulated, candidate_numbers
from alpa_lite.passes.plans.comparing import compared_pipelines
from alpa_lite.passes.programs.staged import Staged, Verdict, estimated_bytes
from alpa_lite.passes.search import best_first
from alpa_lite.passes.search.best_first import Expansion, FoundPlan
from alpa_lite.passes.search.configs import MAX_LAYERS
from alpa_lite.passes.search.one_mesh import OneMeshSearch
from alpa_lite.passes.sharding import costs
from alpa_lite.passes.stages import planning, submeshes
from alpa_lite.passes.stages.choosing import CERTAIN, StagePlan
from alpa_lite.passes.stages.layer_costs import PRICES, Layer
from alpa_lite.passes.stages.pricing import VARIANTS, LayerCosts
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.passes.tokens import slice_sequence

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # how often the same stages are planned, each time with memory more expensive where they exceed the budget
MAX_LAYER_ERROR = 1.6  # of the budget: up to this many bytes by their layers, which share some, stages are planned

REFUSALS = InfeasibleError, MicrobatchError, OptionError, OrderError
"""Errors of stages or slices that cannot be planned."""


def found_plan(staged: Staged) -> FoundPlan:
    """Returns a planned pipeline as a plan of the search."""
    return FoundPlan((len(staged.stages), staged.program.num_microbatches, 0), staged.seconds, staged)


def max_layers(method: Pipeline) -> int:
    """The most layers that a forward pass is cut into for a pipeline: more where as many stages are asked for."""
    return max(MAX_LAYERS, (method.num_stages or 0) + MAX_OUTER_LAYERS)


def cut_into_stages(
    run: Passes, layers: LayeredStep, firsts: Sequence[int], remat: Sequence[Choice], tokens: tuple[int, ...]
) -> tuple[Accumulated, tuple[StageGraph, ...]]:  # fmt: skip
    """The step in stages with these first layers, and a graph of each; in slices of `tokens` if any are given."""
    cut = run("layers", divide_into_stages, layers, firsts[1:], remat)
    if tokens:
        cut = run("slices", slice_sequence, cut, tokens)
    loop = cut.accumulated
    return loop, run("stages", stages.stage_graphs, loop.traced, loop.scan, cut.assignment)


@dataclass(eq=False)
class PipelineAnalyses:
    """Analyses of a step for pipelines, and planned stages, to be reused: these grow.

    Attributes:
      one_mesh: the search of plans of one mesh, which are no pipelines; None if the method admits none.
      solved_stages: one stage of each kind, at some price of memory. A kind are the inputs that identical stages share:
        the digest, the devices, the meshes allowed, and whether weights are apart.
      planned_stages: the first of each kind at each price.
      work: of everything that was made so far, in cells.
    """

    run: Passes
    step: Step
    request: PlanRequest
    one_mesh: OneMeshSearch | None
    layers: dict[str, Layer] = field(default_factory=dict)
    solved_stages: dict[tuple[Any, ...], planning.DecidedStage] = field(default_factory=dict)
    planned_stages: dict[tuple[tuple[Any, ...], float], planning.PlannedStage] = field(default_factory=dict)
    work: int = 0

    def __post_init__(self) -> None:
        one, step = self.one_mesh, self.step
        self.num_ops = step.traced.graph.num_ops
        self.products = one.products if one else costs.products_bound(step.traced, step.rules, self.request.cluster)

    def count_work(self, expand: Callable[[float], Expansion]) -> Callable[[float], Expansion]:
        """Returns the function that expands a candidate, with the work of everything that it makes."""

        def counted(cutoff: float) -> Expansion:
            before = self.work
            found = expand(cutoff)
            return replace(found, work=found.work + self.work - before)

        return counted

    @property
    def bound(self) -> float:
        """Seconds that no pipeline takes less of: see the module."""
        cluster = self.request.cluster
        least = self.one_mesh.divided if self.one_mesh else self.products
        in_process = 2 if cluster.controller(cluster.num_devices - 1) == cluster.controller(0) else 1
        runs, task = [1 << i for i in range(12)], cluster.dispatch.seconds(1)
        return min(max(least + self.products / (3 * n), (2 * n * in_process - 1) * task) for n in runs)

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """The numbers of devices of submeshes."""
        request, total = self.request, self.request.cluster.num_devices
        found = submeshes.kinds(request.cluster, request.pipeline)
        if self.one_mesh is not None:
            layers = len(self.cut(self.reference).layering.layers)
            found = tuple(n for n in found if n < total and 2 * layers * n >= total)
        return found

    @functools.cached_property
    def counts(self) -> list[int]:
        """The numbers of micro-batches to choose from."""
        request, step = self.request, self.step
        if request.num_microbatches:
            return [request.num_microbatches]
        return candidate_numbers(step.traced, step.rules, request.cluster, request.pipeline)

    @functools.cached_property
    def reference(self) -> int:
        """The number of micro-batches at which layers are priced first: one in the middle.

        Where a batch is cut into more than the powers of two that divide it, the least of these finer numbers: its
        micro-batches are the largest that are a power of two, so that devices can share them.

        At least 2 M where memory asks for M on one mesh: each of S stages, S >= 2, keeps the results of S micro-batches
        in 1 / S of the layers, on 1 / S of the devices, which is S times as many bytes per device.
        """
        finer = [count for count in self.counts if count & (count - 1)]
        middle = finer[0] if finer else self.counts[len(self.counts) // 2]
        least = max(middle, 2 * self.one_mesh.least_microbatches if self.one_mesh else 1)
        return next((count for count in self.counts if count >= least), self.counts[-1])

    @memoise_method
    def cut(self, count: int) -> LayeredStep:
        """Returns the step in micro-batches and in layers."""
        step, arguments = self.step, self.request.inexact_options
        loop = self.run("micro-batches", microbatches.accumulate, step.traced, step.rules, count, **arguments)
        return self.run("layers", find_layers, loop, max_layers=max_layers(self.request.pipeline))

    @memoise_method
    def price(self, count: int, kinds: tuple[int, ...]) -> LayerCosts:
        """Returns the costs of layers with a number of micro-batches on some kinds of submeshes."""
        request = self.request
        found = self.run(
            "costs", stages.price_layers, self.cut(count), request.cluster, request.pipeline, kinds, made=self.layers,
            wishes=request.wishes, progress=self.run.count,
        )  # fmt: skip
        self.work += best_first.LAYER_PER_OP * found.num_ops
        return found

    def rescale(self, chosen: StagePlan, count: int) -> StagePlan | None:
        """Returns the same stages with another number of micro-batches; None if the step has other layers then."""
        step, slices = self.cut(count), replace(chosen.slices, num_microbatches=count)
        if len(step.layering.layers) != len(chosen.layer_costs.layers):
            return None
        return replace(chosen, layer_costs=chosen.layer_costs.rescale(step), slices=slices)

    @memoise_method
    def choose_or_least(
        self, costs: LayerCosts, count: int, *, rough: bool = False, most: float = MAX_LAYER_ERROR
    ) -> tuple[StagePlan, float]:
        """Returns the stages that the DP chooses within the budget, and the bytes that they were chosen for.

        Where none fits by the estimates of layers, stages that need the fewest bytes, up to `most` times the budget,
        since these may fit all the same.

        Raises:
          InfeasibleError: even those do not.
        """
        request, room = self.request, self.request.budget
        self.work += best_first.STAGE_DP

        def choose(room: float) -> StagePlan:
            return self.run("slicing", stages.choose, costs, request.pipeline, [count], room, rough=rough)

        try:
            return choose(room), room
        except InfeasibleError as error:
            least = error.smallest_budget
            if least is None or least > most * room:
                raise
            room = (1 + CERTAIN) * least
            return choose(room), room

    def build(self, chosen: StagePlan, tokens: tuple[int, ...] = (), *, attempts: int = ATTEMPTS) -> Staged:
        """Returns the pipeline of chosen stages: each is solved and lowered, their program written and simulated.

        Where a submesh exceeds the budget, its stages are planned again with memory four times as expensive.

        Args:
          tokens: of each slice of a sequence; none leaves sequences whole.
          attempts: how often the stages are planned at most.
        """
        run, request, slices = self.run, self.request, chosen.slices
        firsts, mesh_of = zip(*((stage.first, stage.mesh) for stage in slices.stages), strict=True)
        numbers, remat = zip(*(VARIANTS[stage.variant] for stage in slices.stages), strict=True)
        prices = [PRICES[number] for number in numbers]
        loop, graphs = self._cut_into_stages(chosen.layer_costs.step, firsts, remat, tokens)
        digests = [planning.digest(graph, request.wishes) for graph in graphs]
        schedule = schedules.schedule(
            slices.schedule, slices.num_meshes, slices.num_microbatches, virtual=slices.virtual, slices=len(tokens) or 1
        )
        verdict = Verdict("layers", "feasible", chosen.seconds, chosen.bound, compared_pipelines(chosen))
        attempt, split = 0, schedule.splits_backward
        while True:
            attempt += 1
            planned = self._solve(chosen, list(zip(graphs, digests, prices, strict=True)), split)
            over = [size - request.budget for size in estimated_bytes(planned, mesh_of, schedule)]
            if max(over) <= CERTAIN * request.budget or split or attempt == attempts:
                staged = run(
                    "programs", programs.stage_pipeline, loop, planned, slices.first_devices, schedule, request.cluster,
                    first_layers=firsts, num_layers=len(chosen.layer_costs.step.layering.layers),
                    max_layers=max_layers(request.pipeline), remat=remat, verdict=verdict, token_slices=tuple(tokens),
                    idle_devices=chosen.idle_devices,
                )  # fmt: skip
                self.work += best_first.SIMULATION_PER_OP * loop.traced.graph.num_ops
                over = [sum(pair) - request.budget for pair in staged.bytes]
                if max(over) <= 0 or attempt == attempts:
                    return staged
            said = ", ".join(units.nbytes(size) for size in over if size > 0)
            logger.info("submeshes exceed the budget by %s: memory becomes more expensive for their stages", said)
            prices = [max(1.0, 4.0 * price) if over[m] > 0 else price for m, price in zip(mesh_of, prices, strict=True)]

    @memoise_method
    def _cut_into_stages(self, *how: Any) -> tuple[Accumulated, tuple[StageGraph, ...]]:
        found = cut_into_stages(self.run, *how)
        self.work += best_first.DIVISION_PER_OP * found[0].traced.graph.num_ops
        return found

    def _solve(
        self, chosen: StagePlan, graphs: Sequence[tuple[StageGraph, str, float]], split: bool
    ) -> tuple[planning.PlannedStage, ...]:  # fmt: skip
        """Solves and lowers every stage, given with its digest and its price of memory.

        The mesh shape of a stage is the best one of its layers, and binds the other stages of its submesh. Identical
        stages take over the choices of the first and their costs; at another price of memory a stage has the same
        integer program.
        """
        run, request, slices, kinds = self.run, self.request, chosen.slices, chosen.layer_costs.devices
        shapes: dict[int, tuple[int, ...]] = {}
        out: list[planning.PlannedStage] = []
        for number, ((graph, digest, price), stage) in enumerate(zip(graphs, slices.stages, strict=True)):
            run.count("stages planned", number, len(graphs), is_lasting=True)
            devices = slices.devices[stage.mesh]
            method = submeshes.shape_of(request.pipeline, devices, number)
            if stage.mesh in shapes:
                method = Sharded(shapes[stage.mesh])
            elif method.mesh_shape is None:
                method = Sharded(chosen.layer_costs.mesh_of(stage, kinds.index(devices)))
            kind = digest, devices, method, split
            twin = self.planned_stages.get((kind, price))
            like = twin or self.solved_stages.get(kind)
            if twin is None and like is not None:
                like = run("sharding", planning.reprice_stage, like, price)
            decided = run(
                "sharding", planning.decide, graph, request.cluster.part(devices), method, price=price,
                split_weights=split, wishes=request.wishes, like=like, unit=chosen.layer_costs.unit_of(stage),
            )  # fmt: skip
            self.work += best_first.STAGE_PER_OP * graph.traced.graph.num_ops * (twin is None)
            self.solved_stages.setdefault(kind, decided)
            planned = run("lowering", planning.lower_stage, decided, split_weights=split, like=twin)
            self.planned_stages.setdefault((kind, price), planned)
            shapes[stage.mesh] = planned.mesh_solution.mesh.shape
            out.append(planned)
        run.count("stages planned", len(graphs), len(graphs), is_lasting=True)
        return tuple(out)
