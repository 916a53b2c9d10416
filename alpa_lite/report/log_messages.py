"""Messages of the log: one sentence for each planning and for each compilation."""

from __future__ import annotations

import heapq

from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import strategy_names, summary, units

_LAPS = 3  # the longest of them are named


def planned(name: str, plan: Plan, why: str) -> str:
    """Describes a planning: why it was done, the choice, its predicted cost, and the time it took.

    Args:
      name: of the step.
      why: why it was planned now, such as "its first call".
    """
    devices = f"{plan.cluster.num_devices} {plan.cluster.device}"
    said = " ".join(line.strip() for line in strategy_names.chosen(plan)).rstrip(".")
    seconds = plan.planning_seconds
    laps = ", ".join(
        f"{lap} {units.seconds(seconds[lap])}" for lap in heapq.nlargest(_LAPS, seconds, seconds.__getitem__)
    )
    return (
        f"planned {name} for {devices} ({why}): {said}; predicted {units.seconds(plan.step_seconds)} a step and "
        f"{units.nbytes(summary.peak(plan))} of {units.nbytes(plan.memory_per_device)} per device; in "
        f"{units.seconds(sum(seconds.values()))}{f' ({laps})' if laps else ''}"
    )


def compiled(name: str, executables: int, seconds: float) -> str:
    """Describes a compilation."""
    return f"compiled {name}: {units.plural(executables, 'executable')} in {units.seconds(seconds)}"
