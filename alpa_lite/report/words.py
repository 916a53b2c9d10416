"""What a plan chose, in the field's words: data, tensor, sequence and expert parallelism, FSDP, ZeRO, pipelines."""

from __future__ import annotations

from collections.abc import Iterable

from alpa_lite.figures import AxisUse
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.records import Stage
from alpa_lite.report import stages, units

_MOST = 0.98
"""The share from which on something counts as all."""
_SOME = 0.02
"""The share below which something is not worth a word."""
_KINDS = {
    "data": "data parallel",
    "tensor": "tensor parallel",
    "sequence": "sequence parallel",
    "space": "spatially parallel",
    "expert": "expert parallel",
}


def chosen(plan: Plan) -> list[str]:
    """What was chosen, a line each for the pipeline, the mesh axes of its stages, the state, and what is not shared."""
    lines = [_pipeline(plan)] if plan.pipelined else _loop(plan)
    found: dict[tuple[str, ...], list[int]] = {}
    for number, stage in enumerate(plan.stages):
        found.setdefault(_of_stage(stage), []).append(number)
    for said, numbers in found.items():
        where = f"{stages.named(numbers)}: " if len(found) > 1 else ""
        lines += [where + said[0], *(f"{' ' * len(where)}{line}" for line in said[1:])]
    alone = _alone(plan)
    return [*lines, alone] if alone else lines


def _pipeline(plan: Plan) -> str:
    meshes = stages.sizes(plan)
    alike = len(set(meshes)) == 1
    sizes = str(meshes[0]) if alike else ", ".join(map(str, meshes))
    where = f" in {len(meshes)} submeshes" if plan.division.virtual > 1 else ""
    again = [what for what in dict.fromkeys(plan.division.remat) if what != "none"]
    remat = f"; recomputes {', '.join(again)}" if again else ""
    device = "device" if sizes == "1" else "devices"
    count = f"{plan.num_microbatches} micro-batch{'es' * (plan.num_microbatches > 1)}"
    tokens = plan.division.token_slices
    slices = f" in slices of {', '.join(map(str, tokens))} tokens" if tokens else ""
    return (
        f"pipeline of {plan.num_stages} stages{where} on {sizes} {device}{' each' * alike}, {plan.schedule} with "
        f"{count}{slices}{remat}"
    )


def _loop(plan: Plan) -> list[str]:
    """What one mesh does in parts, or again."""
    count, (remat, *_) = plan.num_microbatches, plan.division.remat
    parts = [f"{count} micro-batches, one after another"] if count > 1 else []
    parts += [f"recomputes {remat}"] if remat != "none" else []
    return ["; ".join(parts)] if parts else []


def _of_stage(stage: Stage) -> tuple[str, ...]:
    if stage.num_devices == 1:
        return ("one device",)
    if not stage.axes:
        return (f"mesh {units.mesh(stage.mesh_shape, stage.axis_names)}",)
    axes = [axis for axis in stage.axes if axis.size > 1]
    return (_work(axes), _state(axes))


def _work(axes: Iterable[AxisUse]) -> str:
    """What each axis divides; axes with the same answer together."""
    found: dict[str, list[AxisUse]] = {}
    for axis in axes:
        found.setdefault(_products(axis), []).append(axis)
    return "; ".join(f"{said} over {_names(some)}" for said, some in found.items())


def _names(axes: Iterable[AxisUse]) -> str:
    return " ".join(f"{axis.name}={axis.size}" for axis in axes)


def _products(axis: AxisUse) -> str:
    """Such as "data parallel", or "data parallel (71 % of the products' FLOPs) and tensor parallel (28 %)"."""
    shares = [(_KINDS[name], share) for name, share in axis.products.items() if share >= _SOME]
    if not shares:
        return "nothing of the products divided"
    if len(shares) == 1 and shares[0][1] >= _MOST:
        return shares[0][0]
    first, *others = shares
    parts = [f"{first[0]} ({units.percent(first[1], 1)} of the products' FLOPs)"]
    parts += [f"{name} ({units.percent(share, 1)})" for name, share in others]
    return " and ".join(parts)


def _state(axes: Iterable[AxisUse]) -> str:
    """Where the state lies: FSDP where parameters are sharded over an axis that is data parallel, ZeRO for moments."""
    found: dict[str, list[str]] = {}
    for axis in axes:
        data = axis.products.get("data", 0.0) >= 0.5
        if axis.params >= _SOME:
            name, share = "FSDP of parameters" if data else "parameters sharded", axis.params
        elif axis.optimizer >= _SOME:
            name, share = f"parameters replicated, optimizer state sharded{' (ZeRO)' * data}", axis.optimizer
        else:
            name, share = "parameters replicated", 1.0
        found.setdefault(f"{name} over %s{_share(share)}", []).append(axis.name)
    return "; ".join(said % " ".join(names) for said, names in found.items())


def _share(share: float) -> str:
    return "" if share >= _MOST else f" ({100 * share:.0f} %% of the bytes)"


def _alone(plan: Plan) -> str:
    """What every device computes whole, or is left to the compiler, if it takes a hundredth of the step."""
    rows = stages.replicated(plan)
    seconds = sum(row.seconds for row in rows)
    if seconds < 0.01 * plan.step_seconds:
        return ""
    names = ", ".join(dict.fromkeys(row.name.split(" ")[0] for row in rows[:4]))
    return f"not distributed: {names}, {units.percent(seconds, plan.step_seconds)} of the step"
