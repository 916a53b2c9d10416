"""Chooses a pipeline: micro-batches, layers to stages, stages to submeshes, the schedule and rematerialisation.

Every distinct layer is planned as a stage of its own on every kind of submesh, by the integer program of one mesh, at
two prices of memory (`stages.layer_costs`); repeated layers are planned once. What a range of layers costs is the sum
over its layers. The stage DP (`stages.slicing`) then chooses the number of micro-batches, the cuts, the submeshes and
the
schedule together, and for each stage a variant: the price of its memory, and what its backward pass computes again.
Seconds and bytes for other numbers of micro-batches are scaled from one reference, and the layers are planned again at
the number that was chosen, on the sizes of submeshes that were, so that the choice of stages rests on true sizes.

The chosen stages are then planned whole, and the program is written and simulated: what the plan predicts is the
simulation's time and the program's own peak of buffers, not the DP's estimate. Where a submesh exceeds the budget, its
stages are planned again with memory four times as expensive; else the DP chooses again with less room.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpa_lite import schedules
from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.graph import Traced
from alpa_lite.layout import Layout
from alpa_lite.options import Pipeline as Method
from alpa_lite.options import Sharded
from alpa_lite.passes.layers import assignment as layering_stages
from alpa_lite.passes.layers import division
from alpa_lite.passes.layers.division import Divisible
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.layers.types import Layering
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.microbatches.loop import Accumulated, Retrace
from alpa_lite.passes.programs import simulation, transfers, writing
from alpa_lite.passes.programs.writing import Pipeline
from alpa_lite.passes.stages import layer_costs, planning, ranges, slicing, staging
from alpa_lite.passes.stages.layer_costs import LayerCost
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.ranges import StageCosts
from alpa_lite.passes.stages.segments import Segment, Segments
from alpa_lite.passes.stages.slices import SliceOptions, StageChoice, StageSlices, StageSlicing, Weighed
from alpa_lite.program import Buffer, Submesh, peak_bytes
from alpa_lite.schedules import Schedule
from alpa_lite.strategy import Rule
from alpa_lite.timeline import Timeline

logger = logging.getLogger(__name__)

REMAT: tuple[Choice, ...] = ("none", "layer", "selective")
"""What the backward pass of a stage may compute again."""

VARIANTS: tuple[tuple[int, Choice], ...] = tuple(itertools.product(range(len(layer_costs.PRICES)), REMAT))
"""Variants of a stage: the index of its price of memory, and what it computes again."""

ATTEMPTS = 3
"""How often the same stages are planned, each time with memory more expensive for those that exceed the budget."""

CERTAIN = 0.02
"""By what share an estimate of bytes or seconds may be exceeded without anything following from it."""

PRICED = 3
"""How many numbers of micro-batches are compared at their own costs, at most."""

SLICINGS = 3
"""How often stages are chosen, each time with less room by what the program exceeded the budget by."""


@dataclass(frozen=True, eq=False)
class FoundPipeline:
    """A pipeline that fits.

    Attributes:
      accumulated: the step as a loop over micro-batches, cut where stages begin (`layers.division`).
      layers: those that were priced.
      slices: what the DP chose.
      remat: of each stage.
      stages: planned, one for each stage.
      pipeline: the program and its functions.
      timeline: the simulated step.
      bytes: per device of each submesh: buffers at their peak, and the largest temporaries of its executables.
      budget: bytes per device.
      weighed: what the DP compared.
      bound: no pipeline of the DP's model is faster.
      over: if devices are left over, how many and why.
      replayed: whether all was given and nothing was searched.
    """

    accumulated: Accumulated
    layers: Layering
    slices: StageSlices
    remat: tuple[str, ...]
    stages: tuple[PlannedStage, ...]
    pipeline: Pipeline
    timeline: Timeline
    bytes: tuple[tuple[int, int], ...]
    budget: float
    weighed: tuple[Weighed, ...]
    bound: float
    over: str = ""
    replayed: bool = False

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.seconds


def search(
    traced: Traced,
    rules: Mapping[Any, Rule],
    cluster: Cluster,
    method: Method,
    *,
    num_microbatches: int | str,
    allow_inexact: bool,
    retrace: Retrace | None,
    budget: float,
    time_limit: float,
    max_layers: int = 64,
    progress: Callable[[str], None] = lambda text: None,
) -> FoundPipeline:
    """The best pipeline found.

    Args:
      num_microbatches: a number, or "auto" to choose it.
      allow_inexact, retrace: as in `microbatches.loop.accumulate`.
      budget: bytes per device.
      time_limit: seconds for each integer program.
      max_layers: the most layers that the forward pass is cut into.
      progress: told what is being done.

    Raises:
      InfeasibleError: no pipeline fits; names what binds.
      MicrobatchError: the step cannot be cut into the given number of micro-batches.
      OptionError: the method asks for what the cluster or the step does not have.
    """
    _check_devices(cluster, method)
    counts = [num_microbatches] if isinstance(num_microbatches, int) else _counts(traced, rules, cluster, method)
    slicer = _Slicer(
        traced, rules, cluster, method, allow_inexact, retrace, budget, time_limit, max_layers, progress
    )  # fmt: skip
    coster, found = _sliced(slicer, counts, budget)
    count = found.num_microbatches
    room = budget
    pipeline = slicer.realise(coster, found)
    for _ in range(SLICINGS - 1):
        over = max(map(sum, pipeline.bytes)) - budget
        if over <= 0:
            break
        room -= 1.05 * over  # the estimates of layers were too low by as much
        logger.info("the program exceeds the budget by %s bytes: slicing again with that much less", over)
        try:
            found = slicer.slice([coster.costs(count)], room)
        except InfeasibleError:
            break
        pipeline = slicer.realise(coster, found)
    return slicer.fitting(pipeline)


def _check_devices(cluster: Cluster, method: Method) -> None:
    """Raises OptionError if the method asks for more devices than there are."""
    stages, shapes, total = method.num_stages, method.mesh_shapes, cluster.num_devices
    if shapes is not None and sum(map(math.prod, shapes)) > total:
        raise OptionError(
            f"submesh_shapes={method.submesh_shapes} needs {sum(map(math.prod, shapes))} devices, but the cluster has "
            f"{total}; leave out stages, or give smaller submeshes"
        )
    if stages is not None and stages > total:
        raise OptionError(
            f"num_stages={stages} needs as many devices, but the cluster has {total}; give {total} at most"
        )


def _sliced(slicer: _Slicer, counts: Sequence[int], budget: float) -> tuple[_Coster, StageSlices]:
    """The costs at the best number of micro-batches, and the best slices at these costs.

    The best number by scaled costs is priced itself. If that is worse than was estimated, another number may be better,
    and is priced too, `PRICED` at most.

    Raises:
      InfeasibleError: none of the numbers fits.
    """
    reference = counts[len(counts) // 2]
    coster = slicer.layers(reference)
    left, priced = list(counts), 0
    best: tuple[_Coster, StageSlices] | None = None
    said: tuple[Any, ...] = ()  # of the best
    while left and priced < PRICED:
        try:
            found = slicer.slice([coster.costs(count) for count in left], budget)
        except InfeasibleError:
            if best is None:
                raise
            break
        if best is not None and found.seconds >= best[1].seconds:
            break
        count, estimated, weighed = found.num_microbatches, found.seconds, slicer.weighed
        left.remove(count)
        exact = (coster, found) if count == reference else _priced(slicer, found, budget)
        if exact is None:
            continue
        priced += 1
        if best is None or exact[1].seconds < best[1].seconds:
            others = [row for row in weighed if row.num_microbatches != count]
            rows = slicer.weighed if count == reference else (*slicer.weighed, *others)
            best, said = exact, (rows, slicer.bound, slicer.over)
        if exact[1].seconds <= (1 + CERTAIN) * estimated:
            break
    if best is None:
        raise InfeasibleError(f"no pipeline with {slicing.microbatches(reference)} or another number fits")
    slicer.weighed, slicer.bound, slicer.over = said
    return best


def _priced(slicer: _Slicer, found: StageSlices, budget: float) -> tuple[_Coster, StageSlices] | None:
    """Slices with as many micro-batches at their own costs: on the same sizes of submeshes, else on all; or None."""
    for kinds in (tuple(sorted({found.devices[stage.mesh] for stage in found.stages})), None):
        exact = slicer.layers(found.num_microbatches, kinds)
        try:
            return exact, slicer.slice([exact.costs(found.num_microbatches)], budget)
        except InfeasibleError:  # what was scaled fitted by little
            continue
    return None


def _counts(traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster, method: Method) -> list[int]:
    """The numbers of micro-batches worth trying: powers of two that the batch divides into, exactly."""
    most = min(256, 8 * max(2, method.num_stages or cluster.num_devices))
    counts = [1 << i for i in range(most.bit_length())]
    while counts and loop.batch_dims(traced, rules, counts[-1]) is None:
        counts.pop()  # what can be cut into a number of parts can be cut into half as many
    if not counts:
        raise MicrobatchError("the step cannot be written as a loop over micro-batches; use one mesh (Sharded())")
    return counts


@dataclass(eq=False)
class _Slicer:
    """What one search is given, and the stages that it has planned."""

    traced: Traced
    rules: Mapping[Any, Rule]
    cluster: Cluster
    method: Method
    allow_inexact: bool
    retrace: Retrace | None
    budget: float
    time_limit: float
    max_layers: int
    progress: Callable[[str], None]
    weighed: tuple[Weighed, ...] = ()
    bound: float = 0.0
    over: str = ""

    def layers(self, count: int, kinds: tuple[int, ...] | None = None) -> _Coster:
        """The step in `count` micro-batches and in layers, each distinct layer planned on submeshes of these sizes."""
        self.progress(f"cutting into {slicing.microbatches(count)}")
        accumulated = loop.accumulate(
            self.traced, self.rules, count, allow_inexact=self.allow_inexact, retrace=self.retrace
        )
        step = division.divisible(accumulated, max_layers=self.max_layers)
        return _Coster(self, step, count, self.kinds() if kinds is None else kinds)

    def kinds(self) -> tuple[int, ...]:
        """The numbers of devices of submeshes: powers of two within a node, whole nodes beyond.

        A single node that is no power of two has all numbers, up to eight, so that any number of stages can fill it.
        """
        if self.method.mesh_shapes is not None:
            return tuple(sorted({math.prod(shape) for shape in self.method.mesh_shapes}))
        node, total = self.cluster.devices_per_node, self.cluster.num_devices
        inside = [n for n in range(1, node + 1) if node % n == 0 and (n == node or n & (n - 1) == 0)]
        if self.cluster.nodes == 1 and node & (node - 1) and node < 8:
            inside = list(range(1, node + 1))
        nodes = [node * n for n in range(2, self.cluster.nodes + 1) if n & (n - 1) == 0 or n == self.cluster.nodes]
        most = total if self.method.num_stages in (None, 1) else total - (self.method.num_stages - 1)
        kinds = [n for n in (*inside, *nodes) if n <= most]
        if self.method.num_stages is not None and self.method.num_stages > 1:
            need = max(1, total // (2 * self.method.num_stages))  # far smaller ones leave most devices idle
            kinds = [n for n in kinds if n >= min(need, max(kinds))] or kinds
        return tuple(kinds)

    def shape_of(self, stage: int, devices: int) -> Sharded:
        """The logical mesh that a stage may have."""
        shapes = self.method.mesh_shapes
        if shapes is not None:
            shape = shapes[stage % len(shapes)]
            return Sharded(shape) if len(shape) > 1 else Sharded()
        return Sharded((1,)) if devices == 1 else Sharded()

    def stage_with(self, devices: int) -> int:
        """The first stage that has so many devices, if submeshes are given."""
        shapes = self.method.mesh_shapes or ()
        return next((i for i, shape in enumerate(shapes) if math.prod(shape) == devices), 0)

    def slice(self, costs: Sequence[StageCosts], budget: float) -> StageSlices:
        """What the stage DP chooses within a budget in bytes per device."""
        self.progress("choosing stages")
        method = self.method
        kinds = costs[0].devices
        shapes = method.mesh_shapes
        options = SliceOptions(
            budget=budget,
            schedules=schedules.NAMES if method.schedule == "auto" else (method.schedule,),
            num_stages=method.num_stages,
            kinds=None if shapes is None else tuple(kinds.index(math.prod(shape)) for shape in shapes),
            variants=None if method.remat == "auto" else _variants(method.remat),
            gap=0.005,
        )
        found = slicing.slice_stages(costs, options)
        best = found.best
        if best is None and method.schedule == "zb-h1":  # the DP has its times for as many micro-batches as stages
            found = slicing.slice_stages(costs, replace(options, schedules=("1f1b",)))
            best = found.best and replace(found.best, schedule="zb-h1")
        if best is None:
            assert found.infeasible is not None
            counts = " or ".join(slicing.microbatches(c.num_microbatches) for c in costs)
            raise InfeasibleError(f"no pipeline with {counts}: {found.infeasible.message}")
        self.weighed, self.bound, self.over = found.weighed, found.bound, self.left_over(found, best, kinds)
        return best

    def left_over(self, found: StageSlicing, best: StageSlices, kinds: Sequence[int]) -> str:
        """If the best pipeline does not use all devices, how many it uses and why."""
        used, total = best.devices_used, self.cluster.num_devices
        if used == total:
            return ""
        said = f"{used} of {total} devices are used: "
        if self.method.mesh_shapes is not None:
            return f"{said}submesh_shapes names no more"
        if found.all_devices is not None:
            return f"{said}every pipeline on all of them is predicted to be slower"
        stages = "" if self.method.num_stages is None else f"{self.method.num_stages} "
        if found.infeasible is not None and found.infeasible.constraint == "devices":
            sizes = ", ".join(map(str, kinds))
            return f"{said}{stages}submeshes of the searched sizes ({sizes} devices) cannot use all devices"
        return f"{said}no pipeline was found on all of them"

    def realise(self, coster: _Coster, slices: StageSlices) -> FoundPipeline:
        """Plans the chosen stages whole, writes the program and simulates it."""
        cuts = [stage.first for stage in slices.stages[1:]]
        remat: tuple[Choice, ...] = tuple(VARIANTS[stage.variant][1] for stage in slices.stages)
        step = division.divided(coster.step, cuts, remat)
        accumulated = step.accumulated
        graphs = staging.stage_graphs(accumulated.traced, accumulated.scan, step.assignment)
        schedule = schedules.schedule(
            slices.schedule, slices.num_meshes, slices.num_microbatches, virtual=slices.virtual
        )  # fmt: skip
        prices = [layer_costs.PRICES[VARIANTS[stage.variant][0]] for stage in slices.stages]
        planned: dict[tuple[Any, ...], PlannedStage] = {}
        mesh_of = [stage.mesh for stage in slices.stages]
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            stages = self.plan_stages(coster, graphs, slices, prices, schedule.splits_backward, planned)
            over = [size - self.budget for size in estimated_bytes(stages, mesh_of, schedule)]
            if max(over) <= CERTAIN * self.budget or schedule.splits_backward or last:
                self.progress("writing the program")
                pipeline = written(accumulated.traced, stages, slices.first_devices, schedule, self.cluster)
                used = bytes_of(pipeline, stages)
                over = [sum(pair) - self.budget for pair in used]
                if max(over) <= 0 or last:
                    break
            logger.info("submeshes exceed the budget by %s bytes: memory becomes more expensive for their stages", over)
            prices = [max(1.0, 4.0 * price) if over[m] > 0 else price for m, price in zip(mesh_of, prices, strict=True)]
        return FoundPipeline(
            accumulated, coster.layering, slices, remat, stages, pipeline,
            simulation.simulate(pipeline.program), used, self.budget, self.weighed, self.bound, self.over,
        )  # fmt: skip

    def fitting(self, found: FoundPipeline) -> FoundPipeline:
        """The pipeline itself, if it fits the budget.

        Raises:
          InfeasibleError: it does not.
        """
        needed = [sum(pair) for pair in found.bytes]
        worst = int(np.argmax(needed))
        if needed[worst] > self.budget:
            raise InfeasibleError(
                f"the pipeline of {len(found.stages)} stages needs {needed[worst]:,} bytes per device on submesh "
                f"{worst}, of {self.budget:,.0f}; allow more memory, more micro-batches or more stages"
            )
        return found

    def plan_stages(
        self, coster: _Coster, graphs: Sequence[staging.StageGraph], slices: StageSlices, prices: Sequence[float],
        split: bool, planned: dict[tuple[Any, ...], PlannedStage],
    ) -> tuple[PlannedStage, ...]:  # fmt: skip
        """Plans every stage; the mesh of the first stage of a submesh binds its others.

        Which mesh shape suits a stage has been weighed for its layers. `planned` gathers what has been planned: what is
        asked again is taken from it, and identical stages take over the choices of the first.
        """
        stages: list[PlannedStage] = []
        meshes: dict[int, tuple[int, ...]] = {}
        for number, (graph, stage) in enumerate(zip(graphs, slices.stages, strict=True)):
            devices = slices.devices[stage.mesh]
            self.progress(f"planning stage {number} of {len(graphs)}")
            method = self.shape_of(number, devices)
            if stage.mesh in meshes:
                method = Sharded(meshes[stage.mesh])
            elif method.mesh_shape is None:
                method = Sharded(coster.mesh_of(stage, coster.devices.index(devices)))
            key = planning.digest(graph), devices, method, prices[number]
            if (number, *key) not in planned:
                planned[number, *key] = planning.plan(
                    graph, self.cluster.part(devices), method,
                    price=prices[number], time_limit=self.time_limit, split_weights=split, like=planned.get(key),
                )  # fmt: skip
            one = planned[number, *key]
            planned.setdefault(key, one)
            meshes[stage.mesh] = one.found.mesh.shape
            stages.append(one)
        return tuple(stages)


class _Coster:
    """Costs of the layers at one number of micro-batches."""

    def __init__(self, slicer: _Slicer, step: Divisible, count: int, devices: tuple[int, ...]) -> None:
        self.step, self.layering, self.count = step, step.layering, count
        self.cluster = slicer.cluster
        self.devices = devices
        layers = step.layering
        number = len(layers.layers)
        assignment = layering_stages.assign(layers, range(1, number))
        graphs = staging.stage_graphs(layers.traced, layers.scan, assignment)
        shape = number, len(self.devices), len(VARIANTS)
        self.forward, self.backward, self.update = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.fixed, self.inflight, self.temporary = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.layers: list[tuple[tuple[LayerCost, ...], ...]] = []
        known: dict[str, tuple[tuple[LayerCost, ...], ...]] = {}
        clusters = [self.cluster.part(size) for size in self.devices]
        methods = [slicer.shape_of(slicer.stage_with(size), size) for size in self.devices]
        for n, graph in enumerate(graphs):
            name = planning.digest(graph)
            if name not in known:
                slicer.progress(f"planning layer {n} of {number}")
                known[name] = layer_costs.layer_costs(graph, clusters, methods, time_limit=slicer.time_limit)
            self.layers.append(known[name])
            for k in range(len(self.devices)):
                for v, (price, remat) in enumerate(VARIANTS):
                    self.fill((n, k, v), known[name][k][price], remat)

    def fill(self, at: tuple[int, int, int], cost: LayerCost, remat: str) -> None:
        """Writes the costs of one layer on one kind of submesh in one variant into the tables."""
        again = {"none": 0.0, "layer": cost.forward, "selective": cost.again}[remat]
        saved = {"none": cost.saved, "layer": 0.0, "selective": cost.kept}[remat]
        self.forward[at], self.backward[at] = cost.forward, cost.backward + again
        self.update[at], self.fixed[at] = cost.update, cost.fixed
        self.inflight[at] = cost.entering + saved
        self.temporary[at] = cost.temporary + cost.saved - saved

    def mesh_of(self, stage: StageChoice, kind: int) -> tuple[int, ...]:
        """The logical mesh that suits most of a stage's layers, by their seconds."""
        seconds: dict[tuple[int, ...], float] = {}
        price = VARIANTS[stage.variant][0]
        for layer in range(stage.first, stage.stop):
            cost = self.layers[layer][kind][price]
            seconds[cost.mesh_shape] = seconds.get(cost.mesh_shape, 0.0) + cost.forward + cost.backward
        return max(seconds, key=lambda shape: seconds[shape])

    def costs(self, count: int) -> StageCosts:
        """The costs for a number of micro-batches, scaled from those of the reference by the size of a micro-batch."""
        scale = self.count / count
        layers = len(self.layering.layers)
        crossing = np.array([0.0, *(layer.bytes_out for layer in self.layering.layers)]) * scale
        crossing[layers] = 0.0
        boundary = np.zeros((layers + 1, len(self.devices), len(self.devices)))
        for a, first in enumerate(self.devices):
            for b, second in enumerate(self.devices):
                boundary[:, a, b] = self.link_seconds(crossing, first, second)
        return ranges.from_layers(
            count,
            forward=self.forward * scale,
            backward=self.backward * scale,
            update=self.update,
            fixed_bytes=self.fixed,
            inflight_bytes=self.inflight * scale,
            boundary_seconds=boundary,
            boundary_bytes=crossing / max(1, max(self.devices)),
            devices=self.devices,
            total_devices=self.cluster.num_devices,
            devices_per_node=self.cluster.devices_per_node,
            temporary_bytes=self.temporary * scale,
        )

    def link_seconds(self, crossing: np.ndarray, first: int, second: int) -> np.ndarray:
        """Seconds of sending bytes from a submesh to the next, sharded over the smaller of the two."""
        cluster, width = self.cluster, min(first, second)
        link, node = cluster.node_link, cluster.devices_per_node
        seconds = link.latency + crossing / (link.bandwidth * width)
        if first + second > node and cluster.network_link is not None:
            network = cluster.network_link
            seconds = network.latency + crossing / (network.bandwidth * max(1.0, width / node))
        return seconds


