"""A process that raises alone ends the others, which name it."""

from __future__ import annotations

import atexit
import sys
import threading

import pytest

from alpa_lite.processes import effects, failure_propagation
from alpa_lite.processes.channel import Board
from alpa_lite.processes.failure_propagation import Failure, FailureMonitor
from tests.marks import thorough
from tests.processes import driver
from tests.processes.fake_store import Processes


def test_who_has_to_end():
    ended = Failure(1, "ValueError: no data", 4, True)
    raised = Failure(1, "ValueError in call 5 of a step", 5, False)
    assert ended.forces_end(own=0, begun=0, raised=())
    assert ended.forces_end(own=1, begun=4, raised={4})  # its own callback, which it may not have met
    assert not raised.forces_end(own=0, begun=4, raised=())  # has not come to that call
    assert raised.forces_end(own=0, begun=5, raised=())
    assert not raised.forces_end(own=0, begun=7, raised={5})  # all have raised in it
    assert not raised.forces_end(own=1, begun=5, raised={5})


def test_who_is_left_by_an_exception_of_its_own_follows_nobody(processes: Processes):
    """Only a process whose error comes after another's, and is another, names that one."""
    monitors = [FailureMonitor() for _ in range(processes.count)]
    for one in monitors:
        one._board = Board("status")
    here = monitors[0]
    assert here._find_predecessor("ValueError: no data") is None
    processes.act_as(1)
    monitors[1].report_end(ValueError("no data"))
    processes.act_as(0)
    failed = Failure(1, "ValueError: no data", 0, True)
    assert here._find_predecessor("ValueError: no data") is None  # all are refused for the same reason
    assert here._find_predecessor("Gloo: connection closed") == failed
    processes.act_as(2)
    monitors[2]._post(over=Failure(2, "the end of its program", 1, False))
    processes.act_as(0)
    for _ in range(2):
        here.call_log.begin_call()
    assert here._find_predecessor("Gloo: connection closed") == failed
    here.report_end(KeyError("a callback of its own"))
    assert here._find_predecessor("XlaRuntimeError: what the devices make of it") is None


@pytest.mark.parametrize("declined", ["", "excepthook", "atexit", "exit", "all"])
def test_each_effect_on_the_process_can_be_declined(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, declined: str
):
    monkeypatch.setenv(effects.DECLINE_VARIABLE, declined)
    monkeypatch.setattr(failure_propagation, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(failure_propagation, "GRACE_SECONDS", 0.02)
    hook, codes, registered, ended = sys.excepthook, [], [], threading.Event()
    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(atexit, "register", lambda function, *_: registered.append(function))
    monkeypatch.setattr(effects, "exit_process", lambda code, _: codes.append(code))
    monkeypatch.setattr(failure_propagation, "_log_end", lambda *_: ended.set())
    one = FailureMonitor()
    one.start()
    assert (sys.excepthook is hook) == (declined in ("excepthook", "all"))
    assert (not registered) == (declined in ("atexit", "all"))
    processes.act_as(1)
    other = FailureMonitor()
    other._board = Board("status")
    other.report_end(ValueError("no data"))
    assert ended.wait(timeout=60)
    for thread in threading.enumerate():
        if thread.name == "alpa_lite failure monitor":
            thread.join(timeout=60)
    assert codes == [] if declined in ("exit", "all") else codes == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "method", "processes", "said"),
    [
        ("callback", "pipeline", 2, "a callback raised ValueError: the last layer is not well"),
        ("loader", "one mesh", 2, "after ValueError: the file is not there"),
        ("shapes", "pipeline", 2, "has to plan step for other arguments there"),
        thorough(("shapes", "one mesh", 4, "has to plan step for other arguments there")),
        ("switch", "one mesh", 2, "run call 6 of a step as planned for other arguments"),
        thorough(("prefetch", "pipeline", 2, "has to plan step for other arguments there")),
        ("prefetch", "one mesh", 4, "has to plan step for other arguments there"),
        ("gone", "pipeline", 2, "after ValueError: the first to fail"),
        ("fewer", "one mesh", 2, "after the end of its program, which made 3 calls of steps"),
    ],
)
def test_what_one_process_does_alone_ends_the_others(what, method, processes, said):
    """Without failure propagation, process 0 waited in a collective until it was killed."""
    ended = driver.run("raising.py", processes, 1, what, method)
    for one in ended:
        assert "caught" in one.text and "goes on True" in one.text, one.text  # what all raise ends none
        assert "not ended" not in one.text, one.text
        assert one.code not in (0, 3, None), one.text
    first, second = ended[:2]
    assert first.code == 1, first.text
    assert "process 0 ends, for process 1 does not go on with it" in first.text and said in first.text, first.text
    turn = {"shapes": "call 4 of a step", "prefetch": "batch 4 of prefetch 1"}.get(what)
    if turn is not None:
        assert f" goes through {turn} as it was planned before, and process 1 has to plan" in second.text, second.text
