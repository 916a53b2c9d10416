"""Plans one stage of a pipeline: the integer program on its submesh, lowered and cut into segments.

A stage is a step of its own (`staging`), so the passes of one mesh plan it. This module adds the costs of a stage as
part of a pipeline: seconds of each of its segments, and bytes that depend on how many micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.program import Submesh, buffer
from alpa_lite.ir.strategy import Rule
from alpa_lite.options import Sharded
from alpa_lite.passes import factors
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.pruning import renumber
from alpa_lite.passes.lowering.lowering import lower
from alpa_lite.passes.lowering.overlap import Overlap, OverlapSearch
from alpa_lite.passes.lowering.prices import Prices, prices
from alpa_lite.passes.lowering.program import LocalProgram
from alpa_lite.passes.sharding import grouping, limits
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.lagrangian import LagrangianSearch, search_at_prices
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.stages import cutting, packing, stage_graph, temporaries
from alpa_lite.passes.stages.segments import Segment, Segments, Wire
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.pins import NO_PINS, NO_WISHES, Pins, Wishes

T = TypeVar("T")

GAP = 5e-3
"""(objective - bound) / objective at which the sharding of a stage counts as optimal."""

STAGE_WORK = 400_000_000
"""The most work of solving a stage at one price, in the unit of `solver.work`: a few seconds."""


@dataclass(frozen=True)
class HeldBytes:
    """Bytes per device that a stage holds between its runs.

    Attributes:
      fixed_bytes: arguments, and what is computed before the micro-batches.
      saved_bytes: for each micro-batch in flight, what the backward pass reads of the forward pass.
      entering_bytes: for each micro-batch in flight, what comes from the stage before.
      weight_bytes: for each micro-batch in flight, what the weight pass reads of the passes before, if there is one.
    """

    fixed_bytes: int
    saved_bytes: int
    entering_bytes: int
    weight_bytes: int = 0


@dataclass(frozen=True, eq=False)
class DecidedStage:
    """A stage, solved.

    Attributes:
      graph: the stage as a step of its own; its values are numbered densely.
      rules, grouping, mesh_solution: what each pass made of it.
      cluster: the devices of its submesh, as a cluster.
      offers: what it could do at other prices of memory; None if it was not solved at a price.
    """

    graph: StageGraph
    rules: Mapping[Any, Rule]
    grouping: Grouping
    mesh_solution: MeshSolution
    cluster: Cluster
    offers: LagrangianSearch | None = field(default=None, kw_only=True)


@dataclass(frozen=True, eq=False)
class PlannedStage(DecidedStage):
    """A stage, solved, lowered and cut.

    Attributes:
      program: what each device does.
      segments: what a schedule runs; of a step that is not divided, one that is all of it.
      communication: "explicit", or "compiler" where the collectives are left to it.
      twin: an identical stage on an identical submesh, with the same choices, cut at the same places; what it costs is
        what this one costs.
    """

    program: LocalProgram
    segments: Segments
    communication: str
    twin: PlannedStage | None = None

    @cached_property
    def num_microbatches(self) -> int:
        """How often its forward and backward segments run."""
        traced = self.graph.traced
        return next((int(op.params["length"]) for op in traced.graph.block.ops if op.index == self.graph.scan), 1)

    @cached_property
    def prices(self) -> Prices:
        """The costs of its instructions."""
        if self.twin is not None:
            return replace(self.twin.prices, traced=self.graph.traced, program=self.program)
        cost = MeshCost(self.cluster, self.mesh_solution.mesh)
        return prices(self.graph.traced, self.grouping, self.rules, cost, self.mesh_solution, self.program)

    @cached_property
    def seconds(self) -> dict[Segment, float]:
        """Predicted seconds of one run of each segment. Reading arguments belongs to the last segment."""
        if self.twin is not None:
            return self._of_twin(self.twin.seconds)
        out = {}
        for segment in self.segments.items:
            if segment.kind == "step":  # what its prices add up to, without their rounding
                return {segment: self.mesh_solution.solution.objective - self.overlap[segment].hidden_seconds}
            compute = self.prices.compute(segment.instructions)
            if segment is self.segments.items[-1]:
                compute += self.prices.arguments
            waiting = self.communication_seconds[segment] - self.overlap[segment].hidden_seconds
            out[segment] = compute / self.runs(segment) + waiting
        return out

    @cached_property
    def overlap(self) -> dict[Segment, Overlap]:
        """The communication of one run of each segment that hides behind its computing."""
        if not self.cluster.has_overlap:
            return dict.fromkeys(self.segments.items, Overlap())
        if self.twin is not None:
            return self._of_twin(self.twin.overlap)
        streams = OverlapSearch(self.prices)
        return {segment: streams.find_overlap(segment.instructions) for segment in self.segments.items}

    @cached_property
    def communication_seconds(self) -> dict[Segment, float]:
        """Seconds of the collectives of one run of each segment, those that hide included."""
        if self.twin is not None:
            return self._of_twin(self.twin.communication_seconds)
        return {s: sum(cost for _, cost in self.prices.listed_collectives(s.instructions)) for s in self.segments.items}

    @cached_property
    def temporary_bytes(self) -> dict[Segment, int]:
        """Predicted bytes per device that one run of each segment needs beyond inputs and outputs."""
        if self.twin is not None:
            return self._of_twin(self.twin.temporary_bytes)
        return {s: temporaries.temporary_bytes(self.segments, s, self.cluster.platform) for s in self.segments.items}

    @cached_property
    def held(self) -> HeldBytes:
        """Bytes of the buffers between runs."""
        if self.twin is not None:
            return self.twin.held
        mesh, fixed, saved, entering, apart = self.mesh_solution.mesh, 0, 0, 0, 0
        seen: set[Wire] = set()  # of what one slice of the sequence saves, several may read
        for segment in self.segments.items:
            for wire, registers in segment.inputs.items():
                size = bytes_of(mesh, *self.segments.type_of(wire, registers))
                if segment.kind == "backward" and wire.kind == "saved" and wire not in seen:
                    seen.add(wire)
                    saved += size
                if segment.kind == "weight" and wire.kind in ("saved", "crossing"):
                    apart += size
                if segment.kind == "forward" and wire.kind == "crossing":
                    entering += size
            if segment.kind == "prologue":
                fixed += sum(bytes_of(mesh, *self.segments.type_of(*one)) for one in segment.outputs.items())
        for port, register in zip(self.graph.inputs, self.program.body.inputs, strict=False):
            if port.kind in ("argument", "copy"):
                fixed += bytes_of(mesh, *self.segments.register_type(register))
        return HeldBytes(fixed, saved, entering, apart)

    def _of_twin(self, table: Mapping[Segment, T]) -> dict[Segment, T]:
        """Returns the twin's table for the segments of this stage."""
        return dict(zip(self.segments.items, table.values(), strict=True))

    def runs(self, segment: Segment) -> int:
        """Returns how often a step runs a segment."""
        return self.num_microbatches if segment.kind in ("forward", "backward", "weight") else 1


