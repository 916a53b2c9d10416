"""How textbook methods would do on the same devices: the integer program with operations fixed, at the same prices.

    data parallel     every operation over examples divided along them, the state whole on every device
    FSDP (ZeRO-3)     likewise, parameters and optimizer state sharded where a dim divides, and gathered for use
    tensor parallel   the batch whole on every device, products divided along dims of their parameters
    one mesh          everything free, on the best mesh of all devices; beside a pipeline
    one device        the step as it is written, on the first of the devices

What a method leaves open (`sharding.textbook`) the program chooses, so that each figure is that of the best step of its
kind within the budget of memory; where none fits, the least bytes that one needs are found.
Beside a plan of one mesh, methods run as many micro-batches as the plan; beside a pipeline, one.
That costs up to half of what planning costs, and so it is done when somebody asks (`Plan.with_baselines`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.ir import units
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.options import DataParallel, Method, Sharded, TensorParallel, Zero
from alpa_lite.passes import sharding
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding import mesh_program
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.stages import planning
from alpa_lite.passes.stages.choosing import StagePlan
from alpa_lite.plan.decisions import Candidate
from alpa_lite.plan.figures import Comparison

TEXTBOOK: Mapping[str, Method] = {
    "data parallel": DataParallel(),
    "FSDP (ZeRO-3)": Zero(stage=3),
    "tensor parallel": TensorParallel(),
}
"""The methods by their names in reports."""
_ONE_MESH = "one mesh"


def compare_with_textbook(
    traced: Traced, rules: Mapping[Any, Rule], staged: Staged, cluster: Cluster, budget: float
) -> Callable[[tuple[Comparison, ...]], tuple[Comparison, ...]]:
    """Returns a function that puts textbook methods, in the order of the module's list, before the known comparisons.

    Args:
      traced, rules: the user's step, which is compared as it is when the plan is a pipeline.
      cluster: all devices.
      budget: bytes per device.
    """
    grouping, methods = None, dict(TEXTBOOK)
    if staged.program.schedule == "none":
        (stage,) = staged.stages
        traced, rules, grouping = stage.graph.traced, stage.rules, stage.grouping
    elif _ONE_MESH not in [other.name for other in staged.verdict.others]:
        methods[_ONE_MESH] = Sharded()

    def compare(known: tuple[Comparison, ...]) -> tuple[Comparison, ...]:
        if cluster.num_devices == 1:
            return known
        step = GroupedStep(traced, grouping or sharding.group(traced, rules), rules)
        found = [_compared(step, budget, name, method, cluster) for name, method in methods.items()]
        return (*found, _compared(step, budget, "one device", Sharded((1,)), cluster.part(1)), *known)

    return compare


def _compared(step: GroupedStep, budget: float, name: str, method: Method, cluster: Cluster) -> Comparison:
    """Returns the figures of the best step of a method, or why there are none."""
    try:
        programs = mesh_program.mesh_programs(step, cluster, method, budget=budget)
        found = mesh_program.solve_meshes(programs, budget)
        if found is None and name == _ONE_MESH:
            return Comparison(name, reason="does not fit")
        if found is None:
            least, shape = mesh_program.minimise_memory(programs), programs[0].mesh.shape
            if least is None:
                return Comparison(name, shape, reason="not evaluated: the method has no choice")
            _, found = least
            if (peak := found.solution.peak) > budget:
                excess = f"{(peak - budget) / 2**30:,.3g} GiB"
                return Comparison(name, shape, None, math.ceil(peak), f"does not fit by {excess}")
        seconds = planning.overlapped_seconds(step, cluster, found)
        return Comparison(name, found.mesh.shape, seconds, math.ceil(found.solution.peak))
    except (InfeasibleError, MicrobatchError, OptionError) as error:
        return Comparison(name, reason=str(error).split(";")[0])


def compared_pipelines(chosen: StagePlan) -> tuple[Candidate, ...]:
    """Returns every schedule with every number of micro-batches that the stage DP compared, with its estimates."""
    out = []
    for weighed in chosen.weighed:
        twice = f" with {weighed.virtual} stages per submesh" if weighed.virtual > 1 else ""
        name = f"{weighed.schedule}{twice}, {units.count_of(weighed.num_microbatches, 'micro-batch')}"
        shape = (weighed.num_stages,) if weighed.num_stages is not None else ()
        size = None if weighed.bytes is None else int(weighed.bytes)
        out.append(Candidate(name, shape, weighed.seconds, size, weighed.status))
    return tuple(out)


def add_comparison(staged: Staged, name: str, other: Staged | Comparison | str) -> Staged:
    """Returns the plan with a rejected configuration added to its verdict: its figures, or why there is none."""
    if isinstance(other, str):
        compared = Comparison(name, reason=other)
    elif isinstance(other, Comparison):
        compared = replace(other, name=name)
    else:
        shape = other.stages[0].mesh_solution.mesh.shape if len(other.stages) == 1 else (len(other.stages),)
        compared = Comparison(name, shape, other.seconds, other.needed_bytes)
    return replace(staged, verdict=replace(staged.verdict, others=(*staged.verdict.others, compared)))
