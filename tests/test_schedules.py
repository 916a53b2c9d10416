"""Schedules by their properties: complete, in order, without deadlock, holding and idling as much as published."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import OptionError, PlanError
from alpa_lite.ir import schedules
from alpa_lite.ir.schedules import Schedule, Task
from alpa_lite.ir.timeline import Timeline
from tests import scheduling
from tests.marks import only

MOST_MESHES, MOST_MICROBATCHES = 16, 64
SOME = (1, 2, 3, 4, 8, 15, 32)
VARIANTS = [(name, 1) for name in schedules.NAMES] + [("interleaved-1f1b", v) for v in (2, 3, 4)]
UNIFORM = {"forward": 1.0, "backward": 1.0, "weight": 1.0}


def exists(name: str, meshes: int, microbatches: int) -> bool:
    return name != "interleaved-1f1b" or microbatches % meshes == 0


def ends(timeline: Timeline) -> dict[tuple[str, int, int], tuple[float, float]]:
    return {(e.kind, e.stage, e.microbatch): (e.start, e.end) for e in timeline.events if e.kind != "transfer"}


def bubble(case: tuple[str, int, int, int], forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> float:
    """The published formula."""
    name, _, meshes, microbatches = case
    times = {"forward": forward, "backward_input": backward, "backward_weight": weight}
    return schedules.STRATEGIES[name].bubble(meshes, microbatches, **times)


def holds(name: str, virtual: int, meshes: int, microbatches: int) -> None:
    """A schedule is complete, holds as much and idles as long as published."""
    made = schedules.schedule(name, meshes, microbatches, virtual=virtual)
    assert (made.num_stages, made.virtual, len(made.tasks)) == (meshes * virtual, virtual, meshes)
    scheduling.check(made)
    formula = tuple(schedules.STRATEGIES[name].in_flight(meshes, microbatches, m, virtual) for m in range(meshes))
    assert scheduling.in_flight(made) == formula
    timeline = scheduling.simulate(made, **UNIFORM)
    assert timeline.idle_seconds == (bubble((name, virtual, meshes, microbatches)),) * meshes  # small integers: exact


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_all_meshes_some_microbatches(name: str, virtual: int) -> None:
    for meshes in range(1, MOST_MESHES + 1):
        for microbatches in (n for n in SOME if exists(name, meshes, n)):
            holds(name, virtual, meshes, microbatches)


OFTEN = (("zb-h1", 1), ("interleaved-1f1b", 3))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "virtual"), only(OFTEN, VARIANTS))
def test_all_meshes_all_microbatches(name: str, virtual: int) -> None:
    for meshes in range(1, MOST_MESHES + 1):
        for microbatches in (n for n in range(1, MOST_MICROBATCHES + 1) if exists(name, meshes, n)):
            holds(name, virtual, meshes, microbatches)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name, virtual = draw(st.sampled_from(VARIANTS))
    meshes = draw(st.integers(1, MOST_MESHES))
    if name == "interleaved-1f1b":
        microbatches = meshes * draw(st.integers(1, MOST_MICROBATCHES // meshes))
    else:
        microbatches = draw(st.integers(1, MOST_MICROBATCHES))
    return name, virtual, meshes, microbatches


# Quarters: sums are exact, so times can be compared with ==.
quarters = st.integers(1, 16).map(lambda n: n / 4)


@given(cases(), quarters, quarters, quarters)
@settings(max_examples=60, deadline=None)
def test_bubble_of_any_durations(
    case: tuple[str, int, int, int], forward: float, backward: float, weight: float
) -> None:
    name, virtual, meshes, microbatches = case
    if name == "zb-h1":  # the formula's own condition
        weight = min(weight, forward, backward)
    made = schedules.schedule(name, meshes, microbatches, virtual=virtual)
    timeline = scheduling.simulate(made, forward=forward, backward=backward, weight=weight)
    assert timeline.idle_seconds == (bubble(case, forward, backward, weight),) * meshes
    assert timeline.busy_seconds == (virtual * microbatches * (forward + backward + weight),) * meshes


@given(st.data(), cases())
@settings(max_examples=30, deadline=None)
def test_dependencies_hold_in_the_simulation(data: st.DataObject, case: tuple[str, int, int, int]) -> None:
    name, virtual, meshes, microbatches = case
    made = schedules.schedule(name, meshes, microbatches, virtual=virtual)
    stages = made.num_stages
    several = st.lists(quarters, min_size=stages, max_size=stages)
    forward, backward, weight = (data.draw(several) for _ in range(3))
    transfer = data.draw(st.lists(quarters, min_size=stages - 1, max_size=stages - 1))
    timeline = scheduling.simulate(made, forward=forward, backward=backward, weight=weight, transfer=transfer)
    at = ends(timeline)
    for stage in range(stages):
        for m in range(microbatches):
            start, end = at["forward", stage, m]
            assert end - start == forward[stage]
            if stage:
                between = transfer[stage - 1] if meshes > 1 else 0.0
                assert start >= at["forward", stage - 1, m][1] + between
            start, end = at["backward", stage, m]
            assert start >= at["forward", stage, m][1]
            if stage < stages - 1:
                between = transfer[stage] if meshes > 1 else 0.0
                assert start >= at["backward", stage + 1, m][1] + between
            if made.splits_backward:
                assert end - start == backward[stage]
                assert at["weight", stage, m][0] >= end
            else:
                assert end - start == backward[stage] + weight[stage]
    for mesh in range(meshes):
        ran = sorted((e.start, e.end) for e in timeline.events if e.mesh == mesh and e.kind != "transfer")
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ran))
        for other in range(meshes):
            sent = sorted((e.start, e.end) for e in timeline.events if (e.mesh, e.destination) == (mesh, other))
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(sent))


def listed(tasks: tuple[Task, ...]) -> str:
    letters = {"forward": "F", "backward": "B", "weight": "W"}
    return " ".join(f"{letters[t.kind]}{t.microbatch}" for t in tasks)


def test_lists_by_hand() -> None:
    made = schedules.schedule("1f1b", 3, 4)
    assert [listed(t) for t in made.tasks] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    made = schedules.schedule("eager-1f1b", 3, 6)
    assert listed(made.tasks[0]) == "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5"
    assert listed(made.tasks[1]) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    made = schedules.schedule("gpipe", 2, 3)
    assert [listed(t) for t in made.tasks] == ["F0 F1 F2 B0 B1 B2"] * 2
    made = schedules.schedule("zb-h1", 3, 4)
    assert [listed(t) for t in made.tasks] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    made = schedules.schedule("interleaved-1f1b", 2, 2, virtual=2)
    listing = " ".join(f"{t.kind[0]}{t.stage}.{t.microbatch}" for t in made.tasks[1])
    assert listing == "f1.0 f1.1 f3.0 b3.0 f3.1 b3.1 b1.0 b1.1"


@pytest.mark.parametrize("name", schedules.NAMES)
def test_one_mesh_and_one_microbatch(name: str) -> None:
    made = schedules.schedule(name, 1, 1)
    scheduling.check(made)
    assert scheduling.in_flight(made) == (1,)
    timeline = scheduling.simulate(made, forward=1.0, backward=2.0, weight=0.5, transfer=9.0)
    assert timeline.seconds == 3.5
    assert timeline.idle_fraction == (0.0,)
    if name != "interleaved-1f1b":
        scheduling.check(schedules.schedule(name, 5, 1))


def test_gradients_are_summed_in_one_order() -> None:
    for name, virtual in VARIANTS:
        made = schedules.schedule(name, 4, 8, virtual=virtual)
        for stage in range(made.num_stages):
            for kind in ("forward", "backward", "weight"):
                order = [t.microbatch for t in made.tasks[stage % 4] if (t.kind, t.stage) == (kind, stage)]
                assert order == sorted(order)


def test_zb_h1_holds_no_more_than_1f1b_does_and_idles_a_third() -> None:
    plain, split = schedules.schedule("1f1b", 4, 12), schedules.schedule("zb-h1", 4, 12)
    assert max(scheduling.in_flight(split)) == max(scheduling.in_flight(plain)) == 4
    assert (
        scheduling.simulate(split, **UNIFORM).idle_seconds[0] * 3
        == scheduling.simulate(plain, **UNIFORM).idle_seconds[0]
    )


def test_eager_hides_transfers_that_1f1b_waits_for() -> None:
    times = {"forward": 1.0, "backward": 2.0, "transfer": 0.5}
    plain = scheduling.simulate(schedules.schedule("1f1b", 4, 32), **times)
    eager = scheduling.simulate(schedules.schedule("eager-1f1b", 4, 32), **times)
    free = scheduling.simulate(schedules.schedule("eager-1f1b", 4, 32), forward=1.0, backward=2.0)
    # Filling and draining the pipeline cost three hops each way; all between is hidden.
    assert eager.seconds == free.seconds + 6 * 0.5
    assert plain.seconds > eager.seconds + 10 * 0.5


def test_transfers_of_one_link_take_turns() -> None:
    timeline = scheduling.simulate(schedules.schedule("gpipe", 2, 3), forward=1.0, backward=1.0, transfer=4.0)
    there = [e for e in timeline.events if e.kind == "transfer" and e.mesh == 0]
    assert [(e.start, e.end, e.destination) for e in there] == [(1.0, 5.0, 1), (5.0, 9.0, 1), (9.0, 13.0, 1)]
    assert timeline.busy_seconds == (6.0, 6.0)


def test_interleaving_divides_the_bubble() -> None:
    for virtual in (1, 2, 4):
        made = schedules.schedule("interleaved-1f1b", 4, 8, virtual=virtual)
        timeline = scheduling.simulate(made, forward=4.0 / virtual, backward=8.0 / virtual)
        assert timeline.idle_seconds == (3 * 12.0 / virtual,) * 4


@pytest.mark.parametrize(("name", "virtual"), [case for case in VARIANTS if case[0] != "zb-h1"])
def test_slices_of_the_sequence(name: str, virtual: int) -> None:
    """Every task is there once for each slice, none waits forever, and submeshes idle for slices, not micro-batches."""
    for meshes, microbatches, slices in ((1, 2, 3), (2, 2, 4), (3, 6, 2), (4, 4, 8), (2, 1, 3)):
        if exists(name, meshes, microbatches):
            made = schedules.schedule(name, meshes, microbatches, virtual=virtual, slices=slices)
            scheduling.check(made)
            timeline = scheduling.simulate(made, **UNIFORM)
            assert timeline.idle_seconds == (bubble((name, virtual, meshes, microbatches)),) * meshes
            names = {(e.stage, e.name) for e in timeline.events}
            assert len(names) == 2 * made.num_stages * microbatches * slices


def test_check_finds_slices_in_the_wrong_order() -> None:
    made = schedules.schedule("gpipe", 2, 1, slices=3)
    tasks = made.tasks[1]
    with pytest.raises(PlanError, match=r"missing, such as .*slice=0"):
        scheduling.check(changed(made, 1, tasks[:-1]))
    with pytest.raises(PlanError, match="wait for each other"):
        scheduling.check(changed(made, 1, (*tasks[:3], *reversed(tasks[3:]))))
    with pytest.raises(PlanError, match="wait for each other"):
        scheduling.check(changed(made, 1, (tasks[1], tasks[0], *tasks[2:])))


def changed(made: Schedule, mesh: int, tasks: tuple[Task, ...]) -> Schedule:
    return dataclasses.replace(made, tasks=(*made.tasks[:mesh], tasks, *made.tasks[mesh + 1 :]))


def test_check_finds_what_is_wrong() -> None:
    made = schedules.schedule("1f1b", 2, 3)
    first = made.tasks[0]
    with pytest.raises(PlanError, match=r"missing, such as Task.kind='backward', stage=0, microbatch=2"):
        scheduling.check(changed(made, 0, first[:-1]))
    with pytest.raises(PlanError, match="occurs twice"):
        scheduling.check(changed(made, 0, (*first, first[0])))
    with pytest.raises(PlanError, match="does not belong on submesh 0"):
        scheduling.check(changed(made, 0, made.tasks[1]))
    late = changed(made, 0, (*first[1:], first[0]))
    with pytest.raises(PlanError, match=r"wait for each other: submesh 0 at .*submesh 1 at "):
        scheduling.check(late)
    with pytest.raises(PlanError, match="wait for each other"):
        scheduling.simulate(late, forward=1.0, backward=1.0)


@pytest.mark.parametrize(
    ("arguments", "virtual", "message"),
    [
        (("gpip", 2, 4), 1, "schedule='gpip' does not exist; give one of 'gpipe'"),
        (("gpipe", 0, 4), 1, "num_meshes=0 .*give at least 1"),
        (("gpipe", 2, 0), 1, "num_microbatches=0"),
        (("gpipe", 2, 1.5), 1, "num_microbatches=1.5"),
        (("1f1b", 2, 4), 2, "virtual=2: schedule '1f1b' has one stage for each submesh; give virtual=1"),
        (("interleaved-1f1b", 4, 6), 2, "num_microbatches=6 is not divisible by the 4 submeshes.*give 4 or 8"),
        (("interleaved-1f1b", 4, 3), 1, "num_microbatches=3 .*give 4 micro-batches"),
    ],
)
def test_refused(arguments: tuple, virtual: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        schedules.schedule(*arguments, virtual=virtual)


def test_durations_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match="forward has 3 entries, and 2 are needed"):
        scheduling.simulate(schedules.schedule("gpipe", 2, 2), forward=[1.0] * 3, backward=1.0)
