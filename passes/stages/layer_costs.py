"""Costs of one layer as a stage of its own, on each kind of submesh, at each price of memory: the terms of a stage DP.

A range of layers shares one budget, which no layer alone can know. So a layer is planned with memory for nothing and at
prices (`sharding.lagrangian`): the first is the fastest choice, the others shard or gather where that saves more memory
than it costs time. The stage DP then finds which of them a stage can afford.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from alpa_lite.cluster import Cluster
from alpa_lite.ir.graph import Lit
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.options import Sharded
from alpa_lite.passes import factors
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.layers.rematerialisation import Choice, is_kept
from alpa_lite.passes.lowering.program import Compute, Instruction, Loop, Operand, Reshard, reads, writes
from alpa_lite.passes.sharding import grouping, limits, tables
from alpa_lite.passes.sharding.lagrangian import LagrangianSearch, search_at_prices
from alpa_lite.passes.sharding.space import Strategy
from alpa_lite.passes.stages import repeating, temporaries
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage, bytes_of, lowered
from alpa_lite.passes.stages.segments import Segment
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.plan.pins import NO_WISHES, Wishes

PRICES = (0.0, 4.0, 16.0)
"""Prices of memory, in units of `sharding.lagrangian`.

With the last, a GPT of 39 billion parameters on 64 V100 has room for transfers that hide: 61.4 s a step, not 69.7.
"""

LAYER_WORK = 15_000_000
"""The most work of solving a layer at one price, in the unit of `solver.work`: a fraction of a second."""

GAP = 1e-2
"""How near the optimum the choice of a layer is: its cost is an estimate for the stage DP."""


@dataclass(frozen=True)
class LayerCost:
    """One layer on one kind of submesh at one price of memory.

    Attributes:
      mesh_shape: of the best logical mesh.
      forward, backward: seconds for one micro-batch.
      steady: of `forward`, seconds that do not depend on the size of a micro-batch: latency, and collectives of what is
        not made of examples, such as parameters that are gathered.
      adding: the same of `backward`, with gradients that are added to their sums.
      again_steady: the same of `again`.
      update: seconds once a step, with what is computed before the micro-batches.
      fixed: bytes per device of arguments and of what is computed before the micro-batches.
      saved: bytes per device and micro-batch of what the backward pass reads of the forward pass.
      kept: of that what the selective choice of rematerialisation saves: results of products and the like.
      again: seconds for one micro-batch of computing the rest of it again.
      entering: bytes per device and micro-batch of what comes from the layer before.
      temporary: bytes per device that the largest segment needs in addition.
      temporary_layer, temporary_selective: the same where the backward pass computes the layer again, or what the
        selective choice does not save.
      lasting: of `temporary`, bytes that do not depend on the size of a micro-batch, such as those of gathered
        parameters and of gradients before they are added to their sums.
      apart: bytes per device and micro-batch of what gradients of parameters read, where they are computed apart.
      seconds: of a step, of the fastest choice with memory for nothing; bytes: per device, of that at its peak. Their
        ratio is the unit of prices.
      shared: the leading dim of what comes from or goes to other layers, the examples of a micro-batch, and into how
        many parts it is cut.
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
    temporary_layer: float
    temporary_selective: float
    apart: float = 0.0
    adding: float = 0.0
    steady: float = 0.0
    again_steady: float = 0.0
    lasting: float = 0.0
    seconds: float = 0.0
    bytes: float = 0.0
    shared: tuple[int, int] = (1, 1)


