"""What the layers of a step cost on each kind of submesh: the tables that the choice of stages reads.

A distinct layer can be planned as a stage of its own on every kind of submesh, by the integer program of one mesh, at
two prices of memory (`stages.layer_costs`), and repeated layers are planned once. Most of that is never read: so costs
begin as bounds, and only those that the best stages by these bounds use are worked out, until the best stages use no
bound (`choosing.settled`). What a range of layers costs is the sum over its layers. Seconds and bytes for other
numbers of micro-batches are scaled by the size of a micro-batch; where that has fewer examples than devices share them,
several devices are taken to do the same (`Priced.costs`).

Bounds. On one device a layer has nothing to choose, and costs little to plan. Of its seconds and bytes, each of n
devices has an n-th at least. Two more are assumed: more devices do not spend fewer device-seconds on a layer (they
communicate more, and compute smaller blocks), and the fastest choice with memory for nothing is no slower than that at
a price. Both bounds, and the first assumption, held for each of 14 layers of two GPTs on 2 to 16 V100 and A100.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.options import Pipeline, Sharded
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.division import Divisible
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.stages import layer_costs, planning, ranges, staging, submeshes
from alpa_lite.passes.stages.layer_costs import Layer, LayerCost
from alpa_lite.passes.stages.ranges import StageCosts
from alpa_lite.passes.stages.slices import StageChoice
from alpa_lite.pins import NO_WISHES, Wishes

_ONCE = ("update", "fixed", "adding", "leading", "parts")  # tables of what does not depend on the size of a micro-batch

REMAT: tuple[Choice, ...] = ("none", "layer", "selective")
"""What the backward pass of a stage may compute again."""

VARIANTS: tuple[tuple[int, Choice], ...] = tuple(itertools.product(range(len(layer_costs.PRICES)), REMAT))
"""Variants of a stage: the index of its price of memory, and what it computes again."""

Key = tuple[Layer, int, int]
"""A distinct layer, the number of a kind of submesh, and that of a price of memory."""


@dataclass(frozen=True, eq=False)
class Priced:
    """A step in layers, and what each layer costs at one number of micro-batches.

    Attributes:
      step: the step in layers.
      cluster: all devices.
      devices: the numbers of devices of each kind of submesh.
      methods: for each kind of submesh, the logical meshes that are allowed.
      layers: those of the step; identical ones are one.
      known: the costs that were worked out.
      scale: of what depends on the size of a micro-batch, if layers were planned at another one.
      tables: name -> [layers, kinds, variants]: `forward`, `backward` without `adding`, `update` in seconds, `fixed`,
        `inflight`, `split` (in flight with a split backward pass), `temporary` in bytes per device; `leading` and
        `parts`, both of `LayerCost.shared`.
    """

    step: Divisible
    cluster: Cluster
    devices: tuple[int, ...]
    methods: tuple[Sharded, ...]
    layers: tuple[Layer, ...]
    known: Mapping[Key, LayerCost]
    tables: Mapping[str, np.ndarray]
    scale: float = 1.0

    @property
    def num_microbatches(self) -> int:
        """The number that the costs are for."""
        return self.step.accumulated.num_microbatches

    @property
    def least_seconds(self) -> float:
        """What no pipeline undercuts by these costs: all devices compute all the time, an equal part of each layer."""
        least = [layer.least(self.cluster) for layer in self.layers]
        passes = sum(cost.forward + cost.backward - cost.adding for cost in least)
        return passes * self.scale * self.num_microbatches / self.cluster.num_devices

    def mesh_of(self, stage: StageChoice, kind: int) -> tuple[int, ...] | None:
        """The logical mesh that suits most of a stage's layers, by their seconds; None where none was worked out."""
        seconds: dict[tuple[int, ...], float] = {}
        for key in self._keys(stage.first, stage.stop, kind, stage.variant):
            cost = self.known.get(key)
            if cost is not None:
                seconds[cost.mesh_shape] = seconds.get(cost.mesh_shape, 0.0) + cost.forward + cost.backward
        return max(seconds, key=lambda shape: seconds[shape]) if seconds else None

    def unknown(self, stages: Sequence[StageChoice]) -> tuple[Key, ...]:
        """The costs of some stages that are bounds as yet."""
        keys = [key for s in stages for key in self._keys(s.first, s.stop, s.kind, s.variant)]
        return tuple(key for key in dict.fromkeys(keys) if key not in self.known)

    @property
    def certain(self) -> Priced:
        """The same without what is a bound as yet: stages that would use one are not possible."""
        known = np.array(
            [
                [[(layer, kind, price) in self.known for price, _ in VARIANTS] for kind in range(len(self.devices))]
                for layer in self.layers
            ]
        )
        return replace(self, tables={**self.tables, "forward": np.where(known, self.tables["forward"], np.inf)})

    def _keys(self, first: int, stop: int, kind: int, variant: int) -> list[Key]:
        return [(layer, kind, VARIANTS[variant][0]) for layer in self.layers[first:stop]]

    def rescaled(self, step: Divisible) -> Priced:
        """The same costs of the step in another number of micro-batches, scaled; it has the same layers."""
        scale = self.scale * self.num_microbatches / step.accumulated.num_microbatches
        return _with(replace(self, step=step, scale=scale), self.known)

    def repeated(self, scale: float) -> np.ndarray:
        """[layers, kinds, variants] how many devices do the same with micro-batches of another size.

        A layer that was planned with 16 examples on 8 devices cuts them into 8 parts of 2; of 4 examples there are 4
        parts, each on 2 devices.
        """
        leading = np.maximum(np.rint(self.tables["leading"] * self.scale * scale), 1.0).astype(np.int64)
        parts = self.tables["parts"].astype(np.int64)
        return parts / np.gcd(parts, leading)

    def costs(self, count: int) -> StageCosts:
        """The costs for a number of micro-batches, scaled by the size of a micro-batch where they depend on it.

        Adding a gradient to its sum takes as long whatever the size: what more micro-batches cost.
        """
        scale = self.num_microbatches / count
        shared = scale * self.repeated(scale)
        layers = self.step.layering.layers
        crossing = np.array([0.0, *(layer.bytes_out for layer in layers)]) * scale
        crossing[len(layers)] = 0.0
        boundary, slowest = np.zeros((2, len(layers) + 1, len(self.devices), len(self.devices)))
        for a, first in enumerate(self.devices):
            for b, second in enumerate(self.devices):
                boundary[:, a, b], slowest[:, a, b] = link_seconds(self.cluster, crossing, first, second)
        return ranges.from_layers(
            count,
            forward=self.tables["forward"] * shared,
            backward=self.tables["backward"] * shared + self.tables["adding"],
            update=self.tables["update"],
            fixed_bytes=self.tables["fixed"],
            inflight_bytes=self.tables["inflight"] * shared,
            split_bytes=self.tables["split"] * shared,
            boundary_seconds=boundary,
            slowest_seconds=slowest,
            boundary_bytes=crossing / max(1, max(self.devices)),
            devices=self.devices,
            total_devices=self.cluster.num_devices,
            devices_per_node=self.cluster.devices_per_node,
            temporary_bytes=self.tables["temporary"] * shared,
        )