def decide(
    graph: StageGraph,
    cluster: Cluster,
    method: Sharded,
    *,
    price: float,
    split_weights: bool = False,
    pins: Pins = NO_PINS,
    wishes: Wishes = NO_WISHES,
    like: DecidedStage | None = None,
    unit: float | None = None,
) -> DecidedStage:
    """Solves a stage of several on its submesh.

    Args:
      cluster: the submesh's devices as a cluster.
      method: which logical meshes are allowed.
      price: of memory, in units of `sharding.lagrangian`.
      split_weights: whether gradients of parameters run in a segment of their own.
      pins: where arguments of the stage lie, by their number in it, all on one mesh; that mesh comes before the method.
      wishes: what the user says of arguments.
      like: a solved stage with the same `digest` and pins, on a submesh of the same kind, whose choices are taken over.
      unit: seconds per byte of price 1; None for that of the stage.

    Raises:
      InfeasibleError: the stage has no choice.
    """
    traced = replace(graph.traced, graph=renumber(graph.traced.graph))
    graph = replace(graph, traced=traced)
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    if like is not None and _same_rules(like, traced, rules):
        # Equal digests, and values numbered in the same way: the graphs differ in names, and in numbers, alone.
        groups = replace(like.grouping, ops={op.index: op for op in traced.graph.ops()})
        return DecidedStage(graph, rules, groups, like.mesh_solution, cluster, offers=like.offers)
    step = group_stage(graph, rules, split_weights=split_weights)
    admitted = limits.admissible_meshes(step, cluster, method, wishes, pins)
    offers = search_at_prices(step, cluster, admitted, max_work=STAGE_WORK, gap=GAP)
    offers = offers if unit is None else replace(offers, unit=unit)
    return DecidedStage(graph, rules, step.grouping, offers.solve_at(price), cluster, offers=offers)


def group_stage(graph: StageGraph, rules: Mapping[Any, Rule], *, split_weights: bool) -> GroupedStep:
    """Returns a stage for the integer program. `split_weights`: as for `cutting.cut`."""
    groups = grouping.group(graph.traced, rules, graph.apart_results)
    return GroupedStep(graph.traced, groups, rules, stage_graph.repeats(graph, split_weights=split_weights))