def written(
    traced: Traced, stages: Sequence[PlannedStage], first_devices: Sequence[int], schedule: Schedule, cluster: Cluster
) -> Pipeline:
    """The program of planned stages; its state is donated.

    Args:
      traced: the step that was cut into stages.
      first_devices: the number of each submesh's first device.
    """
    submeshes = [Submesh(stages[m].found.mesh, first) for m, first in enumerate(first_devices)]
    return writing.build(
        traced, [stage.segments for stage in stages], submeshes, schedule,
        donated=[argument for _, argument in traced.state],
        segment_seconds=seconds_of(stages), transfer_seconds=transfers_of(cluster),
    )  # fmt: skip


def seconds_of(stages: Sequence[PlannedStage]) -> Callable[[Segments, Segment], float]:
    """Predicted seconds of the segments of some stages."""
    table = {segment: seconds for stage in stages for segment, seconds in stage.seconds.items()}
    return lambda segments, segment: table[segment]


def transfers_of(cluster: Cluster) -> Callable[[Buffer, Submesh, Submesh, Layout], float]:
    """Predicted seconds of transfers."""

    def seconds(sent: Buffer, source: Submesh, destination: Submesh, layout: Layout) -> float:
        return transfers.price(sent.shape, sent.dtype, sent.layout, source, layout, destination, cluster)

    return seconds