def priced(
    step: Divisible,
    cluster: Cluster,
    method: Pipeline,
    kinds: Sequence[int],
    *,
    made: dict[str, Layer],
    wishes: Wishes = NO_WISHES,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Priced:
    """Bounds on the costs of a step's layers.

    Args:
      step: the step in layers.
      kinds: the numbers of devices of submeshes.
      made: layers that there are already, by their digests; new ones are added.
      wishes: what the user says of arguments.
      progress: told what is counted, how many are done, and of how many.
    """
    layers = step.layering
    number = len(layers.layers)
    graphs = staging.stage_graphs(layers.traced, layers.scan, assign(layers, range(1, number)))
    sizes = tuple(sorted(kinds))
    methods = [submeshes.shape_of(method, submeshes.stage_with(method, size), size) for size in sizes]
    found = []
    for n, graph in enumerate(graphs):
        name = planning.digest(graph, wishes)
        if name not in made:
            progress("layers bounded", n, number)
            made[name] = Layer(graph, wishes)
        found.append(made[name])
    alone = [(k, price) for k, price in _choices(sizes) if sizes[k] == 1]
    known = {(layer, *choice): layer.least(cluster) for layer in dict.fromkeys(found) for choice in alone}
    return _with(Priced(step, cluster, sizes, tuple(methods), tuple(found), {}, {}), known)


def worked_out(
    costs: Priced,
    wanted: Sequence[Key],
    *,
    time_limit: float,
    deadline: Deadline | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Priced:
    """The same with some costs worked out, in place of bounds.

    Args:
      wanted: of `Priced.unknown`.
      time_limit: `solver_time_limit` of the options, for one cost.
      deadline: until when; layers keep what was worked out before.
      progress: as of `priced`.

    Raises:
      OutOfTime: the deadline is over, and some are not worked out.
    """
    found: dict[Key, LayerCost] = {}
    before = len(costs.known)
    for n, key in enumerate(wanted):
        progress("layers priced", before + n, before + len(wanted))
        if deadline is not None:
            deadline.check()
        layer, kind, price = key
        part, method = costs.cluster.part(costs.devices[kind]), costs.methods[kind]
        for number in range(price + 1):
            if (layer, kind, number) not in costs.known:
                found[layer, kind, number] = layer.at(part, method, number, time_limit=time_limit)
    return _with(costs, {**costs.known, **found}) if found else costs


def _with(costs: Priced, known: Mapping[Key, LayerCost]) -> Priced:
    """The same with these costs, and bounds in place of others."""
    rows = {layer: _rows(layer, costs, known) for layer in dict.fromkeys(costs.layers)}
    tables = _tables([rows[layer] for layer in costs.layers])
    tables = {name: table * (1.0 if name in _ONCE else costs.scale) for name, table in tables.items()}
    return replace(costs, known=known, tables=tables)


def _rows(layer: Layer, costs: Priced, known: Mapping[Key, LayerCost]) -> list[list[LayerCost]]:
    """For each kind of submesh the costs at each price, or bounds."""
    least, factor, rows = layer.least(costs.cluster), 1.0, []
    for kind, number in enumerate(costs.devices):
        free = known.get((layer, kind, 0))
        if free is not None and least.forward + least.backward > 0:
            factor = max(factor, number * (free.forward + free.backward) / (least.forward + least.backward))
        bound = least.spread(number, factor)
        row = [free or bound]
        for price in range(1, len(layer_costs.PRICES)):
            other = bound
            if free is not None:
                names = ("forward", "backward", "adding", "update", "again")
                seconds = {name: getattr(free, name) for name in names}
                other = replace(least.spread(number), **seconds)
            row.append(known.get((layer, kind, price), other))
        rows.append(row)
    return rows


def _choices(kinds: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Every kind of submesh with every price, by number."""
    return itertools.product(range(len(kinds)), range(len(layer_costs.PRICES)))


def _tables(layers: Sequence[Sequence[Sequence[LayerCost]]]) -> dict[str, np.ndarray]:
    shape = len(layers), len(layers[0]), len(VARIANTS)
    names = "forward", "backward", "adding", "update", "fixed", "inflight", "split", "temporary", "leading", "parts"
    out = {name: np.zeros(shape) for name in names}
    for n, kinds in enumerate(layers):
        for k, offers in enumerate(kinds):
            for v, (price, remat) in enumerate(VARIANTS):
                cost = offers[price]
                again = {"none": 0.0, "layer": cost.forward, "selective": cost.again}[remat]
                saved = {"none": cost.saved, "layer": 0.0, "selective": cost.kept}[remat]
                out["forward"][n, k, v], out["adding"][n, k, v] = cost.forward, cost.adding
                out["backward"][n, k, v] = cost.backward - cost.adding + again
                out["update"][n, k, v], out["fixed"][n, k, v] = cost.update, cost.fixed
                out["inflight"][n, k, v] = cost.entering + saved
                out["split"][n, k, v] = max(cost.entering + saved, cost.apart)
                out["temporary"][n, k, v] = cost.temporary + cost.saved - saved
                out["leading"][n, k, v], out["parts"][n, k, v] = cost.shared
    return out


def link_seconds(cluster: Cluster, crossing: np.ndarray, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of sending bytes from a submesh to the next, sharded over the smaller of the two: the mean, and the most.

    Of n such submeshes that share a node, the last sends to another node if there are several. The period of a stage in
    1F1B is a mean over the stages from it on (`slicing`); the largest such mean begins at a cut that crosses: one of n.
    """
    width = min(first, second)
    link, node, network = cluster.node_link, cluster.devices_per_node, cluster.network_link
    within = link.latency + crossing / (link.bandwidth * width)
    if cluster.num_devices <= node or network is None:
        return within, within
    across = network.latency + crossing / (network.bandwidth * max(1.0, width / node))
    share = 1.0 if first + second > node else max(first, second) / node
    return within + share * (across - within), np.maximum(within, across)
