"""A schedule with given seconds for its tasks as a timeline: an oracle for simulated programs and the stage search."""

from collections.abc import Sequence
from dataclasses import replace

from alpa_lite.ir.schedules import Schedule, Task, walk
from alpa_lite.ir.timeline import Event, Timeline


def simulate(
    schedule: Schedule,
    *,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight: float | Sequence[float] = 0.0,
    transfer: float | Sequence[float] = 0.0,
) -> Timeline:
    """Simulates a schedule; every submesh starts the next task of its list as soon as its operands have arrived.

    Each of two submeshes has a link to the other. Transfers overlap with computation, and those of one link take turns.
    Results that stay on their submesh need none.

    Args:
      schedule: of `schedule`, or any other.
      forward: seconds of one task of each stage, or one number for all.
      backward: seconds of the gradients of inputs, likewise, or of all gradients where `weight` is 0.
      weight: seconds of the gradients of parameters, likewise. A schedule that does not split the backward task takes
        `backward` plus `weight` for it.
      transfer: seconds between stage s and stage s+1, in either direction, likewise.

    Raises:
      PlanError: the lists wait for each other.
      ValueError: a sequence of another length than the number of stages (for `transfer`: one less).
    """
    stages = schedule.num_stages
    split = schedule.splits_backward
    weights = _each("weight", weight, stages)
    backwards = _each("backward", backward, stages)
    seconds = {
        "forward": _each("forward", forward, stages),
        "backward": backwards if split else [b + w for b, w in zip(backwards, weights, strict=True)],
        "weight": weights,
    }
    transfers = _each("transfer", transfer, stages - 1)
    clocks = [0.0] * schedule.num_meshes
    links: dict[tuple[int, int], float] = {}
    arrived: dict[Task, float] = {}
    events: list[Event] = []
    for mesh, task in walk(schedule):
        kind, stage, microbatch = task.kind, task.stage, task.microbatch
        source = stage - 1 if kind == "forward" else stage + 1
        start = clocks[mesh]
        if kind != "weight" and 0 <= source < stages:
            start = max(start, arrived[replace(task, stage=source)])
        end = clocks[mesh] = start + seconds[kind][stage]
        name = f"{kind} {microbatch}.{task.slice}" if schedule.num_slices > 1 else f"{kind} {microbatch}"
        events.append(Event(mesh, start, end, name, kind, stage, microbatch))
        target = stage + 1 if kind == "forward" else stage - 1
        if kind == "weight" or not 0 <= target < stages:
            continue
        other, cost = schedule.mesh(target), transfers[min(stage, target)]
        arrival = end
        if other != mesh and cost:
            begin = max(end, links.get((mesh, other), 0.0))
            arrival = links[mesh, other] = begin + cost
            events.append(Event(mesh, begin, arrival, name, "transfer", stage, microbatch, other))
        arrived[task] = arrival
    return Timeline(tuple(events), schedule.num_meshes, schedule.name)


def _each(argument: str, value: float | Sequence[float], length: int) -> list[float]:
    if not isinstance(value, Sequence):
        return [float(value)] * length
    if len(value) != length:
        raise ValueError(f"{argument} has {len(value)} entries, and {length} are needed")
    return [float(v) for v in value]


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each submesh the most micro-batch activations that it holds at once, found by walking its list."""
    last = "weight" if schedule.splits_backward else "backward"
    peaks = []
    for tasks in schedule.tasks:
        held = peak = 0
        for task in tasks:
            if task.slice:
                continue  # the first slice comes first forward, and last backward
            if task.kind == "forward":
                held += 1
                peak = max(peak, held)
            elif task.kind == last:
                held -= 1
        peaks.append(peak)
    return tuple(peaks)