def reprice_stage(stage: DecidedStage, price: float) -> DecidedStage:
    """Returns a solved stage at another price of memory, whose integer programs are there already. As `decide`."""
    assert stage.offers is not None
    offers = stage.offers.reset()
    return replace(stage, mesh_solution=offers.solve_at(price), offers=offers)


def _same_rules(like: DecidedStage, traced: Traced, rules: Mapping[Any, Rule]) -> bool:
    """Returns whether the operations of a step have the rules of those of a solved stage with the same digest."""
    pairs = zip(like.graph.traced.graph.ops(), traced.graph.ops(), strict=True)
    return all(like.rules.get(before.key) == rules.get(op.key) for before, op in pairs)


def lower_stage(stage: DecidedStage, *, split_weights: bool, like: PlannedStage | None = None) -> PlannedStage:
    """Returns a solved stage, lowered and cut into segments.

    Args:
      split_weights: as for `cutting.cut`.
      like: the planned stage whose choices this one has taken over, if it has.
    """
    planned = _planned(stage, partial(cutting.cut, split_weights=split_weights), "explicit")
    segments = packing.pack_segments(planned.segments, packing.limit(stage.cluster.memory_bandwidth))
    is_twin = like is not None and like.mesh_solution is stage.mesh_solution and _same_parts(like.segments, segments)
    return replace(planned, segments=segments, twin=like if is_twin else None)


def _same_parts(before: Segments, after: Segments) -> bool:
    """Returns whether two identical programs are cut at the same places: their segments then cost the same, one by one.

    Identical operations may belong to other rounds of the update.
    """

    def parts(segments: Segments) -> list[tuple[Any, ...]]:
        return [
            (s.kind, s.round, list(s.inputs.values()), [w.kind for w in s.inputs], [w.kind for w in s.outputs],
             [-1 if isinstance(operand, Lit) else operand for some in s.outputs.values() for operand in some],
             [(item.reads, item.results) for item in s.instructions])
            for s in segments.items
        ]  # fmt: skip

    return parts(before) == parts(after)


def lower_whole_step(stage: DecidedStage, communication: str) -> PlannedStage:
    """Returns a solved step that is not divided, lowered into one segment."""
    if stage.grouping.traced.copies is not None:
        stage = replace(stage, graph=stage_graph.whole_step_stage(stage.grouping.traced, stage.graph.scan))
    return _planned(stage, cutting.cut_whole_step, communication)


def overlapped_seconds(step: GroupedStep, cluster: Cluster, found: MeshSolution) -> float:
    """Returns the seconds of a step that is not divided, without communication that hides behind computing."""
    if not cluster.has_overlap:
        return found.solution.objective
    decided = DecidedStage(stage_graph.whole_step_stage(step.traced, -1), step.rules, step.grouping, found, cluster)
    return sum(lower_whole_step(decided, "explicit").seconds.values())


def _planned(
    stage: DecidedStage, cut: Callable[[StageGraph, LocalProgram], Segments], communication: str
) -> PlannedStage:
    """Returns a solved stage, lowered and cut."""
    graph, rules, groups, found = stage.graph, stage.rules, stage.grouping, stage.mesh_solution
    program = lower(graph.traced, groups, rules, found.mesh, found.choice, found.space.late_from)
    return PlannedStage(graph, rules, groups, found, stage.cluster, program, cut(graph, program), communication)


def bytes_of(mesh: LogicalMesh, shape: tuple[int, ...], dtype: Any, layout: Layout) -> int:
    """Returns bytes per device of an array without partial sums."""
    return buffer(0, Submesh(mesh, 0), layout, shape, dtype).bytes


def digest(graph: StageGraph, wishes: Wishes = NO_WISHES) -> str:
    """Equal for stages with identical plans: the same operations wired the same way, arguments of the same roles.

    The user must say the same of their arguments, too. Numbers on which nothing depends that is planned do not count
    (`Keys.block`), nor does the step that a stage is cut from, which the key of its loop over micro-batches is of.
    """
    traced, keys = graph.traced, Keys()
    loop = next((op for op in traced.graph.block.ops if op.index == graph.scan), None)
    block = traced.graph.block
    if loop is not None:
        own = replace(loop, key=keys.head(loop.primitive, loop.params, structured=True))
        block = replace(block, ops=tuple(own if op is loop else op for op in block.ops))
    roles = ",".join(a.role for a in traced.arguments)
    ports = ",".join(port.kind for port in (*graph.inputs, *graph.outputs))
    blocks = [block, *(body for op in block.ops for body in op.bodies)]
    bodies = ",".join(keys.block(block, traced.graph.values.__getitem__, numbers=False) for block in blocks)
    said = [wish and wish.dims for wish in map(wishes.leaf, (a.path for a in traced.arguments))]
    return f"{bodies} {roles} {ports} {traced.state} {said if any(said) else ''}"
