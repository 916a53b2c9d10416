"""What the layers of a step cost on each kind of submesh: the tables that the choice of stages reads.

Every distinct layer is planned as a stage of its own on every kind of submesh, by the integer program of one mesh, at
two prices of memory (`stages.layer_costs`); repeated layers are planned once. What a range of layers costs is the sum
over its layers. Seconds and bytes for other numbers of micro-batches are scaled by the size of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.options import Pipeline
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.division import Divisible
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages import layer_costs, planning, ranges, staging, submeshes
from alpa_lite.passes.stages.layer_costs import Layer, LayerCost
from alpa_lite.passes.stages.ranges import StageCosts
from alpa_lite.passes.stages.slices import StageChoice
from alpa_lite.pins import NO_WISHES, Wishes

_ONCE = ("update", "fixed")  # tables of what does not depend on the size of a micro-batch

REMAT: tuple[Choice, ...] = ("none", "layer", "selective")
"""What the backward pass of a stage may compute again."""

VARIANTS: tuple[tuple[int, Choice], ...] = tuple(itertools.product(range(len(layer_costs.PRICES)), REMAT))
"""Variants of a stage: the index of its price of memory, and what it computes again."""


@dataclass(frozen=True, eq=False)
class Priced:
    """A step in layers, and what each layer costs at one number of micro-batches.

    Attributes:
      step: the step in layers.
      cluster: all devices.
      devices: the numbers of devices of each kind of submesh.
      layers: for each layer and kind of submesh, the costs at each price of memory.
      tables: name -> [layers, kinds, variants]: `forward`, `backward`, `update` in seconds, `fixed`, `inflight`,
        `temporary` in bytes per device.
    """

    step: Divisible
    cluster: Cluster
    devices: tuple[int, ...]
    layers: tuple[tuple[tuple[LayerCost, ...], ...], ...]
    tables: Mapping[str, np.ndarray]

    @property
    def num_microbatches(self) -> int:
        """The number at which the layers were planned."""
        return self.step.accumulated.num_microbatches

    def mesh_of(self, stage: StageChoice, kind: int) -> tuple[int, ...]:
        """The logical mesh that suits most of a stage's layers, by their seconds."""
        seconds: dict[tuple[int, ...], float] = {}
        price = VARIANTS[stage.variant][0]
        for layer in range(stage.first, stage.stop):
            cost = self.layers[layer][kind][price]
            seconds[cost.mesh_shape] = seconds.get(cost.mesh_shape, 0.0) + cost.forward + cost.backward
        return max(seconds, key=lambda shape: seconds[shape])

    def rescaled(self, step: Divisible) -> Priced:
        """The same costs of the step in another number of micro-batches, scaled; it has the same layers."""
        scale = self.num_microbatches / step.accumulated.num_microbatches
        tables = {name: table * (1.0 if name in _ONCE else scale) for name, table in self.tables.items()}
        return replace(self, step=step, tables=tables)

    def costs(self, count: int) -> StageCosts:
        """The costs for a number of micro-batches, scaled by the size of a micro-batch."""
        scale = self.num_microbatches / count
        layers = self.step.layering.layers
        crossing = np.array([0.0, *(layer.bytes_out for layer in layers)]) * scale
        crossing[len(layers)] = 0.0
        boundary = np.zeros((len(layers) + 1, len(self.devices), len(self.devices)))
        for a, first in enumerate(self.devices):
            for b, second in enumerate(self.devices):
                boundary[:, a, b] = _link_seconds(self.cluster, crossing, first, second)
        return ranges.from_layers(
            count,
            forward=self.tables["forward"] * scale,
            backward=self.tables["backward"] * scale,
            update=self.tables["update"],
            fixed_bytes=self.tables["fixed"],
            inflight_bytes=self.tables["inflight"] * scale,
            boundary_seconds=boundary,
            boundary_bytes=crossing / max(1, max(self.devices)),
            devices=self.devices,
            total_devices=self.cluster.num_devices,
            devices_per_node=self.cluster.devices_per_node,
            temporary_bytes=self.tables["temporary"] * scale,
        )


def priced(
    step: Divisible,
    cluster: Cluster,
    method: Pipeline,
    kinds: Sequence[int],
    *,
    time_limit: float,
    deadline: Deadline,
    known: dict[str, Layer],
    wishes: Wishes = NO_WISHES,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Priced:
    """The costs of a step's layers, on as many kinds of submeshes as there is time for.

    Args:
      step: the step in layers.
      kinds: the numbers of devices of submeshes, the most promising first.
      time_limit: `solver_time_limit` of the options.
      deadline: of all of it; the method's own kinds of submeshes are all priced.
      known: layers that were priced before, by their digests; those that are priced are added.
      wishes: what the user says of arguments.
      progress: told what is counted, how many are done, and of how many.

    Raises:
      OutOfTime: not even the first kind is priced.
    """
    layers = step.layering
    number = len(layers.layers)
    graphs = staging.stage_graphs(layers.traced, layers.scan, assign(layers, range(1, number)))
    names = [planning.digest(graph, wishes) for graph in graphs]
    distinct = dict(zip(names, graphs, strict=True))
    found: dict[int, dict[str, tuple[LayerCost, ...]]] = {}
    for position, size in enumerate(kinds):
        part = cluster.part(size)
        shape = submeshes.shape_of(method, submeshes.stage_with(method, size), size)
        costs: dict[str, tuple[LayerCost, ...]] = {}
        for n, (name, graph) in enumerate(distinct.items()):
            if deadline.over and method.mesh_shapes is None:
                break
            progress("layers priced", position * len(distinct) + n, len(kinds) * len(distinct))
            if name not in known:
                known[name] = Layer(graph, wishes)
            costs[name] = known[name].costs(part, shape, time_limit=min(time_limit, deadline.left))
        if len(costs) == len(distinct):
            found[size] = costs
    if not found:
        raise OutOfTime
    sizes = tuple(sorted(found))
    offers = tuple(tuple(found[size][name] for size in sizes) for name in names)
    return Priced(step, cluster, sizes, offers, _tables(offers))


def _tables(layers: Sequence[tuple[tuple[LayerCost, ...], ...]]) -> dict[str, np.ndarray]:
    shape = len(layers), len(layers[0]), len(VARIANTS)
    out = {name: np.zeros(shape) for name in ("forward", "backward", "update", "fixed", "inflight", "temporary")}
    for n, kinds in enumerate(layers):
        for k, offers in enumerate(kinds):
            for v, (price, remat) in enumerate(VARIANTS):
                cost = offers[price]
                again = {"none": 0.0, "layer": cost.forward, "selective": cost.again}[remat]
                saved = {"none": cost.saved, "layer": 0.0, "selective": cost.kept}[remat]
                out["forward"][n, k, v], out["backward"][n, k, v] = cost.forward, cost.backward + again
                out["update"][n, k, v], out["fixed"][n, k, v] = cost.update, cost.fixed
                out["inflight"][n, k, v] = cost.entering + saved
                out["temporary"][n, k, v] = cost.temporary + cost.saved - saved
    return out


def _link_seconds(cluster: Cluster, crossing: np.ndarray, first: int, second: int) -> np.ndarray:
    """Seconds of sending bytes from a submesh to the next, sharded over the smaller of the two."""
    width = min(first, second)
    link, node = cluster.node_link, cluster.devices_per_node
    seconds = link.latency + crossing / (link.bandwidth * width)
    if first + second > node and cluster.network_link is not None:
        network = cluster.network_link
        seconds = network.latency + crossing / (network.bandwidth * max(1.0, width / node))
    return seconds
