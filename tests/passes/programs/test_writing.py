"""Programs of pipelines: lists follow the schedule, transfers the order of their predicted times; buffers end."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import Any

import pytest

from alpa_lite.errors import PlanError
from alpa_lite.ir import program as programs
from alpa_lite.ir import schedules
from alpa_lite.ir.program import Receive, Run, Send
from alpa_lite.ir.schedules import Schedule, Task
from alpa_lite.passes.programs import simulation, writing
from alpa_lite.passes.programs.writing import Written
from tests.passes.layers.division_cases import driven
from tests.pipeline_driver import Driven

SECONDS = {"forward": 1.0, "backward": 2.0, "weight": 1.0}


def planned(schedule: Schedule, kind: str = "plain") -> Driven:
    """Stages that a schedule fits: the program of any number of micro-batches is written from the same."""
    name = "zb-h1" if schedule.splits_backward else "1f1b" if schedule.virtual == 1 else "interleaved-1f1b"
    return driven(kind, schedule.num_meshes, name, schedule.virtual)


def written(schedule: Schedule, kind: str = "plain", transfer: float = 0.0, **options: Any) -> Written:
    stages = planned(schedule, kind)
    return writing.build(
        stages.staged.accumulated.traced,
        [stage.segments for stage in stages.stages],
        stages.pipeline.program.submeshes,
        schedule,
        donated=options.pop("donated", [argument for _, argument in stages.staged.traced.state]),
        segment_seconds=lambda _, segment: SECONDS.get(segment.kind, 0.0),
        transfer_seconds=lambda *_: transfer,
    )


MANY = [
    schedules.schedule(name, meshes, count, virtual=virtual)
    for name in schedules.NAMES
    for meshes in (2, 4)
    for count in (1, 2, 4, 8)
    for virtual in ((2,) if name == "interleaved-1f1b" else (1,))
    if (name != "interleaved-1f1b" or count % meshes == 0) and meshes * virtual <= 4
]


@pytest.mark.parametrize("kind", ["plain", "tied", "norm"])
@pytest.mark.parametrize("schedule", MANY, ids=lambda s: f"{s.name}-{s.num_meshes}x{s.virtual}-{s.num_microbatches}")
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
    neighbours = Counter((t.source, t.destination) for t in program.transfers if t.microbatch >= 0)
    if kind != "tied":
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


def test_a_receive_stands_right_before_its_reader() -> None:
    program = written(schedules.schedule("1f1b", 4, 4)).program
    for items in program.lists:
        for position, item in enumerate(items):
            if isinstance(item, Receive):
                run = next(i for i in items[position:] if isinstance(i, Run))
                assert set(program.transfers[item.transfer].received) & set(run.inputs)


def test_updates_consume_the_state_that_may_be_consumed() -> None:
    schedule = schedules.schedule("1f1b", 2, 2)
    stages = planned(schedule).staged
    state = [argument for _, argument in stages.traced.state]
    for donated in (state, state[:1], []):
        program = written(schedule, donated=donated).program
        runs = [item for items in program.lists for item in items if isinstance(item, Run)]
        consumed = {b for run in runs for b in program.consumed(run)}
        given = {b for group in program.inputs for b in group}
        assert consumed & given == {b for argument in donated for b in program.inputs[argument]}


def test_tied_state_is_sent_once_and_its_gradient_once() -> None:
    program = written(schedules.schedule("1f1b", 2, 4), "tied").program
    once = [t for t in program.transfers if t.microbatch < 0]
    assert len(once) == 2
    assert {(t.source, t.destination) for t in once} in ({(0, 1), (1, 0)}, {(1, 0)}, {(0, 1)})


def test_a_schedule_that_cannot_run_is_refused() -> None:
    """The first stage waits for a gradient before it makes what the gradient is of."""
    good = schedules.schedule("1f1b", 2, 2)
    wrong = Schedule("wrong", 2, 2, 2, (tuple(reversed(good.tasks[0])), good.tasks[1]))
    with pytest.raises(PlanError, match="schedule wrong cannot run this step: its tasks wait for each other"):
        written(wrong)


def test_writing_takes_time_linear_in_the_instructions() -> None:
    """Counted in Python calls: as many for each instruction however many submeshes and micro-batches there are."""

    @functools.cache
    def calls(meshes: int, count: int) -> float:
        schedule = schedules.schedule("1f1b", meshes, count)
        planned(schedule)
        number = 0

        def count_calls(frame: Any, event: str, argument: Any) -> None:
            nonlocal number
            number += event == "call"

        previous = sys.getprofile()
        sys.setprofile(count_calls)
        try:
            program = written(schedule).program
        finally:
            sys.setprofile(previous)
        return number / sum(map(len, program.lists))

    assert calls(2, 64) < 1.3 * calls(2, 8)
    assert calls(8, 64) < 1.3 * calls(2, 64)


def test_peak_bytes_fall_with_the_schedule() -> None:
    """GPipe holds every micro-batch, 1F1B as many as there are submeshes."""
    gpipe, one = (
        programs.peak_bytes(written(schedules.schedule(name, 2, 16)).program) for name in ("gpipe", "1f1b")
    )  # fmt: skip
    assert all(a > b for a, b in zip(gpipe, one, strict=True))
