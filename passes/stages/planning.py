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
from alpa_lite.passes import factors
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.pruning import renumbered
from alpa_lite.passes.lowering import lowering
from alpa_lite.passes.lowering.program import LocalProgram
from alpa_lite.passes.sharding import grouping, search
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.market import market
from alpa_lite.passes.sharding.search import Found
from alpa_lite.passes.stages import packing, segment_costs, segments
from alpa_lite.passes.stages.segments import Segment, Segments
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.program import Submesh, buffer
from alpa_lite.strategy import Rule

GAP = 5e-3
"""(objective - bound) / objective at which the sharding of a stage counts as optimal."""


@dataclass(frozen=True)
class Held:
    """Bytes per device that a stage holds between its runs.

    Attributes:
      fixed: arguments, and what is computed before the micro-batches.
      saved: for each micro-batch in flight, what the backward pass reads of the forward pass.
      entering: for each micro-batch in flight, what comes from the stage before.
    """

    fixed: int
    saved: int
    entering: int


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """A stage, solved and cut.

    Attributes:
      graph, rules, grouping, found, program: what each pass made of it; the graph's values are numbered densely.
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
    def communication(self) -> dict[Segment, float]:
        """The part of `seconds` that is spent in collectives."""
        cost = MeshCost(self.cluster, self.found.mesh)
        return {s: segment_costs.communication(self.segments, s, cost, self.rules) for s in self.segments.items}

    @cached_property
    def temporary(self) -> dict[Segment, int]:
        """Predicted bytes per device that one run of each segment needs beyond inputs and outputs."""
        return {s: segment_costs.temporary_bytes(self.segments, s) for s in self.segments.items}

    @cached_property
    def held(self) -> Held:
        """Bytes of the buffers between runs."""
        fixed = saved = entering = 0
        for segment in self.segments.items:
            for i, wire in enumerate(segment.inputs):
                if segment.kind == "backward" and wire.kind == "saved":
                    saved += self.wire_bytes(segment, i)
                if segment.kind == "forward" and wire.kind == "crossing":
                    entering += self.wire_bytes(segment, i)
            if segment.kind == "prologue":
                fixed += sum(self.wire_bytes(segment, i, output=True) for i in range(len(segment.outputs)))
        for port, register in zip(self.graph.inputs, self.program.body.inputs, strict=False):
            if port.kind in ("argument", "copy"):
                fixed += bytes_of(self.found.mesh, *self.segments.register_type(register))
        return Held(fixed, saved, entering)

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
      price: of memory, in units of `sharding.market.Market`.
      time_limit: seconds for each integer program.
      split_weights: as for `stages.segments.cut`.
      like: a planned stage with the same `digest`, on a submesh of the same kind, whose choices are taken over.

    Raises:
      InfeasibleError: no choice was found in the time.
    """
    traced = replace(graph.traced, graph=renumbered(graph.traced.graph))
    graph = replace(graph, traced=traced)
    if like is not None:  # equal digests, and equal value numbers: the graphs differ in names alone
        groups = replace(like.grouping, ops={op.index: op for op in traced.graph.ops()})
        return realised(graph, like.rules, groups, like.found, cluster, split_weights=split_weights)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
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
    cut = packing.packed(cut, packing.limit(cluster.memory_bandwidth))
    return PlannedStage(graph, rules, groups, found, program, cut, cluster)


def bytes_of(mesh: LogicalMesh, shape: tuple[int, ...], dtype: Any, layout: Layout) -> int:
    """Bytes per device of an array without partial sums."""
    return buffer(0, Submesh(mesh, 0), layout, shape, dtype).bytes


def digest(graph: StageGraph) -> str:
    """Equal for stages with identical plans: the same operations wired the same way, arguments of the same roles."""
    traced, keys = graph.traced, Keys()
    roles = ",".join(a.role for a in traced.arguments)
    ports = ",".join(port.kind for port in (*graph.inputs, *graph.outputs))
    blocks = [traced.graph.block, *(body for op in traced.graph.block.ops for body in op.bodies)]
    bodies = ",".join(keys.block(block, traced.graph.values.__getitem__) for block in blocks)
    return f"{bodies} {roles} {ports} {traced.state}"
