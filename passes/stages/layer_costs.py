"""Costs of one layer as a stage of its own, on each kind of submesh, at each price of memory: the terms of a stage DP.

A range of layers shares one budget, which no layer alone can know. So a layer is planned with memory for nothing and at
prices (`sharding.lagrangian`): the first is the fastest choice, the others shard or gather where that saves more memory
than it costs time. The stage DP then finds which of them a stage can afford.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.ir.graph import Lit
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.options import Sharded
from alpa_lite.passes import factors
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.remembered import memoise_method
from alpa_lite.passes.layers.rematerialisation import Choice, is_kept
from alpa_lite.passes.lowering.program import Compute, Instruction, Loop, Operand, Reshard
from alpa_lite.passes.sharding import limits
from alpa_lite.passes.sharding.lagrangian import LagrangianSearch, search_at_prices
from alpa_lite.passes.sharding.space import Strategy
from alpa_lite.passes.stages import temporaries
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage, bytes_of, group_stage, lower_stage
from alpa_lite.passes.stages.segments import Segment
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.pins import NO_WISHES, Wishes

PRICES = (0.0, 4.0, 16.0)
"""Prices of memory, in units of `sharding.lagrangian`.

With the last, a GPT of 39 billion parameters on 64 V100 has room for transfers that hide: 61.4 s a step, not 69.7.
"""

LAYER_WORK = 15_000_000
"""The most work of solving a layer at one price, in the unit of `solver.work`: a fraction of a second."""

GAP = 1e-2
"""How near the optimum the choice of a layer is: its cost is an estimate for the stage DP."""


REMAT: tuple[Choice, ...] = ("none", "layer", "selective")
"""Rematerialisations to choose from for the backward pass of a stage."""

COSTS = ("forward", "backward", "update", "fixed_bytes", "inflight_bytes", "split_bytes", "temporary_bytes")
"""Costs of a layer in `LayerCost.table`.

    forward, backward  seconds for one micro-batch; backward with what is computed again
    update             seconds once a step, with what is computed before the micro-batches
    fixed_bytes        per device, of arguments and of what is computed before the micro-batches
    inflight_bytes     per device and micro-batch: what comes from the layer before, and what the backward pass reads of
                       the forward pass
    split_bytes        the same where gradients of parameters are computed apart: what they read, if that is more
    temporary_bytes    per device, that the largest segment needs in addition
"""


@dataclass(frozen=True, eq=False)
class LayerCost:
    """One layer on one kind of submesh at one price of memory.

    Attributes:
      mesh_shape: of the best logical mesh.
      table: [2, costs, remats]: of each of `COSTS` with each of `REMAT` the part that does not depend on the size of a
        micro-batch, and the part that scales with it. The first are latency, collectives of what is not made of
        examples, such as gathered parameters, and adding gradients to their sums; and their bytes.
      leading_dim: that of values which come from or go to other layers, the examples of a micro-batch, and into how
        many parts it is cut.
      seconds: of a step, of the fastest choice with memory for nothing; bytes: per device, of that at its peak. Their
        ratio is the unit of prices.
    """

    mesh_shape: tuple[int, ...]
    table: np.ndarray
    leading_dim: tuple[int, int] = (1, 1)
    seconds: float = 0.0
    bytes: float = 0.0

    def parts(self, name: str, remat: Choice = "none") -> tuple[float, float]:
        """Returns the steady part of one of `COSTS`, and the part that scales."""
        steady, scaled = self.table[:, COSTS.index(name), REMAT.index(remat)].tolist()
        return steady, scaled

    @property
    def passes(self) -> float:
        """Seconds of both passes of a micro-batch."""
        return sum(self.parts("forward")) + sum(self.parts("backward"))


class Layer:
    """A layer as a stage, and its costs on the requested submeshes at the requested prices of memory."""

    def __init__(self, graph: StageGraph, wishes: Wishes = NO_WISHES) -> None:
        """`wishes`: what the user says of arguments."""
        rules = factors.rules_of(graph.traced.graph.ops(), graph.traced.graph.values)
        self._graph, self._wishes, self._step = graph, wishes, group_stage(graph, rules, split_weights=False)
        self.num_ops = graph.traced.graph.num_ops
        self._of_choice: dict[tuple[int, LogicalMesh, tuple[Strategy, ...]], LayerCost] = {}

    @memoise_method
    def cost_at(self, cluster: Cluster, method: Sharded, price: int, shape: tuple[int, ...] = ()) -> LayerCost:
        """Returns the cost at one of `PRICES`, by number.

        Args:
          cluster: the devices of a kind of submesh.
          method: the logical meshes that are allowed.
          shape: of the logical mesh; empty for the one that suits the layer best, as is one that it cannot have.

        Raises:
          InfeasibleError: the layer has no choice.
        """
        search = self._search(cluster, method).restrict_to_shape(shape)
        found = search.solve_at(PRICES[price])
        key = cluster.num_devices, found.mesh, found.choice  # another price often leads to the same choice
        if key not in self._of_choice:
            decided = DecidedStage(self._graph, self._step.rules, self._step.grouping, found, cluster)
            self._of_choice[key] = MeasuredLayer(lower_stage(decided, split_weights=False)).cost()
        seconds, size = search.fastest_figures
        return replace(self._of_choice[key], seconds=seconds, bytes=size)

    @memoise_method
    def _search(self, cluster: Cluster, method: Sharded) -> LagrangianSearch:
        """Returns the integer programs of the layer; the user's constraints do not bind where there is one device."""
        wishes = self._wishes if cluster.num_devices > 1 else NO_WISHES
        found = limits.admissible_meshes(self._step, cluster, method, wishes, max_axes=2)
        sensible = tuple(one for one in found if _sensible(one[0], cluster, method))
        return search_at_prices(self._step, cluster, sensible or found, max_work=LAYER_WORK, gap=GAP)


