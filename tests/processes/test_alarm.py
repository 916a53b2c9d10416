"""A process that raises alone ends the others, which name it."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from alpa_lite.processes.alarm import Alarm, Failed, reasons
from tests.marks import thorough
from tests.processes import driver


def test_who_has_to_end():
    ended = Failed(1, "ValueError: no data", 4, True)
    raised = Failed(1, "ValueError in call 5 of a step", 5, False)
    assert reasons([ended], own=0, begun=0, raised=()) == [ended]
    assert reasons([ended], own=1, begun=4, raised={4}) == [ended]  # its own callback, which it may not have met
    assert reasons([raised], own=0, begun=4, raised=()) == []  # has not come to that call
    assert reasons([raised], own=0, begun=5, raised=()) == [raised]
    assert reasons([raised], own=0, begun=7, raised={5}) == []  # all have raised in it
    assert reasons([raised], own=1, begun=5, raised={5}) == []


class Store:
    """A key-value store like that of JAX's runtime."""

    def __init__(self):
        self.texts = {}

    def key_value_set(self, key, text, allow_overwrite):
        assert allow_overwrite
        self.texts[key] = text

    def key_value_dir_get(self, prefix):
        found = [(key, text) for key, text in self.texts.items() if key.startswith(prefix)]
        if not found:
            raise RuntimeError("NOT_FOUND: nothing there")
        return found


def test_who_is_left_by_an_exception_of_its_own_follows_nobody():
    """Only a process whose error comes after another's, and is another, names that one."""
    here = Alarm()
    here._client = Store()
    assert here._first("ValueError: no data") is None

    def says(process, text, key=""):
        here._client.texts[f"alpa_lite/failed/{process}{key}"] = json.dumps(asdict(Failed(process, text, 1, not key)))

    says(1, "ValueError: no data")
    assert here._first("ValueError: no data") is None  # all are refused for the same reason
    assert here._first("Gloo: connection closed") == Failed(1, "ValueError: no data", 1, True)
    says(2, "the end of its program", "/over")
    for _ in range(2):
        here.turns.call()
    assert here._first("Gloo: connection closed") == Failed(1, "ValueError: no data", 1, True)
    here.ends(KeyError("a callback of its own"))
    assert here._first("XlaRuntimeError: what the devices make of it") is None


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
    """Without the alarm, process 0 waited in a collective until it was killed."""
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
