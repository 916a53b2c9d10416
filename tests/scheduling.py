"""Oracles for schedules: all their tasks in an order, and with given seconds for them as a timeline."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from alpa_lite.errors import PlanError
from alpa_lite.ir.schedules import Schedule, Task, TaskKind
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


def check(schedule: Schedule) -> None:
    """Raises PlanError unless every task is there once, on its submesh, and no list waits forever."""
    kinds: tuple[TaskKind, ...] = (
        ("forward", "backward", "weight") if schedule.splits_backward else ("forward", "backward")
    )
    stages, microbatches, slices = map(
        range, (schedule.num_stages, schedule.num_microbatches, schedule.num_slices)
    )  # fmt: skip
    wanted = {Task(k, s, m, i) for k in kinds for s in stages for m in microbatches for i in slices}
    found: set[Task] = set()
    for mesh, tasks in enumerate(schedule.tasks):
        for task in tasks:
            if task not in wanted or schedule.mesh(task.stage) != mesh:
                raise PlanError(f"schedule {schedule.name!r}: {task} does not belong on submesh {mesh}")
            if task in found:
                raise PlanError(f"schedule {schedule.name!r}: {task} occurs twice")
            found.add(task)
    if found != wanted:
        missing = min(wanted - found, key=lambda task: (task.stage, task.microbatch, task.slice))
        raise PlanError(f"schedule {schedule.name!r}: {len(wanted - found)} tasks are missing, such as {missing}")
    for _ in walk(schedule):
        pass


def walk(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """All tasks as (submesh, task), each after the tasks that it needs, every submesh in its own order, in turns.

    Raises:
      PlanError: the lists wait for each other.
    """
    total, last = sum(map(len, schedule.tasks)), schedule.num_stages - 1
    positions = [0] * schedule.num_meshes
    done: set[Task] = set()
    waiting: dict[Task, int] = {}
    ready = deque(range(schedule.num_meshes))
    while ready:
        mesh = ready.popleft()
        tasks = schedule.tasks[mesh]
        if positions[mesh] == len(tasks):
            continue
        task = tasks[positions[mesh]]
        missing = next((need for need in _needs(task, last, schedule.num_slices) if need not in done), None)
        if missing is not None:
            waiting[missing] = mesh
            continue
        positions[mesh] += 1
        total -= 1
        yield mesh, task
        done.add(task)
        ready.append(mesh)
        if task in waiting:
            ready.append(waiting.pop(task))
    if total:
        stuck = ((mesh, schedule.tasks[mesh], at) for mesh, at in enumerate(positions))
        where = ", ".join(f"submesh {mesh} at {tasks[at]}" for mesh, tasks, at in stuck if at < len(tasks))
        raise PlanError(f"the lists of schedule {schedule.name!r} wait for each other: {where}")


def _needs(task: Task, last: int, slices: int) -> list[Task]:
    """Returns the tasks that `task` needs; `last` is the last stage."""
    kind, stage = task.kind, task.stage
    if kind == "weight":
        return [replace(task, kind="backward")]
    if kind == "forward":
        before = [replace(task, stage=stage - 1)] if stage else []
        return [*before, replace(task, slice=task.slice - 1)] if task.slice else before
    behind = task.slice + 1
    own = replace(task, slice=behind) if behind < slices else replace(task, kind="forward")
    return [own, replace(task, stage=stage + 1)] if stage < last else [own]
