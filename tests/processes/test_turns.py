"""A process that plans where the others do not is told so, and no process that may still come is told of."""

from __future__ import annotations

import threading

import pytest

from alpa_lite.errors import ProcessError
from alpa_lite.processes.alarm import Alarm
from alpa_lite.processes.turns import CALLS, KEPT, PLANS, Turn, Turns
from alpa_lite.runtime.prefetch import Prefetch
from tests.processes.test_alarm import Store


def told(turns: Turns, turn: Turn) -> bool:
    """Whether a process tells at its second look that it has passed a turn that another one plans in."""
    words = [(f"{PLANS}1/{turn.series}", str(turn.number))]
    turns.look(0, words)
    return bool(turns.look(0, words))


def test_a_call_is_passed_once_it_runs_and_does_not_plan():
    turns = Turns()
    for _ in range(3):
        turns.call()
    assert not told(turns, Turn(CALLS, 4))
    call = turns.call()
    assert not turns.look(0, [(f"{PLANS}1/{CALLS}", "4")])  # it may be about to plan, too
    assert told(turns, call)
    assert not turns.look(1, [(f"{PLANS}1/{CALLS}", "4")])  # what it plans itself
    turns.is_new(call)
    assert not told(turns, call)


def test_a_batch_is_passed_once_it_is_placed_without_planning():
    turns = Turns()
    series, batch = turns.prefetch(), [0]
    turns.batch(series, 1, lambda item: item, batch)  # comes as it is: it is planned for in its call
    assert not told(turns, Turn(series, 1))
    within = []
    turns.batch(series, 2, lambda item: within.append(told(turns, Turn(series, 2))), batch)
    assert within == [False] and told(turns, Turn(series, 2))
    turns.batch(series, 3, lambda item: turns.plans(), batch)
    assert not told(turns, Turn(series, 3)) and not told(turns, Turn(series, 4))
    turns.over(series)
    assert told(turns, Turn(series, 4)) and not told(turns, Turn(series, 3))
    assert not told(turns, Turn(turns.prefetch(), 1))


def test_who_ran_another_program_in_the_same_call_is_named_at_the_second_look():
    here, there = Turns(), Turns()
    for turns in (here, there):
        for step, program in ((1, "train, 16"), (2, "evaluate"), (1, "train, 8"), (1, "train, 16")):
            call = turns.call()
            turns.is_new(call)
            turns.runs(call, step, program)

    def looks() -> tuple[int, int] | None:
        words = there.programs(1)
        assert words is not None
        there._told = []
        here.unlike(0, [words])
        return here.unlike(0, [words])

    assert looks() is None
    turn = there.call()
    there.is_new(turn)
    there.runs(turn, 1, "train, 8")
    assert looks() is None  # it has not come to that call
    turn = here.call()
    here.is_new(turn)
    assert looks() is None  # what it runs there is not known yet
    here.runs(turn, 1, "train, 8")
    assert looks() is None
    for turns in (here, there):
        turns.call()
    turn = there.call()
    there.is_new(turn)
    there.runs(turn, 1, "train, 16")
    here.call()  # as before
    assert looks() == (1, turn.number)
    assert there.programs(1) is not None and there.programs(1) is None  # told once


def test_little_is_kept_of_many_calls():
    turns = Turns()
    for number in range(3 * KEPT):
        turn = turns.call()
        turns.is_new(turn)
        turns.runs(turn, 1, str(number % 2))
    turns.look(0, [])
    assert len(turns._planned) <= KEPT and len(turns._programs[1]) <= KEPT and not turns._changing
    assert turns._program(1, 3 * KEPT) == "1" and turns._program(1, 1) is None


def test_threads_are_in_turns_of_their_own():
    turns = Turns()
    call = turns.call()
    found = []
    thread = threading.Thread(target=lambda: turns.batch("prefetch 1", 7, lambda _: found.append(turns.plans()), None))
    thread.start()
    thread.join()
    assert found == [Turn("prefetch 1", 7)] and turns.plans() == call
    turns.leave()
    assert turns.plans() is None  # `step.plan`, between calls


def test_who_plans_alone_raises():
    """The other one's number stands for it: both are process 0 of their own."""
    here, there = Alarm(), Alarm()
    here._client = there._client = Store()
    assert here.plans() is None and not here._client.texts
    turn = here.turns.call()
    there.turns.call()
    assert here.plans() == turn
    for _ in range(2):
        here.check_others_plan(turn, "step")
        for words in there.turns.look(1, there._said(PLANS)):
            there._put(*words)
    with pytest.raises(ProcessError, match=r"process 1 goes through call 1 of a step as it was planned.*plan step for"):
        here.check_others_plan(turn, "step")


def test_prefetch_counts_its_batches(monkeypatch):
    alarm = Alarm()
    monkeypatch.setattr("alpa_lite.runtime.prefetch.alarm", alarm)
    assert list(Prefetch([1, 2], lambda item: (item, alarm.plans() if item == 2 else None))) == [
        (1, None), (2, Turn("prefetch 1", 2))
    ]  # fmt: skip
    assert told(alarm.turns, Turn("prefetch 1", 1)) and not told(alarm.turns, Turn("prefetch 1", 2))
    assert told(alarm.turns, Turn("prefetch 1", 3))