def _sensible(mesh: LogicalMesh, cluster: Cluster, method: Sharded) -> bool:
    """Whether a layer is tried on a logical mesh, which has two axes at most: of several nodes one axis along them."""
    free = method.mesh_shape is None and cluster.nodes > 1
    return not free or len(mesh.shape) == 1 or mesh.shape[0] == cluster.nodes


class MeasuredLayer:
    """The costs of a layer that is planned as a stage, and the parts of them that micro-batches of any size have."""

    def __init__(self, planned: PlannedStage) -> None:
        """The planned stage."""
        self.planned, self.prices = planned, planned.prices
        self.forward, self.backward = (planned.segments.find(kind) for kind in ("forward", "backward"))

    def cost(self) -> LayerCost:
        """Returns all of its costs."""
        planned, held, sizes = self.planned, self.planned.held, self.planned.temporary_bytes
        seconds = defaultdict[str, float](float)
        for segment in planned.segments.items:
            seconds[segment.kind] += planned.seconds[segment]
        forward, backward = seconds["forward"], seconds["backward"]
        steady = min(self.steady_seconds(self.forward), forward)
        adding = min(self.steady_seconds(self.backward), backward)
        largest = max(reversed(sizes), key=sizes.__getitem__, default=None)
        lasting = 0 if largest is None else min(self.temporary_bytes(largest, of=self.lasting_values), sizes[largest])
        passed = self.forward.instructions if self.forward is not None else ()
        outputs = self.forward.outputs.items() if self.forward is not None else ()
        saved = [o for wire, operands in outputs if wire.kind == "saved" for o in operands]
        apart, rows = self.weight_bytes(), []
        for remat in REMAT:
            items, kept = self.needed_instructions(passed, saved if remat != "none" else (), remat)
            again, again_steady = (forward, steady) if remat == "layer" else self.seconds_of(items)
            flying = held.entering_bytes + (held.saved_bytes if remat == "none" else min(kept, held.saved_bytes))
            own = dict(sizes)
            if items and self.backward is not None:
                own[self.backward] = self.temporary_bytes(self.backward, again=items)
            temporary = max(own.values(), default=0)
            rows.append([
                (steady, forward - steady),
                (adding + again_steady, backward - adding + again - again_steady),
                (seconds["update"] + seconds["prologue"], 0.0),
                (held.fixed_bytes, 0.0),
                (0.0, flying),
                (0.0, max(flying, apart)),
                (min(lasting, temporary), temporary - min(lasting, temporary)),
            ])  # fmt: skip
        return LayerCost(planned.mesh_solution.mesh.shape, np.array(rows, float).T, self.leading_dim())

    @cached_property
    def view(self) -> ScanView:
        """The loop over micro-batches."""
        return ScanView(scan_op(self.planned.graph.traced, self.planned.graph.scan))

    @cached_property
    def lasting_values(self) -> set[int]:
        """Values that are as large whatever the size of a micro-batch: made of what there is before, or like a sum.

        A gradient may be converted or scaled before it is added. An activation that happens to have the shape of a
        gradient is taken for one.
        """
        values = self.planned.graph.traced.graph.values
        found = {*self.view.inputs.consts, *self.view.inputs.carry}
        sums = {values[v].shape for v in self.view.inputs.carry if values[v].shape}
        for op in self.view.body.ops:
            is_lasting = found.issuperset(op.reads)
            found.update(v for v in op.results if is_lasting or values[v].shape in sums)
        return found

    def is_steady(self, item: Instruction) -> bool:
        """Returns whether all that an operation reads and writes lasts, but for scalars: as adding to a sum does."""
        values, lasting = self.planned.graph.traced.graph.values, self.lasting_values
        moved = (*item.op.reads, *item.op.results) if isinstance(item, Compute) else ()
        return bool(moved) and all(v in lasting or not values[v].shape for v in moved)

    def steady_seconds(self, segment: Segment | None) -> float:
        """Returns seconds of one run of a segment that do not depend on the size of a micro-batch.

        Of collectives, and of operations such as adding gradients to their sums.
        """
        if segment is None:
            return 0.0
        waiting = self.planned.communication_seconds[segment] - self.planned.overlap[segment].hidden_seconds
        waiting = min(self.prices.steady_seconds(segment.instructions, self.lasting_values), waiting)
        items = [item for item in segment.instructions if self.is_steady(item)]
        return waiting + self.prices.compute(items) / self.planned.num_microbatches

    def seconds_of(self, again: Sequence[Instruction]) -> tuple[float, float]:
        """Seconds of forward instructions for one micro-batch, and the part that does not depend on its size."""
        if not again:
            return 0.0, 0.0
        waiting = sum(cost for _, cost in self.prices.collectives(again))
        seconds = self.prices.compute(again) / self.planned.num_microbatches
        return seconds + waiting, self.prices.steady_seconds(again, self.lasting_values)

    def leading_dim(self) -> tuple[int, int]:
        """The leading dim of the values that cross, and into how many parts it is cut: of the one in the most parts."""
        segment, found = self.forward, [(1, 1)]
        if segment is None:
            return 1, 1
        for wire, operands in (*segment.inputs.items(), *segment.outputs.items()):
            if wire.kind == "crossing":
                shape, _, layout = self.planned.segments.type_of(wire, operands)
                if shape:
                    found.append((shape[0], self.planned.mesh_solution.mesh.product(layout.dims[0])))
        return max(found, key=lambda pair: pair[1])

    def weight_bytes(self) -> float:
        """Bytes per device that the backward pass of a micro-batch leaves for gradients of parameters, computed apart.

        Of what they read, what is made for every micro-batch: activations, and cotangents.
        """
        if self.backward is None:
            return 0.0
        held = {
            register
            for wire, bound in self.backward.inputs.items()
            for register in bound
            if wire.kind in ("saved", "crossing")
        }
        read: set[int] = set()  # by gradients of parameters
        other: set[int] = set()
        for item in reversed(self.backward.instructions):
            if isinstance(item, Reshard):
                late = item.result in read and item.result not in other
            else:
                late = self.planned.graph.phases.phase_of(item.op.index, split_weights=True) == 2
            (read if late else other).update(item.reads)
            if not late:
                held.update(item.results)
        return float(sum(map(self.bytes, read & held)))

    def temporary_bytes(self, segment: Segment, **options: Any) -> int:
        """As of `temporaries`."""
        return temporaries.temporary_bytes(self.planned.segments, segment, self.planned.cluster.platform, **options)

    def needed_instructions(
        self, items: Sequence[Instruction], wanted: Iterable[Operand], choice: Choice
    ) -> tuple[tuple[Instruction, ...], float]:
        """The instructions that the backward pass recomputes to have some registers, and bytes of saved results."""
        needed = {o for o in wanted if not isinstance(o, Lit)}
        found: list[Instruction] = []
        total = 0.0
        for item in reversed(items):
            if needed.isdisjoint(item.results):
                continue
            if choice == "selective" and isinstance(item, Compute) and is_kept(item.op):
                total += sum(map(self.bytes, item.results))
                continue
            if isinstance(item, Loop) and item.op.name == "scan":
                inner = [self.needed_instructions(body.instructions, body.outputs, choice) for body in item.bodies]
                bodies = tuple(replace(body, instructions=o) for body, (o, _) in zip(item.bodies, inner, strict=True))
                total += item.op.params["length"] * sum(size for _, size in inner)
                item = replace(item, bodies=bodies)
            found.append(item)
            needed.update(item.reads)
        return tuple(reversed(found)), total

    def bytes(self, register: int) -> int:
        """Of a register, per device."""
        return bytes_of(self.planned.mesh_solution.mesh, *self.planned.segments.register_type(register))
