"""Programs of pipelines: lists follow the schedule, transfers the order of their predicted times; buffers end."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.ir import schedules
from alpa_lite.ir.program import Receive, Run, Send, peak_bytes
from alpa_lite.ir.schedules import Schedule, Task
from alpa_lite.passes.programs import simulation, writing
from alpa_lite.passes.programs.calls import Calls
from alpa_lite.passes.programs.writing import Written
from tests.passes.layers.division_cases import driven
from tests.pipeline_driver import Driven

SECONDS = {"forward": 1.0, "backward": 2.0, "weight": 1.0}


def planned(schedule: Schedule, kind: str = "plain") -> Driven:
    """Stages that a schedule fits: the program of any number of micro-batches is written from the same."""
    name = "zb-h1" if schedule.splits_backward else "1f1b" if schedule.virtual == 1 else "interleaved-1f1b"
    return driven(kind, schedule.num_meshes, name, schedule.virtual)


def written(schedule: Schedule, kind: str = "plain", transfer: float = 0.0) -> Written:
    stages = planned(schedule, kind)
    segments = [stage.segments for stage in stages.stages]
    seconds = {segment: SECONDS.get(segment.kind, 0.0) for parts in segments for segment in parts.items}
    calls = Calls(segments, stages.pipeline.program.submeshes, schedule, seconds, lambda *_: transfer)
    donated = [argument for _, argument in stages.staged.traced.state]
    return writing.build(stages.staged.accumulated.traced, calls, donated=donated)


MANY = [
    (schedules.schedule(name, meshes, count, virtual=virtual), kind)
    for name in schedules.NAMES
    for meshes in (2, 4)
    for count in (1, 2, 8)
    for virtual in ((2,) if name == "interleaved-1f1b" else (1,))
    if (name != "interleaved-1f1b" or count % meshes == 0) and meshes * virtual <= 4
    for kind in ("plain", "tied", "norm")
    if kind == "plain" or count == 2
]


@pytest.mark.parametrize(
    ("schedule", "kind"),
    MANY,
    ids=lambda s: s if isinstance(s, str) else f"{s.name}-{s.num_meshes}x{s.num_microbatches}",
)
def test_lists_follow_the_schedule_and_leak_nothing(schedule: Schedule, kind: str) -> None:
    """`build` checks the program: defined before use, ended once, nothing leaked, no deadlock."""
    pipeline = written(schedule, kind, 0.5)
    program = pipeline.program
    for mesh, items in enumerate(program.lists):
        runs = [(program.executables[item.executable], item.microbatch) for item in items if isinstance(item, Run)]
        tasks = [Task(e.kind, e.stage, m) for e, m in runs if e.kind in SECONDS]  # type: ignore[arg-type]
        assert tasks == [t for t in schedule.tasks[mesh] if pipeline.stages[t.stage].of(t.kind) is not None]
        kinds = [e.kind for e, _ in runs]
        assert kinds == sorted(kinds, key=lambda k: {"prologue": 0, "update": 2}.get(k, 1))
        for position, item in enumerate(items):
            if (
                isinstance(item, Receive) and program.transfers[item.transfer].microbatch >= 0
            ):  # right before its reader
                run = next(i for i in items[position:] if isinstance(i, Run))
                assert set(program.transfers[item.transfer].received) & set(run.inputs)
    neighbours = Counter((t.source, t.destination) for t in program.transfers if t.microbatch >= 0)
    if kind == "tied" and schedule.num_stages == 2:  # its state and its gradient are sent once
        assert sum(t.microbatch < 0 for t in program.transfers) == 2
    elif kind != "tied":
        stages = schedule.num_stages
        crossings = Counter((schedule.mesh(s), schedule.mesh(s + 1)) for s in range(stages - 1))
        crossings += Counter((schedule.mesh(s + 1), schedule.mesh(s)) for s in range(stages - 1))
        assert neighbours == {link: times * schedule.num_microbatches for link, times in crossings.items()}


@pytest.mark.parametrize("transfer", [0.0, 0.7, 5.0])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_transfers_are_numbered_in_the_order_of_predicted_times(name: str, transfer: float) -> None:
    """As the simulation tells them: what is sent with a lower number comes from a task that starts no later."""
    program = written(schedules.schedule(name, 4, 8), transfer=transfer).program
    events = {(e.mesh, e.name): e for e in simulation.simulate(program).events if e.kind in SECONDS}
    starts = []
    for number, sent in enumerate(program.transfers):
        items = program.lists[sent.source]
        before = items[: items.index(Send(number))]
        run = next(item for item in reversed(before) if isinstance(item, Run))
        if run.microbatch >= 0:
            executable = program.executables[run.executable]
            starts.append(events[sent.source, f"{executable.kind} {run.microbatch}"].start)
    assert len(starts) > 40
    assert starts == sorted(starts)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    """The first stage waits for a gradient before it makes what the gradient is of."""
    good = schedules.schedule("1f1b", 2, 2)
    wrong = Schedule("wrong", 2, 2, 2, (tuple(reversed(good.tasks[0])), good.tasks[1]))
    with pytest.raises(PlanError, match="schedule wrong cannot run this step: its tasks wait for each other"):
        written(wrong)


def test_writing_takes_time_linear_in_the_instructions() -> None:
    """Counted in Python calls: as many for each instruction however many submeshes and micro-batches there are."""

    def calls(meshes: int, count: int) -> float:
        schedule, seen = schedules.schedule("1f1b", meshes, count), 0
        planned(schedule)

        def count_calls(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            seen += event == "call"

        previous = sys.getprofile()
        sys.setprofile(count_calls)
        try:
            program = written(schedule).program
        finally:
            sys.setprofile(previous)
        return seen / sum(map(len, program.lists))

    few = calls(2, 32)
    assert few < 1.3 * calls(2, 8) and calls(4, 32) < 1.3 * few


def test_peak_bytes_fall_with_the_schedule() -> None:
    """GPipe holds every micro-batch, 1F1B as many as there are submeshes."""
    gpipe, one = (peak_bytes(written(schedules.schedule(name, 2, 16)).program) for name in ("gpipe", "1f1b"))
    assert all(a > b for a, b in zip(gpipe, one, strict=True))
