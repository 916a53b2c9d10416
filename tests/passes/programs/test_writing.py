"""Programs of pipelines: lists follow the schedule, transfers their predicted times; and walked with clocks."""

import dataclasses
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.cluster import Cluster, Dispatch, Link
from alpa_lite.errors import PlanError
from alpa_lite.ir import schedules
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.program import Receive, Run, Send, Submesh
from alpa_lite.ir.schedules import Schedule, Task
from alpa_lite.passes.programs import simulation, writing
from alpa_lite.passes.programs.calls import Calls
from alpa_lite.passes.programs.writing import WrittenProgram
from tests import scheduling
from tests.passes.layers.division_cases import driven
from tests.pipeline_driver import Driven
from tests.pipelines import every, toy

SECONDS = {"forward": 1.0, "backward": 2.0, "weight": 1.0}


def planned(schedule: Schedule, kind: str = "plain") -> Driven:
    """Stages that a schedule fits: the program of any number of micro-batches is written from the same."""
    name = "zb-h1" if schedule.splits_backward else "1f1b" if schedule.virtual == 1 else "interleaved-1f1b"
    return driven(kind, schedule.num_meshes, name, schedule.virtual)


def written(schedule: Schedule, kind: str = "plain", transfer: float = 0.0) -> WrittenProgram:
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
        assert tasks == [t for t in schedule.tasks[mesh] if pipeline.stages[t.stage].find(t.kind) is not None]
        kinds = [e.kind for e, _ in runs]
        assert kinds == sorted(kinds, key=lambda k: {"prologue": 0, "update": 2}.get(k, 1))
        for position, item in enumerate(items):
            if (
                isinstance(item, Receive) and program.transfers[item.transfer].microbatch >= 0
            ):  # right before its reader
                run = next(i for i in items[position:] if isinstance(i, Run))
                assert set(program.transfers[item.transfer].received_buffers) & set(run.inputs)
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


quarters = st.integers(1, 16).map(lambda n: n / 4)


@given(st.sampled_from(every()), quarters, quarters, quarters, st.integers(0, 12).map(lambda n: n / 4))
@settings(max_examples=60, deadline=None)
def test_equals_the_simulation_of_the_schedule(
    made: schedules.Schedule, forward: float, backward: float, weight: float, transfer: float
) -> None:
    program = toy(made, forward=forward, backward=backward, weight=weight, transfer=transfer)
    found = simulation.simulate(program)
    expected = scheduling.simulate(made, forward=forward, backward=backward, weight=weight, transfer=transfer)
    kept = [e for e in found.events if e.kind not in ("prologue", "update")]
    assert {dataclasses.replace(e, bytes=0) for e in kept} == set(expected.events)
    assert len(kept) == len(expected.events)
    assert found.seconds == expected.seconds
    assert found.busy_seconds == expected.busy_seconds


def test_prologue_and_update_take_their_time() -> None:
    program = toy(schedules.schedule("gpipe", 2, 3), prologue=10.0, update=5.0)
    timeline = simulation.simulate(program)
    assert timeline.seconds == 10 + (3 + 1) * 3 + 5
    assert timeline.idle_seconds == (3.0, 3.0)
    assert timeline.idle_fraction == (3 / 27, 3 / 27)
    update = next(e for e in timeline.events if e.kind == "update" and e.mesh == 0)
    assert (update.name, update.start, update.end, update.microbatch) == ("stage 0 update", 22.0, 27.0, -1)


def test_transfers_overlap_with_runs_and_say_what_they_carry() -> None:
    program = toy(schedules.schedule("gpipe", 2, 2), transfer=0.25)
    big = tuple(b._replace(bytes=12) if b.name == "value to of stage 0" else b for b in program.buffers)
    timeline = simulation.simulate(dataclasses.replace(program, buffers=big))
    sent = [e for e in timeline.events if e.kind == "transfer" and e.mesh == 0]
    assert [(e.name, e.start, e.end, e.stage, e.destination, e.bytes) for e in sent] == [
        ("forward 0", 1.0, 1.25, 0, 1, 12),
        ("forward 1", 2.0, 2.25, 0, 1, 12),
    ]
    runs = [(e.start, e.end) for e in timeline.events if e.mesh == 0 and e.kind == "forward"]
    assert runs == [(0.0, 1.0), (1.0, 2.0)]


