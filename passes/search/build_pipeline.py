"""Builds a pipeline from chosen stages: each is solved and lowered, their program written and simulated.

StagePlan ──layers──▶ ──stages──▶ ──sharding──▶ ──lowering──▶ PlannedStage, for each stage ──programs──▶ Staged
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from alpa_lite import schedules
from alpa_lite.asked import PlanRequest
from alpa_lite.options import Sharded
from alpa_lite.passes import programs, stages
from alpa_lite.passes.layers.division import divided
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.plans import candidates
from alpa_lite.passes.programs.staged import Staged, Verdict, estimated_bytes
from alpa_lite.passes.search.analysis import max_layers
from alpa_lite.passes.stages import planning, submeshes
from alpa_lite.passes.stages.choosing import CERTAIN, StagePlan
from alpa_lite.passes.stages.layer_costs import PRICES
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage
from alpa_lite.passes.stages.pricing import VARIANTS
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.passes.tokens import in_slices
from alpa_lite.report import units
from alpa_lite.runner import Passes

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often the same stages are planned, each time with memory more expensive for those that exceed the budget."""

Kind = tuple[Any, ...]
"""The inputs that identical stages share: the digest, the devices, the meshes allowed, whether weights are apart."""


@dataclass(frozen=True, eq=False)
class StageCache:
    """Planned stages, to be reused: it grows.

    Attributes:
      solved: one of each kind, at some price of memory.
      planned: the first of each kind at each price.
      own: of each stage of each kind at each price.
    """

    solved: dict[Kind, DecidedStage] = field(default_factory=dict)
    planned: dict[tuple[Kind, float], PlannedStage] = field(default_factory=dict)
    own: dict[tuple[StageGraph, Kind, float], PlannedStage] = field(default_factory=dict)


def build_pipeline(
    run: Passes, chosen: StagePlan, request: PlanRequest, tokens: tuple[int, ...], cache: StageCache
) -> Staged:  # fmt: skip
    """The pipeline of some stages, its sequences in slices of so many tokens if any are given.

    Where a submesh exceeds the budget, its stages are planned again with memory four times as expensive.
    """
    slices = chosen.slices
    firsts = [stage.first for stage in slices.stages]
    remat: tuple[Choice, ...] = tuple(VARIANTS[stage.variant][1] for stage in slices.stages)
    cut = run("layers", divided, chosen.priced.step, firsts[1:], remat)
    if tokens:
        cut = run("slices", in_slices, cut, tokens)
    loop = cut.accumulated
    graphs = run("stages", stages.stage_graphs, loop.traced, loop.scan, cut.assignment)
    digests = [planning.digest(graph, request.wishes) for graph in graphs]
    schedule = schedules.schedule(
        slices.schedule, slices.num_meshes, slices.num_microbatches, virtual=slices.virtual, slices=len(tokens) or 1
    )
    verdict = Verdict(
        "layers", "feasible", chosen.seconds, chosen.bound, candidates.of_stages(chosen), chosen.idle_devices
    )  # fmt: skip
    prices = [PRICES[VARIANTS[stage.variant][0]] for stage in slices.stages]
    mesh_of, attempt, split = [stage.mesh for stage in slices.stages], 0, schedule.splits_backward
    while True:
        attempt += 1
        keyed = zip(graphs, digests, prices, strict=True)
        planned = solve_stages(run, list(keyed), chosen, split, request, cache)
        over = [size - request.budget for size in estimated_bytes(planned, mesh_of, schedule)]
        if max(over) <= CERTAIN * request.budget or split or attempt == ATTEMPTS:
            staged = run(
                "programs", programs.pipelined, loop, planned, slices.first_devices, schedule, request.cluster,
                first_layers=firsts, num_layers=len(chosen.priced.step.layering.layers),
                max_layers=max_layers(request.pipeline), remat=remat, verdict=verdict, token_slices=tokens,
            )  # fmt: skip
            over = [sum(pair) - request.budget for pair in staged.bytes]
            if max(over) <= 0 or attempt == ATTEMPTS:
                return staged
        said = ", ".join(units.nbytes(size) for size in over if size > 0)
        logger.info("submeshes exceed the budget by %s: memory becomes more expensive for their stages", said)
        prices = [max(1.0, 4.0 * price) if over[m] > 0 else price for m, price in zip(mesh_of, prices, strict=True)]


def solve_stages(
    run: Passes, graphs: Sequence[tuple[StageGraph, str, float]], chosen: StagePlan, split: bool, request: PlanRequest,
    cache: StageCache,
) -> tuple[PlannedStage, ...]:  # fmt: skip
    """Solves and lowers every stage, given with its digest and its price of memory.

    The mesh shape of a stage is the best one of its layers, and binds the other stages of its submesh. Identical stages
    take over the choices of the first and their costs, a stage at another attempt with the same price of memory is the
    one of the attempt before, and at another price it has the same integer program.
    """
    slices, kinds = chosen.slices, chosen.priced.devices
    shapes: dict[int, tuple[int, ...]] = {}
    out: list[PlannedStage] = []
    for number, ((graph, digest, price), stage) in enumerate(zip(graphs, slices.stages, strict=True)):
        run.count("stages planned", number, len(graphs), lasting=True)
        devices = slices.devices[stage.mesh]
        method = submeshes.shape_of(request.pipeline, number, devices)
        if stage.mesh in shapes:
            method = Sharded(shapes[stage.mesh])
        elif method.mesh_shape is None:
            method = Sharded(chosen.priced.mesh_of(stage, kinds.index(devices)))
        kind = digest, devices, method, split
        if (graph, kind, price) not in cache.own:
            twin = cache.planned.get((kind, price))
            like = twin or cache.solved.get(kind)
            if twin is None and like is not None:
                like = run("sharding", planning.repriced, like, price)
            decided = run(
                "sharding", planning.decide, graph, request.cluster.part(devices), method, price=price,
                split_weights=split, wishes=request.wishes, like=like,
                unit=chosen.priced.unit_of(stage),
            )  # fmt: skip
            cache.solved.setdefault(kind, decided)
            planned = run("lowering", planning.lowered, decided, split_weights=split, like=twin)
            cache.own[graph, kind, price] = planned
        planned = cache.own[graph, kind, price]
        cache.planned.setdefault((kind, price), planned)
        shapes[stage.mesh] = planned.found.mesh.shape
        out.append(planned)
    run.count("stages planned", len(graphs), len(graphs), lasting=True)
    return tuple(out)
