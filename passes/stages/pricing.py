"""The costs of a step's layers on each kind of submesh: the tables that the choice of stages reads.

Every distinct layer is planned as a stage of its own on every kind of submesh, by the integer program of one mesh, at
each of a few prices of memory (`stages.layer_costs`); repeated layers are planned once. A range of layers costs the sum
over its layers. Seconds and bytes for other numbers of micro-batches are scaled by the size of a micro-batch; where
that has fewer examples than devices share them, several devices are taken to do the same (`LayerCosts.stage_costs`).

A stage has one logical mesh, and each layer is planned on the one that suits it best. Where those of a kind of submesh
and a price disagree, a range costs the least of the sums over its layers on each of their meshes (`FORMS`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from alpa_lite.cluster import Cluster, Dispatch
from alpa_lite.options import Pipeline
from alpa_lite.passes.layers.assignment import assign
from alpa_lite.passes.layers.division import LayeredStep
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.stages import layer_costs, planning, staging, submeshes
from alpa_lite.passes.stages.dp import ranges
from alpa_lite.passes.stages.dp.ranges import Hosts, StageCosts
from alpa_lite.passes.stages.dp.slices import StageChoice
from alpa_lite.passes.stages.layer_costs import COSTS, REMAT, Layer, LayerCost
from alpa_lite.plan.pins import NO_WISHES, Wishes

VARIANTS: tuple[tuple[int, Choice], ...] = tuple(itertools.product(range(len(layer_costs.PRICES)), REMAT))
"""Variants of a stage: the index of its price of memory, and what it computes again."""

Shape = tuple[int, ...]

Key = tuple[Layer, int, int, Shape]
"""A distinct layer, the number of a kind of submesh, that of a price of memory, and the shape of the logical mesh; that
is empty for the one that suits the layer best."""

FORMS = 3
"""How many logical meshes are compared for a stage of some devices at some price of memory, at most."""


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """A step in layers, and the costs of each layer at one number of micro-batches.

    Attributes:
      cluster: all devices.
      devices: the numbers of devices of each kind of submesh.
      layers: those of the step; identical ones are one.
      known_costs: the costs of layers.
      scale: of what depends on the size of a micro-batch, if layers were planned at another one.
      excess_bytes: by the number of a layer and that of devices, bytes per device by which a stage with it exceeds
        its costs, as planned stages have shown.
      num_stages: if it is given.
    """

    step: LayeredStep
    cluster: Cluster
    devices: tuple[int, ...]
    layers: tuple[Layer, ...]
    known_costs: Mapping[Key, LayerCost]
    scale: float = 1.0
    excess_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    num_stages: int | None = None

    @property
    def num_ops(self) -> int:
        """The operations of the layers whose costs are known, once for each cost."""
        return sum(layer.num_ops for layer, *_ in self.known_costs)

    @cached_property
    def shapes(self) -> Mapping[tuple[int, int], tuple[Shape, ...]]:
        """The logical meshes of the forms, by the numbers of the kind of submesh and of the price.

        They are those that suit some layers best, by the seconds of those, most first. Where there are fewer, the last
        stands for others.
        """
        return _shapes(self.layers, self.known_costs)

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """(steady, scaled): `LayerCost.table` of all layers, [costs, forms, layers, kinds, variants].

        At the size of micro-batch at which they were planned.
        """
        shape = 2, len(COSTS), *self._each[:3], len(VARIANTS)
        steady, scaled = np.stack([cost.table for cost in self._costs], -2).reshape(shape)
        return steady, scaled

    @cached_property
    def _costs(self) -> Sequence[LayerCost]:
        """The cost of each layer: in the order of forms, layers, kinds of submesh, and prices."""
        found = []
        for form, number, kind, price in np.ndindex(self._each):
            layer, shapes = self.layers[number], self.shapes.get((kind, price), ())
            shape = shapes[min(form, len(shapes) - 1)] if shapes else ()
            found.append(self.known_costs.get((layer, kind, price, shape)) or self.known_costs[layer, kind, price, ()])
        return found

    @property
    def _each(self) -> tuple[int, int, int, int]:
        """The numbers of forms, layers, kinds of submesh, and prices."""
        forms = max(map(len, self.shapes.values()), default=1)
        return forms, len(self.layers), len(self.devices), len(layer_costs.PRICES)

    @property
    def num_microbatches(self) -> int:
        """The number that the costs are for."""
        return self.step.accumulated.num_microbatches

    @cached_property
    def hosts(self) -> Hosts:
        """Tasks and transfers that processes start for each micro-batch, for every number of micro-batches."""
        return hosts(self.cluster, self.devices, self.num_stages or len(self.step.layering.layers))

    @cached_property
    def seconds(self) -> np.ndarray:
        """[forms, layers, kinds, variants] of a step: both passes of all micro-batches, and the update."""
        steady, scaled = self.tables
        passes = (scaled[0] * self.scale + scaled[1] * self.scale) * self.num_repeats(1.0) + steady[0] + steady[1]
        return passes * self.num_microbatches + steady[2]

    def mesh_of(self, stage: StageChoice, kind: int) -> tuple[int, ...] | None:
        """Returns the logical mesh on which all layers of a stage together are fastest; None where none is known."""
        shapes = self.shapes.get((kind, VARIANTS[stage.variant][0]), ())
        sums = self.seconds[: len(shapes), stage.first : stage.stop, kind, stage.variant].sum(axis=1)
        return shapes[int(np.argmin(sums))] if shapes else None

    def unit_of(self, stage: StageChoice) -> float | None:
        """The unit of prices at which the layers of a stage were planned, in seconds per byte; None where none was.

        The unit of the whole stage would be another one: a layer holds more bytes at its peak than its part of those of
        the stage. At the unit of its layers it makes the choices that its costs are of.
        """
        price = VARIANTS[stage.variant][0]
        keys = [(layer, stage.kind, price, ()) for layer in self.layers[stage.first : stage.stop]]
        found = [self.known_costs[key] for key in keys if key in self.known_costs]
        size = sum(cost.bytes for cost in found)
        return sum(cost.seconds for cost in found) / size if size else None

    def rescale(self, step: LayeredStep) -> LayerCosts:
        """Returns the same costs of the step in another number of micro-batches, scaled; it has the same layers."""
        scale = self.scale * self.num_microbatches / step.accumulated.num_microbatches
        return replace(self, step=step, scale=scale)

    def num_repeats(self, scale: float) -> np.ndarray:
        """[forms, layers, kinds, variants] how many devices do the same with micro-batches of another size.

        A layer that was planned with 16 examples on 8 devices cuts them into 8 parts of 2; of 4 examples there are 4
        parts, each on 2 devices.
        """
        shared = np.array([cost.leading_dim for cost in self._costs]).reshape(*self._each, 2)
        examples, parts = np.moveaxis(shared, -1, 0).repeat(len(REMAT), axis=-1)
        leading = np.maximum(np.rint(examples * self.scale * scale), 1.0).astype(np.int64)
        return parts / np.gcd(parts, leading)

    def without_latency(self) -> LayerCosts:
        """The same where nothing is waited for but computing and bytes: no dispatch, and no latency of transfers."""
        free = {
            name: replace(link, latency=0.0)
            for name in ("node_link", "network_link", "card_link")
            if (link := getattr(self.cluster, name)) is not None
        }
        return replace(self, cluster=replace(self.cluster, dispatch=Dispatch(), **free))

    def stage_costs(self, count: int, variants: Sequence[int] | None = None) -> StageCosts:
        """Returns the costs for a number of micro-batches, scaled by the size of a micro-batch where they depend on it.

        Adding a gradient to its sum takes as long whatever the size, as does gathering a parameter: what more
        micro-batches cost.

        Args:
          variants: those that a stage may have; None for all.
        """
        scale = self.num_microbatches / count
        shared = scale * self.num_repeats(scale)
        steady, scaled = self.tables
        tables = scaled * self.scale * shared + steady
        if variants is not None:
            tables[COSTS.index("forward"), ..., [v not in variants for v in range(len(VARIANTS))]] = np.inf
        layers = self.step.layering.layers
        crossing = np.array([0.0, *(layer.bytes_out for layer in layers)]) * scale
        crossing[len(layers)] = 0.0
        for (layer, devices), size in self.excess_bytes.items():
            if layer < len(layers) and devices in self.devices:
                tables[COSTS.index("temporary_bytes"), :, layer, self.devices.index(devices)] += size
        boundary, slowest = np.zeros((2, len(layers) + 1, len(self.devices), len(self.devices)))
        for a, first in enumerate(self.devices):
            for b, second in enumerate(self.devices):
                boundary[:, a, b], slowest[:, a, b] = link_seconds(self.cluster, crossing, first, second)
        forms = [
            ranges.sum_layer_costs(
                count,
                **dict(zip(COSTS, tables[:, form], strict=True)),
                boundary_seconds=boundary,
                slowest_seconds=slowest,
                boundary_bytes=crossing / max(1, max(self.devices)),
                devices=self.devices,
                total_devices=self.cluster.num_devices,
                devices_per_node=self.cluster.devices_per_node,
                hosts=self.hosts,
            )
            for form in range(tables.shape[1])
        ]
        return ranges.choose_fastest_forms(forms)


def price_layers(
    step: LayeredStep,
    cluster: Cluster,
    method: Pipeline,
    kinds: Sequence[int],
    *,
    made: dict[str, Layer],
    wishes: Wishes = NO_WISHES,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> LayerCosts:
    """Returns the costs of all distinct layers, on every kind of submesh and at every price of memory.

    Args:
      step: the step in layers.
      kinds: the numbers of devices of submeshes.
      made: layers that there are already, by their digests; new ones are added.
      wishes: the user's constraints on arguments.
      progress: called with a text, and numbers done and in all.

    Raises:
      InfeasibleError: a layer has no choice.
    """
    layers = step.layering
    number = len(layers.layers)
    graphs = staging.stage_graphs(layers.traced, layers.scan, assign(layers, range(1, number)))
    sizes = tuple(sorted(kinds))
    methods = [submeshes.shape_of(method, size) for size in sizes]
    found = []
    for graph in graphs:
        name = planning.digest(graph, wishes)
        if name not in made:
            made[name] = Layer(graph, wishes)
        found.append(made[name])
    distinct = list(dict.fromkeys(found))
    known: dict[Key, LayerCost] = {}

    def price(layer: Layer, kind: int, price: int, shape: tuple[int, ...]) -> None:
        known[layer, kind, price, shape] = layer.cost_at(cluster.part(sizes[kind]), methods[kind], price, shape)

    everything = list(itertools.product(distinct, range(len(sizes)), range(len(layer_costs.PRICES))))
    for n, key in enumerate(everything):
        progress("layers priced", n, len(everything))
        price(*key, ())
    for (kind, number), shapes in _shapes(found, known).items():
        for layer, shape in itertools.product(distinct, shapes):
            if known[layer, kind, number, ()].mesh_shape != shape:
                price(layer, kind, number, shape)
    return LayerCosts(step, cluster, sizes, tuple(found), known, num_stages=method.num_stages)


def _shapes(layers: Sequence[Layer], known: Mapping[Key, LayerCost]) -> dict[tuple[int, int], tuple[Shape, ...]]:
    """Returns the logical meshes that suit some layers best: see `LayerCosts`."""
    times = Counter(layers)
    seconds: dict[tuple[int, int], dict[Shape, float]] = {}
    for (layer, kind, price, shape), cost in known.items():
        if not shape:
            suited = seconds.setdefault((kind, price), {})
            suited[cost.mesh_shape] = suited.get(cost.mesh_shape, 0.0) + times[layer] * cost.passes
    return {key: tuple(sorted(suited, key=lambda s: -suited[s])[:FORMS]) for key, suited in seconds.items()}


def hosts(cluster: Cluster, kinds: Sequence[int], layers: int) -> Hosts:
    """Returns the tasks and transfers that processes start for each micro-batch, as `programs.simulation` counts them.

    Of S equal stages on all devices, or as many as there are layers, a process has the m whose devices are its own.
    They have m + 1 cuts, or S - 1 if those are fewer.
    """
    own = sum(cluster.controller(device) == cluster.controller(0) for device in range(cluster.devices_per_node))
    stages = [min(layers, cluster.num_devices // size) for size in kinds]
    each = [max(1, min(number, own // size)) for number, size in zip(stages, kinds, strict=True)]
    cuts = [max(0, min(number - 1, m + 1)) for number, m in zip(stages, each, strict=True)]
    seconds = [cluster.dispatch.seconds(min(size, own)) for size in kinds]
    return Hosts(tuple(each), tuple(2 * cut for cut in cuts), tuple(seconds))


def link_seconds(cluster: Cluster, crossing: np.ndarray, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of sending bytes from a submesh to the next, sharded over the smaller of the two: the mean, and the most.

    Of n such submeshes that share a node, the last sends to another node if there are several. The period of a stage in
    1F1B is a mean over the stages from it on (`dp.slicing`); the largest such mean begins at a cut that crosses: one of
    n.
    """
    width = min(first, second)
    link, node, network = cluster.node_link, cluster.devices_per_node, cluster.network_link
    within = link.latency + crossing / (link.bandwidth * width)
    if cluster.num_devices <= node or network is None:
        return within, within
    across = network.latency + crossing / (network.bandwidth * max(1.0, width / node))
    share = 1.0 if first + second > node else max(first, second) / node
    return within + share * (across - within), np.maximum(within, across)
