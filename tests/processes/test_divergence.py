"""A process that plans where the others do not raises, and one that may still come is not reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alpa_lite.errors import ProcessError
from alpa_lite.processes import plan_broadcast
from alpa_lite.processes.channel import Board
from alpa_lite.processes.divergence import CALLS, RETAINED_CALLS, CallLog, ProgramPoint, has_passed
from alpa_lite.processes.failure_propagation import FailureMonitor
from alpa_lite.processes.plan_broadcast import PlanBroadcast
from alpa_lite.runtime.prefetch import Prefetch
from tests.processes.fake_store import Processes


def says_passed(log: CallLog, series: str, number: int) -> bool:
    """Whether a process posts that it has passed a point where another one plans."""
    return has_passed(json.loads(json.dumps(log.to_json())), ProgramPoint(series, number))


def begin(log: CallLog, step: int | None = None, program: str = "") -> ProgramPoint:
    """A call with new arguments, of a program if one is known."""
    call = log.begin_call()
    log.record_new_arguments(call)
    if step is not None:
        log.record_new_arguments(call, step, program)
    return call


def test_a_call_is_passed_once_it_runs_and_does_not_plan():
    log = CallLog()
    for _ in range(3):
        log.begin_call()
    assert not says_passed(log, CALLS, 4)
    assert says_passed(log, *log.begin_call()) and not says_passed(log, *begin(log))


def test_a_batch_is_passed_once_it_is_placed_without_planning():
    log = CallLog()
    series, batch = log.begin_prefetch(), [0]
    log.place_batch(series, 1, lambda item: item, batch)  # comes as it is: it is planned for in its call
    assert not says_passed(log, series, 1)
    within = []
    log.place_batch(series, 2, lambda item: within.append(says_passed(log, series, 2)), batch)
    assert within == [False] and says_passed(log, series, 2)
    log.place_batch(series, 3, lambda item: log.record_planning(), batch)
    assert not says_passed(log, series, 3) and not says_passed(log, series, 4)
    log.end_prefetch(series)
    assert says_passed(log, series, 4) and not says_passed(log, series, 3)
    assert not says_passed(log, log.begin_prefetch(), 1)


def test_another_program_in_the_same_call_is_named_at_the_second_comparison():
    here, there = CallLog(), CallLog()
    for log in (here, there):
        for step, program in ((1, "train, 16"), (2, "evaluate"), (1, "train, 8"), (1, "train, 16")):
            begin(log, step, program)

    def mismatch() -> tuple[int, int] | None:
        here.compare({1: there.to_json()})
        return here.compare({1: there.to_json()})

    assert mismatch() is None
    begin(there, 1, "train, 8")
    assert mismatch() is None  # it has not come to that call
    call = begin(here)
    assert mismatch() is None  # what it runs there is not known yet
    here.record_new_arguments(call, 1, "train, 8")
    assert mismatch() is None
    for log in (here, there):
        log.begin_call()
    call = begin(there, 1, "train, 16")
    here.begin_call()  # as before
    assert here.compare({1: there.to_json()}) is None
    assert here.compare({1: there.to_json()}) == (1, call.number)


def test_the_log_of_many_calls_and_prefetches_is_short():
    log = CallLog()
    for number in range(3 * RETAINED_CALLS):
        begin(log, 1, str(number % 2))
        log.end_prefetch(log.begin_prefetch())
    assert len(str(log.to_json())) < 3000 and says_passed(log, *log.begin_call())


def test_a_process_that_plans_alone_raises(processes: Processes, monkeypatch: pytest.MonkeyPatch):
    """At the second check: the other process may be about to plan at the first."""
    here, there = monitors = FailureMonitor(), FailureMonitor()
    for one in monitors:
        one._board = Board("status")
    assert here.announce_planning() is None
    point = here.call_log.begin_call()
    there.call_log.begin_call()
    monkeypatch.setattr(plan_broadcast, "monitor", here)
    planning = PlanBroadcast("step", shared=True)
    planning.check_peers()
    processes.act_as(1)
    there._compare_calls(Board("status").poll())
    processes.act_as(0)
    planning.check_peers()
    with pytest.raises(ProcessError, match=r"process 1 goes through call 1 of a step as it was planned.*plan step for"):
        planning.check_peers()
    there.call_log.record_new_arguments(point)
    processes.act_as(1)
    there._compare_calls(Board("status").poll())
    processes.act_as(0)
    planning.check_peers()


def test_prefetch_counts_its_batches(monkeypatch):
    """In its own thread, whose points are not those of the calls."""
    monitor = FailureMonitor()
    log: Any = monitor.call_log
    call = log.begin_call()
    monkeypatch.setattr("alpa_lite.runtime.prefetch.monitor", monitor)
    placed = list(Prefetch([1, 2], lambda item: (item, log.record_planning() if item == 2 else None)))
    assert placed == [(1, None), (2, ProgramPoint("prefetch 1", 2))] and log.record_planning() == call
    assert [says_passed(log, "prefetch 1", number) for number in (1, 2, 3)] == [True, False, True]
