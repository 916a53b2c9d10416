"""Replays the plan of a pipeline: the step cut as the plan says, and each stage's own plan, without solving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpa_lite import schedules
from alpa_lite.cluster import Cluster
from alpa_lite.errors import PlanError
from alpa_lite.graph import Traced
from alpa_lite.passes import factors
from alpa_lite.passes.layers import division
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.microbatches.loop import Retrace
from alpa_lite.passes.plans import replay
from alpa_lite.passes.programs import simulation
from alpa_lite.passes.programs.search import REMAT, FoundPipeline, bytes_of, written
from alpa_lite.passes.sharding import grouping
from alpa_lite.passes.stages import staging
from alpa_lite.passes.stages.planning import realised
from alpa_lite.passes.stages.slices import StageChoice, StageSlices
from alpa_lite.plan import Plan
from alpa_lite.strategy import Rule


def replayed(
    traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster, plan: Plan, *, allow_inexact: bool, retrace: Retrace
) -> FoundPipeline:
    """What `programs.search.search` would return, with the decisions of `plan`.

    Raises:
      PlanError: the plan is for other arguments, devices or another program; says what differs.
    """
    shape = plan.pipeline
    assert shape is not None
    if cluster.num_devices != plan.cluster.num_devices:
        raise PlanError(
            f"the plan is for a cluster of {plan.cluster.num_devices} devices, but the cluster given has "
            f"{cluster.num_devices}; "
            "plan again for these."
        )
    accumulated = loop.accumulate(traced, rules, plan.num_microbatches, allow_inexact=allow_inexact, retrace=retrace)
    step = division.divisible(accumulated, max_layers=shape.max_layers)
    layers = step.layering
    if len(layers.layers) != shape.num_layers:
        raise PlanError(
            f"the plan cuts the step into {shape.num_layers} layers, and this one has {len(layers.layers)}: it is for "
            "another program or version. Plan again."
        )
    cut_step = division.divided(step, shape.first_layers[1:], [_choice(name) for name in shape.remat])
    accumulated = cut_step.accumulated
    graphs = staging.stage_graphs(accumulated.traced, accumulated.scan, cut_step.assignment)
    schedule = schedules.schedule(
        plan.schedule, len(shape.first_devices), plan.num_microbatches, virtual=shape.virtual
    )  # fmt: skip
    stages = []
    for stage_graph, part in zip(graphs, plan.parts, strict=True):
        own = stage_graph.traced
        stage_rules = factors.rules_of(own.graph.ops(), own.graph.values)
        groups = grouping.group(own, stage_rules)
        found = replay.replay(own, groups, stage_rules, part.cluster, part, communication="explicit")
        split = schedule.splits_backward
        stages.append(realised(stage_graph, stage_rules, groups, found, part.cluster, split_weights=split))
    pipeline = written(accumulated.traced, stages, shape.first_devices, schedule, cluster)
    stops = [*shape.first_layers[1:], shape.num_layers]
    slices = StageSlices(
        stages=tuple(
            StageChoice(first, stop, -1, REMAT.index(remat), mesh)
            for first, stop, remat, mesh in zip(shape.first_layers, stops, shape.remat, shape.submeshes, strict=True)
        ),
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
        virtual=shape.virtual,
        seconds=plan.step_seconds,
        devices=tuple(submesh.mesh.size for submesh in pipeline.program.submeshes),
        first_devices=shape.first_devices,
        bytes=(),
    )
    timeline = simulation.simulate(pipeline.program)
    over = next((note for note in plan.notes if "devices are used" in note), "")
    return FoundPipeline(
        accumulated, layers, slices, shape.remat, tuple(stages), pipeline, timeline, bytes_of(pipeline, stages),
        float(plan.memory_per_device), (), timeline.seconds, over, replayed=True,
    )  # fmt: skip


def _choice(name: str) -> Choice:
    """What a stage computes again, by the name that plans have for it."""
    for choice in REMAT:
        if choice == name:
            return choice
    raise PlanError(f"the plan computes {name!r} again in a stage, which this version does not know. Plan again.")
