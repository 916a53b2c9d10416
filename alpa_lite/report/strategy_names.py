"""The choices of a plan in the field's words: data, tensor, sequence and expert parallelism, FSDP, ZeRO, pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alpa_lite.plan.figures import AxisUse
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.plan.records import Stage
from alpa_lite.report import stages, units
from alpa_lite.report.tables import Sentence

_ALL = 0.98
"""The share from which on something counts as all."""
_SOME = 0.02
"""The share below which something is left out."""
_KINDS = {
    "data": "data parallel",
    "tensor": "tensor parallel",
    "sequence": "sequence parallel",
    "space": "spatially parallel",
    "expert": "expert parallel",
}


def chosen(plan: Plan) -> list[str]:
    """Lines for the pipeline, the mesh axes of its stages, the state, and operations that are not distributed."""
    return [f"{' ' * line.indent}{'; '.join(line.parts)}" for line in sentences(plan)]


def sentences(plan: Plan) -> Iterator[Sentence]:
    """The lines of `chosen`; those that go on with the stages of the line before are indented."""
    lines = [(_division(plan), 0)]
    found = stages.numbers_by_value(map(_stage, plan.stages))
    for (work, *state), numbers in found.items():
        where = f"{stages.named(numbers)}: " if len(found) > 1 else ""
        lines += [((where + work[0], *work[1:]), 0), *((line, len(where)) for line in state)]
    lines.append((_replicated(plan), 0))
    return (Sentence("", parts, ";", indent) for parts, indent in lines if parts)


def _division(plan: Plan) -> tuple[str, ...]:
    """Returns the schedule of a pipeline, or the micro-batches of one mesh; and the recomputation."""
    count, meshes, tokens = plan.num_microbatches, stages.sizes(plan), plan.division.token_slices
    parts = [f"{count} micro-batches, one after another"] if count > 1 else []
    if plan.pipelined:
        alike = len(set(meshes)) == 1
        sizes = str(meshes[0]) if alike else ", ".join(map(str, meshes))
        where = f" in {len(meshes)} submeshes" if plan.division.virtual > 1 else ""
        slices = f" in slices of {', '.join(map(str, tokens))} tokens" if tokens else ""
        parts = [
            f"pipeline of {plan.num_stages} stages{where} on {sizes} device{'s' * (sizes != '1')}{' each' * alike}, "
            f"{plan.schedule} with {units.plural(count, 'micro-batch')}{slices}"
        ]
    kinds = [kind for kind in dict.fromkeys(plan.division.remat) if kind != "none"]
    return *parts, *([f"recomputes {', '.join(kinds)}"] if kinds else [])


def _stage(stage: Stage) -> tuple[tuple[str, ...], ...]:
    """A line for the work of a stage, and one for its state."""
    if stage.num_devices == 1:
        return (("one device",),)
    if not stage.axes:
        return ((f"mesh {units.mesh(stage.mesh_shape, stage.axis_names)}",),)
    axes = [axis for axis in stage.axes if axis.size > 1]
    found: dict[str, list[str]] = {}
    for axis in axes:
        found.setdefault(_products(axis), []).append(f"{axis.name}={axis.size}")
    work = tuple(f"{product} over {' '.join(names)}" for product, names in found.items())
    return work, _state(axes)


def _products(axis: AxisUse) -> str:
    """A name, such as "data parallel", or "data parallel (71 % of the products' FLOPs) and tensor parallel (28 %)"."""
    shares = [(_KINDS[name], share) for name, share in axis.products.items() if share >= _SOME]
    if not shares:
        return "nothing of the products divided"
    if len(shares) == 1 and shares[0][1] >= _ALL:
        return shares[0][0]
    first, *others = shares
    parts = [f"{first[0]} ({units.percent(first[1], 1)} of the products' FLOPs)"]
    parts += [f"{name} ({units.percent(share, 1)})" for name, share in others]
    return " and ".join(parts)


def _state(axes: Iterable[AxisUse]) -> tuple[str, ...]:
    """The sharding of the state: FSDP where parameters are over an axis that is data parallel, ZeRO for moments."""
    found: dict[tuple[str, str], list[str]] = {}
    for axis in axes:
        data = axis.products.get("data", 0.0) >= 0.5
        if axis.params >= _SOME:
            name, share = "FSDP of parameters" if data else "parameters sharded", axis.params
        elif axis.optimizer >= _SOME:
            name, share = f"parameters replicated, optimizer state sharded{' (ZeRO)' * data}", axis.optimizer
        else:
            name, share = "parameters replicated", 1.0
        part = "" if share >= _ALL else f" ({100 * share:.0f} % of the bytes)"
        found.setdefault((name, part), []).append(axis.name)
    return tuple(f"{name} over {' '.join(names)}{part}" for (name, part), names in found.items())


def _replicated(plan: Plan) -> tuple[str, ...]:
    """Operations that every device computes whole, or the compiler divides, if they take a hundredth of the step."""
    rows = stages.replicated(plan)
    seconds = sum(row.seconds for row in rows)
    if seconds < 0.01 * plan.step_seconds:
        return ()
    names = ", ".join(dict.fromkeys(row.name.split(" ")[0] for row in rows[:4]))
    return (f"not distributed: {names}, {units.percent(seconds, plan.step_seconds)} of the step",)