def test_a_transfer_of_an_argument_is_named() -> None:
    program = toy(schedules.schedule("gpipe", 2, 1), transfer=1.0)
    sent = dataclasses.replace(program.transfers[0], sent_buffers=program.inputs[0])
    changed = dataclasses.replace(program, transfers=(sent, *program.transfers[1:]))
    event = next(e for e in simulation.simulate(changed).events if e.kind == "transfer" and e.mesh == 0)
    assert (event.name, event.stage) == ("arguments 0", -1)


def test_instructions_alone_decide() -> None:
    """Two programs that differ in nothing but the place of a receive differ in time."""
    program = toy(schedules.schedule("gpipe", 2, 2), transfer=8.0)
    early = [i for i in program.lists[1] if isinstance(i, Receive)]
    rest = [i for i in program.lists[1] if not isinstance(i, Receive)]
    first = next(n for n, i in enumerate(rest) if isinstance(i, Run) and i.microbatch >= 0)
    changed = dataclasses.replace(program, lists=(program.lists[0], (*rest[:first], *early, *rest[first:])))
    starts = [
        [e.start for e in simulation.simulate(p).events if e.mesh == 1 and e.kind == "forward"]
        for p in (program, changed)
    ]
    assert starts == [[9.0, 17.0], [17.0, 18.0]]


def hosts(dispatch: Dispatch, nodes: int = 1) -> Cluster:
    """Eight devices on this many nodes, each with a process of its own."""
    return Cluster(
        device="x", devices_per_node=8 // nodes, nodes=nodes, memory=2**30, peak_flops={"f32": 1e12},
        memory_bandwidth=1e11, node_link=Link(1e10), network_link=Link(1e9), dispatch=dispatch,
    )  # fmt: skip


def test_one_process_dispatches_one_task_after_the_other() -> None:
    """Tasks that take no time by themselves end when the last has been dispatched; the first is there at zero."""
    program = toy(schedules.schedule("1f1b", 4, 8), forward=0.0, backward=0.0, weight=0.0)
    tasks = sum(isinstance(item, Run | Send) for items in program.lists for item in items)
    timeline = simulation.simulate(program, cluster=hosts(Dispatch(0.5)))
    assert timeline.seconds == 0.5 * (tasks - 1)
    assert simulation.simulate(program).seconds == 0


def test_long_tasks_hide_what_dispatching_takes() -> None:
    """Only the transfer that every other submesh waits for is dispatched while all of them idle."""
    program = toy(schedules.schedule("gpipe", 2, 4), forward=100.0, backward=100.0)
    plain, found = simulation.simulate(program), simulation.simulate(program, cluster=hosts(Dispatch(0.25)))
    assert plain.seconds <= found.seconds <= plain.seconds + 4 * 0.25
    for one, other in zip(plain.events, found.events, strict=True):
        assert other.start >= one.start


def test_each_node_dispatches_its_own_tasks() -> None:
    program = toy(schedules.schedule("gpipe", 8, 4), forward=0.0, backward=0.0, weight=0.0)
    one, two = (simulation.simulate(program, cluster=hosts(Dispatch(1.0), nodes)).seconds for nodes in (1, 2))
    assert one / 2 < two < 0.6 * one


def test_devices_that_take_part_cost_a_dispatch_each() -> None:
    program = toy(schedules.schedule("gpipe", 2, 4), forward=0.0, backward=0.0, weight=0.0)
    wide = tuple(Submesh(LogicalMesh((3,), ("data",)), 3 * number) for number in range(2))
    program = dataclasses.replace(program, submeshes=wide)
    each, whole = (simulation.simulate(program, cluster=hosts(d)).seconds for d in (Dispatch(0.0, 1.0), Dispatch(1.0)))
    assert each == 3 * whole > 0
