"""Seconds and bytes of a pipeline, straight from the formulas of `stages.slicing`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from alpa_lite.ir.schedules import in_flight_formula
from alpa_lite.passes.stages.ranges import StageCosts
from alpa_lite.passes.stages.slices import StageSlices


def evaluate(costs: StageCosts, slices: StageSlices) -> tuple[float, tuple[float, ...]]:
    """Seconds of a step, and bytes per device of each submesh, straight from the formulas of the module.

    `costs` must be those of `slices.num_microbatches`; seconds and bytes in `slices` are not read.
    """
    count, meshes = slices.num_microbatches, slices.num_meshes
    found = []
    fixed: list[list[float]] = [[] for _ in range(meshes)]
    each: list[list[float]] = [[] for _ in range(meshes)]
    for s, stage in enumerate(slices.stages):
        at = stage.first, stage.stop, stage.kind, stage.variant
        after = slices.stages[s + 1].kind if s + 1 < len(slices.stages) else None
        cut = (0.0, 0.0) if after is None else costs.cut_seconds(stage.stop, stage.kind, after)
        latency, excess = terms(
            slices.schedule, costs, lambda values, at=at: values[at], cut, slices.virtual, stage.kind
        )
        found.append((float(latency), float(excess), float(costs.update[at])))
        fixed[stage.mesh].append(float(costs.fixed_bytes[at]) + costs.buffer_bytes(stage.first, stage.stop))
        each[stage.mesh].append(float(costs.flying(slices.schedule)[at]))
    counts = [in_flight_formula(slices.schedule, meshes, count, mesh, slices.virtual) for mesh in range(meshes)]
    total = sum(t[0] for t in found) + max(t[1] for t in found) + max(t[2] for t in found)
    return total, tuple(sum(f) + n * max(e) for f, e, n in zip(fixed, each, counts, strict=True))


def terms(
    schedule: str, costs: StageCosts, of: Callable[[np.ndarray], np.ndarray], cut: Any, virtual: int, kind: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Latency and excess of some stages with `cut` behind them: as of `cut_seconds`.

    Args:
      of: what a cost array holds of the stages.
      kind: their kinds of submesh, one or an array that broadcasts with theirs.
    """
    count = costs.num_microbatches
    forward, backward = of(costs.forward), of(costs.backward)
    t, both, most = forward + backward, 2 * np.asarray(cut[0]), 2 * np.asarray(cut[1])
    possible = np.isfinite(t + both)
    own, started = _started(schedule, costs, kind)
    others = count * virtual - 1
    with np.errstate(invalid="ignore"):  # 0 * inf and inf - inf where there is no such stage
        latency, period, hidden = t + both, t + both, 0.0
        if schedule in ("gpipe", "eager-1f1b"):
            period = np.maximum(t, most)
        elif schedule == "zb-h1":
            hidden = 2 * np.minimum(backward / 2, forward)
            latency = latency - hidden
        latency = np.maximum(latency, own) / virtual
        excess = np.maximum(others * period, others * started + min(others, 1) * period) + hidden
    return np.where(possible, latency, np.inf), np.where(possible, excess, np.inf)


def _started(schedule: str, costs: StageCosts, kind: Any) -> tuple[Any, Any]:
    """Returns the seconds of starting one micro-batch's tasks: the share of one stage, and the sum of its process."""
    hosts = costs.hosts
    if hosts is None:
        return 0.0, 0.0
    period = hosts.period(3 if schedule == "zb-h1" else 2)
    return (period / np.array(hosts.stages))[kind], period[kind]