class Layer:
    """A layer as a stage, and its costs on the requested submeshes at the requested prices of memory."""

    def __init__(self, graph: StageGraph, wishes: Wishes = NO_WISHES) -> None:
        """`wishes`: what the user says of arguments."""
        traced = graph.traced
        self._graph, self._wishes = graph, wishes
        self._rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
        self._groups = grouping.group(traced, self._rules, graph.apart_results)
        self._step = tables.GroupedStep(traced, self._groups, self._rules, repeating.repeats(graph))
        self._searches: dict[tuple[int, Sharded], LagrangianSearch] = {}
        self._known: dict[tuple[int, Sharded, int, tuple[int, ...]], LayerCost] = {}
        self._least: LayerCost | None = None
        self._of_choice: dict[tuple[int, LogicalMesh, tuple[Strategy, ...]], LayerCost] = {}

    def least(self, cluster: Cluster) -> LayerCost:
        """On one device, where there is nothing to choose.

        Several devices share its seconds and bytes at best: what each of n computes and holds is at least an n-th.
        """
        if self._least is None:
            one = cluster.part(1)
            found = limits.admitted(self._step, one, Sharded((1,)), NO_WISHES, max_axes=2)
            self._least = self._cost(one, self._search(one, found), PRICES[0])
        return self._least

    def at(self, cluster: Cluster, method: Sharded, price: int, shape: tuple[int, ...] = ()) -> LayerCost:
        """The cost at one of `PRICES`, by number.

        Args:
          cluster: the devices of a kind of submesh; those of one cluster that are as many are of one kind.
          method: the logical meshes that are allowed.
          shape: of the logical mesh; empty for the one that suits the layer best, as is one that it cannot have.

        Raises:
          InfeasibleError: the layer has no choice.
        """
        kind = cluster.num_devices, method
        if kind not in self._searches:
            found = limits.admitted(self._step, cluster, method, self._wishes, max_axes=2)
            sensible = tuple(one for one in found if _sensible(one[0], cluster, method))
            self._searches[kind] = self._search(cluster, sensible or found)
        search = self._searches[kind]
        shape = shape if any(mesh.shape == shape for mesh in search.meshes) else ()
        if (*kind, price, shape) not in self._known:
            self._known[(*kind, price, shape)] = self._cost(cluster, search, PRICES[price], shape)
        return self._known[(*kind, price, shape)]

    def _search(self, cluster: Cluster, admitted: limits.Admitted) -> LagrangianSearch:
        return search_at_prices(self._step, cluster, admitted, max_work=LAYER_WORK, gap=GAP)

    def _cost(self, cluster: Cluster, offers: LagrangianSearch, price: float, shape: tuple[int, ...] = ()) -> LayerCost:
        found = (offers.on(shape) if shape else offers).at(price)
        key = cluster.num_devices, found.mesh, found.choice  # another price often leads to the same choice
        if key not in self._of_choice:
            decided = DecidedStage(self._graph, self._rules, self._groups, found, cluster)
            self._of_choice[key] = _cost(lowered(decided, split_weights=False))
        seconds, size = offers.fastest
        return replace(self._of_choice[key], seconds=seconds, bytes=size)


def _sensible(mesh: LogicalMesh, cluster: Cluster, method: Sharded) -> bool:
    """Whether a layer is tried on a logical mesh, which has two axes at most: of several nodes one axis along them."""
    free = method.mesh_shape is None and cluster.nodes > 1
    return not free or len(mesh.shape) == 1 or mesh.shape[0] == cluster.nodes


def _cost(planned: PlannedStage) -> LayerCost:
    seconds = {"forward": 0.0, "backward": 0.0, "update": 0.0, "prologue": 0.0}
    for segment in planned.segments.items:
        seconds[segment.kind] += planned.seconds[segment]
    held = planned.held
    selective, kept = _computed_again(planned, "selective")
    again, again_steady = _seconds(planned, selective)
    forward, backward = (_steady(planned, planned.segments.of(kind)) for kind in ("forward", "backward"))
    sizes = planned.temporary
    largest = max(reversed(sizes), key=sizes.__getitem__, default=None)
    temporary = 0 if largest is None else sizes[largest]
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
        temporary=temporary,
        temporary_layer=_temporary(planned, _computed_again(planned, "layer")[0]),
        temporary_selective=_temporary(planned, selective),
        lasting=min(_lasting_bytes(planned, largest), temporary),
        apart=_apart(planned),
        adding=min(_adding(planned) + backward, seconds["backward"]),
        steady=min(forward, seconds["forward"]),
        again_steady=again_steady,
        shared=_shared(planned),
    )


def _adding(planned: PlannedStage) -> float:
    """Seconds of one run of the backward pass that add gradients to their sums over micro-batches."""
    segment = planned.segments.of("backward")
    if segment is None:
        return 0.0
    sums = {op.index for op, _ in ScanView(scan_op(planned.graph.traced, planned.graph.scan)).accumulators.values()}
    items = [item for item in segment.instructions if isinstance(item, Compute) and item.op.index in sums]
    return planned.prices.compute(items) / planned.runs(segment)


def _steady(planned: PlannedStage, segment: Segment | None) -> float:
    """Seconds of one run of a segment's collectives that do not depend on the size of a micro-batch."""
    if segment is None:
        return 0.0
    waiting = planned.communication_seconds[segment] - planned.overlap[segment].hidden
    return min(planned.prices.steady(segment.instructions, _lasting(planned)), waiting)


def _lasting(planned: PlannedStage) -> set[int]:
    """Values of a micro-batch that are as large whatever its size: made of what there is before, or of a sum's shape.

    An activation that happens to have the shape of a gradient is taken for one.
    """
    traced = planned.graph.traced
    view, values = ScanView(scan_op(traced, planned.graph.scan)), traced.graph.values
    found = set(view.inputs.consts)
    sums = {(values[v].shape, values[v].dtype) for v in view.inputs.carry if values[v].shape}
    for op in view.body.ops:
        if found.issuperset(op.reads):
            found.update(op.results)
        else:
            found.update(v for v in op.results if (values[v].shape, values[v].dtype) in sums)
    return found


