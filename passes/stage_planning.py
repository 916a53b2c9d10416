"""Plans one stage of a pipeline: the integer program on its submesh, lowered and cut into segments.

A stage is a step of its own (`staging`), so the passes of one mesh plan it. What is added here is what a stage costs as
part of a pipeline: seconds of each of its segments, and bytes that depend on how many micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.layout import Layout, LogicalMesh
from alpa_lite.options import Sharded
from alpa_lite.passes import factors, grouping, lowering, search, segment_costs, segments, strategies
from alpa_lite.passes.grouping import Grouping
from alpa_lite.passes.keys import Keys
from alpa_lite.passes.local_program import LocalProgram
from alpa_lite.passes.priced_search import market
from alpa_lite.passes.search import Found
from alpa_lite.passes.segments import Segment, Segments
from alpa_lite.passes.staging import StageGraph
from alpa_lite.program import Submesh, buffer
from alpa_lite.strategy import Rule

GAP = 5e-3
"""(objective - bound) / objective at which the sharding of a stage counts as optimal."""


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """A stage, solved and cut.

    Attributes:
      graph, rules, grouping, found, program: what each pass made of it.
      segments: what a schedule runs.
      cluster: the devices of its submesh, as a cluster.
    """

    graph: StageGraph
    rules: Mapping[Any, Rule]
    grouping: Grouping
    found: Found
    program: LocalProgram
    segments: Segments
    cluster: Cluster

    @cached_property
    def seconds(self) -> dict[Segment, float]:
        """Predicted seconds of one run of each segment."""
        cost = MeshCost(self.cluster, self.found.mesh)
        return {s: segment_costs.seconds(self.segments, s, cost, self.rules) for s in self.segments.items}

    @cached_property
    def temporary(self) -> dict[Segment, int]:
        """Predicted bytes per device that one run of each segment needs besides inputs and outputs."""
        return {s: segment_costs.temporary_bytes(self.segments, s) for s in self.segments.items}

    def wire_bytes(self, segment: Segment, position: int, *, output: bool = False) -> int:
        """Bytes per device of a segment's input or output."""
        shape, dtype, layout = self.segments.type_of(segment, position, output=output)
        return bytes_of(self.found.mesh, shape, dtype, layout)


def plan(
    graph: StageGraph,
    cluster: Cluster,
    method: Sharded,
    *,
    price: float,
    time_limit: float,
    split_weights: bool,
    like: PlannedStage | None = None,
) -> PlannedStage:
    """Plans a stage on its submesh.

    Args:
      cluster: the submesh's devices as a cluster.
      method: which logical meshes are allowed.
      price: of memory, in units of `priced_search.Market`.
      time_limit: seconds for each integer program.
      split_weights: as for `segments.cut`.
      like: a planned stage with the same `digest`, whose choices are taken over without solving.

    Raises:
      InfeasibleError: no choice was found in the time.
    """
    traced = graph.traced
    rules = factors.rules(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    found = _taken_over(like, graph, groups, rules, cluster) if like is not None else None
    if found is None:
        meshes = search.meshes(cluster, method)
        found = market(traced, groups, rules, cluster, meshes, time_limit=time_limit, gap=GAP).at(price)
    return realised(graph, rules, groups, found, cluster, split_weights=split_weights)


def realised(
    graph: StageGraph, rules: Mapping[Any, Rule], groups: Grouping, found: Found, cluster: Cluster, *,
    split_weights: bool,
) -> PlannedStage:  # fmt: skip
    """A solved stage, lowered and cut into segments; arguments as for `plan`."""
    program = lowering.lower(graph.traced, groups, rules, found.mesh, found.choice, found.space.late_from)
    cut = segments.cut(graph, program, split_weights=split_weights)
    return PlannedStage(graph, rules, groups, found, program, cut, cluster)


def _taken_over(
    like: PlannedStage, graph: StageGraph, groups: Grouping, rules: Mapping[Any, Rule], cluster: Cluster
) -> Found | None:
    """The choices of an alike stage for this one; None where the groups are not the same after all."""
    before = like.found
    space = strategies.build(graph.traced, groups, rules, MeshCost(cluster, before.mesh))
    choice = before.solution.choice
    alike = len(space.nodes) == len(before.space.nodes) and all(
        a.strategies == b.strategies for a, b in zip(space.nodes, before.space.nodes, strict=True)
    )
    if not alike:
        return None
    chosen = tuple(space.nodes[n].strategies[choice[n]] for n in space.node_of)
    return replace(before, space=space, choice=chosen)


def bytes_of(mesh: LogicalMesh, shape: tuple[int, ...], dtype: Any, layout: Layout) -> int:
    """Bytes per device of an array without partial sums."""
    return buffer(0, Submesh(mesh, 0), layout, shape, dtype).bytes


def digest(graph: StageGraph) -> str:
    """Equal for stages that are planned alike: the same operations wired the same way, arguments of the same roles."""
    traced = graph.traced
    roles = ",".join(a.role for a in traced.arguments)
    ports = ",".join(port.kind for port in (*graph.inputs, *graph.outputs))
    return f"{Keys().block(traced.graph.block, traced.graph.values.__getitem__)} {roles} {ports} {traced.state}"