def estimated_bytes(stages: Sequence[PlannedStage], mesh_of: Sequence[int], schedule: Schedule) -> list[float]:
    """For each submesh the bytes per device that its stages will need: what `bytes_of` counts, without a program.

    What waits to be sent is left out. Where the backward pass is split, less than all of a micro-batch is held until
    its weight task; then this is too much.
    """
    flying = schedules.in_flight(schedule)
    fixed, each, most = ([0.0] * len(flying) for _ in range(3))
    for mesh, stage in zip(mesh_of, stages, strict=True):
        fixed[mesh] += stage.held.fixed
        each[mesh] = max(each[mesh], stage.held.saved + stage.held.entering)
        most[mesh] = max([most[mesh], *stage.temporary.values()])
    return [a + n * b + c for a, n, b, c in zip(fixed, flying, each, most, strict=True)]


def bytes_of(pipeline: Pipeline, stages: Sequence[PlannedStage]) -> tuple[tuple[int, int], ...]:
    """For each submesh, bytes per device of buffers at their peak, and of the largest temporaries."""
    peaks = peak_bytes(pipeline.program)
    most = [0] * len(peaks)
    for stage, mesh in zip(stages, pipeline.mesh_of, strict=True):
        most[mesh] = max([most[mesh], *stage.temporary.values()])
    return tuple(zip(peaks, most, strict=True))


def _variants(remat: str) -> tuple[int, ...]:
    """The variants that compute this again.

    Raises:
      OptionError: there is none.
    """
    if remat not in REMAT:
        raise OptionError(f'Pipeline remat={remat!r} cannot be planned; use "auto" or one of {", ".join(REMAT)}')
    return tuple(v for v, (_, again) in enumerate(VARIANTS) if again == remat)
