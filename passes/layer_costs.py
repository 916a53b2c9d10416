"""What one layer costs as a stage of its own, on each kind of submesh, at each price of memory: what a stage DP sums.

A range of layers shares one budget, which no layer alone can know. So instead of a budget a layer is given a price of
memory (Lagrange), and chooses the sharding that minimises

    seconds + price * bytes, averaged over the program's points,

once for nothing, and once at a price that makes all its bytes worth some multiple of all its seconds. The first is the
fastest choice; the second shards or gathers whatever saves more memory than it costs time, each as a share of the
whole. The stage DP then finds which of the two a stage can afford. Averaging rather than charging the fullest point
makes dear what lives long: parameters, gradients, and what waits for the backward pass.

Prices leave the integer program without a hard constraint, and that is solved by message passing in a tenth of the time
(`sharding_search`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import InfeasibleError
from alpa_lite.options import Sharded
from alpa_lite.passes import factors, grouping, lowering, search, segments, strategies
from alpa_lite.passes.sharding_problem import Problem, from_graph, price_memory
from alpa_lite.passes.sharding_search import Search
from alpa_lite.passes.stage_planning import PlannedStage, bytes_of
from alpa_lite.passes.staging import StageGraph
from alpa_lite.strategy import Solution

PRICES = (0.0, 4.0)
"""Prices of memory, as a multiple of a layer's fastest seconds over the bytes that these take."""

GAP = 1e-2
"""How near the optimum the choice of a layer is: its cost is an estimate for the stage DP."""


@dataclass(frozen=True)
class LayerCost:
    """One layer on one kind of submesh at one price of memory.

    Attributes:
      mesh_shape: of the best logical mesh.
      forward, backward: seconds for one micro-batch.
      update: seconds once a step, with what is computed before the micro-batches.
      fixed: bytes per device of arguments and of what is computed before the micro-batches.
      saved: bytes per device and micro-batch of what the backward pass reads of the forward pass.
      entering: bytes per device and micro-batch of what comes from the layer before.
      temporary: bytes per device that the largest segment needs besides.
    """

    mesh_shape: tuple[int, ...]
    forward: float
    backward: float
    update: float
    fixed: float
    saved: float
    entering: float
    temporary: float


def layer_costs(
    graph: StageGraph, clusters: Sequence[Cluster], methods: Sequence[Sharded], *, time_limit: float, max_axes: int = 2
) -> tuple[tuple[LayerCost, ...], ...]:
    """For each submesh, the costs at each of `PRICES`.

    Args:
      graph: the layer as a stage.
      clusters: the devices of each kind of submesh.
      methods: for each of them, the logical meshes that are allowed.
      time_limit: seconds for each integer program.
      max_axes: the most axes of a logical mesh that is not given.
    """
    traced = graph.traced
    rules = factors.rules(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    shared = strategies.Shared(traced, groups)
    out = []
    for cluster, method in zip(clusters, methods, strict=True):
        tried = []
        for mesh in search.meshes(cluster, method, max_axes):
            space = strategies.build(traced, groups, rules, MeshCost(cluster, mesh), shared=shared)
            problem = from_graph(space.program)
            tried.append((mesh, space, problem, _solved(problem, 0.0, time_limit)))
        fastest = min((free for _, _, _, free in tried), key=lambda free: free.objective)
        unit = fastest.objective / max(fastest.peak, 1.0)
        costs: list[LayerCost] = []
        for price in PRICES:
            priced = [free if price == 0 else _solved(problem, price * unit, time_limit) for *_, problem, free in tried]
            best = min(range(len(tried)), key=lambda i: priced[i].objective)
            mesh, space, solution = tried[best][0], tried[best][1], priced[best]
            choice = tuple(space.nodes[n].strategies[solution.choice[n]] for n in space.node_of)
            program = lowering.lower(traced, groups, rules, mesh, choice, space.late_from)
            cut = segments.cut(graph, program, split_weights=False)
            found = search.Found(mesh, space, solution, choice, ())
            costs.append(_cost(PlannedStage(graph, rules, groups, found, program, cut, cluster)))
        out.append(tuple(costs))
    return tuple(out)


def _solved(problem: Problem, price: float, time_limit: float) -> Solution:
    """The best choice at a price of memory, in seconds per byte; its objective includes what memory costs.

    Raises:
      InfeasibleError: no choice is allowed at all, or none was found in the time.
    """
    started = time.perf_counter()
    points = len(problem.base)
    priced = price_memory(problem, np.full(points, price / max(points, 1)))
    search_of = Search(priced, np.inf, GAP, started + time_limit)
    search_of.run()
    if search_of.choice is None:
        raise InfeasibleError(f"no sharding of a layer was found in {time_limit:g} s; allow more solver_time_limit")
    return replace(search_of.solution("feasible", started), peak=problem.peak(search_of.choice))


def _cost(planned: PlannedStage) -> LayerCost:
    seconds = {"forward": 0.0, "backward": 0.0, "update": 0.0, "prologue": 0.0}
    temporary = saved = entering = fixed = 0
    for segment in planned.segments.items:
        seconds[segment.kind] += planned.seconds[segment]
        temporary = max(temporary, planned.temporary[segment])
        for i, wire in enumerate(segment.inputs):
            if segment.kind == "backward" and wire.kind == "saved":
                saved += planned.wire_bytes(segment, i)
            if segment.kind == "forward" and wire.kind == "crossing":
                entering += planned.wire_bytes(segment, i)
        if segment.kind == "prologue":
            fixed += sum(planned.wire_bytes(segment, i, output=True) for i in range(len(segment.outputs)))
    for port, register in zip(planned.graph.inputs, planned.program.body.inputs, strict=False):
        if port.kind in ("argument", "copy"):
            shape, dtype, layout = planned.segments.register_type(register)
            fixed += bytes_of(planned.found.mesh, shape, dtype, layout)
    return LayerCost(
        planned.found.mesh.shape, seconds["forward"], seconds["backward"], seconds["update"] + seconds["prologue"],
        fixed, saved, entering, temporary,
    )  # fmt: skip
