"""Chooses the stages: the stage DP on the costs of layers, with what the method gives taken as given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_lite.errors import InfeasibleError, OptionError
from alpa_lite.ir import schedules, units
from alpa_lite.options import Pipeline
from alpa_lite.passes.stages.dp import slicing
from alpa_lite.passes.stages.dp.slices import SliceOptions, StageSlices, StageSlicing, WeighedSchedule
from alpa_lite.passes.stages.dp.tasks import evaluate
from alpa_lite.passes.stages.pricing import REMAT, VARIANTS, LayerCosts

GAP = 5e-3
"""How near the optimum of its model the DP stops."""

ROUGH_GAP = 3e-2
"""The same, where it only says which costs of layers to work out."""

CERTAIN = 0.02
"""The share by which an estimate of bytes or seconds may be exceeded without any consequence."""


@dataclass(frozen=True, eq=False)
class StagePlan:
    """Chosen stages, with the alternatives that were compared.

    Attributes:
      layer_costs: the step in layers, and their costs.
      slices: the stages.
      weighed: what the DP compared.
      bound: no pipeline of the DP's model is faster, in seconds.
      idle_devices: if devices are left over, how many and why.
    """

    layer_costs: LayerCosts
    slices: StageSlices
    weighed: tuple[WeighedSchedule, ...]
    bound: float
    idle_devices: str = ""

    @property
    def seconds(self) -> float:
        """Of a step, in the DP's model."""
        return self.slices.seconds


def choose(
    priced: LayerCosts, method: Pipeline, counts: Sequence[int], budget: float,
    *, rough: bool = False,
) -> StagePlan:  # fmt: skip
    """Returns the stages that the DP chooses.

    Args:
      counts: the numbers of micro-batches to choose from.
      budget: bytes per device.
      rough: whether to look at equal submeshes alone, and to stop farther from the optimum.

    Raises:
      InfeasibleError: no pipeline fits; names the binding constraint.
      OptionError: the method requests a rematerialisation that does not exist.
    """
    shapes, names = method.mesh_shapes, schedules.NAMES
    if method.lengths:  # whose gradients of parameters are not computed apart
        names = tuple(name for name in names if not schedules.STRATEGIES[name].splits_backward)
    options = SliceOptions(
        budget=budget,
        schedules=names if method.schedule == "auto" else (method.schedule,),
        num_stages=method.num_stages,
        kinds=None if shapes is None else tuple(priced.devices.index(math.prod(shape)) for shape in shapes),
        gap=ROUGH_GAP if rough else GAP,
        has_equal_submeshes=rough,
    )
    variants = None if method.remat == "auto" else _variants(method.remat)
    costs = [priced.stage_costs(count, variants) for count in counts]
    found = slicing.slice_stages(costs, options)
    best = found.best
    if best is None and method.schedule == "zb-h1":  # the DP has its times for as many micro-batches as stages
        found = slicing.slice_stages(costs, replace(options, schedules=("1f1b",)))
        best = found.best and replace(found.best, schedule="zb-h1")
    if best is None:
        assert found.infeasible is not None
        numbers = " or ".join(units.count_of(count, "micro-batch") for count in counts)
        why = found.infeasible
        raise InfeasibleError(f"no pipeline with {numbers}: {why.message}", why.smallest_budget)
    best = _cheapest_memory(priced, best, budget)
    return StagePlan(priced, best, found.weighed, found.bound, _idle_devices(priced, method, found, best))


def _cheapest_memory(priced: LayerCosts, best: StageSlices, budget: float) -> StageSlices:
    """Returns the same stages at the lowest price of memory, where they fit and are as fast by their layers, to `GAP`.

    A whole stage makes other choices at a price than its layers do.
    """
    stages = tuple(replace(s, variant=VARIANTS.index((0, VARIANTS[s.variant][1]))) for s in best.stages)
    free = replace(best, stages=stages)
    seconds, size = evaluate(priced.stage_costs(best.num_microbatches), free)
    if max(size) <= budget and seconds <= best.seconds * (1 + GAP):
        return replace(free, seconds=seconds, bytes=size)
    return best


def _idle_devices(priced: LayerCosts, method: Pipeline, found: StageSlicing, best: StageSlices) -> str:
    """If the best pipeline does not use all devices, how many it uses and why."""
    used, total = best.devices_used, priced.cluster.num_devices
    if used == total:
        return ""
    said = f"{used} of {total} devices are used: "
    if method.mesh_shapes is not None:
        return f"{said}submesh_shapes names no more"
    if found.all_devices is not None:
        return f"{said}every pipeline on all of them is predicted to be slower"
    stages = "" if method.num_stages is None else f"{method.num_stages} "
    if found.infeasible is not None and found.infeasible.constraint == "devices":
        sizes = ", ".join(map(str, priced.devices))
        return f"{said}{stages}submeshes of the searched sizes ({sizes} devices) cannot use all devices"
    return f"{said}no pipeline was found on all of them"


def _variants(remat: str) -> tuple[int, ...]:
    """Returns the variants that compute this again.

    Raises:
      OptionError: there is none.
    """
    if remat not in REMAT:
        raise OptionError(f'Pipeline remat={remat!r} cannot be planned; use "auto" or one of {", ".join(REMAT)}')
    return tuple(v for v, (_, again) in enumerate(VARIANTS) if again == remat)