def _lasting_bytes(planned: PlannedStage, segment: Segment | None) -> float:
    """The temporary bytes per device of a segment that do not depend on the size of a micro-batch."""
    if segment is None:
        return 0.0
    of = _lasting(planned)
    return temporaries.temporary_bytes(planned.segments, segment, planned.cluster.platform, of=of)


def _shared(planned: PlannedStage) -> tuple[int, int]:
    """The leading dim of the values that cross, and into how many parts it is cut: of the one in the most parts."""
    found = [(1, 1)]
    segment = planned.segments.of("forward")
    if segment is None:
        return 1, 1
    for output, wires in ((False, segment.inputs), (True, segment.outputs)):
        for position, wire in enumerate(wires):
            if wire.kind == "crossing":
                shape, _, layout = planned.segments.type_of(segment, position, output=output)
                if shape:
                    found.append((shape[0], planned.found.mesh.product(layout.dims[0])))
    return max(found, key=lambda pair: pair[1])


def _apart(planned: PlannedStage) -> float:
    """Bytes per device that the backward pass of a micro-batch leaves for gradients of parameters, computed apart.

    Of what they read, what is made for every micro-batch: activations, and cotangents.
    """
    segment = planned.segments.of("backward")
    if segment is None:
        return 0.0
    held = {
        register
        for wire, bound in zip(segment.inputs, segment.binds, strict=True)
        for register in bound
        if wire.kind in ("saved", "crossing")
    }
    read: set[int] = set()  # by gradients of parameters
    other: set[int] = set()
    for item in reversed(segment.instructions):
        if isinstance(item, Reshard):
            late = item.result in read and item.result not in other
        else:
            late = item.op.index in planned.graph.weight
        (read if late else other).update(reads(item))
        if not late:
            held.update(writes(item))
    return float(sum(_bytes(planned, register) for register in read & held))


def _computed_again(planned: PlannedStage, choice: Choice) -> tuple[tuple[Instruction, ...], float]:
    """Returns the instructions that a micro-batch's backward pass recomputes, and bytes per device of saved results."""
    segment = planned.segments.of("forward")
    if segment is None:
        return (), 0.0
    saved = [o for wire, o in zip(segment.outputs, segment.reads, strict=True) if wire.kind == "saved"]
    return _again(planned, segment.instructions, saved, choice)


def _seconds(planned: PlannedStage, again: Sequence[Instruction]) -> tuple[float, float]:
    """Returns seconds of forward instructions for one micro-batch, and the part that does not depend on its size."""
    if not again:
        return 0.0, 0.0
    waiting = sum(cost for _, cost in planned.prices.collectives(again))
    seconds = planned.prices.compute(again) / planned.num_microbatches
    return seconds + waiting, planned.prices.steady(again, _lasting(planned))


def _temporary(planned: PlannedStage, again: Sequence[Instruction]) -> float:
    """Temporary bytes per device of the largest segment, where the backward pass begins with these instructions."""
    size = dict(planned.temporary)
    segment = planned.segments.of("backward")
    if segment is not None:
        platform = planned.cluster.platform
        size[segment] = temporaries.temporary_bytes(planned.segments, segment, platform, again=again)
    return max(size.values(), default=0)


def _again(
    planned: PlannedStage, items: Sequence[Instruction], wanted: Iterable[Operand], choice: Choice
) -> tuple[tuple[Instruction, ...], float]:
    """The instructions that some registers need, and the bytes of results that are saved: see `_computed_again`."""
    needed = {o for o in wanted if not isinstance(o, Lit)}
    found: list[Instruction] = []
    total = 0.0
    for item in reversed(items):
        if needed.isdisjoint(writes(item)):
            continue
        if choice == "selective" and isinstance(item, Compute) and is_kept(item.op):
            total += sum(_bytes(planned, r) for r in item.results)
            continue
        if isinstance(item, Loop) and item.op.name == "scan":
            inner = [_again(planned, body.instructions, body.outputs, choice) for body in item.bodies]
            bodies = tuple(replace(body, instructions=own) for body, (own, _) in zip(item.bodies, inner, strict=True))
            total += item.op.params["length"] * sum(size for _, size in inner)
            item = replace(item, bodies=bodies)
        found.append(item)
        needed.update(reads(item))
    return tuple(reversed(found)), total


def _bytes(planned: PlannedStage, register: int) -> int:
    shape, dtype, layout = planned.segments.register_type(register)
    return bytes_of(planned.found.mesh, shape, dtype, layout)
