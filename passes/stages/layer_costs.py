"""What one layer costs as a stage of its own, on each kind of submesh, at each price of memory: what a stage DP sums.

A range of layers shares one budget, which no layer alone can know. So a layer is planned twice, with memory for nothing
and at a price (`sharding.market`): the first is the fastest choice, the second shards or gathers whatever saves more
memory than it costs time. The stage DP then finds which of the two a stage can afford.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from alpa_lite.cluster import Cluster
from alpa_lite.graph import Lit
from alpa_lite.layout import LogicalMesh
from alpa_lite.options import Sharded
from alpa_lite.passes import factors
from alpa_lite.passes.layers.rematerialisation import is_kept
from alpa_lite.passes.lowering.program import Compute, Instruction, Loop, Operand, reads, writes
from alpa_lite.passes.sharding import grouping, limits, tables
from alpa_lite.passes.sharding.market import market
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage, bytes_of, lowered
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.pins import NO_WISHES, Wishes

PRICES = (0.0, 4.0)
"""Prices of memory, in units of `sharding.market.Market`."""

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
      kept: of that what the selective choice of rematerialisation saves: results of products and the like.
      again: seconds for one micro-batch of computing the rest of it again.
      entering: bytes per device and micro-batch of what comes from the layer before.
      temporary: bytes per device that the largest segment needs in addition.
    """

    mesh_shape: tuple[int, ...]
    forward: float
    backward: float
    update: float
    fixed: float
    saved: float
    kept: float
    again: float
    entering: float
    temporary: float


class Layer:
    """A layer as a stage, and what it costs on the submeshes that were asked for."""

    def __init__(self, graph: StageGraph, wishes: Wishes = NO_WISHES) -> None:
        """`wishes`: what the user says of arguments."""
        traced = graph.traced
        self._graph, self._wishes = graph, wishes
        self._rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
        self._groups = grouping.group(traced, self._rules)
        self._shared = tables.Shared(traced, self._groups)
        self._known: dict[tuple[int, Sharded], tuple[LayerCost, ...]] = {}

    def costs(self, cluster: Cluster, method: Sharded, *, time_limit: float) -> tuple[LayerCost, ...]:
        """The costs at each of `PRICES`.

        Args:
          cluster: the devices of a kind of submesh; those of one cluster that are as many are of one kind.
          method: the logical meshes that are allowed.
          time_limit: `solver_time_limit` of the options.
        """
        key = cluster.num_devices, method
        if key not in self._known:
            self._known[key] = self._solved(cluster, method, time_limit)
        return self._known[key]

    def _solved(self, cluster: Cluster, method: Sharded, time_limit: float) -> tuple[LayerCost, ...]:
        graph, rules, groups = self._graph, self._rules, self._groups
        found = limits.admitted(graph.traced, groups, cluster, method, self._wishes, max_axes=2)
        admitted = tuple(one for one in found if _sensible(one[0], cluster, method)) or found
        offers = market(
            graph.traced, groups, rules, cluster, admitted, time_limit=time_limit, gap=GAP, shared=self._shared
        )  # fmt: skip
        costs: list[LayerCost] = []
        for price in PRICES:
            decided = DecidedStage(graph, rules, groups, offers.at(price), cluster)
            costs.append(_cost(lowered(decided, split_weights=False)))
        return tuple(costs)


def _sensible(mesh: LogicalMesh, cluster: Cluster, method: Sharded) -> bool:
    """Whether a layer is tried on a logical mesh, which has two axes at most: of several nodes one axis along them."""
    free = method.mesh_shape is None and cluster.nodes > 1
    return not free or len(mesh.shape) == 1 or mesh.shape[0] == cluster.nodes


def _cost(planned: PlannedStage) -> LayerCost:
    seconds = {"forward": 0.0, "backward": 0.0, "update": 0.0, "prologue": 0.0}
    for segment in planned.segments.items:
        seconds[segment.kind] += planned.seconds[segment]
    held = planned.held
    kept, again = _selective(planned)
    return LayerCost(
        mesh_shape=planned.found.mesh.shape,
        forward=seconds["forward"],
        backward=seconds["backward"],
        update=seconds["update"] + seconds["prologue"],
        fixed=held.fixed,
        saved=held.saved,
        kept=min(kept, held.saved),
        again=again,
        entering=held.entering,
        temporary=max(planned.temporary.values(), default=0),
    )


def _selective(planned: PlannedStage) -> tuple[float, float]:
    """Bytes per device that the selective choice saves of a micro-batch, and seconds of what it computes again."""
    segment = planned.segments.of("forward")
    if segment is None:
        return 0.0, 0.0
    saved = [o for wire, o in zip(segment.outputs, segment.reads, strict=True) if wire.kind == "saved"]
    items, kept = _again(planned, segment.instructions, saved)
    seconds = planned.prices.compute(items) / planned.runs(segment)
    return kept, seconds + sum(cost for _, cost in planned.prices.collectives(items))


def _again(
    planned: PlannedStage, items: Sequence[Instruction], wanted: Iterable[Operand]
) -> tuple[tuple[Instruction, ...], float]:
    """The instructions that some registers need if kept results are there, and the bytes of those results."""
    needed = {o for o in wanted if not isinstance(o, Lit)}
    found: list[Instruction] = []
    total = 0.0
    for item in reversed(items):
        if needed.isdisjoint(writes(item)):
            continue
        if isinstance(item, Compute) and is_kept(item.op):
            total += sum(_bytes(planned, r) for r in item.results)
            continue
        if isinstance(item, Loop) and item.op.name == "scan":
            inner = [_again(planned, body.instructions, body.outputs) for body in item.bodies]
            bodies = tuple(replace(body, instructions=own) for body, (own, _) in zip(item.bodies, inner, strict=True))
            total += item.op.params["length"] * sum(size for _, size in inner)
            item = replace(item, bodies=bodies)
        found.append(item)
        needed.update(reads(item))
    return tuple(reversed(found)), total


def _bytes(planned: PlannedStage, register: int) -> int:
    shape, dtype, layout = planned.segments.register_type(register)
    return bytes_of(planned.found.mesh, shape, dtype, layout)
